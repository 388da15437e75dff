//! Nothing locks a car out: clocks that are ahead, objects that the repository lost, releases that
//! one version of the program cannot read or dies of, pauses whose cause is gone, and a live
//! generation that is lost although its bytes are still listed.

use hatchback::bundle::BundleReader;
use hatchback::flash::live::LiveRecord;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk::Disk;
use hatchback::io::paired_record::PairedRecord;
use hatchback::limits::PAGE_BYTES;
use hatchback::model::budget::Budget;
use hatchback::model::{Model, OpenError};
use hatchback::update::error::UpdateError;
use hatchback::update::fetch_status::Offer;
use hatchback::update::host::{Host, Policy, Watched};
use hatchback::update::probe::probe;
use hatchback::update::program::Program;
use hatchback::update::release::manifest_path;
use hatchback::update::status::UpdateState;
use hatchback_tests::flash_check::rows_of;
use hatchback_tests::fleet::{Car, Fleet, ROOT_S, T0, VERSIONS, first_release, release_of};
use hatchback_tests::rewrite::Parts;
use hatchback_tests::whole_car::model::{BundlePlan, Flaw, Generations};
use hatchback_tools::repository::keys::rotate;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tough::schema::RoleType;

const DAY_S: u64 = 24 * 3600;

/// Publishes the deltas to generations 2, 3 and 4; the only snapshot stays that of generation 1.
fn publish_deltas(fleet: &Fleet) {
    (2..=4).for_each(|generation| fleet.delta(T0 + 10 * (generation as u64 - 1), generation));
}

/// Loses both copies of the live record.
fn lose_live_record(car: &Car) {
    LiveRecord::NAMES.iter().for_each(|name| car.disk.lose(&car.sync.flash.join(name)));
}

/// Runs both processes until `live` is live, at most `polls` times.
#[track_caller]
fn reaches(car: &Car, fleet: &Fleet, live: usize, polls: u64) {
    let errors: Vec<String> = (0..polls)
        .filter(|_| car.live() != live)
        .filter_map(|poll| car.run(&mut fleet.link(), T0 + 100 + poll).err())
        .map(|e| e.to_string())
        .collect();
    assert_eq!(car.live(), live, "{errors:#?}");
}

/// Damages every page of rows of the live generation, and returns their number.
fn damage_rows(car: &Car) -> usize {
    let opens = || {
        let flash = car.flash();
        (0..flash.manifest().tables.len()).all(|table| flash.table(table).is_ok())
    };
    let segments =
        car.disk.paths().into_iter().filter(|path| path.extension() == Some("seg".as_ref()));
    let pages = |path: &PathBuf| car.disk.content(path).unwrap().len() / PAGE_BYTES;
    let pages = segments.flat_map(|path| (0..pages(&path)).map(move |page| (path.clone(), page)));
    let damaged = pages.filter(|(path, page)| {
        let bit = (page * PAGE_BYTES + 100) * 8;
        car.disk.flip(path, bit);
        let is_of_rows = opens();
        if !is_of_rows {
            car.disk.flip(path, bit);
        }
        is_of_rows
    });
    damaged.count()
}

/// Packs the bundle of generation `to`: a snapshot, or a delta to generation `from`.
fn plain(generations: &Generations, from: Option<u64>, to: u64) -> PathBuf {
    generations.pack(BundlePlan { from, to, flaw: Flaw::None, level: 1, over: None })
}

