//! Every file of a car, damaged in every way. For each file of the flash directory and of the sync
//! directory, in several moments of an update: the car serves on where what it serves is whole, and
//! it is at the newest release by itself once one can be had. Drives the steps that the daemon and
//! the sync process call, on the real file system, with a clock of its own. Never waits.
//!
//! A file and a damage have four cases: the damage strikes the running or the stopped car, and the
//! next release is a delta with a snapshot or a snapshot alone. Two of the four run by default.
//! `HATCHBACK_DAMAGE=all` runs all, and `HATCHBACK_DAMAGE=WORD` those whose line has WORD, such as
//! `Rest flash/live fifo Running Both`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::car::update_steps::{ModelUpdates, UpdateSteps, record_end};
use hatchback::clock::Clock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::model::budget::Budget;
use hatchback::schema::sample::Sample;
use hatchback::update::apply::Policy;
use hatchback::update::link::{Link, LinkRules};
use hatchback::{
    Generation, LookupStatus, MaintenanceRules, RequestError, Serving, Trust, UpdateState, Updater,
    unmix,
};
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::{Fleet, T0, VERSIONS};
use hatchback_tests::models::batch_for;
use hatchback_tests::random::Random;
use hatchback_tests::versions::copy;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::rotate;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};
use tough::schema::RoleType;

/// The name under which the model is served.
const NAME: &str = "car";
/// Simulated time between two rounds, s.
const ROUND_S: u64 = 5;
/// Rounds after the damage, before the next release is published.
const ROUNDS_BEFORE: usize = 30;
/// Rounds in which a car must reach the newest release.
const ROUNDS_MAX: usize = 120;
/// Days that a car may take if it is not there at once: the byte budget counts by day.
const DAYS_MAX: usize = 2;
const DAY_S: u64 = 24 * 60 * 60;
/// Lifetime of all metadata, s.
const LASTING_S: u64 = 60 * DAY_S;
/// Time without a step after which a case no longer holds up the others. A step takes milliseconds.
const SLOW: Duration = Duration::from_millis(500);
/// Time after its last step after which a case counts as one that hangs.
const HANGS: Duration = Duration::from_secs(90);
/// Set in the process that this test starts without root's right to open every file.
const CHILD: &str = "HATCHBACK_DAMAGE_CHILD";

// What the test knows of names in the two directories.

/// Returns whether the damage of `file` may keep a new process from serving until a release comes.
/// It may only where `file` belongs to a generation.
fn may_stop_serving(file: &str) -> bool {
    file.starts_with("flash/g")
}

/// Returns whether `file` can be a mark against a release.
fn is_mark(file: &str) -> bool {
    file.ends_with(".refused")
}

/// Returns a file of the directory of `file` that a link in place of `file` leads to: a record, or
/// a manifest. Such a file is only ever replaced as a whole.
fn link_target(scene: &Scene, file: &str) -> String {
    let (directory, _) = file.split_once('/').unwrap();
    let target = ["/live", "/floor", "/g"].iter().find_map(|start| {
        let start = format!("{directory}{start}");
        scene.files.iter().find(|other| *other != file && other.starts_with(&start))
    });
    target.unwrap_or_else(|| panic!("no target for {file}")).clone()
}

// The cases.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Damage {
    Missing,
    Empty,
    Half,
    Zeroed,
    Flipped,
    Garbage,
    Dangling,
    LinkInside,
    LinkOutside,
    Fifo,
    Directory,
    FullDirectory,
    NoPermission,
}

const DAMAGES: [(Damage, &str); 13] = [
    (Damage::Missing, "missing"),
    (Damage::Empty, "empty"),
    (Damage::Half, "half"),
    (Damage::Zeroed, "zeroed"),
    (Damage::Flipped, "flipped"),
    (Damage::Garbage, "garbage"),
    (Damage::Dangling, "dangling"),
    (Damage::LinkInside, "link-in"),
    (Damage::LinkOutside, "link-out"),
    (Damage::Fifo, "fifo"),
    (Damage::Directory, "dir"),
    (Damage::FullDirectory, "full-dir"),
    (Damage::NoPermission, "mode-000"),
];

/// When the damage strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Running,
    Stopped,
}

/// How the next release is published: as a delta and a snapshot, or as a snapshot alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Both,
    Snapshot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Rest,
    Staged,
    Probation,
    Rotated,
    Merged,
    Interrupted,
}

