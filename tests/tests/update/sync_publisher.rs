//! The publisher's side: stolen and rotated keys, a publisher that is killed or has a rival, and
//! releases that `publish` must refuse. Cars follow the repository throughout.

use hatchback::limits::CLOCK_SLACK_S;
use hatchback::update::error::UpdateError;
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, ROOT_S, Recovery, T0, VERSIONS};
use hatchback_tests::rewrite::Parts;
use hatchback_tools::repository::ClockError;
use hatchback_tools::repository::keys::rotate;
use hatchback_tools::repository::prune::{Retention, prune};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::{Object, Objects, Store};
use std::cell::Cell;
use tough::schema::RoleType;

#[test]
fn a_revoked_key_and_fast_forward_recovery() {
    let fleet = Fleet::new();
    let (fresh, car) = (Car::at_first_release(&fleet), Car::at_first_release(&fleet));

    // A thief of the online keys signs many versions, and one car accepts them.
    let thief = fleet.fork();
    (0..5).for_each(|n| thief.delta(T0 + 10 + n, 2));
    car.run(&mut thief.link(), T0 + 20).unwrap();
    assert_eq!(car.floor()[1], 6);

    fleet.delta(T0 + 20, 2);
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::Rollback { trusted: 6, offered: 2, .. });
    assert!(is_expected(&car.run(&mut fleet.link(), T0 + 21).unwrap_err()));
    rotate(&fleet.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    rotate(&fleet.keys(), RoleType::Root, T0 + ROOT_S).unwrap();

    // The root's keys are moved away; `publish` signs releases without them.
    let away = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fleet.keys()).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().starts_with("root-") {
            std::fs::rename(entry.path(), away.path().join(entry.file_name())).unwrap();
        }
    }

    assert_eq!(away.path().read_dir().unwrap().count(), 2);
    fleet.delta(T0 + 30, 3);
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(
        (car.live(), car.floor()[0], car.floor()[1]),
        (3, 3, 3),
        "the lower versions are accepted again"
    );

    // The stolen key signs nothing valid, even in a repository that has the new root.
    for version in 2..=3 {
        let name = format!("metadata/{version}.root.json");
        std::fs::copy(fleet.file(&name), thief.file(&name)).unwrap();
    }

    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "timestamp");
    for car in [&car, &fresh] {
        car.survives(
            &mut thief.link(),
            T0 + 32,
            is_expected,
            Recovery { fleet: &fleet, now: T0 + 33, live: 3 },
        );
    }
}

#[test]
fn releases_that_a_stolen_key_listed_are_not_re_signed() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();

    // A thief of the targets key lists a release that the publisher did not make.
    fleet.delta(T0 + 20, 3);
    rotate(&fleet.keys(), RoleType::Targets, T0 + ROOT_S).unwrap();
    let (store, keys) = (Objects::directory(&fleet.repository()).unwrap(), fleet.keys());
    let words = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let change = |re_sign: &[&str], revoke: &[&str]| Change {
        bundles: vec![VERSIONS.merged(2, 4)],
        re_sign: words(re_sign),
        revoke: words(revoke),
        expires_s: FRESH_S,
        ..Change::default()
    };

    let before = store.list().unwrap().len();
    for (re_sign, open) in [(&[][..], "1-snapshot"), (&["1", "2"], "3-from-000000000002 sha256 ")] {
        let refused =
            publish(&store, &keys, &change(re_sign, &[]), T0 + 30).unwrap_err().to_string();
        assert!(refused.contains(open), "{refused}");
        assert_eq!(store.list().unwrap().len(), before, "a refused publish wrote objects");
    }

    let window = Retention { releases: Some(1), grace_s: 0, expires_s: FRESH_S };
    let refused = prune(&store, &keys, &window, T0 + 30).unwrap_err().to_string();
    assert!(refused.contains("publish first"), "{refused}");

    let done = publish(&store, &keys, &change(&["1", "2"], &["3"]), T0 + 30).unwrap();
    assert_eq!(
        (done.resigned.len(), done.revoked),
        (2, words(&["versions/000000000003-from-000000000002"]))
    );

    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(car.live(), 4);
    let again = publish(&store, &keys, &change(&["1"], &[]), T0 + 40).unwrap_err().to_string();
    assert!(again.contains("--re-sign"), "{again}");
}

