//! The verb `query`: probe, decode, pool and concatenate in one pass, straight into the dense network's
//! input. Bags with a missing row stop at it and are completed by `finish` once their rows were fetched; a
//! bag's rows are always added in key order, so the bits do not depend on what was cached.

use crate::cache::{Cache, Epoch, Seen};
use crate::codec::RowFormat;
use crate::isa::Isa;
use crate::misses::{Misses, OpenBag, RowState};
use crate::names::{Name, Namer, RowKey};
use crate::resident::Resident;
use crate::simd::{Job, Simd, dispatch};
use serde::{Deserialize, Serialize};

/// How the rows of a bag become one vector. An empty bag is all zeros under each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The sum of the rows, from zero, in key order.
    Sum,
    /// The sum divided by the number of keys.
    Mean,
    /// The rows side by side, `hotness_max` of them, zeros where the bag is shorter.
    None,
}

/// Where a feature's rows are looked for.
pub enum Rows<'a> {
    /// In the embedding cache; what is not there is a miss.
    Cached(&'a Cache),
    /// In a resident table; what is not there is absent.
    Resident(&'a Resident),
}

/// One sparse feature as the kernel sees it.
pub struct Feature<'a> {
    /// The feature's number, handed back in every open bag.
    pub id: u16,
    /// The table's number.
    pub table: u16,
    /// The table's rows as bytes.
    pub format: RowFormat,
    /// Keys from here up are absent (index tables).
    pub keys_end: Option<u64>,
    /// The row that answers for a key that is absent, damaged or late, `[dim]`.
    pub default_row: &'a [f32],
    /// How a bag becomes a vector.
    pub pooling: Pooling,
    /// Where to look.
    pub rows: Rows<'a>,
    /// First column of the feature in its network input.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// A feature's keys in the jagged layout: sample `s` has `keys[offsets[s]..offsets[s + 1]]`.
#[derive(Clone, Copy)]
pub struct Bags<'a> {
    /// All keys, `[offsets[batch]]`.
    pub keys: &'a [u64],
    /// Where each sample's keys begin, `[batch + 1]`.
    pub offsets: &'a [u32],
}

/// A network input, `[batch, stride]`, row by row.
pub struct Input<'a> {
    /// The values.
    pub data: &'a mut [f32],
    /// Columns of the whole input.
    pub stride: usize,
}

/// What the rows of one sample were. Every lookup is counted once, in exactly one of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Lookups answered with the live generation's own row.
    pub fresh: u32,
    /// Lookups answered with the default row because the miss policy or the deadline did not wait.
    pub defaulted: u32,
    /// Lookups of keys that the model does not have, answered with the default row.
    pub absent: u32,
    /// Lookups of rows whose flash page failed its check, answered with the default row.
    pub damaged: u32,
    /// Whether the deadline cut fetches short.
    pub late: bool,
}

impl Status {
    /// Adds another sample's counts.
    pub fn add(&mut self, other: &Status) {
        self.fresh += other.fresh;
        self.defaulted += other.defaulted;
        self.absent += other.absent;
        self.damaged += other.damaged;
        self.late |= other.late;
    }

    /// All lookups.
    pub fn lookups(&self) -> u64 {
        [self.fresh, self.defaulted, self.absent, self.damaged].map(u64::from).iter().sum()
    }

    pub(crate) fn count(&mut self, state: RowState) {
        match state {
            RowState::Fresh => self.fresh += 1,
            RowState::Pending => self.defaulted += 1,
            RowState::Late => {
                self.defaulted += 1;
                self.late = true;
            }
            RowState::Absent => self.absent += 1,
            RowState::Damaged => self.damaged += 1,
        }
    }
}

