//! `bench gpu`: lookups and whole requests on a GPU, all rows cached, some missing, or changed
//! meanwhile: beside the memory's own speed, as one graph and kernel by kernel, with launches and
//! waits counted. Never reads flash: a miss is noted, answered with the default row and pooled, as
//! one that the deadline cuts.

use super::lookup::fill_cache;
use super::peer::percentile;
use super::{Bar, Found, Machine, Report, bars_table, dlrm};
use crate::report;
use crate::workload::synthetic::CRITEO_ONNX;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::{Activation, Codec, LookupStatus, Pooling, RowFormat, RowKey, Weights};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{Gpu, Profile};
use hatchback_kernels::cuda::memory::Buffer;
use hatchback_kernels::dense::{DenseNetwork, DeviceEngine, DeviceOptions, TensorRtOptions};
use hatchback_kernels::gpu::device_info::facts;
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, GpuLookup, Keys, LookupLimits};
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use hatchback_kernels::lookup::Bags;
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What the bar on launches is about.
const GRAPH: &str = "request, one graph";
/// What the bar on the memory's speed is about.
const LOOKUP: &str = "lookup";
/// DeviceTables, each with one key a sample.
const TABLES: usize = dlrm::TABLES;
/// The batch of the points over hit rates and under updates, or the largest that is asked for if
/// that is smaller.
const BATCH: usize = 64;
/// Rows of one update.
const UPDATED: usize = 256;
/// What is read of a set before its row.
const SET_BYTES: usize = 64;

