//! `bench gpu --shapes`: lookups of many shapes beside a plain gather of the same rows: codecs,
//! rows of 64 to 512 bytes, one and several keys a bag, uniform and power-law keys, and batch
//! sizes. Each time is the GPU's, between two events. Never reads flash.

use super::rig::fill_tables;
use crate::bench::bars::{Bar, bars_table};
use crate::bench::filled_cache::TABLES;
use crate::bench::peer::percentile;
use crate::bench::results::{BenchReport, HostMachine, prints_tables};
use crate::{report, say};
use anyhow::{Context, Result};
use hatchback::{Codec, Pooling, RowFormat};
use hatchback_kernels::cuda::driver::{Gpu, Stream};
use hatchback_kernels::cuda::memory::Buffer;
use hatchback_kernels::gpu::InputType;
use hatchback_kernels::gpu::gather::PlainGather;
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, GpuLookup, Keys, LookupLimits};
use hatchback_kernels::gpu::tables::DeviceTables;
use hatchback_kernels::lookup::Bags;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes of the columns of a row; u8 and u4 have four more for their scale.
const ROW_BYTES: [usize; 4] = [64, 128, 256, 512];
/// Keys of a bag.
const HOTNESS: [usize; 2] = [1, 8];
/// Keys of a launch: more take too long to write on the host.
const KEYS_MAX: usize = 1 << 22;
/// Bytes of the results of a launch.
const OUT_BYTES_MAX: usize = 8 << 30;
/// Exponent of the power law, as of the Criteo data's keys.
const ZIPF: f64 = 1.05;
/// The bar: share of the gather's speed, for rows of this many bytes and up, and such batches.
const BAR: f64 = 0.75;
const BAR_ROW_BYTES: usize = 128;
const BAR_BATCH: usize = 8192;
/// Bytes that a lookup reads for a key beside its row: the key, and its set's header.
const KEY_BYTES: usize = 8 + 64;

/// What to measure.
pub struct ShapeOptions {
    /// Rows of each table.
    pub rows: usize,
    /// Batch sizes.
    pub batches: Vec<usize>,
    /// Few rounds, and one table shape of each codec.
    pub quick: bool,
    /// Where the report goes as JSON.
    pub json: Option<PathBuf>,
    /// The folder that receives the keys of each shape.
    pub keys: Option<PathBuf>,
}

/// One shape.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeFigures {
    /// How rows are encoded.
    pub codec: String,
    /// Columns of a row.
    pub dim: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Keys of a bag.
    pub hotness: usize,
    /// `uniform` or `zipf`.
    pub keys: String,
    /// Rows of each table.
    pub rows: usize,
    /// The file of the keys, if they were written: those of f32 and f16 rows.
    pub keys_file: Option<String>,
    /// Samples.
    pub batch: usize,
    /// Median time of a lookup on the GPU, µs.
    pub gpu_us_p50: f64,
    /// 99th percentile of it.
    pub gpu_us_p99: f64,
    /// Bytes of keys, headers, rows and results a second.
    pub gb_per_s: f64,
    /// The same of a plain gather of the same rows: rows read and rows written.
    pub gather_gb_per_s: f64,
    /// The former as a part of the latter.
    pub share: f64,
}

/// Measures all shapes on `gpu`.
///
/// # Errors
/// The GPU fails, or the report cannot be written.
pub fn run(gpu: &Arc<Gpu>, options: &ShapeOptions) -> Result<()> {
    let mut points = Vec::new();
    let row_bytes = if options.quick { &ROW_BYTES[..2] } else { &ROW_BYTES[..] };
    for codec in [Codec::F32, Codec::F16, Codec::U8, Codec::U4] {
        for &bytes in row_bytes {
            let bits = match codec {
                Codec::F32 => 32,
                Codec::F16 => 16,
                Codec::U8 => 8,
                Codec::U4 => 4,
            };
            let format = RowFormat::new(codec, bytes * 8 / bits, 0).context("no such row")?;
            points.extend(Bench::new(gpu, format, options)?.run()?);
        }
    }

    let bars = bars(&points);
    if prints_tables(options.json.as_ref()) {
        print_table(&points)?;
        say!("{}", bars_table(&bars))?;
    }
    let model = format!("{TABLES} tables of {} rows; {}", options.rows, gpu.name());
    let machine = HostMachine::this();
    BenchReport { bench: "gpu shapes", machine, model, bars, points }
        .write_to(options.json.as_ref())
}

