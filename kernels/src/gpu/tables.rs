//! The caches and resident tables of a model in device memory, and the changes to both. A cache is
//! copied from the host byte for byte. Later the same changes give the same bytes as in a cache on
//! the host. All generations of a model share the caches, and the resident tables that did not
//! change. Never decides which rows are cached.

use crate::cache::address::{AddressMap, RowKey, SetTag, TableHasher, mix};
use crate::cache::eviction::WAYS;
use crate::cache::resident::Resident;
use crate::cache::{Cache, Epoch};
use crate::cuda::driver::{CudaError, Event, Gpu, Result, Stream, report};
use crate::cuda::memory::{Buffer, DeviceValue, Mapped};
use crate::gpu::launch::{
    CacheChanges, Change, ChangeList, DeviceCacheView, Kernels, RowWrite, SlotRange, StagedRows,
    Verb,
};
use crate::gpu::turns::Turns;
use crate::simd::OVERREAD_BYTES;
use crate::simd::atomics::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Values of one upload.
const UPLOAD_VALUES: usize = 1 << 18;
/// Slots that one launch dumps. Changes of the cache wait while the slots are copied.
const DUMP_SLOTS: usize = 1024;

/// The place of a table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableStorage {
    /// In a cache, by its number.
    Cached(usize),
    /// All of them in a resident table, by its number.
    Resident(usize),
}

/// A cache in device memory.
struct DeviceCache {
    view: DeviceCacheView,
    addresses: AddressMap,
    set_headers: Buffer<u32>,
    writer_states: Buffer<u32>,
    rows: Buffer<u32>,
}

/// A resident table in device memory.
pub(crate) struct DeviceResident {
    pub rows: Buffer<u32>,
    pub row_words: usize,
    pub row_bytes: usize,
    pub count: usize,
    /// The index from key to row; `None` if the key is the row's position.
    pub index: Option<DeviceIndex>,
}

/// The index of a resident table, copied from `Resident`.
pub(crate) struct DeviceIndex {
    pub hashes: Buffer<u64>,
    /// The position of each bucket's first hash, `[buckets + 1]`.
    pub buckets: Buffer<u32>,
}

/// The tables of a model on a GPU. All workers share them.
pub struct DeviceTables {
    shared: Arc<Shared>,
    residents: Vec<Arc<DeviceResident>>,
}

/// The parts that all generations of a model share on a GPU.
struct Shared {
    gpu: Arc<Gpu>,
    /// The stream of all changes to the caches and the resident tables. Dropped before both.
    changes: Mutex<Stream>,
    kernels: Kernels,
    storages: Vec<TableStorage>,
    caches: Vec<DeviceCache>,
    cache_bytes: usize,
    turns: Turns,
}

