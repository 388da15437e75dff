//! Maintenance of the flash tier, a few pages at a time. It merges deltas when a table has too
//! many, scrubs every page, and repairs damaged pages from the previous generation. Works only when
//! its caller, the daemon, calls [`Maintenance::step`]. Writes at most the wear budget each day,
//! and continues on the next day or after a crash. Never runs on the request path.

pub mod background;
pub mod catalog;
pub mod catalog_entries;
pub mod compact;
pub mod repair;
pub mod scrub;
pub mod share;
pub mod step_size;

use crate::flash::live::LiveRecord;
use crate::flash::{Flash, FlashError};
use crate::io::daily_bytes::DailyBytes;
use crate::limits::PAGE_BYTES;
use crate::maintenance::catalog::Catalog;
use crate::maintenance::catalog_entries::CatalogEntries;
use crate::maintenance::compact::{Compacted, Compaction};
use crate::maintenance::scrub::{Damage, Scrub};
use crate::maintenance::share::BusyBounds;
use crate::schema::KeySpace;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pages of a scrub between two commits of its position. After a crash at most as many are
/// repeated.
const SCRUB_RECORD_PAGES: u64 = 16 << 10;
/// Bytes of a merge that are charged to the wear budget together, and bytes between two syncs. A
/// crash wastes at most this much of the budget, and the merge then writes at most this much again.
const PAID_BYTES: u64 = 16 << 20;
/// Bytes charged for one commit of the catalog. In a measurement sled wrote 4.4 KB, and the device
/// received 5.6 to 8.6 KB.
const COMMIT_BYTES: u64 = 8 << 10;
/// Bytes charged for each damaged page in a commit: most are the text of its fault.
const DAMAGE_BYTES: u64 = 512;
/// Time after which a merge is tried again whose error may pass, such as a lack of room.
const MERGE_PAUSE: Duration = Duration::from_secs(HOUR);
/// The least wear of a day with which a merge begins if nothing is damaged: a page, and the commits
/// before and after it.
pub(crate) const WEAR_BYTES_PER_DAY_MIN: u64 = PAGE_BYTES as u64 + 2 * COMMIT_BYTES;

/// Limits and intervals of maintenance: `[maintenance]` of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceRules {
    /// Deltas of a table up to which no merge is due.
    pub deltas_max: usize,
    /// Changed rows, per cent of the base's rows, up to which no merge is due.
    pub changed_percent_max: u64,
    /// Time from the end of a scrub to the start of the next.
    #[serde(rename = "scrub_every_hours", deserialize_with = "hours")]
    pub scrub_every: Duration,
    /// Bytes a day that maintenance may write. A longer merge continues on the next day; only its
    /// index must fit in one day.
    pub wear_bytes_per_day_max: u64,
    /// Share of the time that maintenance gets while work is due, per cent.
    pub busy_percent_min: u64,
    /// Share of the time that maintenance may work, per cent.
    pub busy_percent_max: u64,
}

impl Default for MaintenanceRules {
    /// Returns 16 deltas or 16 % changed rows, a scrub a week, 64 GiB a day, and 1 to 10 % of the
    /// time. With deltas of 1 % the write amplification is 7.5.
    fn default() -> Self {
        let scrub_every = Duration::from_secs(7 * 24 * HOUR);
        Self {
            deltas_max: 16,
            changed_percent_max: 16,
            scrub_every,
            wear_bytes_per_day_max: 64 << 30,
            busy_percent_min: 1,
            busy_percent_max: 10,
        }
    }
}

const HOUR: u64 = 60 * 60;

fn hours<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    Ok(Duration::from_secs(u64::from(u32::deserialize(from)?) * HOUR))
}

impl MaintenanceRules {
    /// Returns the least and the most share of the time that maintenance works.
    pub fn busy(&self) -> BusyBounds {
        BusyBounds { percent_min: self.busy_percent_min, percent_max: self.busy_percent_max }
    }
}

/// The work that a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum StepOutcome {
    /// No work is due.
    Nothing,
    /// Read some pages of a scrub; more are left.
    Scrubbed,
    /// Read the last pages of a scrub.
    ScrubEnded {
        /// Pages read in the whole scrub.
        pages: u64,
        /// Damaged pages that were rebuilt.
        repaired: usize,
        /// Pages that stay damaged until a snapshot replaces their tables. [`Maintenance::damage`]
        /// lists them.
        damaged: usize,
    },
    /// Merged some pages of a table; more are left.
    Merged { table: usize },
    /// Merged the last pages of a table; the merged table is live.
    Compacted { table: usize, compacted: Compacted },
    /// The merge of a table is ready and waits, because an update has the directory locked.
    Busy { table: usize },
    /// The merge of a table needs `bytes` more than today's budget allows. No other work is due.
    Waits { table: usize, bytes: u64 },
}