/// Every row of the live generation is damaged, and the only snapshot is an old one. No delta can
/// be proven on such rows, so the car installs that snapshot and the deltas after it again.
#[test]
fn damage_under_every_probe_sample() {
    let generations = Generations::new();
    let pack = |from, to| plain(&generations, from, to);
    let fleet = Fleet::of(&pack(None, 1));
    let car = Car::at_first_release(&fleet);
    fleet.publish(T0 + 10, &pack(Some(1), 2));
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let live = || car.flash();
    assert_eq!(live().manifest().generation.sequence, 2);

    assert!(damage_rows(&car) >= 4, "pages of rows");
    fleet.publish(T0 + 20, &pack(Some(2), 3));
    let error = car.run(&mut fleet.link(), T0 + 21).unwrap_err().to_string();
    assert!(error.contains("4 probe samples use damaged rows"), "{error}");
    let polls = (22..26).map(|second| car.run(&mut fleet.link(), T0 + second));
    let errors: Vec<String> = polls.filter_map(|poll| Some(poll.err()?.to_string())).collect();
    assert_eq!(live().manifest().generation.sequence, 3, "{errors:?}");
    assert!((0..2).all(|table| rows_of(&live(), table).len() > 200), "every row is whole");
}

/// Every sample of the delta's probe set uses damaged rows, and one of the live generation's does
/// not. The only snapshot is that of the live generation, which replaces itself.
#[test]
fn damage_under_every_probe_sample_of_the_next_release() {
    let generations = Generations::new();
    let fleet = Fleet::of(&generations.pack(BundlePlan {
        from: None,
        to: 1,
        // More samples than those of the next release, and no other flaw here.
        flaw: Flaw::Endless,
        level: 1,
        over: None,
    }));
    let delta = plain(&generations, Some(1), 2);
    let segments = ["t0000-0000.seg", "t0001-0000.seg"];
    let mut cases = 0;
    for pages in 1..1 << 6 {
        let car = Car::at_first_release(&fleet);
        for page in (0..6).filter(|page| pages >> page & 1 == 1) {
            let path = car.sync.flash.join("g000000000001").join(segments[page / 3]);
            let bit = (page % 3 * PAGE_BYTES + 100) * 8;
            if bit / 8 < car.disk.content(&path).unwrap().len() {
                car.disk.flip(&path, bit);
            }
        }
        let probed = probe(&car.flash(), Budget::default(), &|| {});
        if !probed.is_ok_and(|probed| probed.damaged >= 4 && probed.samples > 0) {
            continue;
        }
        let fleet = fleet.fork();
        fleet.publish(T0 + 20, &delta);
        let error = car.run(&mut fleet.link(), T0 + 21).unwrap_err().to_string();
        if !error.contains("4 probe samples use damaged rows") {
            continue;
        }
        cases += 1;
        let polls = (22..26).map(|second| car.run(&mut fleet.link(), T0 + second));
        let errors: Vec<String> = polls.filter_map(|poll| Some(poll.err()?.to_string())).collect();
        assert_eq!(car.flash().manifest().generation.sequence, 2, "{errors:?}");
    }
    assert!(cases > 0, "no damage hits the samples of the next release alone");
}

#[test]
fn a_publisher_whose_clock_was_ahead() {
    for ahead in [DAY_S, 365 * DAY_S, 60 * 365 * DAY_S] {
        let fleet = Fleet::new();
        let car = Car::at_first_release(&fleet);
        fleet.delta(T0 + ahead, 2);
        car.run(&mut fleet.link(), T0 + 11).unwrap();
        assert_eq!(car.live(), 2);
        // The publisher's clock is right again, and its keys have changed.
        rotate(&fleet.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
        fleet.delta(T0 + 20, 3);
        car.run(&mut fleet.link(), T0 + 21).unwrap();
        assert_eq!(car.live(), 3, "{ahead} s ahead");
    }
}

/// Clocks of publisher and car were ahead together, so the car's time floor is ahead. A new key of
/// the timestamp lets the car continue, a new key of another role does not.
#[test]
fn a_car_whose_clock_was_ahead_with_the_publishers() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 5 * DAY_S, 2);
    car.run(&mut fleet.link(), T0 + 5 * DAY_S + 1).unwrap();
    assert_eq!(car.live(), 2);

    let behind = |car: &Car, now| {
        let error = car.run(&mut fleet.link(), now).unwrap_err();
        assert!(matches!(error, UpdateError::ClockBehind { .. }), "{error}");
    };
    rotate(&fleet.keys(), RoleType::Snapshot, T0 + ROOT_S).unwrap();
    behind(&car, T0 + 20);
    rotate(&fleet.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    fleet.delta(T0 + 30, 3);
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(car.live(), 3);
}

