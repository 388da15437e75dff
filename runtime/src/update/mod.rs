//! Updates: from a repository's signed releases to the live generation, and back to the previous
//! generation if a release fails its probe or its probation.
//!
//! Two processes share one directory and one status record (`state.rs`):
//! * `Updater::fetch` has the link. It writes the sync directory and nothing else.
//! * `Updater::advance` (`apply.rs`) has the flash directory. It never opens a link.
//!
//! Either process can be stopped at any moment and started again. Each step finds on disk what was
//! finished before the stop and repeats the rest.
//!
//! ```text
//! DIR/root.json timestamp.json ...  the newest verified metadata, as signed
//! DIR/root.factory root.2 ...       the root that provisioned the directory, and each later one
//! DIR/floor.a floor.b               rollback floor: the lowest versions and time to accept
//! DIR/status                        the state of the update, and its last steps
//! DIR/lock                          held for moments, while a process changes the status
//! DIR/fetching                      held during a whole fetch, waits for the link included
//! DIR/staged/HASH.manifest          a release's manifest
//! DIR/staged/HASH.hatch.part        its bundle, partly fetched
//! DIR/staged/HASH.hatch             its bundle, complete
//! DIR/staged/HASH.refused           why this release is never installed again
//! ```

pub mod apply;
pub mod error;
mod fetch;
pub mod link;
pub mod probe;
pub mod release;
pub mod rollback_floor;
mod run;
pub mod staging;
pub mod state;
pub mod trust;
mod updater;

pub use updater::Updater;
