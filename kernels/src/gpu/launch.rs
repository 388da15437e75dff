//! One typed function for each kernel of the lookup. It checks that all memory which the kernel
//! will access is allocated, launches the kernel and returns. The structures are those of
//! `kernels/cuda/{cache,lookup}.cuh` and `changes.cu`, field by field. Never waits, except in
//! `Kernels::warm`.

#![allow(unsafe_code)]

use crate::cache::eviction::WAYS;
use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream, images};
use crate::cuda::memory::{Buffer, DeviceValue, Mapped};
use crate::gpu::samples::RequestSize;
use std::sync::Arc;

pub(crate) static CHANGES: Images = images!("changes");

pub(crate) static LOOKUP: Images = images!("lookup");

/// Threads of a block. A warp of 32 takes a row, a set, a bag or a tile of samples.
const THREADS: u32 = 128;

/// Marks the default row, in place of a slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// Returns the warps of a query that `gpu` runs at the same time.
pub(crate) fn query_warps(gpu: &Gpu) -> usize {
    (query_blocks(gpu) * (THREADS / 32)) as usize
}

/// Returns the blocks of a query that `gpu` runs at the same time: as the kernels' `make` says, the
/// machine code for 12.0 takes more registers.
fn query_blocks(gpu: &Gpu) -> u32 {
    gpu.processors() * if gpu.sm() / 10 == 12 { 6 } else { 8 }
}

fn blocks(warps: usize) -> u32 {
    warps.div_ceil(THREADS as usize / 32) as u32
}

/// `Cache` of `cache.cuh`: a cache in device memory, or the shape of a resident table's rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceCacheView {
    pub set_headers: u64,
    pub writer_states: u64,
    pub rows: u64,
    pub sets: u64,
    pub row_bytes: u32,
    pub row_words: u32,
    pub header_words: u32,
    pub table_bits: u32,
}

impl DeviceCacheView {
    /// `table_bits` of a whole cache: `WHOLE` of `cache.cuh`.
    pub const WHOLE: u32 = u32::MAX;
}

/// `Change` of `changes.cu`: one row to insert, update, invalidate or probe.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Change {
    pub tag: u64,
    pub set: u32,
    pub epoch: u32,
    pub slot: u32,
    pub number: u32,
}

/// `ProbeResult` of `changes.cu`: whether a row is cached, and its set's epoch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProbeResult {
    pub cached: u32,
    pub epoch: u32,
}

/// `RowWrite` of `changes.cu`: a row of a resident table to replace.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowWrite {
    pub to: u64,
    pub from: u32,
    pub words: u32,
}

/// `Feature` of `lookup.cuh`: one sparse feature.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceFeature {
    pub cache: DeviceCacheView,
    pub rows: u64,
    pub hashes: u64,
    pub buckets: u64,
    pub count: u64,
    pub bucket_count: u64,
    pub default_row: u64,
    pub out: u64,
    pub stride: u64,
    pub keys_before: u64,
    pub weights_before: u64,
    pub keys_end: u64,
    pub salt: u64,
    pub base: u32,
    pub end: u32,
    pub has_end: u32,
    pub table: u32,
    pub dim: u32,
    pub width: u32,
    pub codec: u32,
    pub pooling: u32,
    pub storage: u32,
    pub unit: f32,
    pub lane_bits: u32,
    pub aligned: u32,
    pub weighted: u32,
    pub out_bytes: u32,
}

/// `OpenBag` of `lookup.cuh`: a bag that waits for rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceBag {
    pub feature: u32,
    pub sample: u32,
    pub pooled: u32,
    pub first: u32,
    pub entries: u32,
    pub weights: u32,
}

/// `Entry` of `lookup.cuh`: one lookup of a bag that waits; `kind` is an `EntryKind`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entry {
    pub key: u64,
    pub epoch: u32,
    pub kind: u32,
}

/// `RingCounts` of `lookup.cuh`: the numbers of items in the ring that a query left.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingCounts {
    pub bags: u32,
    pub entries: u32,
    pub absents: u32,
    pub requeries: u32,
}

/// `AbsentCount` of `lookup.cuh`: lookups of one bag whose keys a table does not have.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AbsentCount {
    pub feature: u32,
    pub sample: u32,
    pub count: u32,
}

/// `BagNumber` of `lookup.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BagNumber {
    pub feature: u32,
    pub sample: u32,
}

