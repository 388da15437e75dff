//! Updates: publish, sync, install, probation, and the whole car from one seed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod car_faults;
mod changes;
mod changing;
mod lockout;
mod needs;
mod prune;
mod publish;
mod restore;
mod rollout;
mod simulation;
mod staged_network;
mod sync;
mod sync_content;
mod sync_link;
mod sync_publisher;
mod sync_tls;
mod update;
mod writers;
