//! Maintenance on a simulated disk: it keeps the rules, the budget and every row, whatever is
//! installed meanwhile, whatever breaks, and however often the power goes. Failures name the seed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::bundle::BundleReader;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk::Disk;
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::compact::Compaction;
use hatchback::maintenance::scrub::Scrub;
use hatchback::maintenance::wear::WearBudget;
use hatchback::maintenance::{Did, Maintenance, MaintenanceRules};
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::random::Random;
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::versions::Versions;
use std::path::Path;
use std::time::Duration;

const DIR: &str = "/flash";
const HOUR: u64 = 60 * 60;
const DAYS: u64 = 20_000;

fn at(hour: u64) -> Duration {
    Duration::from_secs((DAYS * 24 + hour) * HOUR)
}

fn rules(bytes_per_day_max: u64) -> MaintenanceRules {
    let wear = WearBudget { bytes_per_day_max };
    MaintenanceRules {
        deltas_max: 1,
        changed_percent_max: 100,
        scrub_every: Duration::from_secs(48 * HOUR),
        wear,
        busy_percent_max: 100,
    }
}

fn install(disk: &SimDisk, versions: &Versions, generation: usize) -> Result<Flash, FlashError> {
    let mut bundle = BundleReader::open(&versions.deltas[generation - 1])?;
    Flash::install(&disk.shared(), Path::new(DIR), &mut bundle, |_| ())
}

/// A disk with the first `n` generations.
fn laid(versions: &Versions, n: usize) -> (SimDisk, Flash) {
    let disk = SimDisk::default();
    let flash = (1..=n).fold(None, |_, g| Some(install(&disk, versions, g).unwrap())).unwrap();
    (disk, flash)
}

fn deltas(flash: &Flash) -> Vec<usize> {
    flash.record().live.tables.iter().map(|t| t.deltas.len()).collect()
}

/// Steps until nothing is due; returns what was done.
fn settle(upkeep: &mut Maintenance, flash: &mut Flash, now: Duration) -> Vec<Did> {
    let mut all = Vec::new();
    loop {
        match upkeep.step(flash, now, 3).unwrap() {
            Did::Nothing => return all,
            waits @ Did::Waits { .. } => return [all, vec![waits]].concat(),
            did => all.push(did),
        }
        assert!(all.len() < 10_000, "never ends");
    }
}

#[test]
fn too_many_deltas_are_merged_and_then_all_is_scrubbed() {
    let versions = Versions::new(3, 400, 41);
    let (_disk, mut flash) = laid(&versions, 3);
    assert_eq!(deltas(&flash), [2, 2]);
    let mut upkeep = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    let did = settle(&mut upkeep, &mut flash, at(0));
    assert_eq!(deltas(&flash), [0, 0]);
    assert_eq!(did.iter().filter(|d| matches!(d, Did::Compacted { .. })).count(), 2);
    assert!(
        matches!(did.last(), Some(Did::ScrubEnded { damaged: 0, pages, .. }) if *pages > 0),
        "{did:?}"
    );
    assert_eq!(whole_generation(&flash, &versions, "merged"), 3);
    // Then nothing is due until the next scrub is.
    assert_eq!(settle(&mut upkeep, &mut flash, at(47)), []);
    assert!(matches!(settle(&mut upkeep, &mut flash, at(49)).last(), Some(Did::ScrubEnded { .. })));
}

#[test]
fn one_delta_is_merged_once_enough_rows_changed() {
    let versions = Versions::new(2, 400, 42);
    let (_disk, mut flash) = laid(&versions, 2);
    let table = flash.table(1).unwrap();
    let percent = table.changed() as u64 * 100 / table.base_rows();
    drop(table);
    let with = |changed_percent_max| MaintenanceRules {
        deltas_max: 9,
        changed_percent_max,
        ..rules(u64::MAX)
    };
    let mut upkeep = Maintenance::new(with(percent + 1), None, CatalogEntries::default());
    settle(&mut upkeep, &mut flash, at(0));
    assert_eq!(deltas(&flash)[1], 1);
    let mut upkeep = Maintenance::new(with(percent - 1), None, CatalogEntries::default());
    settle(&mut upkeep, &mut flash, at(0));
    assert_eq!(deltas(&flash)[1], 0);
}

