//! Running totals of workers.

/// Running totals of one worker, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Lookups of all tables.
    pub lookups: u64,
    /// Lookups of cached tables.
    pub cached_lookups: u64,
    /// Lookups of cached tables whose row was not in the cache.
    pub missed_lookups: u64,
    /// Rows that were not in the cache, each counted once per request.
    pub misses: u64,
    /// Pages read from flash.
    pub pages: u64,
    /// Pages that failed their check or could not be read.
    pub pages_damaged: u64,
}

impl Counters {
    /// Returns the share of the lookups of cached tables that the caches answered; 1 without any
    /// lookup.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.missed_lookups as f64 / self.cached_lookups.max(1) as f64
    }

    /// Adds the totals of another worker.
    pub fn add(&mut self, other: &Self) {
        self.lookups += other.lookups;
        self.cached_lookups += other.cached_lookups;
        self.missed_lookups += other.missed_lookups;
        self.misses += other.misses;
        self.pages += other.pages;
        self.pages_damaged += other.pages_damaged;
    }

    /// Returns the difference to `earlier` totals of the same worker, or all of them if they began
    /// anew since.
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = || {
            Some(Self {
                lookups: self.lookups.checked_sub(earlier.lookups)?,
                cached_lookups: self.cached_lookups.checked_sub(earlier.cached_lookups)?,
                missed_lookups: self.missed_lookups.checked_sub(earlier.missed_lookups)?,
                misses: self.misses.checked_sub(earlier.misses)?,
                pages: self.pages.checked_sub(earlier.pages)?,
                pages_damaged: self.pages_damaged.checked_sub(earlier.pages_damaged)?,
            })
        };
        // A swap resets the counters. One that is lower than before shows it.
        counts().unwrap_or(*self)
    }
}