/// Measures lookups and whole requests on a GPU
#[derive(Args, Debug)]
pub struct GpuArgs {
    /// Small sizes, for a first look or the stand-in
    #[arg(long)]
    quick: bool,
    /// Rows of each of the 26 tables [default: 400,000; quick: 300]
    #[arg(long)]
    rows: Option<usize>,
    /// Batch sizes
    #[arg(long, value_delimiter = ',')]
    batch: Vec<usize>,
    /// libhatchback_tensorrt.so, to run the dense network on TensorRT
    #[arg(long)]
    tensorrt: Option<PathBuf>,
    /// Where TensorRT's plans are kept
    #[arg(long, default_value = "plans")]
    plans: PathBuf,
    /// Lets TensorRT compute in FP16
    #[arg(long)]
    fp16: bool,
    /// Does without cuBLAS
    #[arg(long)]
    exact: bool,
    /// Only asks the driver what is to be known first of a new board
    #[arg(long)]
    facts: bool,
    /// Writes all figures to this file (`-`: standard output)
    #[arg(long)]
    json: Option<PathBuf>,
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Point {
    /// What was done.
    what: String,
    /// Samples.
    batch: usize,
    /// Share of the lookups whose rows were cached.
    hit_rate: f64,
    p50_us: f64,
    p99_us: f64,
    /// Kernels and graphs launched, a request.
    launches: f64,
    /// Times that the host waited, a request.
    waits: f64,
    /// Bytes of rows, sets and results that a lookup must move, per second; lookups alone.
    gb_per_s: Option<f64>,
}

/// What is measured on.
struct Rig {
    gpu: Arc<Gpu>,
    tables: Arc<DeviceTables>,
    format: RowFormat,
    rows: usize,
    known: Vec<Vec<u64>>,
    step: Step,
    /// Lookups alone, with keys brought and with keys in place.
    lookups: [GpuLookup; 2],
    /// Where those put their vectors.
    _vectors: Buffer<f32>,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    offsets: Vec<u32>,
    rng: StdRng,
    rounds: usize,
    dense: usize,
}

/// The network and the width of its rows.
fn network(quick: bool) -> (Vec<u8>, usize, [&'static str; 2]) {
    if quick {
        (CRITEO_ONNX.to_vec(), 32, ["dense", "emb"])
    } else {
        (dlrm::network(), dlrm::DIM, ["dense", "rows"])
    }
}

impl Rig {
    fn new(gpu: Arc<Gpu>, args: &GpuArgs, batch_max: usize) -> Result<(Self, Arc<DeviceEngine>)> {
        let rows = args.rows.unwrap_or(if args.quick { 300 } else { 400_000 });
        let (onnx, dim, names) = network(args.quick);
        let format = RowFormat::new(Codec::F16, dim, 0).context("no such row")?;
        let mut encoded = vec![0; format.row_bytes()];
        format.encode(&(0..dim).map(|i| (i % 7) as f32 / 8.0).collect::<Vec<_>>(), &mut encoded)?;
        // Keys from `rows` up are the tables' too, and never cached.
        let (cache, known): (Cache, _) = fill_cache(2 * rows, rows, &encoded)?;
        let tables = Arc::new(DeviceTables::new(
            &gpu,
            vec![TableStorage::Cached(0); TABLES],
            vec![cache],
            &[],
        )?);
        let widths = [dlrm::DENSE, TABLES * dim];
        let tensorrt = args.tensorrt.clone().map(|shim| TensorRtOptions {
            shim,
            libraries: None,
            plans: args.plans.clone(),
            fp16: args.fp16,
            workspace_bytes_max: 256 << 20,
        });
        let inputs = [(names[0], widths[0]), (names[1], widths[1])];
        let (activation, weights) = (Activation::Sigmoid, Weights::F32);
        let network =
            DenseNetwork { onnx: &onnx, inputs: &inputs, output: "logit", activation, weights };
        let options = DeviceOptions { tensorrt, cublas: !args.exact, batch_max };
        let engine = Arc::new(DeviceEngine::load(&gpu, &network, &options)?);
        let default_row = vec![0.0; dim];
        let feature = |table: usize, input: u64| FeatureOnDevice {
            table: table as u16,
            format,
            keys_end: None,
            default_row: &default_row,
            pooling: Pooling::Sum,
            hotness_max: 1,
            input,
            stride: TABLES * dim,
            column: table * dim,
            width: dim,
        };
        let features = |input: u64| -> Vec<_> { (0..TABLES).map(|t| feature(t, input)).collect() };
        let misses_max = TABLES * batch_max.min(4 * BATCH);
        let keys = Keys::on(&gpu);
        let limits =
            LookupLimits { batch_max, misses_max, row_bytes_max: format.row_bytes(), keys };
        let step =
            Step::new(&tables, &engine, &widths, Some(0), |inputs| features(inputs[1]), limits)?;
        let vectors = gpu.buffer::<f32>(batch_max * TABLES * dim)?;
        let lookup = |keys| {
            let limits = LookupLimits { keys, misses_max: TABLES, ..limits };
            GpuLookup::new(&tables, &features(vectors.address()), limits)
        };
        let lookups = [lookup(Keys::Brought)?, lookup(Keys::InPlace)?];
        let misses = MissList::on(&Device::Cuda(Arc::clone(&gpu)), misses_max, format.row_bytes())?;
        let rig = Self {
            gpu,
            tables,
            format,
            rows,
            known,
            step,
            lookups,
            _vectors: vectors,
            misses,
            statuses: vec![LookupStatus::default(); batch_max],
            offsets: (0..=batch_max as u32).collect(),
            rng: StdRng::seed_from_u64(7),
            rounds: if args.quick { 5 } else { 300 },
            dense: dlrm::DENSE,
        };
        Ok((rig, engine))
    }

    /// Keys of each table for `batch` samples, of which `hit_rate` are cached.
    fn keys(&mut self, batch: usize, hit_rate: f64) -> Vec<Vec<u64>> {
        let Self { known, rng, rows, .. } = self;
        let mut key = |known: &Vec<u64>| match rng.random_bool(hit_rate) {
            true => known[rng.random_range(0..known.len())],
            false => rng.random_range(*rows as u64..2 * *rows as u64),
        };
        known.iter().map(|known| (0..batch).map(|_| key(known)).collect()).collect()
    }

    /// Calls `request` over and over on keys of its own; a point of its times.
    fn time(
        &mut self,
        what: &str,
        (batch, hit_rate): (usize, f64),
        mut request: impl FnMut(&mut Self, &[Vec<u64>], &[f32]) -> Result<()>,
    ) -> Result<Point> {
        let mut times = Vec::with_capacity(self.rounds);
        let dense: Vec<f32> =
            (0..batch * self.dense).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        let (mut launches, mut waits) = (0, 0);
        // The first is for the machine to warm up.
        for round in 0..=self.rounds {
            let keys = self.keys(batch, hit_rate);
            self.statuses.fill(LookupStatus::default());
            let (calls, start) = (self.gpu.calls(), Instant::now());
            request(self, &keys, &dense)?;
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
                let now = self.gpu.calls();
                launches += now.launches - calls.launches;
                waits += now.waits - calls.waits;
            }
        }
        let rounds = self.rounds as f64;
        Ok(Point {
            what: what.to_owned(),
            batch,
            hit_rate,
            p50_us: percentile(&mut times, 0.5),
            p99_us: percentile(&mut times, 0.99),
            launches: launches as f64 / rounds,
            waits: waits as f64 / rounds,
            gb_per_s: None,
        })
    }

    /// A whole request, misses noted and pooled from default rows.
    fn request(&mut self, keys: &[Vec<u64>], dense: &[f32], recorded: bool) -> Result<()> {
        let Self { step, misses, statuses, offsets, .. } = self;
        let batch = keys[0].len();
        let bags = |f: usize| Bags { keys: &keys[f], offsets: &offsets[..=batch] };
        match recorded {
            true => step.begin(batch, bags, dense)?,
            false => step.begin_unrecorded(batch, bags, dense)?,
        }
        misses.clear();
        let mut more = step.lookup().collect(misses, &mut statuses[..batch])?;
        let mut open = more || !misses.is_empty();
        while open {
            for number in 0..misses.list().len() {
                misses.set_state(misses.list()[number].slot, RowState::Late);
            }
            match more {
                true => step.lookup().settle(misses, &mut statuses[..batch])?,
                false => step.settle(misses, &mut statuses[..batch])?,
            }
            misses.clear();
            open = more;
            more = more && step.lookup().again(misses, &mut statuses[..batch])?;
        }
        ensure!(step.scores(batch).iter().all(|s| s.is_finite()), "a score is not finite");
        Ok(())
    }

    /// Lookups alone, many launches behind one another: what the device takes, not the way to it.
    /// First with the keys in its memory already, then with each of the ways to them.
    fn lookups(&mut self, batch: usize) -> Result<Vec<Point>> {
        let repeats = if self.rounds < 10 { 1 } else { 20 };
        let moved = TABLES * (8 + SET_BYTES + self.format.row_bytes() + 4 * self.format.dim());
        let mut points = Vec::new();
        for (what, which, bring) in [
            (LOOKUP, 0, false),
            ("lookup, keys brought", 0, true),
            ("lookup, keys in place", 1, false),
        ] {
            let mut times = Vec::with_capacity(self.rounds);
            for _ in 0..self.rounds {
                let keys = self.keys(batch, 1.0);
                let offsets = &self.offsets[..=batch];
                let lookup = &mut self.lookups[which];
                lookup.take((batch, batch), |f| Bags { keys: &keys[f], offsets });
                lookup.bring(batch)?;
                lookup.stream().wait()?;
                let start = Instant::now();
                for _ in 0..repeats {
                    if bring {
                        lookup.bring(batch)?;
                    }
                    lookup.launch(batch)?;
                }
                lookup.stream().wait()?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(repeats));
            }
            let (p50_us, p99_us) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
            let (gb_per_s, what) = (Some((batch * moved) as f64 / p50_us / 1e3), what.to_owned());
            points.push(Point {
                what,
                batch,
                hit_rate: 1.0,
                p50_us,
                p99_us,
                launches: 1.0,
                waits: 0.0,
                gb_per_s,
            });
        }
        Ok(points)
    }