/// The amount of work that a merge of a table's deltas would remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MergeLoad {
    /// Deltas that a merge would remove.
    deltas: usize,
    /// Changed rows that a merge would move to the base.
    changed: u64,
    base_rows: u64,
}

impl MergeLoad {
    fn of(flash: &Flash, number: usize) -> Result<Self, FlashError> {
        let rows = flash.table(number)?;
        let (base, deltas) = (&rows.segments()[0], &rows.segments()[1..]);
        let changed = rows.changed() as u64;

        let (deltas, changed) = match base.kind().keys() {
            KeySpace::Sparse => (deltas.len(), changed),
            // A merge of an index table leaves a delta of deletes, so those do not count.
            KeySpace::Index => {
                let of_rows = deltas.iter().map(|d| d.counts().rows).filter(|rows| *rows > 0);
                (of_rows.clone().count(), changed.min(of_rows.sum()))
            }
        };
        Ok(Self { deltas, changed, base_rows: rows.base_rows() })
    }

    fn is_due(&self, rules: &MaintenanceRules) -> bool {
        let changed = u128::from(self.changed) * 100;
        let changed_max = u128::from(self.base_rows) * u128::from(rules.changed_percent_max);
        self.deltas > rules.deltas_max || (self.deltas > 0 && changed > changed_max)
    }

    /// Orders merges by urgency: more deltas first, then more changed rows.
    fn urgency(&self) -> (usize, u64) {
        (self.deltas, self.changed)
    }
}

/// The maintenance of one flash directory.
pub struct Maintenance {
    rules: MaintenanceRules,
    catalog: Option<Catalog>,
    entries: CatalogEntries,
    /// The live record at the last step.
    live: Option<LiveRecord>,
    loads: BTreeMap<usize, MergeLoad>,
    /// The tables whose merge failed and may succeed later, with the time of the failure.
    failed: BTreeMap<usize, Duration>,
    compaction: Option<Compaction>,
    /// Bytes charged to the budget of `paid_day` and not yet written.
    paid: u64,
    paid_day: Option<u64>,
    /// Bytes of the compaction since its last sync.
    unsynced: u64,
    /// Pages scrubbed since the last commit of the position.
    unrecorded_pages: u64,
}

impl Maintenance {
    /// Returns the maintenance of a flash directory by `rules`. `entries` hold its earlier state;
    /// the new state is committed to `catalog`, if there is one.
    pub fn new(rules: MaintenanceRules, catalog: Option<Catalog>, entries: CatalogEntries) -> Self {
        Self {
            rules,
            catalog,
            entries,
            live: None,
            loads: BTreeMap::new(),
            failed: BTreeMap::new(),
            compaction: None,
            paid: 0,
            paid_day: None,
            unsynced: 0,
            unrecorded_pages: 0,
        }
    }

    /// Returns the damaged pages that the current or the last scrub found.
    pub fn damage(&self) -> &[Damage] {
        &self.entries.scrub.damage
    }

    /// Returns the bytes written to flash.
    pub fn wear(&self) -> &DailyBytes {
        &self.entries.wear
    }

    /// Returns the state that the catalog keeps.
    pub fn entries(&self) -> &CatalogEntries {
        &self.entries
    }

    /// Charges bytes that another part wrote to the same flash, such as an install. Never refuses.
    pub fn count_written(&mut self, now: Duration, bytes: u64) {
        self.entries.wear.spend(now, bytes);
        self.record(now);
    }

    /// Makes merged pages and the position of the scrub durable, so that a stop loses neither.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the device refused; the merge then continues from its last sync.
    pub fn pause(&mut self, now: Duration) -> Result<(), FlashError> {
        self.refund();
        self.record(now);
        self.unsynced = 0;
        self.compaction.as_mut().map_or(Ok(()), Compaction::sync)
    }

