//! The states of an update. A release must pass its probe and its probation. After a kill or a
//! power cut in any state, with a good or a bad release, the right generation is live and whole,
//! without help.

use hatchback::flash::Flash;
use hatchback::io::disk::{self, Disk};
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::fetch_status::{FetchState, FetchStatus, Offer};
use hatchback::update::host::{Host, Policy, Watched};
use hatchback::update::install_status::{InstallState, InstallStatus};
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, Take};
use hatchback::update::status::UpdateState;
use hatchback::update::trust::Trust;
use hatchback_link::DirectoryLink;
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, ROOT_S, T0, Ticks, VERSIONS, release_of};
use hatchback_tests::random::Random;
use hatchback_tests::versions::copy;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::rotate;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tough::schema::RoleType;

/// Returns a fleet at its first release, and a copy that has published its second.
fn next_release() -> (Fleet, Fleet) {
    let fleet = Fleet::new();
    let before = fleet.fork();
    fleet.delta(T0 + 10, 2);
    (before, fleet)
}

fn seen(requests: u64, faults: u64, slow: u64) -> Option<Watched> {
    Some(Watched { requests, faults, slow, ..Watched::default() })
}

#[test]
fn probation_ends_as_the_policy_says() {
    let (before, fleet) = next_release();
    let policy =
        Policy { requests_min: 100, faults_max: 1, latency_us_p99_max: 500, ..Policy::default() };
    for (watched, ends, live) in [
        (seen(100, 1, 1), UpdateState::Committed, 2),
        (None, UpdateState::Committed, 2),
        (seen(99, 0, 99), UpdateState::Probation, 2),
        (seen(100, 0, 2), UpdateState::Failed, 1),
        (seen(5, 2, 1), UpdateState::Failed, 1),
    ] {
        let mut car = Car::at_first_release(&before);
        (car.policy, car.watched) = (policy, watched);
        let ran = car.run(&mut fleet.link(), T0 + 11);

        assert_eq!(
            (car.sync.status().unwrap().state, car.live()),
            (ends, live),
            "{watched:?}: {ran:?}"
        );
        assert_eq!(ran.is_err(), ends == UpdateState::Failed);

        // A release on probation waits. A failed release is not installed again, although it is the
        // newest.
        car.watched = None;
        let (again, after) =
            (car.run(&mut fleet.link(), T0 + 12).unwrap(), if live == 2 { 2 } else { 1 });
        assert_eq!((again.newest, car.live()), (Some(2), after));

        // A higher release is installed.
        let better = fleet.fork();
        better.publish(T0 + 13, &VERSIONS.snapshots[2]);
        car.run(&mut better.link(), T0 + 14).unwrap();

        assert_eq!(car.live(), 3, "{watched:?}");
    }
}

#[test]
fn a_probe_decides_before_a_release_is_live() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    // These bundles have no probe scores.
    car.policy.probe_samples_min = 1;
    let error = car.run(&mut fleet.link(), T0 + 11).unwrap_err();
    assert!(matches!(error, UpdateError::ReleaseFailed { .. }), "{error:?}");
    let states: Vec<UpdateState> =
        car.sync.status().unwrap().history.iter().map(|e| e.state).collect();
    assert!(!states[5..].contains(&UpdateState::Probation), "{states:?}");
    assert_eq!(car.live(), 1);
}

#[test]
fn a_release_that_waits_for_consent_can_be_revoked() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.policy.consent = true;
    assert!(!car.sync.consent(T0 + 11).unwrap());
    for now in T0 + 11..T0 + 13 {
        assert_eq!(car.run(&mut fleet.link(), now).unwrap().state, UpdateState::AwaitConsent);
        assert_eq!(car.live(), 1);
    }
    let revoked = fleet.fork();
    revoked.revoke(T0 + 14, 2);
    let status = car.run(&mut revoked.link(), T0 + 15).unwrap();
    assert_eq!((status.state, car.live()), (UpdateState::Idle, 1));
    revoked.delta(T0 + 16, 2);
    car.run(&mut revoked.link(), T0 + 17).unwrap();
    assert!(car.sync.consent(T0 + 18).unwrap());
    assert_eq!(car.run(&mut revoked.link(), T0 + 19).unwrap().state, UpdateState::Committed);
    assert_eq!(car.live(), 2);
}

