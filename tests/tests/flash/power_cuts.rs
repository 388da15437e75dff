//! The flash tier under power cuts, device errors, a full disk and flipped bits. One whole
//! generation is live at any time, acknowledged changes stay, and an interrupted step can be
//! repeated. Failures name the seed and the step.

use hatchback::bundle::BundleReader;
use hatchback::clock::Clock;
use hatchback::flash::live::LiveRecord;
use hatchback::flash::table::RowLocation;
use hatchback::flash::{Flash, FlashError, Rebuild};
use hatchback::io::disk::Disk;
use hatchback::io::page::{AlignedPage, PageBytes};
use hatchback::io::paired_record::PairedRecord;
use hatchback::limits::PAGE_BYTES;
use hatchback::maintenance::compact::Compaction;
use hatchback::maintenance::scrub::Scrub;
use hatchback::schema::KeySpace;
use hatchback::unmix;
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan};
use hatchback_tests::random::Random;
use hatchback_tests::rewrite::{kind, pages_of};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::versions::{Rows, Versions};
use hatchback_tools::pack::spec::CodecChoice;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const DIR: &str = SimDisk::FLASH;

/// One change of the flash directory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// Install the bundle of this generation.
    Install(usize),
    /// Merge the deltas of this table.
    Compact(usize),
    /// Roll back one generation.
    Rollback,
}

const STORY: [Step; 9] = [
    Step::Install(1),
    Step::Install(2),
    Step::Compact(0),
    Step::Install(3),
    Step::Compact(1),
    Step::Compact(0),
    Step::Rollback,
    Step::Install(4),
    Step::Compact(1),
];

/// Pages that merges took over from interrupted attempts, in the whole process.
static RESUMED: AtomicU64 = AtomicU64::new(0);

/// Returns the generation that is live after the first `steps` steps.
fn live_after(steps: usize) -> usize {
    STORY[..steps].iter().fold(0, |live, step| match step {
        Step::Install(generation) => *generation,
        Step::Compact(_) => live,
        Step::Rollback => live - 1,
    })
}

fn open(disk: &SimDisk) -> Result<Flash, FlashError> {
    Flash::open(&disk.shared(), Path::new(DIR))
}

fn run(step: Step, disk: &SimDisk, versions: &Versions) -> Result<(), FlashError> {
    match step {
        // After the rollback to 2, the delta to 4 does not fit, but the snapshot does.
        Step::Install(4) => disk.install(&versions.snapshots[3]).map(drop),
        Step::Install(generation) => disk.install(&versions.deltas[generation - 1]).map(drop),
        Step::Compact(table) => {
            let mut flash = open(disk)?;
            let Some(mut merge) = Compaction::begin(&flash, table)? else { return Ok(()) };
            let mut unsynced = 0;
            while merge.step(&flash, 1, u64::MAX)? {
                unsynced += 1;
                if unsynced % 5 == 0 {
                    merge.sync()?;
                }
            }
            RESUMED.fetch_add(u64::from(merge.resumed_pages()), Ordering::Relaxed);
            merge.finish(&mut flash).map(drop)
        }
        Step::Rollback => open(disk)?.rollback().map(drop),
    }
}

/// Returns every row of a table from a scan. The page that `locate` returns for a key must have the
/// same row.
fn rows_of(flash: &Flash, number: usize) -> Rows {
    let (mut rows, table) = (Rows::new(), flash.table(number).unwrap());
    table
        .scan(|order, row| assert!(rows.insert(order, row.to_vec()).is_none()), |e| panic!("{e}"))
        .unwrap();
    let keys = flash.manifest().schema.tables[number].keys;
    let mut pages: BTreeMap<RowLocation, Vec<(u64, &Vec<u8>)>> = BTreeMap::new();
    for (order, row) in &rows {
        let key = if keys == KeySpace::Sparse { unmix(*order) } else { *order };
        pages.entry(table.locate(key).unwrap()).or_default().push((key, row));
    }
    let mut page = AlignedPage::zeroed();
    for (location, expected) in pages {
        let segment = table.segment(location);
        segment.read_page(location.page, &mut page).unwrap();
        let checked = segment.check(location.page, &page.0).unwrap();
        let same =
            |(key, row): &(u64, &Vec<u8>)| segment.row(&checked, *key) == Some(row.as_slice());
        assert!(expected.iter().all(same), "{location:?} of table {number}");
    }
    rows
}

