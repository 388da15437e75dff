//! Maintenance on a simulated disk keeps its rules, its budget and every row through installs,
//! device errors and power cuts. Failures name the seed.

use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk::Disk;
use hatchback::io::paired_record::PairedRecord;
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::compact::Compaction;
use hatchback::maintenance::scrub::Scrub;
use hatchback::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::random::Random;
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::versions::Versions;
use std::path::Path;
use std::time::Duration;

const DIR: &str = SimDisk::FLASH;
const HOUR: u64 = 60 * 60;
const DAYS: u64 = 20_000;

fn at(hour: u64) -> Duration {
    Duration::from_secs((DAYS * 24 + hour) * HOUR)
}

fn rules(wear_bytes_per_day_max: u64) -> MaintenanceRules {
    MaintenanceRules {
        deltas_max: 1,
        changed_percent_max: 100,
        scrub_every: Duration::from_secs(48 * HOUR),
        wear_bytes_per_day_max,
        busy_percent_min: 1,
        busy_percent_max: 100,
    }
}

/// Returns a disk with the first `n` generations installed.
fn installed(versions: &Versions, n: usize) -> (SimDisk, Flash) {
    let disk = SimDisk::default();
    let flash =
        (1..=n).fold(None, |_, g| Some(disk.install(&versions.deltas[g - 1]).unwrap())).unwrap();
    (disk, flash)
}

fn deltas(flash: &Flash) -> Vec<usize> {
    flash.record().live.tables.iter().map(|t| t.deltas.len()).collect()
}

/// Steps until no work is due or allowed, and returns what was done.
fn step_to_end(
    maintenance: &mut Maintenance,
    flash: &mut Flash,
    now: Duration,
) -> Vec<StepOutcome> {
    let mut all = Vec::new();
    loop {
        match maintenance.step(flash, now, 3).unwrap() {
            StepOutcome::Nothing => return all,
            waits @ StepOutcome::Waits { .. } => return [all, vec![waits]].concat(),
            outcome => all.push(outcome),
        }
        assert!(all.len() < 10_000, "maintenance never ends");
    }
}

#[test]
fn too_many_deltas_are_merged_and_then_all_is_scrubbed() {
    let versions = Versions::new(3, 400, 41);
    let (_disk, mut flash) = installed(&versions, 3);
    assert_eq!(deltas(&flash), [2, 2]);
    let mut maintenance = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    let outcomes = step_to_end(&mut maintenance, &mut flash, at(0));
    assert_eq!(deltas(&flash), [0, 0]);
    assert_eq!(outcomes.iter().filter(|d| matches!(d, StepOutcome::Compacted { .. })).count(), 2);
    assert!(
        matches!(
            outcomes.last(),
            Some(StepOutcome::ScrubEnded { damaged: 0, pages, .. }) if *pages > 0
        ),
        "{outcomes:?}"
    );
    assert_eq!(whole_generation(&flash, &versions, "merged"), 3);
    // No work is due before the next scrub.
    assert_eq!(step_to_end(&mut maintenance, &mut flash, at(47)), []);
    assert!(matches!(
        step_to_end(&mut maintenance, &mut flash, at(49)).last(),
        Some(StepOutcome::ScrubEnded { .. })
    ));
}

#[test]
fn one_delta_is_merged_once_enough_rows_changed() {
    let versions = Versions::new(2, 400, 42);
    let (_disk, mut flash) = installed(&versions, 2);
    let table = flash.table(1).unwrap();
    let percent = table.changed() as u64 * 100 / table.base_rows();
    drop(table);
    let with = |changed_percent_max| MaintenanceRules {
        deltas_max: 9,
        changed_percent_max,
        ..rules(u64::MAX)
    };
    let mut maintenance = Maintenance::new(with(percent + 1), None, CatalogEntries::default());
    step_to_end(&mut maintenance, &mut flash, at(0));
    assert_eq!(deltas(&flash)[1], 1);
    let mut maintenance = Maintenance::new(with(percent - 1), None, CatalogEntries::default());
    step_to_end(&mut maintenance, &mut flash, at(0));
    assert_eq!(deltas(&flash)[1], 0);
}