const MOMENTS: [Moment; 6] = [
    Moment::Rest,
    Moment::Staged,
    Moment::Probation,
    Moment::Rotated,
    Moment::Merged,
    Moment::Interrupted,
];

#[derive(Clone)]
struct Case {
    scene: Arc<Scene>,
    file: String,
    damage: Damage,
    when: When,
    next: Next,
}

impl Case {
    fn line(&self) -> String {
        let name = DAMAGES.iter().find(|(damage, _)| *damage == self.damage).unwrap().1;
        let Self { scene, file, when, next, .. } = self;
        format!("{:?} {} {name} {when:?} {next:?}", scene.moment, short(file))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Skipped,
    Healed,
    /// Healed after midnight.
    Late,
    Stuck(String),
    Hangs,
    /// Did not serve what is whole.
    Down(String),
    Wrong(String),
}

impl Outcome {
    fn cell(&self) -> &'static str {
        match self {
            Self::Skipped => "-",
            Self::Healed => ".",
            Self::Late => "late",
            Self::Stuck(_) => "STUCK",
            Self::Hangs => "HANGS",
            Self::Down(_) => "DOWN",
            Self::Wrong(_) => "WRONG",
        }
    }

    fn reason(&self) -> Option<&str> {
        match self {
            Self::Stuck(reason) | Self::Down(reason) | Self::Wrong(reason) => Some(reason),
            Self::Hangs => Some("it does not end"),
            _ => None,
        }
    }
}

/// Returns `name` with every hash and every sequence of a folder name shortened.
fn short(name: &str) -> String {
    let is_hash = |part: &&str| part.len() >= 64 && part.chars().all(|c| c.is_ascii_hexdigit());
    let mut name = name.to_owned();
    let hashes: Vec<String> =
        name.split(['/', '.', '-', ' ']).filter(is_hash).map(str::to_owned).collect();
    hashes.iter().for_each(|hash| name = name.replace(hash.as_str(), "HASH"));
    name.replace("g00000000000", "g..")
}

// The clock and the log of a car.

/// Returns a folder in memory if the system has one: the cases sync hundreds of thousands of times.
fn folder() -> tempfile::TempDir {
    let made = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    made.unwrap()
}

/// A clock that the car's rounds advance.
#[derive(Default)]
struct SimClock(AtomicU64);

impl Clock for SimClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

thread_local! {
    /// The last warning of the case that runs on this thread.
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps the last warning of each thread.
struct LastWarning;

impl log::Log for LastWarning {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target().starts_with("hatchback")
    }
    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            SAID.with_borrow_mut(|said| *said = record.args().to_string());
        }
    }
    fn flush(&self) {}
}

fn keep_warnings() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = log::set_boxed_logger(Box::new(LastWarning));
        log::set_max_level(log::LevelFilter::Warn);
    });
}

// The car.

/// What ends a case early.
type Fault = Outcome;

/// The daemon and the sync process of a car, as steps.
struct Processes {
    serving: Arc<Serving>,
    updates: UpdateSteps,
    maintenance: Option<MaintenanceSteps>,
    sync: Option<SyncSteps>,
}

struct TestCar {
    /// Holds `flash` and `sync`.
    folder: PathBuf,
    root: Vec<u8>,
    rules: MaintenanceRules,
    now: u64,
    clock: Arc<SimClock>,
    random: Random,
    /// The last error of a poll.
    polled: String,
    /// Rows may be damaged, because the case damaged a segment that is served.
    may_be_damaged: bool,
    /// Counts rounds, so that another thread sees that this one gets on.
    steps: Arc<AtomicU64>,
    processes: Option<Processes>,
}

impl TestCar {
    fn new(folder: &Path, fleet: &Fleet) -> Self {
        Self {
            folder: folder.to_owned(),
            root: std::fs::read(fleet.keys().join("1.root.json")).unwrap(),
            rules: MaintenanceRules::default(),
            now: T0 + 1,
            clock: Arc::default(),
            random: Random::new(7),
            polled: String::new(),
            may_be_damaged: false,
            steps: Arc::default(),
            processes: None,
        }
    }

    fn updater(&self) -> Updater {
        Updater {
            disk: disk::system(),
            directory: self.folder.join("sync"),
            flash: self.folder.join("flash"),
            lineage: None,
            cohort: 0,
        }
    }

