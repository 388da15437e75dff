//! The sync process's side of an update. It refreshes the signed metadata, chooses the next release
//! and stages that release's bundle. Writes the sync directory only, and never changes the live
//! generation.

use crate::bundle::manifest::Generation;
use crate::flash::FlashError;
use crate::io::disk::is_full;
use crate::limits::CHUNK_BYTES;
use crate::schema::change::check_change;
use crate::update::error::UpdateError;
use crate::update::fetch_status::{FetchState, FetchStatus, Offer};
use crate::update::history::last_order;
use crate::update::install_status::{InstallState, InstallStatus, Repair, Retry};
use crate::update::link::Fetcher;
use crate::update::program::Program;
use crate::update::release::{Base, Release, cheapest_path, lineage_of, releases};
use crate::update::staging::Staging;
use crate::update::status::UpdateStatus;
use crate::update::trust::Trust;
use crate::update::updater::{Updater, lock_fetch};
use sigstore_tuf::Targets;
use std::cmp::Reverse;
use std::time::Duration;

/// Bytes charged to the daily budget in one step.
const CHARGE_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// One run of the sync process: its record, and the bytes that it has charged to the daily budget.
/// The run charges bytes before it receives them. So a killed run has charged too much, or too
/// little by what one object repeated.
struct Run<'a> {
    updater: &'a Updater,
    status: FetchStatus,
    now: u64,
    charged: u64,
}

impl Run<'_> {
    fn save(&mut self) -> Result<(), UpdateError> {
        self.updater.write_fetch(&mut self.status)
    }

    /// Charges the next bytes durably.
    fn charge(&mut self) -> Result<(), UpdateError> {
        self.charged = self.charged.saturating_add(CHARGE_BYTES);
        self.status.received.spend(Duration::from_secs(self.now), CHARGE_BYTES);
        self.save()
    }

    /// Charges the next bytes if `bytes` in all would exceed the charge so far.
    fn cover(&mut self, bytes: u64) -> Result<(), UpdateError> {
        if bytes > self.charged { self.charge() } else { Ok(()) }
    }

    /// Corrects the charge to the bytes that arrived.
    fn settle(&mut self, received: u64) {
        let status = &mut self.status;
        status.bytes_received = received;
        status.received.spend(Duration::from_secs(self.now), received.saturating_sub(self.charged));
        status.received.refund(self.charged.saturating_sub(received));
    }

    /// Enters `state`, as a step later than all steps of `install`.
    fn enter(&mut self, state: FetchState, install: &InstallStatus, note: Option<String>) {
        self.status.enter(state, self.now, last_order(&install.history), note);
    }
}

/// The releases of a repository that one car may use.
struct Listing {
    live: Option<Generation>,
    /// The live generation, unless it takes no further delta before a merge.
    base: Option<Base>,
    /// The lowest sequence that this car may serve.
    least: u64,
    lineage: String,
    /// The listed releases of the car's lineage and cohort.
    eligible: Vec<Release>,
}

impl Listing {
    fn has(&self, release: &Release) -> bool {
        // Not by the hash alone: the records of both processes may come from an attacker.
        let names = |r: &Release| (r.manifest, r.parent, r.generation.clone());
        self.eligible.iter().any(|r| names(r) == names(release))
    }

    /// Returns the newest release that this version of the program can read.
    fn newest(&self) -> Option<u64> {
        let readable = self.eligible.iter().filter(|r| r.lacks.is_none());
        readable.map(|r| r.generation.sequence).max()
    }

    /// Returns whether the live generation is newer than every eligible release: the publisher
    /// revoked it.
    fn withdraws_live(&self) -> bool {
        let newest = self.eligible.iter().map(|r| r.generation.sequence).max();
        self.live.as_ref().is_some_and(|live| newest < Some(live.sequence))
    }

    /// Adds to a lack of a path that the live generation takes no delta before a merge.
    fn explain(&self, error: UpdateError) -> UpdateError {
        match error {
            UpdateError::NoPath { live, newest, lineage }
                if self.live.is_some() && self.base.is_none() =>
            {
                let live = format!("{live} (a merge of its deltas is due)");
                UpdateError::NoPath { live, newest, lineage }
            }
            error => error,
        }
    }