/// Returns the path of the manifest of `bundle` in the repository.
fn manifest_of(fleet: &Fleet, bundle: &Path) -> PathBuf {
    let release = release_of(bundle);
    fleet.file(&manifest_path(&release.name(), &release.manifest))
}

/// One object of the cheapest path is lost, cut, too long or another one. The car takes the other
/// way, and comes back to the first when the object is there again.
#[test]
fn a_lost_object_does_not_hide_the_other_ways() {
    type Loss = fn(&Path);
    let losses: [(&str, Loss); 4] = [
        ("lost", |path| std::fs::remove_file(path).unwrap()),
        ("empty", |path| std::fs::write(path, b"").unwrap()),
        ("another", |path| std::fs::write(path, b"<html>").unwrap()),
        ("long", |path| std::fs::write(path, vec![7; 3 << 20]).unwrap()),
    ];
    for (what, lose) in losses {
        for is_manifest in [false, true] {
            let fleet = Fleet::new();
            let car = Car::at_first_release(&fleet);
            fleet.delta(T0 + 10, 2);
            fleet.delta(T0 + 20, 3);
            let delta = &VERSIONS.deltas[1];
            let path = match is_manifest {
                true => manifest_of(&fleet, delta),
                // The last chunk: those before it arrive.
                false => fleet.chunks(delta).pop().unwrap(),
            };
            let whole = std::fs::read(&path).unwrap();
            lose(&path);
            for poll in 0..5 {
                car.run(&mut fleet.link(), T0 + 30 + poll).unwrap_err();
            }
            assert_eq!(car.live(), 1, "{what}");

            // The snapshot is there whole, beside deltas that promise fewer bytes.
            fleet.publish(T0 + 40, &VERSIONS.snapshots[2]);
            reaches(&car, &fleet, 3, 8);
            std::fs::write(&path, &whole).unwrap();
            fleet.delta(T0 + 50, 4);
            reaches(&car, &fleet, 4, 8);
            assert!(car.sync.status().unwrap().refused.is_empty());
        }
    }
}

/// Without another way, a car keeps asking for an object that was lost, and takes it when it is
/// back.
#[test]
fn an_object_that_returns_is_taken() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let path = manifest_of(&fleet, &VERSIONS.deltas[1]);
    let whole = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for poll in 0..20 {
        car.run(&mut fleet.link(), T0 + 30 + poll).unwrap_err();
    }
    std::fs::write(&path, whole).unwrap();
    reaches(&car, &fleet, 2, 1);
}

/// Publishes generation 2 with a network that does not load, signed and listed.
fn publish_unreadable(fleet: &Fleet) {
    let mut parts = Parts::read(&VERSIONS.deltas[1]);
    parts.set_content(parts.manifest.dense, b"an operator of the future");
    let bundle = fleet.folder.path().join("unreadable.hatch");
    std::fs::write(&bundle, parts.bytes()).unwrap();
    fleet.publish(T0 + 10, &bundle);
}

