//! The server's counters, for Prometheus and for the status page. `scrape.rs` adds the runtime's
//! own counters when the metrics are read.

pub mod facts;
pub mod history;
pub mod process;
pub mod scrape;
pub mod slowest;
pub mod trace;

use crate::limits::PERCENTILE_US_MAX;
use crate::metrics::scrape::Scrape;
use crate::metrics::trace::{Protocol, Trace};
use crate::problem::Problem;
use crate::tensors::Differences;
use hdrhistogram::Histogram as Percentiles;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Labels of a metric.
pub type Labels<const N: usize> = [(&'static str, String); N];

/// The first bucket of the latencies, in seconds; each further one is twice as long.
const BUCKET_S: f64 = 16e-6;
const BUCKETS: u16 = 20;

/// The server's counters.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    models: RwLock<BTreeMap<String, Arc<ModelMetrics>>>,
    requests: Family<Labels<3>, Counter>,
    seconds: Family<Labels<1>, Histogram, fn() -> Histogram>,
    stages: Family<Labels<2>, Counter<f64, AtomicU64>>,
    lookups: Family<Labels<2>, Counter>,
    inputs: Family<Labels<2>, Counter>,
    connections: Counter,
    connections_refused: Counter,
}

fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(BUCKET_S, 2.0, BUCKETS))
}

impl Metrics {
    /// Returns metrics at zero. `scrape` adds what other parts count.
    pub fn new(scrape: Scrape) -> Self {
        let seconds: Family<Labels<1>, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(latency_histogram);
        let mut metrics = Self {
            registry: Registry::with_prefix("hatchback"),
            models: RwLock::default(),
            requests: Family::default(),
            seconds,
            stages: Family::default(),
            lookups: Family::default(),
            inputs: Family::default(),
            connections: Counter::default(),
            connections_refused: Counter::default(),
        };
        let registry = &mut metrics.registry;
        let help = "Requests for scores, by model, protocol and outcome";
        registry.register("requests", help, metrics.requests.clone());
        let help = "Time from the headers of a request to the end of its answer";
        registry.register("request_seconds", help, metrics.seconds.clone());
        let help = "Time that answered requests spent in each stage";
        registry.register("stage_seconds", help, metrics.stages.clone());
        let help = "Lookups of scored requests, by model and status; late counts samples";
        registry.register("lookups", help, metrics.lookups.clone());
        let help = "Inputs of answered requests that were ignored or absent";
        registry.register("inputs", help, metrics.inputs.clone());
        let help = "Connections that were given a place";
        registry.register("connections_opened", help, metrics.connections.clone());
        let help = "Connections that were closed because every other one had a request in progress";
        registry.register("connections_refused", help, metrics.connections_refused.clone());
        registry.register_collector(Box::new(scrape));
        metrics
    }

    /// Counts a connection that was given a place.
    pub fn open_connection(&self) {
        self.connections.inc();
    }

    /// Counts a connection for which there was no place.
    pub fn refuse_connection(&self) {
        self.connections_refused.inc();
    }

    /// Counts a request without scores. `model` is the name of a served model, or empty if there is
    /// none.
    pub fn refuse(&self, model: &str, protocol: Protocol, problem: &Problem, time: Duration) {
        let labels = [
            ("model", model.to_owned()),
            ("protocol", protocol.name().to_owned()),
            ("outcome", problem.code.outcome().to_owned()),
        ];
        self.requests.get_or_create(&labels).inc();
        if !model.is_empty() {
            self.model(model).fail(time);
        }
    }

    /// Returns the metrics of the model `name`. It must be the name of a served model: otherwise
    /// callers' texts would make the metrics grow.
    pub fn model(&self, name: &str) -> Arc<ModelMetrics> {
        // Nearly every call finds the model, and readers do not wait for each other.
        let read = self.models.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = read.get(name) {
            return Arc::clone(model);
        }
        drop(read);
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let model = models.entry(name.to_owned());
        Arc::clone(model.or_insert_with(|| Arc::new(self.new_model(name))))
    }

    fn new_model(&self, name: &str) -> ModelMetrics {
        let answered = |protocol: Protocol| {
            let labels = [
                ("model", name.to_owned()),
                ("protocol", protocol.name().to_owned()),
                ("outcome", "answered".to_owned()),
            ];
            self.requests.get_or_create_owned(&labels)
        };
        let stage = |stage: &str| {
            let labels = [("model", name.to_owned()), ("stage", stage.to_owned())];
            self.stages.get_or_create_owned(&labels)
        };
        let lookups = |status: &str| {
            let labels = [("model", name.to_owned()), ("status", status.to_owned())];
            self.lookups.get_or_create_owned(&labels)
        };
        let inputs = |outcome: &str| {
            let labels = [("model", name.to_owned()), ("outcome", outcome.to_owned())];
            self.inputs.get_or_create_owned(&labels)
        };
        ModelMetrics {
            inputs: ["ignored", "absent"].map(inputs),
            answered: [answered(Protocol::Grpc), answered(Protocol::Http)],
            seconds: self.seconds.get_or_create_owned(&[("model", name.to_owned())]),
            stages: ["decode", "queue", "score", "encode"].map(stage),
            lookups: ["fresh", "defaulted", "absent", "damaged", "late"].map(lookups),
            totals: Mutex::default(),
            recent: Mutex::new(Recent::new()),
        }
    }

