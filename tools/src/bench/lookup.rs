//! `bench lookup`: pooled embedding lookups on one core, all rows in the cache or in resident
//! tables, beside the machine's limit for reading random rows
//! (`hatchback_kernels::lookup::roofline`, rows at known places in plain memory). Never reads flash
//! and never runs a dense network.

use super::peer::{self, Peer, cpu_us, percentile};
use super::{Bar, Machine, NotRun, Report, bars_table};
use crate::report::plot::{self, Axis, Panel, Series};
use crate::workload::key_distributions::Scatter;
use crate::{report, serve};
use anyhow::{Result, ensure};
use clap::Args;
use hatchback::{Codec, LookupStatus, Pooling, RowFormat, RowKey};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::roofline;
use hatchback_kernels::lookup::{Bags, FeatureView, Input, RowStore};
use hatchback_kernels::simd::isa::Isa;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Tables of the model, each looked up once a sample: Criteo's.
const TABLES: usize = 26;
/// Exponent of the skewed keys.
const ALPHA: f64 = 1.05;

/// Samples of a call.
const BATCHES: [usize; 4] = [1, 32, 256, 2048];
/// Keys in a bag.
const HOTNESS: [usize; 2] = [1, 10];
/// How keys are drawn.
const KEYS: [&str; 2] = ["uniform", "zipf"];
/// The machine's limit.
const LIMIT: &str = "limit, f32";
const FP32: &[&str] = &["FBGEMM, fp32", "torch EmbeddingBag, fp32"];
const FP16: &[&str] = &["FBGEMM, fp16"];
const BYTES: &[&str] = &["FBGEMM, int8", "torch quantized, byte"];
/// Ours, by codec and whether the tables are resident, and the peers that keep rows in as many
/// bytes.
const OURS: [(Codec, bool, &str, &[&str]); 6] = [
    (Codec::F32, false, "Hatchback, f32, cached", FP32),
    (Codec::F32, true, "Hatchback, f32, resident", FP32),
    (Codec::F16, false, "Hatchback, f16, cached", FP16),
    (Codec::F16, true, "Hatchback, f16, resident", FP16),
    (Codec::U8, false, "Hatchback, u8, cached", BYTES),
    (Codec::U8, true, "Hatchback, u8, resident", BYTES),
];

/// Measures pooled lookups on one core beside the machine's limit, PyTorch and FBGEMM
#[derive(Args, Debug)]
pub struct LookupArgs {
    /// Columns of a row
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128])]
    dim: Vec<usize>,
    /// RowStore of each of the 26 tables [default: 6,400,000 / dim; quick: a tenth]
    #[arg(long)]
    rows: Option<usize>,
    /// Fewer rows and rounds, the first dim only
    #[arg(long)]
    quick: bool,
    /// The Python environment of the peers, as `tools/peers/setup` makes it
    #[arg(long, default_value = peer::VENV)]
    venv: PathBuf,
    /// Writes all figures as JSON (`-`: standard output, without the tables)
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws lookups a second by batch size as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// The figures of one engine and shape, or why there are none.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Point {
    /// What was measured.
    Measured(Measured),
    /// A peer that did not run.
    NotRun(NotRun),
}

/// The figures of one engine at one point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// What did the lookups.
    pub engine: String,
    /// Columns of a row.
    pub dim: usize,
    /// How the keys were drawn.
    pub keys: &'static str,
    /// Keys in a bag.
    pub hotness: usize,
    /// Samples of a call.
    pub batch: usize,
    /// CPU time of a call, half take less, in the best turn, µs.
    pub p50_us: f64,
    /// 99 % take less, in the turn that is best by this, µs.
    pub p99_us: f64,
    /// RowStore a second at p50, millions.
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
        let scatters =
            std::array::from_fn::<_, TABLES, _>(|table| Scatter::of_table(table, rows as u64));
        let mut one = |table: usize| match shape.keys {
            "uniform" => rng.random_range(0..rows as u64),
            // Popular rows are not neighbours, and not the same in each table. The most popular has
            // rank 1.
            _ => scatters[table].place((zipf.sample(rng) as u64).clamp(1, rows as u64) - 1),
        };
        let keys = shape.batch * shape.hotness;
        let mut call = || (0..TABLES).map(|t| (0..keys).map(|_| one(t)).collect()).collect();
        let positions = (0..calls).map(|_| call()).collect();
        let offsets = (0..=shape.batch).map(|s| (s * shape.hotness) as u32).collect();
        Ok(Self { shape, positions, offsets })
    }
}

