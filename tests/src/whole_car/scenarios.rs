//! The defects that the simulator found. Each is a small named scenario: the knobs under which it
//! occurred, and a range of seeds, of which none may fail. So a scenario stays useful when a change
//! of the product shifts the random numbers. Every other class of faults also has a scenario of its
//! own.

use crate::whole_car::faults::{Fault, Knobs};
use crate::whole_car::repository::Prepared;
use crate::whole_car::world::Start;
use crate::whole_car::{Outcome, simulate_with};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// A defect that was found, and the conditions under which it came.
pub struct Scenario {
    /// The defect.
    pub name: &'static str,
    /// The number of the history; `None` for any.
    pub history: Option<usize>,
    /// The classes of faults.
    pub faults: &'static [Fault],
    /// Seeds from 0 on.
    pub seeds: u64,
    /// The knobs that differ from those of `base`.
    pub change: fn(&mut Knobs),
}

/// Leaves the knobs as [`base`] returns them.
const SAME: fn(&mut Knobs) = |_| {};

const fn found(name: &'static str, faults: &'static [Fault]) -> Scenario {
    Scenario { name, history: None, faults, seeds: 24, change: SAME }
}

/// Every scenario. A scenario with one class of faults covers all defects that this class alone
/// found.
pub const ALL: &[Scenario] = &[
    Scenario {
        history: Some(1),
        change: |knobs| knobs.changed_percent_max = 0,
        ..found("a merge removes a segment while the swap opens it", &[])
    },
    Scenario {
        change: |knobs| (knobs.requests_min, knobs.fault_one_in) = (30, 4),
        ..found("ignitions that end in a power cut count against a release", &[Fault::Power])
    },
    Scenario {
        change: |knobs| (knobs.requests_min, knobs.fault_one_in) = (30, 4),
        ..found("kills count against a release", &[Fault::Kill])
    },
    found("a device error in a swap or a probation counts against a release", &[Fault::ReadError]),
    found("a damaged file of the base counts against a release", &[Fault::FlashDamage]),
    found("a lost file of flash stops updates or service for good", &[Fault::FlashLoss]),
    found("a damaged status record counts the byte budget as spent for good", &[Fault::SyncDamage]),
    Scenario {
        history: Some(6),
        ..found("a lost root of a rotation stops updates for good", &[Fault::SyncDamage])
    },
    found("a replayed status record counts the byte budget as spent for good", &[Fault::Hostile]),
    found("what a taken-over sync process leaves beside kills", &[Fault::Hostile, Fault::Kill]),
    found("full directories alone", &[Fault::Full]),
    found("read-only directories alone", &[Fault::ReadOnly]),
    found("failed writes alone", &[Fault::WriteError]),
    found("bad servers alone", &[Fault::Link]),
    found("stopped processes and a slow disk alone", &[Fault::Stop, Fault::Slow]),
    found("wrong clocks and full directories alone", &[Fault::Clock, Fault::Full]),
    found("restarts in order alone", &[Fault::Exit]),
    found("a lost object hides the other ways to a release", &[Fault::LostObject]),
    Scenario {
        history: Some(8),
        ..found("a release that ends each install holds the car", &[Fault::Exit])
    },
    Scenario {
        history: Some(9),
        ..found("a publisher's clock that was ahead locks the car out", &[Fault::Clock])
    },
    Scenario {
        history: Some(10),
        ..found("a lost generation waits for a new snapshot", &[Fault::FlashLoss])
    },
    Scenario {
        history: Some(11),
        ..found("a release for later programs is fetched and refused", &[Fault::Version])
    },
    Scenario {
        history: Some(12),
        ..found("a delta follows another variant", &[Fault::Version, Fault::Hostile])
    },
    Scenario {
        history: Some(13),
        ..found("a lost generation is rebuilt in one variant", &[Fault::Version, Fault::FlashLoss])
    },
    Scenario {
        history: Some(14),
        ..found("a bad variant hides the good one", &[Fault::Version, Fault::Kill])
    },
    found("callers that hold answers of replaced generations", &[Fault::Callers, Fault::Exit]),
    Scenario {
        history: Some(15),
        ..found("an install without an end holds the car", &[Fault::Callers])
    },
];

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
