//! A closed loop on one model: every worker sends its next batch when it has the scores of the
//! last. Batches are drawn before a window's clock starts and none is sent twice in a window; never
//! draws inside it.

use crate::report::metrics::{Latencies, Lookups};
use crate::serve;
use crate::workload::key_distributions::Workload;
use anyhow::{Result, anyhow};
use hatchback::model::Model;
use hatchback::request::worker::{Counters, Worker};
use hatchback::schema::batch::Batch;
use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// Samples that one worker is given for a window.
const WINDOW_SAMPLES: usize = 16 << 10;
/// Windows whose mean hit rate is compared with that of as many before.
const STEADY_WINDOWS: usize = 4;
/// The two means of a steady hit rate are closer than this.
const STEADY_CHANGE: f64 = 0.002;

/// What some windows found.
#[derive(Default)]
pub struct Measured {
    /// Time in windows: of each the slowest worker's.
    pub time: Duration,
    /// Samples scored.
    pub samples: u64,
    /// Latency of every request.
    pub latencies: Latencies,
    /// What the workers counted.
    pub counters: Counters,
    /// What the rows were.
    pub lookups: Lookups,
}

impl Measured {
    /// Adds what ran after this.
    fn then(&mut self, other: &Self) {
        let time = self.time + other.time;
        self.beside(other);
        self.time = time;
    }

    /// Adds what ran at the same time.
    fn beside(&mut self, other: &Self) {
        self.time = self.time.max(other.time);
        self.samples += other.samples;
        self.latencies.add(&other.latencies);
        self.counters.add(&other.counters);
        self.lookups.add(&other.lookups);
    }
}

/// One worker and the batches it will send.
struct Lane {
    worker: Worker,
    workload: Workload,
    ring: Vec<Batch>,
}

impl Lane {
    /// Draws a window's batches of `batch` samples.
    fn draw(&mut self, batch: usize) -> Result<()> {
        let count = WINDOW_SAMPLES.div_ceil(batch);
        if self.ring.len() != count || self.ring.first().is_some_and(|b| b.size() != batch) {
            self.ring =
                (0..count).map(|_| Batch::new(self.worker.model().schema(), batch)).collect();
        }
        self.ring.iter_mut().try_for_each(|b| self.workload.fill(b, batch))
    }

    /// Sends the batches, until all are sent or `limit` has passed.
    fn send(&mut self, limit: Duration) -> Result<Measured> {
        let (mut found, before, start) =
            (Measured::default(), self.worker.counters(), Instant::now());
        for batch in &self.ring {
            let sent = Instant::now();
            let scores = self.worker.score(batch, None)?;
            found.latencies.record(sent.elapsed());
            found.lookups.count(scores.statuses);
            found.samples += batch.size() as u64;
            self.worker.fetch_behind(usize::MAX);
            found.time = start.elapsed();
            if found.time >= limit {
                break;
            }
        }
        found.counters = self.worker.counters().since(&before);
        Ok(found)
    }
}

/// Workers under load.
pub struct Load {
    lanes: Vec<Lane>,
    window: Duration,
}

impl Load {
    /// `threads` workers on `model`, each with its own draws of `workload`, in windows of at most
    /// `window`.
    pub fn new(model: &Arc<Model>, workload: &Workload, threads: usize, window: Duration) -> Self {
        let lane = |seed: usize| Lane {
            worker: serve::worker(model),
            workload: workload.with_seed(seed as u64),
            ring: Vec::new(),
        };
        Self { lanes: (1..=threads).map(lane).collect(), window }
    }

    /// One window of batches of `batch` samples.
    ///
    /// # Errors
    /// The model refuses the batches, or its dense network failed.
    pub fn window(&mut self, batch: usize) -> Result<Measured> {
        let (limit, start) = (self.window, Barrier::new(self.lanes.len()));
        self.each_lane(|lane| lane.draw(batch))?;
        let found = self.each_lane(|lane| {
            start.wait();
            lane.send(limit)
        })?;
        let mut sum = Measured::default();
        found.iter().for_each(|one| sum.beside(one));
        Ok(sum)
    }

    /// Windows that add up to `time`.
    ///
    /// # Errors
    /// As `window`.
    pub fn measure(&mut self, batch: usize, time: Duration) -> Result<Measured> {
        let mut sum = Measured::default();
        while sum.time < time {
            sum.then(&self.window(batch)?);
        }
        Ok(sum)
    }

    /// Windows until the hit rate is steady, `windows_max` at most. Returns whether it is.
    ///
    /// # Errors
    /// As `window`.
    pub fn warm_up(&mut self, batch: usize, windows_max: usize) -> Result<bool> {
        let mut rates = VecDeque::new();
        for _ in 0..windows_max {
            rates.push_back(self.window(batch)?.counters.hit_rate());
            if rates.len() > 2 * STEADY_WINDOWS {
                rates.pop_front();
            }
            if is_steady(rates.make_contiguous()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Does `work` on all lanes at once, each on a thread of its own.
    fn each_lane<T: Send>(
        &mut self,
        work: impl Fn(&mut Lane) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let work = &work;
        thread::scope(|scope| {
            let started: Vec<_> =
                self.lanes.iter_mut().map(|lane| scope.spawn(move || work(lane))).collect();
            started
                .into_iter()
                .map(|t| t.join().map_err(|_| anyhow!("a worker panicked"))?)
                .collect()
        })
    }
}

/// Whether the later half of these hit rates has the mean of the earlier.
fn is_steady(rates: &[f64]) -> bool {
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (earlier, later) = rates.split_at(rates.len() / 2);
    rates.len() == 2 * STEADY_WINDOWS && (mean(later) - mean(earlier)).abs() < STEADY_CHANGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rising_hit_rate_is_not_steady() {
        let ramp = |step: f64| -> Vec<f64> { (0..8).map(|i| 0.5 + step * f64::from(i)).collect() };
        assert!(!is_steady(&ramp(0.001)) && is_steady(&ramp(0.0004)) && is_steady(&ramp(0.0)));
        assert!(!is_steady(&[0.5; 7]));
    }

    #[test]
    fn windows_add_up() {
        let one = |ms, samples| Measured {
            time: Duration::from_millis(ms),
            samples,
            ..Measured::default()
        };
        let mut beside = one(10, 4);
        beside.beside(&one(20, 5));
        assert_eq!((beside.time, beside.samples), (Duration::from_millis(20), 9));
        beside.then(&one(20, 1));
        assert_eq!((beside.time, beside.samples), (Duration::from_millis(40), 10));
    }
}
