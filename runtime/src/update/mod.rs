//! Updates: a signed release of a repository becomes the live generation. If the release fails its
//! probe or its probation, the previous generation is restored.
//!
//! Two processes share an update, and each writes one directory only:
//! * `Updater::fetch` (`hatchback-sync`) has the link. It writes the sync directory.
//! * `Updater::advance` (`advance.rs`, `hatchbackd`) has no link. It writes the flash directory. It
//!   trusts nothing in the sync directory that a signature does not cover.
//!
//! Either process can be stopped at any moment and started again. Each step reads from disk which
//! work was finished before the stop, and repeats the rest.
//!
//! ```text
//! SYNC/root.json timestamp.json ...  the newest verified metadata, as signed
//! SYNC/root.factory root.2 ...       the root that provisioned the directory, and each later one
//! SYNC/floor.a floor.b               rollback floor: the lowest versions and time to accept
//! SYNC/status.a status.b             what the sync process does and offers
//! SYNC/fetching                      held during a whole fetch, waits for the link included
//! SYNC/staged/HASH.manifest          a release's manifest
//! SYNC/staged/HASH.hatch.part        its bundle, partly fetched
//! SYNC/staged/HASH.hatch             its bundle, complete
//! FLASH/update.a update.b            what the serving process does, and what it rejected
//! FLASH/trust.a trust.b              the newest root and targets version that it accepted
//! FLASH/updating                     held during a step of the serving process
//! ```

pub mod accepted;
mod advance;
mod apply;
pub mod error;
mod fetch;
pub mod fetch_status;
pub mod history;
pub mod host;
pub mod install_status;
pub mod link;
mod on_flash;
mod probation;
pub mod probe;
pub mod program;
pub mod release;
pub mod rollback_floor;
mod run;
mod staged_network;
pub mod staging;
pub mod status;
mod trials;
pub mod trust;
mod updater;
mod verdict;

pub use updater::Updater;
