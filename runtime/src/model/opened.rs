//! [`Model`]: one generation's tables, caches and dense network as requests use them. Read-only and
//! shared by all workers. A request that starts on a model ends on it.

use crate::bundle::manifest::{Generation, Hash};
use crate::flash::live::LiveId;
use crate::flash::table::{RowLocation, TableRows};
use crate::io::reader::{DeviceDepth, PageReader, ReadMethod};
use crate::limits::BACKGROUND_READS_MAX;
use crate::model::backend::ModelBackend;
use crate::model::budget::Budget;
use crate::model::memory_plan::MemoryPlan;
use crate::model::served_tables::{ServedTable, Storage};
use crate::schema::batch::Batch;
use crate::schema::input_parts::Item;
use crate::schema::{InputSource, MissPolicy, Schema};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::dense::InputPart;
use hatchback_kernels::gpu::lookup::PIECE_COLUMNS;
use hatchback_kernels::lookup::{ColumnCopy, InputColumn};
use std::sync::Arc;

/// A model ready to serve.
///
/// ```no_run
/// use hatchback::clock::SystemClock;
/// use hatchback::flash::Flash;
/// use hatchback::model::Model;
/// use hatchback::model::budget::Budget;
/// use hatchback::request::worker::Worker;
/// use std::path::Path;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let flash = Flash::open(&hatchback::io::disk::system(), Path::new("flash"))?;
/// let model = Arc::new(Model::from_flash(&flash, Budget::default())?);
/// println!("{}", model.memory());
///
/// let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
/// let scores = worker.score(&model.batch(), None)?;
/// println!("{:?}", scores.values);
/// # Ok(())
/// # }
/// ```
pub struct Model {
    generation: Arc<Generation>,
    id: LiveId,
    previous: Option<Hash>,
    schema: Arc<Schema>,
    budget: Budget,
    read_depth: Arc<DeviceDepth>,
    read_method: ReadMethod,
    tables: Vec<ServedTable>,
    backend: ModelBackend,
    outputs: usize,
    columns: Vec<InputColumn>,
    copies: Vec<ColumnCopy>,
    /// The parts of the inputs of the dense network.
    parts: Vec<InputPart>,
    fills: Vec<(Item, InputColumn)>,
    memory: MemoryPlan,
}

/// The use of the embedding caches of a model, in rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Rows that are cached, estimated from a sample.
    pub rows: u64,
    /// Rows for which there is room.
    pub rows_max: u64,
}

/// The parts of a model.
pub(crate) struct ModelParts {
    pub generation: Generation,
    /// The identity of the generation's files.
    pub id: LiveId,
    /// SHA-256 of the manifest of the generation that a rollback leads to.
    pub previous: Option<Hash>,
    pub schema: Arc<Schema>,
    pub budget: Budget,
    pub read_depth: Arc<DeviceDepth>,
    /// How the disk's files are read.
    pub read_method: ReadMethod,
    pub tables: Vec<ServedTable>,
    pub backend: ModelBackend,
    /// Scores per sample.
    pub outputs: usize,
}

impl Model {
    /// Makes a model of its parts, with an empty memory plan.
    pub(crate) fn new(parts: ModelParts) -> Self {
        let ModelParts {
            generation,
            id,
            previous,
            schema,
            budget,
            read_depth,
            read_method,
            tables,
            backend,
            outputs,
        } = parts;
        let (parts, placed) = schema.placed_inputs();
        let (columns, copies) = columns_of(&schema, &placed);
        let is_vector = |(item, _): &(Item, InputColumn)| matches!(item, Item::Vector(_));
        let fills = placed.into_iter().filter(|placed| !is_vector(placed)).collect();
        let memory = MemoryPlan::default();
        Self {
            generation: Arc::new(generation),
            id,
            previous,
            schema,
            budget,
            read_depth,
            read_method,
            tables,
            backend,
            outputs,
            columns,
            copies,
            parts,
            fills,
            memory,
        }
    }

