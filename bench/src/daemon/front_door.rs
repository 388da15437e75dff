//! A front door with one model in this process, the requests for it, and what callers measure.

use super::caller::{Caller, Outcome, Refusal, infer_request, on_event_loop};
use crate::load::{CallTotals, serving, skewed_load};
use anyhow::{Context, Result, anyhow};
use hatchback::model::budget::Budget;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::{Flash, Schema, Served, ServerRules, Serving};
use hatchback_server::{CarFacts, Front, FrontOptions, Gate, Listener, ModelFolder, Stopping};
use hatchback_tools::report;
use hatchback_tools::report::metrics::Percentiles;
use hyper::body::Bytes;
use serde::Serialize;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Requests that are drawn; callers go round them.
const REQUESTS: usize = 2048;
/// The name of the model.
pub const MODEL: &str = "bench";
/// What callers of the measurement may use.
pub const RULES: ServerRules = ServerRules {
    threads: 2,
    connections_max: 1024,
    bytes_max: 256 << 20,
    request_bytes_max: 16 << 20,
    requests_per_s_max: 0,
    tcp: None,
    tls: None,
};

/// The figures of one way with one number of callers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DaemonStep {
    /// `library`, `echo` or `gRPC`.
    pub way: &'static str,
    /// Concurrent callers.
    pub clients: u32,
    /// Measured time.
    pub seconds: f64,
    /// Requests answered per second.
    pub requests_per_s: f64,
    /// Latency of the answered requests, as the caller sees it.
    pub latency: Percentiles,
    /// Requests refused as busy.
    pub busy: u64,
    /// Requests refused or failed for another reason.
    pub errors: u64,
}

