//! The server's counters, for Prometheus and for the status page. `scrape.rs` adds the runtime's
//! own counters when the metrics are read.

pub mod facts;
pub mod history;
pub mod process;
pub mod scrape;
pub mod slowest;
pub mod trace;

use crate::limits::PERCENTILE_US_MAX;
use crate::metrics::process::Process;
use crate::metrics::scrape::Scrape;
use crate::metrics::trace::{Protocol, STAGES, Trace};
use crate::problem::Problem;
use crate::tensors::Differences;
use hatchback::locks::lock;
use hdrhistogram::Histogram as Percentiles;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Labels of a metric.
pub type Labels<const N: usize> = [(&'static str, String); N];
/// A sum of times.
pub type Seconds = Counter<f64, AtomicU64>;
/// The latencies of each model.
type Latencies = Family<Labels<1>, Histogram, fn() -> Histogram>;

/// The first bucket of the latencies, in seconds; each further one is twice as long.
const BUCKET_S: f64 = 16e-6;
const BUCKETS: u16 = 20;

/// The server's counters.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    models: RwLock<BTreeMap<String, Arc<ModelMetrics>>>,
    requests: Family<Labels<3>, Counter>,
    seconds: Latencies,
    stages: Family<Labels<2>, Seconds>,
    lookups: Family<Labels<2>, Counter>,
    inputs: Family<Labels<2>, Counter>,
    /// Connections that were given a place.
    pub connections: Counter,
    /// Connections for which there was no place.
    pub connections_refused: Counter,
}

fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(BUCKET_S, 2.0, BUCKETS))
}

/// Returns a sum of times in nanoseconds.
pub fn ns(seconds: &Seconds) -> u64 {
    (1e9 * seconds.get()) as u64
}

/// Registers `metric` in `registry`.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

fn labels<const N: usize>(labels: [(&'static str, &str); N]) -> Labels<N> {
    labels.map(|(label, value)| (label, value.to_owned()))
}

impl Metrics {
    /// Returns metrics at zero. `scrape` adds what other parts count.
    pub fn new(scrape: Scrape) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Process));
        let own = registry.sub_registry_with_prefix("hatchback");
        own.register_collector(Box::new(scrape));

        let help = "Requests for scores, by model, protocol and outcome";
        let requests = add(own, "requests", help, Family::default());
        let help = "Time from the headers of a request to the end of its answer";
        let seconds = Latencies::new_with_constructor(latency_histogram);
        let seconds = add(own, "request_seconds", help, seconds);
        let help = "Time that answered requests spent in each stage";
        let stages = add(own, "stage_seconds", help, Family::default());
        let help = "Lookups of scored requests, by model and status; late counts samples";
        let lookups = add(own, "lookups", help, Family::default());
        let help = "Inputs of answered requests that were ignored or absent";
        let inputs = add(own, "inputs", help, Family::default());
        let help = "Connections that were given a place";
        let connections = add(own, "connections_opened", help, Counter::default());
        let help = "Connections that were closed because every other one had a request in progress";
        let connections_refused = add(own, "connections_refused", help, Counter::default());
        Self {
            registry,
            models: RwLock::default(),
            requests,
            seconds,
            stages,
            lookups,
            inputs,
            connections,
            connections_refused,
        }
    }

    /// Counts a request without scores. `model` is the name of a served model, or empty if there is
    /// none.
    pub fn refuse(&self, model: &str, protocol: Protocol, problem: &Problem, time: Duration) {
        self.requests_with(model, protocol, problem.code.outcome()).inc();
        if !model.is_empty() {
            let model = self.model(model);
            model.failed.inc();
            model.failed_recent.fetch_add(1, Ordering::Relaxed);
            model.failed_seconds.inc_by(time.as_secs_f64());
        }
    }

    fn requests_with(&self, model: &str, protocol: Protocol, outcome: &str) -> Counter {
        let of = [("model", model), ("protocol", protocol.name()), ("outcome", outcome)];
        self.requests.get_or_create_owned(&labels(of))
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
        let answered = |protocol| self.requests_with(name, protocol, "answered");
        let of = |label, value| labels([("model", name), (label, value)]);
        let lookups = ["fresh", "defaulted", "absent", "damaged", "late"];
        // The bounds are constants and valid.
        let recent = Percentiles::new_with_bounds(1, PERCENTILE_US_MAX, 2).ok();
        ModelMetrics {
            answered: [Protocol::Grpc, Protocol::Http].map(answered),
            seconds: self.seconds.get_or_create_owned(&labels([("model", name)])),
            stages: STAGES.map(|stage| self.stages.get_or_create_owned(&of("stage", stage))),
            lookups: lookups.map(|one| self.lookups.get_or_create_owned(&of("status", one))),
            inputs: ["ignored", "absent"]
                .map(|one| self.inputs.get_or_create_owned(&of("outcome", one))),
            samples: Counter::default(),
            failed: Counter::default(),
            failed_seconds: Seconds::default(),
            last_unix_ms: AtomicU64::default(),
            failed_recent: AtomicU64::default(),
            recent: Mutex::new(recent),
        }
    }

    /// Returns everything in the text format of OpenMetrics.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// The requests of a short time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Recent {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that were refused or failed.
    pub failed: u64,
    /// `None` without an answer.
    pub p50_us: Option<u64>,
    pub p99_us: Option<u64>,
}

