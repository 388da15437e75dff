//! The daemon as a process: machines, updates, serving, boundaries and kills.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod boundary;
mod car;
mod kills;
mod machine;
mod maintenance;
mod serve;
mod update;
