//! Every maximum of the daemon. `hatchback::limits` and the target's `[budget]` have those of a
//! model's memory and of requests.

/// Rails of one power monitor. An INA3221, the usual monitor, has three; its channels after these
/// are shunt voltages and the sum of the rails.
pub const RAILS_MAX: u32 = 3;
