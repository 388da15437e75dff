//! The side with the link: it refreshes the signed metadata, chooses the next release and stages
//! that release's bundle. Writes the sync directory only, and never changes the live generation.

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::limits::CHUNK_BYTES;
use crate::update::error::UpdateError;
use crate::update::link::Fetcher;
use crate::update::release::{Release, cheapest_path, lineage_of, releases};
use crate::update::staging::Staging;
use crate::update::state::{UpdateState, UpdateStatus};
use crate::update::trust::Trust;
use crate::update::updater::Updater;
use std::time::Duration;

/// Bytes charged to the daily budget in one step.
const CHARGE_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// The bytes that one run has charged to the daily budget. The run charges bytes before it receives
/// them, so a killed run has charged too much and never too little.
struct Charge<'a> {
    updater: &'a Updater,
    now: u64,
    bytes: u64,
}

impl Charge<'_> {
    /// Charges the next bytes durably.
    fn add(&mut self) -> Result<(), UpdateError> {
        self.bytes = self.bytes.saturating_add(CHARGE_BYTES);
        let now = Duration::from_secs(self.now);
        self.updater.change(|status| {
            status.received.spend(now, CHARGE_BYTES);
            Ok(())
        })
    }

    /// Charges the next bytes if `bytes` in all would exceed what is charged.
    fn cover(&mut self, bytes: u64) -> Result<(), UpdateError> {
        if bytes > self.bytes { self.add() } else { Ok(()) }
    }

    /// Corrects the charge in `status` to the bytes that arrived.
    fn settle(&self, status: &mut UpdateStatus, received: u64) {
        let now = Duration::from_secs(self.now);
        status.bytes_received = received;
        status.received.spend(now, received.saturating_sub(self.bytes));
        status.received.refund(self.bytes.saturating_sub(received));
    }
}

/// The releases that a repository lists, as one car sees them.
struct Offer {
    live: Option<Generation>,
    lineage: String,
    /// Every listed release.
    listed: Vec<Release>,
    /// The listed releases of the car's lineage and cohort.
    eligible: Vec<Release>,
}

impl Offer {
    fn has(&self, release: &Release) -> bool {
        self.eligible.iter().any(|r| r.manifest == release.manifest)
    }

    fn newest(&self) -> Option<u64> {
        self.eligible.iter().map(|r| r.generation.sequence).max()
    }

    /// Returns whether the live generation is newer than every eligible release: the publisher
    /// revoked it.
    fn withdraws_live(&self) -> bool {
        self.live.as_ref().is_some_and(|live| self.newest() < Some(live.sequence))
    }
}

/// A release to stage, and the state and release of the record when it was chosen.
struct Chosen {
    release: Release,
    before: (UpdateState, Option<Release>),
}

impl Updater {
    /// Refreshes the signed metadata and stages the next release on the path to the newest. If the
    /// serving process is applying a release, only checks whether the publisher revoked it. The
    /// serving process can change the status record while this call waits for the link.
    ///
    /// # Errors
    /// Why the fetch stopped. The status record becomes `Failed` unless the serving process has the
    /// update in hand.
    pub fn fetch(
        &self,
        fetcher: &mut Fetcher<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        let _fetching = self.lock_fetch()?;
        let mut charge = Charge { updater: self, now, bytes: fetcher.bytes() };
        charge.add()?;

        let ran = self.stage_next(fetcher, &mut charge, &mut progress);

        let recorded = self.change(|status| {
            charge.settle(status, fetcher.bytes());
            status.live = self.live().ok().flatten().map(|g| g.to_string());
            if let Err(e) = &ran
                && status.state.is_fetching()
            {
                status.enter(UpdateState::Failed, now, Some(e.to_string()));
            }
            Ok(status.clone())
        });
        ran?;
        recorded
    }

