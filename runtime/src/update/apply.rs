//! The serving process's side of an update. It takes an offered release, installs it on flash,
//! probes it, makes it live, and observes it on probation. Then it commits the release or rolls it
//! back. Each call of `advance` takes one step, and an interrupted step is repeated from its start.
//! This side never opens a link, writes nothing in the sync directory, and verifies the release's
//! signature itself. A fault of the car never counts against a release.

use crate::bundle::manifest::{Generation, sha256};
use crate::bundle::{BundleError, BundleReader};
use crate::flash::live::LiveId;
use crate::flash::{Flash, FlashError, Prepared, Rebuild};
use crate::io::disk::Lock;
use crate::maintenance::background::outside_idle_class;
use crate::model::budget::Budget;
use crate::schema::change::check_change;
use crate::update::error::UpdateError;
use crate::update::fetch_status::{FetchStatus, Offer};
use crate::update::history::last_order;
use crate::update::install_status::{Blame, InstallState, InstallStatus, Repair, Retry};
use crate::update::probe::{ProbeFault, probe};
use crate::update::release::{Base, Release, releases};
use crate::update::staging::Staging;
use crate::update::updater::Updater;
use crate::update::verdict::{
    Verdict, abandon, abandon_for, blames_bundle, judge_probe, judge_requests, judge_trial,
};

pub use crate::update::install_status::Watched;
pub use crate::update::verdict::Policy;

/// Writes of the record, at most, for the requests of a probation.
const WATCHED_WRITES: u64 = 16;

/// The inputs of a step from the process that applies updates.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// The conditions that a release must meet.
    pub policy: Policy,
    /// The budget of a probe.
    pub budget: Budget,
    /// Observations of the live generation. `None` if this process serves no requests; the probe
    /// alone then decides.
    pub watched: Option<Watched>,
    /// Why the live generation cannot be served, if it cannot.
    pub unservable: Option<Unservable<'a>>,
    /// The fleet's first root, from a place that the sync process cannot write; `None` for the root
    /// in the sync directory.
    pub root: Option<&'a [u8]>,
    /// A number that differs after each start of the machine.
    pub boot: u64,
    /// Called between small pieces of work, so that requests can run (`maintenance::background`).
    pub yield_now: &'a dyn Fn(),
}

/// The cause for which this process cannot serve the live generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The release, which this version of the program cannot serve.
    Release,
    /// Its files on flash, which are damaged.
    Flash,
    /// The car's memory or GPU.
    Car,
}

/// Why this process cannot serve the live generation.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Unservable<'a> {
    pub id: LiveId,
    pub reason: &'a str,
    pub cause: Cause,
}

/// Why a step ends before its end: a verdict on the release, or an error that ends only this run.
enum Ended {
    Verdict(Verdict),
    Run(UpdateError),
}

impl From<Verdict> for Ended {
    fn from(verdict: Verdict) -> Self {
        Self::Verdict(verdict)
    }
}

impl From<UpdateError> for Ended {
    fn from(error: UpdateError) -> Self {
        Self::Run(error)
    }
}

