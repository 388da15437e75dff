//! The publisher's side of updates: signing keys, and the repository from which a fleet fetches its
//! releases. Never runs in a car.

pub mod approval;
mod clock;
pub mod content;
mod der;
mod encrypted_key;
mod key_files;
pub mod keys;
mod metadata;
mod offer;
mod passphrase;
pub mod prune;
pub mod publish;
pub mod releases;
pub(crate) mod restore;
mod state;
pub mod store;
mod token;
mod variants;

pub use clock::{ClockError, now, timestamp};
