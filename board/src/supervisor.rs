//! systemd's side of the daemon: it is told when the daemon serves and when it stops and, where the
//! unit has a watchdog, that each model scored a sample just now. A model that hangs goes untold,
//! and the unit is started anew. Without systemd nothing happens.

use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use sd_notify::NotifyState;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

fn tell(state: NotifyState<'_>) {
    let said = state.to_string();
    if let Err(e) = sd_notify::notify(&[state]) {
        log::warn!("systemd was not told {said}: {e}");
    }
}

/// Tells that the daemon serves while `work` does.
pub fn watched<T>(serving: &Serving, work: impl FnOnce() -> T) -> T {
    tell(NotifyState::Ready);
    let (done, stopped) = channel::<()>();
    let result = std::thread::scope(|scope| {
        if let Some(within) = sd_notify::watchdog_enabled() {
            scope.spawn(move || {
                while stopped.recv_timeout(within / 3) == Err(RecvTimeoutError::Timeout) {
                    match serving.names().iter().try_for_each(|name| scores(serving, name)) {
                        Ok(()) => tell(NotifyState::Watchdog),
                        Err(e) => log::error!("the watchdog is not told: {e}"),
                    }
                }
            });
        }
        let _done = done;
        work()
    });
    tell(NotifyState::Stopping);
    result
}

/// Whether `name` answers: a sample of its own is scored, or all slots are taken and requests get
/// on.
fn scores(serving: &Serving, name: &str) -> Result<(), RequestError> {
    let Some(schema) = serving.schema(name) else { return Ok(()) };
    let sample = Sample {
        dense: vec![0.0; schema.dense_features.len()],
        sparse: vec![Vec::new(); schema.features.len()],
        ..Sample::default()
    };
    let mut batch = Batch::new(&schema, 1);
    if let Err(e) = batch.push(&schema, &sample) {
        log::warn!("`{name}` takes no sample without keys: {e}");
        return Ok(());
    }
    let taken_up = || serving.stats(name).map_or(0, |stats| stats.requests);
    let before = taken_up();
    match serving.submit(name, &batch, None) {
        Ok(ticket) => ticket.wait().map(drop),
        Err(RequestError::Busy(slots)) => {
            std::thread::sleep(Duration::from_millis(100));
            if taken_up() > before { Ok(()) } else { Err(RequestError::Busy(slots)) }
        }
        Err(RequestError::NotServed) => Ok(()),
        Err(e) => Err(e),
    }
}
