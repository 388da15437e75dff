//! Every maximum of the daemon. `hatchback::limits` and the target's `[budget]` have those of a
//! model's memory and of requests.

/// The longest latency that the histograms distinguish, µs; a longer one counts as this.
pub const LATENCY_US_MAX: u64 = 60_000_000;
/// Rails of one power monitor. An INA3221, the usual monitor, has three; its channels after these
/// are shunt voltages and the sum of the rails.
pub const RAILS_MAX: u32 = 3;
