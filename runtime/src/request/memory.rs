//! Computes the memory plan of a model with its workers and request slots. This file knows the
//! workers and the queue, and allocates nothing.

use crate::io::reader::PageReader;
use crate::model::backend::{CpuTables, ModelBackend};
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::model::row_writer::RowWriter;
use crate::model::{Model, OpenError, capacity};
use crate::request::changed_rows::list_bytes_max;
use crate::request::negative_cache::NegativeCache;
use crate::request::queue::RequestQueue;
use crate::request::worker::TableCounters;
use crate::schema::batch::Batch;
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
}

fn cache_bytes(model: &Model) -> u64 {
    model.backend().cpu_caches().iter().map(|cache| cache.bytes() as u64).sum()
}

pub(crate) fn check_total(model: &Model) -> Result<(), OpenError> {
    capacity::check_total(model.budget(), model.memory(), cache_bytes(model))
}

/// Returns the bytes of all resident tables of `backend`.
fn resident_bytes(backend: &ModelBackend) -> u64 {
    let in_memory = |tables: &CpuTables| tables.residents.iter().map(|rows| rows.bytes()).sum();
    let on_gpu = || backend.device_tables().map_or(0, |tables| tables.resident_bytes());
    backend.cpu_tables().map_or_else(on_gpu, in_memory) as u64
}

fn index_bytes(model: &Model) -> u64 {
    model.tables().iter().map(|table| table.rows.index_bytes() as u64).sum()
}

/// Sets the line of the vocabularies, which only a model with vocabularies has.
fn set_vocabularies(plan: &mut MemoryPlan, model: &Model) {
    match model.schema().features.iter().map(|f| f.key.bytes() as u64).sum() {
        0 => plan.remove(Part::Vocabularies),
        bytes => plan.set(Part::Vocabularies, bytes),
    }
}

/// Sets the lines that another generation of the same model changes. The dense network of `model`
/// is in host memory.
fn set_generation(plan: &mut MemoryPlan, model: &Model) {
    let (workers, dense) = (u64::from(model.budget().workers), cpu_dense_bytes(model));
    let batch = u64::from(model.budget().batch_max);
    let widths = model.input_widths().iter().sum::<usize>();
    let inputs = 4 * batch * widths as u64;
    plan.set(Part::Residents, resident_bytes(model.backend()));
    plan.set(Part::Indexes, index_bytes(model));
    set_vocabularies(plan, model);
    plan.set(Part::DenseWeights, dense.weights);
    plan.set(Part::DenseInputs, workers * inputs);
    plan.set(Part::DenseResults, workers * dense.scratch as u64);
}

/// Returns the memory plan of `model`, whose dense network is in host memory. The caches and
/// workers are those of an earlier generation, whose plan is `before`.
pub(crate) fn plan_after(before: &MemoryPlan, model: &Model) -> MemoryPlan {
    let mut plan = before.clone();
    plan.remove(Part::GpuWeights);
    plan.remove(Part::GpuDense);
    set_generation(&mut plan, model);
    plan
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

/// Sums the memory of `model`, which is in host memory, with that of its workers and request slots.
pub(crate) fn sum_memory(model: &Model) -> MemoryPlan {
    let mut plan = MemoryPlan::default();
    plan.set(Part::Caches, cache_bytes(model));
    set_generation(&mut plan, model);
    add_workers(&mut plan, model);
    add_queue(&mut plan, model);
    plan
}

/// Adds the memory of one worker that every generation takes, times the workers.
fn add_workers(plan: &mut MemoryPlan, model: &Model) {
    let budget = model.budget();
    let (workers, batch) = (u64::from(budget.workers), budget.batch_max as usize);
    let misses_max = budget.misses_max as usize;
    let misses = MissList::bytes(misses_max, model.staging_row_bytes())
        + misses_max * size_of::<Miss>()
        + TableCounters::bytes(model.schema().tables.len())
        + NegativeCache::bytes();
    let mut add = |part, bytes: usize| plan.set(part, workers * bytes as u64);

    add(Part::Misses, misses);
    add(Part::PageBuffers, PageReader::bytes(budget.reads_max as usize));
    let is_shared = model.schema().has_shared();
    let request = size_of::<LookupStatus>() + size_of::<usize>();
    add(Part::Scores, batch * (sample_bytes(model) + if is_shared { request } else { 0 }));
    add(Part::Batches, Batch::bytes(model.schema(), batch));
}

/// Adds the request slots and the queue.
fn add_queue(plan: &mut MemoryPlan, model: &Model) {
    let budget = model.budget();
    let batch = budget.batch_max as usize;
    let slot = Batch::bytes(model.schema(), batch) + batch * sample_bytes(model);
    plan.set(Part::Slots, u64::from(budget.slots) * slot as u64);
    plan.set(Part::Queues, RequestQueue::queue_bytes(budget.workers as usize) as u64);
}

/// Bytes of the scores and the status of one sample.
fn sample_bytes(model: &Model) -> usize {
    size_of::<LookupStatus>() + 4 * model.outputs()
}

/// Bytes of a dense network in host memory.
#[derive(Default)]
struct DenseBytes {
    weights: u64,
    /// Of one worker.
    scratch: usize,
}

fn cpu_dense_bytes(model: &Model) -> DenseBytes {
    match model.backend() {
        ModelBackend::Cpu { dense, .. } | ModelBackend::GpuTables { dense, .. } => DenseBytes {
            weights: dense.bytes() as u64,
            scratch: dense.scratch_bytes(model.budget().batch_max as usize),
        },
        ModelBackend::Gpu { .. } => DenseBytes::default(),
    }
}
