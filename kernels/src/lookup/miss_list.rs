//! What a query leaves open: the rows that fast memory did not hold, and the bags that wait for
//! them. All memory is taken once; a list that is full says so before a bag is begun, never
//! half-way through it.

use crate::cache::Epoch;
use crate::cache::address::RowKey;
use crate::cuda::driver::CudaError;
use crate::cuda::memory::Mapped;
use crate::cuda::{Device, HostMemory};
use crate::lookup::pipeline::Ring;
use crate::simd::READ_BYTES;
use crate::simd::huge_pages::Zeroed;

/// What became of a row that missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// Not fetched: the miss policy lets the default row answer.
    Pending,
    /// Not fetched because the deadline came first: the default row answers.
    Late,
    /// Read from flash, checked, current.
    Fresh,
    /// The table has no such key: the default row answers.
    Absent,
    /// The page that holds it failed its check or could not be read: the default row answers.
    Damaged,
}

/// One row to fetch, once, however often the batch asks for it.
#[derive(Clone, Copy, Debug)]
pub struct Miss {
    /// The row.
    pub row: RowKey,
    /// Where its bytes go.
    pub slot: u32,
    /// Where it lies on flash; for the caller to fill in and to sort by.
    pub place: u64,
    /// The state of its set in the cache when it was missing; to insert it with.
    pub epoch: Epoch,
}

/// The rest of a bag whose pooling stopped at its first missing row.
#[derive(Clone, Copy, Debug)]
pub struct OpenBag {
    /// Number of the feature.
    pub feature: u16,
    /// Number of the sample.
    pub sample: u32,
    /// Rows pooled before the first miss.
    pub(crate) done: u32,
    /// Range in `refs`: one entry for each row still to pool, in order.
    pub(crate) first_ref: u32,
    pub(crate) refs: u32,
}

/// Stands in `refs` for a key known not to be in its table.
const ABSENT: u32 = u32::MAX;
const NO_SLOT: u32 = u32::MAX;

/// The miss list and the staging rows of one request.
pub struct MissList {
    row_bytes_max: usize,
    /// Bytes from one staged row to the next: whole words.
    stride: usize,
    capacity: usize,
    staging: HostMemory<u8>,
    states: Vec<RowState>,
    list: Vec<Miss>,
    /// Open addressing from row to position in `list`; twice `capacity` entries.
    positions: Box<[u32]>,
    refs: Vec<u32>,
    bags: Vec<OpenBag>,
    lookups: u64,
    scratch: Scratch,
}

/// What a query works in.
#[derive(Default)]
pub(crate) struct Scratch {
    /// For one row on its way from the cache; begins on a cache line, since a vector that lies on
    /// two is slow to load again.
    pub row: Zeroed<u8>,
    /// For what is known of the next keys; `None` while it is lent.
    pub ring: Option<Box<Ring>>,
}

impl MissList {
    /// Room for `capacity` lookups that wait, rows of up to `row_bytes_max` bytes.
    pub fn new(capacity: usize, row_bytes_max: usize) -> Self {
        let (capacity, stride) = (capacity.max(1), row_bytes_max.next_multiple_of(4));
        Self::staged(capacity, row_bytes_max, HostMemory::Plain(Zeroed::new(capacity * stride)))
    }

