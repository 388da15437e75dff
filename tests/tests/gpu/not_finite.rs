//! A score that is NaN or infinite is an error of the request that holds it, on the CPU and on the
//! GPU. Other requests of the batch keep their scores, and every output of a sample is checked.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::request::error::NotFinite;
use hatchback::request::pipeline::{RequestError, Ticket};
use hatchback::request::serving::Serving;
use hatchback::request::worker::{ScoreError, Worker};
use hatchback::schema::KeySpace;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, batch_for, open_model};
use hatchback_tests::{onnx, standin};
use hatchback_tools::pack::spec::CodecChoice;
use std::sync::Arc;

const NAME: &str = "squares";
/// The square of this value is infinite.
const LARGE: f32 = 1e30;

/// A model whose scores are two dense features, a row of two values, and the squares of the dense
/// features.
fn model() -> Packed {
    let plan = ModelPlan {
        name: NAME.to_owned(),
        sequence: 1,
        seed: 3,
        dense: 2,
        tables: vec![TablePlan::cached(KeySpace::Index, 9, 2, CodecChoice::F32)],
        features: vec![FeaturePlan::one_hot(0)],
    };
    plan.pack_with(onnx::concat_and_square)
}

/// Returns a request with these dense features, two a sample.
fn request(packed: &Packed, dense: &[f32]) -> Batch {
    let sample = |pair: &[f32]| Sample {
        dense: pair.to_vec(),
        sparse: vec![vec![pair[0] as u64 % 9]],
        ..Sample::default()
    };
    let samples: Vec<Sample> = dense.chunks(2).map(sample).collect();
    batch_for(&packed.schema, samples.len(), &samples)
}

#[test]
fn only_the_request_whose_score_is_not_a_number_fails() {
    let _turn = standin::alone();
    let packed = model();
    let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
    for device in [Device::Cpu, Device::Cuda(standin::gpu(5))] {
        let clock = Arc::new(SystemClock::default());
        let serving = Serving::new(1 << 30, 16, clock).on(device, Default::default());
        let budget = Budget {
            cache_bytes_max: 1 << 20,
            slots: 4,
            batch_max: 6,
            batch_delay_us_max: u32::MAX,
            ..Budget::default()
        };
        serving.load(NAME, &flash, budget).unwrap();

        // The first round reads rows from flash; the second finds them in the cache.
        for round in 1..=2 {
            let requests = [
                request(&packed, &[1.0, 2.0]),
                request(&packed, &[3.0, 4.0, 5.0, LARGE]),
                request(&packed, &[-LARGE, 6.0]),
                request(&packed, &[7.0, 8.0, 1.0, 3.0]),
            ];
            let tickets: [Ticket; 4] = std::array::from_fn(|i| {
                serving.get(NAME).unwrap().submit(&requests[i], None).unwrap()
            });

            let squares = |ticket: &Ticket| -> Vec<f32> {
                let answer = ticket.wait().unwrap();
                assert!(answer.scores().statuses.iter().all(|status| status.fresh == 1));
                answer.scores().values.chunks(6).flat_map(|s| s[4..].to_vec()).collect()
            };
            assert_eq!(squares(&tickets[0]), [1.0, 4.0]);
            assert_eq!(squares(&tickets[3]), [49.0, 64.0, 1.0, 9.0]);
            let place = |ticket: &Ticket| match ticket.wait().err().unwrap() {
                RequestError::NotFinite(NotFinite { sample, output, value }) => {
                    assert_eq!(value, f32::INFINITY);
                    (sample, output)
                }
                e => panic!("{e}"),
            };
            // The infinite score is the last of its sample, or the last but one.
            assert_eq!((place(&tickets[1]), place(&tickets[2])), ((1, 5), (0, 4)));

            let stats = serving.get(NAME).unwrap().stats().unwrap();
            assert_eq!((stats.batches, stats.failed), (round, 2 * round), "one batch a round");
        }
    }
}

#[test]
fn a_worker_names_the_sample_and_the_output() {
    let _turn = standin::alone();
    let packed = model();
    let model = open_model(&packed.install(), Budget::default()).unwrap();
    let mut worker = Worker::new(Arc::new(model), Arc::new(SystemClock::default()));
    let error = worker.score(&request(&packed, &[1.0, 2.0, LARGE, 2.0]), None).err().unwrap();
    assert!(matches!(error, ScoreError::NotFinite(_)));
    assert!(error.to_string().starts_with("sample 1: score[4] is inf, "), "{error}");
}

/// A default row takes the place of a damaged one, so the score says nothing of the release.
#[test]
fn a_request_that_uses_a_damaged_row_is_no_fault_of_the_release() {
    let packed = model();
    let directory = packed.install();
    let segment = directory.join("g000000000001/t0000-0000.seg");
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&segment, bytes).unwrap();

    let flash = Flash::open(&disk::system(), &directory).unwrap();
    let serving = Serving::new(1 << 30, 16, Arc::new(SystemClock::default()));
    let budget = Budget { cache_bytes_max: 1 << 20, ..Budget::default() };
    serving.load(NAME, &flash, budget).unwrap();
    let served = serving.get(NAME).unwrap();
    let ticket = served.submit(&request(&packed, &[1.0, 2.0]), None).unwrap();
    assert_eq!(ticket.wait().unwrap().scores().status().damaged, 1);
    let ticket = served.submit(&request(&packed, &[1.0, LARGE]), None).unwrap();
    assert!(matches!(ticket.wait().err().unwrap(), RequestError::NotFinite(_)));
    assert_eq!(served.stats().unwrap().failed, 0);
}