    /// Returns why `program` skips the newest release, if it cannot read any bundle of it.
    fn skipped(&self, program: &Program) -> Option<String> {
        let known = self.newest().max(self.live.as_ref().map(|live| live.sequence));
        let newer = self.eligible.iter().filter(|r| Some(r.generation.sequence) > known);
        let newest = newer.max_by_key(|r| (r.generation.sequence, Reverse(r.variant)))?;
        let (generation, version) = (&newest.generation, &program.version);
        let lacks = newest.lacks.as_ref()?;
        Some(format!(
            "release {generation} needs {lacks}, which version {version} lacks; update the program"
        ))
    }
}

impl Updater {
    /// Refreshes the signed metadata and stages the next release on the path to the newest. While
    /// the serving process applies a release, this call only checks whether the publisher revoked
    /// that release. The serving process can change its record while this call waits for the link.
    ///
    /// # Errors
    /// [`UpdateError`] for the reason why the fetch stopped. The state in the sync process's record
    /// is then `Failed`.
    pub fn fetch(
        &self,
        fetcher: &mut Fetcher<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        let _fetching = lock_fetch(self.disk.as_ref(), &self.directory)?;
        let status = FetchStatus::read(self.disk.as_ref(), &self.directory, |problem| {
            log::warn!("the record of the sync process starts anew: {problem}");
        });
        let charged = fetcher.bytes();
        let mut run = Run { updater: self, status, now, charged };
        run.status.cohort = self.cohort;

        let refreshed = run.charge().and_then(|()| self.refresh(fetcher, now));
        if let Err(UpdateError::Io { source, .. }) = &refreshed
            && is_full(source)
        {
            self.free_staged(&mut run)?;
        }
        let ran = refreshed
            .and_then(|targets| self.stage_next(&targets, fetcher, &mut run, &mut progress));

        run.settle(fetcher.bytes());
        if let Err(e) = &ran {
            let install = self.install_status().unwrap_or_default();
            run.enter(FetchState::Failed, &install, Some(e.to_string()));
        }
        // The charge must be right on disk also after an error, or the next run would receive too
        // little.
        let saved = run.save();
        // The cause comes before a failure to record it.
        ran?;
        saved?;
        self.status()
    }

    /// Returns the bytes of `bytes_per_day_max` that a fetch may still receive at `now`. If none
    /// are left, stores the time: after a clock that was ahead, the stored times count the day.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be written.
    pub fn bytes_left(&self, bytes_per_day_max: u64, now: u64) -> Result<u64, UpdateError> {
        let now = Duration::from_secs(now);
        let left = |status: &mut FetchStatus| status.received.left(bytes_per_day_max, now);
        if let bytes @ 1.. = left(&mut self.fetch_status()) {
            return Ok(bytes);
        }
        let _fetching = lock_fetch(self.disk.as_ref(), &self.directory)?;
        let mut status = self.fetch_status();
        let bytes = left(&mut status);
        self.write_fetch(&mut status)?;
        Ok(bytes)
    }

    fn refresh(&self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<Targets, UpdateError> {
        Trust::open(&self.disk, &self.directory)?.refresh(fetcher, now)
    }

    /// Removes staged bundles from a full file system. It refuses the records of each poll before
    /// `choose` can remove what no release needs any more.
    fn free_staged(&self, run: &mut Run<'_>) -> Result<(), UpdateError> {
        let directory = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &directory)?;
        let install = self.install_status()?;
        let open = run.status.offer.as_ref().filter(|offer| is_open(offer, &install));
        staging.reclaim(open.map(|offer| &offer.release).into_iter());
        match run.save() {
            Err(UpdateError::Io { source, .. }) if is_full(&source) => {
                run.status.offer = None;
                staging.reclaim(std::iter::empty());
                Ok(())
            }
            saved => saved,
        }
    }

