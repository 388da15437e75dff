//! The first half of an update: installs the staged bundle of a release on flash, probes it and
//! makes it live.

use crate::bundle::manifest::sha256;
use crate::bundle::{BundleError, BundleReader};
use crate::flash::{Flash, FlashError, Prepared, Rebuild};
use crate::maintenance::background::outside_idle_class;
use crate::schema::change::check_change;
use crate::update::error::UpdateError;
use crate::update::host::{Cause, Host};
use crate::update::install_status::{InstallState, InstallStatus, Repair, Retry};
use crate::update::probe::{ProbeFault, probe};
use crate::update::release::{Base, Release, releases};
use crate::update::staging::Staging;
use crate::update::updater::Updater;
use crate::update::verdict::{Verdict, abandon, abandon_for, blames_bundle, judge_trial};

/// Why a step ends before its end: a verdict on the release, or an error that ends only this run.
pub(super) enum Ended {
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
    /// Installs the staged bundle, probes the new generation and makes it live.
    pub(super) fn apply(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, Ended> {
        if status.repair < Repair::AnySnapshot && self.is_live(release)? {
            return Ok(self.after_commit()?);
        }
        // Counted before the first byte of the bundle is read, and before a damaged live generation
        // is probed: a crash in any part must count.
        if let Some(reason) = status.count_install(host.boot) {
            status.end_trial();
            let retry = Retry::AfterPause;
            return Err(Verdict::Abandon { reason, repair: Repair::None, retry }.into());
        }
        self.write_install(status)?;
        let applied = self.install_and_probe(status, release, host);
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
        host: &Host<'_>,
    ) -> Result<Verdict, Ended> {
        let rebuild = self.rebuild(status, release, host)?;
        if rebuild.is_none() && self.is_live(release)? {
            return Ok(self.after_commit()?);
        }
        self.check_release(release, host)?;
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
}