#[test]
fn a_newer_release_replaces_one_that_waits_for_consent() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.policy.consent = true;
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::AwaitConsent);

    let offered = |car: &Car| car.sync.status().unwrap().release.map(|r| r.generation.sequence);
    fleet.publish(T0 + 12, &VERSIONS.snapshots[2]);

    // The older release stays offered until the bundle of the newer one is complete.
    let half = std::fs::metadata(&VERSIONS.snapshots[2]).unwrap().len() / 2;
    let faults = Faults { breaks_after: Some(half + 2_000), ..Faults::default() };
    car.run(&mut Wire::new(fleet.link(), faults), T0 + 13).unwrap_err();
    assert_eq!(
        (car.sync.status().unwrap().state, offered(&car)),
        (UpdateState::AwaitConsent, Some(2))
    );
    assert_eq!(car.run(&mut fleet.link(), T0 + 14).unwrap().state, UpdateState::AwaitConsent);
    assert_eq!((offered(&car), car.live()), (Some(3), 1));

    let bundles = car.disk.list(Path::new("/sync/staged")).unwrap();
    assert_eq!(
        bundles.iter().filter(|f| f.extension().unwrap() == "hatch").count(),
        1,
        "{bundles:?}"
    );

    // Without a newer release, nothing is fetched.
    let mut wire = Wire::new(fleet.link(), Faults::default());
    car.run(&mut wire, T0 + 15).unwrap();
    assert!(wire.asked.iter().all(|path| path.starts_with("metadata/")), "{:?}", wire.asked);
    assert!(car.sync.consent(T0 + 16).unwrap());
    assert_eq!(car.run(&mut fleet.link(), T0 + 17).unwrap().state, UpdateState::Committed);
    assert_eq!(car.live(), 3);
}

#[test]
fn a_release_revoked_on_probation_is_rolled_back_and_a_later_revocation_is_reported() {
    let (before, fleet) = next_release();
    let (mut car, late) = (Car::at_first_release(&before), Car::at_first_release(&before));
    car.policy.requests_min = 1;
    car.watched = seen(0, 0, 0);
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::Probation);
    late.run(&mut fleet.link(), T0 + 11).unwrap();
    fleet.revoke(T0 + 12, 2);
    assert!(car.run(&mut fleet.link(), T0 + 13).is_err());
    assert_eq!((car.live(), car.sync.status().unwrap().refused.len()), (1, 0));
    let status = late.run(&mut fleet.link(), T0 + 13).unwrap();
    assert!(status.withdrawn && late.live() == 2, "{status:?}");
    fleet.publish(T0 + 14, &VERSIONS.snapshots[2]);
    for car in [car, late] {
        let mut car = car;
        car.watched = None;
        let status = car.run(&mut fleet.link(), T0 + 15).unwrap();
        assert!(car.live() == 3 && !status.withdrawn);
    }
}

/// A taken-over sync process offers a rejected release again, although the signed targets list it.
#[test]
fn a_rejected_release_that_is_offered_again_is_not_installed() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.policy.requests_min = 1;
    car.watched = seen(0, 1, 0);
    car.run(&mut fleet.link(), T0 + 11).unwrap_err();
    assert_eq!((car.live(), car.sync.status().unwrap().refused.len()), (1, 1));

    let release = release_of(&VERSIONS.deltas[1]);
    let hex = hatchback::bundle::manifest::hex(&release.manifest);
    let path = car.sync.directory.join("staged").join(format!("{hex}.hatch"));
    car.disk.put(&path, std::fs::read(&VERSIONS.deltas[1]).unwrap());
    let mut fetch = car.sync.fetch_status();
    fetch.offer = Some(Offer { number: 99, release });
    fetch.write(&car.disk, &car.sync.directory).unwrap();
    car.watched = None;
    car.apply(T0 + 12);
    let error = car.sync.status().unwrap().error.unwrap_or_default();
    assert!(error.contains("rejected before"), "{error}");
    assert_eq!(car.live(), 1);
}

