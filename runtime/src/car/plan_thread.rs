//! The thread that takes the steps of `plan_steps.rs`, in the idle class beside the requests.

use crate::car::plan_steps::PlanSteps;
use crate::maintenance::background::Background;
use crate::maintenance::share::BusyBounds;
use crate::request::serving::Serving;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, sleep};
use std::time::Duration;

/// Interval at which the thread looks for a model without its plan.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread for `serving` if a model there may run on TensorRT. The thread ends after
/// `serving` was dropped. Nobody waits for it: a build takes minutes, and a later start repeats it.
///
/// # Errors
/// The system refuses a thread.
pub fn start(serving: &Arc<Serving>, busy: BusyBounds) -> io::Result<()> {
    if !serving.allows_tensorrt() {
        return Ok(());
    }
    let served = Arc::downgrade(serving);
    let run = move || {
        let (background, mut steps) = (Background::enter(busy), PlanSteps::default());
        while let Some(serving) = served.upgrade() {
            // A build is one piece of work. Its share of the time is that of the idle class.
            background.resume();
            let yield_now = |urgency| background.yield_now(urgency, sleep);
            let is_due = steps.step(&serving, &yield_now);
            drop(serving);
            if !is_due {
                sleep(LOOK_INTERVAL);
            }
        }
    };
    Builder::new().name("plans".to_owned()).spawn(run).map(drop)
}
