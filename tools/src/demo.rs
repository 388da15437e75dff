//! `demo`: takes a model all the way into a car, in one command. It packs a model that PyTorch
//! trained on the in-vehicle coupon data, installs it on flash, and compares the score of every row
//! with the row's label and with PyTorch's score. Then a Criteo-shaped model of a few million rows
//! ranks the candidates of drivers with a history, which exercises the flash tier. Never needs a
//! network.

use crate::eval::{Evaluation, evaluate};
use crate::live::{self, LiveArgs};
use crate::pack::spec::CodecChoice;
use crate::pack::{Overrides, PackJob, read_samples};
use crate::report;
use crate::report::Json;
use crate::report::metrics::{Latencies, Lookups, Percentiles};
use crate::report::plot::{self, TimeSlice};
use crate::say;
use crate::serve;
use crate::workload::key_distributions::{BagSizes, Distribution, Workload};
use crate::workload::synthetic;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Counters;
use hatchback::schema::Placement;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Packs, serves and measures a real model and a large synthetic one
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// The directory for the bundles, flash directories and plots
    #[arg(long, default_value = "target/demo")]
    out: PathBuf,
    /// Rows of each of the largest tables of the Criteo-shaped model
    #[arg(long, default_value_t = 500_000,
          value_parser = clap::value_parser!(u64).range(1..=40_000_000))]
    rows_max: u64,
    /// Requests to the Criteo-shaped model
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    #[command(flatten)]
    live: LiveArgs,
    #[command(flatten)]
    json: Json,
}

/// The files of the coupon model that the trainer exported: name and content.
const COUPON: [(&str, &[u8]); 5] = [
    ("model.toml", include_bytes!("../demo/coupon/model.toml")),
    ("dense.onnx", include_bytes!("../demo/coupon/dense.onnx")),
    ("tables.safetensors", include_bytes!("../demo/coupon/tables.safetensors")),
    ("probe.jsonl", include_bytes!("../demo/coupon/probe.jsonl")),
    ("heldout.jsonl", include_bytes!("../demo/coupon/heldout.jsonl")),
];

/// Cache of the coupon model, whose tables take 240 KB as f32.
const COUPON_CACHE_BYTES: u64 = 32 << 10;
/// Cache of the Criteo-shaped model.
const CRITEO_CACHE_BYTES: u64 = 8 << 20;
/// Samples in a request to the Criteo-shaped model: candidates of one driver.
const CANDIDATES: usize = 200;
/// Exponent of the power law of its keys: that of NVIDIA's synthetic models.
const POWERLAW: f64 = 1.05;
/// Requests that are also sent with the driver's features at each candidate.
const REPEATED: usize = 50;
/// Time slices of its plot.
const SLICES: u32 = 50;

/// Runs the command.
///
/// # Errors
/// The output directory cannot be written. Any other error is a defect.
pub fn run(args: &DemoArgs) -> Result<()> {
    if args.live.live {
        ensure!(!args.json.is_given(), "--json: the report of --live is OUT/live/report.json");
        return live::run(&args.live, &args.out);
    }
    fresh_directory(&args.out)?;
    // Each part is printed as soon as it is done; the document comes at the end.
    let print = |part: &str, text: String| match args.json.is_standard_output() {
        true => Ok(()),
        false => say!("{part}\n\n{text}"),
    };
    let (coupon, text) = coupon(&args.out.join("coupon"))?;
    print(
        "1. A DLRM that PyTorch trained on the in-vehicle coupon data (UCI 603, CC BY 4.0)",
        text,
    )?;
    let (criteo, text) = criteo(args, &args.out.join("criteo"))?;
    print("\n2. A Criteo-shaped DLRM with synthetic rows: one driver, many candidates", text)?;
    args.json.write(&DemoReport { coupon, criteo }, || Ok(()))
}

/// The report of the command.
#[derive(Serialize)]
struct DemoReport {
    /// The coupon model, with tables as f32 and as u8.
    coupon: [Evaluation; 2],
    criteo: CriteoReport,
}

/// The figures of the Criteo-shaped model.
#[derive(Serialize)]
struct CriteoReport {
    rows: u64,
    bundle_bytes: u64,
    flash_bytes: u64,
    memory_bytes: u64,
    latency: Percentiles,
    /// Of requests that have the driver's features with each candidate.
    latency_repeated: Percentiles,
    hit_rate: f64,
    lookups: Lookups,
}

/// Makes the folders of the demo. Removes the flash directories of an earlier one, whose
/// generations would still be live, and nothing else: a folder of the user may have these names.
fn fresh_directory(out: &Path) -> Result<()> {
    for flash in ["coupon/f32.flash", "coupon/u8.flash", "criteo/flash"] {
        let path = out.join(flash);
        let named = || path.display().to_string();
        if Flash::has_live_record(disk::system().as_ref(), &path) {
            std::fs::remove_dir_all(&path).with_context(named)?;
        }
        std::fs::create_dir_all(path.parent().unwrap_or(out)).with_context(named)?;
    }
    Ok(())
}