/// What one version of the program cannot read, another one tries again, once.
#[test]
fn another_version_tries_what_this_one_cannot_read() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    publish_unreadable(&fleet);
    car.run(&mut fleet.link(), T0 + 11).unwrap_err();
    let state = car.poll(&mut fleet.link(), T0 + 12).unwrap().state;
    assert_ne!(state, UpdateState::Staged, "refused by this version");

    let this = Program::this();
    for version in ["0.2.0", "0.3.0", &this.version] {
        let program = Program { version: version.to_owned(), ..Program::clone(&car.sync.program) };
        car.sync.program = Arc::new(program);
        car.sync.begin_process(2, T0 + 13).unwrap();
        let fetch = |now| car.poll(&mut fleet.link(), now).unwrap().state;
        assert_eq!(fetch(T0 + 14), UpdateState::Staged, "{version}");
        car.apply(T0 + 15);
        let status = car.sync.status().unwrap();
        assert_eq!((status.state, status.refused.len()), (UpdateState::Failed, 1), "{version}");
        assert_ne!(fetch(T0 + 16), UpdateState::Staged, "{version} has refused it");
    }
    fleet.publish(T0 + 20, &VERSIONS.snapshots[2]);
    reaches(&car, &fleet, 3, 1);
}

/// The process dies in each install of a release. It serves on in between, a newer release passes,
/// and a start of the process alone does not bring the next attempt.
#[test]
fn a_release_that_kills_every_install_gives_way() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let fetch = |now| car.poll(&mut fleet.link(), now).unwrap().state;
    assert_eq!(fetch(T0 + 11), UpdateState::Staged);
    let deaths = Cell::new(0);
    for start in 0..12 {
        car.sync.begin_process(1, T0 + 12 + start).unwrap();
        fetch(T0 + 12 + start);
        if car.sync.is_paused(T0 + 12 + start).unwrap() {
            continue;
        }
        let host = Host {
            yield_now: &|| {
                deaths.set(deaths.get() + 1);
                panic!("the process dies");
            },
            ..car.host()
        };
        let _ = catch_unwind(AssertUnwindSafe(|| {
            while car.sync.advance(&host, T0 + 12 + start).unwrap() {}
        }));
    }
    let status = car.sync.status().unwrap();
    assert_eq!((deaths.get(), car.live()), (5, 1), "{status:?}");
    assert!(status.refused.is_empty(), "{status:?}");

    // No fault of the release: after the pause it is tried again, and now it passes.
    assert_eq!(fetch(T0 + 30), UpdateState::Staged);
    assert!(car.sync.advance(&car.host(), T0 + 1_000).unwrap());
    car.apply(T0 + 1_000);
    assert_eq!(car.live(), 2);
}

/// A restart of the machine in the middle of an install says nothing of the release.
#[test]
fn short_drives_do_not_count_against_an_install() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.poll(&mut fleet.link(), T0 + 11).unwrap();
    for boot in 0..25 {
        let host = Host { boot, yield_now: &|| panic!("the power is cut"), ..car.host() };
        let died =
            catch_unwind(AssertUnwindSafe(|| while car.sync.advance(&host, T0 + 12).unwrap() {}));
        assert!(died.is_err(), "drive {boot}");
    }
    while car.sync.advance(&Host { boot: 25, ..car.host() }, T0 + 13).unwrap() {}
    assert_eq!(car.live(), 2);
}

/// No drive serves the requests of a probation. They add up, also if each drive ends with a power
/// cut, and so do faults and slow requests.
#[test]
fn the_requests_of_short_drives_add_up() {
    let before = Fleet::new();
    let fleet = before.fork();
    fleet.delta(T0 + 10, 2);
    let policy =
        Policy { requests_min: 100, faults_max: 2, latency_us_p99_max: 500, ..Policy::default() };
    for (faults, slow, drives, ends) in [
        (0, 0, 4, UpdateState::Committed),
        (1, 0, 3, UpdateState::Failed),
        (0, 1, 4, UpdateState::Failed),
    ] {
        for is_cut in [false, true] {
            let mut car = Car::at_first_release(&before);
            (car.policy, car.watched) = (policy, Some(Watched::default()));
            car.run(&mut fleet.link(), T0 + 11).unwrap();
            for drive in 1..=drives {
                let state = car.sync.status().unwrap().state;
                assert_eq!(state, UpdateState::Probation, "faults {faults}, slow {slow}: {drive}");
                car.sync.begin_process(drive, T0 + 20 * drive).unwrap();
                // The counts start anew where a model is unloaded and loaded again.
                for requests in [10, 30, 5, 30] {
                    car.watched = Some(Watched { requests, faults, slow, ..Watched::default() });
                    car.apply(T0 + 20 * drive + requests);
                }
                car.sync.end_trial().unwrap();
                match is_cut {
                    true => car.disk.reboot(drive),
                    false => car.sync.end_process(car.watched.unwrap()).unwrap(),
                }
            }
            let status = car.sync.status().unwrap();
            assert_eq!(
                (status.state, status.error.is_some()),
                (ends, ends != UpdateState::Committed)
            );
        }
    }
}

