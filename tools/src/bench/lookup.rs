//! `bench lookup`: pooled embedding lookups on one core, all rows in the cache, beside the machine's limit for
//! reading random rows (`hatchback_kernels::gather`, rows at known places in plain memory). Never reads flash
//! and never runs a dense network.

use crate::report;
use anyhow::{Result, ensure};
use clap::Args;
use hatchback::{Codec, Pooling, RowFormat, RowKey, Status, mix};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::gather;
use hatchback_kernels::isa::Isa;
use hatchback_kernels::misses::Misses;
use hatchback_kernels::names::Names;
use hatchback_kernels::query::{Bags, Feature, Input, Rows};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::path::PathBuf;

/// Tables of the model, each looked up once a sample: Criteo's.
const TABLES: usize = 26;
/// Exponent of the skewed keys.
const ALPHA: f64 = 1.05;

/// Measures pooled lookups on one core beside the machine's limit
#[derive(Args, Debug)]
pub struct LookupArgs {
    /// Columns of a row
    #[arg(long, default_value_t = 64)]
    dim: usize,
    /// Rows of each of the 26 tables [default: 200000; quick: 20000]
    #[arg(long)]
    rows: Option<usize>,
    /// Fewer rows and rounds
    #[arg(long)]
    quick: bool,
    /// Writes all figures as JSON (`-`: standard output, without the tables)
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The figures of one engine at one point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// What did the lookups.
    pub engine: String,
    /// How the keys were drawn.
    pub keys: &'static str,
    /// Keys in a bag.
    pub hotness: usize,
    /// Samples of a call.
    pub batch: usize,
    /// CPU time of a call, the median of the best round.
    pub micros: f64,
    /// Rows a second, millions.
    pub mrows_per_s: f64,
}

/// How keys are drawn.
#[derive(Clone, Copy)]
struct Shape {
    keys: &'static str,
    hotness: usize,
    batch: usize,
}

/// Fresh keys for some calls: positions among a table's rows, `[calls][table][batch * hotness]`.
struct Calls {
    shape: Shape,
    positions: Vec<Vec<Vec<u64>>>,
    offsets: Vec<u32>,
}

impl Calls {
    fn draw(shape: Shape, rows: usize, calls: usize, rng: &mut StdRng) -> Result<Self> {
        let zipf = Zipf::new(rows as f64, ALPHA)?;
        let mut one = |table: usize| match shape.keys {
            "uniform" => rng.random_range(0..rows as u64),
            // Popular rows are not neighbours, and not the same in each table.
            _ => mix(zipf.sample(rng) as u64 * TABLES as u64 + table as u64) % rows as u64,
        };
        let keys = shape.batch * shape.hotness;
        let mut call = || (0..TABLES).map(|t| (0..keys).map(|_| one(t)).collect()).collect();
        let positions = (0..calls).map(|_| call()).collect();
        let offsets = (0..=shape.batch).map(|s| (s * shape.hotness) as u32).collect();
        Ok(Self { shape, positions, offsets })
    }
}

/// Microseconds of CPU time that this thread has taken.
fn cpu_micros() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The limit: rows of plain memory.
struct Limit {
    tables: Vec<gather::Rows>,
    dim: usize,
    out: Vec<f32>,
}

impl Limit {
    fn run(&mut self, calls: &Calls) -> Vec<f64> {
        let (isa, stride) = (Isa::detect(), TABLES * self.dim);
        let mut time = |tables: &Vec<Vec<u64>>| {
            let start = cpu_micros();
            for (t, (table, positions)) in self.tables.iter().zip(tables).enumerate() {
                table.pool(isa, positions, calls.shape.hotness, &mut self.out, stride, t * self.dim);
            }
            cpu_micros() - start
        };
        calls.positions.iter().map(&mut time).collect()
    }
}

/// All rows of all tables in one cache.
struct Cached {
    format: RowFormat,
    cache: Cache,
    default_row: Vec<f32>,
    misses: Misses,
    statuses: Vec<Status>,
    out: Vec<f32>,
    /// Keys that are cached, by table: sets overflow here and there, and what is not cached is not asked for.
    keys: Vec<Vec<u64>>,
}