    /// Starts both processes, as `board/src/serve.rs` and `link/src/daemon.rs` do.
    fn start(&mut self) {
        let policy = Policy { requests_min: 10, ..Policy::default() };
        let budget = Budget {
            cache_bytes_max: 16 << 10,
            batch_max: 8,
            slots: 4,
            misses_max: 64,
            ..Budget::default()
        };
        let clock: Arc<dyn Clock> = self.clock.clone();
        let serving = Arc::new(Serving::new(1 << 30, 16, clock).stepped());
        let (name, root) = (NAME.to_owned(), Some(self.root.clone()));
        let update = ModelUpdates { name, updater: self.updater(), budget, policy, root };
        update.record_start(self.now);
        if !update.awaits_first_release_at(&self.folder.join("flash"))
            && let Ok(flash) = Flash::open(&disk::system(), &self.folder.join("flash"))
            && let Err(e) = serving.load(NAME, &flash, budget)
        {
            log::error!("hatchbackd does not serve: {e}");
        }
        let updates = UpdateSteps::new(update, Arc::clone(&serving), Box::new(|_, _| 0));
        self.processes = Some(Processes { serving, updates, maintenance: None, sync: None });
    }

    /// Ends both processes. The daemon ends normally, the sync process is killed.
    fn stop(&mut self) {
        let Some(processes) = self.processes.take() else { return };
        record_end(processes.updates.updater());
        if let Some(steps) = processes.maintenance {
            steps.end(Duration::from_secs(self.now));
        }
    }

    fn advance(&mut self, seconds: u64) {
        self.now += seconds;
        self.clock.0.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Lets the sync process work if its poll is due.
    fn sync(&mut self, link: &mut dyn Link) {
        let (updater, now, clock) = (self.updater(), self.now, Arc::clone(&self.clock));
        let processes = self.processes.as_mut().unwrap();
        if processes.sync.is_none() {
            // The process ends where it cannot be provisioned, and systemd starts it again.
            match Trust::init(updater.disk.as_ref(), &updater.directory, &self.root) {
                Ok(()) => processes.sync = Some(SyncSteps::new(updater, link_rules())),
                Err(e) => self.polled = e.to_string(),
            }
        }
        if let Some(sync) = &mut processes.sync
            && sync.is_due(clock.as_ref(), now)
        {
            let polled = sync.poll(link, clock.as_ref(), now, 0.5);
            self.polled = polled.err().map(|e| e.to_string()).unwrap_or_default();
        }
    }

    /// Lets the update thread and the maintenance thread work.
    fn work(&mut self) {
        let (now, flash) = (self.now, self.folder.join("flash"));
        let Processes { updates, maintenance, .. } = self.processes.as_mut().unwrap();
        for _ in 0..100 {
            if !updates.step(now, &|| {}) {
                break;
            }
        }
        let since_1970 = Duration::from_secs(now);
        if maintenance.is_none() {
            let catalog = Catalog::path_in(&flash);
            let opened = Flash::open(&disk::system(), &flash).ok();
            *maintenance = opened
                .map(|flash| MaintenanceSteps::new(flash, self.rules, Some(&catalog), since_1970));
        }
        if let Some(steps) = maintenance {
            for _ in 0..4 {
                steps.step(self.clock.as_ref(), since_1970);
            }
        }
    }

    /// Advances the time and lets every part of the car work once, requests last.
    fn round(&mut self, repository: &Path) -> Result<bool, Fault> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.advance(ROUND_S);
        self.sync(&mut DirectoryLink(repository.to_owned()));
        self.work();
        let mut is_answered = true;
        for _ in 0..4 {
            is_answered &= self.ask()?;
        }
        Ok(is_answered)
    }

    /// Asks for scores. Returns whether they came.
    fn ask(&mut self) -> Result<bool, Fault> {
        let samples: Vec<Sample> = (0..4).map(|_| self.sample()).collect();
        let serving = &self.processes.as_ref().unwrap().serving;
        let Some(schema) = serving.schema(NAME) else { return Ok(false) };
        let ticket = match serving.submit(NAME, &batch_for(&schema, 8, &samples), None) {
            Ok(ticket) => ticket,
            Err(RequestError::NotServed) => return Ok(false),
            Err(e) => return Err(Outcome::Wrong(format!("a request failed: {e}"))),
        };
        while !ticket.is_done() {
            if !serving.step(NAME) {
                return Err(Outcome::Wrong("a request has no answer".to_owned()));
            }
        }
        let answer = ticket.wait().map_err(|e| Outcome::Wrong(format!("no score: {e}")))?;
        let scores = answer.scores();
        let width = scores.values.len() / samples.len();
        let answers = scores.values.chunks(width).zip(scores.statuses);
        samples.iter().zip(answers).try_for_each(|(sample, (score, status))| {
            check(sample, score, *status, ticket.generation(), self.may_be_damaged)
        })?;
        Ok(true)
    }

