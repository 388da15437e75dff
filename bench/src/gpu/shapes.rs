//! `bench gpu shapes`: lookups of many shapes beside a plain gather of the same rows: codecs, rows
//! of 64 to 512 bytes, one and several keys a bag, uniform and power-law keys, and batch sizes.
//! Each time is the GPU's, between two events. Each shape is also measured with other tiles. Never
//! reads flash.

use super::keys::{KEY_BYTES, KeySet, Rotation, Skew, load_sets, rotating_sets};
use super::loops::{LoopSize, time_launches};
use super::model::{DeviceInput, features};
use super::shape_figures::{HEADS, ShapeFigures, TileTime, bars, cells};
use super::tables::FilledTables;
use crate::filled_cache::TABLES;
use crate::peer::percentile;
use crate::results::{BenchReport, HostMachine};
use anyhow::{Context, Result};
use hatchback::{Codec, RowFormat};
use hatchback_kernels::cuda::driver::{Gpu, Stream};
use hatchback_kernels::cuda::memory::Buffer;
use hatchback_kernels::gpu::InputType;
use hatchback_kernels::gpu::gather::PlainGather;
use hatchback_kernels::gpu::lookup::{GpuLookup, Keys, LookupLimits};
use hatchback_tools::report;
use hatchback_tools::report::Json;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes of the columns of a row; u8 and u4 have four more for their scale.
const ROW_BYTES: [usize; 4] = [64, 128, 256, 512];
/// Bytes of the rows of a table, unless the user says how many rows it has: all tables together
/// exceed the second-level cache many times.
const TABLE_BYTES: usize = 400_000 * 64;
/// Keys of a bag.
const HOTNESS: [usize; 2] = [1, 8];
/// Keys of a launch: more take too long to write on the host.
const KEYS_MAX: usize = 1 << 22;
/// Bytes of the results of a launch.
const OUT_BYTES_MAX: usize = 8 << 30;
/// Words of one upload of the rows that are gathered.
const UPLOAD_WORDS: usize = 1 << 20;

/// What to measure.
pub struct ShapeOptions {
    /// Rows of each table; `None` chooses as many as the rows' bytes allow.
    pub rows: Option<usize>,
    /// Batch sizes.
    pub batches: Vec<usize>,
    /// Codecs of the rows.
    pub codecs: Vec<Codec>,
    /// Few rounds, small tables, and two sizes of rows.
    pub quick: bool,
    /// Where the report goes as JSON.
    pub json: Json,
    /// The folder that receives the keys of each shape.
    pub keys: Option<PathBuf>,
}

/// Measures all shapes on `gpu`.
///
/// # Errors
/// The GPU fails, or the report cannot be written.
pub fn run(gpu: &Arc<Gpu>, options: &ShapeOptions) -> Result<()> {
    let mut points = Vec::new();
    let row_bytes = if options.quick { &ROW_BYTES[..2] } else { &ROW_BYTES[..] };
    for &codec in &options.codecs {
        for &bytes in row_bytes {
            let bits = match codec {
                Codec::F32 => 32,
                Codec::F16 => 16,
                Codec::U8 => 8,
                Codec::U4 => 4,
            };
            let format = RowFormat::new(codec, bytes * 8 / bits, 0).context("no such row")?;
            let rows = if options.quick { 60 } else { TABLE_BYTES / bytes };
            let rows = options.rows.unwrap_or(rows);
            points.extend(Bench::new(gpu, format, rows, options)?.run()?);
        }
    }

    let bars = bars(&points);
    let l2 = report::bytes(gpu.l2_bytes()? as u64);
    let model = format!("{TABLES} tables; {}, {l2} of second-level cache", gpu.name());
    let about = model.clone();
    let report =
        BenchReport { bench: "gpu shapes", machine: HostMachine::this(), model, bars, points };
    report.publish(&about, HEADS, cells, &options.json)
}

/// The shape of one point.
#[derive(Clone, Copy)]
struct Shape {
    hotness: usize,
    batch: usize,
    skew: Skew,
}

/// The tables of one kind of row on the GPU.
struct Bench<'a> {
    gpu: &'a Arc<Gpu>,
    options: &'a ShapeOptions,
    format: RowFormat,
    tables: FilledTables,
    gathered: GatheredRows,
}

/// The rows that are gathered: as many as the tables have, of random bytes.
struct GatheredRows {
    stream: Stream,
    gather: PlainGather,
    rows: Buffer<u32>,
}

