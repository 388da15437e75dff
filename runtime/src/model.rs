//! A model opened for serving: one generation's tables, caches and dense network. Read-only and shared by
//! all workers; a request that began on it ends on it.

use crate::absent::Absent;
use crate::batch::Batch;
use crate::budget::{Budget, MemoryPlan};
use crate::disk::Disk;
use crate::flash::{Flash, FlashError};
use crate::lane::Lane;
use crate::limits::{BATCH_MAX, SLOTS_MAX};
use crate::manifest::Generation;
use crate::reader::{DeviceDepth, PageReader, ReadMethod};
use crate::schema::{InputSource, KeySpace, Placement, Schema, Table};
use crate::segment::SegmentError;
use crate::table_rows::{Place, TableRows};
use crate::weights;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::codec::RowFormat;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::lookup::Lookup;
use hatchback_kernels::cuda::step::Step;
use hatchback_kernels::cuda::tables::{Place as TablePlace, Tables};
use hatchback_kernels::dense::{
    DenseEngine, DenseError, DeviceEngine, DeviceOptions, TensorRtOptions, Weights,
};
use hatchback_kernels::misses::{Miss, Misses};
use hatchback_kernels::names::{Names, RowKey, mix};
use hatchback_kernels::query::Status;
use hatchback_kernels::resident::Resident;
use std::path::Path;
use std::sync::Arc;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The flash directory is not usable.
    #[error(transparent)]
    Flash(#[from] FlashError),
    /// A segment is not usable.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The dense network is not usable.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The GPU does not take the model.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The dense network does not bear the weights that the budget asks for.
    #[error("budget.dense_weights = {weights}: probe sample {sample}: {problem}; take wider weights")]
    Weights {
        /// The field's value.
        weights: Weights,
        /// Which sample, from 0.
        sample: usize,
        /// What it scores.
        problem: String,
    },
    /// The budget cannot hold the model.
    #[error("budget.{field} = {value}: {problem}")]
    Budget {
        /// The field to change.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What does not fit.
        problem: String,
    },
}

/// Where a table's rows are looked for.
pub(crate) enum Store {
    /// Empty where the rows are on a GPU.
    Resident(Resident),
    /// Number of the cache in `Model::caches`.
    Cached { cache: usize, rows: TableRows },
}

/// One table as it is served.
pub(crate) struct ServedTable {
    pub format: RowFormat,
    pub store: Store,
}

/// A model ready to serve.
pub struct Model {
    generation: Generation,
    schema: Arc<Schema>,
    budget: Budget,
    device: Arc<DeviceDepth>,
    pub(crate) tables: Vec<ServedTable>,
    /// None where they are on a GPU.
    pub(crate) caches: Vec<Cache>,
    /// The caches and resident tables where they are on a GPU.
    pub(crate) on_gpu: Option<Arc<Tables>>,
    pub(crate) dense: DenseEngine,
    /// The dense network where it is on a GPU; then `dense` only knows its shape.
    pub(crate) dense_on_gpu: Option<Arc<DeviceEngine>>,
    /// For each feature its network input and its first column there.
    pub(crate) columns: Vec<(usize, usize)>,
    plan: MemoryPlan,
}

