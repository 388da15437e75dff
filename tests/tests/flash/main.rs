//! The flash tier: maintenance, power cuts, kills, and every damage of every file.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod catalog;
mod damage;
mod kill;
mod maintenance;
mod maintenance_faults;
mod power_cuts;
mod wide_rows;
