//! The embedding cache: one flat, set-associative array of encoded rows, shared by all cached
//! tables whose rows have the same width. A query takes no lock: each set has a sequence number, by
//! which a reader rejects a torn or half-replaced row. The cache never reads flash. Its only policy
//! is which row of a full set it evicts (`eviction.rs`).
//!
//! A set keeps a *tag* for each of its ways, so one vector comparison finds a row. The tag and the
//! number of the set together are a bijection of (table, key), so equal tags mean equal keys. Tags,
//! sequence number and use counts share one cache line (two if tags are wide), so a lookup reads
//! that line and the row. A slot takes 6.3 bytes beside its row if all tables are indexed, else
//! 10.9.
//!
//! A cache of indexed tables with a slot for every row is *whole*: each row has a slot of its own,
//! and none is ever evicted. A whole cache also has a bit for each slot, which says whether the row
//! is cached. A lookup then reads that bit and the row, and no header.
//!
//! A set has three parts, each in an array of its own:
//!
//! * the *header*: tags, sequence number and use counts, which every lookup reads
//!   (`set_header.rs`);
//! * the *writer state*: epoch, eviction hands and ghosts, which only the set's one writer uses;
//! * the *rows*.

pub mod address;
pub mod codec;
pub(crate) mod eviction;
#[cfg(not(loom))]
pub(crate) mod raw_rows;
#[cfg(not(loom))]
pub mod resident;
pub(crate) mod set_header;
pub(crate) mod write_counter;

use crate::cache::address::{AddressMap, KeySpaces, RowKey, SetTag};
use crate::cache::codec::ROW_BYTES_MAX;
use crate::cache::eviction::{GHOSTS, WAYS, Ways};
#[cfg(not(loom))]
use crate::cache::raw_rows::RawRows;
use crate::cache::set_header::{SEQUENCE, SetHeaders, USES};
use crate::cache::write_counter::WriteCounter;
use crate::simd::atomics::{AtomicU32, Ordering, spin};
use crate::simd::huge_pages::Zeroed;
#[cfg(not(loom))]
use crate::simd::prefetch::prefetch_lines;
use crate::simd::{LINE_WORDS, OVERREAD_BYTES, Plain, READ_BYTES, Simd};

/// The epoch of a set, taken before a row is read from flash. Each update or invalidation of a row
/// starts a new epoch of its set. The cache refuses an insert with an older epoch, because the row
/// may have changed since. A late insert therefore never brings an old row back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(u32);

impl Epoch {
    /// Returns the epoch with this number in a set's writer state.
    pub(crate) fn of(number: u32) -> Self {
        Self(number)
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// Returns an earlier epoch, with which the cache refuses an insert.
    pub fn outdated(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }
}

/// Position of the epoch in a set's writer state, in words.
const EPOCH: usize = 0;
/// Position of the eviction policy's hands in a set's writer state, in words; the ghosts follow.
const HANDS: usize = 1;
/// Words of a set's writer state.
const WRITER_WORDS: usize = 2 + GHOSTS / 2;
/// Words of one racing read: a read of memory that a writer may change.
const READ_WORDS: usize = READ_BYTES / 4;
/// Sets that an estimate of the cached rows reads.
const SAMPLED_SETS: usize = 1024;
/// Attempts to read a row from a set that a writer is changing. After these the row counts as
/// missing.
const READ_RETRIES_MAX: usize = if cfg!(loom) { 2 } else { 1000 };

/// The cache. [`Cache::new`] allocates all memory, which never grows. Headers are stored apart from
/// rows, because all headers together are small enough for the CPU's caches.
pub struct Cache {
    row_bytes: usize,
    /// Words of a row.
    row_words: usize,
    /// Words of a header: one line or two.
    header_words: usize,
    sets: usize,
    addresses: AddressMap,
    headers: Zeroed<AtomicU32>,
    writer_states: Zeroed<AtomicU32>,
    rows: Zeroed<AtomicU32>,
    /// One bit a slot of a whole cache: set if the row is cached. Empty in other caches.
    present: Zeroed<AtomicU32>,
    writes: WriteCounter,
}

impl Cache {
    fn header_words(spaces: &KeySpaces) -> usize {
        if spaces.is_narrow() { LINE_WORDS } else { 2 * LINE_WORDS }
    }