    /// The same, where `device` reaches the staged rows.
    ///
    /// # Errors
    /// There is not enough memory that a GPU reaches.
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
            positions: vec![NO_SLOT; (2 * capacity).next_power_of_two()].into(),
            refs: Vec::with_capacity(capacity),
            bags: Vec::with_capacity(capacity),
            lookups: 0,
            scratch: Scratch {
                row: Zeroed::new(row_bytes_max.next_multiple_of(READ_BYTES)),
                ring: Some(Box::default()),
            },
        }
    }

    /// All bytes held by a list of that size.
    pub fn bytes(capacity: usize, row_bytes_max: usize) -> usize {
        let capacity = capacity.max(1);
        capacity
            * (row_bytes_max.next_multiple_of(4) + 1 + size_of::<Miss>() + 4 + size_of::<OpenBag>())
            + 4 * (2 * capacity).next_power_of_two()
            + row_bytes_max.next_multiple_of(READ_BYTES)
            + size_of::<Ring>()
    }

    /// Forgets everything; keeps the memory.
    pub fn clear(&mut self) {
        if !self.list.is_empty() {
            self.positions.fill(NO_SLOT);
        }
        self.states.clear();
        self.list.clear();
        self.refs.clear();
        self.bags.clear();
        self.lookups = 0;
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bags.is_empty()
    }

    /// Whether a bag of `keys` more lookups is sure to fit.
    pub(crate) fn has_room(&self, keys: usize) -> bool {
        self.refs.len() + keys <= self.capacity
    }

    /// Lookups that missed, duplicates counted.
    pub fn lookups(&self) -> u64 {
        self.lookups
    }

    /// The distinct rows to fetch.
    pub fn list(&self) -> &[Miss] {
        &self.list
    }

    /// The same, to be reordered.
    pub fn list_mut(&mut self) -> &mut [Miss] {
        &mut self.list
    }

    /// The bags that wait.
    pub fn bags(&self) -> &[OpenBag] {
        &self.bags
    }

    /// The staged bytes of `slot`, `[row_bytes_max]`.
    pub fn row(&self, slot: u32) -> &[u8] {
        let start = slot as usize * self.stride;
        &self.staging[start..start + self.row_bytes_max]
    }

    /// The same, to be written.
    pub fn row_mut(&mut self, slot: u32) -> &mut [u8] {
        let start = slot as usize * self.stride;
        &mut self.staging[start..start + self.row_bytes_max]
    }

    /// The staged rows where a GPU reaches them, and the words from one to the next.
    pub(crate) fn staging(&self) -> Option<(&Mapped<u8>, usize)> {
        Some((self.staging.mapped()?, self.stride / 4))
    }

    /// What became of the row in `slot`.
    pub fn state(&self, slot: u32) -> RowState {
        self.states[slot as usize]
    }

    /// Records what became of the row in `slot`.
    pub fn set_state(&mut self, slot: u32, state: RowState) {
        self.states[slot as usize] = state;
    }

    fn new_slot(&mut self, state: RowState) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    /// Lends the scratch memory; `give_scratch` brings it back.
    pub(crate) fn take_scratch(&mut self) -> Scratch {
        std::mem::take(&mut self.scratch)
    }

    pub(crate) fn give_scratch(&mut self, scratch: Scratch) {
        self.scratch = scratch;
    }

    /// Begins a bag that waits: its first `done` rows are pooled, the rest follow.
    pub(crate) fn open(&mut self, feature: u16, sample: usize, done: usize) {
        let first_ref = self.refs.len() as u32;
        self.bags.push(OpenBag {
            feature,
            sample: sample as u32,
            done: done as u32,
            first_ref,
            refs: 0,
        });
    }

    fn push_ref(&mut self, slot: u32) {
        self.refs.push(slot);
        if let Some(bag) = self.bags.last_mut() {
            bag.refs += 1;
        }
    }

    /// The rows that a bag waited for, in key order: what became of each, and its bytes at the
    /// front.
    pub(crate) fn rows_of(&self, bag: &OpenBag) -> impl Iterator<Item = (RowState, &[u8])> {
        let refs = &self.refs[bag.first_ref as usize..(bag.first_ref + bag.refs) as usize];
        refs.iter().map(|&slot| match slot {
            ABSENT => (RowState::Absent, &[] as &[u8]),
            slot => (self.state(slot), self.row(slot)),
        })
    }

    /// The same rows: what became of each, and its slot where it is fresh.
    pub(crate) fn slots_of(&self, bag: &OpenBag) -> impl Iterator<Item = (RowState, Option<u32>)> {
        let refs = &self.refs[bag.first_ref as usize..(bag.first_ref + bag.refs) as usize];
        refs.iter().map(|&slot| match slot {
            ABSENT => (RowState::Absent, None),
            slot => (self.state(slot), (self.state(slot) == RowState::Fresh).then_some(slot)),
        })
    }

    /// Adds a key that its table does not have.
    pub(crate) fn absent(&mut self) {
        self.push_ref(ABSENT);
    }

    /// Keeps a copy of a row that hit, for a bag that waits for an earlier one.
    pub(crate) fn keep(&mut self, bytes: &[u8]) {
        let slot = self.new_slot(RowState::Fresh);
        self.row_mut(slot)[..bytes.len()].copy_from_slice(bytes);
        self.push_ref(slot);
    }

    /// Adds one lookup of a missing row; asked for twice, it is fetched once.
    pub(crate) fn miss(&mut self, row: RowKey, epoch: Epoch) {
        self.lookups += 1;
        let mask = self.positions.len() - 1;
        let mut at = row.hash() as usize & mask;
        while self.positions[at] != NO_SLOT {
            let known = self.list[self.positions[at] as usize];
            if known.row == row {
                return self.push_ref(known.slot);
            }
            at = (at + 1) & mask;
        }
        let slot = self.new_slot(RowState::Pending);
        self.positions[at] = self.list.len() as u32;
        self.list.push(Miss { row, slot, place: 0, epoch });
        self.push_ref(slot);
    }
}
