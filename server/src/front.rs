//! The front door's state: models, limits and counters. There is one for each process.

use crate::connections::Connections;
use crate::connections::gate::Gate;
use crate::connections::memory::ByteBudget;
use crate::limits::{CONNECTION_BYTES_MAX, RETRY_MAX, TLS_BYTES_MAX};
use crate::metrics::Metrics;
use crate::metrics::facts::{CarFacts, ModelFolder};
use crate::metrics::history::History;
use crate::metrics::scrape::Scrape;
use crate::metrics::slowest::Slowest;
use crate::problem::{Problem, not_served};
use crate::tensors::Layout;
use hatchback::locks::lock;
use hatchback::{Budget, Generation, Schema, Served, ServerRules, Serving};
use hyper::body::Bytes;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Shortest time after which a refused caller should retry.
const RETRY_MIN: Duration = Duration::from_millis(1);

/// Returns the model folders of the car.
pub type Models = Box<dyn Fn() -> Vec<ModelFolder> + Send + Sync>;
/// Receives the time that a generation of a model took for an answer.
pub type OnAnswer = Box<dyn Fn(&str, &Generation, Duration) + Send + Sync>;
/// Returns the facts of the car; called once a second.
pub type Facts = Box<dyn Fn() -> CarFacts + Send + Sync>;
/// Does an action for a model, by the action's name. Returns what was done.
pub type Act = Box<dyn Fn(&str, &str) -> Result<String, Problem> + Send + Sync>;

/// Parameters of the front door, which the daemon supplies.
pub struct FrontOptions {
    /// The models that are served.
    pub serving: Arc<Serving>,
    /// Limits of the callers.
    pub rules: ServerRules,
    /// The budget of a model that is loaded.
    pub budget: Budget,
    /// Lets every request pass, or one at a time.
    pub gate: Arc<Gate>,
    /// Lists the model folders.
    pub models: Models,
    /// Receives the model, the generation and the time of each answer.
    pub on_answer: OnAnswer,
    /// Reads the facts of the car.
    pub facts: Facts,
    /// Does an action of the status page.
    pub act: Act,
    /// The word that allows a caller to load, unload and act.
    pub token: String,
}

/// Returns the bytes of the front door's lines in the budget: connections, and the requests and
/// answers in flight.
pub fn front_bytes(rules: &ServerRules) -> Vec<(&'static str, u64)> {
    let of_each = |bytes: u64| u64::from(rules.connections_max) * bytes;
    let tls = rules.tls.as_ref().map(|_| ("TLS of callers", of_each(TLS_BYTES_MAX)));
    let connections = ("connections of callers", of_each(CONNECTION_BYTES_MAX));
    let requests = ("requests and answers of callers", rules.bytes_max);
    [Some(connections), tls, Some(requests)].into_iter().flatten().collect()
}

/// What every caller may read, made in the last second: callers cannot raise its cost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published {
    /// The status page's JSON.
    pub status: Bytes,
    /// The text of the metrics, in OpenMetrics and in the older format of Prometheus.
    pub metrics: Bytes,
    pub metrics_prometheus: Bytes,
    /// The index of models as JSON, and as a framed message of gRPC.
    pub index: Bytes,
    pub index_message: Bytes,
}

/// The front door.
pub struct Front {
    options: FrontOptions,
    pub(crate) bytes: Arc<ByteBudget>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) metrics: Metrics,
    pub(crate) slowest: Slowest,
    pub(crate) history: History,
    pub(crate) started: Instant,
    /// Lets one load or unload at a time pass.
    pub(crate) changes: Mutex<()>,
    /// The newest facts of the car.
    pub(crate) latest_facts: Arc<Mutex<CarFacts>>,
    pub(crate) shown: Mutex<Published>,
    layouts: Mutex<BTreeMap<String, Arc<Layout>>>,
}

impl Deref for Front {
    type Target = FrontOptions;

    fn deref(&self) -> &FrontOptions {
        &self.options
    }
}

impl Front {
    /// Returns a front door without callers.
    pub fn new(options: FrontOptions) -> Arc<Self> {
        let FrontOptions { serving, rules, .. } = &options;
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let bytes = ByteBudget::new(size(rules.bytes_max), size(rules.request_bytes_max));
        let connections = Connections::new(rules.connections_max as usize, &bytes);
        let latest = Arc::new(Mutex::new(CarFacts::default()));
        let metrics = Metrics::new(Scrape {
            serving: Arc::clone(serving),
            bytes: Arc::clone(&bytes),
            connections: Arc::clone(&connections),
            facts: Arc::clone(&latest),
        });
        Arc::new(Self {
            options,
            bytes,
            connections,
            metrics,
            slowest: Slowest::default(),
            history: History::default(),
            started: Instant::now(),
            changes: Mutex::default(),
            latest_facts: latest,
            shown: Mutex::default(),
            layouts: Mutex::default(),
        })
    }

    /// Returns what was made in the last second.
    pub(crate) fn shown(&self) -> Published {
        lock(&self.shown).clone()
    }

    /// Returns the tensors of the model `name`, which has `schema`.
    pub(crate) fn layout(&self, name: &str, schema: &Arc<Schema>) -> Arc<Layout> {
        let mut layouts = lock(&self.layouts);
        match layouts.get(name) {
            // A swap brings another schema, and perhaps other tensors.
            Some(layout) if Arc::ptr_eq(&layout.schema, schema) => Arc::clone(layout),
            _ => {
                let layout = Arc::new(Layout::new(Arc::clone(schema)));
                layouts.insert(name.to_owned(), Arc::clone(&layout));
                layout
            }
        }
    }

    /// Returns the handle of the model `name`.
    ///
    /// # Errors
    /// There is no such model.
    pub(crate) fn served(&self, name: &str) -> Result<Arc<Served>, Problem> {
        self.serving.get(name).ok_or_else(|| not_served(name))
    }

    /// Returns when a caller that `served` refused should retry: after the time that the waiting
    /// requests need at the pace of the requests before them.
    pub(crate) fn retry_after(&self, served: &Served) -> Duration {
        let Some(stats) = served.stats() else { return RETRY_MAX };
        let (model, workers) = (self.metrics.model(served.name()), self.budget.workers.max(1));
        let [.., score_ns, _] = model.stages_ns();
        let mean_ns = score_ns / model.answered().max(1);
        let waiting = stats.waiting as u64 + 1;
        let wait = Duration::from_nanos(mean_ns.saturating_mul(waiting) / u64::from(workers));
        wait.clamp(RETRY_MIN, RETRY_MAX)
    }
}
