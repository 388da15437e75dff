//! Notifications to systemd: the daemon is ready, the daemon is stopping and, if the unit has a
//! watchdog, every model has just scored a sample. If a model hangs, no notification is sent, and
//! systemd restarts the unit. Without systemd nothing is sent.

use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use sd_notify::NotifyState;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

fn notify(state: NotifyState<'_>) {
    let text = state.to_string();
    if let Err(e) = sd_notify::notify(&[state]) {
        log::warn!("cannot notify systemd of {text}: {e}");
    }
}

/// Runs `work`. Notifies systemd that the daemon is ready, feeds the watchdog while `work` runs,
/// and notifies systemd at the end.
///
/// # Errors
/// `work` fails, or the system gives no thread for the watchdog.
pub fn notify_while<T>(serving: &Serving, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    notify(NotifyState::Ready);
    let (done, stopped) = channel::<()>();
    let result = std::thread::scope(|scope| {
        if let Some(timeout) = sd_notify::watchdog_enabled() {
            let feed = move || {
                while stopped.recv_timeout(timeout / 3) == Err(RecvTimeoutError::Timeout) {
                    match serving.served().iter().try_for_each(|served| score_sample(served)) {
                        Ok(()) => notify(NotifyState::Watchdog),
                        Err(e) => log::error!("the watchdog is not fed: {e}"),
                    }
                }
            };
            std::thread::Builder::new().name("watchdog".to_owned()).spawn_scoped(scope, feed)?;
        }
        // Dropped when `work` ends, also by a panic. Otherwise the scope would wait for the thread
        // for ever.
        let _done = done;
        work()
    });
    notify(NotifyState::Stopping);
    result
}

/// Scores a sample without keys, to prove that `served` answers. If all slots are taken, a
/// worker that still takes requests is proof enough.
///
/// # Errors
/// The model does not answer.
fn score_sample(served: &Served) -> Result<(), RequestError> {
    let Some(model) = served.model() else { return Ok(()) };
    let (name, schema) = (served.name(), model.schema());
    let sample = Sample {
        dense: vec![0.0; schema.dense_features.len()],
        sparse: vec![Vec::new(); schema.features.len()],
        ..Sample::default()
    };
    let mut batch = Batch::new(schema, 1);
    if let Err(e) = batch.push(schema, &sample) {
        log::warn!("`{name}` accepts no sample without keys, so the watchdog cannot test it: {e}");
        return Ok(());
    }

    let requests = || served.stats().map_or(0, |stats| stats.requests);
    let before = requests();
    // No deadline: if the workers hang, this thread must hang too, so that the watchdog is not fed.
    match served.submit(&batch, None) {
        Ok(ticket) => ticket.wait().map(drop),
        Err(RequestError::Busy(slots)) => {
            std::thread::sleep(Duration::from_millis(100));
            if requests() > before { Ok(()) } else { Err(RequestError::Busy(slots)) }
        }
        // The model was unloaded since `served`.
        Err(RequestError::NotServed) => Ok(()),
        Err(e) => Err(e),
    }
    // The model answered. A sample without keys may have no finite score, which is no reason to
    // restart.
    .or_else(|e| if matches!(e, RequestError::NotFinite(_)) { Ok(()) } else { Err(e) })
}
