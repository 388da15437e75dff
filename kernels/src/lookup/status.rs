//! The counts of a sample's lookups, by their result.

use crate::lookup::miss_list::RowState;
use serde::{Deserialize, Serialize};

/// Counts of one sample's lookups, by their result. Every lookup is counted once, in exactly one
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupStatus {
    /// Lookups answered with the live generation's own row.
    pub fresh: u32,
    /// Lookups answered with the default row because the miss policy or the deadline did not wait.
    pub defaulted: u32,
    /// Lookups of keys that the model does not have, answered with the default row.
    pub absent: u32,
    /// Lookups of rows whose flash page failed its check, answered with the default row.
    pub damaged: u32,
    /// Whether the deadline passed before all rows were fetched.
    pub late: bool,
}

impl LookupStatus {
    /// Adds another sample's counts.
    pub fn add(&mut self, other: &LookupStatus) {
        self.fresh += other.fresh;
        self.defaulted += other.defaulted;
        self.absent += other.absent;
        self.damaged += other.damaged;
        self.late |= other.late;
    }

    /// Returns the number of lookups.
    pub fn lookups(&self) -> u64 {
        [self.fresh, self.defaulted, self.absent, self.damaged].map(u64::from).iter().sum()
    }

    /// Counts one lookup of a row that was on the miss list.
    pub(crate) fn count(&mut self, state: RowState) {
        match state {
            RowState::Fresh => self.fresh += 1,
            RowState::Pending => self.defaulted += 1,
            RowState::Late => {
                self.defaulted += 1;
                self.late = true;
            }
            RowState::Absent => self.absent += 1,
            RowState::Damaged => self.damaged += 1,
        }
    }
}
