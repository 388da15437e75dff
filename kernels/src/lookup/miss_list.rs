//! The miss list: the rows that a query did not find in memory, each once, and the bags that wait
//! for those rows. A list allocates all its memory when it is created. A query asks for room before
//! it records a bag, so the list never fills up in the middle of a bag. This file reads no flash:
//! the worker fetches the rows.

use crate::cache::Epoch;
use crate::cache::address::RowKey;
use crate::cuda::driver::CudaError;
use crate::cuda::memory::Mapped;
use crate::cuda::{Device, HostMemory};
use crate::lookup::probe_ring::ProbeRing;
use crate::simd::READ_BYTES;
use crate::simd::huge_pages::Zeroed;

/// The result of fetching a missing row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// Not fetched yet, or not before the answer because of the miss policy. The default row is
    /// used.
    Pending,
    /// Not fetched before the deadline. The default row is used.
    Late,
    /// Read from flash and verified; the live generation's own row.
    Fresh,
    /// The table does not have the key. The default row is used.
    Absent,
    /// The row's flash page failed its check or could not be read. The default row is used.
    Damaged,
}

/// One missing row. It is fetched once, even if several lookups of the batch need it.
#[derive(Clone, Copy, Debug)]
pub struct Miss {
    /// The row.
    pub row: RowKey,
    /// The staging row that receives the row's bytes.
    pub slot: u32,
    /// The row's location on flash. The worker sets it and sorts by it.
    pub place: u64,
    /// The epoch of the row's set when the row was missing. The worker inserts the row with it.
    pub epoch: Epoch,
}

/// The rest of a bag whose pooling stopped at its first missing row.
#[derive(Clone, Copy, Debug)]
pub struct OpenBag {
    /// Number of the feature.
    pub feature: u16,
    /// Number of the sample.
    pub sample: u32,
    /// Rows that were pooled before the first miss.
    pub(crate) done: u32,
    /// First of the bag's `entries`: one for each row that is still to be pooled, in key order.
    pub(crate) first_entry: u32,
    pub(crate) entries: u32,
}

/// The entry for a key that its table does not have.
const ABSENT: u32 = u32::MAX;
/// Marks an empty entry of the hash table.
const NO_MISS: u32 = u32::MAX;

/// The miss list and the staging rows of one request.
pub struct MissList {
    row_bytes_max: usize,
    /// Bytes from one staging row to the next, in whole words.
    stride: usize,
    /// Maximum number of entries.
    capacity: usize,
    /// The staging rows, `[capacity, stride]`.
    staging: HostMemory<u8>,
    /// The state of each staging row in use.
    states: Vec<RowState>,
    list: Vec<Miss>,
    /// Hash table with open addressing from a row to its position in `list`, at most half full.
    positions: Box<[u32]>,
    /// The staging row of each row that a bag waits for, or `ABSENT`.
    entries: Vec<u32>,
    bags: Vec<OpenBag>,
    /// Lookups that missed, duplicates counted.
    lookups: u64,
    scratch: Scratch,
}

/// The memory that a query works in.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The copy of one row. It starts on a cache line, because a load of a vector that spans two
    /// lines is slow.
    pub row: Zeroed<u8>,
    /// The ring of the lookup pipeline; `None` while a query uses it.
    pub ring: Option<Box<ProbeRing>>,
}

impl MissList {
    /// Creates a list with room for `capacity` waiting lookups of rows of up to `row_bytes_max`
    /// bytes.
    pub fn new(capacity: usize, row_bytes_max: usize) -> Self {
        let (capacity, stride) = (capacity.max(1), row_bytes_max.next_multiple_of(4));
        Self::staged(capacity, row_bytes_max, HostMemory::Plain(Zeroed::new(capacity * stride)))
    }

    /// Creates a list as [`MissList::new`] does, with staging rows that `device` can read.
    ///
    /// # Errors
    /// [`CudaError`] if there is not enough memory that the GPU can read.
    pub fn on(device: &Device, capacity: usize, row_bytes_max: usize) -> Result<Self, CudaError> {
        let (capacity, stride) = (capacity.max(1), row_bytes_max.next_multiple_of(4));
        Ok(Self::staged(capacity, row_bytes_max, device.host_memory(capacity * stride)?))
    }

    fn staged(capacity: usize, row_bytes_max: usize, staging: HostMemory<u8>) -> Self {
        Self {
            row_bytes_max,
            stride: row_bytes_max.next_multiple_of(4),
            capacity,
            staging,
            states: Vec::with_capacity(capacity),
            list: Vec::with_capacity(capacity),
            positions: vec![NO_MISS; (2 * capacity).next_power_of_two()].into(),
            entries: Vec::with_capacity(capacity),
            bags: Vec::with_capacity(capacity),
            lookups: 0,
            scratch: Scratch {
                row: Zeroed::new(row_bytes_max.next_multiple_of(READ_BYTES)),
                ring: Some(Box::default()),
            },
        }
    }

    /// Returns the bytes of memory of a list of this size.
    pub fn bytes(capacity: usize, row_bytes_max: usize) -> usize {
        let capacity = capacity.max(1);
        capacity
            * (row_bytes_max.next_multiple_of(4) + 1 + size_of::<Miss>() + 4 + size_of::<OpenBag>())
            + 4 * (2 * capacity).next_power_of_two()
            + row_bytes_max.next_multiple_of(READ_BYTES)
            + size_of::<ProbeRing>()
    }

