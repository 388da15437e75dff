//! `bench gpu PART`: measures one part of the work on a GPU. `facts` prints what the driver says.
//! `requests` times whole requests and their lookups, `shapes` lookups of many shapes, `workers`
//! several workers at once, and `swap` a served model whose generation is exchanged.

mod figures;
mod generations;
mod keys;
mod lookups;
mod loops;
mod model;
mod opening;
mod requests;
mod shape_figures;
mod shapes;
mod swap;
mod tables;
mod updater;
mod workers;

use super::results::{BenchReport, HostMachine};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use hatchback::Codec;
use hatchback_kernels::cuda::driver::{Gpu, Profile};
use hatchback_kernels::gpu::device_info::facts;
use hatchback_kernels::gpu::{GpuDense, Precision, TensorRtOptions};
use hatchback_tools::report::Json;
use hatchback_tools::say;
use model::ModelOptions;
use serde::Serialize;
use shapes::ShapeOptions;
use std::path::PathBuf;
use std::time::Instant;
use swap::SwapOptions;

/// All codecs of rows.
const CODECS: [Codec; 4] = [Codec::F32, Codec::F16, Codec::U8, Codec::U4];

/// Memory that TensorRT may use while it builds a plan.
const WORKSPACE_BYTES: u64 = 256 << 20;

/// What to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GpuPart {
    /// What the driver says of the GPU; measures nothing
    Facts,
    /// Lookups and whole requests: rows cached, rows missing, rows updated
    #[default]
    Requests,
    /// Lookups of many shapes beside a plain gather of the same rows
    Shapes,
    /// Four workers at once, with and without updates beside them
    Workers,
    /// A served model: the time to open it, and swaps while requests run
    Swap,
}

/// Measures lookups and whole requests on a GPU
#[derive(Args, Debug)]
pub struct GpuArgs {
    /// What to measure
    #[arg(value_enum, default_value_t)]
    part: GpuPart,
    /// Small sizes, for a first look or the stand-in
    #[arg(long)]
    quick: bool,
    /// Rows of each of the 26 tables [default: 400,000; shapes: as many as have 25.6 MB; swap:
    /// 40,000; quick: 300 or fewer]
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
    /// Only this codec's shapes: f32, f16, u8 or u4
    #[arg(long, value_parser = parse_codec)]
    codec: Option<Codec>,
    /// Writes the keys of each of the `shapes` to FOLDER, for bench/peers/gpu.py
    #[arg(long, value_name = "FOLDER")]
    keys: Option<PathBuf>,
    /// Loads the kernels from FOLDER instead of the built-in ones, to try others
    #[arg(long, value_name = "FOLDER")]
    kernels: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

impl GpuArgs {
    /// Returns the batch sizes of the user, or else those of the part.
    fn batches(&self, quick: &[usize], full: &[usize]) -> Vec<usize> {
        match (self.batch.is_empty(), self.quick) {
            (false, _) => self.batch.clone(),
            (true, true) => quick.to_vec(),
            (true, false) => full.to_vec(),
        }
    }

    /// Returns the rows of a table.
    fn rows(&self, quick: usize, full: usize) -> usize {
        self.rows.unwrap_or(if self.quick { quick } else { full })
    }

    fn dense(&self) -> GpuDense {
        let tensorrt = self.tensorrt.clone().map(|shim| TensorRtOptions {
            shim,
            libraries: None,
            plans: self.plans.clone(),
            workspace_bytes_max: WORKSPACE_BYTES,
        });
        GpuDense { tensorrt, precision: self.precision }
    }

    fn model_options(&self, batches: &[usize]) -> ModelOptions {
        ModelOptions {
            rows: self.rows(300, 400_000),
            batch_max: batches.iter().copied().max().unwrap_or(1),
            quick: self.quick,
            dense: self.dense(),
        }
    }

