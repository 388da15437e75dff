//! How much `bench flash` measures, and the statistics that all of its parts use.

use std::time::Duration;

/// The sizes of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct FlashPlan {
    /// Keys in a batch.
    pub batch: usize,
    /// Batches whose median is a rate.
    pub rounds: usize,
    /// Reads of one key.
    pub point_reads: usize,
    /// Reads of a request's misses, once idle and once during a compaction.
    pub requests: usize,
}

/// The full measurement.
pub const FULL: FlashPlan =
    FlashPlan { batch: 1024, rounds: 24, point_reads: 4000, requests: 2000 };
/// The measurement of `--quick`.
pub const QUICK: FlashPlan =
    FlashPlan { batch: 1024, rounds: 16, point_reads: 1000, requests: 1000 };

/// Misses of one request: 26 tables and 64 candidates, of which 9.3 % miss.
pub const MISSES: usize = 155;

/// Returns the median, or 0 without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Returns the rate of `n` events in `time`.
pub fn per_second(n: u64, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_rates() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![])), (2.0, 0.0));
        assert_eq!(per_second(10, Duration::from_millis(500)), 20.0);
    }
}