/// Two copies of the folder of keys rotate, each for itself. Cars may trust the root that was
/// published first.
#[test]
fn a_published_root_is_never_replaced() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let copy = fleet.fork();
    let of_copy = |now| {
        let change = Change { expires_s: FRESH_S, ..Change::default() };
        let store = Objects::directory(&fleet.repository()).unwrap();
        publish(&store, &copy.keys(), &change, now).unwrap_err().to_string()
    };
    rotate(&fleet.keys(), RoleType::Root, T0 + ROOT_S).unwrap();
    fleet.delta(T0 + 10, 2);
    let root = std::fs::read(fleet.file("metadata/2.root.json")).unwrap();

    let refused = of_copy(T0 + 11);
    assert!(refused.contains("has metadata/2.root.json"), "{refused}");
    for role in [RoleType::Root, RoleType::Timestamp] {
        rotate(&copy.keys(), role, T0 + ROOT_S + 1).unwrap();
        let refused = of_copy(T0 + 12);
        assert!(refused.contains("metadata/2.root.json is another root"), "{refused}");
    }
    assert_eq!(std::fs::read(fleet.file("metadata/2.root.json")).unwrap(), root);
    fleet.delta(T0 + 20, 3);
    car.run(&mut fleet.link(), T0 + 21).unwrap();
    assert_eq!(car.live(), 3);
}

/// Who can write to the store chooses no number that `publish` signs.
#[test]
fn names_that_no_key_signed_are_not_believed() {
    let fleet = Fleet::new();
    fleet.delta(T0 + 10, 2);
    fleet.delta(T0 + 20, 3);
    let path = fleet.file("metadata/1.targets.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let forged = text.replace("versions/000000000001-snapshot", "versions/999999999999-snapshot");
    assert_ne!(text, forged);
    std::fs::write(&path, forged).unwrap();
    let change = Change { restore: Some("2".to_owned()), ..Change::default() };
    let refused = fleet.try_change(T0 + 30, change).unwrap_err();
    assert!(refused.contains("no root in the folder of keys signed it"), "{refused}");
}

/// A store that fails after this many writes.
struct Dies<'a>(&'a dyn Store, Cell<u32>);

impl Store for Dies<'_> {
    fn get(&self, path: &str) -> anyhow::Result<Option<Vec<u8>>> {
        self.0.get(path)
    }
    fn bytes(&self, path: &str) -> anyhow::Result<Option<u64>> {
        self.0.bytes(path)
    }
    fn put(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.put(path, content)
    }

    fn put_new(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.put_new(path, content)
    }
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.replace(path, before, content)
    }
    fn list(&self) -> anyhow::Result<Vec<Object>> {
        self.0.list()
    }
    fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.0.delete(path)
    }
}

#[test]
fn a_killed_publish_leaves_nothing_that_a_car_sees() {
    let start = Fleet::new();
    let change = Change {
        bundles: vec![VERSIONS.deltas[1].clone()],
        expires_s: FRESH_S,
        ..Change::default()
    };

    for writes in 0.. {
        let fleet = start.fork();
        let car = Car::at_first_release(&start);
        let store = Objects::directory(&fleet.repository()).unwrap();
        let done = publish(&Dies(&store, Cell::new(writes)), &fleet.keys(), &change, T0 + 10);
        let status = car.run(&mut fleet.link(), T0 + 11).unwrap();

        assert_eq!(
            (car.live(), status.newest),
            if done.is_ok() { (2, Some(2)) } else { (1, Some(1)) }
        );

        publish(&store, &fleet.keys(), &change, T0 + 12).unwrap();
        car.run(&mut fleet.link(), T0 + 13).unwrap();
        assert_eq!(car.live(), 2);

        if done.is_ok() {
            assert!(writes > 5, "only {writes} writes");
            break;
        }
    }
}