/// The record of the sync process only makes the serving process look. The signed targets decide,
/// for the car's own cohort.
#[test]
fn only_signed_targets_withdraw_a_release() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.sync.cohort = 50;
    car.policy.requests_min = 1;
    car.watched = seen(0, 0, 0);
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::Probation);
    let mut fetch = car.sync.fetch_status();
    fetch.revoked = Some(release_of(&VERSIONS.deltas[1]).manifest);
    fetch.write(&car.disk, &car.sync.directory).unwrap();
    assert!(!car.sync.advance(&car.host(), T0 + 12).unwrap());
    assert_eq!((car.sync.status().unwrap().state, car.live()), (UpdateState::Probation, 2));

    let bundles = vec![VERSIONS.deltas[1].clone()];
    let narrowed = Change { bundles, share: 50, expires_s: FRESH_S, ..Change::default() };
    let repository = Objects::directory(&fleet.repository()).unwrap();
    publish(&repository, &fleet.keys(), &narrowed, T0 + 13).unwrap();
    assert!(car.run(&mut fleet.link(), T0 + 14).is_err());
    assert_eq!(car.live(), 1);
}

/// Starts that end before the first answers count against a release. Starts that end normally, or
/// after the first answers, do not.
#[test]
fn a_release_that_kills_every_start_is_rolled_back() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.policy.requests_min = 1;
    car.watched = seen(0, 0, 0);
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::Probation);
    for start in 0..20 {
        car.sync.begin_process(1, T0 + 20 + start).unwrap();
        car.sync.end_trial().unwrap();
    }
    for start in 0..5 {
        car.sync.begin_process(1, T0 + 40 + start).unwrap();
        assert_eq!(car.sync.status().unwrap().state, UpdateState::Probation);
    }
    car.sync.begin_process(1, T0 + 50).unwrap();
    assert_eq!(car.sync.status().unwrap().state, UpdateState::RollingBack);
    assert!(car.sync.advance(&car.host(), T0 + 51).unwrap());
    assert_eq!((car.sync.status().unwrap().state, car.live()), (UpdateState::Failed, 1));
    assert_eq!(car.sync.status().unwrap().refused.len(), 1);
}

/// A release whose probe kills the process every time is rejected at last.
#[test]
fn a_release_that_kills_every_probe_is_rejected() {
    let (before, fleet) = next_release();
    let mut car = Car::at_first_release(&before);
    car.policy.consent = true;
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    car.sync.consent(T0 + 11).unwrap();
    for ended in 0..6 {
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let pieces = std::cell::Cell::new(0);
            let host = Host {
                yield_now: &|| {
                    pieces.set(pieces.get() + 1);
                    let trials = car.sync.status().unwrap().trials;
                    assert!(trials <= ended, "the process dies in trial {trials}");
                },
                ..car.host()
            };
            while car.sync.advance(&host, T0 + 12).unwrap() {}
        }));
        assert_eq!(died.is_err(), ended < 5, "after {ended} ends");
    }
    let status = car.sync.status().unwrap();
    assert_eq!((car.live(), status.refused.len()), (1, 1), "{status:?}");
}

/// A link that calls a function before each answer.
struct Interposed<F>(DirectoryLink, F);

impl<F: FnMut(&str) -> Result<(), LinkError>> Link for Interposed<F> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        (self.1)(path)?;
        self.0.get(path, from, take)
    }
}

/// A root may revoke keys, so none is passed over: a refresh without an answer for the next root
/// accepts nothing.
#[test]
fn a_refresh_ends_where_the_next_root_does_not_arrive() {
    let (before, fleet) = next_release();
    let car = Car::at_first_release(&before);
    let broken = |path: &str| match path.ends_with("root.json") {
        true => Err(LinkError::Broken("cut".to_owned())),
        false => Ok(()),
    };
    let error = car.run(&mut Interposed(fleet.link(), broken), T0 + 11).unwrap_err();
    assert!(matches!(error, UpdateError::LinkBroken { .. }), "{error:?}");
    assert_eq!((car.floor(), car.live()), ([1; 4], 1));
}

/// The serving process needs every root after its own, so the sync process restores a lost one.
#[test]
fn a_lost_root_is_fetched_again() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    rotate(&fleet.keys(), RoleType::Snapshot, T0 + ROOT_S).unwrap();
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let root = car.sync.directory.join("root.2");
    let bytes = car.disk.read(&root, u64::MAX).unwrap();
    car.disk.remove_file(&root).unwrap();
    car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!(car.disk.read(&root, u64::MAX).unwrap(), bytes);
}

