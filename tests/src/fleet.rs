//! A fleet for the tests of updates: keys, a repository with the releases of [`Versions`], and a
//! car on a simulated disk.

use crate::flash_check::whole_generation;
use crate::onnx;
use crate::rewrite::Parts;
use crate::sim_disk::SimDisk;
use crate::versions::{Versions, copy};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::sha256;
use hatchback::clock::Clock;
use hatchback::flash::Flash;
use hatchback::model::budget::Budget;
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::host::{Host, Policy, Watched};
use hatchback::update::link::{Fetcher, Link, LinkLimits};
use hatchback::update::program::Program;
use hatchback::update::release::{Release, chunk_path};
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback::update::trust::Trust;
use hatchback_link::DirectoryLink;
use hatchback_tools::repository::keys::{RoleCounts, new_fleet};
use hatchback_tools::repository::publish::{Change, Published, publish};
use hatchback_tools::repository::store::Objects;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Start of every test, seconds since 1970.
pub const T0: u64 = 1_800_000_000;
/// Lifetime of a timestamp, s. Other metadata last longer.
pub const FRESH_S: u64 = 1_000;
/// Lifetime of a root, s.
pub const ROOT_S: u64 = 1_000_000;

/// The generations of the model.
pub static VERSIONS: LazyLock<Versions> = LazyLock::new(|| Versions::new(4, 600, 11));

/// A clock that advances whenever it is read.
pub struct Ticks {
    seconds: AtomicU64,
    step: u64,
}

impl Ticks {
    /// Returns a clock that does not advance.
    pub fn still() -> Self {
        Self::stepping(0)
    }

    /// Returns a clock that advances by `step` seconds at each reading.
    pub fn stepping(step: u64) -> Self {
        Self { seconds: AtomicU64::new(0), step }
    }
}

impl Clock for Ticks {
    fn now(&self) -> Duration {
        Duration::from_secs(self.seconds.fetch_add(self.step, Ordering::Relaxed))
    }
}

/// A repository and its keys.
pub struct Fleet {
    /// Holds the folders `keys` and `repository`.
    pub folder: tempfile::TempDir,
}

impl Default for Fleet {
    fn default() -> Self {
        Self::new()
    }
}

impl Fleet {
    /// Returns a fleet whose first release is snapshot 1.
    pub fn new() -> Self {
        Self::signed_by([(2, 2), (1, 1), (1, 1), (1, 1)])
    }

    /// Returns a fleet whose first release is `snapshot`.
    pub fn of(snapshot: &Path) -> Self {
        let fleet = Self::unpublished([(2, 2), (1, 1), (1, 1), (1, 1)]);
        fleet.publish(T0, snapshot);
        fleet
    }

    /// Returns a fleet with these keys and thresholds for root, targets, snapshot and timestamp.
    pub fn signed_by(counts: [(usize, u64); 4]) -> Self {
        let fleet = Self::unpublished(counts);
        fleet.publish(T0, &VERSIONS.snapshots[0]);
        fleet
    }

    fn unpublished(counts: [(usize, u64); 4]) -> Self {
        let fleet = Self { folder: tempfile::tempdir().unwrap() };
        let counts = counts.map(|(keys, threshold)| RoleCounts { keys, threshold });
        new_fleet(&fleet.keys(), counts, T0 + ROOT_S).unwrap();
        fleet
    }

    /// Returns the folder of the keys.
    pub fn keys(&self) -> PathBuf {
        self.folder.path().join("keys")
    }

    /// Returns the folder of the repository.
    pub fn repository(&self) -> PathBuf {
        self.folder.path().join("repository")
    }

    /// Publishes a bundle.
    pub fn publish(&self, now: u64, bundle: &Path) {
        self.publish_all(now, &[bundle]);
    }

    /// Publishes bundles together.
    pub fn publish_all(&self, now: u64, bundles: &[&Path]) {
        let bundles = bundles.iter().map(|bundle| bundle.to_path_buf()).collect();
        self.change(now, Change { bundles, ..Change::default() });
    }

