//! The classes of faults, each a switch, and the knobs of one simulation. Never injects anything.

use crate::random::Random;
use std::collections::BTreeSet;
use std::time::Duration;

/// A class of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// One process is killed, immediately or after some calls of its disk.
    Kill,
    /// A process ends normally and starts again.
    Exit,
    /// A process takes no step for a while.
    Stop,
    /// The power is cut: both processes end, unsynced writes are lost, kept or torn.
    Power,
    /// A process's clock shows 1970 or 2090 for a while.
    Clock,
    /// The link breaks off, sends errors, garbage, too little, too much or another object.
    Link,
    /// One call that changes the disk fails.
    WriteError,
    /// One read of the disk fails.
    ReadError,
    /// A directory is full for a while.
    Full,
    /// A directory is read-only for a while.
    ReadOnly,
    /// Every call of the disk takes long.
    Slow,
    /// A file of the flash directory is damaged.
    FlashDamage,
    /// A file of the flash directory is lost.
    FlashLoss,
    /// A file of the sync directory is damaged or lost.
    SyncDamage,
    /// The repository loses an object for good. Those that a car needs come back in the end.
    LostObject,
    /// A taken-over sync process writes what it likes into the sync directory for a while.
    Hostile,
    /// Another version of both programs is installed.
    Version,
    /// Callers leave before their answer, or hold answers for as long as they can, for a while.
    Callers,
}

impl Fault {
    /// Every class.
    pub const ALL: [Self; 18] = [
        Self::Kill,
        Self::Exit,
        Self::Stop,
        Self::Power,
        Self::Clock,
        Self::Link,
        Self::WriteError,
        Self::ReadError,
        Self::Full,
        Self::ReadOnly,
        Self::Slow,
        Self::FlashDamage,
        Self::FlashLoss,
        Self::SyncDamage,
        Self::LostObject,
        Self::Hostile,
        Self::Version,
        Self::Callers,
    ];

    /// Returns the class's name on the command line.
    pub fn name(self) -> String {
        let mut name = String::new();
        for letter in format!("{self:?}").chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }

    /// Returns the class with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// The parameters (knobs) of one simulation.
#[derive(Clone, Debug)]
pub struct Knobs {
    /// The classes of faults that may occur.
    pub faults: BTreeSet<Fault>,
    /// The number of the history; `None` for a random one.
    pub history: Option<usize>,
    /// Rounds with faults. Each is a step of one actor, with the steps that run inside it.
    pub rounds: u64,
    /// Another actor runs inside a step at one in so many calls; 0 for never.
    pub preempt_one_in: u64,
    /// A fault comes before one in so many steps.
    pub fault_one_in: u64,
    /// Longest time between two steps.
    pub tick_max: Duration,
    /// Per cent of changed rows at which maintenance merges a table.
    pub changed_percent_max: u64,
    /// Requests on probation.
    pub requests_min: u64,
    /// Bytes a day that maintenance may write.
    pub wear_bytes: u64,
    /// Whether the publisher withholds the last release until the faults end.
    pub holds_last_back: bool,
}

impl Knobs {
    /// Draws the knobs of a seed from `allowed` faults: each seed has a few of the classes.
    pub fn draw(random: &mut Random, allowed: &BTreeSet<Fault>) -> Self {
        let share = 1 + random.below(4);
        let chosen = |random: &mut Random| random.below(4) < share;
        let faults: BTreeSet<Fault> = allowed.iter().copied().filter(|_| chosen(random)).collect();
        let is_damaged = faults.contains(&Fault::FlashDamage) || faults.contains(&Fault::FlashLoss);
        Self {
            faults,
            history: None,
            rounds: 100 + random.below(400),
            preempt_one_in: *random.pick(&[0, 6, 20, 60, 200]),
            fault_one_in: *random.pick(&[4, 10, 30, 80]),
            tick_max: Duration::from_secs(*random.pick(&[60, 600, 3_600, 10_800])),
            changed_percent_max: *random.pick(&[0, 5, 16, 30]),
            requests_min: *random.pick(&[0, 3, 10, 30]),
            wear_bytes: *random.pick(&[96 << 10, 1 << 20, 64 << 30]),
            holds_last_back: is_damaged || random.one_in(2),
        }
    }
}