/// `FinishBags` of `lookup.cuh`, which `finish_bags` reads when it runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FinishArgument {
    features: u64,
    bags: u64,
    slots: u64,
    rows: u64,
    weights: u64,
    count: u32,
    stride: u32,
}

macro_rules! device_values {
    ($($value:ty)*) => {
        $(
            // SAFETY: `repr(C)`, only integers and f32, no padding (the asserts below), and zeros
            // are a value.
            unsafe impl DeviceValue for $value {}
        )*
    };
}

device_values!(DeviceCacheView Change ProbeResult DeviceFeature DeviceBag Entry RingCounts);
device_values!(AbsentCount BagNumber FinishArgument RowWrite);

const _: () = assert!(size_of::<DeviceCacheView>() == 48 && size_of::<DeviceFeature>() == 200);
const _: () = assert!(size_of::<Change>() == 24 && size_of::<ProbeResult>() == 8);
const _: () = assert!(size_of::<DeviceBag>() == 24 && size_of::<Entry>() == 16);
const _: () = assert!(size_of::<RingCounts>() == 16 && size_of::<AbsentCount>() == 12);
const _: () = assert!(size_of::<BagNumber>() == 8 && size_of::<FinishArgument>() == 48);

/// `Changes` of `changes.cu`: the argument of `insert_rows`, `update_rows` and `invalidate_rows`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChangesArgument {
    cache: DeviceCacheView,
    list: u64,
    runs: u64,
    sets: u32,
    stride: u32,
    rows: u64,
    done: u64,
}

/// `RowWrites` of `changes.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct WritesArgument {
    list: u64,
    rows: u64,
    count: u32,
}

/// `ProbeRows` of `changes.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProbeArgument {
    cache: DeviceCacheView,
    list: u64,
    results: u64,
    count: u32,
}

/// `DumpRows` of `changes.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DumpArgument {
    cache: DeviceCacheView,
    first: u64,
    count: u32,
    tags: u64,
    rows: u64,
}

/// `MissRing` of `lookup.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RingArgument {
    counts: u64,
    bags: u64,
    entries: u64,
    hit_rows: u64,
    absents: u64,
    requeries: u64,
    entries_max: u32,
    hit_stride: u32,
}

/// `Query` of `lookup.cuh`: the argument of `query_tables`.
#[repr(C)]
#[derive(Clone, Copy)]
struct QueryArgument {
    features: u64,
    keys: u64,
    offsets: u64,
    weights: u64,
    ring: RingArgument,
    counts: u64,
    blocks_done: u64,
    only: u64,
    samples: u32,
    tile: u32,
    tiles_each: u32,
    tiles: u32,
    own_features: u32,
    own_tiles: u32,
    requests: u32,
    request_tiles: u32,
}

const _: () = assert!(size_of::<ChangesArgument>() == 88 && size_of::<ProbeArgument>() == 72);
const _: () = assert!(size_of::<RowWrite>() == 16 && size_of::<WritesArgument>() == 24);
const _: () = assert!(size_of::<DumpArgument>() == 80 && size_of::<QueryArgument>() == 144);

/// The kind of change to a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Insert,
    Update,
    Invalidate,
}

/// Rows in host memory that the device can access, `[.., stride_words]` words.
#[derive(Clone, Copy)]
pub(crate) struct StagedRows<'a> {
    pub rows: &'a Mapped<u8>,
    pub stride_words: usize,
}

impl StagedRows<'_> {
    fn holds(&self, slot: u32) -> bool {
        (slot as usize + 1) * 4 * self.stride_words <= self.rows.len()
    }
}

/// Changes to caches, grouped by set for the kernels.
pub(crate) struct ChangeList {
    pub list: Mapped<Change>,
    /// The position of each set's first change in the list.
    pub runs: Mapped<u32>,
    /// Whether each change, by its number, happened.
    pub done: Mapped<u8>,
    pub probed: Mapped<ProbeResult>,
}

impl ChangeList {
    /// Writes the changes of one cache, which are sorted by set, to `list` from `first` on. Writes
    /// the position of each set's first change to `runs` from `first_run` on. Returns the number of
    /// sets.
    pub fn write(
        &mut self,
        first: usize,
        first_run: usize,
        changes: impl Iterator<Item = Change>,
    ) -> usize {
        let (mut sets, mut count, mut set) = (0, 0, None);
        for change in changes {
            if set.replace(change.set) != Some(change.set) {
                self.runs[first_run + sets] = count as u32;
                sets += 1;
            }
            self.list[first + count] = change;
            count += 1;
        }
        self.runs[first_run + sets] = count as u32;
        sets
    }
}