    /// Writes `bundle` with a network that has these operators more, and returns its path.
    pub fn needing(&self, bundle: &Path, operators: &[&str]) -> PathBuf {
        let mut parts = Parts::read(bundle);
        let network = onnx::concat_and(&VERSIONS.widths(), "out", operators);
        parts.set_content(parts.manifest.dense, &network);
        // Its parent may be published in this form alone.
        parts.manifest.packed_on = None;
        let name = bundle.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = self.folder.path().join(format!("{name}-{}.hatch", operators.join("-")));
        std::fs::write(&path, parts.bytes()).unwrap();
        path
    }

    /// Revokes a sequence.
    pub fn revoke(&self, now: u64, sequence: u64) {
        self.change(now, Change { revoke: vec![sequence.to_string()], ..Change::default() });
    }

    /// Restores a release.
    pub fn restore(&self, now: u64, release: &str) -> Published {
        self.change(now, Change { restore: Some(release.to_owned()), ..Change::default() })
    }

    fn change(&self, now: u64, change: Change) -> Published {
        self.try_change(now, change).unwrap()
    }

    /// Publishes `change`.
    ///
    /// # Errors
    /// The refusal, as a publisher reads it.
    pub fn try_change(&self, now: u64, change: Change) -> Result<Published, String> {
        let change = Change { expires_s: FRESH_S, ..change };
        let store = Objects::directory(&self.repository()).unwrap();
        publish(&store, &self.keys(), &change, now).map_err(|e| format!("{e:#}"))
    }

    /// Publishes the delta that leads to `generation`.
    pub fn delta(&self, now: u64, generation: usize) {
        self.publish(now, &VERSIONS.deltas[generation - 1]);
    }

    /// Returns the path of a file of the repository.
    pub fn file(&self, path: &str) -> PathBuf {
        self.repository().join(path)
    }

    /// Returns a copy of the keys and of the repository.
    pub fn fork(&self) -> Self {
        let fork = Self { folder: tempfile::tempdir().unwrap() };
        copy(self.folder.path(), fork.folder.path());
        fork
    }

    /// Returns a link without faults to the repository.
    pub fn link(&self) -> DirectoryLink {
        DirectoryLink(self.repository())
    }

    /// Returns the paths of the chunks of `bundle`, in its order.
    pub fn chunks(&self, bundle: &Path) -> Vec<PathBuf> {
        let bundle = BundleReader::open(bundle).unwrap();
        let chunks = bundle.manifest().blobs.iter().flat_map(|b| &b.chunks);
        chunks.map(|c| self.file(&chunk_path(&c.sha256))).collect()
    }
}

/// Returns the release of the first snapshot, as the repository lists it.
pub fn first_release() -> Release {
    release_of(&VERSIONS.snapshots[0])
}

/// Returns the release of `bundle`, as the repository lists it.
pub fn release_of(bundle: &Path) -> Release {
    let bundle = BundleReader::open(bundle).unwrap();
    let content = bundle.manifest_bytes();
    Release {
        generation: bundle.manifest().generation.clone(),
        parent: bundle.manifest().parent,
        share: 100,
        manifest_bytes: content.len() as u64,
        manifest: sha256(content),
        ..Release::default()
    }
}

/// A car on a simulated disk.
#[allow(missing_docs)]
pub struct Car {
    pub disk: SimDisk,
    pub sync: Updater,
    pub policy: Policy,
    /// What the car observes of a release on probation.
    pub watched: Option<Watched>,
}

/// What must hold after an attack: the car syncs with this fleet at this time, and this generation
/// is live.
#[allow(missing_docs)]
pub struct Recovery<'a> {
    pub fleet: &'a Fleet,
    pub now: u64,
    pub live: usize,
}

impl Car {
    /// Returns a car that trusts the fleet's first root and has no generation.
    pub fn new(fleet: &Fleet) -> Self {
        let disk = SimDisk::default();
        let sync = Updater {
            disk: disk.shared(),
            directory: "/sync".into(),
            flash: "/flash".into(),
            lineage: None,
            cohort: 0,
            program: Program::this(),
        };
        let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
        Trust::init(&disk, &sync.directory, &root).unwrap();
        Self { disk, sync, policy: Policy::default(), watched: None }
    }