    fn shape_options(&self) -> ShapeOptions {
        ShapeOptions {
            rows: self.rows,
            batches: self.batches(&[4], &[1, 64, 1024, 8192, 65536]),
            codecs: self.codec.map_or(CODECS.to_vec(), |codec| vec![codec]),
            quick: self.quick,
            json: self.json.clone(),
            keys: self.keys.clone(),
        }
    }

    fn swap_options(&self) -> SwapOptions {
        SwapOptions {
            rows: self.rows(300, 40_000),
            batch: self.batches(&[4], &[64]).into_iter().max().unwrap_or(1),
            quick: self.quick,
            dense: self.dense(),
            json: self.json.clone(),
        }
    }
}

fn parse_codec(name: &str) -> Result<Codec, String> {
    let codec = CODECS.into_iter().find(|codec| codec.name() == name);
    codec.ok_or_else(|| format!("`{name}` is not f32, f16, u8 or u4"))
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
    let (json, part) = (&args.json, args.part);
    let has_shape_options = args.keys.is_some() || args.codec.is_some();
    ensure!(
        part == GpuPart::Shapes || !has_shape_options,
        "--keys and --codec are options of `bench gpu shapes`"
    );
    if part == GpuPart::Facts {
        return print_facts(json);
    }

    let start = Instant::now();
    let gpu = match &args.kernels {
        None => Gpu::open(Profile::default())?,
        Some(folder) => Gpu::with_kernels(Profile::default(), folder)?,
    };
    let gpu_opened = start.elapsed();
    match part {
        GpuPart::Shapes => shapes::run(&gpu, &args.shape_options()),
        GpuPart::Workers => {
            let batches = args.batches(&[1, 8], &[1, 64]);
            workers::run(&gpu, &args.model_options(&batches), &batches, json)
        }
        GpuPart::Swap => swap::run(&gpu, gpu_opened, &args.swap_options()),
        GpuPart::Facts | GpuPart::Requests => {
            let full: Vec<usize> = (0..=16).step_by(2).map(|n| 1 << n).collect();
            let batches = args.batches(&[1, 8, 64], &full);
            requests::run(&gpu, &args.model_options(&batches), &batches, json)
        }
    }
}

/// One fact about the GPU.
#[derive(Serialize)]
struct Fact {
    name: String,
    value: String,
}

fn print_facts(json: &Json) -> Result<()> {
    let fact = |(name, value)| Fact { name, value };
    let points: Vec<Fact> = facts()?.into_iter().map(fact).collect();
    let (machine, bars) = (HostMachine::this(), Vec::new());
    let model = points.first().map_or(String::new(), |gpu| gpu.value.clone());
    let report = BenchReport { bench: "gpu facts", machine, model, bars, points };
    let print = |Fact { name, value }: &Fact| say!("{name:42} {value}");
    json.write(&report, || report.points.iter().try_for_each(print))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<GpuArgs, clap::Error> {
        crate::tests::parse(&format!("gpu {}", words.join(" ")))
    }

    #[test]
    fn the_part_is_a_value_and_requests_are_the_default() {
        let part = |words: &[&str]| parse(words).ok().map(|args| args.part);
        assert_eq!(part(&["--quick"]), Some(GpuPart::Requests));
        assert_eq!(part(&["swap", "--quick"]), Some(GpuPart::Swap));
        assert_eq!(part(&["--batch", "1,64", "workers"]), Some(GpuPart::Workers));
        assert!(parse(&["--shapes"]).is_err() && parse(&["everything"]).is_err());
    }

    #[test]
    fn only_shapes_have_codecs_and_keys() {
        let args = parse(&["shapes", "--codec", "u4"]).unwrap();
        assert_eq!(args.shape_options().codecs, [Codec::U4]);
        assert_eq!(parse(&["shapes"]).unwrap().shape_options().codecs, CODECS);
        assert!(parse(&["shapes", "--codec", "f64"]).is_err());
        let refused = run(&parse(&["workers", "--keys", "folder"]).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("bench gpu shapes"), "{refused}");
    }
}