/// A table several times a day's budget: it is merged over the days, within the budget of each,
/// though the power goes every night. What a day wrote is not written again.
#[test]
fn a_table_beyond_the_budget_of_a_day_is_merged_over_many() {
    let versions = Versions::new(3, 2000, 43);
    for (seed, cut) in [(1, false), (2, true), (3, true)] {
        let (disk, mut flash) = laid(&versions, 3);
        let tables = (0..2).map(|t| flash.table(t).unwrap().file_bytes()).sum::<u64>();
        let budget = 5 * 4096;
        let mut random = Random::new(seed);
        let mut upkeep = Maintenance::new(rules(budget), None, CatalogEntries::default());
        let (mut written, mut days) = (disk.written(), 0);
        let start = written;
        while deltas(&flash) != [0, 0] {
            let live = disk.read(&Path::new(DIR).join("live")).unwrap().len() as u64;
            let did = settle(&mut upkeep, &mut flash, at(24 * days));
            let today = std::mem::replace(&mut written, disk.written());
            // The live record is not counted; it is written once a table.
            assert!(
                disk.written() - today <= budget + 2 * live,
                "day {days}: {}",
                disk.written() - today
            );
            assert!(
                deltas(&flash) == [0, 0] || matches!(did.last(), Some(Did::Waits { .. })),
                "{did:?}"
            );
            // A clock that goes back buys nothing.
            assert!(matches!(
                settle(&mut upkeep, &mut flash, at(0) / 2).last(),
                None | Some(Did::Waits { .. } | Did::ScrubEnded { .. })
            ));
            days += 1;
            assert!(days < 100, "never ends");
            if cut {
                let notes = upkeep.notes().clone();
                disk.reboot(random.bits());
                flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
                upkeep = Maintenance::new(rules(budget), None, notes);
            }
        }
        assert!(days >= 4, "{days} days");
        // Each day leaves at most the row that did not fit: nothing durable is written twice.
        let total = disk.written() - start;
        assert!(total <= tables + 3 * 4096, "{total} written for {tables}, seed {seed}");
        assert_eq!(whole_generation(&flash, &versions, "after all days"), 3);
    }
}

#[test]
fn a_budget_below_one_index_waits_for_ever_and_breaks_nothing() {
    let versions = Versions::new(3, 400, 43);
    let (_disk, mut flash) = laid(&versions, 3);
    let mut upkeep = Maintenance::new(rules(1), None, CatalogEntries::default());
    let did = settle(&mut upkeep, &mut flash, at(0));
    assert!(matches!(did.last(), Some(Did::Waits { .. })) && deltas(&flash) == [2, 2], "{did:?}");
}

#[test]
fn a_merge_of_what_is_no_longer_live_is_dropped() {
    let versions = Versions::new(4, 900, 44);
    let (disk, mut flash) = laid(&versions, 3);
    let mut upkeep = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    assert!(matches!(upkeep.step(&mut flash, at(0), 1).unwrap(), Did::Merged { .. }));
    flash = install(&disk, &versions, 4).unwrap();
    settle(&mut upkeep, &mut flash, at(0));
    assert_eq!(deltas(&flash), [0, 0]);
    assert_eq!(whole_generation(&flash, &versions, "after the install"), 4);
}

/// Without the refusal the delta that arrived meanwhile would be lost.
#[test]
fn a_compaction_does_not_finish_over_what_arrived_meanwhile() {
    let versions = Versions::new(3, 400, 45);
    let (disk, flash) = laid(&versions, 2);
    let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
    while merge.step(&flash, 100, u64::MAX).unwrap() {}
    let mut flash = install(&disk, &versions, 3).unwrap();
    let refused = merge.finish(&mut flash).unwrap_err().to_string();
    assert!(refused.contains("something else became live"), "{refused}");
    assert_eq!(
        whole_generation(&Flash::open(&disk.shared(), Path::new(DIR)).unwrap(), &versions, ""),
        3
    );
}