/// Checks that one of the generations `one_of` is live and whole; 0 means none.
fn check(disk: &SimDisk, versions: &Versions, one_of: &[usize], what: &str) {
    let flash = match open(disk) {
        Ok(flash) => flash,
        Err(e) => return assert!(one_of.contains(&0), "{what}: does not open: {e}"),
    };
    let generation = flash.manifest().generation.sequence as usize;
    assert!(one_of.contains(&generation), "{what}: {generation} is live, not one of {one_of:?}");
    for table in 0..2 {
        let same = rows_of(&flash, table) == versions.rows[generation - 1][table];
        assert!(same, "{what}: table {table} of generation {generation} is not what it was");
    }
    assert!(!flash.dense().unwrap().is_empty());
}

/// Runs the story, cuts the power after `cut` changing calls, reboots, and finishes the story.
fn run_story(versions: &Versions, cut: u64, seed: u64) {
    let disk = SimDisk::default();
    let mut random = Random::new(seed);
    disk.cut_after(cut);
    let mut done = 0;
    while done < STORY.len() && run(STORY[done], &disk, versions).is_ok() {
        done += 1;
    }

    // Repeat an interrupted step until it ends. Each attempt may be cut again.
    let mut cuts = 0;
    while done < STORY.len() {
        disk.reboot(random.bits());
        let what = format!(
            "seed {seed}, cut {cut}, step {done} {:?}, cut again {cuts} times",
            STORY[done]
        );

        check(&disk, versions, &[live_after(done), live_after(done + 1)], &what);
        let committed = STORY[done] == Step::Rollback
            && open(&disk)
                .is_ok_and(|f| f.manifest().generation.sequence as usize == live_after(done + 1));
        if cuts < 3 && random.one_in(2) {
            disk.cut_after(random.below(30));
        }

        if committed || run(STORY[done], &disk, versions).is_ok() {
            done += 1;
        }

        cuts += 1;
        assert!(cuts < 100, "{what}: never ends");
    }

    disk.reboot(random.bits());
    check(
        &disk,
        versions,
        &[live_after(STORY.len())],
        &format!("seed {seed}, cut {cut}, at the end"),
    );
}

/// The number of stories, about two for each place of a cut; the long run sets 10,000 or more.
fn cut_points() -> u64 {
    std::env::var("HATCHBACK_CUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

#[test]
fn every_cut_ends_in_one_whole_generation() {
    let versions = Versions::new(4, 900, 7);
    let disk = SimDisk::default();
    STORY.iter().for_each(|step| run(*step, &disk, &versions).unwrap());
    check(&disk, &versions, &[4], "without a cut");
    let calls = disk.calls();
    let next = AtomicU64::new(0);
    let run_stories = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        numbers.take_while(|n| *n < cut_points()).for_each(|n| run_story(&versions, n % calls, n));
    };
    std::thread::scope(|threads| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            threads.spawn(run_stories);
        }
    });
    let resumed = RESUMED.load(Ordering::Relaxed);
    println!("{} cuts at {calls} places, {resumed} merged pages resumed, all whole", cut_points());
    assert!(cut_points() < 1000 || resumed > cut_points() / 4, "only {resumed} pages were resumed");
}