/// The merge of a table of several daily budgets takes several days and stays within each budget,
/// even with a power cut every night. No page is written twice.
#[test]
fn a_table_beyond_the_budget_of_a_day_is_merged_over_many() {
    let versions = Versions::new(3, 2000, 43);
    for (seed, cut) in [(1, false), (2, true), (3, true)] {
        let (disk, mut flash) = installed(&versions, 3);
        let tables = (0..2).map(|t| flash.table(t).unwrap().file_bytes()).sum::<u64>();
        let budget = 5 * 4096;
        let mut random = Random::new(seed);
        let mut maintenance = Maintenance::new(rules(budget), None, CatalogEntries::default());
        let (mut written, mut days) = (disk.written(), 0);
        let start = written;

        while deltas(&flash) != [0, 0] {
            let live = disk.read(&Path::new(DIR).join("live.a"), u64::MAX).unwrap().len() as u64;
            let outcomes = step_to_end(&mut maintenance, &mut flash, at(24 * days));
            let today = std::mem::replace(&mut written, disk.written());

            // The budget does not count the live record, which is written once for each table.
            assert!(
                disk.written() - today <= budget + 4 * live,
                "day {days}: {}",
                disk.written() - today
            );
            assert!(
                deltas(&flash) == [0, 0]
                    || matches!(outcomes.last(), Some(StepOutcome::Waits { .. })),
                "{outcomes:?}"
            );

            // A clock that goes back frees no bytes of the budget.
            assert!(matches!(
                step_to_end(&mut maintenance, &mut flash, at(0) / 2).last(),
                None | Some(StepOutcome::Waits { .. } | StepOutcome::ScrubEnded { .. })
            ));

            days += 1;
            assert!(days < 100, "never ends");
            if cut {
                let entries = maintenance.entries().clone();
                disk.reboot(random.bits());
                flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
                maintenance = Maintenance::new(rules(budget), None, entries);
            }
        }
        assert!(days >= 4, "{days} days");

        // No durable page is written twice.
        let total = disk.written() - start;
        assert!(total <= tables + 3 * 4096, "{total} written for {tables}, seed {seed}");
        assert_eq!(whole_generation(&flash, &versions, "after all days"), 3);
    }
}

#[test]
fn a_budget_below_one_index_waits_and_breaks_nothing() {
    let versions = Versions::new(3, 400, 43);
    let (_disk, mut flash) = installed(&versions, 3);
    let mut maintenance = Maintenance::new(rules(1), None, CatalogEntries::default());
    let outcomes = step_to_end(&mut maintenance, &mut flash, at(0));
    assert!(
        matches!(outcomes.last(), Some(StepOutcome::Waits { .. })) && deltas(&flash) == [2, 2],
        "{outcomes:?}"
    );
}

#[test]
fn a_merge_of_what_is_no_longer_live_is_dropped() {
    let versions = Versions::new(4, 900, 44);
    let (disk, mut flash) = installed(&versions, 3);
    let mut maintenance = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    assert!(matches!(maintenance.step(&mut flash, at(0), 1).unwrap(), StepOutcome::Merged { .. }));
    flash = disk.install(&versions.deltas[3]).unwrap();
    step_to_end(&mut maintenance, &mut flash, at(0));
    assert_eq!(deltas(&flash), [0, 0]);
    assert_eq!(whole_generation(&flash, &versions, "after the install"), 4);
}

/// Otherwise the merge would lose the delta that was installed during the merge.
#[test]
fn a_compaction_does_not_replace_a_state_installed_since_its_start() {
    let versions = Versions::new(3, 400, 45);
    let (disk, flash) = installed(&versions, 2);
    let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
    while merge.step(&flash, 100, u64::MAX).unwrap() {}
    let mut flash = disk.install(&versions.deltas[2]).unwrap();
    let refused = merge.finish(&mut flash).unwrap_err().to_string();
    assert!(refused.contains("another state became live"), "{refused}");
    assert_eq!(
        whole_generation(&Flash::open(&disk.shared(), Path::new(DIR)).unwrap(), &versions, ""),
        3
    );
}

