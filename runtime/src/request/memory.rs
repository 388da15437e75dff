//! Computes the memory plan of a model with its workers and request slots. This file knows the
//! workers and the queue, and allocates nothing.

use crate::io::reader::PageReader;
use crate::limits::PROBE_CACHE_BYTES_MAX;
use crate::model::Model;
use crate::model::backend::{CpuTables, ModelBackend};
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::model::row_writer::RowWriter;
use crate::request::changed_rows::list_bytes_max;
use crate::request::negative_cache::NegativeCache;
use crate::request::queue::RequestQueue;
use crate::request::worker::{TableCounters, lookup_limits};
use crate::schema::batch::Batch;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::dense::DenseEngine;
use hatchback_kernels::gpu::DeviceEngine;
use hatchback_kernels::gpu::lookup::{GpuLookup, RequestRoom};
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};

impl Model {
    /// Returns the bytes that an update takes beside this model, at most: a next generation with
    /// tables and a network of the same sizes. It is a snapshot, or a tenth of the rows changed.
    pub fn update_bytes(&self) -> u64 {
        let rows = self.schema().tables.iter().map(|table| table.rows).sum::<u64>();
        let changed_keys = rows / 10 * size_of::<u64>() as u64;
        self.memory().bytes_of(&NOT_SHARED)
            + self.memory().bytes_of(&[Part::Residents, Part::Indexes])
            + list_bytes_max(self)
            + RowWriter::bytes(self)
            + changed_keys
    }

    /// Returns the bytes that an explanation takes beside this model: a network of the same size
    /// and a small cache. The segments are shared.
    pub(crate) fn explanation_bytes(&self) -> u64 {
        self.memory().bytes_of(&NOT_SHARED) + PROBE_CACHE_BYTES_MAX
    }
}

/// Where the tables and the network of a model are, or would be.
#[derive(Clone, Copy)]
pub(crate) enum Backing<'a> {
    Host,
    /// The tables are on the GPU, the network is in host memory.
    GpuTables(&'a Gpu),
    Gpu(&'a Gpu, &'a DeviceEngine),
}

fn cache_bytes(backend: &ModelBackend) -> u64 {
    let on_gpu = backend.device_tables().map_or(0, |tables| tables.cache_bytes());
    (on_gpu + backend.cpu_caches().iter().map(|cache| cache.bytes()).sum::<usize>()) as u64
}

/// Returns the bytes of all resident tables of `backend`.
fn resident_bytes(backend: &ModelBackend) -> u64 {
    let in_memory = |tables: &CpuTables| tables.residents.iter().map(|rows| rows.bytes()).sum();
    let on_gpu = || backend.device_tables().map_or(0, |tables| tables.resident_bytes());
    backend.cpu_tables().map_or_else(on_gpu, in_memory) as u64
}

/// Returns the memory plan of `model`, with its workers and request slots, if it were at
/// `backing`. Moving it there takes `opening_bytes` more for a while. The tables of `model` may
/// be elsewhere yet.
pub(crate) fn plan_memory(model: &Model, backing: Backing<'_>, opening_bytes: u64) -> MemoryPlan {
    let mut parts = vec![
        (Part::Caches, cache_bytes(model.backend())),
        (Part::Residents, resident_bytes(model.backend())),
        (Part::Indexes, model.tables().iter().map(|table| table.rows.index_bytes() as u64).sum()),
    ];
    // Few models have vocabularies.
    let vocabularies = model.schema().features.iter().map(|f| f.key.bytes() as u64).sum();
    parts.extend((vocabularies > 0).then_some((Part::Vocabularies, vocabularies)));
    add_network(&mut parts, model, backing);
    add_workers(&mut parts, model);
    add_queue(&mut parts, model);
    add_gpu(&mut parts, model, backing);
    MemoryPlan::new(parts, model.memory().opening_bytes().max(opening_bytes))
}