/// Counters of one model.
#[derive(Debug)]
pub struct ModelMetrics {
    answered: [Counter; 2],
    seconds: Histogram,
    stages: [Seconds; 4],
    lookups: [Counter; 5],
    /// Ignored and absent ones.
    inputs: [Counter; 2],
    /// The counts below are for the statistics of the model.
    pub samples: Counter,
    pub failed: Counter,
    pub failed_seconds: Seconds,
    /// When the last request was answered, ms since 1970.
    pub last_unix_ms: AtomicU64,
    /// Requests without scores since the last call of `take_recent`, and latencies, µs.
    failed_recent: AtomicU64,
    recent: Mutex<Option<Percentiles<u64>>>,
}

impl ModelMetrics {
    /// Counts an answered request, of whose samples the deadline cut `late` short.
    pub fn answer(&self, protocol: Protocol, trace: &Trace, late: usize, inputs: &Differences) {
        let Trace { samples, status, .. } = trace;
        let total = trace.total();
        self.answered[usize::from(protocol == Protocol::Http)].inc();
        self.seconds.observe(total.as_secs_f64());
        for (counter, time) in self.stages.iter().zip(trace.stages()) {
            counter.inc_by(time.as_secs_f64());
        }
        let counts = [status.fresh, status.defaulted, status.absent, status.damaged, late as u32];
        for (counter, count) in self.lookups.iter().zip(counts).filter(|(_, count)| *count > 0) {
            counter.inc_by(count.into());
        }
        for (counter, names) in self.inputs.iter().zip([&inputs.ignored, &inputs.absent]) {
            counter.inc_by(names.len() as u64);
        }
        self.samples.inc_by(*samples as u64);

        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_unix_ms.store(now.as_millis() as u64, Ordering::Relaxed);
        if let Some(latencies) = &mut *lock(&self.recent) {
            latencies.saturating_record(total.as_micros() as u64);
        }
    }

    /// Returns how many requests were answered.
    pub fn answered(&self) -> u64 {
        self.answered.iter().map(Counter::get).sum()
    }

    /// Returns the time of answered requests in each stage, as [`STAGES`] names them.
    pub fn stages_ns(&self) -> [u64; 4] {
        self.stages.each_ref().map(ns)
    }

    /// Returns what was counted since the last call.
    pub fn take_recent(&self) -> Recent {
        let failed = self.failed_recent.swap(0, Ordering::Relaxed);
        let mut recent = lock(&self.recent);
        let Some(latencies) = recent.as_mut().filter(|latencies| !latencies.is_empty()) else {
            return Recent { failed, ..Recent::default() };
        };
        let at = |quantile| Some(latencies.value_at_quantile(quantile));
        let (p50_us, p99_us) = (at(0.5), at(0.99));
        let taken = Recent { answered: latencies.len(), failed, p50_us, p99_us };
        latencies.reset();
        taken
    }
}
