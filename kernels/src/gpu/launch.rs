//! One typed function for each kernel: checks that what the kernel will touch is there, launches,
//! returns. The structures are those of `kernels/cuda/{cache,lookup}.cuh` and `changes.cu`, field
//! by field. Never waits.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream};
use crate::cuda::memory::{Buffer, DeviceValue, Mapped};
use std::sync::Arc;

pub(crate) const CHANGES: Images = Images {
    name: "changes",
    cubins: &[
        (87, include_bytes!("../../cuda/built/changes.sm_87.cubin")),
        (90, include_bytes!("../../cuda/built/changes.sm_90.cubin")),
    ],
    ptx: include_str!("../../cuda/built/changes.ptx"),
};

pub(crate) const LOOKUP: Images = Images {
    name: "lookup",
    cubins: &[
        (87, include_bytes!("../../cuda/built/lookup.sm_87.cubin")),
        (90, include_bytes!("../../cuda/built/lookup.sm_90.cubin")),
    ],
    ptx: include_str!("../../cuda/built/lookup.ptx"),
};

/// Threads of a block; a warp of 32 has a row, a set, a bag or a tile of samples.
const THREADS: u32 = 128;

fn blocks(warps: usize) -> u32 {
    warps.div_ceil(THREADS as usize / 32) as u32
}

/// A cache in device memory, or the shape of a resident table's rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheView {
    pub heads: u64,
    pub tails: u64,
    pub rows: u64,
    pub sets: u64,
    pub row_bytes: u32,
    pub row: u32,
    pub head: u32,
    pub table_bits: u32,
}

/// One row to insert, update, drop or look for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Change {
    pub word: u64,
    pub set: u32,
    pub epoch: u32,
    pub slot: u32,
    pub number: u32,
}

/// Whether a row is cached, and its set's epoch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Probed {
    pub cached: u32,
    pub epoch: u32,
}

/// One sparse feature as the kernels see it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FeatureView {
    pub cache: CacheView,
    pub rows: u64,
    pub hashes: u64,
    pub buckets: u64,
    pub count: u64,
    pub bucket_count: u64,
    pub default_row: u64,
    pub out: u64,
    pub stride: u64,
    pub keys_before: u64,
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
    pub place: u32,
    pub unit: f32,
}

/// A bag that waits for rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BagView {
    pub feature: u32,
    pub sample: u32,
    pub done: u32,
    pub first: u32,
    pub refs: u32,
}

/// A lookup of a bag that waits; `kind` is one of the following.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ref {
    pub key: u64,
    pub epoch: u32,
    pub kind: u32,
}

pub(crate) const MISSING: u32 = 0;
pub(crate) const ABSENT: u32 = 1;
/// Stands for the default row.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// How much a query left open.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub bags: u32,
    pub refs: u32,
    pub absents: u32,
    pub again: u32,
}

/// Lookups of one sample that a table does not have.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Absents {
    pub sample: u32,
    pub count: u32,
}

/// A feature and a sample.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BagNumber {
    pub feature: u32,
    pub sample: u32,
}

// SAFETY: as all below, `repr(C)`, only integers and f32, no padding (the asserts below), zero is a
// value.
unsafe impl DeviceValue for CacheView {}
// SAFETY: above.
unsafe impl DeviceValue for Change {}
// SAFETY: above.
unsafe impl DeviceValue for Probed {}
// SAFETY: above.
unsafe impl DeviceValue for FeatureView {}
// SAFETY: above.
unsafe impl DeviceValue for BagView {}
// SAFETY: above.
unsafe impl DeviceValue for Ref {}
// SAFETY: above.
unsafe impl DeviceValue for Counts {}
// SAFETY: above.
unsafe impl DeviceValue for Absents {}
// SAFETY: above.
unsafe impl DeviceValue for BagNumber {}

const _: () = assert!(size_of::<CacheView>() == 48 && size_of::<FeatureView>() == 176);
const _: () =
    assert!(size_of::<Change>() == 24 && size_of::<Ref>() == 16 && size_of::<BagView>() == 20);

/// What `insert_rows`, `update_rows` and `invalidate_rows` take.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChangesArgument {
    cache: CacheView,
    list: u64,
    runs: u64,
    sets: u32,
    stride: u32,
    rows: u64,
    done: u64,
}

/// What a query leaves open, in host memory.
pub(crate) struct Ring {
    pub counts: Mapped<Counts>,
    pub bags: Mapped<BagView>,
    pub refs: Mapped<Ref>,
    pub kept: Mapped<u8>,
    pub absents: Mapped<Absents>,
    pub again: Mapped<BagNumber>,
    /// Words from one kept row to the next.
    pub kept_stride: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RingArgument {
    counts: u64,
    bags: u64,
    refs: u64,
    kept: u64,
    absents: u64,
    again: u64,
    refs_max: u32,
    kept_stride: u32,
}

/// What `query_tables` takes.
#[repr(C)]
#[derive(Clone, Copy)]
struct QueryArgument {
    features: u64,
    keys: u64,
    offsets: u64,
    ring: RingArgument,
    counts: u64,
    blocks: u64,
    only: u64,
    bags: u32,
    samples: u32,
    feature_count: u32,
    tile: u32,
}

const _: () = assert!(size_of::<QueryArgument>() == 120);

/// What `finish_bags` reads when it runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FinishView {
    features: u64,
    bags: u64,
    slots: u64,
    rows: u64,
    count: u32,
    stride: u32,
}

