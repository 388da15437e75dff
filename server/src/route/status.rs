//! The status of the car as JSON, for the status page: models, their last minutes, memory, updates,
//! wear and slow requests. Status and metrics are made once a second, so callers cannot raise their
//! cost.

use crate::front::{Front, Published};
use crate::grpc;
use crate::metrics::facts::{CarFacts, ModelFolder};
use crate::metrics::process::prometheus;
use crate::models::repository::index;
use crate::proto::RepositoryIndexResponse;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Runs once a second: reads the facts of the car, adds a second to each model's history, and makes
/// what is shown.
pub fn tick(front: &Front) {
    front.read_facts();
    front.history.add_second(&front.serving, &front.metrics);
    show(front);
}

/// Makes the status, the metrics and the index of models. Lists folders, so a serving thread never
/// calls this.
pub fn show(front: &Front) {
    let folders = (front.models)();
    let models = index(front, &folders);
    let metrics = front.metrics.text();
    front.show(Published {
        status: status(front, &folders).to_string().into(),
        metrics_prometheus: prometheus(&metrics).into(),
        metrics: metrics.into(),
        index: json!(models).to_string().into(),
        index_message: grpc::frame(&RepositoryIndexResponse { models }).into(),
    });
}

/// Returns the status of the car.
fn status(front: &Front, folders: &[ModelFolder]) -> Value {
    let facts = front.facts();
    let models = front.serving.names();
    let models: Value = models.iter().map(|name| model(front, &facts, name)).collect();
    let beside: Value = lines(&front.serving.memory_beside().lines());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": front.started.elapsed().as_secs(),
        "connections": front.connections.count(),
        "connections_max": front.rules.connections_max,
        "server_bytes": front.bytes.used(),
        "server_bytes_max": front.rules.bytes_max,
        "memory_bytes_max": front.serving.memory_bytes_max(),
        "memory_bytes": front.serving.memory_taken(),
        "memory_beside": beside,
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

fn model(front: &Front, facts: &CarFacts, name: &str) -> Value {
    let serving = &front.serving;
    let stats = serving.stats(name).unwrap_or_default();
    let generation = serving.generation(name);
    let update = facts.updates.iter().find(|(of, _)| of == name).map(|(_, status)| status);
    let memory = serving.memory().into_iter().find(|(of, _)| of == name);
    let totals = front.metrics.model(name).totals();
    let cache = serving.cache_use(name).unwrap_or_default();
    json!({
        "name": name,
        "generation": generation.map(|generation| generation.to_string()),
        "answered": totals.answered,
        "failed": totals.failed,
        "samples": totals.samples,
        "busy": stats.busy,
        "late": stats.expired,
        "waiting": stats.waiting,
        "hit_percent": (stats.counters.cached_lookups > 0)
            .then(|| 100.0 * stats.counters.hit_rate()),
        "pages": stats.counters.pages,
        "pages_damaged": stats.counters.pages_damaged,
        "cache_rows": cache.rows,
        "cache_rows_max": cache.rows_max,
        "memory": lines(memory.iter().flat_map(|(_, plan)| plan.lines())
            .collect::<Vec<_>>().as_slice()),
        "tables": tables(front, name),
        "seconds": front.history.of(name),
        "update": update,
    })
}

fn tables(front: &Front, name: &str) -> Value {
    let counts = front.serving.table_counts(name).unwrap_or_default();
    let one = |t: &hatchback::TableCounts| {
        json!({"table": t.table, "lookups": t.lookups, "misses": t.misses,
               "defaulted": t.defaulted, "absent": t.absent, "damaged": t.damaged})
    };
    counts.iter().map(one).collect()
}
