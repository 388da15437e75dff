//! A car on the real file system whose daemon and sync process are steps, with a clock of its own
//! and a client that checks every answer.

use crate::damage::cases::{Outcome, short};
use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::car::update_steps::{ModelUpdates, UpdateSteps};
use hatchback::clock::Clock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::model::budget::Budget;
use hatchback::schema::sample::Sample;
use hatchback::update::host::Policy;
use hatchback::update::link::{Link, LinkRules};
use hatchback::update::program::Program;
use hatchback::{
    Generation, LookupStatus, MaintenanceRules, RequestError, Serving, Trust, UpdateState, Updater,
    unmix,
};
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::{Fleet, T0, VERSIONS};
use hatchback_tests::models::batch_for;
use hatchback_tests::random::Random;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Once};
use std::time::Duration;

/// The name under which the model is served.
pub const NAME: &str = "car";
/// Simulated time between two rounds, s.
pub const ROUND_S: u64 = 5;
/// Rounds in which a car must reach the newest release.
pub const ROUNDS_MAX: usize = 120;
/// Days that a car may take to reach the release, because the byte budget counts by day.
pub const DAYS_MAX: usize = 2;
pub const DAY_S: u64 = 24 * 60 * 60;

// The clock and the log of a car.

/// The keys of all generations of each table, as orders.
static ORDERS: LazyLock<[Vec<u64>; 2]> = LazyLock::new(|| {
    let of = |table: usize| VERSIONS.rows.iter().flat_map(move |rows| rows[table].keys().copied());
    [0, 1].map(|table| of(table).collect::<BTreeSet<u64>>().into_iter().collect())
});

/// A clock that the car's rounds advance.
#[derive(Default)]
pub struct SimClock(pub AtomicU64);

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
pub struct LastWarning;

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

pub fn keep_warnings() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = log::set_boxed_logger(Box::new(LastWarning));
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// What ends a case early.
pub type Fault = Outcome;

/// The daemon and the sync process of a car, as steps.
pub struct Processes {
    pub serving: Arc<Serving>,
    pub updates: UpdateSteps,
    pub maintenance: Option<MaintenanceSteps>,
    pub sync: Option<SyncSteps>,
}

pub struct TestCar {
    /// Holds `flash` and `sync`.
    pub folder: PathBuf,
    pub root: Vec<u8>,
    pub rules: MaintenanceRules,
    pub now: u64,
    pub clock: Arc<SimClock>,
    pub random: Random,
    /// The last error of a poll.
    pub polled: String,
    /// Rows may be damaged, because the case damaged a segment that is served.
    pub may_be_damaged: bool,
    /// Counts rounds, so that another thread sees progress.
    pub steps: Arc<AtomicU64>,
    pub processes: Option<Processes>,
}