impl Shared {
    fn changes(&self) -> MutexGuard<'_, Stream> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event after changes. Its drop waits for all changes so far, so its owner declares it before
/// the memory that they use.
struct Made {
    event: Event,
    shared: Arc<Shared>,
}

impl Made {
    fn new(shared: &Arc<Shared>) -> Result<Self> {
        Ok(Self { event: shared.gpu.event()?, shared: Arc::clone(shared) })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // A failed change may have launched some of its work after the last record. No lock is held
        // while the host waits, because requests with missing rows take it.
        let recorded = self.shared.changes().record(&self.event);
        report(recorded.and_then(|()| self.event.wait()));
    }
}

/// New rows of resident tables, on the device.
pub struct ResidentWrites {
    /// Dropped first: [`DeviceTables::write_residents`] does not wait.
    _written: Made,
    list: Buffer<RowWrite>,
    rows: Buffer<u32>,
    /// The tables that the list points to.
    _tables: Vec<Arc<DeviceResident>>,
}

/// Uploads `len` values in pieces.
fn upload<T: DeviceValue>(
    stream: &Stream,
    len: usize,
    mut values: impl Iterator<Item = T>,
) -> Result<Buffer<T>> {
    let to = stream.gpu().buffer(len)?;
    let mut piece = Vec::with_capacity(UPLOAD_VALUES.min(len));
    for at in (0..len).step_by(UPLOAD_VALUES) {
        piece.clear();
        piece.extend(values.by_ref().take(UPLOAD_VALUES));
        stream.upload(&piece, &to, at)?;
    }
    Ok(to)
}

/// Returns the word of up to four bytes of a row.
fn word_of(four: &[u8]) -> u32 {
    four.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

impl DeviceCache {
    fn new(stream: &Stream, cache: Cache) -> Result<Self> {
        let row_bytes = cache.row_bytes();
        let (addresses, parts) = cache.into_parts();
        // The host frees each part before the next is uploaded. At most the rows of one cache
        // therefore exist twice.
        let [set_headers, writer_states, rows] = parts.map(|part| {
            let words = part.iter().map(|word| word.load(Ordering::Relaxed));
            upload(stream, part.len(), words)
        });
        let (set_headers, writer_states, rows) = (set_headers?, writer_states?, rows?);

        let sets = addresses.sets();
        let table_bits = match addresses.table_hasher(0) {
            TableHasher::Indexed { .. } => 0,
            TableHasher::Numbered { .. } => DeviceCacheView::WHOLE,
            TableHasher::Hashed { table_bits, .. } => table_bits,
        };
        let view = DeviceCacheView {
            set_headers: set_headers.address(),
            writer_states: writer_states.address(),
            rows: rows.address(),
            sets: sets as u64,
            row_bytes: row_bytes as u32,
            row_words: row_bytes.div_ceil(4) as u32,
            header_words: (set_headers.len() / sets) as u32,
            table_bits,
        };
        Ok(Self { view, addresses, set_headers, writer_states, rows })
    }

    fn hash(&self, row: RowKey) -> SetTag {
        self.addresses.address_of(row)
    }
}

impl DeviceResident {
    fn new(stream: &Stream, table: &Resident) -> Result<Self> {
        let (row_bytes, count) = (table.row_bytes(), table.rows_len());
        let row_words = row_bytes.div_ceil(4);
        // As in a cache, a lane may load up to 12 bytes after the last row.
        let after = std::iter::repeat_n(0, OVERREAD_BYTES / 4);
        let rows = upload(stream, count * row_words + after.len(), table.words().chain(after))?;
        let index = match table.index() {
            None => None,
            Some((hashes, buckets)) => {
                let hashes = upload(stream, hashes.len(), hashes.iter().copied())?;
                let buckets = upload(stream, buckets.len(), buckets.iter().copied())?;
                Some(DeviceIndex { hashes, buckets })
            }
        };
        Ok(Self { rows, row_words, row_bytes, count, index })
    }
}

impl DeviceTables {
    /// Moves the caches and copies the resident tables of a model to `gpu`. `storages` has the
    /// place of each table's rows.
    ///
    /// # Errors
    /// `CudaError`: the GPU has no memory for them, or no kernels.
    pub fn new(
        gpu: &Arc<Gpu>,
        storages: Vec<TableStorage>,
        caches: Vec<Cache>,
        residents: &[&Resident],
    ) -> Result<Self> {
        let (stream, kernels) = (gpu.stream()?, Kernels::load(gpu)?);
        kernels.warm(&stream)?;
        let cache_bytes = caches.iter().map(Cache::bytes).sum();
        let resident_bytes: usize = residents.iter().map(|table| table.bytes()).sum();
        let (needed, free) = ((cache_bytes + resident_bytes) as u64, gpu.free_bytes()?);
        // Before the first copy, so that the error has the sum. Free memory that is shared with the
        // host is no bound: the system gives what files have in memory.
        if needed > free && !gpu.integrated() {
            return Err(CudaError::NoRoom { needed, free });
        }
        let on_device = |c| DeviceCache::new(&stream, c);
        let caches = caches.into_iter().map(on_device).collect::<Result<_>>()?;
        let on_device = |r: &&Resident| DeviceResident::new(&stream, r).map(Arc::new);
        let residents = residents.iter().map(on_device).collect::<Result<_>>()?;

        let (gpu, changes, turns) = (Arc::clone(gpu), Mutex::new(stream), Turns::new(gpu)?);
        let shared = Shared { gpu, kernels, storages, caches, cache_bytes, changes, turns };
        Ok(Self { shared: Arc::new(shared), residents })
    }

    /// Returns the tables of another generation. The caches are the same. The resident tables are
    /// those in `replaced`, each with its number, and the others of this generation.
    ///
    /// # Errors
    /// `CudaError`: the GPU has no memory for them.
    pub fn with_residents(&self, replaced: &[(usize, Resident)]) -> Result<Self> {
        let mut residents = self.residents.clone();
        // Not the stream of the changes, for which requests with missing rows would wait.
        let stream = self.gpu().stream()?;
        for (number, table) in replaced {
            residents[*number] = Arc::new(DeviceResident::new(&stream, table)?);
        }
        Ok(Self { shared: Arc::clone(&self.shared), residents })
    }

    /// Returns the bytes of all caches, as they were in host memory.
    pub fn cache_bytes(&self) -> usize {
        self.shared.cache_bytes
    }

    /// Returns the bytes of all resident tables.
    pub fn resident_bytes(&self) -> usize {
        let index = |i: &DeviceIndex| 8 * i.hashes.len() + 4 * i.buckets.len();
        let bytes = |t: &Arc<DeviceResident>| 4 * t.rows.len() + t.index.as_ref().map_or(0, index);
        self.residents.iter().map(bytes).sum()
    }

    /// Returns the slot of each of `keys` in resident table `number`; `None` for a key that the
    /// table does not have. Downloads the table's hashes if it has some.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn resident_slots(&self, number: usize, keys: &[u64]) -> Result<Vec<Option<u32>>> {
        let table = &self.residents[number];
        let Some(index) = &table.index else {
            let slot = |&key: &u64| (key < table.count as u64).then_some(key as u32);
            return Ok(keys.iter().map(slot).collect());
        };
        let mut hashes = vec![0; index.hashes.len()];
        // No change touches an index, so the download needs no turn.
        self.gpu().stream()?.download(&index.hashes, 0, &mut hashes)?;
        let slot = |&key: &u64| hashes.binary_search(&mix(key)).ok().map(|slot| slot as u32);
        Ok(keys.iter().map(slot).collect())
    }

    /// Copies new rows of resident tables to the device, for [`DeviceTables::write_residents`].
    /// `patches` has the numbers of tables, each with slots and the new bytes of their rows.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn stage_residents<'a>(
        &self,
        patches: impl Iterator<Item = (usize, &'a [(u32, Vec<u8>)])>,
    ) -> Result<ResidentWrites> {
        let (mut list, mut words, mut tables) = (Vec::new(), Vec::new(), Vec::new());
        for (number, rows) in patches {
            let table = &self.residents[number];
            for (slot, row) in rows {
                assert!(row.len() == table.row_bytes && (*slot as usize) < table.count);
                let to = table.rows.address() + 4 * (*slot as usize * table.row_words) as u64;
                let (from, count) = (words.len() as u32, table.row_words as u32);
                assert!(u64::from(from) == words.len() as u64, "fewer than 2^32 words change");
                list.push(RowWrite { to, from, words: count });
                words.extend(row.chunks(4).map(word_of));
            }
            tables.push(Arc::clone(table));
        }
        let stream = self.gpu().stream()?;
        let (count, words_len) = (list.len(), words.len());
        Ok(ResidentWrites {
            _written: Made::new(&self.shared)?,
            list: upload(&stream, count, list.into_iter())?,
            rows: upload(&stream, words_len, words.into_iter())?,
            _tables: tables,
        })
    }

    /// Replaces the rows of `writes` with one launch, and does not wait: later queries start after
    /// it. The caller makes sure that no lookup runs during the call.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn write_residents(&self, writes: &ResidentWrites) -> Result<()> {
        if writes.list.len() == 0 {
            return Ok(());
        }
        let (stream, Shared { turns, kernels, .. }) = (self.changes(), &*self.shared);
        turns.change(&stream, || kernels.write_rows(&stream, &writes.list, &writes.rows))
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.shared.gpu
    }

