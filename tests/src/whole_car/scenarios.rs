//! The defects that the simulator found, each as a small named scenario: the knobs under which it
//! came, and a range of seeds. A scenario outlives changes of the product that shift the random
//! numbers, because it demands that no seed of its range fails.

use crate::whole_car::faults::{Fault, Knobs};
use crate::whole_car::repository::Prepared;
use crate::whole_car::world::Start;
use crate::whole_car::{Outcome, simulate_with};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// A defect that was found, and the conditions under which it came.
pub struct Scenario {
    /// What happened.
    pub name: &'static str,
    /// The number of the history; `None` for any.
    pub history: Option<usize>,
    /// The classes of faults.
    pub faults: &'static [Fault],
    /// Seeds from 0 on.
    pub seeds: u64,
    /// The knobs that differ from those of [`base`].
    pub change: fn(&mut Knobs),
}

/// Every scenario.
pub const ALL: &[Scenario] = &[Scenario {
    name: "a merge removes a segment while the swap opens it",
    history: Some(1),
    faults: &[],
    seeds: 20,
    change: |knobs| knobs.changed_percent_max = 0,
}];

/// Returns the knobs that scenarios begin with.
fn base() -> Knobs {
    Knobs {
        faults: BTreeSet::new(),
        history: None,
        rounds: 400,
        preempt_one_in: 4,
        fault_one_in: 8,
        tick_max: Duration::from_secs(3_600),
        changed_percent_max: 16,
        requests_min: 3,
        wear_bytes: 64 << 30,
        holds_last_back: true,
    }
}

impl Scenario {
    /// Runs one seed of the scenario.
    pub fn run(&self, prepared: &Arc<Prepared>, seed: u64, is_verbose: bool) -> Outcome {
        let mut knobs = base();
        (knobs.history, knobs.faults) = (self.history, self.faults.iter().copied().collect());
        (self.change)(&mut knobs);
        simulate_with(prepared, Start { seed, knobs, is_verbose })
    }
}
