//! A closed loop on one model: every worker sends its next batch as soon as it has the scores of
//! the last one. The loop runs in windows. Each worker draws its batches before a window's clock
//! starts and sends no batch twice in one window. Never draws inside a window.
//! Also one caller that makes the calls it is given, and what callers saw.

use anyhow::{Result, anyhow};
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::request::worker::{Counters, Worker};
use hatchback::schema::batch::Batch;
use hatchback_tools::report::metrics::{Latencies, Lookups, Percentiles};
use hatchback_tools::serve;
use hatchback_tools::workload::key_distributions::{ALPHA, BagSizes, Distribution, Workload};
use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// Samples that one worker draws for a window.
const WINDOW_SAMPLES: usize = 16 << 10;
/// Windows in each of the two means of the hit rate that decide whether it is steady.
const STEADY_WINDOWS: usize = 4;
/// How long a caller waits after `Busy`.
const BUSY_PAUSE: Duration = Duration::from_micros(200);
/// A hit rate is steady if the two means differ by less than this.
const STEADY_CHANGE: f64 = 0.002;

/// The sums over some windows.
#[derive(Default)]
pub struct LoadTotals {
    /// Sum of the windows' times; a window lasts as long as its slowest worker.
    pub time: Duration,
    /// Samples scored.
    pub samples: u64,
    /// Latency of every request.
    pub latencies: Latencies,
    /// Sum of the workers' counters.
    pub counters: Counters,
    /// Statuses of the rows.
    pub lookups: Lookups,
}

impl LoadTotals {
    /// Adds a window that ran later.
    fn add_later(&mut self, other: &Self) {
        let time = self.time + other.time;
        self.add_concurrent(other);
        self.time = time;
    }

    /// Adds a worker that ran at the same time.
    fn add_concurrent(&mut self, other: &Self) {
        self.time = self.time.max(other.time);
        self.samples += other.samples;
        self.latencies.add(&other.latencies);
        self.counters.add(&other.counters);
        self.lookups.add(&other.lookups);
    }
}

/// What callers saw over some time.
#[derive(Default)]
pub struct CallTotals {
    pub time: Duration,
    /// Latency of every request that was answered.
    pub latencies: Latencies,
    /// Requests refused as busy.
    pub busy: u64,
    /// Requests refused or failed for another reason.
    pub errors: u64,
}

impl CallTotals {
    /// Adds what callers saw later.
    pub fn add_later(&mut self, later: &Self) {
        let time = self.time + later.time;
        self.add_concurrent(later);
        self.time = time;
    }

    /// Adds a caller of the same time.
    pub fn add_concurrent(&mut self, other: &Self) {
        self.time = self.time.max(other.time);
        self.latencies.add(&other.latencies);
        self.busy += other.busy;
        self.errors += other.errors;
    }

    /// Returns the median latency, µs; NaN without an answer.
    pub fn p50_us(&self) -> f64 {
        let Percentiles { requests, p50_us, .. } = self.latencies.percentiles();
        if requests > 0 { p50_us } else { f64::NAN }
    }
}

/// Returns a server of models in the memory of `budget`.
pub fn serving(budget: &Budget) -> Serving {
    let clock = Arc::new(SystemClock::default());
    Serving::new(budget.memory_bytes_max, budget.reads_max, clock)
}

/// Returns the load that a bench draws if the user names none: the default power law, full bags.
///
/// # Errors
/// A segment of `flash` cannot be read.
pub fn skewed_load(flash: &Flash, seed: u64) -> Result<Workload> {
    Workload::new(flash, &Distribution::PowerLaw { alpha: ALPHA }, BagSizes::Full, seed)
}

