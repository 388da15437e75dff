//! `demo`: the whole car path on real input, in one command. A model that PyTorch trained on the
//! in-vehicle coupon data is packed, laid on flash and scored row by row against its labels and
//! PyTorch's own scores; then a Criteo-shaped model of a few million rows makes the flash tier
//! work.

use crate::eval::{Evaluation, evaluate};
use crate::pack::spec::CodecChoice;
use crate::pack::{Overrides, pack_file, read_samples};
use crate::report;
use crate::report::metrics::{Latencies, Lookups};
use crate::report::plot::{self, Window};
use crate::serve;
use crate::workload::key_distributions::{BagSizes, Distribution, Workload};
use crate::workload::synthetic;
use anyhow::{Context, Result};
use clap::Args;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Counters;
use hatchback::schema::Placement;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Packs, serves and measures a real model and a large synthetic one
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// Where the bundles, flash directories and plots go
    #[arg(long, default_value = "target/demo")]
    out: PathBuf,
    /// Rows of each of the largest tables of the Criteo-shaped model
    #[arg(long, default_value_t = 500_000)]
    rows_max: u64,
    /// Embedding cache of the Criteo-shaped model, MiB
    #[arg(long, default_value_t = 8)]
    cache_mib: u64,
    /// How long the Criteo-shaped model is served, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// The coupon model as the trainer left it: name and content of each file.
const COUPON: [(&str, &[u8]); 5] = [
    ("model.toml", include_bytes!("../demo/coupon/model.toml")),
    ("dense.onnx", include_bytes!("../demo/coupon/dense.onnx")),
    ("tables.safetensors", include_bytes!("../demo/coupon/tables.safetensors")),
    ("probe.jsonl", include_bytes!("../demo/coupon/probe.jsonl")),
    ("heldout.jsonl", include_bytes!("../demo/coupon/heldout.jsonl")),
];

/// The coupon tables take 240 KB as f32; the cache gets this much.
const COUPON_CACHE_BYTES: u64 = 32 << 10;
/// Samples in a request to the Criteo-shaped model.
const CRITEO_BATCH: usize = 16;
/// Exponent of its keys' power law, as NVIDIA's synthetic models have it.
const POWERLAW: f64 = 1.05;
/// Windows that its plot shows.
const WINDOWS: u32 = 50;

/// Runs the command.
///
/// # Errors
/// The output directory cannot be written; anything else is a defect.
pub fn run(args: &DemoArgs) -> Result<()> {
    fresh_directory(&args.out)?;
    println!("1. A DLRM that PyTorch trained on the in-vehicle coupon data (UCI 603, CC BY 4.0)\n");
    coupon(&args.out.join("coupon"))?;
    println!("\n2. A Criteo-shaped DLRM with synthetic rows and power-law keys\n");
    criteo(args, &args.out.join("criteo"))
}

/// Starts over: what an earlier demo left would be live already.
fn fresh_directory(out: &Path) -> Result<()> {
    for part in ["coupon", "criteo"] {
        let path = out.join(part);
        match std::fs::remove_dir_all(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).context(path.display().to_string());
            }
            _ => {}
        }
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn coupon(out: &Path) -> Result<()> {
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
        "largest difference",
        "hit rate",
        "p50",
        "p99",
    ]);
    let mut last = None;
    for codec in [CodecChoice::F32, CodecChoice::U8] {
        let (found, model, sizes) = coupon_as(codec, out)?;
        let name = format!("{codec:?}").to_lowercase();
        let difference = found.score_difference_max.map_or("-".to_owned(), |d| format!("{d:.1e}"));
        let cells = [
            name,
            report::bytes(sizes.0),
            report::bytes(sizes.1),
            digits(found.auc),
            digits(found.logloss),
        ];
        let time = |us: f64| format!("{us:.0} µs");
        let rest = [
            difference,
            report::percent(found.hit_rate),
            time(found.latency.p50_us),
            time(found.latency.p99_us),
        ];
        table.add_row(cells.into_iter().chain(rest));
        last = Some((found, model));
    }
    let Some((found, model)) = last else { return Ok(()) };
    let (auc, logloss) = (digits(found.reference_auc), digits(found.reference_logloss));
    let blank = || String::new();
    table.add_row([
        "PyTorch f32".to_owned(),
        blank(),
        blank(),
        auc,
        logloss,
        blank(),
        blank(),
        blank(),
        blank(),
    ]);
    println!("{table}");
    println!(
        "{} held-out rows, one a request; {}",
        report::count(found.samples as u64),
        rows_line(&found.rows)
    );
    let plot = out.join("coupon.svg");
    plot::over_time(
        &plot,
        "Coupon model: latency and hit rate, cold start to warm",
        &found.windows,
    )?;
    println!(
        "memory {} ({} rows of cache); plot {}",
        report::bytes(model.memory().total()),
        model.cache_slots(),
        plot.display()
    );
    Ok(())
}

fn digits(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |v| format!("{v:.5}"))
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