#[test]
fn a_published_sequence_keeps_its_content() {
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();

    // The second release is packed again with the same sequence and other content.
    let other = fleet.folder.path().join("other.hatch");
    let mut parts = Parts::read(&VERSIONS.deltas[1]);
    parts.manifest.probe = None;
    parts.manifest.schema.features[0].hotness_max += 1;
    std::fs::write(&other, parts.bytes()).unwrap();
    let change = |revoke: &[&str]| Change {
        bundles: vec![other.clone()],
        revoke: revoke.iter().map(|r| (*r).to_owned()).collect(),
        expires_s: FRESH_S,
        ..Change::default()
    };

    let refused = |now, revoke: &[&str]| {
        let refused = publish(&store, &fleet.keys(), &change(revoke), now).unwrap_err().to_string();
        assert!(refused.contains("was published with other content"), "{refused}");
    };
    fleet.delta(T0 + 10, 2);

    refused(T0 + 11, &[]);
    refused(T0 + 12, &["2"]);
    fleet.revoke(T0 + 13, 2);
    fleet.delta(T0 + 14, 2);
    fleet.revoke(T0 + 15, 2);
    refused(T0 + 16, &[]);

    // A publish that was killed before its timestamp showed its release to no car.
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();
    let first = Change {
        bundles: vec![VERSIONS.deltas[1].clone()],
        expires_s: FRESH_S,
        ..Change::default()
    };

    let writes = (0..).find(|&writes| {
        let _ = publish(&Dies(&store, Cell::new(writes)), &fleet.keys(), &first, T0 + 10);
        fleet.file("metadata/2.snapshot.json").exists()
    });
    assert!(writes.is_some());

    publish(&store, &fleet.keys(), &change(&[]), T0 + 11).unwrap();
}

#[test]
fn a_lost_timestamp_is_no_new_repository() {
    let fleet = Fleet::new();
    fleet.delta(T0 + 10, 2);
    let (store, keys) = (Objects::directory(&fleet.repository()).unwrap(), fleet.keys());
    let timestamp = fleet.file("metadata/timestamp.json");
    let content = std::fs::read(&timestamp).unwrap();
    let change = Change { expires_s: FRESH_S, ..Change::default() };

    let refused = |content: Option<&[u8]>| {
        match content {
            Some(content) => std::fs::write(&timestamp, content).unwrap(),
            None => std::fs::remove_file(&timestamp).unwrap(),
        }
        publish(&store, &keys, &change, T0 + 20).unwrap_err().to_string()
    };
    for cut in [&content[..content.len() / 2], b""] {
        let said = refused(Some(cut));
        assert!(said.starts_with("metadata/timestamp.json is not signed by the keys"), "{said}");
    }
    let said = refused(None);
    assert!(said.contains("metadata/timestamp.json is missing, and metadata/"), "{said}");

    std::fs::write(&timestamp, &content).unwrap();
    publish(&store, &keys, &change, T0 + 20).unwrap();
}

#[test]
fn an_empty_chunk_is_uploaded_again() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let chunk = fleet.chunks(&VERSIONS.deltas[1]).remove(0);
    std::fs::create_dir_all(chunk.parent().unwrap()).unwrap();
    std::fs::write(&chunk, b"").unwrap();
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(car.live(), 2);

    // A chunk that is damaged later has its length still.
    let mut content = std::fs::read(&chunk).unwrap();
    content[0] ^= 1;
    std::fs::write(&chunk, &content).unwrap();
    fleet.delta(T0 + 20, 2);
    content[0] ^= 1;
    assert_eq!(std::fs::read(&chunk).unwrap(), content);
}

#[test]
fn a_bundle_that_no_car_would_take_is_refused() {
    let fleet = Fleet::new();
    let path = fleet.folder.path().join("odd.hatch");
    let mut parts = Parts::read(&VERSIONS.snapshots[1]);
    parts.manifest.generation.lineage = ".versions".to_owned();
    std::fs::write(&path, parts.bytes()).unwrap();
    let change = Change { bundles: vec![path], ..Change::default() };
    let store = Objects::directory(&fleet.repository()).unwrap();
    let refused = publish(&store, &fleet.keys(), &change, T0 + 10).unwrap_err().to_string();
    assert!(refused.contains("lineage: `.versions`"), "{refused}");
}