    /// Returns a sample whose keys some generation has.
    fn sample(&mut self) -> Sample {
        let rows = self.random.pick(&VERSIONS.rows).clone();
        let orders = rows.map(|rows| *self.random.pick(&rows.into_keys().collect::<Vec<_>>()));
        let sparse = vec![vec![orders[0]], vec![unmix(orders[1])]];
        Sample { sparse, ..Sample::default() }
    }

    /// Returns the served sequence.
    fn served(&self) -> Option<u64> {
        self.processes.as_ref().unwrap().serving.generation(NAME).map(|g| g.sequence)
    }

    /// Returns whether the car is at `newest`, committed, and serves it.
    fn is_at(&self, newest: usize) -> bool {
        let Ok(status) = self.updater().status() else { return false };
        let is_done = matches!(status.state, UpdateState::Committed | UpdateState::Idle);
        let live = status.live.unwrap_or_default();
        is_done && live.ends_with(&format!("@{newest}")) && self.served() == Some(newest as u64)
    }

    /// Returns the mark against a release, if there is one. Every release of this test is good.
    fn marked(&self) -> Option<String> {
        let status = self.updater().status().unwrap_or_default();
        let rolled = status.history.iter().find(|e| e.state == UpdateState::RollingBack);
        let note = |e: &hatchback::UpdateEvent| e.note.clone().unwrap_or_default();
        let marks = files_in(&self.folder).into_iter().find(|file| is_mark(file));
        rolled.map(note).or(marks)
    }

    /// Returns why the car does not get on.
    fn reason(&self) -> String {
        let (state, error) = match self.updater().status() {
            Ok(status) => (status.state.to_string(), status.error.unwrap_or_default()),
            Err(e) => ("no state".to_owned(), e.to_string()),
        };
        let said = SAID.with_borrow(String::clone);
        let served = self.served().map_or("nothing".to_owned(), |g| format!("generation {g}"));
        let place = self.folder.display().to_string();
        let said = [error, self.polled.clone(), said].map(|text| text.replace(&place, ""));
        let said: BTreeSet<&str> =
            said.iter().map(String::as_str).filter(|s| !s.is_empty()).collect();
        let said: Vec<&str> = said.into_iter().collect();
        format!("{state}, serves {served}: {}", short(&said.join(" | ")))
    }

    /// Takes rounds until the car is at `newest`.
    fn go_to(&mut self, repository: &Path, newest: usize) -> Result<Outcome, Fault> {
        for day in 0..=DAYS_MAX {
            for _ in 0..ROUNDS_MAX {
                let is_answered = self.round(repository)?;
                if self.is_at(newest) && is_answered {
                    return Ok(if day == 0 { Outcome::Healed } else { Outcome::Late });
                }
            }
            self.advance(DAY_S);
        }
        Err(Outcome::Stuck(self.reason()))
    }
}

fn link_rules() -> LinkRules {
    LinkRules { poll_minutes: 1, bytes_per_day_max: 1 << 30, bytes_per_s_max: 0, hours: [0, 24] }
}

/// Checks that `score` and `status` are exactly those of `generation`.
fn check(
    sample: &Sample,
    score: &[f32],
    status: LookupStatus,
    generation: &Generation,
    may_be_damaged: bool,
) -> Result<(), Fault> {
    let wrong = |what: &str| {
        let text = format!("{what}: {score:?} {status:?} of {generation} for {:?}", sample.sparse);
        Err(Outcome::Wrong(text))
    };
    let rows = &VERSIONS.rows[generation.sequence as usize - 1];
    let orders = [sample.sparse[0][0], hatchback::mix(sample.sparse[1][0])];
    let (mut at, mut absent, mut damaged) = (0, 0, 0);
    for (rows, (order, dim)) in rows.iter().zip(orders.into_iter().zip([4, 6])) {
        let given = &score[at..at + dim];
        at += dim;
        let row = rows.get(&order).map(|bytes| {
            let values = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            values.take(dim).collect::<Vec<f32>>()
        });
        let is_default = given.iter().all(|v| *v == 0.0);
        match row {
            None if is_default => absent += 1,
            Some(row) if given == row => {}
            Some(_) if is_default && may_be_damaged => damaged += 1,
            _ => return wrong("a wrong score"),
        }
    }
    let expected =
        LookupStatus { fresh: 2 - absent - damaged, absent, damaged, ..LookupStatus::default() };
    // An absent key whose page is damaged counts as damaged.
    let is_exact = status == expected
        || (may_be_damaged && status.fresh + status.absent + status.damaged == 2);
    if is_exact { Ok(()) } else { wrong("a wrong status") }
}