/// Makes the calls of `requests` in turn, as one caller, until `time` has passed. Waits after each
/// `Busy`.
///
/// # Errors
/// Those of `call` but `Busy`.
pub fn call_for<T>(
    requests: &[T],
    time: Duration,
    mut call: impl FnMut(&T) -> Result<()>,
) -> Result<CallTotals> {
    let (mut totals, start) = (CallTotals::default(), Instant::now());
    for request in requests.iter().cycle() {
        let sent = Instant::now();
        match call(request) {
            Ok(()) => totals.latencies.record(sent.elapsed()),
            Err(e) if matches!(e.downcast_ref(), Some(RequestError::Busy(_))) => {
                totals.busy += 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(e) => return Err(e),
        }
        totals.time = start.elapsed();
        if totals.time >= time {
            break;
        }
    }
    Ok(totals)
}

/// One worker and the batches of its next window.
struct LoadWorker {
    worker: Worker,
    workload: Workload,
    batches: Vec<Batch>,
}

impl LoadWorker {
    /// Draws the batches of a window, each of `batch` samples.
    fn draw(&mut self, batch: usize) -> Result<()> {
        let count = WINDOW_SAMPLES.div_ceil(batch);
        if self.batches.len() != count || self.batches.first().is_some_and(|b| b.size() != batch) {
            self.batches =
                (0..count).map(|_| Batch::new(self.worker.model().schema(), batch)).collect();
        }

        self.batches.iter_mut().try_for_each(|b| self.workload.fill(b, batch))
    }

    /// Sends the batches until the worker has sent all of them or `limit` has passed.
    fn send(&mut self, limit: Duration) -> Result<LoadTotals> {
        let mut totals = LoadTotals::default();
        let (before, start) = (self.worker.counters(), Instant::now());

        for batch in &self.batches {
            let sent = Instant::now();
            let scores = self.worker.score(batch, None)?;
            totals.latencies.record(sent.elapsed());
            totals.lookups.count(scores.statuses);
            totals.samples += batch.size() as u64;
            self.worker.fetch_deferred(usize::MAX);
            totals.time = start.elapsed();
            if totals.time >= limit {
                break;
            }
        }

        totals.counters = self.worker.counters().since(&before);
        Ok(totals)
    }
}

/// Workers that each send requests in a closed loop.
pub struct ClosedLoop {
    workers: Vec<LoadWorker>,
    window: Duration,
}

impl ClosedLoop {
    /// Starts `threads` workers on `model`. Each draws from `workload` with a seed of its own, and
    /// a window lasts at most `window`.
    pub fn new(model: &Arc<Model>, workload: &Workload, threads: usize, window: Duration) -> Self {
        let worker = |seed: usize| LoadWorker {
            worker: serve::worker(model),
            workload: workload.with_seed(seed as u64),
            batches: Vec::new(),
        };
        Self { workers: (1..=threads).map(worker).collect(), window }
    }

    /// Runs one window of batches of `batch` samples.
    ///
    /// # Errors
    /// The model refuses a batch, or its dense network fails.
    pub fn window(&mut self, batch: usize) -> Result<LoadTotals> {
        let (limit, start) = (self.window, Barrier::new(self.workers.len()));
        all_at_once(&mut self.workers, |worker| worker.draw(batch))?;

        let found = all_at_once(&mut self.workers, |worker| {
            start.wait();
            worker.send(limit)
        })?;

        let mut sum = LoadTotals::default();
        found.iter().for_each(|one| sum.add_concurrent(one));
        Ok(sum)
    }

    /// Runs windows until they add up to `time`.
    ///
    /// # Errors
    /// Those of [`ClosedLoop::window`].
    pub fn measure(&mut self, batch: usize, time: Duration) -> Result<LoadTotals> {
        let mut sum = LoadTotals::default();
        while sum.time < time {
            sum.add_later(&self.window(batch)?);
        }
        Ok(sum)
    }

    /// Runs at most `windows_max` windows until the hit rate is steady. Returns whether it is
    /// steady.
    ///
    /// # Errors
    /// Those of [`ClosedLoop::window`].
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
}

/// Does `work` for all `callers` at the same time, each on a thread of its own. Returns the results
/// in the order of `callers`.
///
/// # Errors
/// A thread panicked, and the errors of `work`.
pub fn all_at_once<C: Send, T: Send>(
    callers: impl IntoIterator<Item = C>,
    work: impl Fn(C) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    thread::scope(|scope| {
        let start = |caller| scope.spawn(move || work(caller));
        let started: Vec<_> = callers.into_iter().map(start).collect();
        started.into_iter().map(|t| t.join().map_err(|_| anyhow!("a caller panicked"))?).collect()
    })
}

/// Returns whether the later half of `rates` has the same mean as the earlier half.
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
        let one = |ms, samples| LoadTotals {
            time: Duration::from_millis(ms),
            samples,
            ..LoadTotals::default()
        };
        let mut concurrent = one(10, 4);
        concurrent.add_concurrent(&one(20, 5));
        assert_eq!((concurrent.time, concurrent.samples), (Duration::from_millis(20), 9));
        concurrent.add_later(&one(20, 1));
        assert_eq!((concurrent.time, concurrent.samples), (Duration::from_millis(40), 10));
    }
}