/// The pause after a full disk ends when there is room, and that after any fault of the car at the
/// next start of the process.
#[test]
fn a_pause_ends_with_its_cause() {
    for has_restarted in [false, true] {
        let fleet = Fleet::new();
        let car = Car::at_first_release(&fleet);
        fleet.delta(T0 + 10, 2);
        let fetch = |now| car.poll(&mut fleet.link(), now).unwrap();
        fetch(T0 + 11);
        car.disk.set_room(&car.sync.flash, Some(40_000));
        for now in [T0 + 12, T0 + 100, T0 + 300] {
            fetch(now);
            assert!(!car.sync.is_paused(now).unwrap());
            car.apply(now);
        }
        let status = car.sync.status().unwrap();
        assert!(status.error.as_ref().unwrap().contains("bytes are needed"), "{status:?}");
        fetch(T0 + 310);
        assert!(car.sync.is_paused(T0 + 310).unwrap(), "the third attempt failed just now");
        car.disk.set_room(&car.sync.flash, Some(1 << 20));
        assert!(car.sync.is_paused(T0 + 310).unwrap(), "more room is not enough");

        if has_restarted {
            car.sync.begin_process(1, T0 + 311).unwrap();
        } else {
            car.disk.set_room(&car.sync.flash, None);
        }
        assert!(!car.sync.is_paused(T0 + 311).unwrap(), "restarted: {has_restarted}");
        car.disk.set_room(&car.sync.flash, None);
        car.apply(T0 + 312);
        assert_eq!(car.live(), 2);
    }
}

/// Returns the files of the live generation 4 that a loss may take.
fn losses(car: &Car) -> Vec<(&'static str, Vec<PathBuf>)> {
    let flash = &car.sync.flash;
    let segment = |generation: &str| flash.join(generation).join("t0001-0000.seg");
    vec![
        ("the live record", vec![flash.join("live.a"), flash.join("live.b")]),
        ("the manifest", vec![flash.join("g000000000004/manifest")]),
        ("the network", vec![flash.join("g000000000004/dense.onnx")]),
        ("the base", vec![segment("g000000000001")]),
        ("a delta", vec![segment("g000000000003")]),
    ]
}