impl<'a> Bench<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        format: RowFormat,
        rows: usize,
        options: &'a ShapeOptions,
    ) -> Result<Self> {
        let tables = FilledTables::new(gpu, format, rows)?;
        let gathered = GatheredRows::new(gpu, TABLES * rows * row_words(format))?;
        Ok(Self { gpu, options, format, tables, gathered })
    }

    fn run(mut self) -> Result<Vec<ShapeFigures>> {
        let mut points = Vec::new();
        for hotness in HOTNESS {
            for &batch in &self.options.batches {
                let out_bytes = 4 * batch * TABLES * self.format.dim();
                if batch * TABLES * hotness > KEYS_MAX || out_bytes > OUT_BYTES_MAX {
                    continue;
                }
                for skew in [Skew::Uniform, Skew::Zipf] {
                    points.push(self.measure(Shape { hotness, batch, skew })?);
                }
            }
        }
        Ok(points)
    }

    fn measure(&mut self, shape: Shape) -> Result<ShapeFigures> {
        let Shape { hotness, batch, skew } = shape;
        let (format, dim) = (self.format, self.format.dim());
        let (lookups, row_bytes) = (batch * TABLES * hotness, format.row_bytes());
        let size = LoopSize::of_launches(lookups, self.options.quick);
        let launch_bytes = lookups * (KEY_BYTES + row_bytes);
        // Headers do not count here, because rows share them.
        let row_bytes_touched = lookups * (8 + row_bytes);
        let count = rotating_sets(self.gpu, row_bytes_touched, size.launches())?;
        let draw = &mut self.tables.draw;
        let sets: Vec<_> = (0..count).map(|_| draw.draw(batch * hotness, skew)).collect();
        let keys_file = self.write_keys(shape, &sets)?;

        let LookupTimes { p50, p99, tile, other_tiles } = self.time_lookups(shape, size, &sets)?;
        let bytes = launch_bytes + 4 * batch * TABLES * dim;
        let gb_per_s = bytes as f64 / p50 / 1e3;
        let places = |set| places(set, self.tables.rows);
        let places: Vec<Vec<u32>> = sets.iter().map(places).collect();
        let gather_gb_per_s = self.gathered.gb_per_s(&places, row_words(format), size)?;
        Ok(ShapeFigures {
            codec: format.codec().name().to_owned(),
            dim,
            row_bytes,
            hotness,
            keys: skew.name().to_owned(),
            rows: self.tables.rows,
            keys_file,
            batch,
            rotation: Rotation::new(&sets, self.tables.rows, row_bytes),
            gpu_us_p50: p50,
            gpu_us_p99: p99,
            tile,
            other_tiles,
            gb_per_s,
            gather_gb_per_s,
            share: gb_per_s / gather_gb_per_s,
        })
    }

    /// Times the lookups of `sets` with the product's tile, with half of it and with twice of it.
    fn time_lookups(&self, shape: Shape, size: LoopSize, sets: &[KeySet]) -> Result<LookupTimes> {
        let Shape { hotness, batch, .. } = shape;
        let (format, dim) = (self.format, self.format.dim());
        let out = self.gpu.buffer::<f32>(batch * TABLES * dim)?;
        let default_row = vec![0.0; dim];
        let input = DeviceInput { address: out.address(), input_type: InputType::F32 };
        let features = features(format, hotness, &default_row, input);
        let row_bytes_max = format.row_bytes();
        let limits = LookupLimits {
            batch_max: batch,
            misses_max: 1,
            row_bytes_max,
            keys: Keys::Copied,
            is_shared: false,
        };
        let mut lookup = GpuLookup::new(&self.tables.on_gpu, &features, limits)?;
        let offsets: Vec<u32> = (0..=batch).map(|i| (i * hotness) as u32).collect();
        load_sets(&mut lookup, sets, &offsets)?;

        let tile = lookup.tile(batch);
        let mut time = |tile| {
            let times = time_launches(&mut lookup, GpuLookup::stream, size, |lookup| {
                lookup.next_request();
                Ok(lookup.launch_in_tiles(batch, tile)?)
            });
            Ok::<_, anyhow::Error>(times?.gpu_us)
        };
        let mut product = time(tile)?;
        let mut other_tiles = Vec::new();
        // A lane can have one sample of a tile.
        for other in [tile / 2, 2 * tile].into_iter().filter(|tile| (1..=32).contains(tile)) {
            let gpu_us_p50 = percentile(&mut time(other)?, 0.5);
            other_tiles.push(TileTime { tile: other, gpu_us_p50 });
        }
        let (p50, p99) = (percentile(&mut product, 0.5), percentile(&mut product, 0.99));
        Ok(LookupTimes { p50, p99, tile, other_tiles })
    }

    /// Writes the keys of all sets, set after set and table after table, as little-endian u64 to a
    /// file of the folder of keys, if there is one. Returns the name of the file. The peers have no
    /// quantised rows.
    fn write_keys(&self, shape: Shape, sets: &[KeySet]) -> Result<Option<String>> {
        let codec = self.format.codec();
        let Some(folder) = self.options.keys.as_ref().filter(|_| !codec.is_quantized()) else {
            return Ok(None);
        };
        let Shape { hotness, batch, skew } = shape;
        let (codec, dim, skew) = (codec.name(), self.format.dim(), skew.name());
        let file = format!("{codec}.{dim}.{hotness}.{batch}.{skew}.keys");
        let keys = sets.iter().flatten().flatten();
        let bytes: Vec<u8> = keys.flat_map(|key| key.to_le_bytes()).collect();
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(folder.join(&file), bytes));
        written.with_context(|| format!("{}: cannot write {file}", folder.display()))?;
        Ok(Some(file))
    }
}