/// A delta whose most used keys are its parent's brings no list of them: the parent's stays,
/// whatever becomes of its segments.
#[test]
fn a_hot_list_outlives_deltas_compactions_and_rollbacks() {
    let versions = Versions::new(4, 900, 49);
    let manifest =
        |n: usize| BundleReader::open(&versions.deltas[n - 1]).unwrap().manifest().clone();
    assert!(manifest(1).tables.iter().all(|t| t.hot.is_some()));
    assert!(manifest(2).tables.iter().all(|t| t.hot.is_none()), "the lists are nearly the same");
    let (disk, mut flash) = laid(&versions, 1);
    let lists = |flash: &Flash| [0, 1].map(|t| flash.hot_keys(t).unwrap());
    let first = lists(&flash);
    assert!(first.iter().all(|list| list.len() > 500));
    let mut held = first;
    for n in 2..=4 {
        flash = install(&disk, &versions, n).unwrap();
        for (t, list) in held.iter_mut().enumerate() {
            if manifest(n).tables[t].hot.is_some() {
                *list = flash.hot_keys(t).unwrap();
            }
        }
        assert_eq!(lists(&flash), held, "generation {n}");
    }
    let mut upkeep = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    settle(&mut upkeep, &mut flash, at(0));
    assert_eq!((deltas(&flash), lists(&flash)), (vec![0, 0], held));
    flash = flash.rollback().unwrap();
    flash.reclaim();
    assert!(lists(&flash).iter().all(|list| list.len() > 500));
    let listed: u64 = lists(&flash).iter().map(|list| 8 * list.len() as u64).sum();
    assert!(flash.bytes().unwrap() > listed);
}

/// Another process may take away what is still being written; then it must not become live.
#[test]
fn a_compaction_does_not_publish_a_segment_that_is_gone() {
    let versions = Versions::new(2, 400, 46);
    let (disk, mut flash) = laid(&versions, 2);
    let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
    flash.reclaim();
    while merge.step(&flash, 1, u64::MAX).unwrap() {
        flash.reclaim();
    }
    let part = disk.paths().into_iter().find(|p| p.extension().is_some_and(|e| e == "part"));
    disk.remove_file(&part.expect("reclaiming leaves a merge of what is live alone")).unwrap();
    merge.finish(&mut flash).unwrap_err();
    assert_eq!(
        whole_generation(&Flash::open(&disk.shared(), Path::new(DIR)).unwrap(), &versions, ""),
        2
    );
}

/// A table that has as many deltas as can be opened takes no other one.
#[test]
fn a_delta_too_many_is_refused_before_it_is_written() {
    let versions = Versions::new(3, 100, 47);
    let (disk, flash) = laid(&versions, 2);
    let mut record = flash.record().clone();
    let delta = record.live.tables[0].deltas[0];
    record.live.tables[0].deltas = vec![delta; hatchback::flash::overlay::DELTAS_MAX];
    let live = Path::new(DIR).join("live");
    disk.create(&live).unwrap().write_all(&record.encode()).unwrap();
    let written = disk.written();
    let refused = install(&disk, &versions, 3).err().unwrap().to_string();
    assert!(refused.contains("table `t0` takes no further delta"), "{refused}");
    assert_eq!(disk.read(&live).unwrap(), record.encode());
    assert_eq!(disk.written(), written, "refused only after it was written");
}

/// A page that stops a merge stops neither the other table's nor the scrub, which finds it.
#[test]
fn damage_stops_one_table_only() {
    let versions = Versions::new(3, 400, 48);
    let (disk, mut flash) = laid(&versions, 3);
    disk.flip(&Path::new(DIR).join("g000000000001/t0000-0000.seg"), 5000 * 8);
    let mut upkeep = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
    let (mut errors, mut ended) = (0, false);
    for _ in 0..1000 {
        match upkeep.step(&mut flash, at(0), 3) {
            Err(_) => errors += 1,
            Ok(did) => ended |= matches!(did, Did::ScrubEnded { damaged: 1, .. }),
        }
    }
    assert_eq!((errors <= 2, errors > 0, ended), (true, true, true), "{errors} errors");
    assert_eq!((deltas(&flash), upkeep.damage()[0].page), (vec![2, 0], 1));
}

