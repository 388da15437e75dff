//! The embedding cache: one flat, set-associative array of encoded rows, shared by all cached
//! tables whose rows have the same width. Queries take no lock: each set has a sequence number that
//! makes a torn or half-replaced row impossible to observe. Never reads flash and never decides
//! what is worth caching beyond which row of a full set gives way (`eviction.rs`).
//!
//! A set keeps for each of its ways one *word* that names the row, so a single vector compare finds
//! it. The word together with the set's number is a bijection of (table, key): equal words are
//! equal keys, and there is nothing left to verify. Words, sequence and uses share one cache line
//! (two where words are wide), so that a lookup costs that line and the row. A slot takes 6.3 bytes
//! beside its row where all tables are indexed, else 10.9.

pub mod address;
pub mod codec;
pub(crate) mod eviction;
pub mod resident;
pub(crate) mod set_header;
pub(crate) mod write_counter;

use crate::cache::address::{AddressMap, KeySpaces, RowKey, SetTag, TableHasher};
use crate::cache::codec::ROW_BYTES_MAX;
use crate::cache::eviction::{GHOSTS, WAYS, Ways};
use crate::cache::set_header::{LINE, SEQUENCE, SetHeaders, USES};
use crate::cache::write_counter::WriteCounter;
#[cfg(not(loom))]
use crate::lookup::{pipeline::prefetch_lines, pooling::RawRows};
use crate::simd::atomics::{AtomicU32, Ordering, spin};
use crate::simd::huge_pages::Zeroed;
use crate::simd::{BEYOND, Plain, READ_BYTES, Simd};

/// The state of a set before a row was read from elsewhere. An insert with it is refused if the row
/// could have been updated or invalidated since: a late insert never brings an old row back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(u32);