/// Such an install syncs the file system once, not each file.
#[test]
fn a_cut_in_the_install_of_many_files_leaves_all_of_them_or_nothing() {
    let plan = ModelPlan {
        name: "wide".to_owned(),
        sequence: 1,
        seed: 3,
        dense: 0,
        tables: vec![TablePlan::cached(KeySpace::Index, 3, 4, CodecChoice::F32); 300],
        features: (0..300).map(FeaturePlan::one_hot).collect(),
    };
    let packed = plan.pack();
    let disk = SimDisk::default();
    disk.install(&packed.bundle).unwrap();
    let calls = disk.calls();

    let mut lives = 0;
    // Every call near the end, where the content must be durable before its names are.
    for cut in (0..calls).step_by(97).chain(calls - 25..calls) {
        let disk = SimDisk::default();
        disk.cut_after(cut);
        assert!(disk.install(&packed.bundle).is_err(), "cut {cut}: the power was cut");
        disk.reboot(cut);
        if let Ok(flash) = open(&disk) {
            (0..300).for_each(|table| assert_eq!(rows_of(&flash, table).len(), 3, "cut {cut}"));
            lives += 1;
        }
        disk.install(&packed.bundle).unwrap();
        disk.reboot(cut + 1);
        (0..300).for_each(|t| assert_eq!(rows_of(&open(&disk).unwrap(), t).len(), 3, "cut {cut}"));
    }
    assert!(lives > 0, "no cut came between the live record and the end");
}

#[test]
fn an_error_of_the_device_leaves_what_was_live() {
    let versions = Versions::new(4, 200, 8);
    let disk = SimDisk::default();
    STORY.iter().for_each(|step| run(*step, &disk, &versions).unwrap());
    for n in 0..disk.calls() {
        let disk = SimDisk::default();
        disk.fail_after(n);
        for (done, step) in STORY.iter().enumerate() {
            let what = format!("error at call {n}, step {step:?}");
            if let Err(e) = run(*step, &disk, &versions) {
                assert!(e.to_string().contains("device reports"), "{what}: {e}");
                check(&disk, &versions, &[live_after(done), live_after(done + 1)], &what);
                let committed = *step == Step::Rollback
                    && open(&disk).unwrap().manifest().generation.sequence as usize
                        == live_after(done + 1);
                assert!(
                    committed || run(*step, &disk, &versions).is_ok(),
                    "{what}: cannot be repeated"
                );
            }
            check(&disk, &versions, &[live_after(done + 1)], &what);
        }
    }
}

#[test]
fn a_full_disk_is_refused_before_anything_is_written() {
    let versions = Versions::new(2, 200, 9);
    let disk = SimDisk::default();
    run(Step::Install(1), &disk, &versions).unwrap();
    let (used, written) = (disk.used(), disk.written());
    disk.set_capacity(Some(used + (1 << 20)));
    let refused = run(Step::Install(2), &disk, &versions).unwrap_err();
    assert!(matches!(refused, FlashError::Space { .. }), "{refused}");
    assert_eq!(disk.written(), written);
    disk.set_capacity(Some(u64::MAX));
    run(Step::Install(2), &disk, &versions).unwrap();
    check(&disk, &versions, &[2], "once there is room");
}

/// Returns the bytes of a bundle on flash: whole blocks, and one in 512 for what lists them.
fn installed_bytes(bundle: &Path) -> u64 {
    let bundle = BundleReader::open(bundle).unwrap();
    let blobs = bundle.manifest().blobs.iter();
    let blocks: u64 = blobs.map(|b| b.raw_bytes().next_multiple_of(PAGE_BYTES as u64)).sum();
    blocks + blocks / 512
}

/// The files of an interrupted install take no space from the next install, of the same bundle or
/// of another one.
#[test]
fn an_interrupted_install_takes_no_room() {
    let versions = Versions::new(2, 900, 13);
    for (live, next) in [(true, 1), (false, 0), (false, 1)] {
        let start = || {
            let disk = SimDisk::default();
            if live {
                run(Step::Install(1), &disk, &versions).unwrap();
            }
            disk
        };
        let (counted, disk) = (start(), start());
        let before = counted.calls();
        let first = &versions.snapshots[usize::from(live)];
        counted.install(first).unwrap();
        let bytes = installed_bytes(&versions.snapshots[next]);
        // The error comes before the live record, after everything else was written.
        disk.fail_after(counted.calls() - before - 11);
        let used = disk.used();
        assert!(disk.install(first).is_err() && disk.used() > used + bytes / 2);
        disk.set_capacity(Some(used + bytes + (1 << 20)));
        disk.install(&versions.snapshots[next]).unwrap();
        check(&disk, &versions, &[next + 1], "in the room of the interrupted install");
    }
}

