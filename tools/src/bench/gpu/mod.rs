//! `bench gpu`: lookups and whole requests on a GPU, with all rows cached, with some missing, and
//! while another thread updates rows. The bench compares lookups with the memory's own speed and
//! counts launches and waits. Never reads flash.

mod figures;
mod rig;
mod shapes;

use super::bars::bars_table;
use super::results::{BenchReport, HostMachine, prints_tables};
use crate::{report, say};
use anyhow::Result;
use clap::Args;
use figures::{GRAPH, GpuFigures, KERNELS};
use hatchback_kernels::cuda::driver::{Gpu, Profile};
use hatchback_kernels::gpu::Precision;
use hatchback_kernels::gpu::device_info::facts;
use rig::{LaunchMode, MISSES_BATCH, RequestShape, Rig, RigOptions};
use shapes::ShapeOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Hit rates of the requests with misses.
const HIT_RATES: [f64; 5] = [0.99, 0.95, 0.9, 0.7, 0.5];

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
    /// How precisely the dense network is computed: exact, f32, tf32 or f16
    #[arg(long, default_value = "f32", value_parser = parse_precision)]
    precision: Precision,
    /// Measures lookups of many shapes beside a plain gather of the same rows, and nothing else
    #[arg(long)]
    shapes: bool,
    /// With --shapes, writes the keys of each shape to FOLDER, for tools/peers/gpu.py
    #[arg(long, value_name = "FOLDER", requires = "shapes")]
    keys: Option<PathBuf>,
    /// Loads the kernels from FOLDER instead of the built-in ones, to try others
    #[arg(long, value_name = "FOLDER")]
    kernels: Option<PathBuf>,
    /// Only prints what the driver says of a new board
    #[arg(long)]
    facts: bool,
    /// Writes the report as JSON to FILE; without FILE, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-",
          value_parser = report::json_file)]
    json: Option<PathBuf>,
}

impl GpuArgs {
    fn batches(&self) -> Vec<usize> {
        match (self.batch.is_empty(), self.quick) {
            (false, _) => self.batch.clone(),
            (true, true) => vec![1, 8, 64],
            (true, false) => (0..=16).step_by(2).map(|n| 1 << n).collect(),
        }
    }

    fn shape_options(&self) -> ShapeOptions {
        let batches = match (self.batch.is_empty(), self.quick) {
            (false, _) => self.batch.clone(),
            (true, true) => vec![4],
            (true, false) => vec![1, 64, 1024, 8192, 65536],
        };
        let rows = self.rows.unwrap_or(if self.quick { 60 } else { 40_000 });
        let (json, keys) = (self.json.clone(), self.keys.clone());
        ShapeOptions { rows, batches, quick: self.quick, json, keys }
    }

    fn rig_options(&self, batch_max: usize) -> RigOptions {
        RigOptions {
            rows: self.rows.unwrap_or(if self.quick { 300 } else { 400_000 }),
            batch_max,
            quick: self.quick,
            tensorrt: self.tensorrt.clone(),
            plans: self.plans.clone(),
            precision: self.precision,
        }
    }
}

fn parse_precision(name: &str) -> Result<Precision, String> {
    let all = [Precision::Exact, Precision::F32, Precision::Tf32, Precision::F16];
    let found = all.into_iter().find(|precision| precision.name() == name);
    found.ok_or_else(|| format!("`{name}` is not exact, f32, tf32 or f16"))
}

/// Runs the measurement.
///
/// # Errors
/// The machine has no GPU, the GPU fails, or a file cannot be written.
pub fn run(args: &GpuArgs) -> Result<()> {
    if args.facts {
        return facts()?.iter().try_for_each(|(name, value)| say!("{name:42} {value}"));
    }

    let tables = prints_tables(args.json.as_ref());
    let gpu = match &args.kernels {
        None => Gpu::open(Profile::default())?,
        Some(folder) => Gpu::with_kernels(Profile::default(), folder)?,
    };
    if args.shapes {
        return shapes::run(&gpu, &args.shape_options());
    }
    let name = format!("{}, compute capability {}.{}", gpu.name(), gpu.sm() / 10, gpu.sm() % 10);
    let batches = args.batches();
    let batch_max = batches.iter().copied().max().unwrap_or(1);
    let (mut rig, engine) = Rig::new(Arc::clone(&gpu), &args.rig_options(batch_max))?;
    let copied = copied_gb_per_s(&gpu, args.quick)?;
    if tables {
        say!("{name}, {} of memory", report::bytes(gpu.memory()? as u64))?;
        engine.rejected().iter().try_for_each(|why| say!("passed over: {why}"))?;
        say!("the dense network runs on {}", engine.runs_on())?;
        say!("the memory copies at {copied:.0} GB/s (read and written)")?;
    }

    let (points, updated) = measure(&mut rig, &batches, batch_max.min(MISSES_BATCH))?;
    let bars = figures::bars(&points, copied);
    if tables {
        figures::print_table(&points)?;
        say!("{} rows were overwritten during these requests", report::count(updated))?;
        say!("{}", bars_table(&bars))?;
    }

    let (rows, engine) = (rig.rows(), engine.runs_on());
    let model = format!("26 tables of {rows} rows, f16, 1 key; {name}; {engine}");
    let machine = HostMachine::this();
    BenchReport { bench: "gpu", machine, model, bars, points }.write_to(args.json.as_ref())
}

/// Measures all batch sizes with all rows cached, then `misses_batch` with misses and with updates.
/// Also returns the number of updated rows.
fn measure(
    rig: &mut Rig,
    batches: &[usize],
    misses_batch: usize,
) -> Result<(Vec<GpuFigures>, u64)> {
    let mut points = Vec::new();
    for &batch in batches {
        points.extend(rig.lookups(batch)?);
        let hits = RequestShape { batch, hit_rate: 1.0 };
        points.push(rig.time_requests(GRAPH, hits, LaunchMode::Graph)?);
        points.push(rig.time_requests(KERNELS, hits, LaunchMode::Kernels)?);
    }

    for hit_rate in HIT_RATES {
        points.push(rig.with_misses(RequestShape { batch: misses_batch, hit_rate })?);
    }

    let (figures, updated) = rig.under_updates(misses_batch)?;
    points.push(figures);
    Ok((points, updated))
}

/// Returns the speed at which the device copies its memory: bytes read and bytes written, GB/s.
fn copied_gb_per_s(gpu: &Arc<Gpu>, quick: bool) -> Result<f64> {
    let (bytes, repeats) = if quick { (1 << 20, 2) } else { (1 << 29, 20) };
    let from = gpu.buffer::<u8>(bytes)?;
    let (mut to, stream) = (gpu.buffer::<u8>(bytes)?, gpu.stream()?);
    let mut best = f64::INFINITY;

    for _ in 0..4 {
        let start = Instant::now();
        (0..repeats).try_for_each(|_| stream.copy(&from, &mut to))?;
        stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(2.0 * bytes as f64 / best / 1e9)
}