// The scenes.

/// A car and its fleet at some moment of an update, to be copied for each case.
struct Scene {
    moment: Moment,
    folder: tempfile::TempDir,
    /// The files of `folder/car`, as `flash/...` and `sync/...`.
    files: Vec<String>,
    /// The repository as it is, and with the next release in each form.
    fleet: Fleet,
    both: Fleet,
    snapshot: Fleet,
    newest: usize,
    rules: MaintenanceRules,
    now: u64,
}

/// Returns the paths of all files below `folder`, sorted; links and pipes are files.
fn files_in(folder: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(&at).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else {
                let path = entry.path();
                let path = path.strip_prefix(folder).unwrap();
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}

fn release(fleet: &Fleet, now: u64, bundles: &[&Path]) {
    let bundles = bundles.iter().map(|path| path.to_path_buf()).collect();
    change(fleet, now, Change { bundles, ..Change::default() });
}

fn change(fleet: &Fleet, now: u64, change: Change) {
    let change = Change { expires_s: LASTING_S, ..change };
    let store = Objects::directory(&fleet.repository()).unwrap();
    publish(&store, &fleet.keys(), &change, now).unwrap();
}

impl Scene {
    /// Returns a car that is brought to `moment`.
    fn new(moment: Moment) -> Self {
        let (folder, fleet) = (folder(), Fleet::new());
        release(&fleet, T0 + 1, &[]);
        let mut car = TestCar::new(&folder.path().join("car"), &fleet);
        if moment == Moment::Merged {
            car.rules = MaintenanceRules { deltas_max: 0, changed_percent_max: 0, ..car.rules };
        }
        car.start();
        let reach = |fleet: &Fleet, car: &mut TestCar, newest| {
            assert_eq!(car.go_to(&fleet.repository(), newest), Ok(Outcome::Healed), "{moment:?}");
        };
        reach(&fleet, &mut car, 1);
        release(&fleet, car.now, &[&VERSIONS.deltas[1]]);
        reach(&fleet, &mut car, 2);
        let live = Self::bring(moment, &mut car, &fleet);
        car.stop();

        let [both, snapshot] = [fleet.fork(), fleet.fork()];
        let newest = if live == 2 { 3 } else { 4 };
        let newest =
            if matches!(moment, Moment::Staged | Moment::Interrupted) { 4 } else { newest };
        let [delta, whole] = [&VERSIONS.deltas[newest - 1], &VERSIONS.snapshots[newest - 1]];
        release(&both, car.now, &[delta, whole]);
        release(&snapshot, car.now, &[whole]);
        let (files, rules, now) = (files_in(&folder.path().join("car")), car.rules, car.now);
        Self { moment, folder, files, fleet, both, snapshot, newest, rules, now }
    }

    /// Brings a car at generation 2 to `moment`. Returns the live generation.
    fn bring(moment: Moment, car: &mut TestCar, fleet: &Fleet) -> usize {
        let state = |car: &TestCar| car.updater().status().unwrap().state;
        let third: &[&Path] = &[&VERSIONS.deltas[2]];
        match moment {
            Moment::Rest => {}
            Moment::Staged => {
                release(fleet, car.now, third);
                while state(car) != UpdateState::Staged {
                    car.advance(ROUND_S);
                    car.sync(&mut fleet.link());
                }
            }
            Moment::Probation => {
                release(fleet, car.now, third);
                while state(car) != UpdateState::Probation {
                    car.advance(ROUND_S);
                    car.sync(&mut fleet.link());
                    car.work();
                }
                return 3;
            }
            Moment::Rotated => {
                rotate(&fleet.keys(), RoleType::Targets, T0 + LASTING_S).unwrap();
                let re_sign = ["1", "2"].map(str::to_owned).to_vec();
                change(fleet, car.now, Change { re_sign, ..Change::default() });
                (0..30).for_each(|_| assert_eq!(car.round(&fleet.repository()), Ok(true)));
                assert!(files_in(&car.folder).iter().any(|file| file.ends_with("root.2")));
            }
            Moment::Merged => {
                (0..60).for_each(|_| assert_eq!(car.round(&fleet.repository()), Ok(true)));
            }
            Moment::Interrupted => Self::interrupt(car, fleet),
        }
        2
    }

    /// Leaves what a power cut amid a fetch, a merge and the writes of records leaves.
    fn interrupt(car: &mut TestCar, fleet: &Fleet) {
        release(fleet, car.now, &[&VERSIONS.deltas[2]]);
        let half = std::fs::metadata(&VERSIONS.deltas[2]).unwrap().len() / 2;
        car.advance(120);
        car.sync(&mut Wire::new(
            fleet.link(),
            Faults { breaks_after: Some(half + 4_000), ..Faults::default() },
        ));
        car.stop();
        let rules = MaintenanceRules { deltas_max: 0, changed_percent_max: 0, ..car.rules };
        let flash = Flash::open(&disk::system(), &car.folder.join("flash")).unwrap();
        let since_1970 = Duration::from_secs(car.now);
        let mut steps = MaintenanceSteps::new(flash, rules, None, since_1970);
        let is_part = |file: &String| file.starts_with("flash/g") && file.ends_with(".part");
        for _ in 0..20 {
            if !files_in(&car.folder).iter().any(|file| is_part(file)) {
                steps.step(car.clock.as_ref(), since_1970);
            }
        }
        drop(steps);
        // A record that is replaced has a part file for a moment.
        for file in files_in(&car.folder) {
            let is_record = ["flash/", "sync/"].iter().any(|start| {
                file.strip_prefix(start).is_some_and(|name| !name.contains(['/', '.']))
            });
            let bytes = std::fs::read(car.folder.join(&file)).unwrap();
            if is_record && !bytes.is_empty() {
                std::fs::write(car.folder.join(format!("{file}.part")), &bytes[..bytes.len() / 2])
                    .unwrap();
            }
        }
    }
}

// One case.

/// A file that a link leads to: its hard link beside the two directories, and its bytes.
struct Kept {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// Damages `case.file` in `folder`. Returns what a link that it made leads to.
fn strike(case: &Case, folder: &Path) -> Option<Kept> {
    let path = folder.join("car").join(&case.file);
    let old = std::fs::read(&path).unwrap_or_default();
    let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
    let remove = || {
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_dir_all(&path);
    };
    let linked = |target: &Path| {
        let (kept, bytes) = (folder.join("kept"), std::fs::read(target).unwrap());
        std::fs::hard_link(target, &kept).unwrap();
        remove();
        symlink(target, &path).unwrap();
        Some(Kept { path: kept, bytes })
    };
    let parent = path.parent().unwrap();
    std::fs::create_dir_all(parent).unwrap();
    match case.damage {
        Damage::Missing => remove(),
        Damage::Empty => write(&[]),
        Damage::Half => write(&old[..old.len() / 2]),
        Damage::Zeroed => write(&vec![0; old.len()]),
        Damage::Flipped => {
            let (mut bytes, at) = (old.clone(), old.len() / 2);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << 3;
            }
            write(&bytes);
        }
        Damage::Garbage => {
            let mut random = Random::new(3);
            write(&(0..old.len().max(100)).map(|_| random.bits() as u8).collect::<Vec<u8>>());
        }
        Damage::Dangling => {
            remove();
            symlink(parent.join("nothing"), &path).unwrap();
        }
        Damage::LinkInside => {
            return linked(&folder.join("car").join(link_target(&case.scene, &case.file)));
        }
        Damage::LinkOutside => return linked(&folder.join("outside/file")),
        Damage::Fifo => {
            remove();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        }
        Damage::Directory | Damage::FullDirectory => {
            remove();
            std::fs::create_dir(&path).unwrap();
            if case.damage == Damage::FullDirectory {
                std::fs::write(path.join("file"), b"in the way").unwrap();
            }
        }
        Damage::NoPermission => {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0)).unwrap();
        }
    }
    None
}

