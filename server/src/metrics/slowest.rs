//! The slowest recent requests, with where the time of each went. A new request replaces the
//! fastest one kept if it is slower. Requests older than `SLOWEST_AGE_MAX` are dropped.

use crate::limits::{SLOWEST_AGE_MAX, SLOWEST_MAX};
use crate::metrics::trace::{Protocol, Trace};
use hatchback::locks::lock;
use serde::Serialize;
use std::sync::Mutex;

/// A slow request, as it is shown.
#[derive(Clone, Debug, Serialize)]
pub struct SlowRequest {
    pub model: String,
    pub protocol: Protocol,
    /// The caller's id of the request.
    pub id: String,
    /// The caller's trace, as `traceparent` gives it.
    pub trace: String,
    pub total_us: u64,
    #[serde(flatten)]
    pub times: Trace,
}

/// The slowest recent requests.
#[derive(Debug, Default)]
pub struct Slowest(Mutex<Vec<SlowRequest>>);

impl Slowest {
    /// Keeps the request that `shown` makes if it is slow: it took `total_us`.
    pub fn note(&self, total_us: u64, shown: impl FnOnce() -> SlowRequest) {
        let mut kept = lock(&self.0);
        if kept.len() < SLOWEST_MAX {
            kept.push(shown());
        } else if let Some(fastest) = kept.iter_mut().min_by_key(|kept| kept.total_us)
            && fastest.total_us < total_us
        {
            *fastest = shown();
        }
    }

    /// Returns the requests that are kept, the slowest first. Forgets old ones.
    pub fn list(&self) -> Vec<SlowRequest> {
        let mut kept = lock(&self.0);
        kept.retain(|kept| kept.times.at.elapsed() < SLOWEST_AGE_MAX);
        kept.sort_by_key(|kept| std::cmp::Reverse(kept.total_us));
        kept.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::LookupStatus;
    use std::time::{Duration, Instant};

    fn request(total_us: u64) -> SlowRequest {
        let [decode, queue, score, encode] = [Duration::ZERO; 4];
        let (status, at) = (LookupStatus::default(), Instant::now());
        let times = Trace { decode, queue, score, encode, samples: 1, status, generation: 1, at };
        let [model, id, trace] = [const { String::new() }; 3];
        SlowRequest { model, protocol: Protocol::Grpc, id, trace, total_us, times }
    }

    #[test]
    fn the_slowest_requests_are_kept() {
        let slowest = Slowest::default();
        let times = (0..1000u64).map(|n| n * 7919 % 1000);
        times.for_each(|us| slowest.note(us, || request(us)));
        let times: Vec<u64> = slowest.list().iter().map(|kept| kept.total_us).collect();
        assert_eq!(times, (1000 - SLOWEST_MAX as u64..1000).rev().collect::<Vec<_>>());
    }
}
