//! The slowest recent requests, with where the time of each went. A new request replaces the
//! fastest one kept if it is slower. Requests older than `SLOWEST_AGE_MAX` are dropped.

use crate::limits::{SLOWEST_AGE_MAX, SLOWEST_MAX};
use crate::metrics::trace::{Names, Trace};
use hatchback::{LookupStatus, Shortened};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A slow request, as it is shown.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SlowRequest {
    pub model: String,
    pub generation: u64,
    pub protocol: &'static str,
    /// The caller's id of the request.
    pub id: String,
    /// The caller's trace, as `traceparent` gives it.
    pub trace: String,
    pub samples: usize,
    pub total_us: u64,
    pub decode_us: u64,
    pub queue_us: u64,
    pub score_us: u64,
    pub encode_us: u64,
    pub fresh: u32,
    pub defaulted: u32,
    pub absent: u32,
    pub damaged: u32,
    pub late: bool,
    /// Seconds since the request, when it is shown.
    pub age_s: u64,
    #[serde(skip)]
    at: Option<Instant>,
}

/// The slowest recent requests.
#[derive(Debug, Default)]
pub struct Slowest {
    kept: Mutex<Vec<SlowRequest>>,
    /// Time of the fastest request that is kept, µs; 0 while there is room.
    threshold_us: AtomicU64,
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Slowest {
    fn kept(&self) -> MutexGuard<'_, Vec<SlowRequest>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the request of `trace` if it is slow.
    pub fn note(&self, trace: &Trace, names: &Names<'_>) {
        let total_us = us(trace.total);
        if total_us <= self.threshold_us.load(Ordering::Relaxed) {
            return;
        }
        let LookupStatus { fresh, defaulted, absent, damaged, late } = trace.status;
        self.keep(SlowRequest {
            model: names.model.to_owned(),
            generation: trace.generation,
            protocol: names.protocol.name(),
            id: Shortened(names.id).to_string(),
            trace: Shortened(names.trace).to_string(),
            samples: trace.samples,
            total_us,
            decode_us: us(trace.decode),
            queue_us: us(trace.queue),
            score_us: us(trace.score),
            encode_us: us(trace.encode),
            fresh,
            defaulted,
            absent,
            damaged,
            late,
            age_s: 0,
            at: Some(trace.at),
        });
    }

    fn keep(&self, request: SlowRequest) {
        let mut kept = self.kept();
        if kept.len() < SLOWEST_MAX {
            kept.push(request);
        } else if let Some(fastest) = kept.iter_mut().min_by_key(|kept| kept.total_us)
            // Checked again under the lock: the threshold may have risen since `note` read it.
            && fastest.total_us < request.total_us
        {
            *fastest = request;
        }
        self.set_threshold(&kept);
    }

    fn set_threshold(&self, kept: &[SlowRequest]) {
        let fastest = kept.iter().map(|kept| kept.total_us).min().unwrap_or(0);
        let threshold = if kept.len() < SLOWEST_MAX { 0 } else { fastest };
        self.threshold_us.store(threshold, Ordering::Relaxed);
    }

    /// Returns the requests that are kept, the slowest first. Forgets old ones.
    pub fn list(&self) -> Vec<SlowRequest> {
        let mut kept = self.kept();
        let age = |kept: &SlowRequest| kept.at.map_or(Duration::MAX, |at| at.elapsed());
        kept.retain(|kept| age(kept) < SLOWEST_AGE_MAX);
        kept.iter_mut().for_each(|kept| kept.age_s = age(kept).as_secs());
        kept.sort_by_key(|kept| std::cmp::Reverse(kept.total_us));
        self.set_threshold(&kept);
        kept.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(total_us: u64) -> SlowRequest {
        SlowRequest { total_us, at: Some(Instant::now()), ..SlowRequest::default() }
    }

    #[test]
    fn the_slowest_requests_are_kept() {
        let slowest = Slowest::default();
        (0..1000u64).for_each(|n| slowest.keep(request(n * 7919 % 1000)));
        let times: Vec<u64> = slowest.list().iter().map(|kept| kept.total_us).collect();
        let expected: Vec<u64> = (1000 - SLOWEST_MAX as u64..1000).rev().collect();
        assert_eq!(times, expected);
        assert_eq!(slowest.threshold_us.load(Ordering::Relaxed), expected[SLOWEST_MAX - 1]);
    }
}