    /// Returns the identity of the served generation. A damaged generation can be replaced by
    /// another of the same number.
    pub fn id(&self) -> LiveId {
        self.id
    }

    /// Returns the manifest's hash of the generation that a rollback of this one leads to.
    pub(crate) fn previous(&self) -> Option<Hash> {
        self.previous
    }

    /// Returns the generation that is served.
    pub fn generation(&self) -> &Arc<Generation> {
        &self.generation
    }

    /// Returns the schema that requests follow.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// Returns the budget that the model was opened with.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the memory plan: every part of the model that takes memory, with its bytes.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// Returns the scores per sample.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the engine that runs the dense network, in words.
    pub fn dense_runs_on(&self) -> String {
        self.backend.dense_runs_on()
    }

    /// Returns the device that looks up rows.
    pub fn lookup_device(&self) -> Device {
        self.backend.lookup_device()
    }

    /// Returns the number of rows that the embedding caches have room for.
    pub fn cache_slots(&self) -> usize {
        self.backend.cache_slots()
    }

    /// Returns the use of the embedding caches; `None` if they are on a GPU.
    pub fn cache_use(&self) -> Option<CacheUse> {
        let caches = self.backend.cpu_tables().map(|tables| &tables.caches)?;
        let rows = caches.iter().map(|cache| cache.rows_estimated() as u64).sum();
        Some(CacheUse { rows, rows_max: self.cache_slots() as u64 })
    }

    /// Returns an empty batch with room for `batch_max` samples of the budget.
    pub fn batch(&self) -> Batch {
        Batch::new(&self.schema, self.budget.batch_max as usize)
    }

    pub(crate) fn tables(&self) -> &[ServedTable] {
        &self.tables
    }

    pub(crate) fn backend(&self) -> &ModelBackend {
        &self.backend
    }

    /// Replaces the storage of each table, the backend that it refers to, and the budget.
    pub(crate) fn with_storage(
        mut self,
        storage: &[Storage],
        backend: ModelBackend,
        budget: Budget,
    ) -> Self {
        for (table, &storage) in self.tables.iter_mut().zip(storage) {
            table.storage = storage;
        }
        Self { backend, budget, ..self }
    }

    /// Replaces the memory plan.
    pub(crate) fn with_memory(self, memory: MemoryPlan) -> Self {
        Self { memory, ..self }
    }

    /// Replaces the backend with the result of `change`, which `memory` is the plan of.
    pub(crate) fn map_backend<E>(
        self,
        memory: MemoryPlan,
        change: impl FnOnce(ModelBackend) -> Result<ModelBackend, E>,
    ) -> Result<Self, E> {
        Ok(Self { backend: change(self.backend)?, memory, ..self })
    }

    /// Returns the read depth of the device, which the models on it share.
    pub(crate) fn read_depth(&self) -> &Arc<DeviceDepth> {
        &self.read_depth
    }

    /// Returns a reader of the model's pages, within the depth of its device.
    pub(crate) fn page_reader(&self) -> PageReader {
        PageReader::on(&self.read_depth, self.read_method)
    }

    /// Returns a reader for a background thread, which leaves the device's depth to requests.
    pub(crate) fn background_reader(&self) -> PageReader {
        PageReader::with_depth(&self.read_depth, BACKGROUND_READS_MAX, self.read_method)
    }

    /// Returns the first column of lookup `l` in the inputs of the dense network.
    #[inline]
    pub(crate) fn column(&self, l: usize) -> InputColumn {
        self.columns[l]
    }

    /// Returns the copies of vectors from one input to another.
    pub(crate) fn copies(&self) -> &[ColumnCopy] {
        &self.copies
    }

    /// Returns the columns that need no row, and what fills them.
    pub(crate) fn fills(&self) -> &[(Item, InputColumn)] {
        &self.fills
    }