/// Returns a car on the real disk, with real locks. The first release is live, and the second waits
/// for consent.
fn asking(before: &Fleet, fleet: &Fleet) -> (tempfile::TempDir, Car) {
    let (folder, mut car) = (tempfile::tempdir().unwrap(), Car::new(before));
    let [directory, flash] = ["sync", "flash"].map(|name| folder.path().join(name));
    car.sync = Updater { disk: disk::system(), directory, flash, ..car.sync };
    let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
    Trust::init(disk::system().as_ref(), &car.sync.directory, &root).unwrap();
    car.run(&mut before.link(), T0 + 1).unwrap();
    car.policy = Policy { consent: true, requests_min: 1, ..Policy::default() };
    car.watched = seen(0, 0, 0);
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::AwaitConsent);
    (folder, car)
}

#[test]
fn the_serving_process_continues_while_the_fetch_waits_for_its_link() {
    let (before, fleet) = next_release();
    let (_folder, mut car) = asking(&before, &fleet);
    fleet.publish(T0 + 12, &VERSIONS.snapshots[2]);
    let (host, sync, clock) = (car.host(), &car.sync, Ticks::still());
    let mut agreed = false;
    let mut link = Interposed(fleet.link(), |path: &str| {
        if path.starts_with("chunks/") && !agreed {
            agreed = sync.consent(T0 + 13).unwrap();
            while sync.advance(&host, T0 + 13).unwrap() {}
            sync.begin_process(1, T0 + 14).unwrap();
            assert_eq!(sync.status().unwrap().trials, 1);
            sync.end_trial().unwrap();
            let (mut link, clock) = (fleet.link(), Ticks::still());
            let mut another = Fetcher::new(&mut link, &clock, LinkLimits::default());
            let refused = sync.fetch(&mut another, T0 + 14, |_, _| {}).unwrap_err();
            assert!(matches!(refused, UpdateError::Busy { .. }), "{refused:?}");
        }
        Ok(())
    });
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());

    // The release that is on probation by now is kept.
    let status = sync.fetch(&mut fetcher, T0 + 12, |_, _| {}).unwrap();
    let release = status.release.unwrap().generation.sequence;
    assert_eq!((status.state, release, status.trials), (UpdateState::Probation, 2, 0));

    car.watched = seen(1, 0, 1);
    let mut wire = Wire::new(fleet.link(), Faults::default());
    let status = car.run(&mut wire, T0 + 15).unwrap();
    let release = status.release.unwrap().generation.sequence;

    assert_eq!((status.state, release), (UpdateState::AwaitConsent, 3));
    assert!(wire.asked.iter().all(|path| path.starts_with("metadata/")), "{:?}", wire.asked);
}

/// The owner's consent waits for a step of the serving process.
#[test]
fn a_lock_held_for_a_moment_is_awaited() {
    let (before, fleet) = next_release();
    let (_folder, car) = asking(&before, &fleet);
    let lock = car.sync.flash.join("updating");
    let lock = car.sync.disk.lock(&lock, Duration::ZERO).unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop(lock);
        });
        assert!(car.sync.consent(T0 + 12).unwrap());
    });
}

/// The targets metadata prove a staged release, even if the other metadata are newer.
#[test]
fn an_interrupted_refresh_does_not_stop_a_staged_release() {
    let (before, fleet) = next_release();
    let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
    for broken in ["snapshot.json", "targets.json"] {
        let (_folder, mut car) = asking(&before, &fleet);
        let newer = fleet.fork();
        newer.publish(T0 + 12, &VERSIONS.snapshots[2]);
        let mut link = Interposed(newer.link(), |path: &str| {
            if path.ends_with(broken) { Err(LinkError::Broken("cut".to_owned())) } else { Ok(()) }
        });
        let error = car.run(&mut link, T0 + 13).unwrap_err();

        assert!(matches!(error, UpdateError::LinkBroken { .. }), "{error:?}");
        assert!(car.sync.consent(T0 + 14).unwrap());
        car.watched = seen(1, 0, 1);
        let host = Host { root: Some(&root), ..car.host() };
        while car.sync.advance(&host, T0 + 14).unwrap() {}

        assert_eq!(
            (car.sync.status().unwrap().state, car.live()),
            (UpdateState::Committed, 2),
            "{broken}"
        );

        // Older metadata are still refused.
        let replayed = car.run(&mut fleet.link(), T0 + 15).unwrap_err();
        assert!(
            matches!(replayed, UpdateError::Rollback { .. } | UpdateError::Replay { .. }),
            "{replayed:?}"
        );
    }
}