    /// Returns everything in the text format of OpenMetrics.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        let end = text.rfind("# EOF").unwrap_or(text.len());
        text.insert_str(end, &process::text());
        text
    }
}

/// Totals of one model since the start, for its statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub answered: u64,
    pub failed: u64,
    pub samples: u64,
    pub total_ns: u64,
    pub failed_ns: u64,
    pub decode_ns: u64,
    pub queue_ns: u64,
    pub score_ns: u64,
    pub encode_ns: u64,
    /// When the last request was answered, ms since 1970.
    pub last_unix_ms: u64,
}

/// Counts since the last call of `take_recent`.
#[derive(Debug)]
pub struct Recent {
    pub answered: u64,
    pub failed: u64,
    /// Latencies, µs.
    pub latencies: Option<Percentiles<u64>>,
}

impl Recent {
    fn new() -> Self {
        // The bounds are constants and valid.
        let latencies = Percentiles::new_with_bounds(1, PERCENTILE_US_MAX, 2).ok();
        Self { answered: 0, failed: 0, latencies }
    }

    /// Returns a percentile of the latencies, µs; `None` without requests.
    pub fn latency_us(&self, quantile: f64) -> Option<u64> {
        let latencies = self.latencies.as_ref().filter(|latencies| !latencies.is_empty())?;
        Some(latencies.value_at_quantile(quantile))
    }
}

/// Counters of one model.
#[derive(Debug)]
pub struct ModelMetrics {
    answered: [Counter; 2],
    seconds: Histogram,
    stages: [Counter<f64, AtomicU64>; 4],
    lookups: [Counter; 5],
    /// Ignored and absent ones.
    inputs: [Counter; 2],
    totals: Mutex<Totals>,
    recent: Mutex<Recent>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl ModelMetrics {
    /// Counts an answered request, of whose samples the deadline cut `late` short.
    pub fn answer(&self, protocol: Protocol, trace: &Trace, late: usize) {
        let Trace { total, decode, queue, score, encode, samples, status, .. } = trace;
        self.answered[usize::from(protocol == Protocol::Http)].inc();
        self.seconds.observe(total.as_secs_f64());
        let stages = [decode, queue, score, encode];
        for (counter, time) in self.stages.iter().zip(stages) {
            counter.inc_by(time.as_secs_f64());
        }
        let counts = [status.fresh, status.defaulted, status.absent, status.damaged, late as u32];
        for (counter, count) in self.lookups.iter().zip(counts).filter(|(_, count)| *count > 0) {
            counter.inc_by(count.into());
        }

        {
            let mut totals = lock(&self.totals);
            totals.answered += 1;
            totals.samples += *samples as u64;
            totals.total_ns += ns(*total);
            totals.decode_ns += ns(*decode);
            totals.queue_ns += ns(*queue);
            totals.score_ns += ns(*score);
            totals.encode_ns += ns(*encode);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            totals.last_unix_ms = u64::try_from(now.as_millis()).unwrap_or(0);
        }
        let mut recent = lock(&self.recent);
        recent.answered += 1;
        if let Some(latencies) = &mut recent.latencies {
            latencies.saturating_record(u64::try_from(total.as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// Counts the inputs of an answered request that were ignored or absent.
    pub fn count_inputs(&self, differences: &Differences) {
        let Differences { ignored, absent } = differences;
        for (counter, names) in self.inputs.iter().zip([ignored, absent]) {
            counter.inc_by(names.len() as u64);
        }
    }

    /// Counts a request without scores.
    fn fail(&self, time: Duration) {
        let mut totals = lock(&self.totals);
        totals.failed += 1;
        totals.failed_ns += ns(time);
        drop(totals);
        lock(&self.recent).failed += 1;
    }

    /// Returns the totals.
    pub fn totals(&self) -> Totals {
        *lock(&self.totals)
    }

    /// Passes what was counted since the last call to `read`, and resets it.
    pub fn take_recent<T>(&self, read: impl FnOnce(&Recent) -> T) -> T {
        let mut recent = lock(&self.recent);
        let shown = read(&recent);
        (recent.answered, recent.failed) = (0, 0);
        if let Some(latencies) = &mut recent.latencies {
            latencies.reset();
        }
        shown
    }
}
