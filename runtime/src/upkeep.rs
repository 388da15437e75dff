//! Upkeep: what a daemon does to the flash tier in idle moments, a few pages at a time: merge deltas where
//! there are too many, and read every page again. Runs when called and only then; writes no more than the
//! wear budget allows; after a crash it starts over. Never on a request's path.

use crate::catalog::Catalog;
use crate::compact::{Compacted, Compaction};
use crate::flash::{Flash, FlashError};
use crate::live::State;
use crate::notes::Notes;
use crate::schema::KeySpace;
use crate::scrub::{Damage, Scrub};
use crate::wear::{Wear, WearBudget};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pages of a scrub between two records of how far it is; a crash repeats at most as many.
const SCRUB_RECORD_PAGES: u64 = 16 << 10;

/// When upkeep does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Deltas of a table that are left alone.
    pub deltas_max: usize,
    /// Changed rows for each 100 of the base that are left alone.
    pub changed_percent_max: u64,
    /// From the end of a scrub to the start of the next.
    pub scrub_every: Duration,
    /// What compactions may write. Tables that need more than a day's bytes are never merged.
    pub wear: WearBudget,
}

impl Default for Rules {
    /// 8 deltas, 16 % changed rows (a write amplification of 7.7), a scrub a week, 64 GiB a day.
    fn default() -> Self {
        let (wear, week) = (WearBudget { bytes_per_day_max: 64 << 30 }, 7 * 24 * 60 * 60);
        Self { deltas_max: 8, changed_percent_max: 16, scrub_every: Duration::from_secs(week), wear }
    }
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
        /// Pages that must be fetched again; `Upkeep::damage` has them.
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
    /// A compaction is due and the day's budget does not allow it. Nothing else is due.
    Waits {
        /// Number of the table.
        table: usize,
        /// Bytes that it will write.
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
    /// Bytes that it writes at most.
    bytes: u64,
}

impl Load {
    fn of(flash: &Flash, number: usize) -> Result<Self, FlashError> {
        let rows = flash.table(number)?;
        let (base, deltas) = (&rows.segments()[0], &rows.segments()[1..]);
        let changed = rows.changed() as u64;
        let bytes = rows.file_bytes();
        let (deltas, changed) = match base.kind().keys() {
            KeySpace::Sparse => (deltas.len(), changed),
            // An index table goes on saying which keys are deleted, so such deltas stay.
            KeySpace::Index => {
                let of_rows = deltas.iter().map(|d| d.counts().rows).filter(|rows| *rows > 0);
                (of_rows.clone().count(), changed.min(of_rows.sum()))
            }
        };
        Ok(Self { deltas, changed, base_rows: rows.base_rows(), bytes })
    }