    /// Requests while another thread overwrites cached rows without end.
    fn under_updates(&mut self, batch: usize) -> Result<(Point, u64)> {
        let done = Arc::new(AtomicBool::new(false));
        let (tables, gpu, over) =
            (Arc::clone(&self.tables), Arc::clone(&self.gpu), Arc::clone(&done));
        let (known, stride) = (self.known.clone(), self.format.row_bytes().div_ceil(4));
        let updates = std::thread::spawn(move || -> Result<u64> {
            let rows = gpu.mapped::<u8>(UPDATED * 4 * stride)?;
            let (mut changes, mut updated) = (RowChanges::new(&tables, UPDATED)?, 0);
            while !over.load(Ordering::Relaxed) {
                for slot in 0..UPDATED {
                    let (table, at) = (slot % TABLES, updated as usize + slot);
                    let key = known[table][at % known[table].len()];
                    changes.add(
                        RowKey { table: table as u16, key },
                        slot as u32,
                        Default::default(),
                    );
                }
                updated +=
                    changes.update(&rows, stride)?.iter().map(|&d| u64::from(d)).sum::<u64>();
            }
            Ok(updated)
        });
        let point =
            self.time("request, rows updated meanwhile", (batch, 1.0), |rig, keys, dense| {
                rig.request(keys, dense, true)
            });
        done.store(true, Ordering::Relaxed);
        let updated = updates.join().map_err(|_| anyhow::anyhow!("the updates failed"))??;
        Ok((point?, updated))
    }
}

