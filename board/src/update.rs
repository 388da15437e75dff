//! The update thread of one model: calls `hatchback::car::update_steps` until it is stopped, and
//! pauses between pieces of work as the policy demands. A datagram on the socket `wake` only saves
//! a second.

use crate::latency::Latencies;
use anyhow::{Context, Result};
use hatchback::bundle::manifest::Generation;
use hatchback::car::update_steps::{ModelUpdates, UpdateSteps, record_end};
use hatchback::maintenance::background::Background;
use hatchback::request::serving::Serving;
use hatchback_link::daemon::{now, wake_socket};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time after which the thread reads the record without a wake-up.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The thread of one model's updates.
pub struct UpdateThread {
    stopping: Arc<AtomicBool>,
    wake: PathBuf,
    thread: JoinHandle<()>,
}

impl UpdateThread {
    /// Starts the thread for `update`; it loads and swaps generations in `serving`.
    ///
    /// # Errors
    /// The socket `wake` cannot be bound, or the system refuses a thread.
    pub fn start(
        update: ModelUpdates,
        serving: &Arc<Serving>,
        latencies: &Arc<Latencies>,
    ) -> Result<Self> {
        let wake = wake_socket(&update.updater.directory);
        if let Err(e) = std::fs::remove_file(&wake)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(e).with_context(|| wake.display().to_string());
        }
        let socket = UnixDatagram::bind(&wake).with_context(|| wake.display().to_string())?;
        socket.set_read_timeout(Some(POLL_INTERVAL))?;

        let stopping = Arc::new(AtomicBool::new(false));
        let (stop, latencies) = (Arc::clone(&stopping), Arc::clone(latencies));
        let (served, busy) = (Arc::clone(serving), update.policy.busy());
        let p99 = Box::new(move |name: &str, of: &Generation| latencies.p99_us(name, of));
        let mut steps = UpdateSteps::new(update, Arc::clone(serving), p99);

        let run = move || {
            let background = Background::enter(busy);
            // Without a model no request can wait for this thread.
            let pause = |time| {
                if !stop.load(Ordering::Acquire) && !served.names().is_empty() {
                    std::thread::sleep(time);
                }
            };
            while !stop.load(Ordering::Acquire) {
                background.resume();
                while steps.step(now(), &|| background.yield_now(pause)) {}
                // A datagram and a timeout both mean: read the record again.
                let _ = socket.recv(&mut [0; 16]);
            }
            record_end(steps.updater());
        };
        let thread = std::thread::Builder::new().name("update".to_owned()).spawn(run)?;
        Ok(Self { stopping, wake, thread })
    }

    /// Ends the thread after its current step, and records a normal end.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        if let Ok(socket) = UnixDatagram::unbound() {
            let _ = socket.send_to(b"stop", &self.wake);
        }
        if self.thread.join().is_err() {
            log::error!("the update thread panicked");
        }
        let _ = std::fs::remove_file(&self.wake);
    }
}