    fn stage_next(
        &self,
        fetcher: &mut Fetcher<'_>,
        charge: &mut Charge<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), UpdateError> {
        let now = charge.now;
        let targets = Trust::open(&self.disk, &self.directory)?.refresh(fetcher, now)?;
        let directory = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &directory)?;
        let listed = releases(&targets)?;

        let chosen = self.change(|status| self.choose(status, &staging, listed, now))?;
        let Some(Chosen { release, before }) = chosen else { return Ok(()) };

        staging.stage(&release, fetcher, |staged, received| {
            progress(staged, release.bytes);
            charge.cover(received)
        })?;

        self.change(|status| {
            // The serving process took the waiting release during the fetch, so the path may be
            // another one. The next fetch chooses again.
            if before != (status.state, status.release.clone()) {
                return Ok(());
            }
            // A waiting release stays on offer until the bundle of the newer one is complete.
            if let Some(older) = &status.release
                && older.manifest != release.manifest
            {
                staging.drop_bundle(older)?;
            }
            status.release = Some(release);
            status.enter(UpdateState::Staged, now, None);
            Ok(())
        })
    }

    /// Records what the repository offers and returns the release to stage next, or `None`.
    fn choose(
        &self,
        status: &mut UpdateStatus,
        staging: &Staging<'_>,
        listed: Vec<Release>,
        now: u64,
    ) -> Result<Option<Chosen>, UpdateError> {
        let offer = self.offer(listed)?;
        status.newest = offer.newest();
        status.withdrawn = offer.withdraws_live();

        if let Some(applied) = status.applied_release() {
            if !offer.has(applied) {
                let reason = "the publisher revoked the release".to_owned();
                status.enter(UpdateState::RollingBack, now, Some(reason));
            }
            return Ok(None);
        }

        let waiting = status.waiting_release().filter(|r| offer.has(r)).cloned();
        let next = self.next_release(&offer, staging)?;
        staging.reclaim(&offer.listed, next.as_ref().ok().into_iter().flatten().chain(&waiting));

        let Some(release) = next? else {
            status.clear_release(now);
            return Ok(None);
        };
        match waiting {
            Some(waiting) if waiting.manifest == release.manifest => return Ok(None),
            Some(_) => {}
            None => self.start(status, &release, now)?,
        }
        Ok(Some(Chosen { release, before: (status.state, status.release.clone()) }))
    }

    /// Returns what `listed` means for this car.
    fn offer(&self, listed: Vec<Release>) -> Result<Offer, UpdateError> {
        let live = self.live()?;
        let lineage = lineage_of(live.as_ref(), self.lineage.as_deref(), &listed)?;
        let lineage = lineage.unwrap_or_default();

        let is_eligible = |r: &&Release| r.generation.lineage == lineage && self.cohort < r.share;
        let eligible = listed.iter().filter(is_eligible).cloned().collect();
        Ok(Offer { live, lineage, listed, eligible })
    }

    /// Returns the first release on the cheapest path to the newest one. The inner error is
    /// `UpdateError::NoPath`.
    fn next_release(
        &self,
        offer: &Offer,
        staging: &Staging<'_>,
    ) -> Result<Result<Option<Release>, UpdateError>, UpdateError> {
        let mut usable = offer.eligible.clone();
        usable.retain(|r| !staging.is_refused(r));

        let takes_deltas = offer.live.is_some() && !Flash::open(&self.disk, &self.flash)?.is_full();
        let live = offer.live.as_ref().map(|g| g.sequence);
        let path = cheapest_path(live, takes_deltas, &offer.lineage, &usable);
        Ok(path.map(|path| path.into_iter().next()))
    }

    /// Records that `release` is being fetched.
    fn start(
        &self,
        status: &mut UpdateStatus,
        release: &Release,
        now: u64,
    ) -> Result<(), UpdateError> {
        status.take_up(release.clone(), now);
        self.write(status)?;
        status.enter(UpdateState::Fetching, now, None);
        Ok(())
    }
}