impl Model {
    /// Opens the live generation under `directory` within `budget`.
    ///
    /// # Errors
    /// Something on flash is missing or damaged, or the budget is too small.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path, budget: Budget) -> Result<Self, OpenError> {
        Self::from_flash(&Flash::open(disk, directory)?, budget)
    }

    /// The same, on a directory that is open already.
    ///
    /// # Errors
    /// As `open`.
    pub fn from_flash(flash: &Flash, budget: Budget) -> Result<Self, OpenError> {
        Self::on_device(flash, budget, DeviceDepth::new(budget.reads_max as usize))
    }

    /// The same, beside other models that read from the same device.
    ///
    /// # Errors
    /// As `open`.
    pub fn on_device(flash: &Flash, budget: Budget, device: Arc<DeviceDepth>) -> Result<Self, OpenError> {
        let model = Self::cold(flash, budget, device, &|| {})?;
        model.preload(flash, None)?;
        Ok(model)
    }

    /// The same with empty caches, `rest` between the tables.
    pub(crate) fn cold(
        flash: &Flash,
        budget: Budget,
        device: Arc<DeviceDepth>,
        rest: &dyn Fn(),
    ) -> Result<Self, OpenError> {
        let schema = Arc::new(flash.manifest().schema.clone());
        check_budget(&schema, &budget)?;
        let dense = schema.load_dense(flash.dense()?, budget.dense_weights)?;
        let resident = choose_resident(&schema, &budget)?;
        let caches = make_caches(&schema, &resident, &budget)?;
        let tables = open_tables(flash, &schema, &resident, &caches, rest)?;
        let columns = columns_of(&schema);
        let generation = flash.manifest().generation.clone();
        let plan = MemoryPlan::default();
        let (on_gpu, dense_on_gpu) = (None, None);
        let mut model = Self {
            generation,
            schema,
            budget,
            device,
            tables,
            caches,
            on_gpu,
            dense,
            dense_on_gpu,
            columns,
            plan,
        };
        model.plan = model.sum_memory();
        let total = model.plan.total();
        if total > budget.memory_bytes_max {
            return Err(too_much(&budget, total, &model.caches, &model.plan));
        }
        weights::check(model, flash)
    }

    /// Takes the caches, as they are now, and the resident tables to where `lookups` are to be made.
    ///
    /// # Errors
    /// The GPU has no room for them, or the budget none for what the workers need beside it.
    pub fn onto(mut self, lookups: &Device) -> Result<Self, OpenError> {
        let Device::Cuda(gpu) = lookups else { return Ok(self) };
        let (features, lookups) = (self.schema.features.len(), self.schema.lookups_max());
        let bytes = Lookup::bytes(features, lookups, self.limits_on(gpu));
        let what = "keys, rings and changes that the GPU shares, all workers";
        self.plan.add(what, u64::from(self.budget.workers) * bytes as u64);
        let total = self.plan.total();
        if total > self.budget.memory_bytes_max {
            return Err(too_much(&self.budget, total, &self.caches, &self.plan));
        }
        let (mut places, mut residents) = (Vec::with_capacity(self.tables.len()), Vec::new());
        for table in &self.tables {
            places.push(match &table.store {
                Store::Cached { cache, .. } => TablePlace::Cached(*cache),
                Store::Resident(rows) => {
                    residents.push(rows);
                    TablePlace::Resident(residents.len() - 1)
                }
            });
        }
        // One cache after the other is given back; the resident tables once they are all there.
        let tables = residents.iter().map(|rows| rows.bytes() as u64).sum::<u64>();
        self.plan.note_opening(tables + self.caches.iter().map(|c| c.bytes() as u64).max().unwrap_or(0));
        let caches = std::mem::take(&mut self.caches);
        self.on_gpu = Some(Arc::new(Tables::new(gpu, places, caches, &residents)?));
        for table in &mut self.tables {
            if let Store::Resident(rows) = &mut table.store {
                *rows = Resident::indexed(table.format.row_bytes(), &[]);
            }
        }
        Ok(self)
    }

    /// Takes the dense network, too, to the GPU on which the tables are. Where nothing there can run it, it stays on the CPU.
    ///
    /// # Errors
    /// The network is not on `flash`, the GPU has no room for it, or the budget has none.
    pub fn with_dense(
        mut self,
        flash: &Flash,
        tensorrt: Option<&TensorRtOptions>,
    ) -> Result<Self, OpenError> {
        let Some(tables) = &self.on_gpu else { return Ok(self) };
        let (batch_max, weights) = (self.budget.batch_max as usize, self.budget.dense_weights);
        let options = DeviceOptions { tensorrt: tensorrt.cloned(), cublas: false, batch_max };
        let engine = match self.schema.load_dense_on(tables.gpu(), &flash.dense()?, weights, &options) {
            Ok(engine) => engine,
            Err(e @ DenseError::Cuda(_)) => return Err(e.into()),
            Err(e) => {
                log::warn!("the dense network stays on the CPU: {e}");
                return Ok(self);
            }
        };
        let widths: usize = self.schema.network.inputs.iter().map(|i| self.schema.input_width(i)).sum();
        let worker = Step::bytes(&engine, widths, batch_max);
        self.plan.add("dense network on the GPU, weights", engine.bytes() as u64);
        self.plan.add("dense network on the GPU, all workers", u64::from(self.budget.workers) * worker);
        let total = self.plan.total();
        if total > self.budget.memory_bytes_max {
            return Err(too_much(&self.budget, total, &self.caches, &self.plan));
        }
        self.dense_on_gpu = Some(Arc::new(engine));
        Ok(self)
    }

    /// What runs the dense network, in words.
    pub fn dense_runs_on(&self) -> String {
        match (&self.dense_on_gpu, self.dense.falls_back_for()) {
            (Some(engine), _) => engine.runs_on(),
            (None, Some(operator)) => format!("the CPU, by rten (for {operator})"),
            (None, None) => "the CPU".to_owned(),
        }
    }

    /// Where its rows are looked up.
    pub fn lookup_device(&self) -> Device {
        self.on_gpu.as_ref().map_or(Device::Cpu, |tables| Device::Cuda(Arc::clone(tables.gpu())))
    }

    /// What is served.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// How the model is put together.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// What its reads share with others.
    pub(crate) fn device(&self) -> &Arc<DeviceDepth> {
        &self.device
    }

    /// What the model was opened within.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Where the memory goes.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Values in a sample's score.
    pub fn outputs(&self) -> usize {
        self.dense.outputs()
    }

    /// Rows that the embedding caches hold at most.
    pub fn cache_slots(&self) -> usize {
        let on_gpu = self.on_gpu.as_ref().map_or(0, |tables| tables.slots());
        on_gpu + self.caches.iter().map(Cache::slots).sum::<usize>()
    }

    /// An empty batch of the size that the budget allows.
    pub fn batch(&self) -> Batch {
        Batch::new(&self.schema, self.budget.batch_max as usize)
    }

    fn sum_memory(&self) -> MemoryPlan {
        let mut plan = MemoryPlan::default();
        let workers = u64::from(self.budget.workers);
        let batch = self.budget.batch_max as usize;
        let sum = |f: &dyn Fn(&Store) -> usize| self.tables.iter().map(|t| f(&t.store)).sum::<usize>() as u64;
        plan.add("embedding caches", self.caches.iter().map(|c| c.bytes() as u64).sum());
        plan.add("resident tables", sum(&|s| if let Store::Resident(r) = s { r.bytes() } else { 0 }));
        plan.add(
            "indexes of the segments and overlays of their deltas",
            sum(&|s| if let Store::Cached { rows, .. } = s { rows.index_bytes() } else { 0 }),
        );
        plan.add("dense network weights", self.dense.bytes() as u64);
        let waiting = self.budget.misses_max as usize;
        let misses = Misses::bytes(waiting, self.staging_row_bytes()) + waiting * size_of::<Miss>();
        let misses = misses + Absent::bytes();
        plan.add("miss lists, staging rows and absent keys, all workers", workers * misses as u64);
        let reads = PageReader::bytes(self.budget.reads_max as usize);
        plan.add("page buffers, all workers", workers * reads as u64);
        let widths: usize = self.schema.network.inputs.iter().map(|i| self.schema.input_width(i)).sum();
        plan.add("dense network inputs, all workers", workers * (4 * batch * widths) as u64);
        let dense = workers * self.dense.scratch_bytes(batch) as u64;
        plan.add("dense network results between layers, all workers", dense);
        let per_sample = size_of::<Status>() + 4 * self.outputs();
        plan.add("scores and statuses, all workers", workers * (batch * per_sample) as u64);
        let request = Batch::bytes(&self.schema, batch);
        plan.add("batches, all workers", workers * request as u64);
        let slots = u64::from(self.budget.slots) * (request + batch * per_sample) as u64;
        plan.add("request slots: batches, scores and statuses", slots);
        plan.add(
            "queues of requests and of keys to prefetch",
            Lane::queue_bytes(self.budget.workers as usize) as u64,
        );
        plan
    }

    /// The widest row that can wait in a miss list.
    pub(crate) fn staging_row_bytes(&self) -> usize {
        self.tables.iter().map(|t| t.format.row_bytes()).max().unwrap_or(0)
    }

    /// Puts the trainer's most used keys into the caches, up to each table's fair share.
    pub(crate) fn preload(&self, flash: &Flash, rest: Option<&dyn Fn()>) -> Result<(), OpenError> {
        let mut reader = PageReader::on(&self.device, ReadMethod::Auto);
        for (number, table) in self.tables.iter().enumerate() {
            let Store::Cached { cache, rows } = &table.store else { continue };
            let (cached, cache) = (self.rows_behind(*cache), &self.caches[*cache]);
            let share = cache.slots() as u128 * u128::from(rows.base_rows()) / u128::from(cached.max(1));
            let mut keys = flash.hot_keys(number)?;
            // A set overflows before all slots are taken; three quarters go in almost surely.
            keys.truncate((share * 3 / 4) as usize);
            preload_table(number, rows, cache, &keys, (&mut reader, rest));
        }
        Ok(())
    }

    /// Rows of all tables that share this cache.
    fn rows_behind(&self, cache: usize) -> u64 {
        let rows = |t: &ServedTable| match &t.store {
            Store::Cached { cache: c, rows } if *c == cache => rows.base_rows(),
            _ => 0,
        };
        self.tables.iter().map(rows).sum()
    }
}