    fn set_bytes(row_bytes: usize, spaces: &KeySpaces) -> usize {
        4 * (Self::header_words(spaces) + WRITER_WORDS + WAYS * row_bytes.div_ceil(4))
    }

    /// Returns the bytes of the smallest cache for rows of `row_bytes`.
    pub fn bytes_min(row_bytes: usize, spaces: &KeySpaces) -> usize {
        spaces.sets_min() * Self::set_bytes(row_bytes, spaces) + OVERREAD_BYTES
    }

    /// Creates a cache of at most `bytes_max` bytes for rows of `row_bytes`. Returns `None` if
    /// `bytes_max` is less than `bytes_min`.
    pub fn new(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<Self> {
        Self::with_sets(row_bytes, Self::sets_in(row_bytes, bytes_max, spaces)?, spaces)
    }

    /// Returns the sets of a cache of at most `bytes_max` bytes for rows of `row_bytes`, or `None`
    /// if `bytes_max` is less than `bytes_min`.
    pub fn sets_in(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<usize> {
        let sets = bytes_max.checked_sub(OVERREAD_BYTES)? / Self::set_bytes(row_bytes, spaces);
        Some(sets.min(u32::MAX as usize / WAYS)).filter(|sets| *sets >= spaces.sets_min())
    }

    /// Creates a cache of `sets` sets for rows of `row_bytes`. Returns `None` if `spaces` need more
    /// sets.
    pub fn with_sets(row_bytes: usize, sets: usize, spaces: &KeySpaces) -> Option<Self> {
        let addresses = (sets >= spaces.sets_min()).then(|| AddressMap::new(spaces, sets))?;
        Some(Self::with_addresses(row_bytes, addresses, Self::header_words(spaces)))
    }

    /// Creates the best cache of at most `bytes_max` bytes for rows of `row_bytes`: a whole one if
    /// it fits. Returns `None` if `bytes_max` is less than `bytes_min`.
    pub fn fitting(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<Self> {
        let whole = Self::whole(row_bytes, bytes_max, spaces);
        whole.or_else(|| Self::new(row_bytes, bytes_max, spaces))
    }

    /// Returns the bytes of [`Cache::fitting`], and allocates nothing.
    pub fn fitting_bytes(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<usize> {
        let (sets, present) = match Self::whole_sets(row_bytes, bytes_max, spaces) {
            Some(sets) => (sets, Self::present_words(sets)),
            None => (Self::sets_in(row_bytes, bytes_max, spaces)?, 0),
        };
        Some(sets * Self::set_bytes(row_bytes, spaces) + OVERREAD_BYTES + 4 * present)
    }

    /// Returns the sets of a whole cache; `None` as [`Cache::whole`].
    fn whole_sets(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<usize> {
        let sets = spaces.sets_of_all_rows()?;
        let bytes_max = bytes_max.checked_sub(4 * Self::present_words(sets))?;
        (sets <= Self::sets_in(row_bytes, bytes_max, spaces)?).then_some(sets)
    }

    fn present_words(sets: usize) -> usize {
        (sets * WAYS).div_ceil(32)
    }

    /// Creates a whole cache, which has a slot for every row of `row_bytes`. Returns `None` if a
    /// table of `spaces` is sparse, or if the cache takes more than `bytes_max` bytes.
    pub fn whole(row_bytes: usize, bytes_max: usize, spaces: &KeySpaces) -> Option<Self> {
        let sets = Self::whole_sets(row_bytes, bytes_max, spaces)?;
        let present = Zeroed::new(Self::present_words(sets));
        let addresses = AddressMap::of_all_rows(spaces)?;
        Some(Self { present, ..Self::with_addresses(row_bytes, addresses, LINE_WORDS) })
    }

    fn with_addresses(row_bytes: usize, addresses: AddressMap, header_words: usize) -> Self {
        let (sets, row_words) = (addresses.sets(), row_bytes.div_ceil(4));
        Self {
            row_bytes,
            row_words,
            header_words,
            sets,
            addresses,
            headers: Zeroed::new(sets * header_words),
            writer_states: Zeroed::new(sets * WRITER_WORDS),
            rows: Zeroed::new(sets * WAYS * row_words + OVERREAD_BYTES / 4),
            present: Zeroed::new(0),
            writes: WriteCounter::default(),
        }
    }

    /// Returns the bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Returns the number of rows that fit.
    pub fn slots(&self) -> usize {
        self.sets * WAYS
    }

    /// Returns an estimate of the number of cached rows, from an evenly spaced sample of the sets.
    pub fn rows_estimated(&self) -> usize {
        let step = self.sets.div_ceil(SAMPLED_SETS).max(1);
        let (mut sampled, mut rows) = (0, 0);
        for set in (0..self.sets).step_by(step) {
            sampled += 1;
            rows += (0..WAYS as u32).filter(|way| self.tag(set as u32, *way) != 0).count();
        }
        rows * self.sets / sampled.max(1)
    }

    /// Returns the bytes of memory that the cache takes.
    pub fn bytes(&self) -> usize {
        let parts = [&self.headers, &self.writer_states, &self.rows, &self.present];
        parts.iter().map(|words| 4 * words.len()).sum()
    }

    /// Returns the words of which a device has a copy: headers, writer states, rows.
    pub fn image(&self) -> Vec<u32> {
        let words = self.headers.iter().chain(&*self.writer_states).chain(&*self.rows);
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Returns the address map, and the headers, writer states and rows, for a copy on a device.
    /// The caller can free each array before it copies the next.
    pub(crate) fn into_parts(self) -> (AddressMap, [Zeroed<AtomicU32>; 3]) {
        (self.addresses, [self.headers, self.writer_states, self.rows])
    }

    /// Returns the map from rows to sets and tags.
    #[inline(always)]
    pub(crate) fn addresses(&self) -> &AddressMap {
        &self.addresses
    }

    /// Returns whether the cache is whole.
    pub fn is_whole(&self) -> bool {
        !self.present.is_empty()
    }

    /// Returns the bits of the slots of a whole cache, 32 a word, each set if the row is cached.
    #[inline(always)]
    pub(crate) fn present(&self) -> &[AtomicU32] {
        &self.present
    }

    /// Returns the headers of all sets.
    #[inline(always)]
    pub(crate) fn headers(&self) -> SetHeaders<'_> {
        SetHeaders::new(&self.headers, self.header_words > LINE_WORDS)
    }

    /// Returns the counter of the writes to all sets.
    #[inline(always)]
    pub(crate) fn writes(&self) -> &WriteCounter {
        &self.writes
    }

    fn set_header(&self, set: u32) -> &[AtomicU32; LINE_WORDS] {
        self.headers().of(set)
    }

    fn set_writer_state(&self, set: u32) -> &[AtomicU32] {
        &self.writer_states[set as usize * WRITER_WORDS..][..WRITER_WORDS]
    }

    /// Returns the row in `slot`, rounded up to whole racing reads.
    #[inline(always)]
    pub(crate) fn row(&self, slot: u32) -> &[AtomicU32] {
        let words = self.row_words.next_multiple_of(READ_WORDS);
        &self.rows[slot as usize * self.row_words..][..words]
    }

    /// Returns all rows.
    #[cfg(not(loom))]
    #[inline(always)]
    pub(crate) fn rows(&self) -> RawRows<'_> {
        RawRows::racing(&self.rows, self.row_words)
    }

    /// Prefetches what [`Cache::insert`] reads of the row's set.
    #[cfg(not(loom))]
    pub fn prefetch_insert(&self, row: RowKey) {
        let set = self.addresses.address_of(row).set;
        self.headers().prefetch(set);
        prefetch_lines(self.set_writer_state(set));
    }

    /// Prefetches the row in `slot`.
    #[cfg(not(loom))]
    #[inline(always)]
    pub(crate) fn prefetch_row(&self, slot: u32) {
        prefetch_lines(&self.rows[slot as usize * self.row_words..][..self.row_words]);
    }

    #[inline(always)]
    fn tag(&self, set: u32, way: u32) -> u64 {
        let (headers, way) = (self.headers(), way as usize);
        let high = headers.high(set).map_or(0, |high| high[way].load(Ordering::Relaxed));
        u64::from(high) << 32 | u64::from(headers.of(set)[way].load(Ordering::Relaxed))
    }

    fn set_tag(&self, set: u32, way: u32, tag: u64) {
        let (headers, way) = (self.headers(), way as usize);
        headers.of(set)[way].store(tag as u32, Ordering::Relaxed);
        if let Some(high) = headers.high(set) {
            high[way].store((tag >> 32) as u32, Ordering::Relaxed);
        }

        let slot = set as usize * WAYS + way;
        if let Some(word) = self.present.get(slot / 32) {
            let bit = 1 << (slot % 32);
            // Sets share a word, so their writers may change it at the same time.
            match tag {
                0 => word.fetch_and(!bit, Ordering::Relaxed),
                _ => word.fetch_or(bit, Ordering::Relaxed),
            };
        }
    }

    /// Copies the row into `out` `[row_bytes, rounded up to READ_BYTES]` if it is cached. If
    /// writers change the set for too long, the row counts as missing.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(&self, address: SetTag, out: &mut [u8]) -> bool {
        for _ in 0..READ_RETRIES_MAX {
            let probe = self.headers().probe::<S>(address);
            if probe.is_hit() {
                S::copy_racing(self.row(probe.slot()), out);
                if self.headers().validate(std::iter::once(probe)) {
                    return true;
                }
            } else if probe.way == WAYS as u32 {
                // A miss needs no validation: at worst a row that is just inserted is read from
                // flash once more.
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
        let hit = self.read::<Plain>(self.addresses.address_of(row), bytes);
        if hit {
            out.copy_from_slice(&bytes[..self.row_bytes]);
        }
        hit
    }

    /// Returns whether the cache can hold `row`: whether its key is in the key space of its table.
    pub fn can_hold(&self, row: RowKey) -> bool {
        self.addresses.address_of(row).tag != 0
    }

    /// Returns the epoch of the row's set. The caller takes it before it reads the row from flash,
    /// and inserts the row with it.
    pub fn epoch(&self, row: RowKey) -> Epoch {
        self.epoch_at(self.addresses.address_of(row))
    }

    /// Returns the epoch of the set of `address`.
    #[inline(always)]
    pub(crate) fn epoch_at(&self, address: SetTag) -> Epoch {
        Epoch(self.set_writer_state(address.set)[EPOCH].load(Ordering::Acquire))
    }

    /// Runs `write` as the only writer of the row's set, whose sequence number is odd until the
    /// end.
    fn write_set<R>(&self, row: RowKey, write: impl FnOnce(SetTag) -> R) -> R {
        let address = self.addresses.address_of(row);
        let header = self.set_header(address.set);
        let sequence = loop {
            // The exchange fails while the number is odd, and so waits for the set's other writer.
            let stable = header[SEQUENCE].load(Ordering::Relaxed) & !1;
            let taken = header[SEQUENCE].compare_exchange_weak(
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

        // The fence of `start_write` also orders the odd sequence number before the stores of
        // `write`.
        self.writes.start_write();
        let result = write(address);
        // The number is even again before `end_write`: a lookup that samples the counter after this
        // write finds no odd set.
        header[SEQUENCE].store(sequence.wrapping_add(2), Ordering::Release);
        self.writes.end_write();
        result
    }

    /// Stores a tag and a row. Only `write_set` calls this.
    fn store_row(&self, address: SetTag, way: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes);
        // The tag may come before the bytes: readers reject all that they read of the set until
        // `write_set` ends.
        self.set_tag(address.set, way, address.tag);
        let row = self.row(address.set * WAYS as u32 + way);
        let (words, rest) = bytes.as_chunks();
        for (word, bytes) in row.iter().zip(words) {
            word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 4];
            last[..rest.len()].copy_from_slice(rest);
            row[words.len()].store(u32::from_le_bytes(last), Ordering::Relaxed);
        }
    }

    /// Inserts a row, and evicts another one if the set is full. `since` is the epoch that the
    /// caller took before it read the row. If the row may have changed after that, the cache is not
    /// changed. Returns whether the row was inserted.
    pub fn insert(&self, row: RowKey, bytes: &[u8], since: Epoch) -> bool {
        self.write_set(row, |address| {
            if address.tag == 0 || self.epoch_at(address) != since {
                return false;
            }

            let way = match self.headers().probe::<Plain>(address).way {
                // Another worker may have inserted the row since the miss. Two ways must never have
                // one tag.
                way if way < WAYS as u32 => way,
                _ => self.assign_way(address),
            };
            self.store_row(address, way, bytes);
            true
        })
    }

    /// Returns the row's own way if the cache is whole. Else returns an empty way of the set, or
    /// evicts a row, and records the way in the eviction policy.
    fn assign_way(&self, address: SetTag) -> u32 {
        if let Some(way) = self.addresses.fixed_way(address.tag) {
            return way;
        }
        let mut ways = self.load_ways(address.set);
        let empty = (0..WAYS).find(|&way| self.tag(address.set, way as u32) == 0);
        let way = empty.unwrap_or_else(|| {
            ways.evict(|w| self.addresses.fingerprint(self.tag(address.set, w as u32)))
        });
        ways.assign(way, self.addresses.fingerprint(address.tag));
        self.store_ways(address.set, &ways);
        way as u32
    }

    /// Overwrites the row if it is cached. Returns whether it was. Inserts of the row with an older
    /// epoch are refused from now on.
    pub fn update(&self, row: RowKey, bytes: &[u8]) -> bool {
        self.change(row, |address, way| self.store_row(address, way, bytes))
    }

    /// Removes the row if it is cached. Returns whether it was. Inserts of the row with an older
    /// epoch are refused from now on.
    pub fn invalidate(&self, row: RowKey) -> bool {
        self.change(row, |address, way| self.set_tag(address.set, way, 0))
    }

    /// Starts a new epoch of the row's set, and runs `change` if the row is cached.
    fn change(&self, row: RowKey, change: impl FnOnce(SetTag, u32)) -> bool {
        self.write_set(row, |address| {
            let epoch = &self.set_writer_state(address.set)[EPOCH];
            // A thread that reads the new epoch also sees the writer's earlier stores.
            epoch.store(epoch.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);

            // The epoch has changed even if the row is not cached: an insert of its old bytes may
            // be on the way.
            let way = self.headers().probe::<Plain>(address).way;
            let cached = way < WAYS as u32;
            if cached {
                change(address, way);
            }
            cached
        })
    }

    /// Calls `each` with the key and the encoded bytes of every cached row, in no particular order.
    pub fn dump(&self, mut each: impl FnMut(RowKey, &[u8])) {
        let mut bytes = vec![0; self.row_bytes.next_multiple_of(READ_BYTES)];
        for slot in 0..self.slots() {
            let (set, way) = ((slot / WAYS) as u32, (slot % WAYS) as u32);
            let address = SetTag { set, tag: self.tag(set, way) };
            if address.tag != 0 && self.read::<Plain>(address, &mut bytes) {
                each(self.addresses.row_of(address), &bytes[..self.row_bytes]);
            }
        }
    }

    /// Calls `each` with every cached row's table and key, in no particular order.
    pub fn each_key(&self, mut each: impl FnMut(RowKey)) {
        for slot in 0..self.slots() {
            let (set, way) = ((slot / WAYS) as u32, (slot % WAYS) as u32);
            let address = SetTag { set, tag: self.tag(set, way) };
            if address.tag != 0 {
                each(self.addresses.row_of(address));
            }
        }
    }

    /// Loads the state of the eviction policy in a set.
    fn load_ways(&self, set: u32) -> Ways {
        let state = self.set_writer_state(set);
        let word = |i: usize| state[i].load(Ordering::Relaxed);
        let hands = word(HANDS).to_le_bytes();
        let mut ghosts = [0; GHOSTS];
        for (i, two) in ghosts.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let both = word(HANDS + 1 + i);
            *two = [both as u16, (both >> 16) as u16];
        }

        Ways {
            uses: self.set_header(set)[USES].load(Ordering::Relaxed),
            probation: u16::from_le_bytes([hands[0], hands[1]]),
            main_hand: hands[2] & 15,
            probation_hand: hands[2] >> 4,
            ghosts,
            ghost_hand: hands[3],
        }
    }

    fn store_ways(&self, set: u32, ways: &Ways) {
        let state = self.set_writer_state(set);
        let [low, high] = ways.probation.to_le_bytes();
        let hands = [low, high, ways.main_hand | ways.probation_hand << 4, ways.ghost_hand];

        self.set_header(set)[USES].store(ways.uses, Ordering::Relaxed);
        state[HANDS].store(u32::from_le_bytes(hands), Ordering::Relaxed);
        for (word, [low, high]) in state[HANDS + 1..].iter().zip(ways.ghosts.as_chunks().0) {
            word.store(u32::from(*high) << 16 | u32::from(*low), Ordering::Relaxed);
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

    /// Returns a row that holds its key and the number of its write.
    fn row_of(key: u64, write: u8) -> [u8; 20] {
        let mut row = [write; 20];
        row[..8].copy_from_slice(&key.to_le_bytes());
        row
    }

    /// Returns the key spaces of indexed tables, of which the second is large, and of sparse
    /// tables.
    fn spaces_of_both_kinds() -> [KeySpaces; 2] {
        [
            KeySpaces::new(vec![Some(100), Some(4_000_000_000), Some(1 << 20)]),
            KeySpaces::new(vec![None, Some(50), None]),
        ]
    }

    /// Returns a key that `spaces` allow; different small numbers give different keys.
    fn key_of(spaces: &KeySpaces, table: u16, number: u64) -> u64 {
        match spaces.end(table) {
            Some(end) => number % end,
            None => number.wrapping_mul(0x0123_4567_89ab_cdef),
        }
    }

    /// Returns a cache for each of `spaces_of_both_kinds`, and a whole cache.
    fn caches_of_all_kinds() -> [(Cache, KeySpaces); 3] {
        let [indexed, sparse] = spaces_of_both_kinds();
        let few = KeySpaces::new(vec![Some(100), Some(3000), Some(50)]);
        [
            (Cache::new(20, 64 * 1024, &indexed).unwrap(), indexed),
            (Cache::new(20, 64 * 1024, &sparse).unwrap(), sparse),
            (Cache::whole(20, 128 * 1024, &few).unwrap(), few),
        ]
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
                self.0.read::<S>(self.0.addresses.address_of(self.1), self.2)
            }
        }
        dispatch(isa, Read(cache, row, out))
    }

    proptest! {
        /// A hit is always the row written last, and no row is evicted while its set has room. Each
        /// family of instructions reads the same.
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec(step(), 1..300)) {
            for (cache, spaces) in caches_of_all_kinds() {
                let mut model: HashMap<RowKey, u8> = HashMap::new();
                for s in &steps {
                    match *s {
                        Step::Insert(table, k, v) => {
                            let row = RowKey { table, key: key_of(&spaces, table, k) };
                            prop_assert!(put(&cache, row, &row_of(row.key, v)));
                            model.insert(row, v);
                        }
                        Step::Update(table, k, v) => {
                            let row = RowKey { table, key: key_of(&spaces, table, k) };
                            let cached = cache.update(row, &row_of(row.key, v));
                            prop_assert_eq!(cached, model.contains_key(&row));
                            model.entry(row).and_modify(|old| *old = v);
                        }
                        Step::Invalidate(table, k) => {
                            let row = RowKey { table, key: key_of(&spaces, table, k) };
                            prop_assert_eq!(cache.invalidate(row), model.remove(&row).is_some());
                        }
                        Step::Query(table, k) => {
                            let row = RowKey { table, key: key_of(&spaces, table, k) };
                            for isa in Isa::available() {
                                // Longer than the row, like a buffer for rows of several widths.
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
    fn a_key_outside_its_table_is_never_cached() {
        let spaces = KeySpaces::new(vec![Some(10), Some(10)]);
        for make in [Cache::new, Cache::whole] {
            let cache = make(20, 64 * 1024, &spaces).unwrap();
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
    }

    #[test]
    fn a_whole_cache_holds_every_row_in_its_bytes() {
        let spaces = KeySpaces::new(vec![Some(1000), Some(0), Some(37)]);
        let (mut low, mut high) = (0, 1 << 20);
        while low < high {
            let bytes = (low + high) / 2;
            match Cache::whole(20, bytes, &spaces) {
                Some(_) => high = bytes,
                None => low = bytes + 1,
            }
        }
        let cache = Cache::whole(20, low, &spaces).unwrap();
        assert_eq!(cache.bytes(), low);

        let rows = |table, end| (0..end).map(move |key| RowKey { table, key });
        for row in rows(0, 1000).chain(rows(2, 37)) {
            assert!(put(&cache, row, &row_of(row.key, row.table as u8)));
        }
        let mut out = [0; 20];
        for row in rows(0, 1000).chain(rows(2, 37)) {
            assert!(cache.query(row, &mut out) && out == row_of(row.key, row.table as u8));
        }
        assert!(Cache::whole(20, 1 << 30, &KeySpaces::new(vec![Some(10), None])).is_none());
    }

    #[test]
    fn a_late_insert_never_brings_an_old_row_back() {
        for (cache, _) in caches_of_all_kinds() {
            let row = RowKey { table: 0, key: 5 };
            for change in [|c: &Cache, r| c.update(r, &[2; 20]), |c: &Cache, r| c.invalidate(r)] {
                let before = cache.epoch(row);
                assert!(!change(&cache, row), "the row is not cached");
                assert!(!cache.insert(row, &[1; 20], before), "the row was read before the change");
                assert!(!cache.query(row, &mut [0; 20]));
            }
            assert!(put(&cache, row, &[3; 20]));
        }
    }

    #[test]
    fn a_full_cache_keeps_what_is_used() {
        let cache = Cache::new(20, 100 * 1024, &spaces_of_both_kinds()[1]).unwrap();
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

    /// A megabyte of indexed tables of 16 columns in u8 holds three times as many rows as one of
    /// f32 rows. The slots of the latter would have 8 bytes of key and 8 bytes of counter.
    #[test]
    fn a_slot_is_small() {
        let spaces = KeySpaces::new(vec![Some(1 << 20)]);
        let cache = Cache::new(20, 1 << 20, &spaces).unwrap();
        let f32_rows = (1 << 20) / (64 + 16);
        assert!(cache.slots() >= 3 * f32_rows, "{} rows", cache.slots());
    }

    /// Queries a row of which every 8 bytes hold the key and the write. Returns true on a hit.
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
        let whole = Cache::whole(136, 1 << 20, &KeySpaces::new(vec![Some(0), Some(400)])).unwrap();
        for cache in [Cache::new(136, 40 * 1024, &spaces_of_both_kinds()[0]).unwrap(), whole] {
            no_reader_sees_a_torn_row_of(&cache);
        }
    }

    fn no_reader_sees_a_torn_row_of(cache: &Cache) {
        let (reads, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for writer in 0..2u64 {
                let finished = &finished;
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
                let (reads, finished) = (&reads, &finished);
                scope.spawn(move || {
                    // A reader runs as long as the writers, and then once more over all keys.
                    loop {
                        let last = finished.load(Ordering::Acquire) == 2;
                        let hits = (0..400).filter(|&key| read_whole(isa, cache, key)).count();
                        reads.fetch_add(hits, Ordering::Relaxed);
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
