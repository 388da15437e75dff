//! A fleet to test sync with: keys, a repository whose releases are those of [`Versions`], and a
//! car on a simulated disk.

use crate::flash_check::whole_generation;
use crate::sim_disk::SimDisk;
use crate::versions::{Versions, copy};
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Clock;
use hatchback::update::Updater;
use hatchback::update::apply::{Host, Policy, Watched};
use hatchback::update::error::UpdateError;
use hatchback::update::link::{Fetcher, Link, LinkLimits};
use hatchback::update::release::chunk_path;
use hatchback::update::state::{UpdateState, UpdateStatus};
use hatchback::update::trust::Trust;
use hatchback_link::DirectoryLink;
use hatchback_tools::repository::keys::new_fleet;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// When the story begins, seconds since 1970.
pub const T0: u64 = 1_800_000_000;
/// A timestamp lasts this long, everything else longer.
pub const FRESH_S: u64 = 1_000;
/// A root lasts this long.
pub const ROOT_S: u64 = 1_000_000;

/// The generations of the model.
pub static VERSIONS: LazyLock<Versions> = LazyLock::new(|| Versions::new(4, 600, 11));

/// A clock that moves by so many seconds whenever it is read.
pub struct Ticks(pub AtomicU64, pub u64);

impl Clock for Ticks {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.fetch_add(self.1, Ordering::Relaxed))
    }
}

/// A repository and its keys.
pub struct Fleet {
    /// Keys, repository.
    pub folder: tempfile::TempDir,
}

impl Default for Fleet {
    fn default() -> Self {
        Self::new()
    }
}

impl Fleet {
    /// A fleet whose first release is snapshot 1.
    pub fn new() -> Self {
        Self::signed_by([(2, 2), (1, 1), (1, 1), (1, 1)])
    }

    /// A fleet whose first release is this bundle.
    pub fn of(snapshot: &Path) -> Self {
        let fleet = Self { folder: tempfile::tempdir().unwrap() };
        new_fleet(&fleet.keys(), [(2, 2), (1, 1), (1, 1), (1, 1)], T0 + ROOT_S).unwrap();
        fleet.publish(T0, snapshot);
        fleet
    }

    /// A fleet with so many keys and thresholds a role.
    pub fn signed_by(counts: [(usize, u64); 4]) -> Self {
        let fleet = Self { folder: tempfile::tempdir().unwrap() };
        new_fleet(&fleet.keys(), counts, T0 + ROOT_S).unwrap();
        fleet.publish(T0, &VERSIONS.snapshots[0]);
        fleet
    }

    /// The folder of its keys.
    pub fn keys(&self) -> PathBuf {
        self.folder.path().join("keys")
    }

    /// Its repository.
    pub fn repository(&self) -> PathBuf {
        self.folder.path().join("repository")
    }

    /// Publishes a bundle.
    pub fn publish(&self, now: u64, bundle: &Path) {
        self.change(now, Change { bundles: vec![bundle.to_owned()], ..Change::default() });
    }

    /// Takes a sequence back.
    pub fn revoke(&self, now: u64, sequence: u64) {
        self.change(now, Change { revoke: vec![sequence.to_string()], ..Change::default() });
    }

    fn change(&self, now: u64, change: Change) {
        let change = Change { expires_s: FRESH_S, ..change };
        publish(&Objects::directory(&self.repository()).unwrap(), &self.keys(), &change, now)
            .unwrap();
    }

    /// Publishes the delta to a generation.
    pub fn delta(&self, now: u64, generation: usize) {
        self.publish(now, &VERSIONS.deltas[generation - 1]);
    }

    /// A file of the repository.
    pub fn file(&self, path: &str) -> PathBuf {
        self.repository().join(path)
    }

    /// The same keys and the same history from here on apart.
    pub fn fork(&self) -> Self {
        let fork = Self { folder: tempfile::tempdir().unwrap() };
        copy(self.folder.path(), fork.folder.path());
        fork
    }