/// Reads the pages of `keys` in file order and inserts those keys' rows. Where there is to be `rest`, no read is in flight meanwhile: it
/// would keep others' waiting. A bad page costs its rows' warmth only.
pub(crate) fn preload_table(
    number: usize,
    rows: &TableRows,
    cache: &Cache,
    keys: &[u64],
    (reader, rest): (&mut PageReader, Option<&dyn Fn()>),
) {
    let mut places: Vec<(Place, u64)> = keys.iter().filter_map(|&k| Some((rows.locate(k)?, k))).collect();
    places.sort_unstable();
    let groups: Vec<&[(Place, u64)]> = places.chunk_by(|a, b| a.0 == b.0).collect();
    let mut begun = 0;
    while begun < groups.len() || reader.in_flight() > 0 {
        let mut goes_on = true;
        if let Some(rest) = rest {
            goes_on = reader.in_flight() == 0;
            if goes_on {
                rest();
            }
        }
        while goes_on && begun < groups.len() && reader.has_room() {
            let place = groups[begun][0].0;
            reader.begin(rows.segment(place).file(), place.page, begun as u64);
            begun += 1;
        }
        let done = reader.next(None, |group, page| {
            let group = groups[group as usize];
            let (place, segment) = (group[0].0, rows.segment(group[0].0));
            match segment.check_read(place.page, page) {
                Err(e) => log::error!("{e}"),
                Ok(page) => group.iter().for_each(|&(_, key)| {
                    if let Some(row) = segment.row(&page, key) {
                        let name = RowKey { table: number as u16, key };
                        cache.insert(name, row, cache.epoch(name));
                    }
                }),
            }
        });
        if !done {
            return log::error!("table {number}: the reader failed; the rest of its hot rows stay cold");
        }
    }
}