/// Bytes that the memory moves in a second when it copies: each is read and written.
fn copied_gb_per_s(gpu: &Arc<Gpu>, quick: bool) -> Result<f64> {
    let (bytes, repeats) = if quick { (1 << 20, 2) } else { (1 << 29, 20) };
    let (from, mut to, stream) =
        (gpu.buffer::<u8>(bytes)?, gpu.buffer::<u8>(bytes)?, gpu.stream()?);
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        (0..repeats).try_for_each(|_| stream.copy(&from, &mut to))?;
        stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(2.0 * bytes as f64 / best / 1e9)
}

fn bars(points: &[Point], copied: f64) -> Vec<Bar> {
    let lookups = points.iter().filter(|p| p.what == LOOKUP);
    let widest = lookups.max_by_key(|p| p.batch);
    let share = widest.and_then(|p| p.gb_per_s).map(|g| g / copied);
    let batch = widest.map_or(0, |p| p.batch);
    let hits = points.iter().filter(|p| p.what == GRAPH && p.hit_rate == 1.0);
    let most = hits.map(|p| p.launches.max(p.waits)).fold(0.0, f64::max);
    vec![
        Bar::at_least_if(
            format!("lookups of batch {batch}, share of the memory's copying speed"),
            share,
            0.7,
        ),
        Bar::at_least("requests an own launch and an own wait, all rows cached", 1.0 / most, 1.0),
        Bar {
            name: "lookups a second beside HPS's cache kernels on the same keys".to_owned(),
            bar: 2.0,
            found: Found::NotRun {
                reason: "nothing here builds and runs HPS's kernels".to_owned(),
            },
        },
    ]
}

