//! Every maximum of the daemon. Those of a model's memory and of requests stand in
//! `hatchback::limits` and in the target's `[budget]`.

use std::time::Duration;

/// Connections that are open. For one more, the connection that was silent longest is closed. If
/// every connection has a request in work, the new one receives `busy` and is closed.
pub const CONNECTIONS_MAX: usize = 256;
/// Bytes of a line that the socket accepts for any model; a model with larger samples raises it.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// Bytes after a line that is too long which are read before the connection is closed.
pub const DRAINED_BYTES_MAX: usize = 16 << 20;
/// Time for which they are read.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);
/// Latency that the histograms hold, µs; a longer one counts as this.
pub const LATENCY_US_MAX: u64 = 60_000_000;
/// Rails of one power monitor. An INA3221, the usual monitor, has three; its channels after these
/// are shunt voltages and the sum of the rails.
pub const RAILS_MAX: u32 = 3;