fn check_budget(schema: &Schema, budget: &Budget) -> Result<(), OpenError> {
    let refuse =
        |field, value: u32, problem: String| Err(OpenError::Budget { field, value: value.into(), problem });
    let hotness = schema.features.iter().map(|f| f.hotness_max).max().unwrap_or(0);
    if budget.batch_max == 0 || budget.batch_max as usize > BATCH_MAX {
        refuse("batch_max", budget.batch_max, format!("is not in 1..={BATCH_MAX}"))
    } else if budget.misses_max < hotness {
        refuse("misses_max", budget.misses_max, format!("a bag of this model has up to {hotness} keys"))
    } else if budget.workers == 0 {
        refuse("workers", budget.workers, "there is at least 1".to_owned())
    } else if budget.slots == 0 || budget.slots as usize > SLOTS_MAX {
        refuse("slots", budget.slots, format!("is not in 1..={SLOTS_MAX}"))
    } else if budget.reads_max < budget.workers {
        refuse("reads_max", budget.reads_max, format!("{} workers need a read each", budget.workers))
    } else {
        Ok(())
    }
}

/// The model takes `total` bytes: says what to lower.
fn too_much(budget: &Budget, total: u64, caches: &[Cache], plan: &MemoryPlan) -> OpenError {
    let over = total - budget.memory_bytes_max;
    let held: u64 = caches.iter().map(|c| c.bytes() as u64).sum();
    let lower = match held.checked_sub(over) {
        Some(fits) if fits > 0 => format!("lower cache_bytes_max to {fits}"),
        _ => "lower resident_bytes_max, slots, workers, batch_max or misses_max".to_owned(),
    };
    let problem = format!("the model takes {total} bytes, {over} too many; {lower}:\n{plan}");
    OpenError::Budget { field: "memory_bytes_max", value: budget.memory_bytes_max, problem }
}