impl Updater {
    /// Begins the work of a process, and counts the start of a trial of the release on probation:
    /// the process is about to open it. If the process or the machine ended too many trials, the
    /// release is rolled back. The process calls this once, before it opens the live generation.
    /// `boot` differs after each start of the machine. It tells a trial that ended with a crash
    /// from one that ended with a restart of the machine.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn begin_process(&self, boot: u64, now: u64) -> Result<(), UpdateError> {
        let _lock = self.lock_install()?;
        let mut status = self.known_status()?;
        let is_known = status.writes > 0;
        status.begin_process(&self.program.version);
        status.count_load(boot, self.live_manifest());
        let known = last_order(&self.fetch_status().history);
        // The process ended between the commit and the record of it. The live release passed its
        // probe, and its starts count from here on.
        if self.is_committed(&status)? {
            status.end_trial();
            status.enter(InstallState::Probation, now, known, None);
        }
        if !status.is_on_probation() {
            // Without a record `adopt_unjudged` must still act if there is a previous generation,
            // so none is made here then.
            let record = Flash::last_record(self.disk.as_ref(), &self.flash)?;
            let is_first = record.is_some_and(|record| record.previous.is_none());
            return if is_known || is_first { self.write_install(&mut status) } else { Ok(()) };
        }
        if let Some(reason) = status.count_trial(boot) {
            status.blame = Blame::Release;
            status.enter(InstallState::RollingBack, now, known, Some(reason));
        }
        self.write_install(&mut status)
    }

    /// Returns whether the release that is being applied is live already, and served.
    fn is_committed(&self, status: &InstallStatus) -> Result<bool, UpdateError> {
        // A snapshot of the live release may have to replace its damaged files first.
        if status.state != InstallState::Applying || status.repair >= Repair::AnySnapshot {
            return Ok(false);
        }
        let Some(release) = &status.release else { return Ok(false) };
        let is_it = |live: &Flash| live.record().live.manifest == release.manifest;
        Ok(self.live()?.is_some_and(|live| is_it(&live) && live.record().may_serve()))
    }

    /// Records that the start has loaded the model.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_loaded(&self) -> Result<(), UpdateError> {
        self.change_install(Self::lock_install, InstallStatus::end_load)
    }

    /// Ends a trial as passed: the release answered requests.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn end_trial(&self) -> Result<(), UpdateError> {
        self.end_trial_under(Self::lock_install, Watched::default())
    }

    /// Ends a trial as passed, because the process ends normally, and stores what it observed of
    /// the release on probation. Waits for a step in progress.
    ///
    /// # Errors
    /// Those of [`Updater::end_trial`].
    pub fn end_process(&self, watched: Watched) -> Result<(), UpdateError> {
        self.end_trial_under(Self::lock_consent, watched)
    }

    fn end_trial_under(
        &self,
        lock: fn(&Self) -> Result<Lock, UpdateError>,
        watched: Watched,
    ) -> Result<(), UpdateError> {
        self.change_install(lock, |status| {
            let (has_trial, stored) = (status.has_open_trial(), status.watched);
            if has_trial {
                status.end_trial();
            }
            let is_open = status.end_load() || has_trial;
            if status.is_on_probation() {
                status.observe(watched);
            }
            is_open || status.watched != stored
        })
    }

    /// Makes one change of the record under `lock`. `change` returns whether it changed anything.
    fn change_install(
        &self,
        lock: fn(&Self) -> Result<Lock, UpdateError>,
        change: impl Fn(&mut InstallStatus) -> bool,
    ) -> Result<(), UpdateError> {
        // This look needs no lock. Nearly every call changes nothing, perhaps during a step.
        if !change(&mut self.install_status()?) {
            return Ok(());
        }
        let _lock = lock(self)?;
        // Read and judged again: another writer may have changed the record before the lock.
        let mut status = self.known_status()?;
        if change(&mut status) { self.write_install(&mut status) } else { Ok(()) }
    }

    /// Reads the record to change it. The caller has the lock.
    fn known_status(&self) -> Result<InstallStatus, UpdateError> {
        let mut status = self.install_status()?;
        if status.writes == 0 {
            self.adopt_unjudged(&mut status)?;
        }
        Ok(status)
    }

    /// Records the owner's consent. Returns whether a release waited for it.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn consent(&self, now: u64) -> Result<bool, UpdateError> {
        let _lock = self.lock_consent()?;
        let mut status = self.install_status()?;
        if status.state != InstallState::AwaitConsent {
            return Ok(false);
        }
        let (known, note) =
            (last_order(&self.fetch_status().history), "the owner consented".to_owned());
        status.enter(InstallState::Applying, now, known, Some(note));
        self.write_install(&mut status)?;
        Ok(true)
    }

    /// Takes one step. Returns whether the install entered another state.
    ///
    /// # Errors
    /// [`UpdateError`] if the step cannot be taken now. The release is not to blame, and the caller
    /// may retry.
    pub fn advance(&self, host: &Host<'_>, now: u64) -> Result<bool, UpdateError> {
        let _lock = self.lock_install()?;
        let (mut status, fetch) = (self.known_status()?, self.fetch_status());
        if status.version != self.program.version {
            status.begin_process(&self.program.version);
        }

        let verdict = self.step(&mut status, &fetch, host)?;
        if matches!(verdict, Verdict::Wait) {
            return Ok(false);
        }
        self.conclude(&mut status, &fetch, verdict, now)?;
        Ok(true)
    }

    /// Ends the current attempt because of a persistent fault of the car.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be written.
    pub fn abandon(&self, reason: &str, now: u64) -> Result<(), UpdateError> {
        let _lock = self.lock_install()?;
        let (mut status, fetch) = (self.install_status()?, self.fetch_status());
        let verdict = match status.state {
            InstallState::Applying => abandon(reason),
            // It would stay live without a verdict, and its revocation would do nothing.
            InstallState::Probation => Verdict::Withdraw(reason.to_owned()),
            // A rollback is tried until it succeeds: nothing else takes a rejected release away.
            // Its record may lack room.
            InstallState::RollingBack => {
                return Flash::reclaim_in(&self.disk, &self.flash).map_err(UpdateError::from);
            }
            _ => return Ok(()),
        };
        self.conclude(&mut status, &fetch, verdict, now)
    }

    /// Records that a scrub found every page of the live generation whole.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_whole(&self) -> Result<(), UpdateError> {
        self.change_repair(|repair| match repair {
            Repair::NewerSnapshot | Repair::Replacement => Repair::None,
            repair => repair,
        })
    }

    /// Records that the live generation was opened, so that it needs no snapshot to be served.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_opened(&self) -> Result<(), UpdateError> {
        self.change_repair(|repair| match repair {
            Repair::AnySnapshot => Repair::NewerSnapshot,
            repair => repair,
        })
    }

    /// Records which snapshot would repair the live generation.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn require_repair(&self, repair: Repair) -> Result<(), UpdateError> {
        self.change_repair(|before| before.max(repair))
    }

    fn change_repair(&self, change: impl Fn(Repair) -> Repair) -> Result<(), UpdateError> {
        self.change_install(Self::lock_install, |status| {
            let before = status.repair;
            status.repair = change(before);
            status.repair != before
        })
    }

    /// Adopts a live generation of which there is no record, if a previous generation is kept for a
    /// rollback. The record of its probation is lost, so the probation starts again.
    fn adopt_unjudged(&self, status: &mut InstallStatus) -> Result<(), UpdateError> {
        let Some(live) = self.live()?.filter(|live| live.record().previous.is_some()) else {
            return Ok(());
        };
        log::warn!("{}: its probation starts again", live.manifest().generation);
        let release = Release {
            generation: live.manifest().generation.clone(),
            parent: live.manifest().parent,
            share: 100,
            manifest: live.record().live.manifest,
            ..Release::default()
        };
        status.take_up(&Offer { number: 0, release });
        status.state = InstallState::Applying;
        Ok(())
    }

    /// Does the work of the state that `status` is in.
    fn step(
        &self,
        status: &mut InstallStatus,
        fetch: &FetchStatus,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        let in_hand = status.release.clone().filter(|_| status.state.is_active());
        let Some(release) = in_hand else { return Ok(take_offer(status, fetch, host)) };

        match status.state {
            InstallState::RollingBack => self.roll_back(status, &release),
            _ if self.is_revoked(&release, fetch, host) => {
                Ok(Verdict::Withdraw("the publisher revoked the release".to_owned()))
            }
            InstallState::Applying => match self.apply(status, &release, host) {
                Ok(verdict) | Err(Ended::Verdict(verdict)) => Ok(verdict),
                Err(Ended::Run(e)) => Err(e),
            },
            _ => self.watch(status, &release, host),
        }
    }

    /// Records `verdict`, and makes the changes that it implies.
    fn conclude(
        &self,
        status: &mut InstallStatus,
        fetch: &FetchStatus,
        verdict: Verdict,
        now: u64,
    ) -> Result<(), UpdateError> {
        let before = status.state;
        let (state, note) = match verdict {
            Verdict::Wait => return Ok(()),
            Verdict::Advance(state) => {
                if state == InstallState::Committed {
                    commit(status);
                }
                (state, None)
            }
            Verdict::Reject(reason) => {
                status.blame = Blame::Release;
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Unreadable(reason) => {
                status.blame = Blame::Version;
                let version = &status.version;
                let reason = format!("{reason}; version {version} does not try it again");
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Withdraw(reason) => {
                status.blame = Blame::Other;
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Abandon { reason, repair, retry } => {
                status.repair = status.repair.max(repair);
                // The next attempt, perhaps of another release, needs this one's space.
                if let Err(e) = Flash::reclaim_in(&self.disk, &self.flash) {
                    log::warn!("the space of the attempt is not free yet: {e}");
                }
                let retry = match retry {
                    Retry::WithRoom(missing) => {
                        Retry::WithRoom(self.free_bytes().saturating_add(missing))
                    }
                    retry => retry,
                };
                status.count_attempt(retry, now);
                (InstallState::Failed, Some(reason))
            }
        };

        let release = status.release.as_ref().map(|r| r.generation.to_string());
        let reason = note.as_deref().map_or(String::new(), |note| format!(": {note}"));
        status.enter(state, now, last_order(&fetch.history), note);
        self.write_install(status)?;
        let (before, state) = (before.shown(), state.shown());
        log::info!("{}: {before} -> {state}{reason}", release.unwrap_or_default());
        Ok(())
    }

    /// Returns whether the signed targets no longer list `release` for this car. The sync process's
    /// record only decides whether this function reads the targets.
    fn is_revoked(&self, release: &Release, fetch: &FetchStatus, host: &Host<'_>) -> bool {
        if fetch.revoked != Some(release.manifest) {
            return false;
        }
        match self.verify_targets(host.root) {
            Ok(targets) => !is_listed(&releases(&targets, &self.program), release, fetch.cohort),
            Err(e) => {
                log::warn!("{}: its revocation is not verified: {e}", release.generation);
                false
            }
        }
    }

    /// Installs the staged bundle, probes the new generation and makes it live.
    fn apply(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, Ended> {
        let rebuild = self.rebuild(status, release, host)?;
        if rebuild.is_none() && self.is_live(release)? {
            return Ok(self.after_commit()?);
        }
        self.check_release(release, host)?;

        // Counted before the first byte of the bundle is read: a crash in any part must count.
        if let Some(reason) = status.count_install(host.boot) {
            status.end_trial();
            let retry = Retry::AfterPause;
            return Err(Verdict::Abandon { reason, repair: Repair::None, retry }.into());
        }
        self.write_install(status)?;
        let applied = self.install_and_probe(status, release, rebuild, host);
        if matches!(applied, Err(Ended::Run(_))) {
            // No verdict writes the record now, and the end of this step was no crash.
            status.uncount_install();
            self.write_install(status)?;
        } else {
            status.end_trial();
        }
        applied
    }

    fn install_and_probe(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        rebuild: Option<Rebuild>,
        host: &Host<'_>,
    ) -> Result<Verdict, Ended> {
        let prepared = self.prepare(release, rebuild, host)?;

        // The trial is counted before the probe loads the network: a crash of it must count too.
        if let Some(reason) = status.count_trial(host.boot) {
            return Ok(Verdict::Reject(reason));
        }
        self.write_install(status)?;
        let probed = probe(prepared.flash(), host.budget, host.yield_now);
        status.end_trial();

        judge_trial(probed, release, status.repair, &host.policy)?;

        // In the idle class the commit would wait until no request needs the CPU.
        match outside_idle_class(|| prepared.commit()) {
            // The live record may be durable although a later step failed.
            Err(e) if !self.is_live(release)? => Ok(abandon(e.to_string())),
            _ => Ok(self.after_commit()?),
        }
    }

    /// Returns what follows after a release was made live. A step of a rebuild is not served, so
    /// there is nothing to observe.
    fn after_commit(&self) -> Result<Verdict, UpdateError> {
        // The record alone: an error of the device at the manifest must not make it a served one.
        let record = Flash::last_record(self.disk.as_ref(), &self.flash)?;
        let is_served = record.is_none_or(|record| record.may_serve());
        let state = if is_served { InstallState::Probation } else { InstallState::Committed };
        Ok(Verdict::Advance(state))
    }

    /// Returns how `release` replaces the live generation, if it is a snapshot and the live
    /// generation cannot be opened.
    fn rebuild(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Option<Rebuild>, Ended> {
        if release.parent.is_some() {
            return Ok(None);
        }
        let rebuild = Rebuild { least: self.least(status)?, servable: false };
        let Some(live) = self.live()? else { return Ok(Some(rebuild)) };
        let is_newer = release.generation.sequence > live.manifest().generation.sequence;
        let is_it = live.record().live.manifest == release.manifest;
        if !live.record().may_serve() && !is_newer && !is_it {
            // No path led on from a step of a rebuild, so the rebuild begins again.
            return Ok(Some(rebuild));
        }
        if status.repair < Repair::AnySnapshot {
            return Ok(None);
        }
        let unservable = host.unservable.filter(|u| u.id == live.record().id());
        if unservable.is_some_and(|unservable| unservable.cause == Cause::Flash) {
            return Ok(Some(rebuild));
        }
        let is_served = host.watched.is_some() && unservable.is_none();
        let is_replaced = status.repair == Repair::Replacement;

        // A merge must not remove segments while they are opened here.
        let _lock = live.lock().map_err(UpdateError::from)?;
        let live = Flash::open(&self.disk, &self.flash).map_err(UpdateError::from)?;
        // The fault may have been one of the device that has passed. The files of a generation that
        // can be opened must not be replaced by an older one.
        let checked = live.check_whole().map_err(ProbeFault::from);
        match checked.and_then(|()| probe(&live, host.budget, host.yield_now)) {
            Err(ProbeFault::Car { is_damage: true, .. }) => {
                let servable = is_served || live.is_servable().map_err(UpdateError::from)?;
                Ok(Some(Rebuild { servable, ..rebuild }))
            }
            // No delta on its damaged rows can be proven, so only a snapshot leads on. Its own
            // probe may use other rows than that of the delta.
            Ok(probed) if is_replaced || probed.is_unproven() => {
                Ok(Some(Rebuild { servable: true, ..rebuild }))
            }
            // The program is older than the one that installed the live generation.
            Err(ProbeFault::Version(_)) => Ok(Some(rebuild)),
            // The device may read the files later. A newer snapshot is installed without them.
            Err(ProbeFault::Car { .. }) if is_newer => Ok(None),
            Err(ProbeFault::Car { problem, .. }) => Err(UpdateError::Car { problem }.into()),
            Ok(_) | Err(ProbeFault::Release(_)) => {
                status.repair = Repair::NewerSnapshot;
                Ok(None)
            }
        }
    }

    /// Checks that `release` is signed, that this version of the program can read it, and that a
    /// delta follows the live generation's variant.
    fn check_release(&self, release: &Release, host: &Host<'_>) -> Result<(), Ended> {
        let targets = self.verify_targets(host.root).map_err(|e| abandon(e.to_string()))?;
        let listed = releases(&targets, &self.program);
        let is_it =
            |r: &&Release| (r.manifest, &r.generation) == (release.manifest, &release.generation);
        let Some(signed) = listed.iter().find(is_it) else {
            return Err(abandon("the release is not listed in the signed targets").into());
        };
        if let Some(lacks) = &signed.lacks {
            let version = &self.program.version;
            return Err(abandon(format!("version {version} lacks {lacks}, which it needs")).into());
        }
        // The sync process may have chosen the delta, but only the signed targets tell a variant.
        let live = self.live()?.filter(|_| signed.parent.is_some());
        if live.is_some_and(|live| !Base::new(&live.record().live, &listed).is_parent_of(signed)) {
            return Err(abandon("it does not follow the live bundle; a snapshot can follow").into());
        }
        Ok(())
    }

    /// Writes the staged bundle of `release` to flash.
    fn prepare(
        &self,
        release: &Release,
        rebuild: Option<Rebuild>,
        host: &Host<'_>,
    ) -> Result<Prepared, Ended> {
        let directory = self.directory.join("staged");
        let path = Staging::bundle_in(&directory, release);
        let lost = |problem: &dyn std::fmt::Display| {
            let path = path.display();
            abandon(format!("staged bundle {path}: {problem}; it will be fetched again"))
        };

        let bundle = BundleReader::open_on(self.disk.as_ref(), &path);
        let mut bundle = bundle.map_err(|e| lost(&e))?;
        if sha256(bundle.manifest_bytes()) != release.manifest {
            return Err(lost(&"its manifest is not the signed one").into());
        }

        // Before anything is written: the callers of the live generation could not use the new one.
        if let (None, Some(live)) = (rebuild, self.live()?) {
            let (live, new) = (live.manifest(), bundle.manifest());
            // The rule is for what comes after; the install itself refuses what is older.
            if live.generation.sequence < new.generation.sequence {
                let changed = check_change(&live.schema, &new.schema);
                changed.map_err(|e| Verdict::Reject(e.to_string()))?;
            }
        }

        let progress = |_| (host.yield_now)();
        let (disk, flash) = (&self.disk, &self.flash);
        let prepared = match rebuild {
            None => Flash::prepare(disk, flash, &mut bundle, progress),
            Some(rebuild) => Flash::prepare_rebuild(disk, flash, &mut bundle, rebuild, progress),
        };
        prepared.map_err(|error| match error {
            // Another process has the lock. The next run tries again, and nothing is decided.
            e @ FlashError::Busy { .. } => Ended::Run(e.into()),
            FlashError::Bundle(e @ (BundleError::Io { .. } | BundleError::Hash { .. })) => {
                lost(&e).into()
            }
            e @ FlashError::Base(_) => abandon_for(e.to_string(), Repair::AnySnapshot).into(),
            e if blames_bundle(&e) => Verdict::Unreadable(e.to_string()).into(),
            e => {
                let retry = e.missing_bytes().map_or(Retry::AtStart, Retry::WithRoom);
                Verdict::Abandon { reason: e.to_string(), repair: Repair::None, retry }.into()
            }
        })
    }

    /// Judges the live release by its requests, and at the end by its probe set.
    fn watch(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        let Some(flash) = self.live()? else {
            return self.give_up_damaged("it cannot be opened");
        };
        if flash.record().live.manifest != release.manifest {
            return Ok(abandon("another generation became live during probation"));
        }
        if !flash.record().may_serve() {
            // Nothing serves a step of a rebuild, so no request can end its probation.
            return Ok(Verdict::Advance(InstallState::Committed));
        }
        let unservable = host.unservable.filter(|u| u.id == flash.record().id());
        if let Some(Unservable { reason, cause, .. }) = unservable {
            let reason = format!("it could not be served: {reason}");
            return match cause {
                Cause::Release => Ok(Verdict::Unreadable(reason)),
                Cause::Flash => self.give_up_damaged(&reason),
                Cause::Car => Ok(Verdict::Withdraw(reason)),
            };
        }
        let stored = status.watched;
        if let Some(watched) = host.watched
            && let Some(verdict) = judge_requests(status.observe(watched), &host.policy)
        {
            // A car with short drives may never serve so many requests in one of them. The flash
            // takes few writes of this.
            let new = status.watched.requests.saturating_sub(stored.requests);
            if matches!(verdict, Verdict::Wait) && new > host.policy.requests_min / WATCHED_WRITES {
                self.write_install(status)?;
            }
            return Ok(verdict);
        }

        // A merge must not remove segments while the probe opens them.
        let _lock = flash.lock()?;
        match probe(&Flash::open(&self.disk, &self.flash)?, host.budget, host.yield_now) {
            Err(ProbeFault::Release(problem)) => Ok(Verdict::Reject(problem)),
            Err(ProbeFault::Version(problem)) => Ok(Verdict::Unreadable(problem)),
            Err(ProbeFault::Car { problem, is_damage: true }) => self.give_up_damaged(&problem),
            Err(ProbeFault::Car { problem, .. }) => Err(UpdateError::Car { problem }),
            Ok(probed) => {
                if probed.damaged > 0 {
                    status.repair = status.repair.max(Repair::NewerSnapshot);
                }
                Ok(match judge_probe(probed, &host.policy) {
                    Some(reason) => Verdict::Reject(reason),
                    None => Verdict::Advance(InstallState::Committed),
                })
            }
        }
    }

    /// Returns the verdict on a release whose files on flash are damaged, as `problem` says. If the
    /// next start could not serve it, but the generation before, the car waits for no snapshot.
    fn give_up_damaged(&self, problem: &str) -> Result<Verdict, UpdateError> {
        let is_servable = self.live()?.map_or(Ok(false), |live| live.is_servable())?;
        let leads_back = !is_servable && Flash::has_servable_previous(&self.disk, &self.flash)?;
        let reason = format!("its files on flash are damaged: {problem}");
        Ok(if leads_back {
            Verdict::Withdraw(reason)
        } else {
            abandon_for(reason, Repair::AnySnapshot)
        })
    }

    /// Makes the previous generation live again. If the release is to blame, that is recorded
    /// first. Even if the rollback is then interrupted, the release is not installed again.
    fn roll_back(
        &self,
        status: &mut InstallStatus,
        release: &Release,
    ) -> Result<Verdict, UpdateError> {
        let reason = status.error.clone().unwrap_or_default();
        if status.blame != Blame::Other && !status.is_refused(release) {
            status.refuse(release, status.blame == Blame::Version);
            self.write_install(status)?;
        }

        // The record alone: the manifest of the live generation may be damaged.
        let record = Flash::last_record(self.disk.as_ref(), &self.flash)?;
        let Some(record) = record.filter(|record| record.live.manifest == release.manifest) else {
            return Ok(abandon(reason));
        };
        if record.previous.is_none() {
            let reason = format!("{reason}; no previous generation exists, so it stays live");
            return Ok(abandon(reason));
        }
        Flash::rollback_in(&self.disk, &self.flash)?;
        if status.repair == Repair::AnySnapshot {
            // It was the release that could not be opened.
            status.repair = Repair::NewerSnapshot;
        }
        Ok(abandon(reason))
    }
}

/// Takes the offer in `fetch` if it is new, or drops a release that waits for consent and is no
/// longer offered.
fn take_offer(status: &mut InstallStatus, fetch: &FetchStatus, host: &Host<'_>) -> Verdict {
    let is_waiting = status.state == InstallState::AwaitConsent;
    match &fetch.offer {
        // A lineage of any length would make the record too long.
        Some(offer) if offer.number != status.offer && offer.release.generation.check().is_ok() => {
            status.take_up(offer);
            if status.is_refused(&offer.release) {
                return abandon("the release was rejected before");
            }
            // The owner has consented to what this car rebuilds.
            let (committed, offered) = (&status.committed, &offer.release.generation);
            let is_known = |newest: &Generation| {
                newest.lineage == offered.lineage && newest.sequence >= offered.sequence
            };
            let consent = host.policy.consent && !committed.as_ref().is_some_and(is_known);
            Verdict::Advance(if consent {
                InstallState::AwaitConsent
            } else {
                InstallState::Applying
            })
        }
        // With `writes` 0 the record is lost or new, and does not show that the offer ended.
        None if is_waiting && fetch.writes > 0 => Verdict::Advance(InstallState::Idle),
        _ => Verdict::Wait,
    }
}

/// Records that the current release passed its probation.
fn commit(status: &mut InstallStatus) {
    status.end_trial();
    status.attempted.clear();
    let Some(release) = &status.release else { return };
    if release.parent.is_none() {
        status.repair = Repair::None;
    }
    // A step of a rebuild is older than what this car has committed.
    let is_older = |newest: &Generation| {
        newest.lineage == release.generation.lineage
            && newest.sequence > release.generation.sequence
    };
    if !status.committed.as_ref().is_some_and(is_older) {
        status.committed = Some(release.generation.clone());
    }
}

/// Returns whether `listed` has `release` for cars with `cohort`.
fn is_listed(listed: &[Release], release: &Release, cohort: u8) -> bool {
    listed.iter().any(|r| r.manifest == release.manifest && cohort < r.share)
}
