//! The publisher's side of updates: signing keys, and the repository from which a fleet fetches its
//! releases. Never runs in a car.

pub mod approval;
mod clock;
pub mod keys;
pub mod prune;
pub mod publish;
pub mod releases;
mod state;
pub mod store;
mod variants;

pub use clock::{ClockError, now, timestamp};