/// A delta with the hot list of its parent brings none. The parent's list stays, through every
/// change of the segments.
#[test]
fn a_hot_list_outlives_deltas_compactions_and_rollbacks() {
    let versions = Versions::new(4, 900, 49);
    let manifest =
        |n: usize| BundleReader::open(&versions.deltas[n - 1]).unwrap().manifest().clone();
    assert!(manifest(1).tables.iter().all(|t| t.hot.is_some()));
    assert!(manifest(2).tables.iter().all(|t| t.hot.is_none()), "the lists are nearly the same");

    let (disk, mut flash) = installed(&versions, 1);
    let lists = |flash: &Flash| [0, 1].map(|t| flash.hot_keys(t).unwrap());
    let first = lists(&flash);
    assert!(first.iter().all(|list| list.len() > 500));

    let mut held = first;
    for n in 2..=4 {
        flash = disk.install(&versions.deltas[n - 1]).unwrap();
        for (t, list) in held.iter_mut().enumerate() {
            if manifest(n).tables[t].hot.is_some() {
                *list = flash.hot_keys(t).unwrap();
            }
        }
        assert_eq!(lists(&flash), held, "generation {n}");
    }

    let mut maintenance = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    step_to_end(&mut maintenance, &mut flash, at(0));
    assert_eq!((deltas(&flash), lists(&flash)), (vec![0, 0], held));

    flash = flash.rollback().unwrap();
    flash.reclaim();
    assert!(lists(&flash).iter().all(|list| list.len() > 500));

    let listed: u64 = lists(&flash).iter().map(|list| 8 * list.len() as u64).sum();
    assert!(flash.bytes().unwrap() > listed);
}

/// Another process removes the file that the merge writes; the merge must then not become live.
#[test]
fn a_compaction_does_not_make_a_missing_segment_live() {
    let versions = Versions::new(2, 400, 46);
    let (disk, mut flash) = installed(&versions, 2);
    let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
    flash.reclaim();
    while merge.step(&flash, 1, u64::MAX).unwrap() {
        flash.reclaim();
    }
    let part = disk.paths().into_iter().find(|p| p.extension().is_some_and(|e| e == "part"));
    disk.remove_file(&part.expect("reclaiming keeps a merge of the live state")).unwrap();
    merge.finish(&mut flash).unwrap_err();
    assert_eq!(
        whole_generation(&Flash::open(&disk.shared(), Path::new(DIR)).unwrap(), &versions, ""),
        2
    );
}

/// A table with the maximum of deltas refuses another one.
#[test]
fn a_delta_too_many_is_refused_before_it_is_written() {
    let versions = Versions::new(3, 100, 47);
    let (disk, flash) = installed(&versions, 2);
    let mut record = flash.record().clone();
    let delta = record.live.tables[0].deltas[0];
    record.live.tables[0].deltas = vec![delta; hatchback::limits::DELTAS_MAX];
    let live = Path::new(DIR).join("live.a");
    disk.create(&live).unwrap().write_all(&record.encode(99)).unwrap();
    let written = disk.written();
    let refused = disk.install(&versions.deltas[2]).err().unwrap().to_string();
    assert!(refused.contains("table `t0` takes no further delta"), "{refused}");
    assert_eq!(disk.read(&live, u64::MAX).unwrap(), record.encode(99));
    assert_eq!(disk.written(), written, "refused only after it was written");
}

/// A damaged page stops the merge of its table, but neither other merges nor the scrub that finds
/// it.
#[test]
fn damage_stops_one_table_only() {
    let versions = Versions::new(3, 400, 48);
    let (disk, mut flash) = installed(&versions, 3);
    disk.flip(&Path::new(DIR).join("g000000000001/t0000-0000.seg"), 5000 * 8);
    let mut maintenance = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    let (mut errors, mut ended) = (0, false);
    for _ in 0..1000 {
        match maintenance.step(&mut flash, at(0), 3) {
            Err(_) => errors += 1,
            Ok(outcomes) => ended |= matches!(outcomes, StepOutcome::ScrubEnded { damaged: 1, .. }),
        }
    }
    assert_eq!((errors <= 2, errors > 0, ended), (true, true, true), "{errors} errors");
    assert_eq!((deltas(&flash), maintenance.damage()[0].page), (vec![2, 0], 1));
}