    fn stage_next(
        &self,
        targets: &Targets,
        fetcher: &mut Fetcher<'_>,
        run: &mut Run<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), UpdateError> {
        let directory = self.directory.join("staged");
        // A snapshot is fetched where a delta would do, so each poll warns once.
        let live = self.find_live(log::Level::Warn)?;
        let staging = Staging::open(self.disk.as_ref(), &directory)?.beside(live);
        let listed = releases(targets, &self.program);

        let Some(release) = self.choose(run, &staging, listed)? else { return Ok(()) };
        let (mut first, mut last) = (None, 0);
        let allowed = self.check_callers(&staging, &release, fetcher);
        let stage = |()| {
            staging.stage(&release, fetcher, |staged, received| {
                first.get_or_insert(staged);
                last = staged;
                progress(staged, release.bytes);
                run.cover(received)
            })
        };
        let fetched = allowed.and_then(stage);
        if let Err(e) = fetched {
            if matches!(e, UpdateError::Flash(FlashError::Space { .. })) {
                // The next poll finds the room of the bundles that were kept for a later attempt.
                let waiting = run.status.offer.as_ref().map(|offer| &offer.release);
                staging.reclaim(std::iter::once(&release).chain(waiting));
            }
            // A link that breaks off, but brings some chunks each time, will bring them all.
            let has_progress = first.is_some_and(|first| first < last);
            let weight = e.weight();
            if weight > 1 || weight > 0 && !has_progress {
                run.status.count_failure(&release, weight);
            }
            return Err(e);
        }
        run.status.set_aside.retain(|s| s.manifest != release.manifest);
        self.offer(run, &staging, release)
    }

    /// Checks by its manifest, before a chunk is fetched, that callers of the live generation can
    /// use `release`. A car without a whole generation takes what it gets.
    fn check_callers(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        fetcher: &mut Fetcher<'_>,
    ) -> Result<(), UpdateError> {
        let repair = self.install_status()?.repair;
        let Some(live) = self.live()?.filter(|_| repair < Repair::AnySnapshot) else {
            return Ok(());
        };
        let (_, manifest) = staging.manifest(release, fetcher)?;
        let live = live.manifest();
        if manifest.generation.sequence <= live.generation.sequence {
            return Ok(());
        }
        let changed = check_change(&live.schema, &manifest.schema);
        let (name, live) = (release.name(), live.generation.to_string());
        changed.map_err(|source| UpdateError::Callers { name, live, source })
    }

    /// Offers the staged `release` to the serving process.
    fn offer(
        &self,
        run: &mut Run<'_>,
        staging: &Staging<'_>,
        release: Release,
    ) -> Result<(), UpdateError> {
        let install = self.install_status()?;
        run.status.release = None;
        if install.state.is_active() {
            // The serving process took the waiting release during the fetch, so the path may have
            // changed. The next fetch chooses again.
            run.enter(FetchState::Idle, &install, None);
            return Ok(());
        }

        let last = run.status.offer.take();
        // A waiting release stays on offer until the bundle of the newer one is complete.
        if let Some(older) = last.as_ref().filter(|o| o.release.manifest != release.manifest) {
            staging.drop_bundle(&older.release)?;
        }
        // The number must only differ from that of the last offer that the serving process took.
        let number = install.offer.wrapping_add(1);
        run.status.offer = Some(Offer { number, release });
        run.enter(FetchState::Staged, &install, None);
        Ok(())
    }