    /// Returns the place of the rows of `table`.
    pub fn storage(&self, table: u16) -> TableStorage {
        self.shared.storages[usize::from(table)]
    }

    /// Returns the number of rows that fit into the caches.
    pub fn slots(&self) -> usize {
        self.shared.caches.iter().map(|c| c.view.sets as usize * WAYS).sum()
    }

    /// Returns whether the cache for rows of `row_bytes` can hold `row`; true if there is no such
    /// cache.
    pub fn can_hold(&self, row_bytes: usize, row: RowKey) -> bool {
        let cache = self.shared.caches.iter().find(|c| c.view.row_bytes as usize == row_bytes);
        cache.is_none_or(|cache| cache.hash(row).tag != 0)
    }

    fn changes(&self) -> MutexGuard<'_, Stream> {
        self.shared.changes()
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.shared.turns
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.shared.kernels
    }

    pub(crate) fn cache_view(&self, number: usize) -> DeviceCacheView {
        self.shared.caches[number].view
    }

    pub(crate) fn table_hasher(&self, number: usize, table: u16) -> TableHasher {
        self.shared.caches[number].addresses.table_hasher(table)
    }

    pub(crate) fn resident(&self, number: usize) -> &DeviceResident {
        &self.residents[number]
    }

    /// Returns all words of cache `number`: set headers, writer states, rows.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn image(&self, number: usize) -> Result<Vec<u32>> {
        let stream = self.changes();
        let DeviceCache { set_headers, writer_states, rows, .. } = &self.shared.caches[number];
        let mut image = Vec::new();
        for part in [set_headers, writer_states, rows] {
            let at = image.len();
            image.resize(at + part.len(), 0);
            stream.download(part, 0, &mut image[at..])?;
        }
        Ok(image)
    }

    /// Calls `each` for every row that cache `number` holds, in no particular order, and
    /// `yield_now` between pieces of the cache. Changes may happen between pieces, so a row that
    /// moves may be missed or passed twice.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn dump(
        &self,
        number: usize,
        yield_now: &dyn Fn(),
        mut each: impl FnMut(RowKey, &[u8]),
    ) -> Result<()> {
        let DeviceCache { view, addresses, .. } = &self.shared.caches[number];
        let (slots, row_words) = (view.sets as usize * WAYS, view.row_words as usize);
        let (tags, rows) =
            (self.shared.gpu.mapped(DUMP_SLOTS)?, self.shared.gpu.mapped(DUMP_SLOTS * row_words)?);
        let (copied, mut bytes) = (self.shared.gpu.event()?, Vec::with_capacity(4 * row_words));

        for first in (0..slots).step_by(DUMP_SLOTS) {
            let count = DUMP_SLOTS.min(slots - first);
            {
                // The stream orders changes after the kernel. The lock is released before the host
                // waits, so another thread's changes wait for the kernel only.
                let stream = self.changes();
                let range = SlotRange { first: first as u64, count };
                self.shared.kernels.dump(&stream, *view, range, &tags, &rows)?;
                stream.record(&copied)?;
            }
            copied.wait()?;

            for (i, &tag) in tags[..count].iter().enumerate().filter(|(_, tag)| **tag != 0) {
                bytes.clear();
                bytes.extend(
                    rows[i * row_words..][..row_words].iter().flat_map(|w| w.to_le_bytes()),
                );
                let place = SetTag { set: ((first + i) / WAYS) as u32, tag };
                each(addresses.row_of(place), &bytes[..view.row_bytes as usize]);
            }
            yield_now();
        }
        Ok(())
    }

    /// Returns the largest number of bytes of pinned memory that a dump allocates.
    pub fn dump_bytes(&self) -> usize {
        let row_words = self.shared.caches.iter().map(|c| c.view.row_words as usize).max();
        row_words.map_or(0, |row_words| DUMP_SLOTS * (size_of::<u64>() + 4 * row_words))
    }
}

