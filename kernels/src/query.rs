//! The verb `query`: probe, decode, pool and concatenate in one pass, straight into the dense network's
//! input. Bags with a missing row stop at it and are completed by `finish` once their rows were fetched; a
//! bag's rows are always added in key order, so the bits do not depend on what was cached.

use crate::cache::{Cache, RowKey};
use crate::codec::{ROW_BYTES_MAX, RowFormat};
use crate::misses::{ABSENT, Misses, OpenBag, RowState};
use crate::resident::Resident;
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

impl<'a> Bags<'a> {
    fn bag(&self, sample: usize) -> &'a [u64] {
        &self.keys[self.offsets[sample] as usize..self.offsets[sample + 1] as usize]
    }
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

    fn count(&mut self, state: RowState) {
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

/// The bytes of one row on the stack.
type RowBuffer = [u8; ROW_BYTES_MAX];

impl Feature<'_> {
    /// Pools samples `from..` into `input`; rows that miss go to `misses`. Returns the number of samples
    /// done: fewer than the batch when `misses` has no room for the next bag. The caller then fetches,
    /// calls [`Feature::finish`] on every open bag, clears the list and calls again.
    pub fn query(
        &self,
        bags: Bags<'_>,
        from: usize,
        input: &mut Input<'_>,
        misses: &mut Misses,
        statuses: &mut [Status],
    ) -> usize {
        let mut buffer = [0; ROW_BYTES_MAX];
        for (sample, status) in statuses.iter_mut().enumerate().skip(from) {
            let bag = bags.bag(sample);
            if !misses.has_room(bag.len()) {
                return sample;
            }
            let out = self.columns(input, sample);
            out.fill(0.0);
            let done = self.pool_hits(bag, out, status, &mut buffer);
            if done < bag.len() {
                self.open(bag, done, sample, misses, &mut buffer);
            } else {
                self.divide(bag.len(), out);
            }
        }
        statuses.len()
    }

    fn columns<'o>(&self, input: &'o mut Input<'_>, sample: usize) -> &'o mut [f32] {
        let start = sample * input.stride + self.column;
        &mut input.data[start..start + self.width]
    }

    /// Pools up to the first row that is not in fast memory; returns how many rows that were.
    #[inline]
    fn pool_hits(&self, bag: &[u64], out: &mut [f32], status: &mut Status, buffer: &mut RowBuffer) -> usize {
        for (position, &key) in bag.iter().enumerate() {
            match self.find(key, buffer) {
                Found::Row(bytes) => {
                    self.format.accumulate(bytes, self.place(position, out));
                    status.fresh += 1;
                }
                Found::Absent => {
                    self.add_default(self.place(position, out));
                    status.absent += 1;
                }
                Found::Miss => return position,
            }
        }
        bag.len()
    }

    /// Notes the rest of a bag from its first miss on.
    #[cold]
    fn open(&self, bag: &[u64], done: usize, sample: usize, misses: &mut Misses, buffer: &mut RowBuffer) {
        let first_ref = misses.refs.len() as u32;
        for &key in &bag[done..] {
            match self.find(key, buffer) {
                Found::Row(bytes) => misses.keep(bytes),
                Found::Absent => misses.refs.push(ABSENT),
                Found::Miss => misses.miss(RowKey { table: self.table, key }),
            }
        }
        let refs = (bag.len() - done) as u32;
        misses.bags.push(OpenBag {
            feature: self.id,
            sample: sample as u32,
            done: done as u32,
            first_ref,
            refs,
        });
    }

    #[inline]
    fn find<'b>(&'b self, key: u64, buffer: &'b mut RowBuffer) -> Found<'b> {
        if self.keys_end.is_some_and(|end| key >= end) {
            return Found::Absent;
        }
        match &self.rows {
            Rows::Resident(table) => table.row(key).map_or(Found::Absent, Found::Row),
            Rows::Cached(cache) => {
                let bytes = &mut buffer[..self.format.row_bytes()];
                let row = RowKey { table: self.table, key };
                if cache.query(row, bytes) { Found::Row(bytes) } else { Found::Miss }
            }
        }
    }

    /// The columns that the row at `position` of its bag goes to.
    #[inline]
    fn place<'o>(&self, position: usize, out: &'o mut [f32]) -> &'o mut [f32] {
        let dim = self.format.dim();
        match self.pooling {
            Pooling::None => &mut out[position * dim..(position + 1) * dim],
            Pooling::Sum | Pooling::Mean => out,
        }
    }

    fn add_default(&self, out: &mut [f32]) {
        out.iter_mut().zip(self.default_row).for_each(|(o, v)| *o += v);
    }

    fn divide(&self, keys: usize, out: &mut [f32]) {
        if self.pooling == Pooling::Mean && keys > 1 {
            out.iter_mut().for_each(|o| *o /= keys as f32);
        }
    }

    /// Pools the rest of an open bag of this feature from the staged rows.
    pub fn finish(&self, bag: &OpenBag, misses: &Misses, input: &mut Input<'_>, statuses: &mut [Status]) {
        let status = &mut statuses[bag.sample as usize];
        let out = self.columns(input, bag.sample as usize);
        let refs = &misses.refs[bag.first_ref as usize..(bag.first_ref + bag.refs) as usize];
        for (i, &slot) in refs.iter().enumerate() {
            let state = if slot == ABSENT { RowState::Absent } else { misses.state(slot) };
            let place = self.place(bag.done as usize + i, out);
            match state {
                RowState::Fresh => {
                    self.format.accumulate(&misses.row(slot)[..self.format.row_bytes()], place)
                }
                _ => self.add_default(place),
            }
            status.count(state);
        }
        self.divide((bag.done + bag.refs) as usize, out);
    }
}

enum Found<'a> {
    Row(&'a [u8]),
    Absent,
    Miss,
}