/// The live generation is lost, the newest listed snapshot is older, and the deltas after it are
/// listed. The car rebuilds what it had, serves nothing older on the way, and follows on.
#[test]
fn a_lost_generation_is_rebuilt_from_what_is_listed() {
    let fleet = Fleet::new();
    let template = Car::at_first_release(&fleet);
    publish_deltas(&fleet);
    for (what, paths) in losses(&template) {
        for is_cut in [false, true] {
            let mut car = Car::at_first_release(&fleet);
            car.policy.requests_min = 0;
            car.run(&mut fleet.link(), T0 + 31).unwrap();
            assert_eq!(car.live(), 4);
            for path in &paths {
                let content = car.disk.content(path).unwrap();
                match is_cut {
                    true => car.disk.put(path, content[..content.len() / 2].to_vec()),
                    false => car.disk.lose(path),
                }
            }
            // The serving process reports what it finds when it opens the generation.
            let opened = Flash::open(&car.sync.disk, &car.sync.flash).map_err(OpenError::from);
            let opened = opened.and_then(|flash| Model::from_flash(&flash, Budget::default()));
            assert!(opened.is_err(), "{what}");
            let repair = hatchback::update::install_status::Repair::AnySnapshot;
            car.sync.require_repair(repair).unwrap();

            for now in T0 + 40..T0 + 50 {
                let _ = car.poll(&mut fleet.link(), now);
                car.apply(now);
                let Ok(flash) = Flash::open(&car.sync.disk, &car.sync.flash) else { continue };
                let sequence = flash.record().live.generation.sequence;
                let served = Model::from_flash(&flash, Budget::default());
                match (sequence, served) {
                    (4, served) => assert!(served.is_ok(), "{what}"),
                    (1..4, Err(OpenError::Flash(FlashError::Rebuilding { .. }))) => {}
                    (sequence, served) => {
                        // Before the rebuild the damaged generation itself is found.
                        assert!(served.is_err(), "{what}: {sequence} is served");
                    }
                }
            }
            let status = car.sync.status().unwrap();
            assert_eq!(car.live(), 4, "{what}, cut: {is_cut}: {status:#?}");
            assert!(status.refused.is_empty(), "{what}: {status:?}");
            // No step of the rebuild is a generation to go back to.
            let flash = car.flash();
            let record = flash.record();
            assert!(record.previous.is_none(), "{what}");
            assert!(record.rebuilds > 0 || what == "the live record", "{what}");
        }
    }
}

/// A rebuild is interrupted by a power cut at every call of the disk, and ends where it should.
#[test]
fn a_power_cut_in_a_rebuild() {
    let fleet = Fleet::new();
    fleet.delta(T0 + 10, 2);
    fleet.delta(T0 + 20, 3);
    let mut calls = 0;
    loop {
        let car = Car::at_first_release(&fleet);
        car.run(&mut fleet.link(), T0 + 21).unwrap();
        lose_live_record(&car);
        car.disk.cut_after(calls);
        let _ = car.run(&mut fleet.link(), T0 + 22);
        let is_cut = car.disk.is_off();
        car.disk.reboot(calls);
        if let Ok(flash) = Flash::open(&car.sync.disk, &car.sync.flash) {
            let is_served = Model::from_flash(&flash, Budget::default()).is_ok();
            let sequence = flash.record().live.generation.sequence;
            assert!(sequence == 3 || !is_served, "{sequence} is served, cut at call {calls}");
        }
        reaches(&car, &fleet, 3, 6);
        if !is_cut {
            return;
        }
        calls += 7;
    }
}

/// No listed release reaches what the car had: it says so, and takes nothing older.
#[test]
fn a_path_that_ends_below_the_committed_generation_is_none() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    publish_deltas(&fleet);
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    fleet.revoke(T0 + 40, 3);
    lose_live_record(&car);
    let error = car.run(&mut fleet.link(), T0 + 41).unwrap_err();
    assert!(matches!(error, UpdateError::NoPath { newest: 4, .. }), "{error}");
    assert_eq!(car.live(), 0);
    fleet.publish(T0 + 50, &VERSIONS.snapshots[3]);
    reaches(&car, &fleet, 4, 2);
}