/// A rebuild writes beside the generation that it replaces, under the same number or an earlier
/// one. A refusal or a power cut leaves what was served.
#[test]
fn a_generation_stays_until_its_rebuild_is_live() {
    let versions = Versions::new(2, 200, 16);
    let start = || {
        let disk = SimDisk::default();
        [1, 2].into_iter().for_each(|n| run(Step::Install(n), &disk, &versions).unwrap());
        disk
    };
    for sequence in [1, 2] {
        let rebuild = |disk: &SimDisk| {
            let mut bundle = BundleReader::open(&versions.snapshots[sequence - 1]).unwrap();
            let rebuild = Rebuild { least: 2, servable: true };
            Flash::prepare_rebuild(&disk.shared(), Path::new(DIR), &mut bundle, rebuild, |_| ())
        };
        let disk = start();
        let before = disk.calls();
        drop(rebuild(&disk).unwrap());
        check(&disk, &versions, &[2], "a rebuild that is refused");
        Flash::reclaim_in(&disk.shared(), Path::new(DIR)).unwrap();
        check(&disk, &versions, &[2], "without the files of the rebuild");

        for cut in 0..disk.calls() - before {
            let disk = start();
            disk.cut_after(cut);
            let ended = rebuild(&disk).and_then(|prepared| prepared.commit());
            disk.reboot(cut);
            let live = if ended.is_ok() { vec![sequence] } else { vec![2, sequence] };
            check(&disk, &versions, &live, &format!("rebuild of {sequence}, cut {cut}"));
        }
    }
}

/// A copy of the live record that the device refuses may be whole, so nothing is installed anew.
#[test]
fn a_copy_that_the_device_refuses_beside_a_damaged_one_is_not_lost() {
    let versions = Versions::new(2, 200, 18);
    for [refused, damaged] in [[0, 1], [1, 0]] {
        let disk = SimDisk::default();
        run(Step::Install(1), &disk, &versions).unwrap();
        let path = |copy: usize| Path::new(DIR).join(LiveRecord::NAMES[copy]);
        disk.flip(&path(damaged), 100);
        disk.spoil(&path(refused));
        let error = disk.install(&versions.snapshots[1]).err().unwrap();
        assert!(matches!(error, FlashError::Io { .. }), "{error}");
        disk.end_faults();
        check(&disk, &versions, &[1], "once the device reads the copy");
    }
}

/// Returns a disk with these snapshots, and room for the snapshot 3 once the first is gone.
fn short_disk(versions: &Versions, snapshots: &[usize]) -> SimDisk {
    let disk = SimDisk::default();
    disk.install(&versions.snapshots[snapshots[0] - 1]).unwrap();
    let first = disk.used();
    for n in &snapshots[1..] {
        disk.install(&versions.snapshots[n - 1]).unwrap();
    }
    let bytes = installed_bytes(&versions.snapshots[2]);
    disk.set_capacity(Some(disk.used() - first + bytes + (1 << 20) + (8 << 10)));
    disk
}