impl Cached {
    fn new(codec: Codec, dim: usize, rows: usize, batch_max: usize) -> Result<Self> {
        let format = RowFormat::new(codec, dim, 0).ok_or_else(|| anyhow::anyhow!("no such row"))?;
        let names = Names::new(vec![Some(rows as u64); TABLES]);
        let bytes = (rows * TABLES) as f64 * 1.6 * (format.row_bytes() + 6) as f64;
        let cache = Cache::new(format.row_bytes(), bytes as usize, &names);
        let cache = cache.ok_or_else(|| anyhow::anyhow!("{rows} rows are too few"))?;
        let mut encoded = vec![0; format.row_bytes()];
        let values: Vec<f32> = (0..dim).map(|i| (i % 7) as f32).collect();
        format.encode(&values, &mut encoded)?;
        let row = |table: usize, key| RowKey { table: table as u16, key };
        let all = || (0..TABLES).flat_map(|table| (0..rows as u64).map(move |key| row(table, key)));
        all().for_each(|row| {
            cache.insert(row, &encoded, cache.epoch(row));
        });
        let cached = |table| {
            let mut out = encoded.clone();
            (0..rows as u64).filter(|&key| cache.query(row(table, key), &mut out)).collect()
        };
        let keys = (0..TABLES).map(cached).collect();
        Ok(Self {
            format,
            cache,
            default_row: vec![0.0; dim],
            misses: Misses::new(16, format.row_bytes()),
            statuses: vec![Status::default(); batch_max],
            out: vec![0.0; batch_max * TABLES * dim],
            keys,
        })
    }

    fn run(&mut self, calls: &Calls) -> Result<Vec<f64>> {
        let dim = self.format.dim();
        let mut times = Vec::with_capacity(calls.positions.len());
        let mut keys: Vec<Vec<u64>> = vec![Vec::new(); TABLES];
        for tables in &calls.positions {
            for ((keys, known), positions) in keys.iter_mut().zip(&self.keys).zip(tables) {
                keys.clear();
                keys.extend(positions.iter().map(|&p| known[p as usize % known.len()]));
            }
            let statuses = &mut self.statuses[..calls.shape.batch];
            statuses.fill(Status::default());
            let start = cpu_micros();
            let isa = Isa::detect();
            for (t, keys) in keys.iter().enumerate() {
                let feature = Feature {
                    id: t as u16,
                    table: t as u16,
                    format: self.format,
                    keys_end: None,
                    default_row: &self.default_row,
                    pooling: Pooling::Sum,
                    rows: Rows::Cached(&self.cache),
                    column: t * dim,
                    width: dim,
                };
                let bags = Bags { keys, offsets: &calls.offsets };
                let mut input = Input { data: &mut self.out, stride: TABLES * dim };
                feature.query(isa, bags, 0, &mut input, &mut self.misses, statuses);
            }
            times.push(cpu_micros() - start);
            let fresh: u32 = statuses.iter().map(|s| s.fresh).sum();
            let asked = calls.shape.batch * calls.shape.hotness * TABLES;
            ensure!(fresh as usize == asked, "{fresh} of {asked} rows were cached");
        }
        Ok(times)
    }
}

/// Runs the command.
///
/// # Errors
/// The rows do not fit.
pub fn run(args: &LookupArgs) -> Result<()> {
    let rows = args.rows.unwrap_or(if args.quick { 20_000 } else { 200_000 });
    let rounds = if args.quick { 2 } else { 5 };
    let batches = [1, 32, 256, 2048];
    let batch_max = batches[batches.len() - 1];
    let mut limit = Limit {
        tables: (0..TABLES).map(|_| gather::Rows::new(rows, args.dim)).collect(),
        dim: args.dim,
        out: vec![0.0; batch_max * TABLES * args.dim],
    };
    let mut ours = Vec::new();
    for codec in [Codec::F32, Codec::F16, Codec::U8] {
        ours.push((codec, Cached::new(codec, args.dim, rows, batch_max)?));
    }
    let mut rng = StdRng::seed_from_u64(1);
    let mut points = Vec::new();
    for keys in ["uniform", "zipf"] {
        for hotness in [1, 10] {
            for batch in batches {
                let shape = Shape { keys, hotness, batch };
                let calls = (40_000 / (batch * hotness)).clamp(3, 2000);
                let mut best = vec![f64::INFINITY; 1 + ours.len()];
                for _ in 0..rounds {
                    let calls = Calls::draw(shape, rows, calls, &mut rng)?;
                    best[0] = best[0].min(median(limit.run(&calls)));
                    for (best, (_, ours)) in best[1..].iter_mut().zip(&mut ours) {
                        *best = best.min(median(ours.run(&calls)?));
                    }
                }
                let names = std::iter::once("limit (f32)".to_owned())
                    .chain(ours.iter().map(|(c, _)| format!("hatchback {}", c.name())));
                for (engine, micros) in names.zip(best) {
                    let mrows_per_s = (TABLES * batch * hotness) as f64 / micros;
                    points.push(Point { engine, keys, hotness, batch, micros, mrows_per_s });
                }
            }
        }
    }
    let mut table = report::table(&["engine", "keys", "hotness", "batch", "µs", "Mrows/s"]);
    for p in &points {
        table.add_row([
            p.engine.clone(),
            p.keys.to_owned(),
            p.hotness.to_string(),
            p.batch.to_string(),
            format!("{:.1}", p.micros),
            format!("{:.1}", p.mrows_per_s),
        ]);
    }
    println!("{table}");
    Ok(())
}
