//! Computes the memory plan of a model with its workers and request slots. This file knows the
//! workers and the queue, and allocates nothing.

use crate::io::reader::PageReader;
use crate::limits::PROBE_CACHE_BYTES_MAX;
use crate::model::Model;
use crate::model::budget::Budget;
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::model::row_writer::{RowWriter, copies_of};
use crate::model::served_tables::{ResidentBytes, resident_bytes};
use crate::request::changed_rows::{list_bytes_max, read_bytes};
use crate::request::negative_cache::NegativeCache;
use crate::request::queue::RequestQueue;
use crate::request::worker::{TableCounters, lookup_limits};
use crate::schema::Schema;
use crate::schema::batch::Batch;
use hatchback_kernels::cuda::Device;
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
    /// Before it is served, its probe opens it with a small cache of its own.
    pub fn update_bytes(&self) -> u64 {
        let changed = self.schema().tables.iter().map(|table| table.rows).sum::<u64>() / 10;
        let keys = size_of::<u64>() + size_of::<Option<u32>>();
        let ResidentBytes { tables, loading } = resident_bytes(self.schema(), self.tables());
        let reading = loading.max(read_bytes(changed));
        let swap = tables * copies_of(self.backend()) as u64
            + changed * keys as u64
            + reading.max(list_bytes_max(self) + RowWriter::bytes(self));
        let worker = [Part::Misses, Part::PageBuffers, Part::Scores, Part::Batches, Part::Queues];
        let slot = self.memory().bytes_of(&[Part::Slots]) / u64::from(self.budget().slots.max(1));
        let probe = PROBE_CACHE_BYTES_MAX + self.memory().bytes_of(&worker) + slot;
        self.memory().bytes_of(&NOT_SHARED)
            + self.memory().bytes_of(&[Part::Indexes])
            + swap.max(probe)
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

impl<'a> Backing<'a> {
    /// Returns the backing of tables on `device`, with the network in host memory.
    pub fn of_tables(device: &'a Device) -> Self {
        match device {
            Device::Cpu => Self::Host,
            Device::Cuda(gpu) => Self::GpuTables(gpu),
        }
    }
}

/// The sizes of a model, which may not have taken any of this memory yet.
pub(crate) struct ModelSizes<'a> {
    pub schema: &'a Schema,
    pub budget: &'a Budget,
    pub caches: u64,
    pub residents: u64,
    /// The indexes of all tables.
    pub indexes: u64,
    /// The dense network, if it is in host memory.
    pub dense: Option<&'a DenseEngine>,
    /// Scores per sample.
    pub outputs: usize,
    /// The opening bytes of the plan so far.
    pub opening: u64,
}

impl<'a> ModelSizes<'a> {
    /// Returns the sizes of `model`, wherever its tables are.
    pub fn of(model: &'a Model) -> Self {
        let backend = model.backend();
        let (caches, residents) = match backend.device_tables() {
            Some(tables) => (tables.cache_bytes(), tables.resident_bytes()),
            None => (
                backend.cpu_caches().iter().map(|cache| cache.bytes()).sum(),
                backend.cpu_residents().iter().map(|rows| rows.bytes()).sum(),
            ),
        };
        let indexes: usize = model.tables().iter().map(|table| table.rows.index_bytes()).sum();
        Self {
            schema: model.schema(),
            budget: model.budget(),
            caches: caches as u64,
            residents: residents as u64,
            indexes: indexes as u64,
            dense: backend.cpu_dense(),
            outputs: model.outputs(),
            opening: model.memory().opening_bytes(),
        }
    }

    /// Returns the values that all inputs of the network have for a sample.
    fn input_width(&self) -> usize {
        self.schema.input_parts().iter().map(|part| part.width).sum()
    }

    /// Bytes of the scores and the status of one sample.
    fn sample_bytes(&self) -> usize {
        size_of::<LookupStatus>() + 4 * self.outputs
    }
}

/// Returns the memory plan of a model of `sizes`, with its workers and request slots, if it were at
/// `backing`.
pub(crate) fn plan_memory(sizes: &ModelSizes<'_>, backing: Backing<'_>) -> MemoryPlan {
    let mut parts = vec![
        (Part::Caches, sizes.caches),
        (Part::Residents, sizes.residents),
        (Part::Indexes, sizes.indexes),
    ];
    // Few models have vocabularies.
    let vocabularies = sizes.schema.features.iter().map(|f| f.key.bytes() as u64).sum();
    parts.extend((vocabularies > 0).then_some((Part::Vocabularies, vocabularies)));
    add_network(&mut parts, sizes, backing);
    add_workers(&mut parts, sizes);
    add_queue(&mut parts, sizes);
    add_gpu(&mut parts, sizes, backing);
    MemoryPlan::new(parts, sizes.opening)
}