/// What was live counts, although this car never committed it: a generation that was installed by
/// hand is not replaced by an older one either.
#[test]
fn a_generation_installed_by_hand_is_rebuilt_too() {
    let fleet = Fleet::new();
    fleet.delta(T0 + 10, 2);
    fleet.delta(T0 + 20, 3);
    let car = Car::new(&fleet);
    for bundle in [&VERSIONS.snapshots[0], &VERSIONS.deltas[1], &VERSIONS.deltas[2]] {
        let path = Path::new("/bundle");
        car.disk.put(path, std::fs::read(bundle).unwrap());
        let mut bundle = BundleReader::open_on(&car.disk, path).unwrap();
        Flash::install(&car.sync.disk, &car.sync.flash, &mut bundle, |_| ()).unwrap();
    }
    car.disk.lose(&car.sync.flash.join("g000000000003/manifest"));
    for now in T0 + 30..T0 + 36 {
        let _ = car.poll(&mut fleet.link(), now);
        car.apply(now);
        if let Ok(flash) = Flash::open(&car.sync.disk, &car.sync.flash) {
            let sequence = flash.record().live.generation.sequence;
            assert!(sequence == 3 || Model::from_flash(&flash, Budget::default()).is_err());
        }
    }
    assert_eq!(car.live(), 3);
}

/// The owner consented to what is rebuilt, and is asked again for what is new only.
#[test]
fn a_rebuild_needs_no_consent() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    car.policy.consent = true;
    lose_live_record(&car);
    reaches(&car, &fleet, 2, 6);
    fleet.delta(T0 + 110, 3);
    assert_eq!(car.run(&mut fleet.link(), T0 + 111).unwrap().state, UpdateState::AwaitConsent);
}

/// The first step of a rebuild was possible, and the second one is not: a snapshot ends it.
#[test]
fn a_rebuild_that_cannot_go_on_waits_for_another_way() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    publish_deltas(&fleet);
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    lose_live_record(&car);
    fleet.publish(T0 + 40, &VERSIONS.snapshots[1]);
    car.poll(&mut fleet.link(), T0 + 41).unwrap();
    car.apply(T0 + 41);
    let flash = car.flash();
    assert!(!flash.record().may_serve());
    assert_eq!(car.sync.status().unwrap().live, None, "a step is not shown as live");

    // Generation 3 goes, and with it the way over the deltas.
    fleet.revoke(T0 + 50, 3);
    car.run(&mut fleet.link(), T0 + 51).unwrap_err();
    assert_eq!(car.live(), flash.record().live.generation.sequence as usize);
    fleet.publish(T0 + 60, &VERSIONS.snapshots[3]);
    reaches(&car, &fleet, 4, 4);
}

/// A step of a rebuild is live when the way on from it is revoked. Another way leads from an older
/// snapshot past that step, so the rebuild begins again.
#[test]
fn a_rebuild_begins_again_where_the_way_on_is_gone() {
    let generations = Generations::new();
    let fleet = Fleet::of(&plain(&generations, None, 1));
    let car = Car::at_first_release(&fleet);
    fleet.publish(T0 + 10, &plain(&generations, Some(1), 2));
    fleet.publish(T0 + 20, &plain(&generations, Some(2), 3));
    car.run(&mut fleet.link(), T0 + 21).unwrap();
    let live = || car.flash().record().live.clone();
    assert_eq!(live().generation.sequence, 3);

    lose_live_record(&car);
    for now in [T0 + 22, T0 + 23] {
        car.poll(&mut fleet.link(), now).unwrap();
        car.apply(now);
    }
    assert_eq!(live().generation.sequence, 2, "a step");
    fleet.revoke(T0 + 30, 3);
    fleet.publish(T0 + 40, &plain(&generations, Some(1), 4));
    let polls = (41..47).map(|second| car.run(&mut fleet.link(), T0 + second));
    let errors: Vec<String> = polls.filter_map(|poll| Some(poll.err()?.to_string())).collect();
    assert_eq!(live().generation.sequence, 4, "{errors:?}");
}