/// The coupon model with one codec.
struct CouponRun {
    found: Evaluation,
    model: Arc<Model>,
    bundle_bytes: u64,
    flash_bytes: u64,
}

fn coupon(out: &Path) -> Result<([Evaluation; 2], String)> {
    for (name, content) in COUPON {
        std::fs::write(out.join(name), content)
            .with_context(|| out.join(name).display().to_string())?;
    }

    let mut table = report::table(&[
        "tables as",
        "bundle",
        "on flash",
        "AUC",
        "logloss",
        "max error",
        "hit rate",
        "p50",
        "p99",
    ]);
    let first = coupon_with(CodecChoice::F32, out)?;
    table.add_row(first.cells("f32"));
    let last = coupon_with(CodecChoice::U8, out)?;
    table.add_row(last.cells("u8"));
    let found = &last.found;
    let blank = String::new;
    table.add_row([
        "PyTorch f32".to_owned(),
        blank(),
        blank(),
        report::quality(last.found.first_output.reference_auc),
        report::quality(last.found.first_output.reference_logloss),
        blank(),
        blank(),
        blank(),
        blank(),
    ]);
    let (samples, lookups) = (report::count(found.samples as u64), rows_line(&found.rows));
    let plot = out.join("coupon.svg");
    let title = "Coupon model: latency and hit rate, cold start to warm";
    plot::over_time(&plot, title, &found.slices)?;
    let (memory, slots) = (report::bytes(last.model.memory().total()), last.model.cache_slots());
    let text = format!(
        "{table}\n{samples} held-out rows, one a request; {lookups}\n\
         memory {memory} ({slots} rows of cache); plot {}",
        plot.display()
    );
    Ok(([first.found, last.found], text))
}

impl CouponRun {
    /// Returns the run's row of the table.
    fn cells(&self, name: &str) -> [String; 9] {
        let (found, quality) = (&self.found, &self.found.first_output);
        let time = |us: f64| format!("{us:.0} µs");
        [
            name.to_owned(),
            report::bytes(self.bundle_bytes),
            report::bytes(self.flash_bytes),
            report::quality(quality.auc),
            report::quality(quality.logloss),
            report::or_dash(quality.score_difference_max, |d| format!("{d:.1e}")),
            report::or_dash(found.hit_rate, report::percent),
            time(found.latency.p50_us),
            time(found.latency.p99_us),
        ]
    }
}

fn rows_line(rows: &Lookups) -> String {
    let n = report::count;
    let (fresh, defaulted) = (n(rows.fresh), n(rows.defaulted));
    format!(
        "lookups: {fresh} fresh, {defaulted} defaulted, {} absent, {} damaged",
        n(rows.absent),
        n(rows.damaged)
    )
}

/// Packs the coupon model with `codec` for every table, all of them cached, and serves the held-out
/// rows.
fn coupon_with(codec: CodecChoice, out: &Path) -> Result<CouponRun> {
    let name = format!("{codec:?}").to_lowercase();
    let bundle = out.join(format!("coupon-{name}.hatch"));
    let (codec, placement) = (Some(codec), Some(Placement::Cached));
    let overrides = Overrides { codec, placement, ..Overrides::default() };
    let job = PackJob::read(&out.join("model.toml"), overrides)?;
    let packed = job.pack(None, &bundle, &mut |_, _| {})?;
    let flash = serve::install(&bundle, &out.join(format!("{name}.flash")))?;

    let budget = Budget {
        cache_bytes_max: COUPON_CACHE_BYTES,
        batch_max: 1,
        misses_max: 256,
        ..Budget::default()
    };
    let model = Arc::new(Model::from_flash(&flash, budget)?);
    let samples = read_samples(&out.join("heldout.jsonl"), model.schema())?;
    let found = evaluate(&model, &samples, 1)?;
    found.check_scores()?;
    Ok(CouponRun { found, model, bundle_bytes: packed.bytes, flash_bytes: flash.bytes()? })
}