/// Damage may stop a merge until the snapshot that replaces its table is installed.
#[test]
fn an_unfinished_merge_makes_room_before_a_generation() {
    let versions = Versions::new(3, 900, 19);
    let disk = SimDisk::default();
    disk.install(&versions.deltas[0]).unwrap();
    let flash = disk.install(&versions.deltas[1]).unwrap();
    let used = disk.used();
    let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
    while merge.step(&flash, 4, u64::MAX).unwrap() {}
    merge.sync().unwrap();
    drop(merge);
    assert!(disk.used() > used);

    let bytes = installed_bytes(&versions.snapshots[2]);
    disk.set_capacity(Some(used + bytes + (1 << 20)));
    disk.install(&versions.snapshots[2]).unwrap();
    check(&disk, &versions, &[3], "in the room of a merge");
    let flash = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
    assert!(flash.record().previous.is_some(), "the merge alone made enough room");
}

#[test]
fn a_generation_that_can_be_served_never_makes_room() {
    let versions = Versions::new(3, 900, 17);
    let next = |disk: &SimDisk| disk.install(&versions.snapshots[2]).map(drop);

    let disk = short_disk(&versions, &[1, 2]);
    next(&disk).unwrap();
    check(&disk, &versions, &[3], "in the room of the generation before");

    let disk = short_disk(&versions, &[1, 2]);
    disk.set_capacity(Some(disk.used() + (1 << 19)));
    let refused = next(&disk).unwrap_err();
    assert!(matches!(refused, FlashError::Space { .. }), "{refused}");
    let live = Flash::open(&disk.shared(), Path::new(DIR)).unwrap();
    assert!(live.record().previous.is_some(), "it was given up although the bundle did not fit");

    let rebuild = |disk: &SimDisk, servable| {
        let mut bundle = BundleReader::open(&versions.snapshots[2]).unwrap();
        let rebuild = Rebuild { least: 2, servable };
        let prepared =
            Flash::prepare_rebuild(&disk.shared(), Path::new(DIR), &mut bundle, rebuild, |_| ());
        prepared.and_then(|prepared| prepared.commit()).map(drop)
    };
    let disk = short_disk(&versions, &[2]);
    let refused = rebuild(&disk, true).unwrap_err();
    assert!(matches!(refused, FlashError::Space { .. }), "{refused}");
    check(&disk, &versions, &[2], "a rebuild beside a process that serves");
    rebuild(&disk, false).unwrap();
    check(&disk, &versions, &[3], "in the room of a generation that no process can open");

    let disk = short_disk(&versions, &[2]);
    let refused = next(&disk).unwrap_err();
    assert!(matches!(refused, FlashError::Space { .. }), "{refused}");
    check(&disk, &versions, &[2], "without room");

    let network = Path::new(DIR).join("g000000000002/dense.onnx");
    disk.lose(&network);
    next(&disk).unwrap();
    check(&disk, &versions, &[3], "in the room of a generation without its network");
}

#[test]
fn space_is_reclaimed_when_nothing_needs_it() {
    let versions = Versions::new(4, 900, 10);
    let disk = SimDisk::default();
    STORY.iter().for_each(|step| run(*step, &disk, &versions).unwrap());
    let folders: Vec<String> = disk.paths().iter().map(|p| p.display().to_string()).collect();
    assert!(
        folders.iter().all(|p| !p.contains("g000000000003") && !p.ends_with(".part")),
        "{folders:#?}"
    );
}

#[test]
fn scrubbing_finds_exactly_the_damaged_pages_and_repair_replaces_them() {
    let versions = Versions::new(2, 900, 11);
    let disk = SimDisk::default();
    run(Step::Install(1), &disk, &versions).unwrap();
    run(Step::Install(2), &disk, &versions).unwrap();
    let scrub = |disk: &SimDisk| {
        let (flash, mut scrub) = (open(disk).unwrap(), Scrub::default());
        while scrub.step(&flash, 3) {}
        scrub
    };

    assert_eq!(scrub(&disk).damage, []);
    let pages = scrub(&disk).pages;
    let mut random = Random::new(1);
    let base = Path::new(DIR).join("g000000000001/t0000-0000.seg");
    let good = hatchback::io::disk::Disk::read(&disk, &base, u64::MAX).unwrap();
    let page = 2;
    disk.flip(&base, page * 4096 * 8 + random.below(4096 * 8) as usize);
    let found = scrub(&disk);

    assert_eq!((found.pages, found.damage.len()), (pages, 1));
    assert_eq!((found.damage[0].table, found.damage[0].page as usize), (0, page));
    let flash = open(&disk).unwrap();
    let content = |n: usize| -> PageBytes { good[n * 4096..(n + 1) * 4096].try_into().unwrap() };
    assert!(
        flash.repair(&found.damage[0], &content(page + 1)).is_err(),
        "the repair accepted another page"
    );

    flash.repair(&found.damage[0], &content(page)).unwrap();
    assert_eq!(scrub(&disk).damage, []);
    check(&disk, &versions, &[2], "after the repair");
}

