//! `plan`: how large the caches of a model should be. It simulates the product's caches at many
//! sizes in one pass over a log or over counts, measures the device and a worker, and says for each
//! size which hit rate, pages and p99 to expect. It can write a target file. Never changes a model.

pub mod device;
pub mod simulate;
pub mod stream;

use crate::plan::device::DeviceTimes;
use crate::plan::simulate::{Curve, CurvePoint};
use crate::plan::stream::{StreamRules, draw_counts, read_log};
use crate::report::Json;
use crate::report::args::mib_to_bytes;
use crate::report::plot::{self, Axis, Panel, Series};
use crate::report::temporary::{Claim, write_file};
use crate::{report, say, serve};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::model::capacity::least_cache_bytes;
use hatchback::schema::Schema;
use hatchback::schema::sample::Sample;
use hatchback::targets::{DeviceKind, Target};
use hatchback_server::front_bytes;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Points of the curve.
const POINTS: u32 = 17;
/// The largest size is this many times the smallest.
const SPAN: f64 = 4096.0;
/// Bytes that a cache needs for each row besides the row, at most.
const BESIDE_BYTES: u64 = 24;

/// Says how large the caches of a model should be
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// Samples, one line of JSON each in the order of the requests; or a model.toml whose tables
    /// have counts
    input: PathBuf,
    /// The model: a bundle (installed into a flash directory first) or a flash directory
    #[arg(long)]
    model: PathBuf,
    /// The flash directory for a bundle, on the device to be measured [default: the bundle's name
    /// with the extension `.flash`]
    #[arg(long)]
    flash: Option<PathBuf>,
    /// A target file, such as targets/cpu.toml, that sets everything but the caches
    #[arg(long)]
    target: Option<PathBuf>,
    /// Memory for resident tables, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    resident_mib: Option<f64>,
    /// Samples in one request
    #[arg(long, default_value_t = 1, value_parser = report::args::batch)]
    batch: usize,
    /// Wished hit rates, per cent, one or more with commas between them
    #[arg(long, value_delimiter = ',', default_value = "90,95,99", value_parser = hit_percent)]
    hit_percent: Vec<f64>,
    /// Per cent of the input that only warms the caches up
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(0..=90))]
    warm_up_percent: u64,
    /// Writes a target file with the caches of the last wished hit rate
    #[arg(long, value_name = "FILE")]
    write_target: Option<PathBuf>,
    /// The target from which that file inherits, in the same folder
    #[arg(long, default_value = "cpu", value_name = "NAME", value_parser = report::args::file_name)]
    inherits: String,
    #[command(flatten)]
    json: Json,
    /// Draws the curve as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn hit_percent(text: &str) -> Result<f64> {
    let percent: f64 = text.trim().parse().context("is not a number")?;
    ensure!(percent > 0.0 && percent < 100.0, "is not between 0 and 100");
    Ok(percent)
}

/// The forecast for one size of the caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlannedSize {
    /// The size and its hit rate.
    #[serde(flatten)]
    pub point: CurvePoint,
    /// Pages read for a request.
    pub pages: f64,
    /// 99th percentile of the latency of a request, µs; absent without samples to serve.
    pub p99_us: Option<f64>,
}

/// The size for a wished hit rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Wish {
    /// The hit rate, per cent.
    pub hit_percent: f64,
    /// Bytes of the caches; absent if no size reaches the rate.
    pub cache_bytes: Option<u64>,
}

/// A plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// The generation of the model.
    pub model: String,
    /// The curve, by ascending size.
    pub sizes: Vec<PlannedSize>,
    /// The wished hit rates.
    pub wishes: Vec<Wish>,
    /// The times of the device.
    pub device: DeviceTimes,
    /// Pages read for each missing row.
    pub pages_per_miss: f64,
    /// Median latency of a request without a miss, µs; absent without samples to serve.
    pub hit_p50_us: Option<f64>,
    /// Why the log is too short for a plan; absent if it is not.
    pub too_short: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// The model, the input or a file is refused, or no size reaches the last wished hit rate and a