    /// A link to it without faults.
    pub fn link(&self) -> DirectoryLink {
        DirectoryLink(self.repository())
    }

    /// Where the chunks of a bundle lie, in its order.
    pub fn chunks(&self, bundle: &Path) -> Vec<PathBuf> {
        let bundle = BundleReader::open(bundle).unwrap();
        let chunks = bundle.manifest().blobs.iter().flat_map(|b| &b.chunks);
        chunks.map(|c| self.file(&chunk_path(&c.sha256))).collect()
    }
}

/// A car on a simulated disk.
pub struct Car {
    /// Its disk.
    pub disk: SimDisk,
    /// Its sync.
    pub sync: Updater,
    /// What a release must show.
    pub policy: Policy,
    /// What is seen of a release on probation.
    pub watched: Option<Watched>,
}

impl Car {
    /// A car that trusts the fleet's first root and has nothing yet.
    pub fn new(fleet: &Fleet) -> Self {
        let disk = SimDisk::default();
        let sync = Updater {
            disk: disk.shared(),
            directory: "/sync".into(),
            flash: "/flash".into(),
            lineage: None,
            cohort: 0,
        };
        let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
        Trust::init(&disk, &sync.directory, &root).unwrap();
        Self { disk, sync, policy: Policy::default(), watched: None }
    }

    /// A car that has synced with the fleet's first release.
    pub fn at_first_release(fleet: &Fleet) -> Self {
        let car = Self::new(fleet);
        car.run(&mut fleet.link(), T0 + 1).unwrap();
        car
    }

    /// Both sides in turn over `link`.
    pub fn run(&self, link: &mut dyn Link, now: u64) -> Result<UpdateStatus, UpdateError> {
        self.run_timed(link, now, &Ticks(AtomicU64::new(0), 0), LinkLimits::default())
    }

    /// The same, timed by `clock` and within `limits`.
    pub fn run_timed(
        &self,
        link: &mut dyn Link,
        now: u64,
        clock: &dyn Clock,
        limits: LinkLimits,
    ) -> Result<UpdateStatus, UpdateError> {
        self.sync.run(&mut Fetcher::new(link, clock, limits), &self.host(), now, |_, _| {})
    }

    /// What the process around its updates brings to them.
    pub fn host(&self) -> Host<'static> {
        Host {
            policy: self.policy,
            budget: Budget::default(),
            watched: self.watched,
            root: None,
            rest: &|| {},
        }
    }

    /// The sequence that is live, its rows as they must be; 0 if nothing is.
    pub fn live(&self) -> usize {
        match Flash::open(&self.sync.disk, &self.sync.flash) {
            Ok(flash) => whole_generation(&flash, &VERSIONS, "the car"),
            Err(_) => 0,
        }
    }

    /// An attack fails and changes nothing; when it is over the next run brings `after`.
    #[track_caller]
    pub fn survives(
        &self,
        link: &mut dyn Link,
        now: u64,
        named: impl Fn(&UpdateError) -> bool,
        (healed, then, after): (&Fleet, u64, usize),
    ) {
        let (before, floor) = (self.live(), self.floor());
        let error = self.run(link, now).expect_err("the attack went unnoticed");
        assert!(named(&error), "{error:?}");
        assert_eq!(self.sync.status().unwrap().state, UpdateState::Failed);
        assert_eq!(self.sync.status().unwrap().error, Some(error.to_string()));
        assert_eq!(self.live(), before, "the live generation changed");
        assert!(self.floor() >= floor, "the floor sank");
        self.run(&mut healed.link(), then).unwrap();
        assert_eq!(self.live(), after, "did not recover");
    }

    /// What the car accepts nothing below.
    pub fn floor(&self) -> [u64; 4] {
        let floor = Trust::open(&self.sync.disk, &self.sync.directory).unwrap().floor();
        [floor.root, floor.timestamp, floor.snapshot, floor.targets]
    }
}
