//! The hit rates that `plan` expects beside those that a worker counts on the same requests.

use crate::cli::{coupon, printed, refused, report_of};
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Serving, ServingError};
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::targets::Target;
use hatchback_server::front_bytes;
use hatchback_tools::serve::install;
use hatchback_tools::workload::key_distributions::{BagSizes, Distribution, Workload};
use hatchback_tools::workload::synthetic::pack_criteo;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

const SAMPLES: usize = 4_000;
const WARM_UP_PERCENT: usize = 50;
/// Largest difference from the measured hit rate, in points.
const DIFFERENCE_MAX: f64 = 1.0;

/// Writes samples to the file and returns them.
fn write_log(flash: &Flash, path: &Path) -> Vec<Sample> {
    let keys = Distribution::PowerLaw { alpha: 1.05 };
    let mut workload = Workload::new(flash, &keys, BagSizes::Full, 7).unwrap();
    let samples: Vec<Sample> = (0..SAMPLES).map(|_| workload.sample().clone()).collect();
    let names: Vec<&str> =
        flash.manifest().schema.features.iter().map(|f| f.name.as_str()).collect();
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    for sample in &samples {
        let sparse: serde_json::Map<String, serde_json::Value> = names
            .iter()
            .zip(&sample.sparse)
            .map(|(n, k)| ((*n).to_owned(), k.clone().into()))
            .collect();
        let line = serde_json::json!({ "dense": sample.dense, "sparse": sparse });
        writeln!(file, "{line}").unwrap();
    }
    file.flush().unwrap();
    samples
}

/// Returns the hit rate that a worker counts after the warm-up, per cent.
fn measure(flash: &Flash, cache_bytes_max: u64, samples: &[Sample]) -> f64 {
    let budget = Budget { cache_bytes_max, resident_bytes_max: 0, ..Budget::default() };
    let model = Arc::new(Model::from_flash(flash, budget).unwrap());
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let mut batch = model.batch();
    let mut warm = worker.counters();
    for (number, sample) in samples.iter().enumerate() {
        if number == samples.len() * WARM_UP_PERCENT / 100 {
            warm = worker.counters();
        }
        batch.clear();
        batch.push(model.schema(), sample).unwrap();
        worker.score_requests(&batch, None).unwrap();
    }
    100.0 * worker.counters().since(&warm).hit_rate()
}

/// Loads the model and swaps it with itself in a process that has `bytes` bytes of memory for it.
fn swap_within(bytes: u64, flash: &Flash, budget: Budget) -> Result<(), ServingError> {
    let serving = Serving::new(bytes, budget.reads_max, Arc::new(SystemClock::default()));
    serving.load("m", flash, budget).unwrap();
    serving.swap("m", flash, budget, &|_| {}).map(drop)
}

#[test]
fn planned_hit_rates_are_within_a_point_of_measured_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    pack_criteo(20_000, &path("m.hatch"), &mut |_, _| ()).unwrap();
    let flash = install(&path("m.hatch"), &path("m.flash")).unwrap();
    let samples = write_log(&flash, &path("log.jsonl"));

    for name in ["base.toml", "cpu.toml"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets").join(name);
        std::fs::copy(from, path(name)).unwrap();
    }
    let (log, model_path, svg, car) =
        (text("log.jsonl"), text("m.flash"), text("p.svg"), text("car.toml"));
    let warm_up = WARM_UP_PERCENT.to_string();
    let plan = report_of(&[
        "plan",
        &log,
        "--model",
        &model_path,
        "--resident-mib",
        "0",
        "--warm-up-percent",
        &warm_up,
        "--hit-percent",
        "75,80",
        "--plot",
        &svg,
        "--write-target",
        &car,
    ]);
    assert!(plan["too_short"].is_null(), "{plan}");
    let sizes = plan["sizes"].as_array().unwrap();
    assert!(std::fs::read_to_string(path("p.svg")).unwrap().contains("misses"));
    let mut is_sampled = false;
    // A worker with smaller caches reads so many pages that a slow device takes minutes.
    for size in sizes.iter().skip(8).step_by(3) {
        let bytes = size["cache_bytes"].as_u64().unwrap();
        let (planned, found) =
            (size["hit_percent"].as_f64().unwrap(), measure(&flash, bytes, &samples));
        println!("{bytes} bytes: planned {planned:.2}, measured {found:.2}");
        assert!((planned - found).abs() <= DIFFERENCE_MAX, "{bytes} bytes: {planned} {found}");
        is_sampled |= size["slots"].as_u64().unwrap() > 2 * 2048 * 14;
    }
    assert!(is_sampled, "no size is large enough to be sampled");

    let bytes = plan["wishes"][1]["cache_bytes"].as_u64().unwrap();
    let found = measure(&flash, bytes, &samples);
    assert!((found - 80.0).abs() <= DIFFERENCE_MAX, "{found} with the size for 80 %");
    let target = Target::load(&path("car.toml")).unwrap();
    assert_eq!(target.budget.cache_bytes_max, bytes);
    let model = Model::from_flash(&flash, target.budget).unwrap();
    let front = front_bytes(&target.server).iter().map(|(_, bytes)| bytes).sum::<u64>();
    let (model_bytes, update) = (model.memory().total(), model.update_bytes());
    assert_eq!(model_bytes + update + front, target.budget.memory_bytes_max);

    // The target has room to swap generations, and none to spare.
    swap_within(model_bytes + update, &flash, target.budget).unwrap();
    let too_little = swap_within(model_bytes, &flash, target.budget);
    assert!(matches!(too_little, Err(ServingError::Memory { .. })));

    // A plan that fails keeps the earlier target.
    let earlier = std::fs::read_to_string(&car).unwrap();
    let args =
        ["plan", &log, "--model", &model_path, "--resident-mib", "0", "--write-target", &car];
    let inherits = ["--hit-percent", "75", "--inherits", "nosuch"].as_slice();
    let itself = ["--hit-percent", "75", "--inherits", "car"].as_slice();
    let too_high = ["--hit-percent", "99.9999"].as_slice();
    for (wrong, named) in [(inherits, "nosuch"), (itself, "inherits from"), (too_high, "99.9999")] {
        let said = refused(&[&args[..], wrong].concat());
        assert!(said.contains(named), "{wrong:?}: {said}");
        assert_eq!(std::fs::read_to_string(&car).unwrap(), earlier, "{wrong:?}");
    }
}

#[test]
fn counts_plan_what_an_independent_stream_of_lookups_hits() {
    let folder = tempfile::tempdir().unwrap();
    let spec = coupon("model.toml");
    let model = folder.path().join("c.hatch").display().to_string();
    printed(&["pack", &spec, "--out", &model, "--codec", "u8"]);
    let plan = report_of(&["plan", &spec, "--model", &model, "--resident-mib", "0"]);
    let rates: Vec<f64> = plan["sizes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["hit_percent"].as_f64().unwrap())
        .collect();
    assert!(rates.windows(2).all(|pair| pair[0] <= pair[1] + 0.5), "{rates:?}");
    assert!(*rates.last().unwrap() > 99.0 && rates[0] < 99.0, "{rates:?}");
}