/// The limit: rows of plain memory, those of all tables scattered over it as a cache has them.
struct Limit {
    all: roofline::GatherRows,
    rows: usize,
    dim: usize,
    out: HostMemory<f32>,
}

impl Limit {
    fn run(&mut self, calls: &Calls) -> Vec<f64> {
        let (isa, stride) = (Isa::detect(), TABLES * self.dim);
        let scatter = Scatter::of_table(TABLES, (TABLES * self.rows) as u64);
        let mut time = |tables: &Vec<Vec<u64>>| {
            let scattered = |(t, positions): (usize, &Vec<u64>)| -> Vec<u64> {
                positions.iter().map(|&p| scatter.place((t * self.rows) as u64 + p)).collect()
            };
            let places: Vec<Vec<u64>> = tables.iter().enumerate().map(scattered).collect();
            let start = cpu_us();
            for (t, places) in places.iter().enumerate() {
                self.all.pool(
                    isa,
                    places,
                    calls.shape.hotness,
                    &mut self.out,
                    stride,
                    t * self.dim,
                );
            }
            cpu_us() - start
        };
        calls.positions.iter().map(&mut time).collect()
    }
}

/// Where our rows are.
enum Store {
    /// All tables in one cache.
    Cached(Box<Cache>),
    /// Each table whole.
    Resident(Vec<Resident>),
}

/// Our lookups.
struct Ours {
    format: RowFormat,
    store: Store,
    default_row: Vec<f32>,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    out: HostMemory<f32>,
    /// Keys that are there, by table: sets of the cache overflow here and there, and what is not
    /// cached is not asked for.
    keys: Vec<Vec<u64>>,
}

impl Ours {
    fn new(
        codec: Codec,
        resident: bool,
        dim: usize,
        rows: usize,
        batch_max: usize,
    ) -> Result<Self> {
        let format = RowFormat::new(codec, dim, 0).ok_or_else(|| anyhow::anyhow!("no such row"))?;
        let mut encoded = vec![0; format.row_bytes()];
        let values: Vec<f32> = (0..dim).map(|i| (i % 7) as f32).collect();
        format.encode(&values, &mut encoded)?;
        let (store, keys) = if resident {
            let table = || Resident::indexed(format.row_bytes(), &encoded.repeat(rows));
            let keys = vec![(0..rows as u64).collect(); TABLES];
            (Store::Resident((0..TABLES).map(|_| table()).collect()), keys)
        } else {
            let (cache, keys) = fill_cache(rows, rows, &encoded)?;
            (Store::Cached(Box::new(cache)), keys)
        };
        Ok(Self {
            format,
            store,
            default_row: vec![0.0; dim],
            misses: MissList::new(16, format.row_bytes()),
            statuses: vec![LookupStatus::default(); batch_max],
            out: Device::Cpu.host_memory(batch_max * TABLES * dim)?,
            keys,
        })
    }