/// What a start would be refused for counts as damage, and is known across starts.
#[test]
fn an_index_that_went_bad_is_damage() {
    let versions = Versions::new(2, 400, 51);
    for page in ["the fences", "the trailer"] {
        let (disk, mut flash) = laid(&versions, 2);
        let base = Path::new(DIR).join("g000000000001/t0001-0000.seg");
        let pages = disk.read(&base).unwrap().len() / 4096;
        disk.flip(&base, (pages - if page == "the fences" { 2 } else { 1 }) * 4096 * 8 + 200);
        let mut upkeep = Maintenance::new(rules(u64::MAX), None, CatalogEntries::default());
        let did = settle(&mut upkeep, &mut flash, at(0));
        assert!(
            matches!(did.last(), Some(Did::ScrubEnded { damaged: 1, repaired: 0, .. })),
            "{page}: {did:?}"
        );
        let mut next = Maintenance::new(rules(u64::MAX), None, upkeep.notes().clone());
        settle(&mut next, &mut flash, at(1));
        assert_eq!(next.damage(), upkeep.damage(), "{page}");
        assert!(next.damage()[0].keys > 300 && next.damage()[0].table == 1, "{:?}", next.damage());
    }
}

/// A scrub that was kept across compactions ends, wherever it stood.
#[test]
fn a_scrub_outlives_the_segments_it_stood_in() {
    let versions = Versions::new(3, 900, 49);
    for stop in 0..40 {
        let (_disk, mut flash) = laid(&versions, 3);
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
    std::env::var("HATCHBACK_UPKEEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// A car's life: installs, upkeep, power cuts; time goes on and sometimes back. The notes are kept
/// or not.
#[test]
fn a_life_with_cuts_keeps_rows_and_budget() {
    let versions = Versions::new(6, 300, 50);
    for seed in 0..stories() {
        life(&versions, seed);
    }
}

fn life(versions: &Versions, seed: u64) {
    let mut random = Random::new(seed);
    let (disk, mut flash) = laid(versions, 1);
    let (mut generation, mut hour) = (1, 0);
    let mut upkeep = Maintenance::new(rules(200_000), None, CatalogEntries::default());
    let what = format!("seed {seed}");
    for _ in 0..60 {
        hour = if random.one_in(10) { random.below(hour + 1) } else { hour + random.below(8) };
        if random.one_in(6) {
            disk.cut_after(random.below(40));
        }
        let up = if generation < versions.deltas.len() && random.one_in(5) {
            install(&disk, versions, generation + 1).map(|next| flash = next).is_ok()
        } else {
            let pages = 1 + random.below(20);
            upkeep.step(&mut flash, at(hour), pages).is_ok()
        };
        assert!(upkeep.wear().bytes <= 200_000, "{what}: over the budget");
        if !up {
            // Either what was kept is found again, or it was lost.
            let notes =
                if random.one_in(2) { upkeep.notes().clone() } else { CatalogEntries::lost() };
            disk.reboot(random.bits());
            flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
            upkeep = Maintenance::new(
                rules(200_000),
                None,
                CatalogEntries { wear: cleared(&notes), ..notes },
            );
        }
        let live = whole_generation(&flash, versions, &what);
        assert!(live == generation || live == generation + 1, "{what}: {live} after {generation}");
        generation = live;
    }
}

/// A lost state counts as spent; that is not what the budget is compared with here.
fn cleared(notes: &CatalogEntries) -> hatchback::maintenance::wear::Wear {
    if notes.wear.bytes == u64::MAX {
        hatchback::maintenance::wear::Wear::default()
    } else {
        notes.wear
    }
}
