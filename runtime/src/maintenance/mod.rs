//! Maintenance: what a daemon does to the flash tier in idle moments, a few pages at a time: merge
//! deltas where there are too many, read every page again, and mend bad pages from what is
//! retained. Runs when called and only then; writes no more a day than the wear budget allows, and
//! goes on the next day, or after a crash, where it stopped. Never on a request's path.

pub mod catalog;
pub mod catalog_entries;
pub mod compact;
pub mod repair;
pub mod scrub;
pub mod throttle;
pub mod wear;

use crate::flash::live::LiveState;
use crate::flash::{Flash, FlashError};
use crate::limits::PAGE_BYTES;
use crate::maintenance::catalog::Catalog;
use crate::maintenance::catalog_entries::CatalogEntries;
use crate::maintenance::compact::{Compacted, Compaction};
use crate::maintenance::scrub::{Damage, Scrub};
use crate::maintenance::wear::{Wear, WearBudget};
use crate::schema::KeySpace;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pages of a scrub between two records of how far it is; a crash repeats at most as many.
const SCRUB_RECORD_PAGES: u64 = 16 << 10;
/// Bytes of a merge that are paid for at once; as many are written between two syncs. A crash costs
/// at most as many of the budget, and as many are written again.
const PAID_BYTES: u64 = 16 << 20;
/// What one commit of the catalog is taken to write: measured, sled's 4.4 KB are 5.6 to 8.6 KB at
/// the device.
const COMMIT_BYTES: u64 = 8 << 10;

/// When upkeep does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceRules {
    /// Deltas of a table that are left alone.
    pub deltas_max: usize,
    /// Changed rows for each 100 of the base that are left alone.
    pub changed_percent_max: u64,
    /// From the end of a scrub to the start of the next.
    #[serde(rename = "scrub_every_hours", deserialize_with = "hours")]
    pub scrub_every: Duration,
    /// What upkeep may write. A merge that needs more goes on the next day; only its index is
    /// written at once.
    #[serde(rename = "wear_bytes_per_day_max", deserialize_with = "a_day")]
    pub wear: WearBudget,
    /// Share of the time that upkeep may be at work.
    pub busy_percent_max: u64,
}

impl Default for MaintenanceRules {
    /// 16 deltas or 16 % changed rows (at 1 % a delta a write amplification of 7.5), a scrub a
    /// week, 64 GiB a day, a tenth of the time.
    fn default() -> Self {
        let wear = WearBudget { bytes_per_day_max: 64 << 30 };
        let scrub_every = Duration::from_secs(7 * 24 * HOUR);
        Self { deltas_max: 16, changed_percent_max: 16, scrub_every, wear, busy_percent_max: 10 }
    }
}

const HOUR: u64 = 60 * 60;

fn hours<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    Ok(Duration::from_secs(u64::from(u32::deserialize(from)?) * HOUR))
}

fn a_day<'de, D: Deserializer<'de>>(from: D) -> Result<WearBudget, D::Error> {
    Ok(WearBudget { bytes_per_day_max: u64::deserialize(from)? })
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Did {
    /// Nothing is due.
    Nothing,
    /// Read some pages of a scrub; more are left.
    Scrubbed,
    /// Read the last pages of a scrub.
    ScrubEnded {
        /// Pages read in all.
        pages: u64,
        /// Bad pages that were rebuilt from what is retained.
        repaired: usize,
        /// Pages that stay bad until a snapshot brings their tables anew; `Maintenance::damage` has
        /// them.
        damaged: usize,
    },
    /// Merged some pages of a table; more are left.
    Merged {
        /// Number of the table.
        table: usize,
    },
    /// Merged the last pages of a table; the merged one is live.
    Compacted {
        /// Number of the table.
        table: usize,
        /// What it wrote.
        compacted: Compacted,
    },
    /// A compaction is due or under way and the day's budget does not allow more of it. Nothing
    /// else is due.
    Waits {
        /// Number of the table.
        table: usize,
        /// Bytes that it must be allowed to get on.
        bytes: u64,
    },
}

/// What a table is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    /// Deltas that a compaction would take away.
    deltas: usize,
    /// Changed rows that it would move to the base.
    changed: u64,
    base_rows: u64,
}

impl Load {
    fn of(flash: &Flash, number: usize) -> Result<Self, FlashError> {
        let rows = flash.table(number)?;
        let (base, deltas) = (&rows.segments()[0], &rows.segments()[1..]);
        let changed = rows.changed() as u64;
        let (deltas, changed) = match base.kind().keys() {
            KeySpace::Sparse => (deltas.len(), changed),
            // An index table goes on saying which keys are deleted, so such deltas stay.
            KeySpace::Index => {
                let of_rows = deltas.iter().map(|d| d.counts().rows).filter(|rows| *rows > 0);
                (of_rows.clone().count(), changed.min(of_rows.sum()))
            }
        };
        Ok(Self { deltas, changed, base_rows: rows.base_rows() })
    }

