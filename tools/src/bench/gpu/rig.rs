//! The measured GPU: filled tables, the request step and the lookups, with their timed loops. Never
//! reads flash: the rig resolves a miss with the default row, as the runtime resolves one that the
//! deadline cuts.

use super::figures::{
    GpuFigures, LOOKUP, LOOKUP_KEYS_COPIED, LOOKUP_KEYS_IN_PLACE, MISSES, UPDATES,
};
use crate::bench::dlrm;
use crate::bench::filled_cache::{FilledCache, TABLES};
use crate::bench::peer::percentile;
use crate::workload::synthetic::CRITEO_ONNX;
use anyhow::{Context, Result, anyhow, ensure};
use hatchback::{Activation, Codec, LookupStatus, Pooling, RowFormat, RowKey};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::cuda::memory::Buffer;
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, GpuLookup, Keys, LookupLimits};
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, InputType, Precision, TensorRtOptions,
};
use hatchback_kernels::lookup::Bags;
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The largest batch with misses or updates.
pub const MISSES_BATCH: usize = 64;
/// Rows of one update.
const UPDATED: usize = 256;
/// Bytes of a set's header, which a lookup reads before the row.
const SET_BYTES: usize = 64;
/// Memory that TensorRT may use while it builds a plan.
const WORKSPACE_BYTES: u64 = 256 << 20;

/// The rig's options.
pub struct RigOptions {
    /// Rows of each table.
    pub rows: usize,
    /// Samples of the largest batch.
    pub batch_max: usize,
    /// Small sizes and few rounds.
    pub quick: bool,
    /// Path of libhatchback_tensorrt.so; `None` runs the dense network on our kernels.
    pub tensorrt: Option<PathBuf>,
    /// Directory of TensorRT's plans.
    pub plans: PathBuf,
    /// How precisely the dense network is computed.
    pub precision: Precision,
}

/// The network, the width of its rows, and the names of its inputs.
struct RigNetwork {
    onnx: Vec<u8>,
    dim: usize,
    inputs: [&'static str; 2],
}

impl RigNetwork {
    fn new(quick: bool) -> Self {
        if quick {
            Self { onnx: CRITEO_ONNX.to_vec(), dim: 32, inputs: ["dense", "emb"] }
        } else {
            Self { onnx: dlrm::network(), dim: dlrm::DIM, inputs: ["dense", "rows"] }
        }
    }

    /// Returns the widths of the two inputs.
    fn widths(&self) -> [usize; 2] {
        [dlrm::DENSE, TABLES * self.dim]
    }

    /// Loads the dense network on `gpu`.
    fn load(&self, gpu: &Arc<Gpu>, options: &RigOptions) -> Result<Arc<DeviceEngine>> {
        let [dense, rows] = self.widths();
        let inputs = [(self.inputs[0], dense), (self.inputs[1], rows)];
        let network = DenseNetwork {
            onnx: &self.onnx,
            inputs: &inputs,
            output: "logit",
            activation: Activation::Sigmoid,
        };

        let tensorrt = options.tensorrt.clone().map(|shim| TensorRtOptions {
            shim,
            libraries: None,
            plans: options.plans.clone(),
            workspace_bytes_max: WORKSPACE_BYTES,
        });
        let dense = GpuDense { tensorrt, precision: options.precision };
        let f16_inputs = vec![1];
        let device = DeviceOptions { dense, batch_max: options.batch_max, f16_inputs };
        Ok(Arc::new(DeviceEngine::load(gpu, &network, &device)?))
    }
}

/// Returns the features: one bag of each table, whose vector goes to `input`.
fn features(
    format: RowFormat,
    default_row: &[f32],
    input: u64,
    input_type: InputType,
) -> Vec<FeatureOnDevice<'_>> {
    let dim = format.dim();
    let feature = |table: usize| FeatureOnDevice {
        table: table as u16,
        format,
        keys_end: None,
        default_row,
        pooling: Pooling::Sum,
        weighted: false,
        hotness_max: 1,
        input,
        input_type,
        stride: TABLES * dim,
        column: table * dim,
        width: dim,
    };
    (0..TABLES).map(feature).collect()
}