    /// Returns the parts of the inputs of the dense network. An input has one part if the model
    /// shares nothing.
    pub(crate) fn input_parts(&self) -> &[InputPart] {
        &self.parts
    }

    /// Returns the values of each part: per sample, or per request of a shared part.
    pub(crate) fn input_widths(&self) -> Vec<usize> {
        self.parts.iter().map(|part| part.width).collect()
    }

    /// Returns whether `table` is on flash, with a cache of its rows.
    pub(crate) fn is_cached(&self, table: u16) -> bool {
        matches!(self.tables[usize::from(table)].storage, Storage::Cached(_))
    }

    /// Returns the rows of a table on flash.
    #[inline]
    pub(crate) fn rows(&self, table: u16) -> &TableRows {
        &self.tables[usize::from(table)].rows
    }

    /// Returns the location of a row on flash; `None` if its table cannot have it.
    pub(crate) fn locate(&self, row: RowKey) -> Option<RowLocation> {
        self.rows(row.table).locate(row.key)
    }

    /// Returns the cache in host memory of a cached table; `None` if it is on a GPU.
    pub(crate) fn cpu_cache(&self, table: u16) -> Option<&Cache> {
        match (&self.tables[usize::from(table)].storage, self.backend.cpu_tables()) {
            (Storage::Cached(cache), Some(tables)) => Some(&tables.caches[*cache]),
            _ => None,
        }
    }

    /// Makes every request wait for its rows, whatever the tables say: a recorded score needs them.
    pub(crate) fn wait_for_rows(&mut self) {
        let tables = &mut Arc::make_mut(&mut self.schema).tables;
        tables.iter_mut().for_each(|table| table.miss = MissPolicy::Wait);
    }

    /// Returns what a request does about a missing row of `table`.
    #[inline]
    pub(crate) fn miss_policy(&self, table: u16) -> MissPolicy {
        self.schema.tables[usize::from(table)].miss
    }
}

/// Returns the inputs of the dense network that a GPU may fill with f16. Only lookups may fill such
/// an input, and each vector in it must start and end at a multiple of [`PIECE_COLUMNS`]. No vector
/// may be copied from or to it.
pub(crate) fn f16_inputs(schema: &Schema) -> Vec<usize> {
    let (parts, placed) = schema.placed_inputs();
    let (columns, copies) = columns_of(schema, &placed);
    let in_pieces = |columns: usize| columns.is_multiple_of(PIECE_COLUMNS);
    let fits = |(number, part): (usize, &InputPart)| {
        let of_lookup = |l: usize| {
            let (at, dim) = (columns[l], schema.table_of(l).dim as usize);
            at.part != number || (in_pieces(at.column) && in_pieces(dim))
        };
        let input = &schema.network.inputs[part.input];
        let filled = matches!(input.source, InputSource::Vectors(_))
            && in_pieces(part.width)
            && part.width == schema.input_width(input)
            && copies.iter().all(|c| c.from.part != number && c.to.part != number)
            && (0..columns.len()).all(of_lookup);
        filled.then_some(part.input)
    };
    parts.iter().enumerate().filter_map(fits).collect()
}

/// Returns the first column of each lookup in the inputs of the dense network, and the copies to
/// more inputs.
fn columns_of(
    schema: &Schema,
    placed: &[(Item, InputColumn)],
) -> (Vec<InputColumn>, Vec<ColumnCopy>) {
    let mut columns: Vec<Option<InputColumn>> = vec![None; schema.lookups.len()];
    let mut copies = Vec::new();
    for &(item, to) in placed {
        let Item::Vector(l) = item else { continue };
        let from = *columns[l].get_or_insert(to);
        if from != to {
            let (width, shared) = (schema.vector_width(l), schema.feature_of(l).shared);
            copies.push(ColumnCopy { from, to, width, shared });
        }
    }
    // No default is used: the schema's check refuses a lookup that feeds no input.
    (columns.into_iter().map(Option::unwrap_or_default).collect(), copies)
}
