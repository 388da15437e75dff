//! The caches and resident tables of a model in device memory, and the verbs that change a cache
//! there. A cache comes from the host as it is, byte for byte, and goes on as the host's would.
//! Never decides what is worth caching.

use crate::cache::address::{AddressMap, RowKey, SetTag, TableHasher};
use crate::cache::eviction::WAYS;
use crate::cache::resident::Resident;
use crate::cache::{Cache, Epoch};
use crate::cuda::driver::{Event, Gpu, Result, Stream};
use crate::cuda::memory::{Buffer, DeviceValue, Mapped};
use crate::gpu::launch::{CacheView, Change, ChangeList, ChangesAt, Kernels, Verb};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Words uploaded at once.
const PIECE: usize = 1 << 18;
/// Slots dumped at once: changes wait for so many to be copied.
const DUMPED_SLOTS: usize = 1024;

/// Where the rows of a table are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableStorage {
    /// In a cache, by its number.
    Cached(usize),
    /// Whole, in a resident table, by its number.
    Resident(usize),
}

/// A cache in device memory.
struct DeviceCache {
    view: CacheView,
    naming: AddressMap,
    heads: Buffer<u32>,
    tails: Buffer<u32>,
    rows: Buffer<u32>,
}

/// A resident table in device memory.
pub(crate) struct DeviceResident {
    pub rows: Buffer<u32>,
    /// Words and bytes of a row.
    pub row: usize,
    pub row_bytes: usize,
    pub count: usize,
    /// As `Resident` has it: hashes, and where each bucket begins in them.
    pub index: Option<(Buffer<u64>, Buffer<u32>)>,
}

/// The tables of a model on a GPU, shared by all who look up in them.
pub struct DeviceTables {
    gpu: Arc<Gpu>,
    pub(crate) kernels: Kernels,
    places: Vec<TableStorage>,
    caches: Vec<DeviceCache>,
    residents: Vec<DeviceResident>,
    /// All changes of the caches are on this stream, one after the other.
    changes: Mutex<Stream>,
}

/// `len` values on the device, made piece by piece.
fn upload<T: DeviceValue>(
    stream: &Stream,
    len: usize,
    mut values: impl Iterator<Item = T>,
) -> Result<Buffer<T>> {
    let mut to = stream.gpu().buffer(len)?;
    let mut piece = Vec::with_capacity(PIECE.min(len));
    for at in (0..len).step_by(PIECE) {
        piece.clear();
        piece.extend(values.by_ref().take(PIECE));
        stream.upload(&piece, &mut to, at)?;
    }
    Ok(to)
}

impl DeviceCache {
    fn new(stream: &Stream, cache: Cache) -> Result<Self> {
        let row_bytes = cache.row_bytes();
        let (naming, parts) = cache.into_parts();
        // Each goes from the host before the next: no more than the rows of one cache is there
        // twice.
        let [heads, tails, rows] = parts.map(|part| {
            upload(
                stream,
                part.len(),
                part.iter().map(|w| w.load(crate::simd::atomics::Ordering::Relaxed)),
            )
        });
        let (heads, tails, rows) = (heads?, tails?, rows?);
        let sets = naming.sets();
        let table_bits = match naming.namer(0) {
            TableHasher::Indexed { .. } => 0,
            TableHasher::Hashed { table_bits, .. } => table_bits,
        };
        let view = CacheView {
            heads: heads.address(),
            tails: tails.address(),
            rows: rows.address(),
            sets: sets as u64,
            row_bytes: row_bytes as u32,
            row: row_bytes.div_ceil(4) as u32,
            head: (heads.len() / sets) as u32,
            table_bits,
        };
        Ok(Self { view, naming, heads, tails, rows })
    }

    fn name(&self, row: RowKey) -> SetTag {
        self.naming.name(self.naming.namer(row.table), row.key)
    }
}

impl DeviceResident {
    fn new(stream: &Stream, table: &Resident) -> Result<Self> {
        let (row_bytes, bytes, index) = table.parts();
        let row = row_bytes.div_ceil(4);
        // Rows begin on whole words there.
        let words = bytes
            .chunks(row_bytes)
            .flat_map(|row| row.chunks(4))
            .map(|four| four.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte)));
        let count = bytes.len() / row_bytes;
        let rows = upload(stream, count * row, words)?;
        let index = match index {
            None => None,
            Some((hashes, buckets)) => {
                let hashes = upload(stream, hashes.len(), hashes.iter().copied())?;
                Some((hashes, upload(stream, buckets.len(), buckets.iter().copied())?))
            }
        };
        Ok(Self { rows, row, row_bytes, count, index })
    }
}