/// The GPU and everything that the loops reuse.
pub struct Rig {
    gpu: Arc<Gpu>,
    tables: Arc<DeviceTables>,
    format: RowFormat,
    rows: usize,
    cached_keys: Vec<Vec<u64>>,
    step: Step,
    /// Lookups that copy their keys to the device.
    copying: GpuLookup,
    /// Lookups that read their keys from host memory.
    in_place: GpuLookup,
    /// Output of both lookups; only kept allocated.
    _vectors: Buffer<f32>,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    offsets: Vec<u32>,
    rng: StdRng,
    rounds: usize,
}

/// The kind of the lookups in [`Rig::lookups`].
#[derive(Clone, Copy)]
enum KeyTransfer {
    /// The keys are in device memory before the clock starts.
    Before,
    /// Each lookup copies its keys to the device.
    Copied,
    /// Each lookup reads its keys from host memory.
    InPlace,
}

/// The share of a batch's lookups that hit, and the batch's samples.
#[derive(Clone, Copy)]
pub struct RequestShape {
    /// Samples.
    pub batch: usize,
    /// Share of the lookups whose rows are cached.
    pub hit_rate: f64,
}

/// How the rig launches a request's kernels.
#[derive(Clone, Copy, PartialEq)]
pub enum LaunchMode {
    /// As one recorded graph.
    Graph,
    /// One by one.
    Kernels,
}

impl Rig {
    /// Fills the tables, loads the network, and prepares the request step and the lookups. Also
    /// returns the dense engine.
    ///
    /// # Errors
    /// The device has too little memory, or the network is refused.
    pub fn new(gpu: Arc<Gpu>, options: &RigOptions) -> Result<(Self, Arc<DeviceEngine>)> {
        let RigOptions { rows, batch_max, quick, .. } = *options;
        let network = RigNetwork::new(quick);
        let dim = network.dim;
        let format = RowFormat::new(Codec::F16, dim, 0).context("no such row")?;
        let (tables, cached_keys) = fill_tables(&gpu, format, rows)?;
        let engine = network.load(&gpu, options)?;

        let default_row = vec![0.0; dim];
        let misses_max = TABLES * batch_max.min(4 * MISSES_BATCH);
        let keys = Keys::on(&gpu);
        let row_bytes_max = format.row_bytes();
        let limits = LookupLimits { batch_max, misses_max, row_bytes_max, keys };
        let of_rows = engine.input_types()[1];
        let of_step = |inputs: &[u64]| features(format, &default_row, inputs[1], of_rows);
        let step = Step::new(&tables, &engine, &network.widths(), Some(0), of_step, limits)?;

        let vectors = gpu.buffer::<f32>(batch_max * TABLES * dim)?;
        let lookup = |keys| {
            let limits = LookupLimits { keys, misses_max: TABLES, ..limits };
            let features = features(format, &default_row, vectors.address(), InputType::F32);
            GpuLookup::new(&tables, &features, limits)
        };
        let (copying, in_place) = (lookup(Keys::Copied)?, lookup(Keys::InPlace)?);
        let misses = MissList::on(&Device::Cuda(Arc::clone(&gpu)), misses_max, row_bytes_max)?;

        let rig = Self {
            gpu,
            tables,
            format,
            rows,
            cached_keys,
            step,
            copying,
            in_place,
            _vectors: vectors,
            misses,
            statuses: vec![LookupStatus::default(); batch_max],
            offsets: (0..=batch_max as u32).collect(),
            rng: StdRng::seed_from_u64(7),
            rounds: if quick { 5 } else { 300 },
        };
        Ok((rig, engine))
    }

    /// Returns the rows of each table.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Draws the keys of each table for a batch; a share of `hit_rate` is cached.
    fn keys(&mut self, shape: RequestShape) -> Vec<Vec<u64>> {
        let Self { cached_keys, rng, rows, .. } = self;
        let mut key = |cached: &Vec<u64>| match rng.random_bool(shape.hit_rate) {
            true => cached[rng.random_range(0..cached.len())],
            false => rng.random_range(*rows as u64..2 * *rows as u64),
        };
        cached_keys.iter().map(|cached| (0..shape.batch).map(|_| key(cached)).collect()).collect()
    }