#[test]
fn a_share_of_the_fleet_goes_first() {
    let fleet = Fleet::new();
    let (mut first, mut last) = (Car::at_first_release(&fleet), Car::at_first_release(&fleet));
    (first.sync.cohort, last.sync.cohort) = (4, 5);
    let share = |now, share| {
        let bundles = vec![VERSIONS.deltas[1].clone()];
        let change = Change { bundles, share, expires_s: FRESH_S, ..Change::default() };
        publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &change, now)
            .unwrap()
    };
    share(T0 + 10, 5);
    for car in [&first, &last] {
        car.run(&mut fleet.link(), T0 + 11).unwrap();
    }
    assert_eq!((first.live(), last.live()), (2, 1));
    let widened = share(T0 + 12, 100);
    assert_eq!(widened.chunks, 0, "chunks were uploaded twice");
    for car in [&first, &last] {
        car.run(&mut fleet.link(), T0 + 13).unwrap();
    }
    assert_eq!((first.live(), last.live()), (2, 2));
}

/// A store in which another publisher publishes just before the first write to a path that ends
/// with the given name.
struct Rival<'a>(&'a dyn Store, &'a Fleet, &'static str, Cell<bool>);

impl Rival<'_> {
    fn others(&self, path: &str) {
        if path.ends_with(self.2) && !self.3.replace(true) {
            self.1.delta(T0 + 10, 2);
        }
    }
}

impl Store for Rival<'_> {
    fn get(&self, path: &str) -> anyhow::Result<Option<Vec<u8>>> {
        self.0.get(path)
    }
    fn bytes(&self, path: &str) -> anyhow::Result<Option<u64>> {
        self.0.bytes(path)
    }
    fn put(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        self.0.put(path, content)
    }
    fn put_new(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        self.others(path);
        self.0.put_new(path, content)
    }
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> anyhow::Result<()> {
        self.others(path);
        self.0.replace(path, before, content)
    }
    fn list(&self) -> anyhow::Result<Vec<Object>> {
        self.0.list()
    }
    fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.0.delete(path)
    }
}

#[test]
fn of_two_publishers_one_must_try_again_and_no_car_sees_both() {
    for moment in ["targets.json", "snapshot.json", "timestamp.json"] {
        beside_a_rival(moment);
    }
}

fn beside_a_rival(moment: &'static str) {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let store = Objects::directory(&fleet.repository()).unwrap();
    let bundles = vec![VERSIONS.snapshots[2].clone()];
    let change = Change { bundles, expires_s: FRESH_S, ..Change::default() };
    let refused =
        publish(&Rival(&store, &fleet, moment, Cell::new(false)), &fleet.keys(), &change, T0 + 11)
            .unwrap_err();
    assert!(format!("{refused:#}").contains("another publisher"), "{refused:#}");
    car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!(car.live(), 2);
    publish(&store, &fleet.keys(), &change, T0 + 13).unwrap();
    car.run(&mut fleet.link(), T0 + 14).unwrap();
    assert_eq!(car.live(), 3);
}

/// A store whose client may send each conditional write twice, as after a lost first answer, and
/// which may have a clock of its own.
struct Odd<'a> {
    store: &'a dyn Store,
    repeats: bool,
    time: Option<u64>,
}

impl Store for Odd<'_> {
    fn get(&self, path: &str) -> anyhow::Result<Option<Vec<u8>>> {
        self.store.get(path)
    }
    fn bytes(&self, path: &str) -> anyhow::Result<Option<u64>> {
        self.store.bytes(path)
    }
    fn put(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        self.store.put(path, content)
    }
    fn put_new(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        if self.repeats {
            self.store.put_new(path, content.clone())?;
        }
        self.store.put_new(path, content)
    }
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> anyhow::Result<()> {
        if self.repeats {
            self.store.replace(path, before, content.clone())?;
        }
        self.store.replace(path, before, content)
    }
    fn stored_at(&self, path: &str) -> anyhow::Result<Option<u64>> {
        Ok(self.time.filter(|_| matches!(self.bytes(path), Ok(Some(_)))))
    }
    fn list(&self) -> anyhow::Result<Vec<Object>> {
        self.store.list()
    }
    fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.store.delete(path)
    }
}