impl Feature<'_> {
    /// Pools samples `from..` into `input`; rows that miss go to `misses`. Returns the number of samples
    /// done: fewer than the batch when `misses` has no room for the next bag. The caller then fetches,
    /// calls [`Feature::finish`] on every open bag, clears the list and calls again.
    pub fn query(
        &self,
        isa: Isa,
        bags: Bags<'_>,
        from: usize,
        input: &mut Input<'_>,
        misses: &mut Misses,
        statuses: &mut [Status],
    ) -> usize {
        dispatch(isa, Query { feature: self, bags, from, input, misses, statuses })
    }

    #[inline(always)]
    fn columns<'o>(&self, input: &'o mut Input<'_>, sample: usize) -> &'o mut [f32] {
        let start = sample * input.stride + self.column;
        &mut input.data[start..start + self.width]
    }

    /// The columns that the row at `position` of its bag goes to, and whether it is the first to go there.
    #[inline(always)]
    fn place<'o>(&self, position: usize, out: &'o mut [f32]) -> (&'o mut [f32], bool) {
        let dim = self.format.dim();
        match self.pooling {
            Pooling::None => (&mut out[position * dim..(position + 1) * dim], true),
            Pooling::Sum | Pooling::Mean => (out, position == 0),
        }
    }

    #[inline(always)]
    fn add_row<S: Simd>(&self, bytes: &[u8], position: usize, out: &mut [f32]) {
        let (out, first) = self.place(position, out);
        self.format.accumulate::<S>(bytes, out, first);
    }

    fn add_default(&self, position: usize, out: &mut [f32]) {
        let (out, first) = self.place(position, out);
        out.iter_mut().zip(self.default_row).for_each(|(o, v)| *o = if first { 0.0 } else { *o } + v);
    }

    /// Completes the columns of a bag whose `keys` rows are all added.
    #[inline(always)]
    fn close(&self, keys: usize, out: &mut [f32]) {
        match self.pooling {
            Pooling::Mean if keys > 1 => out.iter_mut().for_each(|o| *o /= keys as f32),
            Pooling::None => out[keys * self.format.dim()..].fill(0.0),
            _ if keys == 0 => out.fill(0.0),
            _ => {}
        }
    }

    /// Pools the rest of an open bag of this feature from the staged rows.
    pub fn finish(
        &self,
        isa: Isa,
        bag: &OpenBag,
        misses: &Misses,
        input: &mut Input<'_>,
        statuses: &mut [Status],
    ) {
        dispatch(
            isa,
            Finish { feature: self, bag, misses, input, status: &mut statuses[bag.sample as usize] },
        );
    }
}

/// The query of one feature over a batch.
struct Query<'a, 'd> {
    feature: &'a Feature<'a>,
    bags: Bags<'a>,
    from: usize,
    input: &'a mut Input<'d>,
    misses: &'a mut Misses,
    statuses: &'a mut [Status],
}

impl Job for Query<'_, '_> {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self) -> usize {
        let Feature { rows, table, keys_end, .. } = self.feature;
        let keys = &self.bags.keys[..self.bags.offsets[self.statuses.len()] as usize];
        let start = self.bags.offsets[self.from] as usize;
        match rows {
            Rows::Resident(table) => self.pool::<S, _>(Whole { table, keys }),
            Rows::Cached(cache) => self.pool::<S, _>(Ahead {
                cache,
                namer: cache.namer(*table),
                keys_end: *keys_end,
                keys,
                named: start,
                looked: start,
                ring: [Seen::default(); RING],
            }),
        }
    }
}

impl Query<'_, '_> {
    /// Bag by bag: adds the rows that `found` gives; from a bag's first missing row on, notes what it needs.
    #[inline(always)]
    fn pool<S: Simd, R: FindRow>(self, mut found: R) -> usize {
        let feature = self.feature;
        let mut buffer = self.misses.take_buffer();
        let mut done = self.statuses.len();
        for sample in self.from..self.statuses.len() {
            let bag = self.bags.offsets[sample] as usize..self.bags.offsets[sample + 1] as usize;
            if !self.misses.has_room(bag.len()) {
                done = sample;
                break;
            }
            let out = feature.columns(self.input, sample);
            let (mut fresh, mut absent, mut missing) = (0, 0, None);
            for (position, at) in bag.clone().enumerate() {
                match found.row::<S>(at, &mut buffer) {
                    Found::Row(bytes) => {
                        feature.add_row::<S>(bytes, position, out);
                        fresh += 1;
                    }
                    Found::Absent => {
                        feature.add_default(position, out);
                        absent += 1;
                    }
                    Found::Miss => {
                        missing = Some(position);
                        break;
                    }
                }
            }
            self.statuses[sample].fresh += fresh;
            self.statuses[sample].absent += absent;
            match missing {
                None => feature.close(bag.len(), out),
                Some(position) => {
                    self.misses.open(feature.id, sample, position);
                    for at in bag.start + position..bag.end {
                        match found.row::<S>(at, &mut buffer) {
                            Found::Row(bytes) => self.misses.keep(&bytes[..feature.format.row_bytes()]),
                            Found::Absent => self.misses.absent(),
                            Found::Miss => {
                                let row = RowKey { table: feature.table, key: self.bags.keys[at] };
                                self.misses.miss(row, found.epoch(row));
                            }
                        }
                    }
                }
            }
        }
        self.misses.give_buffer(buffer);
        done
    }
}