// SAFETY: as above: four addresses and two numbers.
unsafe impl DeviceValue for FinishView {}

/// How a cache changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Insert,
    Update,
    Invalidate,
}

/// Changes to one cache, as the kernels take them: by set.
pub(crate) struct ChangeList {
    pub list: Mapped<Change>,
    /// Where each set's changes begin in the list.
    pub runs: Mapped<u32>,
    /// Whether each change, by its number, happened.
    pub done: Mapped<u8>,
    pub probed: Mapped<Probed>,
}

/// The changes of one cache within a list.
#[derive(Clone, Copy)]
pub(crate) struct ChangesAt {
    pub first: usize,
    pub first_run: usize,
    pub sets: usize,
}

/// A request's keys and offsets, and the counters that the kernel keeps between launches.
pub(crate) struct QueryMemory<'a> {
    pub features: &'a Buffer<FeatureView>,
    /// Where the device finds the keys, and the offsets, of `samples` samples.
    pub keys: u64,
    pub offsets: u64,
    pub samples: usize,
    pub ring: &'a Ring,
    /// `Counts` and the count of finished blocks.
    pub counters: &'a Buffer<u32>,
}

/// The kernels of the lookup, loaded.
pub(crate) struct Kernels {
    insert: Kernel,
    update: Kernel,
    invalidate: Kernel,
    probe: Kernel,
    dump: Kernel,
    query: Kernel,
    finish: Kernel,
}

/// The bags that a query left open, and where their rows are.
pub(crate) struct Finish {
    pub bags: Mapped<BagView>,
    /// By ref: the row, or `NO_SLOT`.
    pub slots: Mapped<u32>,
    what: Mapped<FinishView>,
}

impl Finish {
    /// For up to `misses_max` of them.
    pub fn new(gpu: &Arc<Gpu>, misses_max: usize) -> Result<Self> {
        Ok(Self {
            bags: gpu.mapped(misses_max)?,
            slots: gpu.mapped(misses_max)?,
            what: gpu.mapped(1)?,
        })
    }