/// Runs a case on a copy of its scene.
fn run(case: &Case, steps: Arc<AtomicU64>) -> Outcome {
    let folder = folder();
    copy(case.scene.folder.path(), folder.path());
    std::fs::create_dir(folder.path().join("outside")).unwrap();
    std::fs::write(folder.path().join("outside/file"), b"not the car's").unwrap();
    let ran = catch_unwind(AssertUnwindSafe(|| strike_and_heal(case, folder.path(), steps)));
    ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Outcome::Wrong(format!("panicked: {}", text.unwrap_or_default()))
    })
}

fn strike_and_heal(case: &Case, folder: &Path, steps: Arc<AtomicU64>) -> Outcome {
    let scene = &case.scene;
    let mut car = TestCar::new(&folder.join("car"), &scene.fleet);
    (car.now, car.rules) = (scene.now, scene.rules);
    car.clock.0.store(scene.now - T0, Ordering::Relaxed);
    car.may_be_damaged = may_stop_serving(&case.file);
    car.steps = steps;

    let healed = heal(case, &mut car, folder);
    let (outcome, kept) = match healed {
        (Ok(outcome), kept) | (Err(outcome), kept) => (outcome, kept),
    };
    if let Some(note) = car.marked() {
        let place = folder.display().to_string();
        return Outcome::Wrong(format!(
            "a good release is marked: {}",
            short(&note.replace(&place, ""))
        ));
    }
    let is_kept = kept.is_none_or(|kept| std::fs::read(kept.path).unwrap() == kept.bytes);
    let outside = files_in(folder).into_iter().filter(|file| !file.starts_with("car/"));
    let outside: Vec<String> = outside.filter(|file| file != "kept").collect();
    let is_same = std::fs::read(folder.join("outside/file")).unwrap() == b"not the car's";
    if !is_kept || !is_same || outside != ["outside/file"] {
        return Outcome::Wrong(format!("a write went through the link; outside: {outside:?}"));
    }
    outcome
}