    fn feature<'a>(
        format: RowFormat,
        store: &'a Store,
        default_row: &'a [f32],
        table: usize,
    ) -> FeatureView<'a> {
        FeatureView {
            id: table as u16,
            table: table as u16,
            format,
            keys_end: None,
            default_row,
            pooling: Pooling::Sum,
            rows: match store {
                Store::Cached(cache) => RowStore::Cached(cache),
                Store::Resident(tables) => RowStore::Resident(&tables[table]),
            },
            column: table * format.dim(),
            width: format.dim(),
        }
    }

    fn run(&mut self, calls: &Calls) -> Result<Vec<f64>> {
        let (dim, batch) = (self.format.dim(), calls.shape.batch);
        let mut times = Vec::with_capacity(calls.positions.len());
        let mut keys: Vec<Vec<u64>> = vec![Vec::new(); TABLES];
        for tables in &calls.positions {
            for ((keys, known), positions) in keys.iter_mut().zip(&self.keys).zip(tables) {
                keys.clear();
                keys.extend(positions.iter().map(|&p| known[p as usize % known.len()]));
            }
            let statuses = &mut self.statuses[..batch];
            statuses.fill(LookupStatus::default());
            let start = cpu_us();
            let (isa, lead) =
                (Isa::detect(), FeaturePrefetch::new(TABLES * batch * calls.shape.hotness, TABLES));
            let (format, store, default_row) = (self.format, &self.store, &self.default_row);
            let feature = |t: usize| {
                let bags = Bags { keys: &keys[t], offsets: &calls.offsets };
                (Self::feature(format, store, default_row, t), bags)
            };
            for t in 0..TABLES {
                lead.ask(isa, t, feature);
                let mut input = Input { data: &mut self.out, stride: TABLES * dim };
                let (feature, bags) = feature(t);
                feature.query(isa, bags, 0, &mut input, &mut self.misses, statuses);
            }
            times.push(cpu_us() - start);
            let fresh: u32 = statuses.iter().map(|s| s.fresh).sum();
            let asked = batch * calls.shape.hotness * TABLES;
            ensure!(fresh as usize == asked, "{fresh} of {asked} rows were there");
        }
        Ok(times)
    }
}

/// A cache for tables of keys below `end` with `row` under the first `rows` keys of each, and those
/// of them that are in it.
pub fn fill_cache(end: usize, rows: usize, row: &[u8]) -> Result<(Cache, Vec<Vec<u64>>)> {
    let names = KeySpaces::new(vec![Some(end as u64); TABLES]);
    let bytes = (rows * TABLES) as f64 * 1.3 * (row.len() + 7) as f64;
    let cache = Cache::new(row.len(), bytes as usize, &names);
    let cache = cache.ok_or_else(|| anyhow::anyhow!("{rows} rows are too few"))?;
    let name = |table: usize, key| RowKey { table: table as u16, key };
    for name in (0..TABLES).flat_map(|table| (0..rows as u64).map(move |key| name(table, key))) {
        cache.insert(name, row, cache.epoch(name));
    }
    let cached = |table| {
        let mut out = row.to_vec();
        (0..rows as u64).filter(|&key| cache.query(name(table, key), &mut out)).collect()
    };
    let keys = (0..TABLES).map(cached).collect();
    Ok((cache, keys))
}

/// PyTorch and FBGEMM.
struct Peers {
    peer: Peer,
    about: About,
}

/// What the program says of itself.
#[derive(Deserialize)]
struct About {
    engines: Vec<String>,
    about: String,
}

#[derive(Deserialize)]
struct Times {
    times_us: Vec<f64>,
}

impl Peers {
    fn start(venv: &Path, dim: usize, rows: usize) -> Result<Self> {
        let mut peer = Peer::start(venv, peer::LOOKUPS)?;
        let about = peer.ask("setup", &json!({ "tables": TABLES, "rows": rows, "dim": dim }))?;
        Ok(Self { peer, about })
    }

    fn times(&mut self, engine: &str, shape: Shape, calls: usize, seed: usize) -> Result<Vec<f64>> {
        let Shape { keys, hotness, batch } = shape;
        let options = json!({
            "engine": engine, "keys": keys, "hotness": hotness, "batch": batch, "calls": calls, "seed": seed,
        });
        Ok(self.peer.ask::<Times>("round", &options)?.times_us)
    }
}

/// All engines of one dim.
struct Engines {
    dim: usize,
    rows: usize,
    limit: Limit,
    ours: Vec<Ours>,
    peers: Option<Peers>,
}

impl Engines {
    fn names(&self) -> Vec<String> {
        let own = std::iter::once(LIMIT).chain(OURS.map(|o| o.2)).map(str::to_owned);
        own.chain(self.peers.iter().flat_map(|p| p.about.engines.clone())).collect()
    }