/// The changes of one cache within a list.
#[derive(Clone, Copy)]
pub(crate) struct CacheChanges<'a> {
    pub list: &'a ChangeList,
    /// The first change, and the first run.
    pub first: usize,
    pub first_run: usize,
    /// Sets that change.
    pub sets: usize,
}

/// Slots of a cache to dump: `count` from `first` on.
#[derive(Clone, Copy)]
pub(crate) struct SlotRange {
    pub first: u64,
    pub count: usize,
}

/// The bags and lookups that a query leaves open, in host memory.
pub(crate) struct MissRing {
    pub counts: Mapped<RingCounts>,
    pub bags: Mapped<DeviceBag>,
    pub entries: Mapped<Entry>,
    pub hit_rows: Mapped<u8>,
    pub absents: Mapped<AbsentCount>,
    pub requeries: Mapped<BagNumber>,
    /// Words from one hit row to the next.
    pub hit_stride: usize,
}

impl MissRing {
    fn argument(&self) -> RingArgument {
        RingArgument {
            counts: self.counts.address(),
            bags: self.bags.address(),
            entries: self.entries.address(),
            hit_rows: self.hit_rows.address(),
            absents: self.absents.address(),
            requeries: self.requeries.address(),
            entries_max: self.entries.len() as u32,
            hit_stride: self.hit_stride as u32,
        }
    }
}

/// Device addresses of the keys, the offsets and the weights of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestAddresses {
    pub keys: u64,
    pub offsets: u64,
    pub weights: u64,
}

/// A request, and the counters that stay in device memory between launches.
pub(crate) struct QueryMemory<'a> {
    pub features: &'a Buffer<DeviceFeature>,
    /// Features that are not shared; the others come last.
    pub own_features: usize,
    /// The addresses of a request of `size`.
    pub request: RequestAddresses,
    pub size: RequestSize,
    pub ring: &'a MissRing,
    /// `RingCounts`, then the count of finished blocks.
    pub counters: &'a Buffer<u32>,
}

/// The bags that one query pools.
#[derive(Clone, Copy)]
pub(crate) enum QueryBags<'a> {
    /// All bags of every feature, in tiles of `tile` bags of one feature.
    All { tile: usize },
    /// The first `count` of these bags, each a tile.
    Only { bags: &'a Mapped<BagNumber>, count: usize },
}

/// The bags that a query left open, and the slots of their rows.
pub(crate) struct OpenBags {
    pub bags: Mapped<DeviceBag>,
    /// For each entry the row's slot, or `NO_SLOT`.
    pub slots: Mapped<u32>,
    argument: Mapped<FinishArgument>,
}

impl OpenBags {
    /// Allocates memory for `misses_max` open bags and as many entries.
    pub fn new(gpu: &Arc<Gpu>, misses_max: usize) -> Result<Self> {
        Ok(Self {
            bags: gpu.mapped(misses_max)?,
            slots: gpu.mapped(misses_max)?,
            argument: gpu.mapped(1)?,
        })
    }

    /// Sets the first `count` bags, with rows of `staged`, for the next launch. The rows must not
    /// change until the caller has waited for that launch.
    ///
    /// `weights` is the device address of the request's weights. Each bag has the number of its
    /// first weight.
    pub fn set(
        &mut self,
        features: &Buffer<DeviceFeature>,
        count: usize,
        staged: StagedRows,
        weights: u64,
    ) {
        for bag in &self.bags[..count] {
            let slots = &self.slots[bag.first as usize..][..bag.entries as usize];
            assert!(slots.iter().all(|&slot| slot == NO_SLOT || staged.holds(slot)));
            assert!((bag.feature as usize) < features.len());
        }
        self.argument[0] = FinishArgument {
            features: features.address(),
            bags: self.bags.address(),
            slots: self.slots.address(),
            rows: staged.rows.address(),
            weights,
            count: count as u32,
            stride: staged.stride_words as u32,
        };
    }
}

