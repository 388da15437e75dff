//! The status of the car as JSON, for the status page: models, their last minutes, memory, updates,
//! wear and slow requests. Status and metrics are made once a second, so callers cannot raise their
//! cost.

use crate::front::{Front, Published};
use crate::grpc;
use crate::metrics::facts::{CarFacts, ModelFolder};
use crate::metrics::process::prometheus;
use crate::models::repository::index;
use crate::proto::RepositoryIndexResponse;
use hatchback::Served;
use hatchback::locks::lock;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Runs once a second: reads the facts of the car, adds a second to each model's history, and makes
/// what is shown.
pub fn tick(front: &Front) {
    *lock(&front.latest_facts) = (front.facts)();
    front.history.add_second(&front.serving, &front.metrics);
    show(front);
}

/// Makes the status, the metrics and the index of models. Lists folders, so a serving thread never
/// calls this.
pub fn show(front: &Front) {
    let folders = (front.models)();
    let models = index(front, &folders);
    let metrics = front.metrics.text();
    *lock(&front.shown) = Published {
        status: status(front, &folders).to_string().into(),
        metrics_prometheus: prometheus(&metrics).into(),
        metrics: metrics.into(),
        index: json!(models).to_string().into(),
        index_message: grpc::frame(&RepositoryIndexResponse { models }).into(),
    };
}

/// Returns the status of the car.
fn status(front: &Front, folders: &[ModelFolder]) -> Value {
    let facts = lock(&front.latest_facts).clone();
    let models = front.serving.served();
    let models: Value = models.iter().map(|served| model(front, &facts, served)).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": front.started.elapsed().as_secs(),
        "connections": front.connections.count(),
        "connections_max": front.rules.connections_max,
        "server_bytes": front.bytes.used(),
        "server_bytes_max": front.rules.bytes_max,
        "memory_bytes_max": front.serving.memory_bytes_max(),
        "memory_bytes": front.serving.memory_taken(),
        "memory_beside": lines(&front.serving.memory_beside().lines()),
        "models": models,
        "waiting": waiting(front, &facts, folders),
        "wear": facts.wear,
        "celsius": facts.celsius,
        "watts": facts.watts,
        "shed_level": facts.shed_level,
        "slowest": front.slowest.list(),
    })
}

/// Returns the models of the car that are not served, with their updates.
fn waiting(front: &Front, facts: &CarFacts, folders: &[ModelFolder]) -> Value {
    let served = front.serving.names();
    let updates = facts.updates.iter().map(|(name, _)| name);
    let names: BTreeSet<&String> = folders.iter().map(|f| &f.name).chain(updates).collect();
    let one = |name: &&String| {
        let update = facts.updates.iter().find(|(of, _)| of == *name).map(|(_, status)| status);
        json!({"name": name, "is_unloaded": front.serving.is_unloaded(name), "update": update})
    };
    names.iter().filter(|name| !name.is_empty() && !served.contains(name)).map(one).collect()
}

fn lines(lines: &[(&'static str, u64)]) -> Value {
    lines.iter().map(|(line, bytes)| json!({"line": line, "bytes": bytes})).collect()
}

fn model(front: &Front, facts: &CarFacts, served: &Served) -> Value {
    let (name, opened, stats) = (served.name(), served.model(), served.stats().unwrap_or_default());
    let update = facts.updates.iter().find(|(of, _)| of == name).map(|(_, status)| status);
    let memory = opened.as_ref().map(|model| model.memory().lines()).unwrap_or_default();
    let metrics = front.metrics.model(name);
    let cache = opened.as_ref().and_then(|model| model.cache_use()).unwrap_or_default();
    json!({
        "name": name,
        "generation": opened.map(|model| model.generation().to_string()),
        "dense_network": served.dense_runs_on(),
        "answered": metrics.answered(),
        "failed": metrics.failed.get(),
        "samples": metrics.samples.get(),
        "busy": stats.busy,
        "late": stats.expired,
        "waiting": stats.waiting,
        "hit_percent": (stats.counters.cached_lookups > 0)
            .then(|| 100.0 * stats.counters.hit_rate()),
        "pages": stats.counters.pages,
        "pages_damaged": stats.counters.pages_damaged,
        "cache_rows": cache.rows,
        "cache_rows_max": cache.rows_max,
        "memory": lines(&memory),
        "tables": served.table_counts(),
        "seconds": front.history.of(name),
        "update": update,
    })
}
