//! Maintenance on a damaged or slow disk: a page is rebuilt from the previous generation to the bit
//! or not at all, and maintenance pauses for a slow device. Failures name the seed.

use hatchback::clock::Clock;
use hatchback::flash::Flash;
use hatchback::io::disk::Disk;
use hatchback::limits::PAGE_BYTES;
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::share::{BusyBounds, Share, ThreadTime};
use hatchback::maintenance::step_size::StepSize;
use hatchback::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy};
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, batch_of};
use hatchback_tests::random::Random;
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::versions::Versions;
use hatchback_tools::pack::spec::CodecChoice;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const DIR: &str = SimDisk::FLASH;
const NOW: Duration = Duration::from_secs(20_000 * 24 * 60 * 60);

/// Rules that merge every delta and always allow the next scrub.
fn eager() -> MaintenanceRules {
    MaintenanceRules { deltas_max: 0, scrub_every: Duration::ZERO, ..MaintenanceRules::default() }
}

/// Installs three generations and merges the tables of the third. The second stays unmerged.
fn merged(versions: &Versions) -> (SimDisk, Flash) {
    let disk = SimDisk::default();
    versions.deltas[..2].iter().for_each(|bundle| drop(disk.install(bundle).unwrap()));
    let mut flash = disk.install(&versions.deltas[2]).unwrap();
    scrub(&mut flash);
    (disk, flash)
}

/// Runs maintenance until a scrub ends. Returns the numbers of repaired and of damaged pages.
fn scrub(flash: &mut Flash) -> (usize, usize) {
    let mut maintenance = Maintenance::new(eager(), None, CatalogEntries::default());
    loop {
        if let StepOutcome::ScrubEnded { repaired, damaged, .. } =
            maintenance.step(flash, NOW, 100).unwrap()
        {
            assert_eq!(maintenance.damage().len(), damaged);
            return (repaired, damaged);
        }
    }
}

fn base_of(flash: &Flash, table: usize) -> PathBuf {
    let of = flash.record().live.tables[table].base;
    Path::new(DIR).join(format!("g{:012}/t{table:04}-{:04}.seg", of.sequence, of.serial))
}

/// A page whose rows the live generation did not change is rebuilt to the bit. A page with
/// changed rows stays damaged, and no page is replaced by another.
#[test]
fn a_flipped_bit_is_repaired_from_the_previous_generation() {
    let (mut repaired, mut left) = (0, 0);
    for seed in 0..6 {
        let versions = Versions::changing(&[200, 200], 3000, 70 + seed);
        let (disk, mut flash) = merged(&versions);
        let mut random = Random::new(seed);

        for table in 0..2 {
            let base = base_of(&flash, table);
            let good = disk.read(&base, u64::MAX).unwrap();
            for page in 0..flash.table(table).unwrap().segments()[0].counts().data_pages as usize {
                disk.flip(
                    &base,
                    (page * PAGE_BYTES + 4) * 8
                        + random.below((PAGE_BYTES - 4) as u64 * 8) as usize,
                );
                let counts = scrub(&mut flash);
                assert_eq!(counts.0 + counts.1, 1, "seed {seed}, table {table}, page {page}");
                let now = disk.read(&base, u64::MAX).unwrap();
                assert_eq!(now == good, counts.0 == 1, "seed {seed}, table {table}, page {page}");
                (repaired, left) = (repaired + counts.0, left + counts.1);
                let content = good[page * PAGE_BYTES..][..PAGE_BYTES].try_into().unwrap();
                disk.write_page(&base, page as u32, content).unwrap();
            }
        }

        whole_generation(&flash, &versions, "repaired");
    }

    assert!(repaired > 0 && left > 0, "{repaired} repaired, {left} left: not all cases occurred");
}