    /// Times whole requests, each with keys of its own.
    ///
    /// # Errors
    /// The device fails, or a score is not finite.
    pub fn time_requests(
        &mut self,
        what: &str,
        shape: RequestShape,
        mode: LaunchMode,
    ) -> Result<GpuFigures> {
        let mut times = Vec::with_capacity(self.rounds);
        let values = shape.batch * dlrm::DENSE;
        let dense: Vec<f32> = (0..values).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        let (mut launches, mut waits) = (0, 0);

        // The first round warms the machine up and does not count.
        for round in 0..=self.rounds {
            let keys = self.keys(shape);
            self.statuses.fill(LookupStatus::default());
            let (calls, start) = (self.gpu.calls(), Instant::now());
            self.request(&keys, &dense, mode)?;

            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
                let now = self.gpu.calls();
                launches += now.launches - calls.launches;
                waits += now.waits - calls.waits;
            }
        }

        let rounds = self.rounds as f64;
        Ok(GpuFigures {
            what: what.to_owned(),
            batch: shape.batch,
            hit_rate: shape.hit_rate,
            p50_us: percentile(&mut times, 0.5),
            p99_us: percentile(&mut times, 0.99),
            gpu_us_p50: None,
            launches: launches as f64 / rounds,
            waits: waits as f64 / rounds,
            gb_per_s: None,
        })
    }

    /// Scores one request. Missing rows go to the miss list, and their bags get default rows.
    fn request(&mut self, keys: &[Vec<u64>], dense: &[f32], mode: LaunchMode) -> Result<()> {
        let Self { step, misses, statuses, offsets, .. } = self;
        let batch = keys[0].len();
        let bags = |f: usize| Bags::new(&keys[f], &offsets[..=batch]);
        match mode {
            LaunchMode::Graph => step.begin(batch, bags, dense)?,
            LaunchMode::Kernels => step.begin_unrecorded(batch, bags, dense)?,
        }

        misses.clear();
        let mut more = step.lookup().collect(misses, &mut statuses[..batch])?;
        let mut open = more || !misses.is_empty();
        while open {
            for number in 0..misses.list().len() {
                misses.set_state(misses.list()[number].slot, RowState::Late);
            }
            match more {
                true => step.lookup().finish_bags(misses, &mut statuses[..batch])?,
                false => step.complete(misses, &mut statuses[..batch])?,
            }
            misses.clear();
            open = more;
            more = more && step.lookup().requery(misses, &mut statuses[..batch])?;
        }

        ensure!(step.scores(batch).iter().all(|s| s.is_finite()), "a score is not finite");
        Ok(())
    }

    /// Times lookups alone. Many launches follow one another, so that the figure is the device's
    /// time and not the way to the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn lookups(&mut self, batch: usize) -> Result<Vec<GpuFigures>> {
        [
            (LOOKUP, KeyTransfer::Before),
            (LOOKUP_KEYS_COPIED, KeyTransfer::Copied),
            (LOOKUP_KEYS_IN_PLACE, KeyTransfer::InPlace),
        ]
        .into_iter()
        .map(|(what, transfer)| self.time_lookups(what, batch, transfer))
        .collect()
    }

    fn time_lookups(
        &mut self,
        what: &str,
        batch: usize,
        transfer: KeyTransfer,
    ) -> Result<GpuFigures> {
        let repeats = if self.rounds < 10 { 1 } else { 20 };
        let hits = RequestShape { batch, hit_rate: 1.0 };
        let mut times = Vec::with_capacity(self.rounds);
        let mut on_gpu = Vec::with_capacity(self.rounds);
        let (begun, ended) = (self.gpu.timed_event()?, self.gpu.timed_event()?);

        for _ in 0..self.rounds {
            let keys = self.keys(hits);
            let offsets = &self.offsets[..=batch];
            let lookup = match transfer {
                KeyTransfer::Before | KeyTransfer::Copied => &mut self.copying,
                KeyTransfer::InPlace => &mut self.in_place,
            };
            lookup.write_request(batch, batch, |f| Bags::new(&keys[f], offsets));
            lookup.copy_keys(batch)?;
            lookup.stream().wait()?;

            let start = Instant::now();
            lookup.stream().record(&begun)?;
            for _ in 0..repeats {
                if let KeyTransfer::Copied = transfer {
                    lookup.copy_keys(batch)?;
                }
                lookup.launch(batch)?;
            }
            lookup.stream().record(&ended)?;
            lookup.stream().wait()?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(repeats));
            on_gpu.push(ended.us_since(&begun)? / f64::from(repeats));
        }

        let moved = TABLES * (8 + SET_BYTES + self.format.row_bytes() + 4 * self.format.dim());
        let (p50_us, p99_us) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
        Ok(GpuFigures {
            what: what.to_owned(),
            batch,
            hit_rate: 1.0,
            p50_us,
            p99_us,
            gpu_us_p50: Some(percentile(&mut on_gpu, 0.5)),
            launches: 1.0,
            waits: 0.0,
            gb_per_s: Some((batch * moved) as f64 / p50_us / 1e3),
        })
    }

    /// Times requests of which some rows are missing.
    ///
    /// # Errors
    /// Those of [`Rig::time_requests`].
    pub fn with_misses(&mut self, shape: RequestShape) -> Result<GpuFigures> {
        self.time_requests(MISSES, shape, LaunchMode::Graph)
    }

    /// Times requests while another thread overwrites cached rows without a pause. Also returns the
    /// number of overwritten rows.
    ///
    /// # Errors
    /// Those of [`Rig::time_requests`], or an update fails.
    pub fn under_updates(&mut self, batch: usize) -> Result<(GpuFigures, u64)> {
        let done = Arc::new(AtomicBool::new(false));
        let mut updater = Updater {
            gpu: Arc::clone(&self.gpu),
            tables: Arc::clone(&self.tables),
            keys: self.cached_keys.clone(),
            row_words: self.format.row_bytes().div_ceil(4),
            done: Arc::clone(&done),
        };
        let updates = std::thread::spawn(move || updater.run());

        let hits = RequestShape { batch, hit_rate: 1.0 };
        let figures = self.time_requests(UPDATES, hits, LaunchMode::Graph);
        done.store(true, Ordering::Relaxed);
        let updated = updates.join().map_err(|_| anyhow!("the updates panicked"))??;
        Ok((figures?, updated))
    }
}