fn criteo(args: &DemoArgs, out: &Path) -> Result<(CriteoReport, String)> {
    let bundle = out.join("criteo.hatch");
    let start = Instant::now();
    let bar = serve::progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let packed = synthetic::pack_driver(args.rows_max, &bundle, &mut |rows, total| {
        bar.set_length(total);
        bar.inc(rows);
    });
    bar.finish_and_clear();
    let (packed, packing) = (packed?, start.elapsed().as_secs_f64());

    let flash = serve::install(&bundle, &out.join("flash"))?;
    let installing = start.elapsed().as_secs_f64() - packing;
    let rows = packed.schema.tables.iter().map(|t| t.rows).sum();
    let (count, size) = (report::count(rows), report::bytes(packed.bytes));
    let mut report = CriteoReport {
        rows,
        bundle_bytes: packed.bytes,
        flash_bytes: flash.bytes()?,
        memory_bytes: 0,
        latency: Percentiles::default(),
        latency_repeated: Percentiles::default(),
        hit_rate: 0.0,
        lookups: Lookups::default(),
    };
    let served = serve_criteo(args, out, &flash, &mut report)?;
    let text = format!(
        "{count} rows in 26 tables packed into {size} in {packing:.1} s, installed on flash in \
         {installing:.1} s\n{served}"
    );
    Ok((report, text))
}

/// The result of serving the Criteo-shaped model.
#[derive(Default)]
struct Served {
    latencies: Latencies,
    repeated: Latencies,
    rows: Lookups,
    counters: Counters,
    slices: Vec<TimeSlice>,
}

fn serve_criteo(
    args: &DemoArgs,
    out: &Path,
    flash: &Flash,
    report: &mut CriteoReport,
) -> Result<String> {
    let budget = Budget {
        cache_bytes_max: CRITEO_CACHE_BYTES,
        resident_bytes_max: 4 << 20,
        batch_max: CANDIDATES as u32,
        ..Budget::default()
    };
    let start = Instant::now();
    let model = Arc::new(Model::from_flash(flash, budget)?);
    let opened = start.elapsed();

    let served = drive(&model, flash, args.requests)?;
    report.memory_bytes = model.memory().total();
    report.latency = served.latencies.percentiles();
    report.latency_repeated = served.repeated.percentiles();
    (report.hit_rate, report.lookups) = (served.counters.hit_rate(), served.rows);

    let plot = out.join("criteo.svg");
    plot::over_time(&plot, "Criteo-shaped model: latency and hit rate", &served.slices)?;
    Ok(format!(
        "opened in {:.0} ms; served {} requests on one thread,\n\
         each of a driver with a history of 50 keys and {CANDIDATES} candidates\n\n{}\n{}\n\
         {} on flash; {}\nplot {}",
        1e3 * opened.as_secs_f64(),
        report::count(report.latency.requests),
        served_table(&served),
        serve::memory_table(&model),
        report::bytes(report.flash_bytes),
        rows_line(&served.rows),
        plot.display()
    ))
}

/// Serves a fixed number of power-law requests, so that every run has the same counts. The time to
/// draw the keys is not measured.
fn drive(model: &Arc<Model>, flash: &Flash, requests: u32) -> Result<Served> {
    let mut workload =
        Workload::new(flash, &Distribution::PowerLaw { alpha: POWERLAW }, BagSizes::Full, 1)?;
    let (mut worker, mut batch, mut served) =
        (serve::worker(model), model.batch(), Served::default());

    let start = Instant::now();
    for slice in 1..=SLICES {
        let (before, mut latencies) = (worker.counters(), Latencies::default());
        let [first, end] = [slice - 1, slice].map(|n| u64::from(requests) * u64::from(n));
        for _ in first / u64::from(SLICES)..end / u64::from(SLICES) {
            workload.fill(&mut batch, CANDIDATES)?;
            let sent = Instant::now();
            let scores = worker.score(&batch, None)?;
            latencies.record(sent.elapsed());
            served.rows.count(scores.statuses);
        }
        let counters = worker.counters().since(&before);
        let seconds = start.elapsed().as_secs_f64();
        served.slices.push(TimeSlice::new(seconds, &latencies.percentiles(), &counters));
        served.latencies.add(&latencies);
    }

    served.counters = worker.counters();
    for _ in 0..REPEATED {
        let samples = workload.request(CANDIDATES);
        batch.clear();
        // Each is a request of its own in the batch, so nothing is shared.
        samples.iter().try_for_each(|sample| batch.push(model.schema(), sample))?;
        let sent = Instant::now();
        worker.score(&batch, None)?;
        served.repeated.record(sent.elapsed());
    }
    Ok(served)
}

fn served_table(served: &Served) -> comfy_table::Table {
    let mut table = report::table(&["Criteo-shaped model", "value"]);
    let p = served.latencies.percentiles();
    let pages = served.counters.pages as f64 / p.requests.max(1) as f64;
    for (what, value) in [
        ("latency p50", format!("{:.0} µs", p.p50_us)),
        ("latency p99", format!("{:.0} µs", p.p99_us)),
        ("p50, driver repeated", format!("{:.0} µs", served.repeated.percentiles().p50_us)),
        ("hit rate, cached tables", report::percent(served.counters.hit_rate())),
        ("hit rate at the end", report::percent(served.slices.last().map_or(0.0, |w| w.hit_rate))),
        ("flash pages a request", format!("{pages:.1}")),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    table
}