    /// Lets the next launch finish the first `count` bags, with rows of `rows` `[.., stride]`
    /// words, which stay until it was waited for.
    pub fn set(
        &mut self,
        features: &Buffer<FeatureView>,
        count: usize,
        (rows, stride): (&Mapped<u8>, usize),
    ) {
        for bag in &self.bags[..count] {
            let slots = &self.slots[bag.first as usize..][..bag.refs as usize];
            assert!(
                slots.iter().all(|&s| s == NO_SLOT || (s as usize + 1) * 4 * stride <= rows.len())
            );
            assert!((bag.feature as usize) < features.len());
        }
        self.what[0] = FinishView {
            features: features.address(),
            bags: self.bags.address(),
            slots: self.slots.address(),
            rows: rows.address(),
            count: count as u32,
            stride: stride as u32,
        };
    }
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
            query: lookup.kernel("query_tables")?,
            finish: lookup.kernel("finish_bags")?,
        })
    }

    /// Launches the kernels of the caches, with nothing to do: a driver loads a kernel when it is
    /// first launched, for which it takes memory, and these are first needed long after the start.
    pub fn warm(&self, stream: &Stream) -> Result<()> {
        let cache = CacheView::default();
        let changes =
            ChangesArgument { cache, list: 0, runs: 0, sets: 0, stride: 0, rows: 0, done: 0 };
        for kernel in [&self.insert, &self.update, &self.invalidate] {
            // SAFETY: the kernel takes this structure, and of no sets it touches nothing.
            unsafe { stream.launch(kernel, 1, THREADS, (changes,)) }?;
        }
        // SAFETY: the kernel takes these four, and for no rows it touches nothing.
        unsafe { stream.launch(&self.probe, 1, THREADS, (cache, 0u64, 0u64, 0u32)) }?;
        // SAFETY: the kernel takes these five, and of no slots it touches nothing.
        unsafe { stream.launch(&self.dump, 1, THREADS, (cache, 0u64, 0u32, 0u64, 0u64)) }?;
        stream.wait()
    }

    /// Changes a cache as the list says, with rows of `rows` `[.., stride]` words.
    pub fn change(
        &self,
        stream: &Stream,
        verb: Verb,
        cache: CacheView,
        (changes, at): (&ChangeList, ChangesAt),
        (rows, stride): (&Mapped<u8>, usize),
    ) -> Result<()> {
        let runs = &changes.runs[at.first_run..][..at.sets + 1];
        let list = &changes.list[at.first..][..runs[at.sets] as usize];
        assert!(runs.is_sorted() && (verb == Verb::Invalidate || stride >= cache.row as usize));
        for change in list {
            assert!(
                u64::from(change.set) < cache.sets && (change.number as usize) < changes.done.len()
            );
            assert!(
                verb == Verb::Invalidate || (change.slot as usize + 1) * 4 * stride <= rows.len()
            );
        }
        let kernel = match verb {
            Verb::Insert => &self.insert,
            Verb::Update => &self.update,
            Verb::Invalidate => &self.invalidate,
        };
        let argument = ChangesArgument {
            cache,
            list: changes.list.address() + (at.first * size_of::<Change>()) as u64,
            runs: changes.runs.address() + 4 * at.first_run as u64,
            sets: at.sets as u32,
            stride: stride as u32,
            rows: rows.address(),
            done: changes.done.address(),
        };
        // SAFETY: the kernel takes this structure; every set, slot and number in it is in its
        // array.
        unsafe { stream.launch(kernel, blocks(at.sets), THREADS, (argument,)) }
    }

    /// Looks for the first `count` rows of the list.
    pub fn probe(
        &self,
        stream: &Stream,
        cache: CacheView,
        changes: &ChangeList,
        count: usize,
    ) -> Result<()> {
        assert!(count <= changes.probed.len());
        assert!(changes.list[..count].iter().all(|c| u64::from(c.set) < cache.sets));
        let arguments = (cache, changes.list.address(), changes.probed.address(), count as u32);
        // SAFETY: the kernel takes these four; every set is one of the cache's.
        unsafe { stream.launch(&self.probe, blocks(count), THREADS, arguments) }
    }

    /// Copies the words and rows of the slots from `first` on, as many as `words` has room for.
    pub fn dump(
        &self,
        stream: &Stream,
        cache: CacheView,
        first: u64,
        slots: usize,
        words: &Mapped<u64>,
        rows: &Mapped<u32>,
    ) -> Result<()> {
        assert!(slots <= words.len() && slots * cache.row as usize <= rows.len());
        assert!(first + slots as u64 <= cache.sets * crate::cache::eviction::WAYS as u64);
        let arguments = (cache, first, slots as u32, words.address(), rows.address());
        // SAFETY: the kernel takes these five; the slots are the cache's, and there is room for
        // them.
        unsafe { stream.launch(&self.dump, blocks(slots), THREADS, arguments) }
    }

    /// Pools `bags` samples of every feature, `tile` of one feature a warp; or `bags` single bags
    /// that `only` names. The keys, offsets and outputs that the features point to are the caller's
    /// to have checked.
    pub fn query(
        &self,
        stream: &Stream,
        memory: &QueryMemory<'_>,
        only: Option<&Mapped<BagNumber>>,
        bags: usize,
        tile: usize,
    ) -> Result<()> {
        let QueryMemory { features, keys, offsets, samples, ring, counters } = memory;
        assert!(
            ring.kept.len() >= 4 * ring.refs.len() * ring.kept_stride
                && ring.bags.len() >= ring.refs.len()
        );
        assert!(
            counters.len() >= 5 && (1..=32).contains(&tile) && only.is_none_or(|o| bags <= o.len())
        );
        assert!(
            only.is_some() || ring.again.len().min(ring.absents.len()) >= bags * features.len()
        );
        assert!(only.is_some() || bags == *samples);
        let argument = QueryArgument {
            features: features.address(),
            keys: *keys,
            offsets: *offsets,
            ring: RingArgument {
                counts: ring.counts.address(),
                bags: ring.bags.address(),
                refs: ring.refs.address(),
                kept: ring.kept.address(),
                absents: ring.absents.address(),
                again: ring.again.address(),
                refs_max: ring.refs.len() as u32,
                kept_stride: ring.kept_stride as u32,
            },
            counts: counters.address(),
            blocks: counters.address() + size_of::<Counts>() as u64,
            only: only.map_or(0, Mapped::address),
            bags: bags as u32,
            samples: *samples as u32,
            feature_count: features.len() as u32,
            tile: tile as u32,
        };
        let warps = if only.is_some() { bags } else { bags.div_ceil(tile) * features.len() };
        // SAFETY: the kernel takes this structure; the ring holds what it can leave, and the caller
        // checked the rest.
        unsafe { stream.launch(&self.query, blocks(warps), THREADS, (argument,)) }
    }

    /// Pools the rest of the open bags that `finish` is set to when this runs: at most `bags_max`.
    pub fn finish(&self, stream: &Stream, finish: &Finish, bags_max: usize) -> Result<()> {
        // A warp goes on to the next bag where there are more.
        let blocks = blocks(bags_max).min(stream.gpu().processors() * 16);
        // SAFETY: the kernel takes this structure's address; every feature, ref and slot in it is
        // in its array.
        unsafe { stream.launch(&self.finish, blocks, THREADS, (finish.what.address(),)) }
    }
}