/// Fills one cache on `gpu` with `rows` rows of each table. Keys from `rows` up belong to the
/// tables too and are never cached. Also returns the cached keys of each table.
pub fn fill_tables(
    gpu: &Arc<Gpu>,
    format: RowFormat,
    rows: usize,
) -> Result<(Arc<DeviceTables>, Vec<Vec<u64>>)> {
    let mut encoded = vec![0; format.row_bytes()];
    let values: Vec<f32> = (0..format.dim()).map(|i| (i % 7) as f32 / 8.0).collect();
    format.encode(&values, &mut encoded)?;

    let FilledCache { cache, keys } = FilledCache::hashed(2 * rows, rows, &encoded)?;
    let storage = vec![TableStorage::Cached(0); TABLES];
    Ok((Arc::new(DeviceTables::new(gpu, storage, vec![cache], &[])?), keys))
}

/// A thread that overwrites cached rows.
struct Updater {
    gpu: Arc<Gpu>,
    tables: Arc<DeviceTables>,
    keys: Vec<Vec<u64>>,
    row_words: usize,
    done: Arc<AtomicBool>,
}

impl Updater {
    /// Overwrites rows until `done`. Returns their number.
    fn run(&mut self) -> Result<u64> {
        let rows = self.gpu.mapped::<u8>(UPDATED * 4 * self.row_words)?;
        let (mut changes, mut updated) = (RowChanges::new(&self.tables, UPDATED)?, 0);

        while !self.done.load(Ordering::Relaxed) {
            for slot in 0..UPDATED {
                let (table, at) = (slot % TABLES, updated as usize + slot);
                let key = self.keys[table][at % self.keys[table].len()];
                let row_key = RowKey { table: table as u16, key };
                changes.add(row_key, slot as u32, Default::default());
            }
            let done = changes.update(&rows, self.row_words)?;
            updated += done.iter().map(|&d| u64::from(d)).sum::<u64>();
        }
        Ok(updated)
    }
}