/// Adds the network's inputs, and what the network takes if it is in host memory.
fn add_network(parts: &mut Vec<(Part, u64)>, sizes: &ModelSizes<'_>, backing: Backing<'_>) {
    let (workers, batch) = (u64::from(sizes.budget.workers), sizes.budget.batch_max);
    let inputs = 4 * u64::from(batch) * sizes.input_width() as u64;
    let on_host = sizes.dense.filter(|_| !matches!(backing, Backing::Gpu(..)));
    parts.extend(on_host.map(|dense| (Part::DenseWeights, dense.bytes() as u64)));
    parts.push((Part::DenseInputs, workers * inputs));
    let results = |dense: &DenseEngine| workers * dense.scratch_bytes(batch as usize) as u64;
    parts.extend(on_host.map(|dense| (Part::DenseResults, results(dense))));
}

/// Adds what workers share with a GPU that has the tables, and the network there.
fn add_gpu(parts: &mut Vec<(Part, u64)>, sizes: &ModelSizes<'_>, backing: Backing<'_>) {
    let (schema, budget) = (sizes.schema, sizes.budget);
    let workers = u64::from(budget.workers);
    let (gpu, engine) = match backing {
        Backing::Host => return,
        Backing::GpuTables(gpu) => (gpu, None),
        Backing::Gpu(gpu, engine) => (gpu, Some(engine)),
    };
    let room = RequestRoom {
        features: schema.lookups.len(),
        lookups: schema.lookups_max(),
        weights: schema.weights_max(),
        is_shared: schema.has_shared(),
    };
    let shared = GpuLookup::bytes(room, lookup_limits(schema, budget, gpu));
    parts.push((Part::GpuShared, workers * shared as u64));
    if let Some(engine) = engine {
        let batch_max = budget.batch_max as usize;
        let per_worker = Step::bytes(engine, sizes.input_width(), batch_max);
        parts.push((Part::GpuWeights, engine.bytes()));
        parts.push((Part::GpuDense, workers * per_worker));
    }
}

/// Returns the bytes of `model` that it does not share with `before`, the previous generation.
pub(crate) fn own_bytes(model: &Model, before: &Model) -> u64 {
    own_index_bytes(model, before) + model.memory().bytes_of(&NOT_SHARED)
}

/// Returns the bytes of the indexes of `model` that it does not share with `before`.
pub(crate) fn own_index_bytes(model: &Model, before: &Model) -> u64 {
    let tables = model.tables().iter().zip(before.tables());
    tables.map(|(new, old)| new.rows.own_index_bytes(&old.rows) as u64).sum()
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
fn add_workers(parts: &mut Vec<(Part, u64)>, sizes: &ModelSizes<'_>) {
    let (schema, budget) = (sizes.schema, sizes.budget);
    let (workers, batch) = (u64::from(budget.workers), budget.batch_max as usize);
    let misses_max = budget.misses_max as usize;
    let misses = MissList::bytes(misses_max, schema.row_bytes_max())
        + misses_max * size_of::<Miss>()
        + TableCounters::bytes(schema.tables.len())
        + NegativeCache::bytes();
    let mut add = |part, bytes: usize| parts.push((part, workers * bytes as u64));

    add(Part::Misses, misses);
    add(Part::PageBuffers, PageReader::bytes(budget.reads_max as usize));
    let request = size_of::<LookupStatus>() + size_of::<usize>();
    let shared = if schema.has_shared() { request } else { 0 };
    add(Part::Scores, batch * (sizes.sample_bytes() + shared));
    add(Part::Batches, Batch::bytes(schema, batch));
}

/// Adds the request slots and the queue.
fn add_queue(parts: &mut Vec<(Part, u64)>, sizes: &ModelSizes<'_>) {
    let budget = sizes.budget;
    let batch = budget.batch_max as usize;
    let slot = Batch::bytes(sizes.schema, batch) + batch * sizes.sample_bytes();
    parts.push((Part::Slots, u64::from(budget.slots) * slot as u64));
    parts.push((Part::Queues, RequestQueue::queue_bytes(budget.workers as usize) as u64));
}