/// target should be written.
pub fn run(args: &PlanArgs) -> Result<()> {
    let directory = args.flash.clone().unwrap_or_else(|| args.model.with_extension("flash"));
    let flash = serve::open_flash(&args.model, &directory)?;
    let plan = plan(args, &flash)?;
    if let Some(path) = &args.plot {
        plan.draw(path)?;
    }
    if let Some(path) = &args.write_target {
        write_target(args, &plan, &flash, path)?;
    }
    args.json.write(&plan, || plan.print())?;
    if let Some(problem) = &plan.too_short {
        let log = args.input.display();
        report::note(format!("{log}: too short, so these sizes are a guess: {problem}"));
    }
    Ok(())
}

/// Makes the plan of the model in `flash`.
fn plan(args: &PlanArgs, flash: &Flash) -> Result<Plan> {
    let schema = &flash.manifest().schema;
    let budget = budget(args)?;
    let mut curve = Curve::new(schema, &budget, &sizes(schema, &budget)?)?;
    curve.preload(flash)?;
    let rules = StreamRules { batch: args.batch, warm_up_percent: args.warm_up_percent };
    let mut too_short = None;
    let samples = match args.input.extension().is_some_and(|extension| extension == "toml") {
        true => {
            draw_counts(&args.input, schema, rules, &mut curve)?;
            flash.probe()?
        }
        false => {
            let log = read_log(&args.input, schema, rules, &mut curve)?;
            too_short = log.too_short();
            log.samples
        }
    };

    let points = curve.points();
    let wishes: Vec<Wish> = args
        .hit_percent
        .iter()
        .map(|&hit_percent| Wish { hit_percent, cache_bytes: size_for(&points, hit_percent) })
        .collect();
    let served = match samples.is_empty() {
        true => Served { hit_p50_us: None, pages_per_miss: 1.0 },
        false => serve_samples(flash, &budget, &points, args.batch, &samples)?,
    };
    let device = DeviceTimes::measure(flash, budget.reads_max)?;
    let sizes = points.iter().map(|point| served.expect(*point, &device)).collect();
    Ok(Plan {
        model: flash.manifest().generation.to_string(),
        sizes,
        wishes,
        device,
        pages_per_miss: served.pages_per_miss,
        hit_p50_us: served.hit_p50_us,
        too_short,
    })
}

fn budget(args: &PlanArgs) -> Result<Budget> {
    let target = args.target.as_deref().map(Target::load).transpose()?;
    let mut budget = target.map_or_else(Budget::default, |target| target.budget);
    let resident = args.resident_mib.map(mib_to_bytes);
    budget.resident_bytes_max = resident.unwrap_or(budget.resident_bytes_max);
    budget.batch_max = budget.batch_max.max(args.batch as u32);
    Ok(budget)
}

/// Returns the sizes of the curve: from the least possible one, or a small part of the tables, to
/// room for every row.
fn sizes(schema: &Schema, budget: &Budget) -> Result<Vec<u64>> {
    let all = |bytes: u64, table: &hatchback::schema::Table| {
        bytes.saturating_add(table.row_bytes_total()).saturating_add(table.rows * BESIDE_BYTES)
    };
    let least = least_cache_bytes(schema, budget)?;
    ensure!(least > 0, "every table is resident: the model needs no cache");
    // Sets fill unevenly, so that every row fits only into a larger cache.
    let most = schema.tables.iter().fold(0, all) as f64 * 1.5;
    let first = (most / SPAN).max(least as f64);
    let step = (most / first).max(1.0).powf(1.0 / f64::from(POINTS - 1));
    let mut sizes: Vec<u64> =
        (0..POINTS).map(|i| (first * step.powi(i as i32)).ceil() as u64).collect();
    sizes.dedup();
    Ok(sizes)
}