/// The serving process verifies signatures itself: a process that can only write the sync directory
/// cannot install anything.
#[test]
fn an_unsigned_release_is_not_applied() {
    let (fleet, stranger) = (Fleet::new(), Fleet::new());
    let before = fleet.fork();
    fleet.delta(T0 + 10, 2);
    stranger.delta(T0 + 10, 2);
    let mut car = Car::at_first_release(&before);
    car.policy.consent = true;
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    car.sync.consent(T0 + 11).unwrap();

    // The files of a stranger's car are signed correctly, but by other keys.
    let theirs = Car::at_first_release(&stranger);
    for name in ["root.json", "root.factory", "timestamp.json", "snapshot.json", "targets.json"] {
        let bytes = theirs.disk.read(&theirs.sync.directory.join(name), u64::MAX).unwrap();
        let mut file = car.disk.create(&car.sync.directory.join(name)).unwrap();
        file.write_all(&bytes).unwrap();
    }

    let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
    let host = Host { root: Some(&root), ..car.host() };
    while car.sync.advance(&host, T0 + 12).unwrap() {}
    let status = car.sync.status().unwrap();
    let error = status.error.clone().unwrap_or_default();
    assert!(error.contains("wrong key: targets.json"), "{status:?}");
    assert_eq!((status.state, car.live()), (UpdateState::Failed, 1));
    assert!(status.refused.is_empty(), "{status:?}");
}

/// Records of any content are data: a car in any state, with a listed release, with another one or
/// with none, ends at the newest release without help.
#[test]
fn records_of_any_content_are_handled() {
    use FetchState as F;
    use InstallState as I;

    let (before, fleet) = next_release();
    let fetch_states = [F::Idle, F::Notified, F::Fetching, F::Staged, F::Failed];
    let states = [
        I::Idle,
        I::AwaitConsent,
        I::Applying,
        I::Probation,
        I::Committed,
        I::RollingBack,
        I::Failed,
    ];
    let releases =
        [None, Some(release_of(&VERSIONS.deltas[1])), Some(release_of(&VERSIONS.deltas[3]))];
    for (state, release) in states.iter().flat_map(|s| releases.iter().map(move |r| (*s, r))) {
        for (number, trials) in [0, 1, u64::MAX].into_iter().flat_map(|n| [(n, 0), (n, u32::MAX)]) {
            let car = Car::at_first_release(&before);
            let (offer, release) = (number, release.clone());
            let mut install = InstallStatus {
                state,
                offer,
                release: release.clone(),
                trials,
                ..InstallStatus::default()
            };
            install.write(&car.disk, &car.sync.flash).unwrap();
            let mut fetch = FetchStatus {
                state: fetch_states[(number % 5) as usize],
                offer: release.clone().map(|release| Offer { number: 1, release }),
                release,
                ..FetchStatus::default()
            };
            fetch.write(&car.disk, &car.sync.directory).unwrap();

            let what = format!("{install:?}");
            car.sync.begin_process(1, T0 + 12).unwrap();
            car.sync.consent(T0 + 12).unwrap();
            for now in T0 + 13..T0 + 17 {
                let _ = car.run(&mut fleet.link(), now);
            }
            let status = car.sync.status().unwrap();
            assert!(
                matches!(
                    status.state,
                    UpdateState::Idle | UpdateState::Committed | UpdateState::Failed
                ),
                "{what}: {status:?}"
            );
            // A record that rolls the second release back marks it: the car stays at the first.
            let second = release_of(&VERSIONS.deltas[1]).manifest;
            let is_marked = status.refused.contains(&hatchback::bundle::manifest::hex(&second));
            assert_eq!(car.live(), if is_marked { 1 } else { 2 }, "{what}: {status:?}");
        }
    }
}