/// A change, and the number of the cache that it is for.
#[derive(Clone, Copy)]
struct CollectedChange {
    cache: usize,
    change: Change,
}

/// Changes to the caches, collected one by one and then made together. All memory is allocated at
/// the start.
pub struct RowChanges {
    made: Made,
    tables: Arc<DeviceTables>,
    collected: Vec<CollectedChange>,
    list: ChangeList,
}

/// Every function that makes changes empties the collection, also after an error. After an error
/// the caller calls [`RowChanges::recover`] before it adds more changes.
impl RowChanges {
    /// Allocates memory for `capacity` changes at a time.
    ///
    /// # Errors
    /// `CudaError::Driver` if there is not enough memory.
    pub fn new(tables: &Arc<DeviceTables>, capacity: usize) -> Result<Self> {
        let gpu = &tables.shared.gpu;
        let list = ChangeList {
            list: gpu.mapped(capacity)?,
            runs: gpu.mapped(capacity + tables.shared.caches.len())?,
            done: gpu.mapped(capacity)?,
            probed: gpu.mapped(capacity)?,
        };
        Ok(Self {
            tables: Arc::clone(tables),
            collected: Vec::with_capacity(capacity),
            list,
            made: Made::new(&tables.shared)?,
        })
    }

    /// Returns the bytes that `capacity` changes take.
    pub fn bytes(capacity: usize) -> usize {
        capacity * (size_of::<CollectedChange>() + size_of::<Change>() + 4 + 1 + 8)
    }

    /// Returns whether no change is collected.
    pub fn is_empty(&self) -> bool {
        self.collected.is_empty()
    }

    /// Returns whether no further change fits.
    pub fn is_full(&self) -> bool {
        self.collected.len() == self.list.list.len()
    }