impl TestCar {
    pub fn new(folder: &Path, fleet: &Fleet) -> Self {
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

    pub fn updater(&self) -> Updater {
        Updater {
            disk: disk::system(),
            directory: self.folder.join("sync"),
            flash: self.folder.join("flash"),
            lineage: None,
            cohort: 0,
            program: Program::this(),
        }
    }

    /// Starts both processes, as `board/src/serve.rs` and `link/src/daemon.rs` do.
    pub fn start(&mut self) {
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
        let update = ModelUpdates { name, updater: self.updater(), budget, policy, root, boot: 1 };
        update.begin(self.now);
        if !update.awaits_release()
            && let Ok(flash) = Flash::open(&disk::system(), &self.folder.join("flash"))
            && let Err(e) = serving.load(NAME, &flash, budget)
        {
            log::error!("hatchbackd does not serve: {e}");
        }
        update.record_loaded();
        let updates = UpdateSteps::new(update, Arc::clone(&serving), Box::new(|_, _| 0));
        self.processes = Some(Processes { serving, updates, maintenance: None, sync: None });
    }

    /// Ends both processes. The daemon ends normally, the sync process is killed.
    pub fn stop(&mut self) {
        let Some(processes) = self.processes.take() else { return };
        processes.updates.record_end();
        if let Some(steps) = processes.maintenance {
            steps.end(Duration::from_secs(self.now));
        }
    }

    pub fn advance(&mut self, seconds: u64) {
        self.now += seconds;
        self.clock.0.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Lets the sync process work if its poll is due.
    pub fn sync(&mut self, link: &mut dyn Link) {
        let (updater, now, clock) = (self.updater(), self.now, Arc::clone(&self.clock));
        let processes = self.processes.as_mut().unwrap();
        if processes.sync.is_none() {
            // If the directory cannot be provisioned, the process ends, and systemd starts it
            // again.
            match Trust::init(updater.disk.as_ref(), &updater.directory, &self.root) {
                Ok(()) => {
                    processes.sync =
                        Some(SyncSteps::new(updater, Some(self.root.clone()), link_rules()))
                }
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
    pub fn work(&mut self) {
        let (now, flash) = (self.now, self.folder.join("flash"));
        let updater = Some(self.updater());
        let Processes { updates, maintenance, .. } = self.processes.as_mut().unwrap();
        for _ in 0..100 {
            if !updates.step(now, &|_| {}) {
                break;
            }
        }
        let since_1970 = Duration::from_secs(now);
        if maintenance.is_none() {
            let catalog = Catalog::path_in(&flash);
            let opened = Flash::open(&disk::system(), &flash).ok();
            *maintenance = opened.map(|flash| {
                MaintenanceSteps::new(flash, updater, self.rules, Some(&catalog), since_1970)
            });
        }
        if let Some(steps) = maintenance {
            for _ in 0..4 {
                steps.step(self.clock.as_ref(), since_1970);
            }
        }
    }

    /// Advances the time and lets every part of the car work once, requests last.
    pub fn round(&mut self, repository: &Path) -> Result<bool, Fault> {
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

    /// Requests scores. Returns whether they came.
    pub fn ask(&mut self) -> Result<bool, Fault> {
        let samples: Vec<Sample> = (0..4).map(|_| self.sample()).collect();
        let serving = &self.processes.as_ref().unwrap().serving;
        let Some(served) = serving.get(NAME) else { return Ok(false) };
        let schema = served.model().unwrap().schema().clone();
        let ticket = match served.submit(&batch_for(&schema, 8, &samples), None) {
            Ok(ticket) => ticket,
            Err(RequestError::NotServed) => return Ok(false),
            Err(e) => return Err(Outcome::Wrong(format!("a request failed: {e}"))),
        };
        while !ticket.is_done() {
            if !served.step() {
                return Err(Outcome::Wrong("a request has no answer".to_owned()));
            }
        }
        let answer = ticket.wait().map_err(|e| Outcome::Wrong(format!("no score: {e}")))?;
        let scores = answer.scores();
        let width = scores.values.len() / samples.len();
        let answers = scores.values.chunks(width).zip(scores.statuses);
        samples.iter().zip(answers).try_for_each(|(sample, (score, status))| {
            check(sample, score, *status, answer.generation(), self.may_be_damaged)
        })?;
        Ok(true)
    }

    /// Returns a sample whose keys some generation has.
    pub fn sample(&mut self) -> Sample {
        let orders = [0, 1].map(|table: usize| *self.random.pick(&ORDERS[table]));
        let sparse = vec![vec![orders[0]], vec![unmix(orders[1])]];
        Sample { sparse, ..Sample::default() }
    }

    /// Returns the served sequence.
    pub fn served(&self) -> Option<u64> {
        self.processes.as_ref().unwrap().serving.model(NAME).map(|m| m.generation().sequence)
    }

    /// Returns whether the car is at `newest`, committed, and serves it.
    pub fn is_at(&self, newest: usize) -> bool {
        let Ok(status) = self.updater().status() else { return false };
        let is_done = matches!(status.state, UpdateState::Committed | UpdateState::Idle);
        let live = status.live.unwrap_or_default();
        is_done && live.ends_with(&format!("@{newest}")) && self.served() == Some(newest as u64)
    }

    /// Returns the recorded mark against a release, if any. Every release of this test is good.
    pub fn marked(&self) -> Option<String> {
        let status = self.updater().status().unwrap_or_default();
        let is_damaged = |e: &hatchback::UpdateEvent| {
            e.note.as_deref().is_some_and(|note| note.starts_with("its files on flash are"))
        };
        let mut rolled = status.history.iter().filter(|e| e.state == UpdateState::RollingBack);
        let rolled = rolled.find(|e| !is_damaged(e));
        let note = |e: &hatchback::UpdateEvent| e.note.clone().unwrap_or_default();
        rolled.map(note).or(status.refused.first().cloned())
    }

    /// Returns why the car makes no progress.
    pub fn reason(&self) -> String {
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
    pub fn go_to(&mut self, repository: &Path, newest: usize) -> Result<Outcome, Fault> {
        for day in 0..=DAYS_MAX {
            for _ in 0..ROUNDS_MAX {
                let is_answered = self.round(repository)?;
                if self.is_at(newest) && is_answered {
                    return Ok(if day == 0 { Outcome::Healed } else { Outcome::Late });
                }
            }
            // The budgets count a longer jump of the clock as one hour.
            for _ in 0..24 {
                self.advance(DAY_S / 24);
                self.round(repository)?;
            }
        }
        Err(Outcome::Stuck(self.reason()))
    }
}

pub fn link_rules() -> LinkRules {
    LinkRules { poll_minutes: 1, bytes_per_day_max: 1 << 30, bytes_per_s_max: 0, hours: [0, 24] }
}

/// Checks that `score` and `status` are exactly those of `generation`.
pub fn check(
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
