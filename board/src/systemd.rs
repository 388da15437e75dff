//! Notifications to systemd: the daemon is ready, the daemon is stopping and, if the unit has a
//! watchdog, the workers of every model look for work. If a model hangs, no notification is sent,
//! and systemd restarts the unit. Without systemd nothing is sent.

use hatchback::request::serving::{Served, Serving};
use sd_notify::NotifyState;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};

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
                let mut turns = BTreeMap::new();
                while stopped.recv_timeout(timeout / 3) == Err(RecvTimeoutError::Timeout) {
                    let served = serving.served();
                    match served.iter().find(|served| !is_alive(served, &mut turns)) {
                        None => notify(NotifyState::Watchdog),
                        Some(hung) => log::error!(
                            "the watchdog is not fed: no worker of `{}` took work",
                            hung.name()
                        ),
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

/// Returns whether a worker of `served` has looked for work since the last call, which left the
/// count in `turns`. A sample would count for a release on probation, and wait behind all callers.
fn is_alive(served: &Served, turns: &mut BTreeMap<String, u64>) -> bool {
    // An unloaded model has no turns.
    let now = served.turns();
    now.is_none_or(|now| turns.insert(served.name().to_owned(), now) != Some(now))
}
