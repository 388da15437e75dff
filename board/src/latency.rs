//! Latencies of the requests to each model's live generation, for its probation. The lock is held
//! only while one latency is counted.

use crate::limits::LATENCY_US_MAX;
use hatchback::bundle::manifest::Generation;
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The latencies of all models.
#[derive(Default)]
pub struct Latencies(Mutex<BTreeMap<String, (Generation, Histogram<u64>)>>);

impl Latencies {
    fn models(&self) -> MutexGuard<'_, BTreeMap<String, (Generation, Histogram<u64>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request to `model` that `generation` answered. A generation other than the last one
    /// starts a new histogram.
    pub fn record(&self, model: &str, generation: &Generation, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let mut models = self.models();
        match models.get_mut(model) {
            Some((of, latencies)) if of == generation => latencies.saturating_record(us),
            // A new generation must be judged by its own requests.
            _ => {
                // The bounds are constants that the library accepts.
                let Ok(mut latencies) = Histogram::new_with_bounds(1, LATENCY_US_MAX, 2) else {
                    return;
                };
                latencies.saturating_record(us);
                models.insert(model.to_owned(), (generation.clone(), latencies));
            }
        }
    }

    /// Returns the 99th percentile of the requests to `model` that `generation` answered, µs; 0
    /// without requests.
    pub fn p99_us(&self, model: &str, generation: &Generation) -> u64 {
        let models = self.models();
        let of = models.get(model).filter(|(of, _)| of == generation);
        of.map_or(0, |(_, latencies)| latencies.value_at_quantile(0.99))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_has_its_own() {
        let (latencies, at) =
            (Latencies::default(), |sequence| Generation { lineage: "m".to_owned(), sequence });
        (0..99).for_each(|_| latencies.record("m", &at(1), Duration::from_micros(100)));
        (0..2).for_each(|_| latencies.record("m", &at(1), Duration::from_secs(100)));
        assert!(latencies.p99_us("m", &at(1)) >= LATENCY_US_MAX - LATENCY_US_MAX / 100);
        assert_eq!((latencies.p99_us("m", &at(2)), latencies.p99_us("n", &at(1))), (0, 0));
        latencies.record("m", &at(2), Duration::from_micros(100));
        assert_eq!((latencies.p99_us("m", &at(2)), latencies.p99_us("m", &at(1))), (100, 0));
    }
}