    /// Each engine's turns at `shape`, one after the other, `rounds` times; the best of each.
    fn measure(&mut self, shape: Shape, rounds: usize, rng: &mut StdRng) -> Result<Vec<Point>> {
        let names = self.names();
        let calls = (40_000 / (shape.batch * shape.hotness)).clamp(5, 400);
        let mut best = vec![(f64::INFINITY, f64::INFINITY); names.len()];
        for round in 0..rounds {
            let drawn = Calls::draw(shape, self.rows, calls, rng)?;
            for (number, (name, (p50, p99))) in names.iter().zip(&mut best).enumerate() {
                let mut times = match (number, &mut self.peers) {
                    (0, _) => self.limit.run(&drawn),
                    (1..=6, _) => self.ours[number - 1].run(&drawn)?,
                    (_, Some(peers)) => peers.times(name, shape, calls, round)?,
                    (_, None) => Vec::new(),
                };
                *p50 = p50.min(percentile(&mut times, 0.5));
                *p99 = p99.min(percentile(&mut times, 0.99));
            }
        }
        let Shape { keys, hotness, batch } = shape;
        let point = |(engine, (p50_us, p99_us))| {
            let mrows_per_s = (TABLES * batch * hotness) as f64 / p50_us;
            let dim = self.dim;
            Point::Measured(Measured {
                engine,
                dim,
                keys,
                hotness,
                batch,
                p50_us,
                p99_us,
                mrows_per_s,
            })
        };
        Ok(names.into_iter().zip(best).map(point).collect())
    }
}

fn shapes() -> impl Iterator<Item = Shape> {
    let keys = KEYS.into_iter().flat_map(|keys| HOTNESS.map(|hotness| (keys, hotness)));
    keys.flat_map(|(keys, hotness)| BATCHES.map(|batch| Shape { keys, hotness, batch }))
}