/// If the live generation did not change a table, its pages are rebuilt even if no byte is
/// left.
#[test]
fn lost_pages_of_an_unchanged_table_are_rebuilt() {
    let versions = Versions::changing(&[12, 0], 3000, 80);
    let (disk, mut flash) = merged(&versions);
    for table in 0..2 {
        let (base, lost) = (base_of(&flash, table), [0; PAGE_BYTES]);
        let good = disk.read(&base, u64::MAX).unwrap();
        let pages = flash.table(table).unwrap().segments()[0].counts().data_pages;
        (0..pages).for_each(|page| disk.write_page(&base, page, &lost).unwrap());
        assert_eq!(scrub(&mut flash), (pages as usize, 0));
        assert!(disk.read(&base, u64::MAX).unwrap() == good, "table {table}");
    }
    // Rows that the live generation changed exist in no other segment.
    let (disk, mut flash) = merged(&Versions::new(3, 3000, 80));
    disk.write_page(&base_of(&flash, 0), 1, &[0; PAGE_BYTES]).unwrap();
    assert_eq!(scrub(&mut flash), (0, 1));
}

/// Both generations have the damaged segment, so nothing else holds its rows.
#[test]
fn a_page_that_both_generations_share_is_left_as_it_is() {
    let versions = Versions::new(2, 3000, 81);
    let disk = SimDisk::default();
    drop(disk.install(&versions.deltas[0]).unwrap());
    let mut flash = disk.install(&versions.deltas[1]).unwrap();
    disk.flip(&base_of(&flash, 0), PAGE_BYTES * 8 + 800);
    let rules = MaintenanceRules { deltas_max: 9, changed_percent_max: 100, ..eager() };
    let mut maintenance = Maintenance::new(rules, None, CatalogEntries::default());
    while !matches!(
        maintenance.step(&mut flash, NOW, 100).unwrap(),
        StepOutcome::ScrubEnded { repaired: 0, damaged: 1, .. }
    ) {}
    assert!(matches!(flash.repair_from_retained(&maintenance.damage()[0]), Ok(false)));
}

/// An install on a full disk removes the unfinished base of a merge in progress.
#[test]
fn a_merge_whose_file_is_gone_begins_again() {
    let versions = Versions::new(2, 3000, 81);
    let disk = SimDisk::default();
    drop(disk.install(&versions.deltas[0]).unwrap());
    let mut flash = disk.install(&versions.deltas[1]).unwrap();
    let mut maintenance = Maintenance::new(eager(), None, CatalogEntries::default());
    let (mut merged, mut lost) = (0, None);
    while merged < 2 {
        match maintenance.step(&mut flash, NOW, 3).unwrap() {
            StepOutcome::Compacted { .. } => merged += 1,
            StepOutcome::Merged { .. } if lost.is_none() => {
                let is_part = |path: &PathBuf| path.extension().is_some_and(|e| e == "part");
                lost = disk.paths().into_iter().find(is_part);
                lost.iter().for_each(|part| disk.lose(part));
            }
            _ => {}
        }
    }
    assert!(lost.is_some());
    whole_generation(&flash, &versions, "merged");
}

#[test]
fn a_merge_without_room_is_tried_again_after_an_hour() {
    const MINUTE: Duration = Duration::from_secs(60);
    let versions = Versions::new(2, 3000, 81);
    let disk = SimDisk::default();
    drop(disk.install(&versions.deltas[0]).unwrap());
    let mut flash = disk.install(&versions.deltas[1]).unwrap();
    let rules = MaintenanceRules { deltas_max: 0, ..MaintenanceRules::default() };
    let mut maintenance = Maintenance::new(rules, None, CatalogEntries::default());
    let mut is_merged = |now| loop {
        match maintenance.step(&mut flash, now, 100) {
            Ok(StepOutcome::Compacted { .. }) => return true,
            Ok(StepOutcome::Nothing) => return false,
            _ => {}
        }
    };

    disk.set_capacity(Some(disk.used()));
    assert!(!is_merged(NOW));
    disk.set_capacity(None);
    assert!(!is_merged(NOW + 59 * MINUTE));
    assert!(is_merged(NOW + 60 * MINUTE));
}