/// Returns the size at which the curve reaches `hit_percent`, interpolated between two points over
/// the logarithm of the size.
fn size_for(points: &[CurvePoint], hit_percent: f64) -> Option<u64> {
    let at = points.iter().position(|point| point.hit_percent >= hit_percent)?;
    let (Some(before), high) = (at.checked_sub(1).map(|at| points[at]), points[at]) else {
        return Some(points[at].cache_bytes);
    };
    let share = (hit_percent - before.hit_percent) / (high.hit_percent - before.hit_percent);
    let (from, to) = ((before.cache_bytes as f64).ln(), (high.cache_bytes as f64).ln());
    Some((from + share * (to - from)).exp().ceil() as u64)
}

/// Measurements of a worker that served samples.
struct Served {
    hit_p50_us: Option<f64>,
    pages_per_miss: f64,
}

impl Served {
    /// Returns what to expect at a point of the curve. Misses are assumed to be spread over
    /// requests at random, so their number in a request is a Poisson variable.
    fn expect(&self, point: CurvePoint, device: &DeviceTimes) -> PlannedSize {
        let pages = poisson_p99(point.misses) * self.pages_per_miss;
        let p99_us = self.hit_p50_us.map(|us| us + device.p99_us(pages));
        PlannedSize { point, pages: point.misses * self.pages_per_miss, p99_us }
    }
}

/// Returns the 99th percentile of a Poisson variable.
fn poisson_p99(mean: f64) -> f64 {
    const NORMAL_FROM: f64 = 400.0;
    if mean > NORMAL_FROM {
        return mean + 2.326 * mean.sqrt();
    }
    let (mut term, mut sum, mut k) = ((-mean).exp(), (-mean).exp(), 0.0);
    while sum < 0.99 && k < 2.0 * NORMAL_FROM {
        k += 1.0;
        term *= mean / k;
        sum += term;
    }
    k
}

/// Serves `samples` twice on one worker with caches of a middle size. The first time fills them;
/// the second times the requests without a miss. Both count pages.
fn serve_samples(
    flash: &Flash,
    budget: &Budget,
    points: &[CurvePoint],
    batch: usize,
    samples: &[Sample],
) -> Result<Served> {
    let cache_bytes_max = points[points.len() / 2].cache_bytes;
    let budget = Budget { cache_bytes_max, memory_bytes_max: u64::MAX >> 8, ..*budget };
    let model = Arc::new(Model::from_flash(flash, budget)?);
    let (mut worker, mut request) = (serve::worker(&model), model.batch());
    let mut hit_us = Vec::new();
    for pass in 0..2 {
        for group in samples.chunks(batch) {
            request.clear();
            group.iter().try_for_each(|sample| request.push(model.schema(), sample))?;
            let before = worker.counters();
            let start = Instant::now();
            worker.score_requests(&request, None)?;
            let us = start.elapsed().as_secs_f64() * 1e6;
            if pass == 1 && worker.counters().since(&before).misses == 0 {
                hit_us.push(us);
            }
        }
    }

    hit_us.sort_unstable_by(f64::total_cmp);
    let counters = worker.counters();
    let pages_per_miss = match counters.misses {
        0 => 1.0,
        misses => counters.pages as f64 / misses as f64,
    };
    Ok(Served { hit_p50_us: hit_us.get(hit_us.len() / 2).copied(), pages_per_miss })
}

