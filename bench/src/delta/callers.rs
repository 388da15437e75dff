//! The callers of `bench delta`: they send requests while an update runs or while nothing else
//! does. Never measures an update.

use crate::load::skewed_load;
use anyhow::{Result, anyhow};
use hatchback::flash::Flash;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Served;
use hatchback::schema::batch::Batch;
use hatchback_tools::report::metrics::Latencies;
use hatchback_tools::workload::key_distributions::Workload;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The step of an update in which a request started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The bundle is checked and written to flash.
    Write,
    /// The files become live, and the new generation is opened.
    Open,
    /// The new generation answers. Its changed rows return to the caches.
    ReadAgain,
}

/// The step of the update that runs, for callers on other threads.
#[derive(Default)]
pub struct CurrentStep(AtomicBool);

impl CurrentStep {
    /// Enters `Write` or `Open`.
    pub fn enter(&self, step: Step) {
        self.0.store(step == Step::Open, Ordering::Relaxed);
    }

    fn get(&self, has_changed: bool) -> Step {
        match self.0.load(Ordering::Relaxed) {
            _ if has_changed => Step::ReadAgain,
            true => Step::Open,
            false => Step::Write,
        }
    }
}

/// A caller that sends one request after another to a model.
pub struct PacedCaller {
    served: Arc<Served>,
    workload: Workload,
    batch: Batch,
    samples: usize,
    /// Time from the start of a request to that of the next. Zero means no pause.
    pub interval: Duration,
}

impl PacedCaller {
    /// Returns `count` callers of the model on `flash`, which send requests of `samples` samples
    /// without pauses.
    ///
    /// # Errors
    /// The model has no keys to draw.
    pub fn several(
        served: &Arc<Served>,
        flash: &Flash,
        count: u32,
        samples: usize,
    ) -> Result<Vec<Self>> {
        let workload = skewed_load(flash, 0)?;
        let caller = |seed| Self {
            served: Arc::clone(served),
            workload: workload.with_seed(seed),
            batch: Batch::new(&flash.manifest().schema, samples),
            samples,
            interval: Duration::ZERO,
        };
        Ok((0..u64::from(count)).map(caller).collect())
    }

    /// Sends requests until `stop` is set. Returns their latencies, and when the last answer was of
    /// another generation than the one before. A request that starts late, because the one before
    /// took long, counts from the time at which it should have started.
    fn send_until(&mut self, until: &Until<'_>) -> Result<Sent> {
        let (mut sent, mut due) = (Sent::default(), Instant::now());
        let mut generation = None;
        while !until.stop.load(Ordering::Acquire) {
            self.workload.fill(&mut self.batch, self.samples)?;
            if self.interval.is_zero() {
                due = Instant::now();
            } else {
                due += self.interval;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            let step = until.step.get(sent.changed.is_some());
            match self.served.submit(&self.batch, None) {
                Ok(ticket) => {
                    let sequence = Some(ticket.wait()?.generation().sequence);
                    if generation.is_some() && generation != sequence {
                        sent.changed = Some(Instant::now());
                    }
                    generation = sequence;
                }
                Err(RequestError::Busy(_)) => thread::yield_now(),
                Err(e) => return Err(e.into()),
            }
            sent.record(step, due.elapsed());
        }
        Ok(sent)
    }
}

/// Until when callers send.
#[derive(Clone, Copy)]
struct Until<'a> {
    step: &'a CurrentStep,
    stop: &'a AtomicBool,
}

/// What callers sent in one window or in several.
#[derive(Default)]
pub struct Sent {
    pub latencies: Latencies,
    /// The requests of each [`Step`].
    pub steps: [Latencies; 3],
    /// The first answer of another generation than the one before.
    pub changed: Option<Instant>,
}

impl Sent {
    fn record(&mut self, step: Step, time: Duration) {
        self.latencies.record(time);
        self.steps[step as usize].record(time);
    }

    /// Adds what others sent.
    pub fn add(&mut self, other: &Self) {
        self.latencies.add(&other.latencies);
        self.steps.iter_mut().zip(&other.steps).for_each(|(all, one)| all.add(one));
        self.changed = [self.changed, other.changed].into_iter().flatten().min();
    }
}

/// Lets all `callers` send requests while `work` runs on another thread. Returns what they sent and
/// the result of `work`.
///
/// # Errors
/// A request fails, and the errors of `work`.
pub fn send_during<T: Send>(
    callers: &mut [PacedCaller],
    work: impl FnOnce(&CurrentStep) -> Result<T> + Send,
) -> Result<(Sent, T)> {
    let (stop, step) = (AtomicBool::new(false), CurrentStep::default());
    let until = Until { step: &step, stop: &stop };
    thread::scope(|scope| {
        let send = |caller| scope.spawn(move || PacedCaller::send_until(caller, &until));
        let senders: Vec<_> = callers.iter_mut().map(send).collect();
        let worked = scope.spawn(|| work(&step)).join();
        // Also after a panic: the callers send until `stop`.
        stop.store(true, Ordering::Release);

        let mut sent = Sent::default();
        for sender in senders {
            sent.add(&sender.join().map_err(|_| anyhow!("a caller panicked"))??);
        }
        Ok((sent, worked.map_err(|_| anyhow!("the update panicked"))??))
    })
}