    /// Records the state of the repository and returns the release to stage next, or `None`.
    fn choose(
        &self,
        run: &mut Run<'_>,
        staging: &Staging<'_>,
        listed: Vec<Release>,
    ) -> Result<Option<Release>, UpdateError> {
        let install = self.install_status()?;
        let listing = self.listing(listed, &install)?;
        run.status.begin_poll(&listing.eligible);
        run.status.newest = listing.newest();
        run.status.withdrawn = listing.withdraws_live();
        let skipped = listing.skipped(&self.program);
        if let Some(reason) = skipped.as_ref().filter(|_| skipped != run.status.skipped) {
            log::warn!("{reason}");
        }
        run.status.skipped = skipped;
        run.status.revoked = None;

        if install.state.is_active() {
            let revoked = install.release.as_ref().filter(|applied| !listing.has(applied));
            run.status.revoked = revoked.map(|release| release.manifest);
            // The next step is the serving process's, so the state stays. This poll did not fail.
            run.status.error = None;
            return Ok(None);
        }

        let waiting = run.status.offer.as_ref().filter(|offer| is_open(offer, &install));
        let waiting = waiting.map(|offer| offer.release.clone());
        let waiting = waiting.filter(|release| listing.has(release));
        let next = next_release(&listing, &install, &run.status, |r| staging.has_part(r));
        let next = next.map_err(|error| listing.explain(error));
        // The bundle of a release that gives way stays, or the two ways would be fetched in turn.
        // Where room was short it goes if flash is on the same file system: they have equal room.
        let has_room = install.attempted.iter().all(|a| !matches!(a.retry, Retry::WithRoom(_)))
            || self.disk.free_bytes(&self.directory).is_ok_and(|free| free != self.free_bytes());
        let is_kept =
            |r: &&Release| has_room && install.attempted(r).is_some() && !install.is_refused(r);
        let kept = listing.eligible.iter().filter(is_kept);
        // Before `next?`: without a path, files of withdrawn releases must go too.
        staging.reclaim(next.as_ref().ok().into_iter().flatten().chain(&waiting).chain(kept));

        let next = next?;
        if waiting.is_none() {
            run.status.offer = None;
        }
        let Some(release) = next else {
            run.status.release = None;
            // If no release leads forward any more, a failed attempt is over.
            if run.status.state != FetchState::Idle || install.state == InstallState::Failed {
                run.enter(FetchState::Idle, &install, None);
            }
            return Ok(None);
        };
        if waiting.is_some_and(|waiting| waiting.manifest == release.manifest) {
            if run.status.state != FetchState::Staged {
                run.status.release = None;
                run.enter(FetchState::Staged, &install, None);
            }
            return Ok(None);
        }

        run.status.release = Some(release.clone());
        run.enter(FetchState::Notified, &install, None);
        run.save()?;
        run.enter(FetchState::Fetching, &install, None);
        run.save()?;
        Ok(Some(release))
    }

    /// Returns the releases of `listed` that this car may use.
    fn listing(
        &self,
        listed: Vec<Release>,
        install: &InstallStatus,
    ) -> Result<Listing, UpdateError> {
        let live = self.live()?;
        let base = live.as_ref().filter(|live| !live.is_full());
        let base = base.map(|live| Base::new(&live.record().live, &listed));
        let least = self.least(install)?;
        let live = live.map(|live| live.manifest().generation.clone());
        let known = live.as_ref().or(install.committed.as_ref());
        let lineage = lineage_of(known, self.lineage.as_deref(), &listed)?;
        let lineage = lineage.unwrap_or_default();

        let is_eligible = |r: &Release| r.generation.lineage == lineage && self.cohort < r.share;
        let eligible = listed.into_iter().filter(is_eligible).collect();
        Ok(Listing { live, base, least, lineage, eligible })
    }
}

/// Returns whether the serving process may still read the bundle of `offer`. It has taken an offer
/// once it has recorded its number. One that waits for consent may still be replaced.
fn is_open(offer: &Offer, install: &InstallStatus) -> bool {
    offer.number != install.offer || install.state.has_release()
}