/// Decides which tables are resident: those that must be, then the smallest automatic ones that fit.
fn choose_resident(schema: &Schema, budget: &Budget) -> Result<Vec<bool>, OpenError> {
    let bytes = |i: usize| {
        let table = &schema.tables[i];
        let hashes = if table.keys == KeySpace::Sparse { 8 * table.rows } else { 0 };
        table.row_bytes_total().saturating_add(hashes)
    };
    let must = |i: &usize| schema.tables[*i].placement == Placement::Resident;
    let mut used: u64 = (0..schema.tables.len()).filter(must).map(bytes).sum();
    if used > budget.resident_bytes_max {
        let problem = format!("the tables placed `resident` take {used} bytes");
        return Err(OpenError::Budget {
            field: "resident_bytes_max",
            value: budget.resident_bytes_max,
            problem,
        });
    }
    let mut resident: Vec<bool> = (0..schema.tables.len()).map(|i| must(&i)).collect();
    let mut automatic: Vec<usize> =
        (0..schema.tables.len()).filter(|&i| schema.tables[i].placement == Placement::Auto).collect();
    automatic.sort_by_key(|&i| (bytes(i), i));
    for i in automatic {
        // One table may take a quarter of the budget at most: beyond that its cold rows waste it.
        if used + bytes(i) > budget.resident_bytes_max || bytes(i) > budget.resident_bytes_max / 4 {
            break;
        }
        used += bytes(i);
        resident[i] = true;
    }
    Ok(resident)
}