/// Cuts the power at every disk call of an update, with a good release and with a bad one.
#[test]
fn a_power_cut_in_every_state_ends_in_one_whole_generation() {
    let (before, fleet) = next_release();
    let mut cuts: BTreeMap<String, u32> = BTreeMap::new();
    for faults in [0, 1] {
        let expected = if faults == 0 { 2 } else { 1 };
        let car = || {
            let mut car = Car::at_first_release(&before);
            (car.policy.requests_min, car.watched) = (1, seen(1, faults, 1));
            car
        };

        let run = |car: &Car| car.run(&mut fleet.link(), T0 + 12);
        let whole = car();
        let start = whole.disk.calls();
        let _ = run(&whole);
        let calls = whole.disk.calls() - start;
        let mut random = Random::new(7 + faults);

        for cut in 0..calls {
            let car = car();
            car.disk.cut_after(cut);
            let _ = run(&car);
            car.disk.reboot(random.bits());
            let state = car.sync.status().unwrap().state;
            *cuts.entry(format!("{state}, faults {faults}")).or_default() += 1;

            assert!((1..=2).contains(&car.live()), "cut {cut}");
            car.sync.begin_process(1, T0 + 13).unwrap();

            // A bad release fails once more, or was marked before the cut.
            let _ = run(&car);
            assert_eq!(car.live(), expected, "cut {cut} in {state}, faults {faults}");

            let end = run(&car).unwrap().state;
            assert!(
                matches!(end, UpdateState::Committed | UpdateState::Failed),
                "cut {cut}: ends {end}"
            );
        }
    }

    println!("power cuts by state: {cuts:?}");
    for state in ["notified", "fetching", "staged", "applying", "probation"] {
        assert!(cuts.keys().any(|k| k.starts_with(state)), "never in {state}");
    }

    assert!(cuts.contains_key("rolling-back, faults 1"));
}

/// The directories of a car at the first release, on the real disk.
struct Real {
    folder: tempfile::TempDir,
    repository: PathBuf,
}

impl Real {
    fn new(template: &Path, repository: PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy(template, folder.path());
        Self { folder, repository }
    }

    fn start(&self, faults: u64) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sync_worker"));
        command.arg(&self.repository).arg(self.folder.path().join("sync"));
        command.arg(self.folder.path().join("flash")).arg(faults.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Kills the process `delay_us` after it prints `state`. Returns whether it printed `state`.
    fn killed_in(&self, faults: u64, state: &str, delay_us: u64) -> bool {
        let mut child = self.start(faults);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let came = lines.map_while(Result::ok).any(|line| line == state);
        std::thread::sleep(Duration::from_micros(delay_us));
        child.kill().unwrap();
        child.wait().unwrap();
        came
    }

    fn finish(&self, faults: u64) {
        let mut child = self.start(faults);
        // A full pipe would block the process.
        std::io::copy(&mut child.stdout.take().unwrap(), &mut std::io::sink()).unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success() || faults > 0, "{said}");
    }

    fn live(&self, what: &str) -> usize {
        let flash = Flash::open(&disk::system(), &self.folder.path().join("flash")).unwrap();
        whole_generation(&flash, &VERSIONS, what)
    }
}

/// Returns the number of processes to kill. The long run sets 1,400.
fn kills() -> usize {
    std::env::var("HATCHBACK_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(36)
}

#[test]
fn a_kill_in_every_state_ends_in_one_whole_generation() {
    let (before, fleet) = next_release();
    let template = tempfile::tempdir().unwrap();
    {
        let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
        Trust::init(disk::system().as_ref(), &template.path().join("sync"), &root).unwrap();
        let first = Real { folder: tempfile::tempdir().unwrap(), repository: before.repository() };
        copy(template.path(), first.folder.path());
        first.finish(0);
        copy(first.folder.path(), template.path());
    }

    let states: Vec<(&str, u64)> =
        ["notified", "fetching", "staged", "await-consent", "applying", "probation"]
            .into_iter()
            .flat_map(|state| [(state, 0), (state, 1)])
            .chain([("committed", 0), ("rolling-back", 1), ("failed", 1)])
            .collect();
    let (mut random, mut table) = (Random::new(3), BTreeMap::new());

    for kill in 0..kills() {
        let (state, faults) = states[kill % states.len()];
        let car = Real::new(template.path(), fleet.repository());
        let what = format!("kill {kill} in {state}, faults {faults}, HATCHBACK_KILLS={}", kills());
        let came = car.killed_in(faults, state, random.below(3_000));
        let live = car.live(&what);
        assert!((1..=2).contains(&live), "{what}: {live} is live");
        car.finish(faults);
        assert_eq!(car.live(&what), if faults == 0 { 2 } else { 1 }, "{what}");
        *table.entry((state, faults)).or_insert(0) += usize::from(came);
    }

    println!("kills by state and faults: {table:?}");
    let seen = table.values().filter(|n| **n > 0).count();
    assert!(seen + 3 >= states.len().min(kills()), "too few states were reached: {table:?}");
}