    /// Returns a car whose program is `version` and lacks these operators.
    pub fn lacking(fleet: &Fleet, version: &str, operators: &[&str]) -> Self {
        let mut car = Self::new(fleet);
        car.set_program(version, operators);
        car
    }

    /// Gives the car a program of this version, which lacks these operators.
    pub fn set_program(&mut self, version: &str, lacks: &[&str]) {
        let mut program = Program::clone(&Program::this());
        version.clone_into(&mut program.version);
        lacks.iter().for_each(|name| assert!(program.known.remove(&format!("operator-{name}"))));
        self.sync.program = Arc::new(program);
    }

    /// Returns a car that has installed the fleet's first release.
    pub fn at_first_release(fleet: &Fleet) -> Self {
        let car = Self::new(fleet);
        car.run(&mut fleet.link(), T0 + 1).unwrap();
        car
    }

    /// Fetches over `link` and applies releases in turn.
    pub fn run(&self, link: &mut dyn Link, now: u64) -> Result<UpdateStatus, UpdateError> {
        self.run_timed(link, now, &Ticks::still(), LinkLimits::default())
    }

    /// Like `run`, timed by `clock` and within `limits`.
    pub fn run_timed(
        &self,
        link: &mut dyn Link,
        now: u64,
        clock: &dyn Clock,
        limits: LinkLimits,
    ) -> Result<UpdateStatus, UpdateError> {
        self.sync.run(&mut Fetcher::new(link, clock, limits), &self.host(), now, |_, _| {})
    }

    /// Lets the sync process poll once over `link`.
    pub fn poll(&self, link: &mut dyn Link, now: u64) -> Result<UpdateStatus, UpdateError> {
        let clock = Ticks::still();
        let mut fetcher = Fetcher::new(link, &clock, LinkLimits::default());
        self.sync.fetch(&mut fetcher, now, |_, _| {})
    }

    /// Lets the serving process take steps until it waits.
    pub fn apply(&self, now: u64) {
        while self.sync.advance(&self.host(), now).unwrap() {}
    }

    /// Opens the live generation.
    pub fn flash(&self) -> Flash {
        Flash::open(&self.sync.disk, &self.sync.flash).unwrap()
    }

    /// Returns what the serving process of this car supplies.
    pub fn host(&self) -> Host<'static> {
        Host {
            policy: self.policy,
            budget: Budget::default(),
            watched: self.watched,
            unservable: None,
            root: None,
            boot: 0,
            yield_now: &|| {},
        }
    }

    /// Returns the live sequence after checking its rows; 0 if nothing is live.
    pub fn live(&self) -> usize {
        match Flash::open(&self.sync.disk, &self.sync.flash) {
            Ok(flash) => whole_generation(&flash, &VERSIONS, "the car"),
            Err(_) => 0,
        }
    }

    /// Checks that an attack over `link` fails with an expected error and changes nothing, and that
    /// the next run recovers.
    #[track_caller]
    pub fn survives(
        &self,
        link: &mut dyn Link,
        now: u64,
        is_expected: impl Fn(&UpdateError) -> bool,
        then: Recovery<'_>,
    ) {
        let (before, floor) = (self.live(), self.floor());
        let error = self.run(link, now).expect_err("the attack was not detected");
        assert!(is_expected(&error), "{error:?}");
        assert_eq!(self.sync.status().unwrap().state, UpdateState::Failed);
        assert_eq!(self.sync.status().unwrap().error, Some(error.to_string()));
        assert_eq!(self.live(), before, "the live generation changed");
        assert!(self.floor() >= floor, "the rollback floor went down");

        self.run(&mut then.fleet.link(), then.now).unwrap();
        assert_eq!(self.live(), then.live, "the car did not recover");
    }

    /// Returns the rollback floor: root, timestamp, snapshot, targets.
    pub fn floor(&self) -> [u64; 4] {
        let floor = Trust::open(&self.sync.disk, &self.sync.directory).unwrap().floor();
        [floor.root, floor.timestamp, floor.snapshot, floor.targets]
    }
}