/// Strikes, and takes the car to the newest release and through one more start.
fn heal(case: &Case, car: &mut TestCar, folder: &Path) -> (Result<Outcome, Fault>, Option<Kept>) {
    let scene = &case.scene;
    let mut kept = None;
    if case.when == When::Stopped {
        kept = strike(case, folder);
    }
    car.start();
    if case.when == When::Running {
        kept = strike(case, folder);
    }
    let next = match case.next {
        Next::Both => &scene.both,
        Next::Snapshot => &scene.snapshot,
    };
    let mut go = || {
        let must_serve = case.when == When::Running || !may_stop_serving(&case.file);
        for _ in 0..ROUNDS_BEFORE {
            if !car.round(&scene.fleet.repository())? && must_serve {
                return Err(Outcome::Down(car.reason()));
            }
        }
        let healed = car.go_to(&next.repository(), scene.newest)?;
        car.may_be_damaged = false;
        car.stop();
        car.start();
        if car.served() != Some(scene.newest as u64) || !car.ask()? {
            return Err(Outcome::Down(format!("after a start: {}", car.reason())));
        }
        Ok(healed)
    };
    (go(), kept)
}

// All cases.

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for moment in MOMENTS {
        let scene = Arc::new(Scene::new(moment));
        for file in &scene.files {
            for (damage, _) in DAMAGES {
                for when in [When::Running, When::Stopped] {
                    for next in [Next::Both, Next::Snapshot] {
                        let (scene, file) = (Arc::clone(&scene), file.clone());
                        cases.push(Case { scene, file, damage, when, next });
                    }
                }
            }
        }
    }
    match std::env::var("HATCHBACK_DAMAGE") {
        Ok(word) if word == "all" => {}
        Ok(word) => cases.retain(|case| case.line().contains(&word)),
        // Of the four cases of a file and a damage two, so that each value occurs once.
        Err(_) => {
            let mut n = 0;
            cases.retain(|_| {
                n += 1;
                [0, 1, 1, 0][n % 4] == n / 4 % 2
            });
        }
    }
    cases
}

/// Returns whether this process may open a file without permission, as root may.
fn opens_every_file() -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0)).unwrap();
    std::fs::read(file.path()).is_ok()
}

