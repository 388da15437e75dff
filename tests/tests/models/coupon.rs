//! The demo: a DLRM trained on real coupon data. Compares the scores of all held-out rows with
//! those of PyTorch, and measures what 8-bit rows cost in AUC.

use hatchback::clock::SystemClock;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::Placement;
use hatchback::schema::sample::Sample;
use hatchback_tests::models::{install_spec, open_model, repository, score_all};
use hatchback_tests::reference;
use hatchback_tools::pack::read_samples;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::report::metrics;
use std::sync::Arc;

/// Returns the scores of all held-out rows, and the rows.
fn scores(codec: CodecChoice, placement: Option<Placement>) -> (Vec<f32>, Vec<Sample>) {
    let installed = install_spec("tools/demo/coupon/model.toml", Some(codec), placement);
    let samples =
        read_samples(&repository("tools/demo/coupon/heldout.jsonl"), &installed.schema).unwrap();
    // The cache has room for a tenth of the rows, so that most lookups miss.
    let budget = Budget { cache_bytes_max: 32 << 10, misses_max: 256, ..Budget::default() };
    let model = Arc::new(open_model(&installed.flash, budget).unwrap());
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    let (scores, status) = score_all(&mut worker, &samples, 64);
    assert_eq!((status.defaulted, status.damaged), (0, 0));
    (scores, samples)
}

fn auc(scores: &[f32], samples: &[Sample]) -> f64 {
    let labels: Vec<f32> = samples.iter().map(|s| s.label(0).expect("a label")).collect();
    let auc = reference::auc(scores, &labels);
    assert!((metrics::auc(scores, &labels).unwrap() - auc).abs() < 1e-12, "the two AUCs differ");
    auc
}

#[test]
fn held_out_scores_are_pytorchs_and_eight_bits_cost_nothing() {
    let (exact, samples) = scores(CodecChoice::F32, None);
    assert!(samples.len() > 2000);
    let recorded: Vec<f32> =
        samples.iter().map(|s| s.score(0).expect("a recorded score")).collect();
    let off = metrics::largest_difference(&exact, &recorded);
    let auc_exact = auc(&exact, &samples);
    println!("{} rows, at most {off:.1e} from PyTorch, AUC {auc_exact:.5}", samples.len());
    assert!(off <= 1e-4);
    assert!((auc_exact - auc(&recorded, &samples)).abs() < 1e-4);
    assert!(auc_exact > 0.7, "the demo has learnt something");
    for (codec, bound) in [(CodecChoice::F16, 0.0002), (CodecChoice::U8, 0.001)] {
        for placement in [None, Some(Placement::Cached)] {
            let (coarse, _) = scores(codec, placement);
            let auc = auc(&coarse, &samples);
            println!("{codec:?}, {placement:?}: AUC {auc:.5}");
            assert!((auc - auc_exact).abs() <= bound);
        }
    }
}