/// Runs it.
///
/// # Errors
/// There is no GPU, or it fails.
pub fn run(args: &GpuArgs) -> Result<()> {
    if args.facts {
        for (question, answer) in facts()? {
            println!("{question:42} {answer}");
        }
        return Ok(());
    }
    let gpu = Gpu::open(Profile::default())?;
    let name = format!("{}, compute capability {}.{}", gpu.name(), gpu.sm() / 10, gpu.sm() % 10);
    println!("{name}, {} of memory", report::bytes(gpu.memory()? as u64));
    let batches = match (args.batch.is_empty(), args.quick) {
        (false, _) => args.batch.clone(),
        (true, true) => vec![1, 8, 64],
        (true, false) => (0..=16).step_by(2).map(|n| 1 << n).collect(),
    };
    let batch_max = batches.iter().copied().max().unwrap_or(1);
    let (mut rig, engine) = Rig::new(Arc::clone(&gpu), args, batch_max)?;
    engine.passed_over().iter().for_each(|why| println!("passed over: {why}"));
    println!("the dense network runs on {}", engine.runs_on());
    let copied = copied_gb_per_s(&gpu, args.quick)?;
    println!("the memory copies at {copied:.0} GB/s (read and written)");
    let mut points = Vec::new();
    for &batch in &batches {
        points.extend(rig.lookups(batch)?);
        for (what, recorded) in [(GRAPH, true), ("request, kernel by kernel", false)] {
            points.push(
                rig.time(what, (batch, 1.0), |rig, keys, dense| {
                    rig.request(keys, dense, recorded)
                })?,
            );
        }
    }
    for hit_rate in [0.99, 0.95, 0.9, 0.7, 0.5] {
        let shape = (batch_max.min(BATCH), hit_rate);
        points.push(rig.time("request, misses noted", shape, |rig, keys, dense| {
            rig.request(keys, dense, true)
        })?);
    }
    let (point, updated) = rig.under_updates(batch_max.min(BATCH))?;
    points.push(point);
    show(&points);
    println!("{} rows were overwritten meanwhile", report::count(updated));
    let bars = bars(&points, copied);
    println!("{}", bars_table(&bars));
    if let Some(path) = &args.json {
        let model =
            format!("26 tables of {} rows, f16, 1 key; {name}; {}", rig.rows, engine.runs_on());
        report::write_json(
            path,
            &Report { bench: "gpu", machine: Machine::this(), model, bars, points },
        )?;
    }
    Ok(())
}

fn show(points: &[Point]) {
    let mut table =
        report::table(&["", "batch", "hit rate", "p50", "p99", "launches", "waits", "GB/s"]);
    for p in points {
        let time =
            |us: f64| if us < 100.0 { format!("{us:.1} µs") } else { format!("{us:.0} µs") };
        table.add_row([
            p.what.clone(),
            report::count(p.batch as u64),
            format!("{:.2}", p.hit_rate),
            time(p.p50_us),
            time(p.p99_us),
            format!("{:.0}", p.launches),
            format!("{:.0}", p.waits),
            p.gb_per_s.map_or(String::new(), |g| format!("{g:.0}")),
        ]);
    }
    println!("{table}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(what: &str, batch: usize, launches: f64, gb_per_s: Option<f64>) -> Point {
        let what = what.to_owned();
        Point {
            what,
            batch,
            hit_rate: 1.0,
            p50_us: 1.0,
            p99_us: 1.0,
            launches,
            waits: 1.0,
            gb_per_s,
        }
    }

    #[test]
    fn the_widest_lookups_and_the_most_launches_count() {
        let points = [
            point(LOOKUP, 1, 1.0, Some(90.0)),
            point(LOOKUP, 64, 1.0, Some(60.0)),
            point(GRAPH, 1, 1.0, None),
            point(GRAPH, 64, 2.0, None),
        ];
        let found: Vec<String> = bars(&points, 100.0).iter().map(ToString::to_string).collect();
        assert!(
            found[0].contains("batch 64")
                && found[0].contains("0.600")
                && found[0].ends_with("MISSED")
        );
        assert!(found[1].contains("0.500") && found[1].ends_with("MISSED"), "{found:?}");
        assert!(found[2].contains("HPS") && found[2].contains("not run"), "{found:?}");
        let found: Vec<String> =
            bars(&points[2..3], 100.0).iter().map(ToString::to_string).collect();
        assert!(found[0].contains("not run") && found[1].ends_with("holds"), "{found:?}");
    }
}
