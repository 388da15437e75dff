//! The size of a step of maintenance: it follows how long the last step took on this device. Never
//! reads a clock, and never decides a pause: `share.rs` does.

use crate::limits::{MAINTENANCE_PAGES_MAX, MAINTENANCE_STEP_MAX};
use std::time::Duration;

/// The size of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pages: u64,
}

impl Default for StepSize {
    fn default() -> Self {
        Self { pages: 1 }
    }
}

impl StepSize {
    /// Returns the number of pages of the next step.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Doubles the next step after a short step, and halves it after a long one. The last step took
    /// `busy`.
    pub fn adapt(&mut self, busy: Duration) {
        let pages = if busy > MAINTENANCE_STEP_MAX { self.pages / 2 } else { self.pages * 2 };
        self.pages = pages.clamp(1, MAINTENANCE_PAGES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_grows_while_it_is_short_and_shrinks_when_it_is_long() {
        let mut size = StepSize::default();
        for _ in 0..20 {
            size.adapt(MAINTENANCE_STEP_MAX);
        }
        assert_eq!(size.pages(), MAINTENANCE_PAGES_MAX);
        size.adapt(MAINTENANCE_STEP_MAX * 2);
        assert_eq!(size.pages(), MAINTENANCE_PAGES_MAX / 2);
    }
}
