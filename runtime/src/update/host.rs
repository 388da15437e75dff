//! What the process that applies updates gives to each step.

use crate::flash::live::LiveId;
use crate::model::budget::Budget;

pub use crate::update::install_status::Watched;
pub use crate::update::verdict::Policy;

/// The inputs of a step from the process that applies updates.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// The conditions that a release must meet.
    pub policy: Policy,
    /// The budget of a probe.
    pub budget: Budget,
    /// Observations of the live generation. `None` if this process serves no requests; the probe
    /// alone then decides.
    pub watched: Option<Watched>,
    /// Why the live generation cannot be served, if it cannot.
    pub unservable: Option<Unservable<'a>>,
    /// The fleet's first root, from a place that the sync process cannot write; `None` for the root
    /// in the sync directory.
    pub root: Option<&'a [u8]>,
    /// A number that differs after each start of the machine.
    pub boot: u64,
    /// Called between small pieces of work, so that requests can run (`maintenance::background`).
    pub yield_now: &'a dyn Fn(),
}

/// The cause for which this process cannot serve the live generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The release, which this version of the program cannot serve.
    Release,
    /// Its files on flash, which are damaged.
    Flash,
    /// The car's memory or GPU.
    Car,
}

/// Why this process cannot serve the live generation.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Unservable<'a> {
    pub id: LiveId,
    pub reason: &'a str,
    pub cause: Cause,
}