    /// Removes all misses and bags. Keeps the memory.
    pub fn clear(&mut self) {
        // The table may be large, and without a miss nothing was written to it.
        if !self.list.is_empty() {
            self.positions.fill(NO_MISS);
        }
        self.states.clear();
        self.list.clear();
        self.entries.clear();
        self.bags.clear();
        self.lookups = 0;
    }

    /// Returns whether no bag waits.
    pub fn is_empty(&self) -> bool {
        self.bags.is_empty()
    }

    /// Returns whether a bag of `keys` lookups fits, even if all of them miss.
    pub(crate) fn has_room(&self, keys: usize) -> bool {
        self.entries.len() + keys <= self.capacity
    }

    /// Returns the number of lookups that missed, duplicates counted.
    pub fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Returns the missing rows, each once.
    pub fn list(&self) -> &[Miss] {
        &self.list
    }

    /// Returns the missing rows for the caller to fill in and reorder.
    pub fn list_mut(&mut self) -> &mut [Miss] {
        &mut self.list
    }

    /// Returns the bags that wait.
    pub fn bags(&self) -> &[OpenBag] {
        &self.bags
    }

    /// Returns the staging row `slot`, `[row_bytes_max]`.
    pub fn row(&self, slot: u32) -> &[u8] {
        let start = slot as usize * self.stride;
        &self.staging[start..start + self.row_bytes_max]
    }

    /// Returns the staging row `slot`, `[row_bytes_max]`, for the caller to write.
    pub fn row_mut(&mut self, slot: u32) -> &mut [u8] {
        let start = slot as usize * self.stride;
        &mut self.staging[start..start + self.row_bytes_max]
    }

    /// Returns the staging rows and the words from one to the next; `None` if no GPU can read them.
    pub(crate) fn staging(&self) -> Option<(&Mapped<u8>, usize)> {
        Some((self.staging.mapped()?, self.stride / 4))
    }

    /// Returns the state of the row in `slot`.
    pub fn state(&self, slot: u32) -> RowState {
        self.states[slot as usize]
    }

    /// Sets the state of the row in `slot`.
    pub fn set_state(&mut self, slot: u32, state: RowState) {
        self.states[slot as usize] = state;
    }

    fn new_slot(&mut self, state: RowState) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    /// Takes the scratch memory out. The query returns it with `give_scratch`.
    pub(crate) fn take_scratch(&mut self) -> Scratch {
        std::mem::take(&mut self.scratch)
    }

    pub(crate) fn give_scratch(&mut self, scratch: Scratch) {
        self.scratch = scratch;
    }

    /// Starts the record of a bag whose first `done` rows are pooled. The caller adds an entry for
    /// each later row.
    pub(crate) fn open_bag(&mut self, feature: u16, sample: usize, done: usize) {
        let first_entry = self.entries.len() as u32;
        self.bags.push(OpenBag {
            feature,
            sample: sample as u32,
            done: done as u32,
            first_entry,
            entries: 0,
        });
    }

    fn push_entry(&mut self, slot: u32) {
        self.entries.push(slot);
        if let Some(bag) = self.bags.last_mut() {
            bag.entries += 1;
        }
    }

    fn entries_of(&self, bag: &OpenBag) -> &[u32] {
        &self.entries[bag.first_entry as usize..(bag.first_entry + bag.entries) as usize]
    }

    /// Returns the rows that a bag waited for, in key order: the state of each, and a slice that
    /// starts with its bytes.
    pub(crate) fn rows_of(&self, bag: &OpenBag) -> impl Iterator<Item = (RowState, &[u8])> {
        self.entries_of(bag).iter().map(|&slot| match slot {
            ABSENT => (RowState::Absent, &[] as &[u8]),
            slot => (self.state(slot), self.row(slot)),
        })
    }

    /// Returns the rows that a bag waited for, in key order: the state of each, and its slot if it
    /// is fresh.
    pub(crate) fn slots_of(&self, bag: &OpenBag) -> impl Iterator<Item = (RowState, Option<u32>)> {
        self.entries_of(bag).iter().map(|&slot| match slot {
            ABSENT => (RowState::Absent, None),
            slot => (self.state(slot), (self.state(slot) == RowState::Fresh).then_some(slot)),
        })
    }

    /// Adds an entry for a key that its table does not have.
    pub(crate) fn add_absent(&mut self) {
        self.push_entry(ABSENT);
    }

    /// Adds an entry for a hit that follows a miss in its bag, and copies the row into staging.
    pub(crate) fn stage_hit(&mut self, bytes: &[u8]) {
        let slot = self.new_slot(RowState::Fresh);
        self.row_mut(slot)[..bytes.len()].copy_from_slice(bytes);
        self.push_entry(slot);
    }

    /// Adds an entry for a missing row. A row that was added before is not listed again.
    pub(crate) fn add_miss(&mut self, row: RowKey, epoch: Epoch) {
        self.lookups += 1;

        // The hash table is at most half full, so the loop ends.
        let mask = self.positions.len() - 1;
        let mut at = row.hash() as usize & mask;
        while self.positions[at] != NO_MISS {
            let known = self.list[self.positions[at] as usize];
            if known.row == row {
                return self.push_entry(known.slot);
            }
            at = (at + 1) & mask;
        }

        let slot = self.new_slot(RowState::Pending);
        self.positions[at] = self.list.len() as u32;
        self.list.push(Miss { row, slot, place: 0, epoch });
        self.push_entry(slot);
    }
}