/// Returns the release to fetch next: the one that is partly fetched, as `has_part` says, if it
/// still leads forward. Else a link that is slower than the publisher would never bring one whole.
/// Releases that are set aside, or that the car fails to install, count only if no others lead
/// forward.
fn next_release(
    listing: &Listing,
    install: &InstallStatus,
    status: &FetchStatus,
    has_part: impl Fn(&Release) -> bool,
) -> Result<Option<Release>, UpdateError> {
    let mut usable = listing.eligible.clone();
    usable.retain(|r| r.lacks.is_none() && !install.is_refused(r));
    let mut preferred = usable.clone();
    preferred.retain(|r| !status.is_set_aside(r) && !install.gives_way(r));
    let begun = status.release.as_ref().map(|release| release.manifest);
    let mut in_hand = preferred.iter().filter(|release| begun == Some(release.manifest));
    if let Some(release) = in_hand.find(|r| has_part(r) && leads_on(listing, install.repair, r)) {
        return Ok(Some(release.clone()));
    }
    match first_step(listing, install.repair, &preferred) {
        Ok(None) | Err(UpdateError::NoPath { .. }) if preferred.len() < usable.len() => {
            first_step(listing, install.repair, &usable)
        }
        step => step,
    }
}

/// Returns whether `release` can be installed next and leads forward.
fn leads_on(listing: &Listing, repair: Repair, release: &Release) -> bool {
    let sequence = release.generation.sequence;
    match (&listing.live, release.parent) {
        (None, None) => sequence >= listing.least,
        (Some(live), None) => sequence > live.sequence,
        (_, Some(_)) => {
            repair == Repair::None && listing.base.is_some_and(|base| base.is_parent_of(release))
        }
    }
}

/// Returns the first release of `usable` on the cheapest path to the newest one.
fn first_step(
    listing: &Listing,
    repair: Repair,
    usable: &[Release],
) -> Result<Option<Release>, UpdateError> {
    let live = listing.live.as_ref().map(|g| g.sequence);
    let path = |live, base, usable: &[Release]| {
        let path = cheapest_path(live, base, &listing.lineage, usable)?;
        // A path that ends below what this car has served leads nowhere.
        match path.last() {
            Some(last) if last.generation.sequence < listing.least => Err(UpdateError::NoPath {
                live: live.map_or("nothing".to_owned(), |live| format!("sequence {live}")),
                newest: listing.newest().unwrap_or(0),
                lineage: listing.lineage.clone(),
            }),
            _ => Ok(path),
        }
    };
    let or_else = |found: Result<Vec<Release>, UpdateError>, other: &dyn Fn() -> _| match found {
        Err(UpdateError::NoPath { .. }) => other(),
        found => found,
    };
    let rebuilt = || {
        let mut newer = usable.to_vec();
        newer.retain(|r| r.generation.sequence >= listing.least);
        // Only a generation that is listed can be rebuilt.
        if newer.is_empty() {
            return Ok(Vec::new());
        }
        or_else(path(None, None, &newer), &|| path(None, None, usable))
    };
    let forward = || path(live, listing.base, usable);

    let found = match (live, repair) {
        (None, _) => rebuilt(),
        // One less, so that a snapshot of the damaged generation's own number counts as newer.
        (Some(live), Repair::AnySnapshot | Repair::Replacement) => {
            or_else(path(live.checked_sub(1), None, usable), &rebuilt)
        }
        // No newer snapshot may be listed yet. Until then deltas keep the model up to date.
        (live, Repair::NewerSnapshot) => or_else(path(live, None, usable), &forward),
        (_, Repair::None) => forward(),
    };
    // A step of a rebuild from which no path leads on is replaced by another first step.
    let is_step = live.is_some_and(|live| live < listing.least);
    let found = if is_step { or_else(found, &rebuilt) } else { found };
    Ok(found?.into_iter().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_charged_durably_before_they_arrive() {
        let folder = tempfile::tempdir().unwrap();
        let [directory, flash] = ["sync", "flash"].map(|name| folder.path().join(name));
        std::fs::create_dir(&directory).unwrap();
        let disk = crate::io::disk::system();
        let program = Program::this();
        let updater = Updater { disk, directory, flash, lineage: None, cohort: 0, program };
        let mut run = Run { updater: &updater, status: FetchStatus::default(), now: 0, charged: 0 };
        for (bytes, charges) in [(0, 0), (1, 1), (CHARGE_BYTES, 1), (CHARGE_BYTES + 1, 2)] {
            run.cover(bytes).unwrap();
            assert_eq!(updater.fetch_status().received.bytes, charges * CHARGE_BYTES);
        }
    }
}