/// Covers pages of every kind, and a segment that is missing.
#[test]
fn scrubbing_finds_a_flipped_bit_on_every_page() {
    let versions = Versions::new(2, 900, 14);
    let disk = SimDisk::default();
    run(Step::Install(1), &disk, &versions).unwrap();
    run(Step::Install(2), &disk, &versions).unwrap();
    let scrub = || {
        let (flash, mut scrub) = (open(&disk).unwrap(), Scrub::default());
        while scrub.step(&flash, 100) {}
        scrub.damage
    };

    let segments = disk.paths().into_iter().filter(|p| p.extension().is_some_and(|e| e == "seg"));
    let (mut random, mut kinds) = (Random::new(14), BTreeSet::new());
    for path in segments {
        let pages = pages_of(&disk.read(&path, u64::MAX).unwrap());
        for (page, content) in pages.iter().enumerate() {
            let bit = page * 4096 * 8 + random.below(4096 * 8) as usize;
            disk.flip(&path, bit);
            let damage = scrub();
            disk.flip(&path, bit);
            assert_eq!(damage.len(), 1, "{} page {page}", path.display());
            assert!(
                damage[0].fault.starts_with(&format!("{}: page {page}: ", path.display())),
                "{damage:?}"
            );
            assert!(damage[0].keys > 0);
            kinds.insert(kind(content));
        }

        disk.rename(&path, Path::new("/gone")).unwrap();
        let damage = scrub();
        disk.rename(Path::new("/gone"), &path).unwrap();
        assert!(
            damage.len() == 1 && damage[0].fault.starts_with(&path.display().to_string()),
            "{damage:?}"
        );
    }

    assert!(kinds.into_iter().eq(1..=6), "not every kind of page occurred");
    assert_eq!(scrub(), []);
}

/// A step reads the requested pages and the trailer, and never all fences of a large base.
#[test]
fn a_step_of_a_scrub_reads_no_more_than_requested() {
    let versions = Versions::new(1, 900, 15);
    let disk = SimDisk::default();
    run(Step::Install(1), &disk, &versions).unwrap();
    let (flash, mut scrub) = (open(&disk).unwrap(), Scrub::default());
    disk.slow(1, 1);
    let (clock, mut steps) = (disk.clock(), 0);
    let start = clock.now();
    while scrub.step(&flash, 1) {
        steps += 1;
    }
    let reads = (clock.now() - start).as_micros() as u64;
    assert_eq!((scrub.pages, reads), (steps, 2 * steps));
}

#[test]
fn damage_stops_a_compaction_and_changes_nothing() {
    let versions = Versions::new(2, 900, 12);
    let disk = SimDisk::default();
    run(Step::Install(1), &disk, &versions).unwrap();
    run(Step::Install(2), &disk, &versions).unwrap();
    disk.flip(&Path::new(DIR).join("g000000000001/t0000-0000.seg"), 5000 * 8);
    assert!(
        run(Step::Compact(0), &disk, &versions)
            .unwrap_err()
            .to_string()
            .contains("t0000-0000.seg: page 1")
    );
    run(Step::Compact(1), &disk, &versions).unwrap();
    assert_eq!(open(&disk).unwrap().record().live.tables[0].deltas.len(), 1);
}