/// Adds the network's inputs, and what the network takes if it is in host memory.
fn add_network(parts: &mut Vec<(Part, u64)>, model: &Model, backing: Backing<'_>) {
    let (workers, batch) = (u64::from(model.budget().workers), model.budget().batch_max);
    let inputs = 4 * u64::from(batch) * input_width(model) as u64;
    let on_host = match (backing, model.backend().cpu_dense()) {
        (Backing::Gpu(..), _) | (_, None) => None,
        (_, dense) => dense,
    };
    parts.extend(on_host.map(|dense| (Part::DenseWeights, dense.bytes() as u64)));
    parts.push((Part::DenseInputs, workers * inputs));
    let results = |dense: &DenseEngine| workers * dense.scratch_bytes(batch as usize) as u64;
    parts.extend(on_host.map(|dense| (Part::DenseResults, results(dense))));
}

fn input_width(model: &Model) -> usize {
    model.input_widths().iter().sum()
}

/// Adds what workers share with a GPU that has the tables, and the network there.
fn add_gpu(parts: &mut Vec<(Part, u64)>, model: &Model, backing: Backing<'_>) {
    let workers = u64::from(model.budget().workers);
    let (gpu, engine) = match backing {
        Backing::Host => return,
        Backing::GpuTables(gpu) => (gpu, None),
        Backing::Gpu(gpu, engine) => (gpu, Some(engine)),
    };
    let schema = model.schema();
    let room = RequestRoom {
        features: schema.lookups.len(),
        lookups: schema.lookups_max(),
        weights: schema.weights_max(),
        is_shared: schema.has_shared(),
    };
    let shared = GpuLookup::bytes(room, lookup_limits(model, gpu));
    parts.push((Part::GpuShared, workers * shared as u64));
    if let Some(engine) = engine {
        let batch_max = model.budget().batch_max as usize;
        let per_worker = Step::bytes(engine, input_width(model), batch_max);
        parts.push((Part::GpuWeights, engine.bytes()));
        parts.push((Part::GpuDense, workers * per_worker));
    }
}

/// Returns the bytes of `model` that it does not share with `before`, the previous generation.
pub(crate) fn own_bytes(model: &Model, before: &Model) -> u64 {
    let tables = model.tables().iter().zip(before.tables());
    let indexes: usize = tables.map(|(new, old)| new.rows.own_index_bytes(&old.rows)).sum();
    indexes as u64 + model.memory().bytes_of(&NOT_SHARED)
}

/// The lines that two generations never share.
const NOT_SHARED: [Part; 6] = [
    Part::Vocabularies,
    Part::DenseInputs,
    Part::DenseWeights,
    Part::DenseResults,
    Part::GpuWeights,
    Part::GpuDense,
];

/// Adds the memory of one worker that every generation takes, times the workers.
fn add_workers(parts: &mut Vec<(Part, u64)>, model: &Model) {
    let budget = model.budget();
    let (workers, batch) = (u64::from(budget.workers), budget.batch_max as usize);
    let misses_max = budget.misses_max as usize;
    let misses = MissList::bytes(misses_max, model.staging_row_bytes())
        + misses_max * size_of::<Miss>()
        + TableCounters::bytes(model.schema().tables.len())
        + NegativeCache::bytes();
    let mut add = |part, bytes: usize| parts.push((part, workers * bytes as u64));

    add(Part::Misses, misses);
    add(Part::PageBuffers, PageReader::bytes(budget.reads_max as usize));
    let is_shared = model.schema().has_shared();
    let request = size_of::<LookupStatus>() + size_of::<usize>();
    add(Part::Scores, batch * (sample_bytes(model) + if is_shared { request } else { 0 }));
    add(Part::Batches, Batch::bytes(model.schema(), batch));
}

/// Adds the request slots and the queue.
fn add_queue(parts: &mut Vec<(Part, u64)>, model: &Model) {
    let budget = model.budget();
    let batch = budget.batch_max as usize;
    let slot = Batch::bytes(model.schema(), batch) + batch * sample_bytes(model);
    parts.push((Part::Slots, u64::from(budget.slots) * slot as u64));
    parts.push((Part::Queues, RequestQueue::queue_bytes(budget.workers as usize) as u64));
}

/// Bytes of the scores and the status of one sample.
fn sample_bytes(model: &Model) -> usize {
    size_of::<LookupStatus>() + 4 * model.outputs()
}