    fn is_due(&self, rules: &Rules) -> bool {
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
pub struct Upkeep {
    rules: Rules,
    catalog: Option<Catalog>,
    notes: Notes,
    /// What is live, as of the last step, and what each of its tables is made of.
    live: Option<State>,
    loads: BTreeMap<usize, Load>,
    compaction: Option<Compaction>,
    /// Pages scrubbed since that was recorded.
    unrecorded_pages: u64,
}

impl Upkeep {
    /// Upkeep by `rules`. What it did before comes from `notes`, and is kept in `catalog` if there is one.
    pub fn new(rules: Rules, catalog: Option<Catalog>, notes: Notes) -> Self {
        let (live, loads) = (None, BTreeMap::new());
        Self { rules, catalog, notes, live, loads, compaction: None, unrecorded_pages: 0 }
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
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Counts what something else wrote to the same flash, as an install does. Never refused.
    pub fn wrote(&mut self, now: Duration, bytes: u64) {
        self.notes.wear.spend(now, bytes);
        self.record();
    }

    /// Does what is most urgent, reading up to about `pages` pages. `now` is the time since the epoch.
    ///
    /// # Errors
    /// A segment does not open, or a page is damaged, or the device refused. What is live is as it was, and
    /// the next call goes on with something else.
    pub fn step(&mut self, flash: &mut Flash, now: Duration, pages: u64) -> Result<Did, FlashError> {
        self.follow(flash);
        if let Some(compaction) = self.compaction.take() {
            return self.merge(compaction, flash, now, pages);
        }
        let due = self.most_urgent();
        if let Some((table, load)) = due.iter().find(|(_, l)| self.allows(now, l.bytes)).copied() {
            return self.begin(table, load, flash, now, pages);
        }
        match self.scrub(flash, now, pages)? {
            Did::Nothing => Ok(due
                .first()
                .map_or(Did::Nothing, |(table, load)| Did::Waits { table: *table, bytes: load.bytes })),
            did => Ok(did),
        }
    }

    /// Brings the notes up to what is live; drops a merge of what no longer is.
    fn follow(&mut self, flash: &Flash) {
        let live = &flash.record().live;
        if self.live.as_ref() == Some(live) {
            return;
        }
        if self.compaction.take().is_some() {
            flash.reclaim();
        }
        self.loads.clear();
        for number in 0..live.tables.len() {
            match Load::of(flash, number) {
                Ok(load) => drop(self.loads.insert(number, load)),
                Err(e) => log::warn!("not merged: {e}"),
            }
        }
        self.notes.follow(flash);
        self.live = Some(live.clone());
        self.record();
    }

    fn most_urgent(&self) -> Vec<(usize, Load)> {
        let mut due: Vec<(usize, Load)> =
            self.loads.iter().filter(|(_, l)| l.is_due(&self.rules)).map(|(t, l)| (*t, *l)).collect();
        due.sort_by_key(|(_, load)| std::cmp::Reverse(load.urgency()));
        due
    }

    fn allows(&mut self, now: Duration, bytes: u64) -> bool {
        self.notes.wear.allows(self.rules.wear, now, bytes)
    }

    /// The bytes count before the first is written: a crash may waste budget but never exceeds it.
    fn begin(
        &mut self,
        table: usize,
        load: Load,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<Did, FlashError> {
        self.notes.wear.spend(now, load.bytes);
        self.record();
        let begun = Compaction::begin(flash, table);
        if !matches!(begun, Ok(Some(_))) {
            self.loads.remove(&table);
        }
        match begun? {
            Some(compaction) => self.merge(compaction, flash, now, pages),
            None => Ok(Did::Nothing),
        }
    }

    /// A table whose merge fails is left alone until what is live changes, or the process starts again: the
    /// same page would stop it again.
    fn merge(
        &mut self,
        mut compaction: Compaction,
        flash: &mut Flash,
        now: Duration,
        pages: u64,
    ) -> Result<Did, FlashError> {
        let table = compaction.table();
        let merged = match compaction.step(pages) {
            Ok(true) => {
                self.compaction = Some(compaction);
                return Ok(Did::Merged { table });
            }
            Ok(false) => compaction.finish(flash),
            Err(e) => Err(e),
        };
        let load = self.loads.remove(&table);
        if merged.is_err() {
            flash.reclaim();
        }
        let compacted = merged?;
        let more = compacted.bytes.saturating_sub(load.map_or(0, |l| l.bytes));
        self.notes.wear.spend(now, more);
        self.follow(flash);
        Ok(Did::Compacted { table, compacted })
    }

    fn scrub(&mut self, flash: &Flash, now: Duration, pages: u64) -> Result<Did, FlashError> {
        if let Some(ended) = self.notes.scrubbed {
            // A clock that went back says nothing of how long ago that was.
            if now >= ended && now - ended < self.rules.scrub_every {
                return Ok(Did::Nothing);
            }
            (self.notes.scrub, self.notes.scrubbed) = (Scrub::default(), None);
        }
        let more = self.notes.scrub.step(flash, pages).inspect_err(|_| self.notes.scrub.skip_segment())?;
        self.unrecorded_pages = self.unrecorded_pages.saturating_add(pages);
        if more {
            if self.unrecorded_pages >= SCRUB_RECORD_PAGES {
                self.record();
            }
            return Ok(Did::Scrubbed);
        }
        self.notes.scrubbed = Some(now);
        self.record();
        let Scrub { pages, damage, .. } = &self.notes.scrub;
        Ok(Did::ScrubEnded { pages: *pages, damaged: damage.len() })
    }

    /// What cannot be recorded is known for as long as the process runs.
    fn record(&mut self) {
        self.unrecorded_pages = 0;
        if let Some(Err(e)) = self.catalog.as_mut().map(|c| c.write(&self.notes)) {
            log::warn!("the catalog is behind: {e}");
        }
    }
}