/// The kernels of the lookup, loaded on one GPU.
pub(crate) struct Kernels {
    insert: Kernel,
    update: Kernel,
    invalidate: Kernel,
    probe: Kernel,
    dump: Kernel,
    write: Kernel,
    query: Kernel,
    finish: Kernel,
}

impl Kernels {
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let (changes, lookup) = (gpu.module(&CHANGES)?, gpu.module(&LOOKUP)?);
        Ok(Self {
            insert: changes.kernel("insert_rows")?,
            update: changes.kernel("update_rows")?,
            invalidate: changes.kernel("invalidate_rows")?,
            probe: changes.kernel("probe_rows")?,
            dump: changes.kernel("dump_rows")?,
            write: changes.kernel("write_rows")?,
            query: lookup.kernel("query_tables")?,
            finish: lookup.kernel("finish_bags")?,
        })
    }

    /// Launches the kernels of the caches without work. A driver loads a kernel, and allocates
    /// memory for it, at the kernel's first launch. Without this call, that would happen long after
    /// the start.
    pub fn warm(&self, stream: &Stream) -> Result<()> {
        let cache = DeviceCacheView::default();
        let changes =
            ChangesArgument { cache, list: 0, runs: 0, sets: 0, stride: 0, rows: 0, done: 0 };
        for kernel in [&self.insert, &self.update, &self.invalidate] {
            // SAFETY: the kernel's parameter; with no sets the kernel accesses no memory.
            unsafe { stream.launch(kernel, 1, THREADS, changes) }?;
        }

        let probe = ProbeArgument { cache, list: 0, results: 0, count: 0 };
        // SAFETY: the kernel's parameter; with no rows the kernel accesses no memory.
        unsafe { stream.launch(&self.probe, 1, THREADS, probe) }?;

        let dump = DumpArgument { cache, first: 0, count: 0, tags: 0, rows: 0 };
        // SAFETY: the kernel's parameter; with no slots the kernel accesses no memory.
        unsafe { stream.launch(&self.dump, 1, THREADS, dump) }?;

        let none = WritesArgument { list: 0, rows: 0, count: 0 };
        // SAFETY: the kernel's parameter; with no rows the kernel accesses no memory.
        unsafe { stream.launch(&self.write, 1, THREADS, none) }?;
        stream.wait()
    }

    /// Makes `changes` to `cache`, with rows of `staged`.
    pub fn change(
        &self,
        stream: &Stream,
        verb: Verb,
        cache: DeviceCacheView,
        changes: CacheChanges,
        staged: StagedRows,
    ) -> Result<()> {
        let CacheChanges { list: ChangeList { list, runs, done, .. }, first, first_run, sets } =
            changes;
        let set_runs = &runs[first_run..][..sets + 1];
        let cache_changes = &list[first..][..set_runs[sets] as usize];
        let has_rows = verb != Verb::Invalidate;
        assert!(set_runs.is_sorted());
        assert!(!has_rows || staged.stride_words >= cache.row_words as usize);
        for change in cache_changes {
            assert!(u64::from(change.set) < cache.sets && (change.number as usize) < done.len());
            assert!(!has_rows || staged.holds(change.slot));
        }

        let kernel = match verb {
            Verb::Insert => &self.insert,
            Verb::Update => &self.update,
            Verb::Invalidate => &self.invalidate,
        };
        let argument = ChangesArgument {
            cache,
            list: list.address() + (first * size_of::<Change>()) as u64,
            runs: runs.address() + 4 * first_run as u64,
            sets: sets as u32,
            stride: staged.stride_words as u32,
            rows: staged.rows.address(),
            done: done.address(),
        };
        // SAFETY: the kernel's parameter; every set, slot and number in it is inside its array.
        unsafe { stream.launch(kernel, blocks(sets), THREADS, argument) }
    }

    /// Probes `cache` for the first `count` rows of the list.
    pub fn probe(
        &self,
        stream: &Stream,
        cache: DeviceCacheView,
        changes: &ChangeList,
        count: usize,
    ) -> Result<()> {
        assert!(count <= changes.probed.len());
        assert!(changes.list[..count].iter().all(|c| u64::from(c.set) < cache.sets));
        let argument = ProbeArgument {
            cache,
            list: changes.list.address(),
            results: changes.probed.address(),
            count: count as u32,
        };
        // SAFETY: the kernel's parameter; every set is one of the cache's.
        unsafe { stream.launch(&self.probe, blocks(count), THREADS, argument) }
    }

    /// Copies the tags and rows of `slots` to `tags` and `rows`.
    pub fn dump(
        &self,
        stream: &Stream,
        cache: DeviceCacheView,
        slots: SlotRange,
        tags: &Mapped<u64>,
        rows: &Mapped<u32>,
    ) -> Result<()> {
        let SlotRange { first, count } = slots;
        assert!(count <= tags.len() && count * cache.row_words as usize <= rows.len());
        assert!(first + count as u64 <= cache.sets * WAYS as u64);
        let (tags, rows) = (tags.address(), rows.address());
        let argument = DumpArgument { cache, first, count: count as u32, tags, rows };
        // SAFETY: the kernel's parameter; the slots are the cache's, and `tags` and `rows` have
        // room for them.
        unsafe { stream.launch(&self.dump, blocks(count), THREADS, argument) }
    }

    /// Replaces rows of resident tables. The caller has checked that every row of `list` is inside
    /// its table and inside `rows`.
    pub fn write_rows(
        &self,
        stream: &Stream,
        list: &Buffer<RowWrite>,
        rows: &Buffer<u32>,
    ) -> Result<()> {
        let count = list.len();
        let argument =
            WritesArgument { list: list.address(), rows: rows.address(), count: count as u32 };
        // SAFETY: the kernel's parameter; the caller checked the rows.
        unsafe { stream.launch(&self.write, blocks(count), THREADS, argument) }
    }

    /// Pools bags. The caller has checked the keys and offsets, and the outputs that the features
    /// point to.
    pub fn query(&self, stream: &Stream, memory: &QueryMemory, bags: QueryBags) -> Result<()> {
        let QueryMemory { features, own_features, request, size, ring, counters } = memory;
        let RequestSize { samples, requests } = *size;
        assert!(ring.hit_rows.len() >= 4 * ring.entries.len() * ring.hit_stride);
        assert!(ring.bags.len() >= ring.entries.len() && counters.len() >= 5);
        let shared = features.len() - own_features;
        let (only, tile, each, request_tiles) = match bags {
            QueryBags::All { tile } => {
                let room = ring.requeries.len().min(ring.absents.len());
                assert!(room >= samples * own_features + requests * shared);
                assert!((1..=32).contains(&tile));
                (0, tile, samples.div_ceil(tile), requests.div_ceil(tile))
            }
            QueryBags::Only { bags, count } => {
                assert!(count <= bags.len());
                (bags.address(), 1, 1, 1)
            }
        };
        let (own_tiles, shared_tiles) = (each * own_features, request_tiles * shared);
        let tiles = match bags {
            QueryBags::All { .. } => own_tiles + shared_tiles,
            QueryBags::Only { count, .. } => count,
        };

        let argument = QueryArgument {
            features: features.address(),
            keys: request.keys,
            offsets: request.offsets,
            weights: request.weights,
            ring: ring.argument(),
            counts: counters.address(),
            blocks_done: counters.address() + size_of::<RingCounts>() as u64,
            only,
            samples: samples as u32,
            tile: tile as u32,
            tiles_each: each as u32,
            tiles: tiles as u32,
            own_features: *own_features as u32,
            own_tiles: own_tiles as u32,
            requests: requests as u32,
            request_tiles: request_tiles as u32,
        };
        // If there are more tiles than warps, a warp takes several tiles.
        let blocks = blocks(tiles).min(query_blocks(stream.gpu()));
        // SAFETY: the kernel's parameter; the ring has room for everything that the kernel can
        // write to it, and the caller checked the rest.
        unsafe { stream.launch(&self.query, blocks, THREADS, argument) }
    }

    /// Pools the rest of the bags to which `open` is set when the launch runs: at most `bags_max`.
    pub fn finish(&self, stream: &Stream, open: &OpenBags, bags_max: usize) -> Result<()> {
        // A recorded launch has room for all misses, and each block reads the structure over the
        // bus. So few blocks start, and a warp takes several bags. Their rows in flight still fill
        // the bus.
        let blocks = blocks(bags_max).min(stream.gpu().processors() * 2);
        // SAFETY: the kernel takes the address of its structure; every feature, entry and slot in
        // it is inside its array.
        unsafe { stream.launch(&self.finish, blocks, THREADS, open.argument.address()) }
    }
}