impl Epoch {
    /// The epoch of that number in a set's tail.
    pub(crate) fn of(number: u32) -> Self {
        Self(number)
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

// The tail is for the one writer: the epoch, the hands of the eviction, its ghosts.
const EPOCH: usize = 0;
const HANDS: usize = 1;
const TAIL: usize = 2 + GHOSTS / 4;
/// Units of one racing read.
const READ: usize = READ_BYTES / 4;

/// The cache. All memory is taken by `new` and never grows. SetHeaders lie apart from rows: they
/// are few enough to stay near the core.
pub struct Cache {
    row_bytes: usize,
    /// Units of a row.
    row: usize,
    /// Units of a head: one line or two.
    head: usize,
    sets: usize,
    naming: AddressMap,
    heads: Zeroed<AtomicU32>,
    tails: Zeroed<AtomicU32>,
    rows: Zeroed<AtomicU32>,
    changes: WriteCounter,
}

/// How often a query looks again at a set that is being changed before it calls the row missing.
const LOOKS: usize = if cfg!(loom) { 2 } else { 1000 };

impl Cache {
    fn head(names: &KeySpaces) -> usize {
        if names.is_narrow() { LINE } else { 2 * LINE }
    }

    fn set_bytes(row_bytes: usize, names: &KeySpaces) -> usize {
        4 * (Self::head(names) + TAIL + WAYS * row_bytes.div_ceil(4))
    }

    /// Bytes of the smallest cache for rows of `row_bytes`.
    pub fn bytes_min(row_bytes: usize, names: &KeySpaces) -> usize {
        names.sets_min() * Self::set_bytes(row_bytes, names) + BEYOND
    }

    /// A cache of at most `bytes_max` bytes for rows of `row_bytes`; `None` if that is less than
    /// `bytes_min`.
    pub fn new(row_bytes: usize, bytes_max: usize, names: &KeySpaces) -> Option<Self> {
        let sets = bytes_max.checked_sub(BEYOND)? / Self::set_bytes(row_bytes, names);
        let sets = sets.min(u32::MAX as usize / WAYS);
        let naming = (sets >= names.sets_min()).then(|| AddressMap::new(names, sets))?;
        let (head, row) = (Self::head(names), row_bytes.div_ceil(4));
        let (heads, tails) = (Zeroed::new(sets * head), Zeroed::new(sets * TAIL));
        let rows = Zeroed::new(sets * WAYS * row + BEYOND / 4);
        Some(Self {
            row_bytes,
            row,
            head,
            sets,
            naming,
            heads,
            tails,
            rows,
            changes: WriteCounter::default(),
        })
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// RawRows that fit.
    pub fn slots(&self) -> usize {
        self.sets * WAYS
    }

    /// All bytes the cache holds.
    pub fn bytes(&self) -> usize {
        4 * (self.heads.len() + self.tails.len() + self.rows.len())
    }

    /// All words it holds: heads, tails, rows.
    pub fn image(&self) -> Vec<u32> {
        let words = self.heads.iter().chain(&*self.tails).chain(&*self.rows);
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// How its rows are named, and heads, tails and rows, for a copy elsewhere: each can be let go
    /// of before the next.
    pub(crate) fn into_parts(self) -> (AddressMap, [Zeroed<AtomicU32>; 3]) {
        (self.naming, [self.heads, self.tails, self.rows])
    }

    /// How the keys of `table` are named.
    #[inline(always)]
    pub(crate) fn namer(&self, table: u16) -> TableHasher {
        self.naming.namer(table)
    }

    /// The name of `key` as `namer` says; word 0 if the table cannot have it.
    #[inline(always)]
    pub(crate) fn name(&self, namer: TableHasher, key: u64) -> SetTag {
        self.naming.name(namer, key)
    }

    /// The names of some keys below `last`, or word 0.
    #[inline(always)]
    pub(crate) fn name_all(
        &self,
        namer: TableHasher,
        last: u64,
        keys: &[u64],
        sets: &mut [u32],
        words: &mut [u64],
    ) {
        self.naming.name_all(namer, last, keys, sets, words);
    }

    pub(crate) fn name_of(&self, row: RowKey) -> SetTag {
        self.name(self.namer(row.table), row.key)
    }

    /// The heads of all sets.
    #[inline(always)]
    pub(crate) fn heads(&self) -> SetHeaders<'_> {
        SetHeaders::new(&self.heads, self.head > LINE)
    }

    /// The changes of all sets.
    #[inline(always)]
    pub(crate) fn changes(&self) -> &WriteCounter {
        &self.changes
    }

    fn head_of(&self, set: u32) -> &[AtomicU32; LINE] {
        self.heads().of(set)
    }

    fn tail_of(&self, set: u32) -> &[AtomicU32] {
        &self.tails[set as usize * TAIL..][..TAIL]
    }

    /// The row in a slot, and what is read beyond it.
    #[inline(always)]
    pub(crate) fn row(&self, slot: u32) -> &[AtomicU32] {
        &self.rows[slot as usize * self.row..][..self.row.next_multiple_of(READ)]
    }

    /// All rows.
    #[cfg(not(loom))]
    #[inline(always)]
    pub(crate) fn rows(&self) -> RawRows<'_> {
        RawRows::racing(&self.rows, self.row)
    }

    /// Asks for the row in a slot ahead of its use.
    #[cfg(not(loom))]
    #[inline(always)]
    pub(crate) fn prefetch_row(&self, slot: u32) {
        prefetch_lines(&self.rows[slot as usize * self.row..][..self.row]);
    }

    #[inline(always)]
    fn word(&self, set: u32, way: u32) -> u64 {
        let (heads, way) = (self.heads(), way as usize);
        let high = heads.high(set).map_or(0, |high| high[way].load(Ordering::Relaxed));
        u64::from(high) << 32 | u64::from(heads.of(set)[way].load(Ordering::Relaxed))
    }

    fn set_word(&self, set: u32, way: u32, word: u64) {
        let (heads, way) = (self.heads(), way as usize);
        heads.of(set)[way].store(word as u32, Ordering::Relaxed);
        if let Some(high) = heads.high(set) {
            high[way].store((word >> 32) as u32, Ordering::Relaxed);
        }
    }

    /// Copies the row into `out` `[row_bytes, rounded up to READ_BYTES]` if it is cached. A row
    /// that is being replaced for very long counts as missing.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(&self, name: SetTag, out: &mut [u8]) -> bool {
        for _ in 0..LOOKS {
            let seen = self.heads().see::<S>(name);
            if seen.is_there() {
                S::copy_racing(self.row(seen.slot()), out);
                if self.heads().are_unchanged(std::iter::once(seen)) {
                    return true;
                }
            } else if seen.way == WAYS as u32 {
                return false;
            }
            spin();
        }
        false
    }

    /// Looks `row` up and, on a hit, copies its encoded bytes into `out` `[row_bytes]`.
    pub fn query(&self, row: RowKey, out: &mut [u8]) -> bool {
        let mut bytes = [0; ROW_BYTES_MAX.next_multiple_of(READ_BYTES)];
        let bytes = &mut bytes[..self.row_bytes.next_multiple_of(READ_BYTES)];
        let hit = self.read::<Plain>(self.name_of(row), bytes);
        if hit {
            out.copy_from_slice(&bytes[..self.row_bytes]);
        }
        hit
    }

    /// The state of the row's set now. Take it before the row is read from elsewhere, and insert
    /// with it.
    pub fn epoch(&self, row: RowKey) -> Epoch {
        let name = self.name_of(row);
        Epoch(self.tail_of(name.set)[EPOCH].load(Ordering::Acquire))
    }

    /// Runs `change` as the only writer of the row's set, while the set reads as changing.
    fn in_set<R>(&self, row: RowKey, change: impl FnOnce(SetTag) -> R) -> R {
        let name = self.name_of(row);
        let head = self.head_of(name.set);
        let sequence = loop {
            let stable = head[SEQUENCE].load(Ordering::Relaxed) & !1;
            let taken = head[SEQUENCE].compare_exchange_weak(
                stable,
                stable.wrapping_add(1),
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            if taken.is_ok() {
                break stable;
            }
            spin();
        };
        self.changes.begin();
        let result = change(name);
        head[SEQUENCE].store(sequence.wrapping_add(2), Ordering::Release);
        self.changes.end();
        result
    }

    /// Only ever called inside `in_set`.
    fn write(&self, name: SetTag, way: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes);
        self.set_word(name.set, way, name.word);
        for (word, bytes) in self.row(name.set * WAYS as u32 + way).iter().zip(bytes.chunks(4)) {
            let mut full = [0; 4];
            full[..bytes.len()].copy_from_slice(bytes);
            word.store(u32::from_le_bytes(full), Ordering::Relaxed);
        }
    }

    /// Puts a row in, over another one if the set is full. `since` is the epoch from before the row
    /// was read: if the row may have changed after that, nothing happens. Returns whether the row
    /// is in.
    pub fn insert(&self, row: RowKey, bytes: &[u8], since: Epoch) -> bool {
        self.in_set(row, |name| {
            if name.word == 0 || self.tail_of(name.set)[EPOCH].load(Ordering::Relaxed) != since.0 {
                return false;
            }
            let way = match self.heads().see::<Plain>(name).way {
                way if way < WAYS as u32 => way,
                _ => {
                    let mut ways = self.load_ways(name.set);
                    let empty = (0..WAYS).find(|&way| self.word(name.set, way as u32) == 0);
                    let way = empty.unwrap_or_else(|| {
                        ways.evict(|w| self.naming.tag(self.word(name.set, w as u32)))
                    });
                    ways.place(way, self.naming.tag(name.word));
                    self.store_ways(name.set, &ways);
                    way as u32
                }
            };
            self.write(name, way, bytes);
            true
        })
    }

    /// Overwrites the row where it is cached; returns whether it was. Reads of the row that began
    /// before lose the right to insert what they find.
    pub fn update(&self, row: RowKey, bytes: &[u8]) -> bool {
        self.change(row, |name, way| self.write(name, way, bytes))
    }

    /// Drops the row where it is cached; returns whether it was. Reads of the row that began before
    /// lose the right to insert what they find.
    pub fn invalidate(&self, row: RowKey) -> bool {
        self.change(row, |name, way| self.set_word(name.set, way, 0))
    }

    fn change(&self, row: RowKey, change: impl FnOnce(SetTag, u32)) -> bool {
        self.in_set(row, |name| {
            let epoch = &self.tail_of(name.set)[EPOCH];
            epoch.store(epoch.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            let way = self.heads().see::<Plain>(name).way;
            let cached = way < WAYS as u32;
            if cached {
                change(name, way);
            }
            cached
        })
    }

    /// Calls `each` for every cached row's name and encoded bytes, in no particular order.
    pub fn dump(&self, mut each: impl FnMut(RowKey, &[u8])) {
        let mut bytes = vec![0; self.row_bytes.next_multiple_of(READ_BYTES)];
        for slot in 0..self.slots() {
            let (set, way) = ((slot / WAYS) as u32, (slot % WAYS) as u32);
            let name = SetTag { set, word: self.word(set, way) };
            if name.word != 0 && self.read::<Plain>(name, &mut bytes) {
                each(self.naming.row_of(name), &bytes[..self.row_bytes]);
            }
        }
    }

    /// What the eviction policy knows of a set.
    fn load_ways(&self, set: u32) -> Ways {
        let tail = self.tail_of(set);
        let word = |i: usize| tail[i].load(Ordering::Relaxed);
        let hands = word(HANDS).to_le_bytes();
        let mut ghosts = [0; GHOSTS];
        for (i, four) in ghosts.chunks_exact_mut(4).enumerate() {
            four.copy_from_slice(&word(HANDS + 1 + i).to_le_bytes());
        }
        Ways {
            uses: self.head_of(set)[USES].load(Ordering::Relaxed),
            probation: u16::from_le_bytes([hands[0], hands[1]]),
            main_hand: hands[2] & 15,
            probation_hand: hands[2] >> 4,
            ghosts,
            ghost_hand: hands[3],
        }
    }

    fn store_ways(&self, set: u32, ways: &Ways) {
        let tail = self.tail_of(set);
        let [low, high] = ways.probation.to_le_bytes();
        let hands = [low, high, ways.main_hand | ways.probation_hand << 4, ways.ghost_hand];
        self.head_of(set)[USES].store(ways.uses, Ordering::Relaxed);
        tail[HANDS].store(u32::from_le_bytes(hands), Ordering::Relaxed);
        for (word, four) in tail[HANDS + 1..].iter().zip(ways.ghosts.chunks_exact(4)) {
            word.store(u32::from_le_bytes([four[0], four[1], four[2], four[3]]), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::{Job, dispatch};
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A row whose every byte tells which key it belongs to and which write it came from.
    fn row_of(key: u64, write: u8) -> [u8; 20] {
        let mut row = [write; 20];
        row[..8].copy_from_slice(&key.to_le_bytes());
        row
    }

    /// Index tables of which the second is large, and tables of any keys.
    fn namings() -> [KeySpaces; 2] {
        [
            KeySpaces::new(vec![Some(100), Some(4_000_000_000), Some(1 << 20)]),
            KeySpaces::new(vec![None, Some(50), None]),
        ]
    }

    /// A key that the naming allows; the number it is made from tells such keys apart.
    fn key_of(names: &KeySpaces, table: u16, number: u64) -> u64 {
        match names.end(table) {
            Some(end) => number % end,
            None => number.wrapping_mul(0x0123_4567_89ab_cdef),
        }
    }

    fn put(cache: &Cache, row: RowKey, bytes: &[u8]) -> bool {
        cache.insert(row, bytes, cache.epoch(row))
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16, u64, u8),
        Update(u16, u64, u8),
        Invalidate(u16, u64),
        Query(u16, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = prop::sample::select(vec![0, 1, 2, 3, 7, 40, 41, 42, 99, 1 << 19]);
        (0..4u8, 0u16..3, key, any::<u8>()).prop_map(|(kind, t, k, v)| match kind {
            0 => Step::Insert(t, k, v),
            1 => Step::Update(t, k, v),
            2 => Step::Invalidate(t, k),
            _ => Step::Query(t, k),
        })
    }

    fn query_on(isa: Isa, cache: &Cache, row: RowKey, out: &mut [u8]) -> bool {
        struct Read<'a>(&'a Cache, RowKey, &'a mut [u8]);
        impl Job for Read<'_> {
            type Out = bool;
            #[inline(always)]
            fn run<S: Simd>(self) -> bool {
                self.0.read::<S>(self.0.name_of(self.1), self.2)
            }
        }
        dispatch(isa, Read(cache, row, out))
    }

    proptest! {
        /// Against a map: a hit is always the last row written; nothing is lost while the sets have
        /// room. Each family of instructions sees the same.
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec(step(), 1..300)) {
            for names in namings() {
                let cache = Cache::new(20, 64 * 1024, &names).unwrap();
                let mut model: HashMap<RowKey, u8> = HashMap::new();
                for s in &steps {
                    match *s {
                        Step::Insert(table, k, v) => {
                            let row = RowKey { table, key: key_of(&names, table, k) };
                            prop_assert!(put(&cache, row, &row_of(row.key, v)));
                            model.insert(row, v);
                        }
                        Step::Update(table, k, v) => {
                            let row = RowKey { table, key: key_of(&names, table, k) };
                            let there = cache.update(row, &row_of(row.key, v));
                            prop_assert_eq!(there, model.contains_key(&row));
                            model.entry(row).and_modify(|old| *old = v);
                        }
                        Step::Invalidate(table, k) => {
                            let row = RowKey { table, key: key_of(&names, table, k) };
                            prop_assert_eq!(cache.invalidate(row), model.remove(&row).is_some());
                        }
                        Step::Query(table, k) => {
                            let row = RowKey { table, key: key_of(&names, table, k) };
                            for isa in Isa::available() {
                                // As a buffer for rows of several widths: longer than the row.
                                let mut out = [0; 96];
                                let hit = query_on(isa, &cache, row, &mut out);
                                prop_assert_eq!(hit, model.contains_key(&row));
                                if let Some(v) = model.get(&row) {
                                    prop_assert_eq!(&out[..20], &row_of(row.key, *v));
                                }
                            }
                        }
                    }
                }
                let mut dumped = HashMap::new();
                cache.dump(|row, bytes| { dumped.insert(row, bytes[19]); });
                prop_assert_eq!(dumped, model);
            }
        }
    }

    #[test]
    fn a_key_outside_its_table_is_never_there() {
        let names = KeySpaces::new(vec![Some(10), Some(10)]);
        let cache = Cache::new(20, 64 * 1024, &names).unwrap();
        let beyond = RowKey { table: 0, key: 10 };
        assert!(
            !put(&cache, beyond, &[1; 20])
                && !cache.update(beyond, &[1; 20])
                && !cache.invalidate(beyond)
        );
        assert!(put(&cache, RowKey { table: 1, key: 0 }, &[2; 20]));
        assert!(!cache.query(beyond, &mut [0; 20]));
        assert!(!put(&cache, RowKey { table: 7, key: 0 }, &[1; 20]));
    }

    #[test]
    fn a_late_insert_never_brings_an_old_row_back() {
        let cache = Cache::new(20, 64 * 1024, &namings()[0]).unwrap();
        let row = RowKey { table: 0, key: 5 };
        for change in [|c: &Cache, r| c.update(r, &[2; 20]), |c: &Cache, r| c.invalidate(r)] {
            let before = cache.epoch(row);
            assert!(!change(&cache, row), "it is not cached");
            assert!(!cache.insert(row, &[1; 20], before), "it was read before the change");
            assert!(!cache.query(row, &mut [0; 20]));
        }
        assert!(put(&cache, row, &[3; 20]));
    }

    #[test]
    fn a_full_cache_keeps_what_is_used() {
        let cache = Cache::new(20, 100 * 1024, &namings()[1]).unwrap();
        let slots = cache.slots() as u64;
        let mut out = [0; 20];
        let hot = |key| RowKey { table: 0, key };
        for key in 0..slots / 4 {
            put(&cache, hot(key), &row_of(key, 1));
        }
        for key in 0..slots * 8 {
            cache.query(hot(key % (slots / 4)), &mut out);
            put(&cache, hot(1_000_000 + key), &row_of(1_000_000 + key, 1));
        }
        let kept = (0..slots / 4).filter(|&key| cache.query(hot(key), &mut out)).count() as u64;
        assert!(kept > slots / 5, "{kept} of {} used rows are left after a scan", slots / 4);
        assert!(cache.bytes() <= 100 * 1024);
    }

    /// At 16 columns in u8 three times as many rows a megabyte as a cache of f32 rows with 8 bytes
    /// of key and 8 of counter a slot, where tables are indexed.
    #[test]
    fn a_slot_is_small() {
        let names = KeySpaces::new(vec![Some(1 << 20)]);
        let cache = Cache::new(20, 1 << 20, &names).unwrap();
        let theirs = (1 << 20) / (64 + 16);
        assert!(cache.slots() >= 3 * theirs, "{} rows", cache.slots());
    }

    /// Queries a row whose every word names its key and its write; whether it was there.
    fn read_whole(isa: Isa, cache: &Cache, key: u64) -> bool {
        let mut out = [0; 160];
        let hit = query_on(isa, cache, RowKey { table: 1, key }, &mut out);
        let out = &out[..136];
        if hit {
            assert!(out.chunks(8).all(|c| c == &out[..8]), "torn row");
            assert_eq!(
                u64::from_le_bytes(out[..8].try_into().unwrap()) >> 32,
                key,
                "another key's row"
            );
        }
        hit
    }

    #[test]
    fn no_reader_sees_a_torn_row() {
        let cache = Cache::new(136, 40 * 1024, &namings()[0]).unwrap();
        let (reads, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for writer in 0..2u64 {
                let (cache, finished) = (&cache, &finished);
                scope.spawn(move || {
                    for turn in 0..60_000u64 {
                        let key = (turn * 7 + writer) % 400;
                        let row = RowKey { table: 1, key };
                        let word = (key << 32 | turn).to_le_bytes();
                        put(cache, row, &word.repeat(17));
                    }
                    finished.fetch_add(1, Ordering::Release);
                });
            }
            for isa in Isa::available() {
                let (cache, reads, finished) = (&cache, &reads, &finished);
                scope.spawn(move || {
                    // Readers go on for as long as there are writers, and once more over all keys.
                    loop {
                        let last = finished.load(Ordering::Acquire) == 2;
                        let seen = (0..400).filter(|&key| read_whole(isa, cache, key)).count();
                        reads.fetch_add(seen, Ordering::Relaxed);
                        if last {
                            return;
                        }
                    }
                });
            }
        });
        assert!(reads.into_inner() > 0);
    }
}