/// The times of the lookups of one shape, µs.
struct LookupTimes {
    p50: f64,
    p99: f64,
    tile: usize,
    other_tiles: Vec<TileTime>,
}

/// Returns the words of a row.
fn row_words(format: RowFormat) -> usize {
    format.row_bytes().div_ceil(4)
}

/// Returns the numbers of the gathered rows for which the keys of `set` stand.
fn places(set: &KeySet, rows: usize) -> Vec<u32> {
    let in_table = |(table, keys): (usize, &Vec<u64>)| {
        keys.iter().map(|&key| (table * rows + key as usize) as u32).collect::<Vec<_>>()
    };
    set.iter().enumerate().flat_map(in_table).collect()
}

impl GatheredRows {
    fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self> {
        let (rows, stream) = (gpu.buffer(words)?, gpu.stream()?);
        let random = |n: usize| hatchback::mix(n as u64) as u32;
        let piece: Vec<u32> = (0..UPLOAD_WORDS.min(words)).map(random).collect();
        for first in (0..words).step_by(UPLOAD_WORDS) {
            stream.upload(&piece[..piece.len().min(words - first)], &rows, first)?;
        }
        Ok(Self { gather: PlainGather::load(gpu)?, rows, stream })
    }

    /// Returns the speed of gathers of the rows at `places`, set after set.
    fn gb_per_s(&self, places: &[Vec<u32>], row_words: usize, size: LoopSize) -> Result<f64> {
        let gpu = self.stream.gpu();
        let upload = |places: &Vec<u32>| {
            let slots = gpu.buffer::<u32>(places.len())?;
            self.stream.upload(places, &slots, 0)?;
            Ok::<_, anyhow::Error>(slots)
        };
        let slots = places.iter().map(upload).collect::<Result<Vec<_>>>()?;
        let out = gpu.buffer::<u32>(slots[0].len() * row_words)?;
        let lookups = slots[0].len();
        let stream = gpu.stream()?;
        let mut gathers = Gathers { stream, source: self, slots, row_words, out, next: 0 };
        let mut times = time_launches(&mut gathers, Gathers::stream, size, Gathers::launch)?;
        let us = percentile(&mut times.gpu_us, 0.5);
        Ok((lookups * (4 + 8 * row_words)) as f64 / us / 1e3)
    }
}

/// Gathers of several sets, launched in turn.
struct Gathers<'a> {
    stream: Stream,
    source: &'a GatheredRows,
    /// The numbers of the rows, one buffer for each set.
    slots: Vec<Buffer<u32>>,
    row_words: usize,
    out: Buffer<u32>,
    next: usize,
}

impl Gathers<'_> {
    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn launch(&mut self) -> Result<()> {
        let GatheredRows { gather, rows, .. } = self.source;
        let slots = &self.slots[self.next % self.slots.len()];
        self.next += 1;
        Ok(gather.launch(&self.stream, rows, slots, self.row_words, &self.out)?)
    }
}
