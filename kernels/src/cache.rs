//! The embedding cache: one flat, set-associative array of encoded rows, shared by all cached tables whose
//! rows have the same width. Queries take no lock: a per-slot sequence number makes a torn or half-replaced
//! row impossible to observe. Never reads flash and never decides what is worth caching.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Slots in a set; the tags of one set are probed together.
pub const WAYS: usize = 16;

const EMPTY: u8 = 0;
/// Uses that a slot can collect before its next pass of the clock hand.
const USES_MAX: u8 = 3;

/// What names a row: its table and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// Index of the table in the model.
    pub table: u16,
    /// The key within the table.
    pub key: u64,
}

impl RowKey {
    /// A 64-bit hash: the table is folded in by an odd multiplier, then mixed as MurmurHash3 finishes.
    #[inline]
    pub fn hash(self) -> u64 {
        mix(self.key ^ (u64::from(self.table) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// A bijective 64-bit mix (MurmurHash3's `fmix64`): equal hashes mean equal keys.
#[inline]
pub fn mix(key: u64) -> u64 {
    let mut h = key;
    h = (h ^ (h >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ (h >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// The inverse of [`mix`].
pub fn unmix(hash: u64) -> u64 {
    let mut h = hash ^ (hash >> 33);
    h = h.wrapping_mul(0x9cb4_b2f8_1293_37db);
    h = (h ^ (h >> 33)).wrapping_mul(0x4f74_430c_22a5_4005);
    h ^ (h >> 33)
}

/// The cache. All memory is taken by `new` and never grows.
pub struct Cache {
    row_bytes: usize,
    words_per_row: usize,
    sets: usize,
    /// One byte a slot: 0 for empty, else the hash's low bits with the top bit set.
    tags: Box<[AtomicU8]>,
    /// Even while a slot is stable, odd while it is being written.
    sequences: Box<[AtomicU32]>,
    tables: Box<[AtomicU16]>,
    keys: Box<[AtomicU64]>,
    uses: Box<[AtomicU8]>,
    rows: Box<[AtomicU64]>,
    /// One writer at a time in a set; readers never look at it.
    writing: Box<[AtomicBool]>,
    hands: Box<[AtomicU8]>,
}

fn zeros<T: Default>(n: usize) -> Box<[T]> {
    (0..n).map(|_| T::default()).collect()
}

impl Cache {
    /// Bytes that one slot takes beside its row: tag, sequence, table, key and use count.
    pub const SLOT_OVERHEAD_BYTES: usize = 1 + 4 + 2 + 8 + 1;

    /// Bytes of the smallest cache for rows of `row_bytes`: one set.
    pub fn set_bytes(row_bytes: usize) -> usize {
        WAYS * (row_bytes.next_multiple_of(8) + Self::SLOT_OVERHEAD_BYTES) + 2
    }

    /// A cache of at most `bytes_max` bytes for rows of `row_bytes`; `None` if not even one set fits.
    pub fn new(row_bytes: usize, bytes_max: usize) -> Option<Self> {
        let words_per_row = row_bytes.div_ceil(8);
        let sets = bytes_max / Self::set_bytes(row_bytes);
        let slots = sets * WAYS;
        (sets > 0).then(|| Self {
            row_bytes,
            words_per_row,
            sets,
            tags: zeros(slots),
            sequences: zeros(slots),
            tables: zeros(slots),
            keys: zeros(slots),
            uses: zeros(slots),
            rows: zeros(slots * words_per_row),
            writing: zeros(sets),
            hands: zeros(sets),
        })
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Rows that fit.
    pub fn slots(&self) -> usize {
        self.sets * WAYS
    }

    /// All bytes the cache holds.
    pub fn bytes(&self) -> usize {
        self.slots() * (self.words_per_row * 8 + Self::SLOT_OVERHEAD_BYTES) + 2 * self.sets
    }

    #[inline]
    fn place(&self, hash: u64) -> (usize, u8) {
        let set = ((u128::from(hash) * self.sets as u128) >> 64) as usize;
        (set, hash as u8 | 0x80)
    }

    #[inline]
    fn holds(&self, slot: usize, tag: u8, row: RowKey) -> bool {
        self.tags[slot].load(Ordering::Relaxed) == tag
            && self.keys[slot].load(Ordering::Relaxed) == row.key
            && self.tables[slot].load(Ordering::Relaxed) == row.table
    }

    /// Looks `row` up and, on a hit, copies its encoded bytes into `out` `[row_bytes]`. A row that is being
    /// replaced at this moment counts as a miss.
    #[inline]
    pub fn query(&self, row: RowKey, out: &mut [u8]) -> bool {
        let (set, tag) = self.place(row.hash());
        for slot in set * WAYS..(set + 1) * WAYS {
            if self.tags[slot].load(Ordering::Relaxed) == tag && self.copy_out(slot, tag, row, out) {
                return true;
            }
        }
        false
    }

    /// Copies a slot's row if the slot holds `row` and did not change meanwhile (a sequence lock, after
    /// Boehm, "Can Seqlocks Get Along With Programming Language Memory Models?", MSPC 2012).
    #[inline]
    fn copy_out(&self, slot: usize, tag: u8, row: RowKey, out: &mut [u8]) -> bool {
        let before = self.sequences[slot].load(Ordering::Acquire);
        if before & 1 == 1 || !self.holds(slot, tag, row) {
            return false;
        }
        let words = &self.rows[slot * self.words_per_row..(slot + 1) * self.words_per_row];
        for (bytes, word) in out.chunks_mut(8).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes()[..bytes.len()]);
        }
        fence(Ordering::Acquire);
        if self.sequences[slot].load(Ordering::Relaxed) != before {
            return false;
        }
        let uses = self.uses[slot].load(Ordering::Relaxed);
        if uses < USES_MAX {
            self.uses[slot].store(uses + 1, Ordering::Relaxed);
        }
        true
    }

    /// Runs `change` as the only writer of the set that `row` belongs to.
    fn in_set<R>(&self, row: RowKey, change: impl FnOnce(usize, u8) -> R) -> R {
        let (set, tag) = self.place(row.hash());
        while self.writing[set].swap(true, Ordering::Acquire) {
            std::hint::spin_loop();
        }
        let result = change(set, tag);
        self.writing[set].store(false, Ordering::Release);
        result
    }

    fn find(&self, set: usize, tag: u8, row: RowKey) -> Option<usize> {
        (set * WAYS..(set + 1) * WAYS).find(|&slot| self.holds(slot, tag, row))
    }

    /// Invalidates, writes, publishes. Only ever called inside `in_set`.
    fn write(&self, slot: usize, tag: u8, row: RowKey, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes);
        let sequence = self.sequences[slot].load(Ordering::Relaxed);
        self.sequences[slot].store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.tags[slot].store(tag, Ordering::Relaxed);
        self.keys[slot].store(row.key, Ordering::Relaxed);
        self.tables[slot].store(row.table, Ordering::Relaxed);
        let words = &self.rows[slot * self.words_per_row..(slot + 1) * self.words_per_row];
        for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
            let mut full = [0; 8];
            full[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(full), Ordering::Relaxed);
        }
        self.sequences[slot].store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Puts a row in, over the set's least used one if the set is full (CLOCK with up to three uses).
    pub fn insert(&self, row: RowKey, bytes: &[u8]) {
        self.in_set(row, |set, tag| {
            let slot = self.find(set, tag, row).unwrap_or_else(|| self.victim(set));
            self.write(slot, tag, row, bytes);
            self.uses[slot].store(0, Ordering::Relaxed);
        });
    }

    /// Overwrites the row where it is cached; returns whether it was.
    pub fn update(&self, row: RowKey, bytes: &[u8]) -> bool {
        self.in_set(row, |set, tag| {
            let slot = self.find(set, tag, row);
            slot.inspect(|&slot| self.write(slot, tag, row, bytes)).is_some()
        })
    }

    /// Drops the row where it is cached; returns whether it was.
    pub fn invalidate(&self, row: RowKey) -> bool {
        self.in_set(row, |set, tag| {
            let slot = self.find(set, tag, row);
            slot.inspect(|&slot| {
                let sequence = self.sequences[slot].load(Ordering::Relaxed);
                self.sequences[slot].store(sequence.wrapping_add(1), Ordering::Relaxed);
                fence(Ordering::Release);
                self.tags[slot].store(EMPTY, Ordering::Relaxed);
                self.sequences[slot].store(sequence.wrapping_add(2), Ordering::Release);
            })
            .is_some()
        })
    }

    fn victim(&self, set: usize) -> usize {
        let first = set * WAYS;
        if let Some(empty) = (first..first + WAYS).find(|&s| self.tags[s].load(Ordering::Relaxed) == EMPTY) {
            return empty;
        }
        // Each full turn takes one use from every slot, so this ends within USES_MAX + 1 turns unless
        // readers keep adding uses; then the hand's own slot goes.
        for _ in 0..WAYS * (usize::from(USES_MAX) + 1) {
            let hand = self.hands[set].load(Ordering::Relaxed);
            self.hands[set].store((hand + 1) % WAYS as u8, Ordering::Relaxed);
            let slot = first + usize::from(hand);
            match self.uses[slot].load(Ordering::Relaxed) {
                0 => return slot,
                uses => self.uses[slot].store(uses - 1, Ordering::Relaxed),
            }
        }
        first + usize::from(self.hands[set].load(Ordering::Relaxed))
    }

    /// Calls `each` for every cached row's name and encoded bytes, in no particular order.
    pub fn dump(&self, mut each: impl FnMut(RowKey, &[u8])) {
        let mut bytes = vec![0; self.row_bytes];
        for slot in 0..self.slots() {
            let table = self.tables[slot].load(Ordering::Relaxed);
            let row = RowKey { table, key: self.keys[slot].load(Ordering::Relaxed) };
            let tag = self.tags[slot].load(Ordering::Relaxed);
            if tag != EMPTY && self.copy_out(slot, tag, row, &mut bytes) {
                each(row, &bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::sync::atomic::AtomicUsize;

    /// A row whose every byte tells which key it belongs to and which write it came from.
    fn row_of(key: u64, write: u8) -> [u8; 20] {
        let mut row = [write; 20];
        row[..8].copy_from_slice(&key.to_le_bytes());
        row
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16, u64, u8),
        Update(u16, u64, u8),
        Invalidate(u16, u64),
        Query(u16, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let table = 0u16..3;
        let key = prop::sample::select(vec![0, 1, 2, 3, 7, 40, 41, 42, u64::MAX, 1 << 40]);
        (0..4u8, table, key, any::<u8>()).prop_map(|(kind, t, k, v)| match kind {
            0 => Step::Insert(t, k, v),
            1 => Step::Update(t, k, v),
            2 => Step::Invalidate(t, k),
            _ => Step::Query(t, k),
        })
    }

    proptest! {
        #[test]
        fn mix_can_be_undone(key: u64) {
            prop_assert_eq!(unmix(mix(key)), key);
        }

        /// Against a map: a hit is always the last row written; nothing is lost while the sets have room.
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec(step(), 1..300)) {
            let cache = Cache::new(20, 64 * 1024).unwrap();
            let mut model: HashMap<RowKey, u8> = HashMap::new();
            for s in steps {
                match s {
                    Step::Insert(table, key, v) => {
                        cache.insert(RowKey { table, key }, &row_of(key, v));
                        model.insert(RowKey { table, key }, v);
                    }
                    Step::Update(table, key, v) => {
                        let there = cache.update(RowKey { table, key }, &row_of(key, v));
                        prop_assert_eq!(there, model.contains_key(&RowKey { table, key }));
                        model.entry(RowKey { table, key }).and_modify(|old| *old = v);
                    }
                    Step::Invalidate(table, key) => {
                        let there = cache.invalidate(RowKey { table, key });
                        prop_assert_eq!(there, model.remove(&RowKey { table, key }).is_some());
                    }
                    Step::Query(table, key) => {
                        let mut out = [0; 20];
                        let hit = cache.query(RowKey { table, key }, &mut out);
                        prop_assert_eq!(hit, model.contains_key(&RowKey { table, key }));
                        if let Some(v) = model.get(&RowKey { table, key }) {
                            prop_assert_eq!(out, row_of(key, *v));
                        }
                    }
                }
            }
            let mut dumped = HashMap::new();
            cache.dump(|row, bytes| { dumped.insert(row, bytes[19]); });
            prop_assert_eq!(dumped, model);
        }
    }

    #[test]
    fn a_full_cache_keeps_what_is_used() {
        let cache = Cache::new(20, 100 * 1024).unwrap();
        let slots = cache.slots() as u64;
        let mut out = [0; 20];
        let hot = |key| RowKey { table: 0, key };
        for key in 0..slots / 4 {
            cache.insert(hot(key), &row_of(key, 1));
        }
        for key in 0..slots * 8 {
            cache.query(hot(key % (slots / 4)), &mut out);
            cache.insert(hot(1000 + key), &row_of(1000 + key, 1));
        }
        let kept = (0..slots / 4).filter(|&key| cache.query(hot(key), &mut out)).count() as u64;
        assert!(kept > slots / 5, "{kept} of {} used rows are left after a scan", slots / 4);
        assert!(cache.bytes() <= 100 * 1024);
    }

    /// Queries a row whose every word names its key and its write; whether it was there.
    fn read_whole(cache: &Cache, key: u64) -> bool {
        let mut out = [0; 136];
        let hit = cache.query(RowKey { table: 1, key }, &mut out);
        if hit {
            assert!(out.chunks(8).all(|c| c == &out[..8]), "torn row");
            assert_eq!(u64::from_le_bytes(out[..8].try_into().unwrap()) >> 32, key, "another key's row");
        }
        hit
    }

    #[test]
    fn no_reader_sees_a_torn_row() {
        let cache = Cache::new(136, 40 * 1024).unwrap();
        let (reads, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for writer in 0..2u64 {
                let (cache, finished) = (&cache, &finished);
                scope.spawn(move || {
                    for turn in 0..60_000u64 {
                        let key = (turn * 7 + writer) % 400;
                        let row = RowKey { table: 1, key };
                        let word = (key << 32 | turn).to_le_bytes();
                        cache.insert(row, &word.repeat(17));
                    }
                    finished.fetch_add(1, Ordering::Release);
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    // Readers go on for as long as there are writers, and once more over all keys.
                    loop {
                        let last = finished.load(Ordering::Acquire) == 2;
                        let seen = (0..400).filter(|&key| read_whole(&cache, key)).count();
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