/// An offer of a taken-over sync process with an endless name does not destroy the record of what
/// was refused.
#[test]
fn an_offer_of_any_length_leaves_the_record_whole() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    publish_unreadable(&fleet);
    car.run(&mut fleet.link(), T0 + 11).unwrap_err();
    let mut fetch = car.sync.fetch_status();
    let mut release = release_of(&VERSIONS.snapshots[2]);
    release.generation.lineage = "x".repeat(120_000);
    let number = car.sync.install_status().unwrap().offer + 1;
    fetch.offer = Some(Offer { number, release });
    fetch.write(&car.disk, &car.sync.directory).unwrap();
    car.apply(T0 + 12);
    let install = car.sync.install_status().unwrap();
    assert_eq!((install.refused.len(), install.offer), (1, number - 1));
    fleet.publish(T0 + 20, &VERSIONS.snapshots[2]);
    reaches(&car, &fleet, 3, 2);
}

/// A taken-over sync process offers a release that is signed by nobody, beside honest metadata: the
/// serving process does not install it.
#[test]
fn a_release_that_the_targets_do_not_list_is_not_installed() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    car.policy.consent = true;
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();

    // The bundle of another release, whole and with a right hash, in the place of the listed one.
    let forged = release_of(&VERSIONS.snapshots[2]);
    let mut fetch = car.sync.fetch_status();
    let offer = fetch.offer.as_mut().unwrap();
    (offer.number, offer.release) = (offer.number + 1, forged.clone());
    fetch.write(&car.disk, &car.sync.directory).unwrap();
    let hex = hatchback::bundle::manifest::hex(&forged.manifest);
    let path = car.sync.directory.join("staged").join(format!("{hex}.hatch"));
    car.disk.put(&path, std::fs::read(&VERSIONS.snapshots[2]).unwrap());

    car.apply(T0 + 12);
    car.sync.consent(T0 + 13).unwrap();
    car.apply(T0 + 14);
    let status = car.sync.status().unwrap();
    assert!(status.error.as_ref().is_some_and(|e| e.contains("not listed")), "{status:?}");
    assert_eq!(car.live(), 1);
}

/// A taken-over sync process puts another bundle, whole and signed by nobody, under the name of the
/// listed one.
#[test]
fn a_bundle_under_the_name_of_a_listed_one_is_not_installed() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    car.policy.consent = true;
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();

    let hex = hatchback::bundle::manifest::hex(&release_of(&VERSIONS.deltas[1]).manifest);
    let path = car.sync.directory.join("staged").join(format!("{hex}.hatch"));
    car.disk.read(&path, u64::MAX).unwrap();
    car.disk.put(&path, std::fs::read(&VERSIONS.snapshots[2]).unwrap());
    car.sync.consent(T0 + 12).unwrap();
    car.apply(T0 + 13);
    let error = car.sync.status().unwrap().error.unwrap_or_default();
    assert!(error.contains("its manifest is not the signed one"), "{error}");
    assert_eq!(car.live(), 1);
    car.policy.consent = false;
    reaches(&car, &fleet, 2, 3);
}

/// A taken-over sync process puts back targets that are older than those that the serving process
/// accepted.
#[test]
fn targets_older_than_those_accepted_install_nothing() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let targets = car.sync.directory.join("targets.json");
    let older = car.disk.read(&targets, u64::MAX).unwrap();
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();

    car.disk.put(&targets, older);
    let mut fetch = car.sync.fetch_status();
    fetch.offer = Some(Offer { number: 99, release: first_release() });
    fetch.write(&car.disk, &car.sync.directory).unwrap();
    car.apply(T0 + 12);
    let error = car.sync.status().unwrap().error.unwrap_or_default();
    assert!(error.contains("replay: targets"), "{error}");
    assert_eq!(car.live(), 2);
}

/// A repository that shows one timestamp for ever is noticed when that timestamp expires, also if
/// the car has it already.
#[test]
fn an_unchanged_timestamp_that_expired_is_a_freeze() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let error = car.run(&mut fleet.link(), T0 + 2_000).unwrap_err();
    assert!(matches!(&error, UpdateError::Freeze { role, .. } if role == "timestamp"), "{error}");
    let _ = car.disk.read(&car.sync.directory.join("timestamp.json"), 1 << 20).unwrap();
}
