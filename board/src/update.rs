//! The update thread of one model: calls `hatchback::car::update_steps` until it is stopped, and
//! pauses between pieces of work as the policy demands.

use crate::latency::Latencies;
use anyhow::Result;
use hatchback::bundle::manifest::Generation;
use hatchback::car::update_steps::{ModelUpdates, UpdateSteps};
use hatchback::maintenance::background::Background;
use hatchback::request::serving::Serving;
use hatchback_link::daemon::now;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval at which the thread looks for an offer (a staged release) of the sync process.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Longest time for which the end of the process waits for a step of the update.
const STOP_WAIT: Duration = Duration::from_secs(60);

/// Interval at which the thread looks for the first answers of a release on probation.
const ANSWER_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until the next look. Returns false if the thread must stop.
fn wait_for_next_look(
    stopped: &Receiver<()>,
    steps: &mut UpdateSteps,
    background: &Background,
) -> bool {
    let start = Instant::now();
    loop {
        let left = POLL_INTERVAL.saturating_sub(start.elapsed());
        background.hold_ordinary(steps.awaits_first_answer());
        let wait = if steps.awaits_first_answer() { left.min(ANSWER_INTERVAL) } else { left };
        if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return false;
        }
        if left <= wait {
            return true;
        }
        steps.look_for_answers();
    }
}

/// The thread of one model's updates.
pub struct UpdateThread {
    /// Asks the thread to stop, even in the middle of a step that pauses.
    stopping: Arc<AtomicBool>,
    /// Dropping it ends the thread's wait for the next look.
    stop: Sender<()>,
    /// Receives a message when the thread has recorded its end.
    has_ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl UpdateThread {
    /// Starts the thread for `update`; it loads and swaps generations in `serving`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        update: ModelUpdates,
        serving: &Arc<Serving>,
        latencies: &Arc<Latencies>,
    ) -> Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (is_stopping, latencies) = (Arc::clone(&stopping), Arc::clone(latencies));
        let (served, busy) = (Arc::clone(serving), update.policy.busy());
        let slow = Box::new(move |name: &str, of: &Generation| latencies.slow(name, of));
        let mut steps = UpdateSteps::new(update, Arc::clone(serving), slow);

        let (stop, stopped) = channel::<()>();
        let (ended, has_ended) = channel::<()>();
        let run = move || {
            let background = Background::enter(busy);
            // The pauses give the CPU to requests; without a served model there are none.
            let pause = |time| {
                if !is_stopping.load(Ordering::Acquire) && !served.names().is_empty() {
                    std::thread::sleep(time);
                }
            };
            loop {
                background.resume();
                // A process that ends between its first answer and the record of it counts as a
                // crash, so the record must not wait until the machine is idle.
                background.hold_ordinary(steps.awaits_first_answer());
                let yield_now = |urgency| background.yield_now(urgency, pause);
                // A panic over the content of a release must not end updates for good. It counts as
                // a failed step, and in an install as a crash.
                let mut step = || {
                    let stepped = catch_unwind(AssertUnwindSafe(|| steps.step(now(), &yield_now)));
                    stepped.unwrap_or_else(|_| {
                        steps.record_panic(now());
                        false
                    })
                };
                while !is_stopping.load(Ordering::Acquire) && step() {}
                if !wait_for_next_look(&stopped, &mut steps, &background) {
                    break;
                }
            }
            // Otherwise the end of this process would count as a crash of a release on trial.
            steps.record_end();
            let _ = ended.send(());
        };
        let thread = std::thread::Builder::new().name("update".to_owned()).spawn(run)?;
        Ok(Self { stopping, stop, has_ended, thread })
    }

    /// Ends the thread after its current step, and records a normal end. A step that does not end
    /// is left: every step may be interrupted, and the next start repeats it.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        drop(self.stop);
        match self.has_ended.recv_timeout(STOP_WAIT) {
            Err(RecvTimeoutError::Timeout) => {
                log::error!("a step of the update does not end; this process ends without it");
            }
            _ if self.thread.join().is_err() => log::error!("the update thread panicked"),
            _ => {}
        }
    }
}