    /// Does a piece of the most urgent work, of up to about `pages` pages. `now` is the time since
    /// 1970.
    ///
    /// # Errors
    /// [`FlashError`] if a segment does not open, a page is damaged or the device refused. The live
    /// generation is unchanged, and the next call continues with other work.
    pub fn step(
        &mut self,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<StepOutcome, FlashError> {
        self.follow(flash, now);
        let Some(mut compaction) = self.next_compaction(flash, now)? else {
            return Ok(self.scrub(flash, now, pages));
        };

        let table = compaction.table();
        let bytes = compaction.next_bytes().inspect_err(|e| self.skip(table, e, now))?;
        if self.pay(now, bytes) {
            return self.merge(compaction, flash, now, pages);
        }

        // The merge may wait until tomorrow. A crash before then must not waste what was paid for
        // its pages.
        if self.unsynced > 0 {
            self.unsynced = 0;
            compaction.sync()?;
        }
        self.compaction = Some(compaction);
        match self.scrub(flash, now, pages) {
            StepOutcome::Nothing => Ok(StepOutcome::Waits { table, bytes }),
            outcome => Ok(outcome),
        }
    }

    /// Updates the entries and loads if the live state changed. Drops a merge of another state.
    fn follow(&mut self, flash: &Flash, now: Duration) {
        let record = flash.record();
        if self.live.as_ref() == Some(record) {
            // If the clock went back, the age of a failure is unknown.
            let is_over = |at: Duration| now < at || now - at >= MERGE_PAUSE;
            let over = self.failed.iter().find(|(_, at)| is_over(**at));
            if let Some((&table, _)) = over {
                self.failed.remove(&table);
                self.weigh(flash, table, now);
            }
            return;
        }

        (self.compaction, self.unsynced) = (None, 0);
        self.loads.clear();
        self.failed.clear();
        (0..record.live.tables.len()).for_each(|table| self.weigh(flash, table, now));

        if self.live.as_ref().is_some_and(|live| live.rebuilds != record.rebuilds) {
            // A rebuild has other files of the same numbers.
            self.entries.scrub.damage.clear();
        }
        self.entries.follow(flash);
        self.live = Some(record.clone());
        self.record(now);
    }

    /// Finds out how much a merge of `table` would remove.
    fn weigh(&mut self, flash: &Flash, table: usize, now: Duration) {
        match MergeLoad::of(flash, table) {
            Ok(load) => drop(self.loads.insert(table, load)),
            Err(e) => {
                log::warn!("table {table} is not merged now: {e}");
                self.skip(table, &e, now);
            }
        }
    }

    /// Skips the merge of `table` after `error`. A damaged page would stop it each time, so it then
    /// waits for a repair.
    fn skip(&mut self, table: usize, error: &FlashError, now: Duration) {
        self.loads.remove(&table);
        if !error.is_damage() {
            self.failed.insert(table, now);
        }
    }

    /// Returns the current compaction, or starts the most urgent one that is due.
    fn next_compaction(
        &mut self,
        flash: &Flash,
        now: Duration,
    ) -> Result<Option<Compaction>, FlashError> {
        if let Some(compaction) = self.compaction.take() {
            if !compaction.is_removed(flash) {
                return Ok(Some(compaction));
            }
            self.unsynced = 0;
            self.refund();
        }

        let due = self.loads.iter().filter(|(_, load)| load.is_due(&self.rules));
        let Some((&table, _)) = due.max_by_key(|(_, load)| load.urgency()) else { return Ok(None) };
        // A table that cannot be merged now must not be chosen again at each step.
        Compaction::begin(flash, table).inspect_err(|e| self.skip(table, e, now))
    }

    /// Returns whether `bytes` may be written now. Charges the budget before the first write, so a
    /// crash may waste budget but never exceeds it.
    fn pay(&mut self, now: Duration, bytes: u64) -> bool {
        let commit = if self.catalog.is_some() { self.commit_bytes() } else { 0 };
        let day = self.rules.wear_bytes_per_day_max;
        let left = self.entries.wear.left(day, now).saturating_sub(commit);
        if self.paid_day != self.entries.wear.day {
            // Bytes that were paid on an earlier day are gone: a new day has a budget of its own.
            (self.paid, self.paid_day) = (0, self.entries.wear.day);
        }

        let missing = bytes.saturating_sub(self.paid);
        if missing == 0 || missing > left {
            return missing == 0;
        }
        // A large charge at once saves commits of the catalog, which cost wear too.
        let more = PAID_BYTES.max(missing).min(left);
        self.entries.wear.spend(now, more);
        self.paid = self.paid.saturating_add(more);
        assert!(self.paid >= bytes, "the charge covers the next write");
        self.record(now);
        true
    }

    /// Returns paid bytes that were not written to the budget of the same day.
    fn refund(&mut self) {
        if self.paid_day == self.entries.wear.day {
            self.entries.wear.refund(self.paid);
        }
        self.paid = 0;
    }

    /// Merges some pages, and finishes the compaction after the last ones. A table whose merge
    /// fails is skipped for [`MERGE_PAUSE`]. After damage it is skipped until the live state
    /// changes or the process restarts. The pages merged so far stay on flash for the next attempt.
    fn merge(
        &mut self,
        mut compaction: Compaction,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<StepOutcome, FlashError> {
        let (table, before) = (compaction.table(), compaction.bytes());
        let stepped = compaction.step(flash, pages, self.paid);
        let wrote = compaction.bytes().saturating_sub(before);
        self.paid = self.paid.saturating_sub(wrote);
        self.unsynced = self.unsynced.saturating_add(wrote);

        let stepped = match stepped {
            Ok(false) => compaction.next_bytes().map(|bytes| self.pay(now, bytes).then_some(bytes)),
            Ok(true) if self.unsynced >= PAID_BYTES => {
                self.unsynced = 0;
                compaction.sync().map(|()| None)
            }
            stepped => stepped.map(|_| None),
        };
        let finished = match stepped {
            Ok(None) => {
                self.compaction = Some(compaction);
                return Ok(StepOutcome::Merged { table });
            }
            Ok(Some(bytes)) => {
                assert!(bytes <= self.paid, "`pay` accepted these bytes");
                match flash.lock() {
                    Err(FlashError::Busy { .. }) => {
                        self.compaction = Some(compaction);
                        return Ok(StepOutcome::Busy { table });
                    }
                    Err(e) => Err(e),
                    Ok(lock) => {
                        // Only with the lock: a merge that waits for an update keeps what it paid.
                        self.paid -= bytes;
                        compaction.finish_under(flash, lock)
                    }
                }
            }
            Err(e) => Err(e),
        };

        self.unsynced = 0;
        self.refund();
        let compacted = finished.inspect_err(|e| self.skip(table, e, now))?;
        self.follow(flash, now);
        Ok(StepOutcome::Compacted { table, compacted })
    }

    fn scrub(&mut self, flash: &Flash, now: Duration, pages: u64) -> StepOutcome {
        if let Some(ended) = self.entries.scrubbed {
            // If the clock went back, the age of the last scrub is unknown, so a new scrub starts.
            if now >= ended && now - ended < self.rules.scrub_every {
                return StepOutcome::Nothing;
            }
            (self.entries.scrub, self.entries.scrubbed) = (Scrub::default(), None);
        }

        let more = self.entries.scrub.step(flash, pages);
        self.unrecorded_pages = self.unrecorded_pages.saturating_add(pages);
        if more {
            if self.unrecorded_pages >= SCRUB_RECORD_PAGES {
                self.record(now);
            }
            return StepOutcome::Scrubbed;
        }

        let repaired = self.repair(flash, now);
        self.entries.scrubbed = Some(now);
        self.record(now);
        let Scrub { pages, damage, .. } = &self.entries.scrub;
        StepOutcome::ScrubEnded { pages: *pages, repaired, damaged: damage.len() }
    }

    /// Repairs the damaged pages that can be rebuilt and returns their number.
    fn repair(&mut self, flash: &Flash, now: Duration) -> usize {
        let found = self.entries.scrub.damage.len();
        self.entries.scrub.damage.retain(|damage| match flash.repair_from_retained(damage) {
            Ok(is_repaired) => !is_repaired,
            Err(e) => {
                let (table, page) = (damage.table, damage.page);
                log::warn!("page {page} of table {table} was not repaired: {e}");
                true
            }
        });

        let repaired = found - self.entries.scrub.damage.len();
        if repaired > 0 {
            self.entries.wear.spend(now, repaired as u64 * PAGE_BYTES as u64);
            // The next step reconsiders tables whose merge a damaged page stopped.
            self.live = None;
        }
        repaired
    }

    /// Returns the bytes to charge for a commit of the catalog.
    fn commit_bytes(&self) -> u64 {
        COMMIT_BYTES + DAMAGE_BYTES * self.entries.scrub.damage.len() as u64
    }

    /// Commits the entries to the catalog. A failed commit is logged, and the entries stay valid
    /// until the process ends. A commit counts as wear and is never refused.
    fn record(&mut self, now: Duration) {
        self.unrecorded_pages = 0;
        let bytes = self.commit_bytes();
        let Some(catalog) = &self.catalog else { return };
        self.entries.wear.spend(now, bytes);
        if let Err(e) = catalog.write(&self.entries) {
            log::warn!("the catalog was not written, the next commit tries again: {e}");
        }
    }
}