/// Returns the demanded figures.
fn bars(points: &[ShapeFigures]) -> Vec<Bar> {
    let counts = |p: &&ShapeFigures| p.row_bytes >= BAR_ROW_BYTES && p.batch >= BAR_BATCH;
    let shares = points.iter().filter(counts).map(|p| p.share);
    let what = format!(
        "lookups of rows of {BAR_ROW_BYTES} bytes and up, batch {BAR_BATCH} and up: least share \
         of a plain gather's speed"
    );
    vec![Bar::at_least_if(what, shares.reduce(f64::min), BAR)]
}

fn print_table(points: &[ShapeFigures]) -> Result<()> {
    let heads =
        ["rows", "bytes", "keys a bag", "keys", "batch", "p50", "p99", "GB/s", "gather", "share"];
    let mut table = report::table(&heads);
    for p in points {
        table.add_row([
            format!("{} x {}", p.dim, p.codec),
            p.row_bytes.to_string(),
            p.hotness.to_string(),
            p.keys.clone(),
            report::count(p.batch as u64),
            format!("{:.1} µs", p.gpu_us_p50),
            format!("{:.1} µs", p.gpu_us_p99),
            format!("{:.0}", p.gb_per_s),
            format!("{:.0}", p.gather_gb_per_s),
            format!("{:.2}", p.share),
        ]);
    }
    say!("{table}")
}