impl DeviceTables {
    /// Takes the caches and resident tables of a model to `gpu`. `places` says for each table where
    /// its rows are.
    ///
    /// # Errors
    /// The GPU has no memory for them, or no kernels.
    pub fn new(
        gpu: &Arc<Gpu>,
        places: Vec<TableStorage>,
        caches: Vec<Cache>,
        residents: &[&Resident],
    ) -> Result<Self> {
        let (stream, kernels) = (gpu.stream()?, Kernels::load(gpu)?);
        kernels.warm(&stream)?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            kernels,
            places,
            caches: caches
                .into_iter()
                .map(|c| DeviceCache::new(&stream, c))
                .collect::<Result<_>>()?,
            residents: residents
                .iter()
                .map(|r| DeviceResident::new(&stream, r))
                .collect::<Result<_>>()?,
            changes: Mutex::new(stream),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Where the rows of `table` are.
    pub fn place(&self, table: u16) -> TableStorage {
        self.places[usize::from(table)]
    }

    /// Rows that the caches hold at most.
    pub fn slots(&self) -> usize {
        self.caches.iter().map(|c| c.view.sets as usize * WAYS).sum()
    }

    fn changes(&self) -> MutexGuard<'_, Stream> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn cache_view(&self, number: usize) -> CacheView {
        self.caches[number].view
    }

    pub(crate) fn namer(&self, number: usize, table: u16) -> TableHasher {
        self.caches[number].naming.namer(table)
    }

    pub(crate) fn resident(&self, number: usize) -> &DeviceResident {
        &self.residents[number]
    }

    /// All words of cache `number`: heads, tails, rows.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn image(&self, number: usize) -> Result<Vec<u32>> {
        let stream = self.changes();
        let DeviceCache { heads, tails, rows, .. } = &self.caches[number];
        let mut image = Vec::new();
        for part in [heads, tails, rows] {
            let at = image.len();
            image.resize(at + part.len(), 0);
            stream.download(part, 0, &mut image[at..])?;
        }
        Ok(image)
    }

    /// Calls `each` for every row that cache `number` holds, in no particular order, and `rest`
    /// between pieces of the cache. RowChanges go on meanwhile: a row that moves may be left out or
    /// told twice.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn dump(
        &self,
        number: usize,
        rest: &dyn Fn(),
        mut each: impl FnMut(RowKey, &[u8]),
    ) -> Result<()> {
        let DeviceCache { view, naming, .. } = &self.caches[number];
        let (slots, row) = (view.sets as usize * WAYS, view.row as usize);
        let (words, rows) = (self.gpu.mapped(DUMPED_SLOTS)?, self.gpu.mapped(DUMPED_SLOTS * row)?);
        let (copied, mut bytes) = (self.gpu.event()?, Vec::with_capacity(4 * row));
        for first in (0..slots).step_by(DUMPED_SLOTS) {
            let count = DUMPED_SLOTS.min(slots - first);
            {
                // No change is made beside the kernel; whoever makes one need not wait for the
                // host.
                let stream = self.changes();
                self.kernels.dump(&stream, *view, first as u64, count, &words, &rows)?;
                stream.record(&copied)?;
            }
            copied.wait()?;
            for (i, &word) in words[..count].iter().enumerate().filter(|(_, word)| **word != 0) {
                bytes.clear();
                bytes.extend(rows[i * row..][..row].iter().flat_map(|w| w.to_le_bytes()));
                let name = SetTag { set: ((first + i) / WAYS) as u32, word };
                each(naming.row_of(name), &bytes[..view.row_bytes as usize]);
            }
            rest();
        }
        Ok(())
    }

    /// Pinned memory that a dump takes at most.
    pub fn dump_bytes(&self) -> usize {
        let row = self.caches.iter().map(|c| c.view.row as usize).max();
        row.map_or(0, |row| DUMPED_SLOTS * (size_of::<u64>() + 4 * row))
    }

    /// How many caches there are.
    pub fn caches(&self) -> usize {
        self.caches.len()
    }
}

/// RowChanges to the caches, gathered and then made together. Takes its memory once.
pub struct RowChanges {
    tables: Arc<DeviceTables>,
    gathered: Vec<(usize, Change)>,
    list: ChangeList,
    made: Event,
}

impl RowChanges {
    /// For up to `capacity` changes at once.
    ///
    /// # Errors
    /// The GPU reaches no more memory.
    pub fn new(tables: &Arc<DeviceTables>, capacity: usize) -> Result<Self> {
        let gpu = &tables.gpu;
        let list = ChangeList {
            list: gpu.mapped(capacity)?,
            runs: gpu.mapped(capacity + tables.caches.len())?,
            done: gpu.mapped(capacity)?,
            probed: gpu.mapped(capacity)?,
        };
        Ok(Self {
            tables: Arc::clone(tables),
            gathered: Vec::with_capacity(capacity),
            list,
            made: gpu.event()?,
        })
    }

    /// All bytes that so many take.
    pub fn bytes(capacity: usize) -> usize {
        capacity * (size_of::<(usize, Change)>() + size_of::<Change>() + 4 + 1 + 8)
    }