    fn is_due(&self, rules: &MaintenanceRules) -> bool {
        let changed = u128::from(self.changed) * 100;
        let most = u128::from(self.base_rows) * u128::from(rules.changed_percent_max);
        self.deltas > rules.deltas_max || (self.deltas > 0 && changed > most)
    }

    /// Which of two is more urgent: more deltas, then more changed rows.
    fn urgency(&self) -> (usize, u64) {
        (self.deltas, self.changed)
    }
}

/// The upkeep of one flash directory.
pub struct Maintenance {
    rules: MaintenanceRules,
    catalog: Option<Catalog>,
    notes: CatalogEntries,
    /// What is live, as of the last step, and what each of its tables is made of.
    live: Option<LiveState>,
    loads: BTreeMap<usize, Load>,
    compaction: Option<Compaction>,
    /// Bytes that count as spent and are not written yet, and the day that they were taken from.
    paid: u64,
    paid_day: Option<u64>,
    /// Bytes of the compaction since its last sync.
    unsynced: u64,
    /// Pages scrubbed since that was recorded.
    unrecorded_pages: u64,
}

impl Maintenance {
    /// Maintenance by `rules`. What it did before comes from `notes`, and is kept in `catalog` if
    /// there is one.
    pub fn new(rules: MaintenanceRules, catalog: Option<Catalog>, notes: CatalogEntries) -> Self {
        let (live, loads, compaction, paid_day) = (None, BTreeMap::new(), None, None);
        let (paid, unsynced, unrecorded_pages) = (0, 0, 0);
        Self {
            rules,
            catalog,
            notes,
            live,
            loads,
            compaction,
            paid,
            paid_day,
            unsynced,
            unrecorded_pages,
        }
    }

    /// Bad pages that the scrub under way, or the last one, found.
    pub fn damage(&self) -> &[Damage] {
        &self.notes.scrub.damage
    }

    /// What was written to flash.
    pub fn wear(&self) -> &Wear {
        &self.notes.wear
    }

    /// What is kept in the catalog.
    pub fn notes(&self) -> &CatalogEntries {
        &self.notes
    }

    /// Counts what something else wrote to the same flash, as an install does. Never refused.
    pub fn wrote(&mut self, now: Duration, bytes: u64) {
        self.notes.wear.spend(now, bytes);
        self.record(now);
    }

    /// Makes durable what a stop must not cost: pages that were merged, and how far a scrub is.
    ///
    /// # Errors
    /// The device refused; the merge starts from its last sync.
    pub fn pause(&mut self, now: Duration) -> Result<(), FlashError> {
        self.refund();
        self.record(now);
        self.unsynced = 0;
        self.compaction.as_mut().map_or(Ok(()), Compaction::sync)
    }