/// The rest of one bag.
struct Finish<'a, 'd> {
    feature: &'a Feature<'a>,
    bag: &'a OpenBag,
    misses: &'a Misses,
    input: &'a mut Input<'d>,
    status: &'a mut Status,
}

impl Job for Finish<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { feature, bag, misses, input, status } = self;
        let out = feature.columns(input, bag.sample as usize);
        for (position, (state, bytes)) in (bag.done as usize..).zip(misses.rows_of(bag)) {
            match state {
                RowState::Fresh => feature.add_row::<S>(bytes, position, out),
                _ => feature.add_default(position, out),
            }
            status.count(state);
        }
        feature.close((bag.done + bag.refs) as usize, out);
    }
}

enum Found<'a> {
    Row(&'a [u8]),
    Absent,
    Miss,
}

/// Where the rows of a feature are found, asked for in the order of the keys.
trait FindRow {
    /// The row of key number `at`, at the front of what is returned.
    fn row<'b, S: Simd>(&'b mut self, at: usize, buffer: &'b mut [u8]) -> Found<'b>;

    fn epoch(&self, row: RowKey) -> Epoch;
}

/// A resident table has its rows in plain memory.
struct Whole<'a> {
    table: &'a Resident,
    keys: &'a [u64],
}

impl FindRow for Whole<'_> {
    #[inline(always)]
    fn row<'b, S: Simd>(&'b mut self, at: usize, _buffer: &'b mut [u8]) -> Found<'b> {
        const AHEAD: usize = 16;
        if let Some(&key) = self.keys.get(at + AHEAD) {
            self.table.prefetch(key);
        }
        self.table.row(self.keys[at]).map_or(Found::Absent, Found::Row)
    }

    fn epoch(&self, _row: RowKey) -> Epoch {
        Epoch::default()
    }
}

/// How far ahead of the reads keys are looked for, and their rows asked for.
const SEE_AHEAD: usize = 12;
/// How far ahead of the reads keys are named, and their sets asked for.
const NAME_AHEAD: usize = 24;
/// Places of keys that were named and not read yet.
const RING: usize = 32;

/// The embedding cache, looked through ahead of the reads, one key at a time: while a row is read, those of the next
/// keys are on their way from memory, and behind them the sets of more keys.
struct Ahead<'a> {
    cache: &'a Cache,
    namer: Namer,
    keys_end: Option<u64>,
    keys: &'a [u64],
    named: usize,
    looked: usize,
    ring: [Seen; RING],
}

impl Ahead<'_> {
    #[inline(always)]
    fn look_ahead<S: Simd>(&mut self, at: usize) {
        let end = self.keys.len();
        for i in self.named..end.min(at + NAME_AHEAD + 1) {
            let key = self.keys[i];
            let absent = self.keys_end.is_some_and(|end| key >= end);
            let name = if absent { Name::default() } else { self.cache.name(self.namer, key) };
            self.cache.prefetch_set(name);
            self.ring[i % RING].name = name;
            self.named = i + 1;
        }
        for i in self.looked..end.min(at + SEE_AHEAD + 1) {
            self.ring[i % RING] = self.cache.see::<S>(self.ring[i % RING].name);
            self.looked = i + 1;
        }
    }
}

impl FindRow for Ahead<'_> {
    #[inline(always)]
    fn row<'b, S: Simd>(&'b mut self, at: usize, buffer: &'b mut [u8]) -> Found<'b> {
        self.look_ahead::<S>(at);
        let seen = self.ring[at % RING];
        if self.cache.read::<S>(seen, buffer) {
            Found::Row(buffer)
        } else if seen.name.word == 0 {
            Found::Absent
        } else {
            Found::Miss
        }
    }

    fn epoch(&self, row: RowKey) -> Epoch {
        self.cache.epoch(row)
    }
}
