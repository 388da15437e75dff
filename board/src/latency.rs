//! Slow requests to each model's live generation, for its probation. The lock is held only while
//! one request is counted.

use hatchback::bundle::manifest::Generation;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The requests to all models that took longer than a limit.
pub struct Latencies {
    limit: Option<Duration>,
    slow: Mutex<BTreeMap<String, (Generation, u64)>>,
}

impl Latencies {
    /// Returns counts of the requests that take longer than `limit_us` µs; 0 for no limit.
    pub fn new(limit_us: u64) -> Self {
        let limit = (limit_us > 0).then(|| Duration::from_micros(limit_us));
        Self { limit, slow: Mutex::default() }
    }

    fn slow_requests(&self) -> MutexGuard<'_, BTreeMap<String, (Generation, u64)>> {
        self.slow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request to `model` that `generation` answered in `time`. A generation other than the
    /// last one starts a new count.
    pub fn record(&self, model: &str, generation: &Generation, time: Duration) {
        if self.limit.is_none_or(|limit| time <= limit) {
            return;
        }
        let mut models = self.slow_requests();
        match models.get_mut(model) {
            Some((of, slow)) if of == generation => *slow += 1,
            // A new generation must be judged by its own requests.
            _ => _ = models.insert(model.to_owned(), (generation.clone(), 1)),
        }
    }

    /// Returns the number of slow requests to `model` that `generation` answered.
    pub fn slow(&self, model: &str, generation: &Generation) -> u64 {
        let models = self.slow_requests();
        models.get(model).filter(|(of, _)| of == generation).map_or(0, |(_, slow)| *slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_has_its_own() {
        let at = |sequence| Generation { lineage: "m".to_owned(), sequence };
        for (limit, expected) in [(0, 0), (100, 2), (200_000, 0)] {
            let latencies = Latencies::new(limit);
            (0..99).for_each(|_| latencies.record("m", &at(1), Duration::from_micros(100)));
            (0..2).for_each(|_| latencies.record("m", &at(1), Duration::from_micros(101)));
            assert_eq!(latencies.slow("m", &at(1)), expected, "limit {limit}");
            assert_eq!((latencies.slow("m", &at(2)), latencies.slow("n", &at(1))), (0, 0));
        }

        let latencies = Latencies::new(100);
        (1..=2).for_each(|sequence| latencies.record("m", &at(sequence), Duration::from_secs(1)));
        assert_eq!((latencies.slow("m", &at(2)), latencies.slow("m", &at(1))), (1, 0));
    }
}