/// One cache for each row width, the budget split by the bytes of the rows behind each.
fn make_caches(schema: &Schema, resident: &[bool], budget: &Budget) -> Result<Vec<Cache>, OpenError> {
    let row_bytes = |t: &Table| t.codec.row_bytes(t.dim as usize);
    let mut widths: Vec<(usize, u64)> = Vec::new();
    for (table, _) in schema.tables.iter().zip(resident).filter(|(_, r)| !**r) {
        match widths.iter_mut().find(|(w, _)| *w == row_bytes(table)) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(table.row_bytes_total()),
            None => widths.push((row_bytes(table), table.row_bytes_total())),
        }
    }
    let names = |width| {
        let end = |(t, resident): (&Table, &bool)| match t.keys {
            _ if *resident || row_bytes(t) != width => Some(0),
            KeySpace::Index => Some(t.rows),
            KeySpace::Sparse => None,
        };
        Names::new(schema.tables.iter().zip(resident).map(end).collect())
    };
    // The least that each can work with, however few its rows are beside the others'; the rest in proportion.
    let least: u64 = widths.iter().map(|&(width, _)| Cache::bytes_min(width, &names(width)) as u64).sum();
    let too_small = || OpenError::Budget {
        field: "cache_bytes_max",
        value: budget.cache_bytes_max,
        problem: format!("the smallest caches for {} row widths take {least} bytes", widths.len()),
    };
    let spare = budget.cache_bytes_max.checked_sub(least).ok_or_else(too_small)?;
    let all: u128 = widths.iter().map(|(_, bytes)| u128::from(*bytes)).sum();
    let share = |bytes: u64| (u128::from(spare) * u128::from(bytes) / all.max(1)) as usize;
    widths
        .iter()
        .map(|&(width, bytes)| {
            let names = names(width);
            Cache::new(width, Cache::bytes_min(width, &names) + share(bytes), &names)
        })
        .collect::<Option<_>>()
        .ok_or_else(too_small)
}

fn open_tables(
    flash: &Flash,
    schema: &Schema,
    resident: &[bool],
    caches: &[Cache],
    rest: &dyn Fn(),
) -> Result<Vec<ServedTable>, OpenError> {
    let mut tables = Vec::with_capacity(schema.tables.len());
    for (number, table) in schema.tables.iter().enumerate() {
        rest();
        let rows = flash.table(number)?;
        let format = table.format().ok_or_else(|| SegmentError::Field {
            path: flash.directory().to_owned(),
            field: "unit_exp",
            problem: format!("table `{}` does not fit its codec", table.name),
        })?;
        let store = if resident[number] {
            Store::Resident(load_resident(&rows, table, format)?)
        } else {
            let cache = caches.iter().position(|c| c.row_bytes() == format.row_bytes());
            Store::Cached { cache: cache.unwrap_or_default(), rows }
        };
        tables.push(ServedTable { format, store });
    }
    Ok(tables)
}

/// Reads a whole table. A damaged page of a resident table refuses the start: its rows would be gone for
/// every request.
fn load_resident(rows: &TableRows, table: &Table, format: RowFormat) -> Result<Resident, OpenError> {
    // Positions serve an index table only while it is whole and in key order.
    let indexed = table.keys == KeySpace::Index && rows.changed() == 0;
    let (mut bytes, mut hashes, mut damaged) = (Vec::new(), Vec::new(), None);
    rows.scan(
        |order, row| {
            bytes.extend_from_slice(row);
            if !indexed {
                hashes.push(if table.keys == KeySpace::Index { mix(order) } else { order });
            }
        },
        |e| damaged = Some(e),
    )?;
    match damaged {
        Some(e) => Err(e.into()),
        None if indexed => Ok(Resident::indexed(format.row_bytes(), &bytes)),
        None => Ok(sorted_resident(format.row_bytes(), &hashes, &bytes)),
    }
}

fn sorted_resident(row_bytes: usize, hashes: &[u64], rows: &[u8]) -> Resident {
    let mut order: Vec<usize> = (0..hashes.len()).collect();
    order.sort_unstable_by_key(|&i| hashes[i]);
    let sorted_hashes = order.iter().map(|&i| hashes[i]).collect();
    let sorted_rows: Vec<u8> =
        order.iter().flat_map(|&i| &rows[i * row_bytes..(i + 1) * row_bytes]).copied().collect();
    Resident::hashed(row_bytes, sorted_hashes, &sorted_rows)
}

fn columns_of(schema: &Schema) -> Vec<(usize, usize)> {
    let mut columns = vec![(0, 0); schema.features.len()];
    for (number, input) in schema.network.inputs.iter().enumerate() {
        let InputSource::Features(features) = &input.source else { continue };
        let mut column = 0;
        for &f in features {
            columns[usize::from(f)] = (number, column);
            column += schema.feature_width(usize::from(f));
        }
    }
    columns
}