    /// Does what is most urgent, reading up to about `pages` pages. `now` is the time since the
    /// epoch.
    ///
    /// # Errors
    /// A segment does not open, or a page is damaged, or the device refused. What is live is as it
    /// was, and the next call goes on with something else.
    pub fn step(
        &mut self,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<Did, FlashError> {
        self.follow(flash, now);
        let Some(mut compaction) = self.next_compaction(flash)? else {
            return Ok(self.scrub(flash, now, pages));
        };
        let table = compaction.table();
        let bytes = compaction.next_bytes();
        if bytes.is_err() {
            self.loads.remove(&table);
        }
        let bytes = bytes?;
        if self.pay(now, bytes) {
            return self.merge(compaction, flash, now, pages);
        }
        if self.unsynced > 0 {
            self.unsynced = 0;
            compaction.sync()?;
        }
        self.compaction = Some(compaction);
        match self.scrub(flash, now, pages) {
            Did::Nothing => Ok(Did::Waits { table, bytes }),
            did => Ok(did),
        }
    }

    /// Brings the notes up to what is live; drops a merge of what no longer is.
    fn follow(&mut self, flash: &Flash, now: Duration) {
        let live = &flash.record().live;
        if self.live.as_ref() == Some(live) {
            return;
        }
        (self.compaction, self.unsynced) = (None, 0);
        self.loads.clear();
        for number in 0..live.tables.len() {
            match Load::of(flash, number) {
                Ok(load) => drop(self.loads.insert(number, load)),
                Err(e) => log::warn!("not merged: {e}"),
            }
        }
        self.notes.follow(flash);
        self.live = Some(live.clone());
        self.record(now);
    }

    /// The one under way, or the most urgent that is due.
    fn next_compaction(&mut self, flash: &Flash) -> Result<Option<Compaction>, FlashError> {
        if let Some(compaction) = self.compaction.take() {
            return Ok(Some(compaction));
        }
        let due = self.loads.iter().filter(|(_, load)| load.is_due(&self.rules));
        let Some((&table, _)) = due.max_by_key(|(_, load)| load.urgency()) else { return Ok(None) };
        let begun = Compaction::begin(flash, table);
        if !matches!(begun, Ok(Some(_))) {
            self.loads.remove(&table);
        }
        begun
    }

    /// Whether `bytes` may be written now. They count before the first is written: a crash may
    /// waste budget but never exceeds it.
    fn pay(&mut self, now: Duration, bytes: u64) -> bool {
        let commit = if self.catalog.is_some() { COMMIT_BYTES } else { 0 };
        let left = self.notes.wear.left(self.rules.wear, now).saturating_sub(commit);
        if self.paid_day != self.notes.wear.day {
            (self.paid, self.paid_day) = (0, self.notes.wear.day);
        }
        let missing = bytes.saturating_sub(self.paid);
        if missing == 0 || missing > left {
            return missing == 0;
        }
        let more = PAID_BYTES.max(missing).min(left);
        self.notes.wear.spend(now, more);
        self.paid += more;
        self.record(now);
        true
    }

    /// Takes back what was paid and is not needed now.
    fn refund(&mut self) {
        if self.paid_day == self.notes.wear.day {
            self.notes.wear.refund(self.paid);
        }
        self.paid = 0;
    }

    /// A table whose merge fails is left alone until what is live changes, or the process starts
    /// again: the same page would stop it again. What was merged stays, for when that page is
    /// mended.
    fn merge(
        &mut self,
        mut compaction: Compaction,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<Did, FlashError> {
        let (table, before) = (compaction.table(), compaction.bytes());
        let stepped = compaction.step(flash, pages, self.paid);
        let wrote = compaction.bytes() - before;
        (self.paid, self.unsynced) = (self.paid.saturating_sub(wrote), self.unsynced + wrote);
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
                return Ok(Did::Merged { table });
            }
            Ok(Some(bytes)) => {
                self.paid -= bytes;
                compaction.finish(flash)
            }
            Err(e) => Err(e),
        };
        self.loads.remove(&table);
        self.unsynced = 0;
        self.refund();
        let compacted = finished?;
        self.follow(flash, now);
        Ok(Did::Compacted { table, compacted })
    }

    fn scrub(&mut self, flash: &Flash, now: Duration, pages: u64) -> Did {
        if let Some(ended) = self.notes.scrubbed {
            // A clock that went back says nothing of how long ago that was.
            if now >= ended && now - ended < self.rules.scrub_every {
                return Did::Nothing;
            }
            (self.notes.scrub, self.notes.scrubbed) = (Scrub::default(), None);
        }
        let more = self.notes.scrub.step(flash, pages);
        self.unrecorded_pages = self.unrecorded_pages.saturating_add(pages);
        if more {
            if self.unrecorded_pages >= SCRUB_RECORD_PAGES {
                self.record(now);
            }
            return Did::Scrubbed;
        }
        let repaired = self.repair(flash, now);
        self.notes.scrubbed = Some(now);
        self.record(now);
        let Scrub { pages, damage, .. } = &self.notes.scrub;
        Did::ScrubEnded { pages: *pages, repaired, damaged: damage.len() }
    }

    /// Mends what can be mended; returns how many pages that were.
    fn repair(&mut self, flash: &Flash, now: Duration) -> usize {
        let found = self.notes.scrub.damage.len();
        self.notes.scrub.damage.retain(|damage| match flash.repair_from_retained(damage) {
            Ok(is_repaired) => !is_repaired,
            Err(e) => {
                log::warn!("not repaired: {e}");
                true
            }
        });
        let repaired = found - self.notes.scrub.damage.len();
        if repaired > 0 {
            self.notes.wear.spend(now, (repaired * PAGE_BYTES) as u64);
            // Tables that bad pages kept from being merged are looked at again.
            self.live = None;
        }
        repaired
    }

    /// What cannot be recorded is known for as long as the process runs. A commit counts as wear,
    /// never refused.
    fn record(&mut self, now: Duration) {
        self.unrecorded_pages = 0;
        let Some(catalog) = &mut self.catalog else { return };
        self.notes.wear.spend(now, COMMIT_BYTES);
        if let Err(e) = catalog.write(&self.notes) {
            log::warn!("the catalog is behind: {e}");
        }
    }
}