/// Writes a target with the caches of the last wished hit rate. Its memory is what the model then
/// takes, an update beside it, and the daemon's front door. A target with a GPU keeps the memory of
/// the one that it inherits from: the GPU's share is known only where the GPU is.
fn write_target(args: &PlanArgs, plan: &Plan, flash: &Flash, path: &Path) -> Result<()> {
    let place = || path.display().to_string();
    // The disk replaces a directory that stands where it renames a file to.
    ensure!(!path.is_dir(), "--write-target {}: is a directory", place());
    let Some(wish) = plan.wishes.last() else { bail!("--hit-percent: is empty") };
    let percent = wish.hit_percent;
    let cache = wish.cache_bytes.with_context(|| {
        format!("--hit-percent {percent}: no size reaches it; the input looks up too many new rows")
    })?;
    let resident = budget(args)?.resident_bytes_max;
    let text = |memory: Option<u64>| {
        let memory =
            memory.map_or(String::new(), |memory| format!("memory_bytes_max = {memory}\n"));
        format!(
            "# Written by `hatchback plan` for {model}: {percent} % of the lookups hit.\n\
             inherits = \"{inherits}\"\n\n[budget]\n{memory}cache_bytes_max = {cache}\n\
             resident_bytes_max = {resident}\n",
            model = plan.model,
            inherits = args.inherits,
        )
    };

    let folder = disk::directory_of(path);
    let name = path.file_stem().unwrap_or_default();
    let mut file = None;
    let draft = Claim::of(|| {
        let new = tempfile::Builder::new().prefix(name).suffix(".toml").tempfile_in(folder);
        Ok(file.insert(new.with_context(place)?).path().to_owned())
    })?;
    std::fs::write(draft.path(), text(Some(1 << 50))).with_context(place)?;
    let inherits = || format!("--inherits {}", args.inherits);
    let target = Target::load(draft.path()).with_context(inherits)?;
    let is_base = |file: &PathBuf| file.file_name() == path.file_name();
    let files = Target::files(draft.path())?;
    ensure!(!files.iter().any(is_base), "{}: inherits from {}", inherits(), place());

    let memory = match target.device {
        DeviceKind::Cuda => None,
        DeviceKind::Cpu => {
            let model = Model::from_flash(flash, target.budget)?;
            let front = front_bytes(&target.server).iter().map(|(_, bytes)| bytes).sum::<u64>();
            Some(model.memory().total() + model.update_bytes() + front)
        }
    };
    write_file(path, text(memory).as_bytes())
}

impl Plan {
    fn print(&self) -> Result<()> {
        let heads = ["caches", "rows", "hit rate", "misses a request", "pages", "p99"];
        let mut table = report::table(&heads);
        for size in &self.sizes {
            table.add_row([
                report::bytes(size.point.cache_bytes),
                report::count(size.point.slots),
                report::percent(size.point.hit_percent / 100.0),
                report::digits(size.point.misses),
                report::digits(size.pages),
                size.p99_us.map_or("-".to_owned(), |us| format!("{} µs", report::digits(us))),
            ]);
        }
        say!("{table}")?;
        for wish in &self.wishes {
            let size = wish.cache_bytes.map_or("no size reaches it".to_owned(), report::bytes);
            say!("hit rate {} %: {size}", wish.hit_percent)?;
        }
        let (device, pages) = (&self.device, report::digits(self.pages_per_miss));
        let time = |pages: f64| report::digits(device.p99_us(pages));
        say!(
            "device: p99 of 1, 16 and 128 pages is {}, {} and {} µs, {} reads in flight through \
             {}; {pages} pages a miss",
            time(1.0),
            time(16.0),
            time(128.0),
            device.depth,
            device.method
        )
    }

    fn draw(&self, path: &Path) -> Result<()> {
        let mib = |size: &PlannedSize| size.point.cache_bytes as f64 / f64::from(1 << 20);
        let line = |name: &str, color, y: &dyn Fn(&PlannedSize) -> Option<f64>| Series {
            name: name.to_owned(),
            color,
            dashed: false,
            points: self.sizes.iter().filter_map(|s| Some((mib(s), y(s)?))).collect(),
        };
        let x = Axis::log("caches, MiB");
        let misses = line("misses", 0, &|size| Some(100.0 - size.point.hit_percent));
        let p99 = line("p99", 1, &|size| size.p99_us);
        let panel = |y, series| Panel { x: x.clone(), y, series: vec![series] };
        let mut panels = vec![panel(Axis::linear("misses, % of lookups"), misses)];
        if !p99.points.is_empty() {
            panels.push(panel(Axis::log("p99 to expect, µs"), p99));
        }
        plot::panels(path, &format!("{}: misses by cache size", self.model), &panels)
    }
}