/// A front door on a socket in a temporary folder, with one model.
pub struct Daemon {
    pub serving: Arc<Serving>,
    pub served: Arc<Served>,
    schema: Arc<Schema>,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// Serves the model on `flash` under [`MODEL`].
    ///
    /// # Errors
    /// The model is refused.
    pub fn new(flash: &Flash, budget: Budget) -> Result<Self> {
        let serving = serving(&budget);
        let served = serving.load(MODEL, flash, budget)?;
        let schema = Arc::clone(served.model().context("the model is loaded")?.schema());
        let folder = tempfile::tempdir().context("a temporary folder")?;
        Ok(Self { serving: Arc::new(serving), served, schema, folder })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Runs `work` beside the front door, whose callers may use what `rules` say; `models` are
    /// those that callers can load.
    ///
    /// # Errors
    /// The socket cannot be bound, or the work fails.
    pub fn serve<T>(
        &self,
        rules: ServerRules,
        models: Vec<ModelFolder>,
        budget: Budget,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let front = Front::new(FrontOptions {
            serving: Arc::clone(&self.serving),
            rules,
            budget,
            gate: Arc::new(Gate::default()),
            models: Box::new(move || models.clone()),
            on_answer: Box::new(|_, _, _| {}),
            facts: Box::new(CarFacts::default),
            act: Box::new(|_, _| Ok(String::new())),
            token: String::new(),
        });
        let (socket, stopping) = (self.socket(), Stopping::default());
        let _ = std::fs::remove_file(&socket);
        let listeners = [Arc::new(Listener::Unix(UnixListener::bind(&socket)?))];
        thread::scope(|scope| {
            let server = scope.spawn(|| hatchback_server::serve(&front, &listeners, &stopping));
            let done = work(&socket);
            stopping.request();
            listeners[0].shut_down()?;
            server.join().map_err(|_| anyhow!("the front door panicked"))??;
            done
        })
    }
}

/// The requests of a measurement, for both ways.
pub struct Requests {
    pub schema: Arc<Schema>,
    /// The samples of each request.
    pub samples: Vec<Vec<Sample>>,
    pub batches: Vec<Batch>,
    pub messages: Vec<Bytes>,
}

impl Requests {
    /// Draws requests of `samples` samples.
    ///
    /// # Errors
    /// The model on `flash` has no keys to draw.
    pub fn draw(daemon: &Daemon, flash: &Flash, samples: usize) -> Result<Self> {
        let mut workload = skewed_load(flash, 1)?;
        let schema = Arc::clone(&daemon.schema);
        let samples: Vec<_> = (0..REQUESTS).map(|_| workload.request(samples)).collect();
        let batch = |samples: &Vec<Sample>| {
            let mut batch = Batch::new(&schema, samples.len());
            batch.push_request(&schema, samples).map(|()| batch)
        };
        let batches = samples.iter().map(batch).collect::<Result<_, _>>()?;
        let message = |samples: &Vec<Sample>| infer_request(MODEL, &schema, samples);
        let messages = samples.iter().map(message).collect::<Result<_>>()?;
        Ok(Self { schema, samples, batches, messages })
    }
}

/// Calls the front door for `time` as `clients` callers on one thread, each with a connection of
/// its own and one request at a time. Counts refused requests, and connections that end.
///
/// # Errors
/// The front door takes no connection.
pub fn call_grpc(
    socket: &Path,
    messages: &[Bytes],
    clients: u32,
    time: Duration,
) -> Result<CallTotals> {
    on_event_loop(async {
        let mut connected = Vec::new();
        for _ in 0..clients {
            connected.push(Caller::connect(socket).await?);
        }

        let start = Instant::now();
        let call = |(number, caller): (usize, Caller)| {
            let first = number * 37 % messages.len();
            let (socket, messages) = (socket.to_owned(), messages.to_vec());
            tokio::spawn(call_until(caller, socket, messages, first, start + time))
        };
        let callers: Vec<_> = connected.into_iter().enumerate().map(call).collect();
        let mut sum = CallTotals::default();
        for caller in callers {
            sum.add_concurrent(&caller.await??);
        }
        sum.time = start.elapsed();
        Ok(sum)
    })
}

/// Sends `messages` in turn, from the message `first` on, until `until`. Connects to `socket` again
/// after a connection ended: a caller without a processor may be the silent one that makes room.
async fn call_until(
    mut caller: Caller,
    socket: PathBuf,
    messages: Vec<Bytes>,
    first: usize,
    until: Instant,
) -> Result<CallTotals> {
    let mut totals = CallTotals::default();
    for message in messages.iter().cycle().skip(first) {
        let sent = Instant::now();
        match caller.infer(message.clone(), None).await {
            Ok(Outcome::Answered(_)) => totals.latencies.record(sent.elapsed()),
            Err(_) => {
                totals.errors += 1;
                caller = Caller::connect(&socket).await?;
            }
            Ok(Outcome::Refused(refusal)) => match Refusal::busy(refusal) {
                Ok(wait) => {
                    totals.busy += 1;
                    tokio::time::sleep(wait).await;
                }
                Err(_) => totals.errors += 1,
            },
        }
        if Instant::now() >= until {
            break;
        }
    }
    Ok(totals)
}

impl DaemonStep {
    /// Returns the figures of `clients` callers.
    pub fn of(totals: &CallTotals, way: &'static str, clients: u32) -> Self {
        let (latency, seconds) = (totals.latencies.percentiles(), totals.time.as_secs_f64());
        let requests_per_s = latency.requests as f64 / seconds.max(f64::EPSILON);
        let CallTotals { busy, errors, .. } = *totals;
        Self { way, clients, seconds, requests_per_s, latency, busy, errors }
    }

    /// Returns the row of a table.
    pub fn cells(&self) -> [String; 7] {
        [
            self.way.to_owned(),
            self.clients.to_string(),
            report::count(self.requests_per_s.round() as u64),
            report::micros(self.latency.p50_us),
            report::micros(self.latency.p99_us),
            report::micros(self.latency.p999_us),
            report::count(self.busy),
        ]
    }
}