#[test]
fn a_write_that_was_stored_and_refused_when_repeated_is_no_failure() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let store = Objects::directory(&fleet.repository()).unwrap();
    let bundles = vec![VERSIONS.deltas[1].clone()];
    let change = Change { bundles, expires_s: FRESH_S, ..Change::default() };
    let repeating = Odd { store: &store, repeats: true, time: None };
    assert!(repeating.put_new("x", vec![1]).is_err(), "the repetition is not refused");
    publish(&repeating, &fleet.keys(), &change, T0 + 11).unwrap();
    car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!(car.live(), 2);
}

const YEAR: u64 = 365 * 24 * 3600;

/// Returns the signed time of the timestamp in force.
fn signed_time(fleet: &Fleet) -> u64 {
    let stamp = std::fs::read(fleet.file("metadata/timestamp.json")).unwrap();
    let stamp: serde_json::Value = serde_json::from_slice(&stamp).unwrap();
    stamp["signed"]["published"].as_u64().unwrap()
}

#[test]
fn a_clock_behind_the_newest_signed_time_signs_nothing_until_the_key_is_rotated() {
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();
    let renew = Change { expires_s: FRESH_S, ..Change::default() };
    fleet.delta(T0 + 10, 2);
    // Clocks of two publishers differ a little; the signed time never goes down.
    publish(&store, &fleet.keys(), &renew, T0 + 10 - CLOCK_SLACK_S).unwrap();
    assert_eq!(signed_time(&fleet), T0 + 10);
    publish(&store, &fleet.keys(), &renew, T0 + 60 * YEAR).unwrap();

    let before = store.list().unwrap();
    let whole = Retention { releases: Some(1), grace_s: 0, expires_s: FRESH_S };
    let refusals = || {
        let change = Change { bundles: vec![VERSIONS.deltas[2].clone()], ..renew.clone() };
        [
            publish(&store, &fleet.keys(), &change, T0 + 20).unwrap_err(),
            publish(&store, &fleet.keys(), &renew, T0 + 60 * YEAR - 2 * CLOCK_SLACK_S).unwrap_err(),
            prune(&store, &fleet.keys(), &whole, T0 + 20).unwrap_err(),
        ]
    };
    for refused in refusals() {
        let cause = refused.downcast_ref();
        assert!(matches!(cause, Some(ClockError::Behind { .. })), "{refused}");
        assert!(refused.to_string().contains("2086-12-31T08:00:00Z"), "{refused}");
    }
    assert!(refusals()[0].to_string().contains("2027-01-15T08:00:20Z"));
    assert_eq!(store.list().unwrap(), before, "a refused publisher writes and removes nothing");

    // Other keys do not make cars forget the time.
    rotate(&fleet.keys(), RoleType::Snapshot, T0 + ROOT_S).unwrap();
    assert!(refusals()[0].to_string().contains("The publisher's clock"));
    rotate(&fleet.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    fleet.delta(T0 + 20, 3);
    assert_eq!(signed_time(&fleet), T0 + 20);
}

#[test]
fn a_clock_ahead_of_the_last_publish_and_of_the_store_publishes_nothing() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let store = Objects::directory(&fleet.repository()).unwrap();
    let bundles = vec![VERSIONS.deltas[1].clone()];
    let change = Change { bundles, expires_s: FRESH_S, ..Change::default() };
    let at = |store_time, now| {
        let clocked = Odd { store: &store, repeats: false, time: Some(store_time) };
        publish(&clocked, &fleet.keys(), &change, now)
    };

    let refused = at(T0 + 10, T0 + 60 * YEAR).unwrap_err();
    let cause = refused.downcast_ref();
    assert!(matches!(cause, Some(ClockError::NotThatOfTheStore { .. })), "{refused}");
    for time in ["2086-12-31T08:00:00Z", "2027-01-15T08:00:10Z"] {
        assert!(refused.to_string().contains(time), "{refused}");
    }
    assert_eq!(signed_time(&fleet), T0);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(car.live(), 1);

    // A clock that is right publishes, also to a store whose clock is wrong, and after a pause.
    at(0, T0 + 12).unwrap();
    car.run(&mut fleet.link(), T0 + 13).unwrap();
    assert_eq!(car.live(), 2);
    at(T0 + YEAR + 60, T0 + YEAR).unwrap();
    assert_eq!(signed_time(&fleet), T0 + YEAR);
}