/// Runs the command.
///
/// # Errors
/// The rows do not fit, or a peer fails in the middle.
pub fn run(args: &LookupArgs) -> Result<()> {
    let machine = Machine::this();
    peer::stay_on_one_core()?;
    let dims = if args.quick { &args.dim[..args.dim.len().min(1)] } else { &args.dim };
    let rounds = if args.quick { 2 } else { 5 };
    let bar = serve::progress_bar(
        (dims.len() * shapes().count()) as u64,
        "measuring",
        "{pos}/{len} shapes",
    );
    let (mut points, mut about, mut missing) = (Vec::new(), None, Vec::new());
    let batch_max = BATCHES.into_iter().max().unwrap_or(1);
    for &dim in dims {
        ensure!(dim > 0, "--dim: 0");
        let rows = args.rows.unwrap_or(if args.quick { 640_000 } else { 6_400_000 } / dim).max(1);
        let peers = Peers::start(&args.venv, dim, rows).map_err(|e| missing = not_run(&e)).ok();
        about = about.or_else(|| peers.as_ref().map(|p| p.about.about.clone()));
        let limit = Limit {
            all: roofline::GatherRows::new(TABLES * rows, dim),
            rows,
            dim,
            out: Device::Cpu.host_memory(batch_max * TABLES * dim)?,
        };
        let ours =
            OURS.map(|(codec, resident, ..)| Ours::new(codec, resident, dim, rows, batch_max));
        let ours = ours.into_iter().collect::<Result<_>>()?;
        let mut engines = Engines { dim, rows, limit, ours, peers };
        let mut rng = StdRng::seed_from_u64(1);
        for shape in shapes() {
            points.extend(engines.measure(shape, rounds, &mut rng)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let bars = bars(&points);
    points.extend(missing);
    let report =
        Report { bench: "lookup", machine, model: format!("{TABLES} tables"), bars, points };
    args.publish(&report, about.as_deref())
}

/// Every peer, because of `e`.
fn not_run(e: &anyhow::Error) -> Vec<Point> {
    let peers = [FP32, FP16, BYTES].concat().into_iter();
    peers.map(|peer| Point::NotRun(NotRun::new(peer, report::explain(e), peer::SETUP))).collect()
}

fn measured(points: &[Point]) -> impl Iterator<Item = &Measured> + Clone {
    points.iter().filter_map(|p| if let Point::Measured(m) = p { Some(m) } else { None })
}

/// How many times less `ours` takes than the best of `others`, at the worst of the shapes that
/// `wanted` takes.
fn least_lead(
    points: &[Point],
    ours: &str,
    others: &[&str],
    wanted: impl Fn(&Measured) -> bool,
) -> Option<f64> {
    let shape = |m: &Measured| (m.dim, m.keys, m.hotness, m.batch);
    let own = measured(points).filter(|m| m.engine == ours && wanted(m));
    let lead = |own: &Measured| {
        let same = measured(points)
            .filter(|m| shape(m) == shape(own) && others.contains(&m.engine.as_str()));
        Some(same.map(|m| m.p50_us).reduce(f64::min)? / own.p50_us)
    };
    own.map(lead).collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)
}

fn bars(points: &[Point]) -> Vec<Bar> {
    let mut bars = Vec::new();
    let (_, _, f32_rows, f32_peers) = OURS[0];
    let first = least_lead(points, f32_rows, f32_peers, |m| (m.batch, m.hotness) == (1, 1));
    bars.push(Bar::at_least_if("batch 1, one key: best fp32 peer / f32, cached", first, 20.0));
    for batch in BATCHES {
        for (_, _, ours, peers) in OURS {
            let lead = least_lead(points, ours, peers, |m| m.batch == batch);
            bars.push(Bar::at_least_if(
                format!("batch {batch}: best peer / {ours}, worst shape"),
                lead,
                1.0,
            ));
        }
    }
    let limit = least_lead(points, f32_rows, &[LIMIT], |m| m.batch >= 256);
    bars.push(Bar::at_least_if("limit / f32, cached, batch 256 and 2048, worst shape", limit, 0.8));
    bars
}

impl LookupArgs {
    fn publish(&self, report: &Report<Point>, about: Option<&str>) -> Result<()> {
        if let Some(path) = &self.plot {
            plot::panels(path, "Pooled lookups on one core, 26 tables", &charts(&report.points))?;
        }
        if self.json.as_deref() != Some(Path::new("-")) {
            show(report, about);
        }
        self.json.as_ref().map_or(Ok(()), |path| report::write_json(path, report))
    }
}

fn names(points: &[Point]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for m in measured(points) {
        if !names.contains(&m.engine.as_str()) {
            names.push(&m.engine);
        }
    }
    names
}

fn show(report: &Report<Point>, about: Option<&str>) {
    let machine = &report.machine;
    println!(
        "{}, {} cores, {}, version {}",
        machine.cpu, machine.cores, machine.platform, machine.version
    );
    if let Some(about) = about {
        println!("Peers: {about}.");
    }
    let mut dims: Vec<usize> = measured(&report.points).map(|m| m.dim).collect();
    dims.dedup();
    for dim in dims {
        for (keys, hotness) in
            KEYS.into_iter().flat_map(|keys| HOTNESS.map(|hotness| (keys, hotness)))
        {
            println!("dim {dim}, {keys} keys, {hotness} a bag: µs a call (million rows a second)");
            let heads = BATCHES.map(|b| format!("batch {b}"));
            let heads: Vec<&str> =
                ["engine"].into_iter().chain(heads.iter().map(String::as_str)).collect();
            let mut table = report::table(&heads);
            for name in names(&report.points) {
                let own = measured(&report.points).filter(|m| m.engine == name && m.dim == dim);
                let own = own.filter(|m| (m.keys, m.hotness) == (keys, hotness));
                let cells = own.map(|m| format!("{:.1} ({:.1})", m.p50_us, m.mrows_per_s));
                table.add_row([name.to_owned()].into_iter().chain(cells));
            }
            for point in &report.points {
                if let Point::NotRun(peer) = point {
                    table.add_row(peer.cells());
                }
            }
            println!("{table}");
        }
    }
    println!(
        "CPU time on one core, p50 of the best of several turns; all rows in memory, fresh keys in every call."
    );
    println!("{}", bars_table(&report.bars));
}

/// RowStore a second by batch size, uniform keys, of the first dim.
fn charts(points: &[Point]) -> Vec<Panel> {
    let dim = measured(points).next().map_or(0, |m| m.dim);
    let panel = |hotness: usize| {
        let line = |(color, name): (usize, &str)| {
            let own = measured(points).filter(|m| m.engine == name && m.dim == dim);
            let own = own.filter(|m| (m.keys, m.hotness) == ("uniform", hotness));
            let dashed = !name.starts_with("Hatchback");
            let points = own.map(|m| (m.batch as f64, m.mrows_per_s)).collect();
            Series { name: name.to_owned(), color, dashed, points }
        };
        Panel {
            x: Axis::log("samples of a call").at(&BATCHES.map(|b| b as f64)),
            y: Axis::log(&format!("Mrows/s, {hotness} a bag")),
            series: names(points).into_iter().enumerate().map(line).collect(),
        }
    };
    HOTNESS.map(panel).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(engine: &str, batch: usize, keys: &'static str, p50_us: f64) -> Point {
        let (engine, dim, hotness, p99_us, mrows_per_s) = (engine.to_owned(), 64, 1, p50_us, 1.0);
        Point::Measured(Measured { engine, dim, keys, hotness, batch, p50_us, p99_us, mrows_per_s })
    }

    #[test]
    fn the_worst_shape_beside_the_best_peer_counts() {
        let mut points = vec![
            point("Hatchback, f32, cached", 1, "uniform", 2.0),
            point("Hatchback, f32, cached", 1, "zipf", 1.0),
        ];
        assert!(least_lead(&points, "Hatchback, f32, cached", FP32, |_| true).is_none());
        for (keys, us) in [("uniform", 30.0), ("zipf", 25.0)] {
            points.push(point("FBGEMM, fp32", 1, keys, us));
            points.push(point("torch EmbeddingBag, fp32", 1, keys, us + 100.0));
            points.push(point("FBGEMM, fp16", 1, keys, 1.0));
        }
        assert_eq!(least_lead(&points, "Hatchback, f32, cached", FP32, |_| true), Some(15.0));
        assert_eq!(
            least_lead(&points, "Hatchback, f32, cached", FP32, |m| m.keys == "zipf"),
            Some(25.0)
        );
        let bars = bars(&points);
        assert_eq!(
            bars[0],
            Bar::at_least("batch 1, one key: best fp32 peer / f32, cached", 15.0, 20.0)
        );
        assert_eq!(bars.len(), 26);
    }

    #[test]
    fn popular_keys_leave_no_row_out() {
        let shape = Shape { keys: "zipf", hotness: 10, batch: 2048 };
        let drawn = Calls::draw(shape, 100, 1, &mut StdRng::seed_from_u64(3)).unwrap();
        for table in &drawn.positions[0] {
            let mut seen = [0; 100];
            table.iter().for_each(|&p| seen[p as usize] += 1);
            assert!(seen.iter().all(|&n| n > 0) && seen.iter().any(|&n| n > 2048), "{seen:?}");
        }
    }

    #[test]
    fn without_peers_ours_is_measured_and_they_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let (json, plot) = (folder.path().join("a.json"), folder.path().join("a.svg"));
        let args = LookupArgs {
            dim: vec![8],
            rows: Some(50),
            quick: true,
            venv: folder.path().to_owned(),
            json: Some(json.clone()),
            plot: Some(plot.clone()),
        };
        run(&args).unwrap();
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(report["bars"][0]["not run"], "a peer did not run");
        assert!(report["bars"][25]["value"].as_f64().unwrap() > 0.0);
        let points = report["points"].as_array().unwrap();
        assert_eq!(points.len(), 16 * 7 + 5);
        assert_eq!(points[112]["engine"], "FBGEMM, fp32");
        assert!(std::fs::read_to_string(&plot).unwrap().contains("Hatchback, u8, cached"));
    }
}