/// Packs the coupon model with every table in `codec` behind the cache, and serves the held-out
/// rows. Returns what was found, the model, and the bytes of the bundle and on flash.
fn coupon_as(codec: CodecChoice, out: &Path) -> Result<(Evaluation, Arc<Model>, (u64, u64))> {
    let name = format!("{codec:?}").to_lowercase();
    let bundle = out.join(format!("coupon-{name}.hatch"));
    let overrides = Overrides { codec: Some(codec), placement: Some(Placement::Cached) };
    let packed = pack_file(&out.join("model.toml"), &bundle, overrides, &mut |_, _| {})?;
    let flash = serve::lay_on_flash(&bundle, &out.join(format!("{name}.flash")))?;
    let budget = Budget {
        cache_bytes_max: COUPON_CACHE_BYTES,
        batch_max: 1,
        misses_max: 256,
        ..Budget::default()
    };
    let model = Arc::new(Model::from_flash(&flash, budget)?);
    let samples = read_samples(&out.join("heldout.jsonl"), model.schema())?;
    Ok((evaluate(&model, &samples, 1)?, model, (packed.bytes, flash.bytes()?)))
}

fn criteo(args: &DemoArgs, out: &Path) -> Result<()> {
    let bundle = out.join("criteo.hatch");
    let start = Instant::now();
    let bar = serve::progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let packed = synthetic::pack_criteo(args.rows_max, &bundle, &mut |rows, total| {
        bar.set_length(total);
        bar.inc(rows);
    });
    bar.finish_and_clear();
    let (packed, packing) = (packed?, start.elapsed().as_secs_f64());
    let flash = serve::lay_on_flash(&bundle, &out.join("flash"))?;
    let laying = start.elapsed().as_secs_f64() - packing;
    let rows = report::count(packed.schema.tables.iter().map(|t| t.rows).sum());
    let size = report::bytes(packed.bytes);
    println!(
        "{rows} rows in 26 tables packed into {size} in {packing:.1} s, laid on flash in {laying:.1} s"
    );
    serve_criteo(args, out, &flash)
}

/// What serving for a while found.
#[derive(Default)]
struct Served {
    latencies: Latencies,
    rows: Lookups,
    counters: Counters,
    windows: Vec<Window>,
}

fn serve_criteo(args: &DemoArgs, out: &Path, flash: &Flash) -> Result<()> {
    let budget = Budget {
        cache_bytes_max: args.cache_mib << 20,
        resident_bytes_max: 4 << 20,
        batch_max: CRITEO_BATCH as u32,
        ..Budget::default()
    };
    let start = Instant::now();
    let model = Arc::new(Model::from_flash(flash, budget)?);
    let opened = start.elapsed();
    let served = drive(&model, flash, Duration::from_secs_f64(args.seconds))?;
    println!(
        "opened in {:.0} ms; served {} requests of {CRITEO_BATCH} samples on one thread\n",
        1e3 * opened.as_secs_f64(),
        report::count(served.latencies.percentiles().requests)
    );
    println!("{}\n{}", served_table(&served), serve::memory_table(&model));
    println!("{} on flash; {}", report::bytes(flash.bytes()?), rows_line(&served.rows));
    let plot = out.join("criteo.svg");
    plot::over_time(&plot, "Criteo-shaped model: latency and hit rate", &served.windows)?;
    println!("plot {}", plot.display());
    Ok(())
}

/// Serves power-law requests for `time`; drawing the keys is not measured.
fn drive(model: &Arc<Model>, flash: &Flash, time: Duration) -> Result<Served> {
    let mut workload =
        Workload::new(flash, &Distribution::PowerLaw { alpha: POWERLAW }, BagSizes::Full, 1)?;
    let (mut worker, mut batch, mut served) =
        (serve::worker(model), model.batch(), Served::default());
    let start = Instant::now();
    for window in 1..=WINDOWS {
        let (before, mut latencies) = (worker.counters(), Latencies::default());
        while start.elapsed() < time * window / WINDOWS {
            workload.fill(&mut batch, CRITEO_BATCH)?;
            let sent = Instant::now();
            let scores = worker.score(&batch, None)?;
            latencies.record(sent.elapsed());
            served.rows.count(scores.statuses);
        }
        let counters = worker.counters().since(&before);
        let seconds = start.elapsed().as_secs_f64();
        served.windows.push(Window::new(seconds, &latencies.percentiles(), &counters));
        served.latencies.add(&latencies);
    }
    served.counters = worker.counters();
    Ok(served)
}

fn served_table(served: &Served) -> comfy_table::Table {
    let mut table = report::table(&["Criteo-shaped model", "value"]);
    let p = served.latencies.percentiles();
    let pages = served.counters.pages as f64 / p.requests.max(1) as f64;
    for (what, value) in [
        ("latency p50", format!("{:.0} µs", p.p50_us)),
        ("latency p99", format!("{:.0} µs", p.p99_us)),
        ("hit rate, cached tables", report::percent(served.counters.hit_rate())),
        (
            "hit rate, last tenth",
            report::percent(served.windows.last().map_or(0.0, |w| w.hit_rate)),
        ),
        ("flash pages a request", format!("{pages:.1}")),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    table
}