/// Runs every case, each on a thread. A case that does not end holds up no other.
fn run_all(cases: &[Case], skips: bool) -> Vec<Outcome> {
    let outcomes: Vec<Mutex<Outcome>> =
        cases.iter().map(|_| Mutex::new(Outcome::Skipped)).collect();
    let suspects: Mutex<Vec<(usize, Instant, Receiver<Outcome>)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    let set = |at: usize, outcome: Outcome| *outcomes[at].lock().unwrap() = outcome;
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((at, case)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(at).map(|case| (at, case.clone()))
                } {
                    if skips && case.damage == Damage::NoPermission {
                        continue;
                    }
                    let (send, receive) = channel();
                    let steps = Arc::<AtomicU64>::default();
                    let counted = Arc::clone(&steps);
                    std::thread::spawn(move || send.send(run(&case, counted)));
                    let mut seen = u64::MAX;
                    loop {
                        match receive.recv_timeout(SLOW) {
                            Ok(outcome) => break set(at, outcome),
                            Err(_) if steps.load(Ordering::Relaxed) == seen => {
                                break suspects.lock().unwrap().push((at, Instant::now(), receive));
                            }
                            Err(_) => seen = steps.load(Ordering::Relaxed),
                        }
                    }
                }
            });
        }
    });
    for (at, since, receive) in suspects.into_inner().unwrap() {
        let outcome = match receive.recv_timeout(HANGS.saturating_sub(since.elapsed())) {
            Err(RecvTimeoutError::Timeout) => Outcome::Hangs,
            received => received.unwrap_or(Outcome::Wrong("its thread ended".to_owned())),
        };
        set(at, outcome);
    }
    outcomes.into_iter().map(|outcome| outcome.into_inner().unwrap()).collect()
}

/// Prints a line for each file of each moment with its worst outcome for each damage, then the
/// reasons, then the counts.
fn print(cases: &[Case], outcomes: &[Outcome]) {
    let mut cells: BTreeMap<(usize, String), BTreeMap<Damage, &Outcome>> = BTreeMap::new();
    let mut reasons: BTreeMap<(String, Damage, String), Vec<String>> = BTreeMap::new();
    let mut counts: BTreeMap<(Damage, &str), usize> = BTreeMap::new();
    for (case, outcome) in cases.iter().zip(outcomes) {
        let moment = MOMENTS.iter().position(|m| *m == case.scene.moment).unwrap();
        let row = cells.entry((moment, short(&case.file))).or_default();
        let worst = row.entry(case.damage).or_insert(outcome);
        *worst = (*worst).max(outcome);
        *counts.entry((case.damage, outcome.cell())).or_default() += 1;
        if let Some(reason) = outcome.reason() {
            let key = (short(&case.file), case.damage, reason.chars().take(300).collect());
            reasons.entry(key).or_default().push(case.line());
        }
    }
    println!("{:48} {}", "", DAMAGES.map(|(_, name)| format!("{name:9}")).concat());
    for ((moment, file), row) in &cells {
        let name = format!("{:?} {file}", MOMENTS[*moment]);
        let row = DAMAGES.map(|(damage, _)| row.get(&damage).map_or(" ", |o| o.cell()));
        println!("{name:48} {}", row.map(|cell| format!("{cell:9}")).concat());
    }
    for ((file, damage, reason), lines) in &reasons {
        println!("{} x {file} {damage:?}: {reason}\n      such as: {}", lines.len(), lines[0]);
    }
    println!("{:10} {}", "", DAMAGES.map(|(_, name)| format!("{name:9}")).concat());
    for kind in [".", "late", "STUCK", "HANGS", "DOWN", "WRONG", "-"] {
        let row = DAMAGES.map(|(damage, _)| counts.get(&(damage, kind)).copied().unwrap_or(0));
        let name = if kind == "." { "healed" } else { kind };
        println!(
            "{name:10} {} {}",
            row.map(|n| format!("{n:<9}")).concat(),
            row.iter().sum::<usize>()
        );
    }
}

#[test]
fn every_file_heals_from_every_damage() {
    let is_root = opens_every_file();
    if is_root && std::env::var_os(CHILD).is_none() {
        // Without these two rights even root cannot open a file without permission.
        let mut child = Command::new("setpriv");
        child.args(["--bounding-set", "-dac_override,-dac_read_search"]);
        child.arg(std::env::current_exe().unwrap()).env(CHILD, "1");
        child.args(["--exact", "every_file_heals_from_every_damage", "--nocapture"]);
        if let Ok(status) = child.status() {
            assert!(status.success(), "see the table above");
            return;
        }
    }
    if is_root {
        println!("SKIPPED: mode-000, because this process is root and setpriv is missing");
    }
    keep_warnings();
    let cases = cases();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    println!("{} cases", cases.len());
    let outcomes = run_all(&cases, is_root);
    std::panic::set_hook(hook);

    print(&cases, &outcomes);
    let bad = outcomes.iter().filter(|outcome| outcome.reason().is_some()).count();
    println!("{} cases, {bad} not healed, {:.0} s", cases.len(), start.elapsed().as_secs_f64());
    assert!(!cases.is_empty() && bad == 0, "{bad} of {} cases are not healed", cases.len());
}
