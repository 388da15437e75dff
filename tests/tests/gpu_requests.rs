//! Requests of the model families with lookups and dense network on a GPU against the same model on the CPU: scores and
//! statuses to the bit whatever is cached; and what the driver is asked for where every row is there. Runs on the stand-in
//! for the driver, or with HATCHBACK_GPU=real on the machine's GPU.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::budget::Budget;
use hatchback::disk;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::schema::Placement;
use hatchback::score::{SystemClock, Worker};
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::{batch_of, install_spec, repository, score_all, tiny_budget};
use hatchback_tests::reference::same_bits;
use hatchback_tests::standin;
use hatchback_tools::pack::read_samples;
use hatchback_tools::spec::CodecChoice;
use std::sync::Arc;

const FAMILIES: [&str; 4] = ["dlrm", "dcnv2", "deepfm", "wide_deep"];

/// A worker with room for every row, on the CPU or on `device` with the dense network.
fn worker(flash: &Flash, budget: Budget, device: &Device) -> Worker {
    let model =
        Model::from_flash(flash, budget).unwrap().onto(device).unwrap().with_dense(flash, None).unwrap();
    let name = model.dense_runs_on();
    assert_eq!(name.starts_with("our kernels"), matches!(device, Device::Cuda(_)), "{name}");
    Worker::new(Arc::new(model), Arc::new(SystemClock::default()))
}

// One test: the stand-in counts for the whole process.
#[test]
fn scores_are_the_cpus_and_a_request_of_cached_rows_is_one_launch_and_one_wait() {
    let mut seed = 0;
    for family in FAMILIES {
        for placement in [Placement::Cached, Placement::Resident, Placement::Auto] {
            seed += 1;
            let spec = format!("tests/data/families/{family}/model.toml");
            let installed = install_spec(&spec, Some(CodecChoice::F16), Some(placement));
            let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
            let samples = read_samples(
                &repository(&format!("tests/data/families/{family}/probe.jsonl")),
                &installed.schema,
            );
            let samples = samples.unwrap();
            let mut budget = tiny_budget(&installed.schema, 32);
            (budget.resident_bytes_max, budget.cache_bytes_max) = (1 << 20, 1 << 22);
            budget.memory_bytes_max = 1 << 28;
            let device = Device::Cuda(standin::gpu(seed));
            let (mut cpu, mut gpu) = (worker(&flash, budget, &Device::Cpu), worker(&flash, budget, &device));
            // First with misses, then with none.
            for size in [5, 1, 32, 7] {
                let (expected, got) =
                    (score_all(&mut cpu, &samples, size), score_all(&mut gpu, &samples, size));
                assert!(same_bits(&got.0, &expected.0), "{family}, {placement:?}, batch {size}");
                assert_eq!(got.1, expected.1, "{family}, {placement:?}, batch {size}");
            }
            // A key that is nowhere is never cached, so it is asked for again.
            let mut known = samples.clone();
            known.retain(|s| {
                let batch = batch_of(&Arc::clone(cpu.model()), std::slice::from_ref(s));
                cpu.score(&batch, None).unwrap().status().absent == 0
            });
            assert!(known.len() > 6);
            let batches: Vec<_> = known.chunks(6).map(|s| batch_of(gpu.model(), s)).collect();
            let counts = || standin::load().map(|s| s.counts());
            for batch in &batches {
                let before = counts();
                gpu.score(batch, None).unwrap();
                if let (Some(before), Some(after)) = (before, counts()) {
                    let [launches, waits, copies] = [
                        after.launches - before.launches,
                        after.waits - before.waits,
                        after.copies - before.copies,
                    ];
                    assert_eq!((launches, waits, copies), (1, 1, 0), "{family}, {placement:?}");
                }
            }
        }
    }
}