    /// Collects a change of `row`. Its bytes are in `slot` of the rows that the caller passes when
    /// it makes the changes. `since` is the set's epoch from before the row was read. A row of a
    /// resident table never changes and is ignored.
    pub fn add(&mut self, row: RowKey, slot: u32, since: Epoch) {
        assert!(!self.is_full());
        let TableStorage::Cached(cache) = self.tables.storage(row.table) else { return };
        let SetTag { set, tag } = self.tables.shared.caches[cache].hash(row);
        let number = self.collected.len() as u32;
        let change = Change { tag, set, epoch: since.number(), slot, number };
        self.collected.push(CollectedChange { cache, change });
    }

    /// Inserts the collected rows, as [`Cache::insert`] would one after the other. Returns 1 for
    /// each row that was inserted, in the order of `add`. `rows` is `[.., stride]` words.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn insert(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Insert, StagedRows { rows, stride_words: stride })
    }

    /// Overwrites those of the collected rows that are cached, as [`Cache::update`] does. Returns 1
    /// for each row that was cached.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn update(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Update, StagedRows { rows, stride_words: stride })
    }

    /// Removes those of the collected rows that are cached, as [`Cache::invalidate`] does. Returns
    /// 1 for each row that was cached.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn invalidate(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Invalidate, StagedRows { rows, stride_words: stride })
    }

    fn make(&mut self, verb: Verb, staged: StagedRows) -> Result<&[u8]> {
        let count = self.begin(verb, staged)?;
        self.made.event.wait()?;
        Ok(&self.list.done[..count])
    }

    /// Begins to insert; the event [`RowChanges::made`] marks the end. The caller must not add
    /// changes before that.
    pub(crate) fn begin_insert(&mut self, staged: StagedRows) -> Result<()> {
        self.begin(Verb::Insert, staged).map(drop)
    }

    /// Returns the event after the last changes.
    pub(crate) fn made(&self) -> &Event {
        &self.made.event
    }

    fn begin(&mut self, verb: Verb, staged: StagedRows) -> Result<usize> {
        let Self { tables, collected, list, made } = self;
        collected.sort_unstable_by_key(|c| (c.cache, c.change.set, c.change.number));
        // The drain empties the collection, also after an error.
        let collected = collected.drain(..);
        let collected = collected.as_slice();
        let stream = tables.changes();

        let launch = || {
            let (mut first, mut first_run) = (0, 0);
            for of_cache in collected.chunk_by(|a, b| a.cache == b.cache) {
                let sets = list.write(first, first_run, of_cache.iter().map(|c| c.change));
                let cache = tables.shared.caches[of_cache[0].cache].view;
                let changes = CacheChanges { list, first, first_run, sets };
                tables.shared.kernels.change(&stream, verb, cache, changes, staged)?;
                first += of_cache.len();
                first_run += sets + 1;
            }
            Ok(())
        };
        if !collected.is_empty() {
            tables.shared.turns.change(&stream, launch)?;
        }
        stream.record(&made.event)?;
        Ok(collected.len())
    }

    /// Calls `each(number, cached, epoch)` for every collected row, in the order of `add` within a
    /// cache. `cached` is whether the row is cached, and `epoch` is that of its set.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn probe(&mut self, mut each: impl FnMut(usize, bool, Epoch)) -> Result<()> {
        let Self { tables, collected, list, made } = self;
        collected.sort_unstable_by_key(|c| (c.cache, c.change.number));
        let collected = collected.drain(..);
        let collected = collected.as_slice();

        for of_cache in collected.chunk_by(|a, b| a.cache == b.cache) {
            for (to, from) in list.list.iter_mut().zip(of_cache) {
                *to = from.change;
            }
            let cache = tables.shared.caches[of_cache[0].cache].view;
            {
                // The lock is released before the host waits, so that other threads can change.
                let stream = tables.changes();
                tables.shared.kernels.probe(&stream, cache, list, of_cache.len())?;
                stream.record(&made.event)?;
            }
            made.event.wait()?;

            for (CollectedChange { change, .. }, found) in of_cache.iter().zip(&*list.probed) {
                each(change.number as usize, found.cached != 0, Epoch::of(found.epoch));
            }
        }
        Ok(())
    }

    /// Waits, after an error, until no launch reads the list or the rows; drops the collected
    /// changes.
    ///
    /// # Errors
    /// `CudaError::Driver` if the GPU cannot be waited for.
    pub fn recover(&mut self) -> Result<()> {
        self.collected.clear();
        // The stream's order makes the event the last of the launches that failed. The lock is
        // released before the host waits, because requests with missing rows take it.
        self.tables.changes().record(&self.made.event)?;
        self.made.event.wait()
    }
}