/// The tables of one kind of row on the GPU.
struct Bench<'a> {
    gpu: &'a Arc<Gpu>,
    options: &'a ShapeOptions,
    format: RowFormat,
    tables: Arc<DeviceTables>,
    cached_keys: Vec<Vec<u64>>,
    gather: PlainGather,
    /// As many bytes of rows as the tables have.
    rows: Buffer<u32>,
    stream: Stream,
    rng: StdRng,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Arc<Gpu>, format: RowFormat, options: &'a ShapeOptions) -> Result<Self> {
        let (tables, cached_keys) = fill_tables(gpu, format, options.rows)?;
        let words = TABLES * options.rows * format.row_bytes().div_ceil(4);
        Ok(Self {
            gpu,
            options,
            format,
            tables,
            cached_keys,
            gather: PlainGather::load(gpu)?,
            rows: gpu.buffer(words)?,
            stream: gpu.stream()?,
            rng: StdRng::seed_from_u64(11),
        })
    }

    fn run(mut self) -> Result<Vec<ShapeFigures>> {
        let mut points = Vec::new();
        for hotness in HOTNESS {
            for &batch in &self.options.batches {
                let out_bytes = 4 * batch * TABLES * self.format.dim();
                if batch * TABLES * hotness > KEYS_MAX || out_bytes > OUT_BYTES_MAX {
                    continue;
                }
                for zipf in [false, true] {
                    points.push(self.measure(hotness, batch, zipf)?);
                }
            }
        }
        Ok(points)
    }

    fn measure(&mut self, hotness: usize, batch: usize, zipf: bool) -> Result<ShapeFigures> {
        let (format, dim) = (self.format, self.format.dim());
        let out = self.gpu.buffer::<f32>(batch * TABLES * dim)?;
        let default_row = vec![0.0; dim];
        let feature = |table: usize| FeatureOnDevice {
            table: table as u16,
            format,
            keys_end: None,
            default_row: &default_row,
            pooling: Pooling::Sum,
            weighted: false,
            hotness_max: hotness,
            input: out.address(),
            input_type: InputType::F32,
            stride: TABLES * dim,
            column: table * dim,
            width: dim,
        };
        let features: Vec<_> = (0..TABLES).map(feature).collect();
        let row_bytes_max = format.row_bytes();
        let limits =
            LookupLimits { batch_max: batch, misses_max: 1, row_bytes_max, keys: Keys::Copied };
        let mut lookup = GpuLookup::new(&self.tables, &features, limits)?;

        let offsets: Vec<u32> = (0..=batch).map(|i| (i * hotness) as u32).collect();
        let keys = self.keys(batch * hotness, zipf);
        let kind = if zipf { "zipf" } else { "uniform" };
        let codec = format.codec().name();
        let file = format!("{codec}.{dim}.{hotness}.{batch}.{kind}.keys");
        // The peers have no quantised rows.
        let is_written = self.options.keys.is_some() && !format.codec().is_quantized();
        let keys_file = is_written.then_some(file);
        self.write_keys(&keys, keys_file.as_deref())?;
        lookup.write_request(batch, batch, |f| Bags::new(&keys[f], &offsets));
        lookup.copy_keys(batch)?;
        lookup.stream().wait()?;
        let mut times = self.time(lookup.stream(), || Ok(lookup.launch(batch)?))?;
        let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));

        let lookups = batch * TABLES * hotness;
        let bytes = lookups * (KEY_BYTES + row_bytes_max) + 4 * batch * TABLES * dim;
        let gb_per_s = bytes as f64 / p50 / 1e3;
        let gather_gb_per_s = self.gathered_gb_per_s(lookups, &keys)?;
        Ok(ShapeFigures {
            codec: codec.to_owned(),
            dim,
            row_bytes: row_bytes_max,
            hotness,
            keys: kind.to_owned(),
            rows: self.options.rows,
            keys_file,
            batch,
            gpu_us_p50: p50,
            gpu_us_p99: p99,
            gb_per_s,
            gather_gb_per_s,
            share: gb_per_s / gather_gb_per_s,
        })
    }

    /// Returns `count` cached keys of each table.
    fn keys(&mut self, count: usize, zipf: bool) -> Vec<Vec<u64>> {
        let Self { cached_keys, rng, .. } = self;
        let of_table = |cached: &Vec<u64>| {
            let ranks = Zipf::new(cached.len() as f64, ZIPF).ok();
            let mut key = || match (zipf, &ranks) {
                (true, Some(ranks)) => cached[ranks.sample(&mut *rng) as usize - 1],
                _ => cached[rng.random_range(0..cached.len())],
            };
            (0..count).map(|_| key()).collect()
        };
        cached_keys.iter().map(of_table).collect()
    }

    /// Writes `keys`, table after table, as little-endian u64 to a file of the folder of keys.
    fn write_keys(&self, keys: &[Vec<u64>], file: Option<&str>) -> Result<()> {
        let (Some(folder), Some(file)) = (&self.options.keys, file) else { return Ok(()) };
        let bytes: Vec<u8> = keys.iter().flatten().flat_map(|key| key.to_le_bytes()).collect();
        let written =
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join(file), bytes));
        written.with_context(|| format!("{}: cannot write {file}", folder.display()))
    }

    /// Returns the speed of a gather of as many rows, at the places that the keys stand for.
    fn gathered_gb_per_s(&self, lookups: usize, keys: &[Vec<u64>]) -> Result<f64> {
        let row_words = self.format.row_bytes().div_ceil(4);
        let rows = self.options.rows;
        let of_table = |(table, keys): (usize, &Vec<u64>)| {
            keys.iter().map(|&key| (table * rows + key as usize % rows) as u32).collect::<Vec<_>>()
        };
        let places: Vec<u32> = keys.iter().enumerate().flat_map(of_table).collect();
        let slots = self.gpu.buffer::<u32>(places.len())?;
        self.stream.upload(&places, &slots, 0)?;
        let out = self.gpu.buffer::<u32>(lookups * row_words)?;
        let gather =
            || Ok(self.gather.launch(&self.stream, &self.rows, &slots, row_words, &out)?);
        let us = percentile(&mut self.time(&self.stream, gather)?, 0.5);
        Ok((lookups * (4 + 8 * row_words)) as f64 / us / 1e3)
    }

    /// Returns the µs of `launch` on the GPU, several times.
    fn time(&self, stream: &Stream, launch: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
        let (rounds, repeats) = if self.options.quick { (2, 1) } else { (30, 5) };
        let (start, end) = (self.gpu.timed_event()?, self.gpu.timed_event()?);
        launch()?;
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            stream.record(&start)?;
            (0..repeats).try_for_each(|_| launch())?;
            stream.record(&end)?;
            end.wait()?;
            times.push((end.us_since(&start)? / f64::from(repeats)).max(1e-3));
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_takes_the_worst_of_the_large_batches_of_wide_rows() {
        let point = |row_bytes, batch, share| ShapeFigures {
            codec: "f16".to_owned(),
            dim: row_bytes / 2,
            row_bytes,
            hotness: 1,
            keys: "zipf".to_owned(),
            rows: 1,
            keys_file: None,
            batch,
            gpu_us_p50: 1.0,
            gpu_us_p99: 1.0,
            gb_per_s: 1.0,
            gather_gb_per_s: 1.0,
            share,
        };
        let points = [
            point(64, 8192, 0.1),
            point(128, 64, 0.2),
            point(128, 8192, 0.8),
            point(512, 65536, 0.76),
        ];
        let said = bars(&points)[0].to_string();
        assert!(said.contains("0.760") && said.ends_with("holds"), "{said}");
        assert!(bars(&points[..2])[0].to_string().contains("not run"));
    }
}