/// Maintenance stays below its share of the time and one step stays short, for any duration of the
/// disk's calls. The share is the car's, in the ordinary class.
#[test]
fn maintenance_pauses_for_a_slow_disk() {
    const BOUNDS: BusyBounds = BusyBounds { percent_min: 1, percent_max: 10 };
    let versions = Versions::new(3, 3000, 81);
    for (call_us, stall_us) in [(20, 20), (3_000, 3_000), (1_000, 200_000)] {
        let disk = SimDisk::default();
        versions.deltas.iter().for_each(|bundle| drop(disk.install(bundle).unwrap()));
        let mut flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
        let (clock, mut step_size) = (disk.clock(), StepSize::default());
        let mut maintenance = Maintenance::new(eager(), None, CatalogEntries::default());
        disk.slow(call_us, stall_us);
        let (start, mut busy, mut pages) = (clock.now(), Duration::ZERO, Vec::new());
        let time = || ThreadTime { now: clock.now(), waited: Duration::ZERO };
        let mut share = Share::new(BOUNDS, false, time());

        loop {
            let before = clock.now();
            pages.push(step_size.pages());
            let outcome = maintenance.step(&mut flash, NOW + before, step_size.pages()).unwrap();
            let took = clock.now() - before;
            busy += took;
            step_size.adapt(took);
            clock.pass(share.worked(time()).pause);
            share.paused(time());
            if matches!(outcome, StepOutcome::ScrubEnded { .. }) {
                break;
            }
        }

        let all = clock.now() - start;
        assert!(
            busy > Duration::ZERO && busy * 100 <= all * 10 + Duration::from_millis(1),
            "{busy:?} of {all:?}"
        );

        let most = *pages.iter().max().unwrap();
        assert!(
            if call_us == 20 { most > 30 } else { most <= 32 },
            "{most} pages at {call_us} us a call"
        );
        assert_eq!(whole_generation(&flash, &versions, "slowly"), 3);
        assert!(flash.record().live.tables.iter().all(|t| t.deltas.is_empty()));
    }
}

/// A request on a slow disk ends at its deadline, or later by the started calls only, and has the
/// status `late`.
#[test]
fn a_deadline_holds_on_a_slow_disk() {
    let table = TablePlan {
        miss: MissPolicy::Deadline,
        ..TablePlan::cached(KeySpace::Sparse, 5000, 16, CodecChoice::F32)
    };
    let plan = ModelPlan {
        name: "slow".to_owned(),
        sequence: 1,
        seed: 82,
        dense: 1,
        tables: vec![table],
        features: vec![FeaturePlan::one_hot(0)],
    };

    let (packed, disk) = (plan.pack(), SimDisk::default());
    let flash = disk.install(&packed.bundle).unwrap();

    // A started read of a simulated file always completes.
    let budget = Budget { reads_max: 2, ..Budget::default() };
    let model = Arc::new(Model::from_flash(&flash, budget).unwrap());
    let clock = disk.clock();
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(clock.clone()));
    let samples: Vec<Sample> = (0..64).map(|id| plan.sample(id)).collect();
    let batch = batch_of(&model, &samples);
    let (call, stall) = (Duration::from_millis(1), Duration::from_millis(40));
    disk.slow(call.as_micros() as u64, stall.as_micros() as u64);

    for deadline in [2, 5, 9].map(Duration::from_millis) {
        let before = clock.now();
        let status = worker.score(&batch, Some(before + deadline)).unwrap().status();
        let took = clock.now() - before;
        assert!(
            status.late && took <= deadline + stall + call * 2,
            "{took:?} for {deadline:?}: {status:?}"
        );
    }

    // With enough time, the status is not `late`.
    worker.fetch_deferred(usize::MAX);
    let status =
        worker.score(&batch, Some(clock.now() + Duration::from_secs(10))).unwrap().status();
    assert!(!status.late && status.defaulted == 0, "{status:?}");
}