    /// RowChanges that are gathered.
    pub fn len(&self) -> usize {
        self.gathered.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.gathered.is_empty()
    }

    /// Whether no more fit.
    pub fn is_full(&self) -> bool {
        self.gathered.len() == self.list.list.len()
    }

    /// Gathers a change of `row`, whose bytes are in `slot` of the rows given when it is made;
    /// `since` as the host's cache has it. Rows of resident tables do not change.
    pub fn add(&mut self, row: RowKey, slot: u32, since: Epoch) {
        assert!(!self.is_full());
        let TableStorage::Cached(cache) = self.tables.place(row.table) else { return };
        let SetTag { set, word } = self.tables.caches[cache].name(row);
        let number = self.gathered.len() as u32;
        self.gathered.push((cache, Change { word, set, epoch: since.number(), slot, number }));
    }

    /// Puts the gathered rows in, as [`Cache::insert`] would one after the other; returns which
    /// went in, in the order of `add`.
    ///
    /// # Errors
    /// The GPU failed: with this as with all of the following nothing is gathered then, and before
    /// more is, `give_up` is called.
    pub fn insert(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Insert, rows, stride)
    }

    /// Overwrites those of the gathered rows that are cached, as [`Cache::update`].
    ///
    /// # Errors
    /// The GPU failed.
    pub fn update(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Update, rows, stride)
    }

    /// Drops those of the gathered rows that are cached, as [`Cache::invalidate`].
    ///
    /// # Errors
    /// The GPU failed.
    pub fn invalidate(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        self.make(Verb::Invalidate, rows, stride)
    }

    fn make(&mut self, verb: Verb, rows: &Mapped<u8>, stride: usize) -> Result<&[u8]> {
        let count = self.begin(verb, rows, stride)?;
        self.made.wait()?;
        Ok(&self.list.done[..count])
    }

    /// Begins to insert; `made` marks the end. Nothing may be gathered before that.
    pub(crate) fn begin_insert(&mut self, rows: &Mapped<u8>, stride: usize) -> Result<()> {
        self.begin(Verb::Insert, rows, stride).map(drop)
    }

    /// The end of the last changes.
    pub(crate) fn made(&self) -> &Event {
        &self.made
    }

    fn begin(&mut self, verb: Verb, rows: &Mapped<u8>, stride: usize) -> Result<usize> {
        let Self { tables, gathered, list, made } = self;
        gathered.sort_unstable_by_key(|(cache, change)| (*cache, change.set, change.number));
        // Gone on every way out.
        let gathered = gathered.drain(..);
        let gathered = gathered.as_slice();
        let stream = tables.changes();
        let (mut first, mut first_run, count) = (0, 0, gathered.len());
        for of_cache in gathered.chunk_by(|a, b| a.0 == b.0) {
            let runs = &mut list.runs[first_run..];
            let mut sets = 0;
            for (i, (_, change)) in of_cache.iter().enumerate() {
                list.list[first + i] = *change;
                if i == 0 || of_cache[i - 1].1.set != change.set {
                    runs[sets] = i as u32;
                    sets += 1;
                }
            }
            runs[sets] = of_cache.len() as u32;
            let (cache, at) =
                (tables.caches[of_cache[0].0].view, ChangesAt { first, first_run, sets });
            tables.kernels.change(&stream, verb, cache, (&*list, at), (rows, stride))?;
            first += of_cache.len();
            first_run += sets + 1;
        }
        stream.record(made)?;
        Ok(count)
    }

    /// Asks for the gathered rows whether they are cached, and with which epoch of their sets, in
    /// the order of `add`.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn probe(&mut self, mut each: impl FnMut(usize, bool, Epoch)) -> Result<()> {
        let Self { tables, gathered, list, .. } = self;
        gathered.sort_unstable_by_key(|(cache, change)| (*cache, change.number));
        let gathered = gathered.drain(..);
        let gathered = gathered.as_slice();
        let stream = tables.changes();
        for of_cache in gathered.chunk_by(|a, b| a.0 == b.0) {
            of_cache.iter().enumerate().for_each(|(i, (_, change))| list.list[i] = *change);
            tables.kernels.probe(
                &stream,
                tables.caches[of_cache[0].0].view,
                list,
                of_cache.len(),
            )?;
            stream.wait()?;
            for ((_, change), found) in of_cache.iter().zip(&*list.probed) {
                each(change.number as usize, found.cached != 0, Epoch::of(found.epoch));
            }
        }
        Ok(())
    }

    /// After an error: waits until nothing that was begun reads the list or the rows any more. What
    /// was gathered counts for nothing.
    ///
    /// # Errors
    /// The GPU is gone.
    pub fn give_up(&mut self) -> Result<()> {
        self.gathered.clear();
        self.tables.changes().wait()
    }
}