/// Damage that prevents the open of a segment is listed, and the list survives a restart.
#[test]
fn a_damaged_index_is_listed() {
    let versions = Versions::new(2, 400, 51);
    for page in ["the fences", "the trailer"] {
        let (disk, mut flash) = installed(&versions, 2);
        let base = Path::new(DIR).join("g000000000001/t0001-0000.seg");
        let pages = disk.read(&base, u64::MAX).unwrap().len() / 4096;
        disk.flip(&base, (pages - if page == "the fences" { 2 } else { 1 }) * 4096 * 8 + 200);
        let mut maintenance = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
        let outcomes = step_to_end(&mut maintenance, &mut flash, at(0));
        assert!(
            matches!(
                outcomes.last(),
                Some(StepOutcome::ScrubEnded { damaged: 1, repaired: 0, .. })
            ),
            "{page}: {outcomes:?}"
        );
        let mut next = Maintenance::new(rules(u64::MAX), None, maintenance.entries().clone());
        step_to_end(&mut next, &mut flash, at(1));
        assert_eq!(next.damage(), maintenance.damage(), "{page}");
        assert!(next.damage()[0].keys > 300 && next.damage()[0].table == 1, "{:?}", next.damage());
    }
}

/// A scrub that continues after compactions ends, from any position.
#[test]
fn a_scrub_ends_after_compactions_replaced_its_segment() {
    let versions = Versions::new(3, 900, 49);
    for stop in 0..40 {
        let (_disk, mut flash) = installed(&versions, 3);
        let mut scrub = Scrub::default();
        scrub.step(&flash, stop);
        for table in 0..2 {
            let mut merge = Compaction::begin(&flash, table).unwrap().unwrap();
            while merge.step(&flash, 100, u64::MAX).unwrap() {}
            merge.finish(&mut flash).unwrap();
        }
        let ended = (0..1000).any(|_| !scrub.step(&flash, 1));
        assert!(ended, "stopped at page {stop}");
    }
}

fn stories() -> u64 {
    std::env::var("HATCHBACK_MAINTENANCE").ok().and_then(|n| n.parse().ok()).unwrap_or(100)
}

/// Installs, maintenance and power cuts in random order. The clock sometimes goes back, and the
/// catalog entries are sometimes lost.
#[test]
fn random_cuts_and_installs_keep_rows_and_budget() {
    let versions = Versions::new(6, 300, 50);
    for seed in 0..stories() {
        life(&versions, seed);
    }
}

fn life(versions: &Versions, seed: u64) {
    let mut random = Random::new(seed);
    let (disk, mut flash) = installed(versions, 1);
    let (mut generation, mut hour) = (1, 0);
    let mut maintenance = Maintenance::new(rules(200_000), None, CatalogEntries::default());
    let what = format!("seed {seed}");

    for _ in 0..60 {
        hour = if random.one_in(10) { random.below(hour + 1) } else { hour + random.below(8) };
        if random.one_in(6) {
            disk.cut_after(random.below(40));
        }

        let up = if generation < versions.deltas.len() && random.one_in(5) {
            disk.install(&versions.deltas[generation]).map(|next| flash = next).is_ok()
        } else {
            let pages = 1 + random.below(20);
            maintenance.step(&mut flash, at(hour), pages).is_ok()
        };

        assert!(maintenance.wear().bytes <= 200_000, "{what}: over the budget");
        if !up {
            // The entries survive the cut or are lost.
            let entries = if random.one_in(2) {
                maintenance.entries().clone()
            } else {
                CatalogEntries::lost()
            };
            disk.reboot(random.bits());
            flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
            maintenance = Maintenance::new(
                rules(200_000),
                None,
                CatalogEntries { wear: cleared(&entries), ..entries },
            );
        }

        let live = whole_generation(&flash, versions, &what);
        assert!(live == generation || live == generation + 1, "{what}: {live} after {generation}");
        generation = live;
    }
}

/// A lost wear state counts as spent, which this test does not compare with the budget.
fn cleared(entries: &CatalogEntries) -> hatchback::io::daily_bytes::DailyBytes {
    if entries.wear.bytes == u64::MAX {
        hatchback::io::daily_bytes::DailyBytes::default()
    } else {
        entries.wear
    }
}
