//! Counters of other parts, read at each scrape: the pipelines, the memory plans, the connections,
//! and the facts of the car. Never reads a file.

use crate::connections::Connections;
use crate::connections::memory::ByteBudget;
use crate::metrics::facts::{CarFacts, WearFacts};
use hatchback::{CacheUse, Serving, Stats, TableCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use std::fmt::{Error, Write};
use std::sync::{Arc, Mutex, PoisonError};

type Label = (&'static str, String);

/// A value with its labels.
struct Value {
    labels: Vec<Label>,
    value: f64,
}

/// Where the values are read.
pub struct Scrape {
    pub serving: Arc<Serving>,
    pub bytes: Arc<ByteBudget>,
    pub connections: Arc<Connections>,
    /// The newest facts of the car.
    pub facts: Arc<Mutex<CarFacts>>,
}

impl std::fmt::Debug for Scrape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scrape")
    }
}

/// Writes families of values.
struct Families<'a>(DescriptorEncoder<'a>);

impl Families<'_> {
    fn counters(&mut self, name: &str, help: &str, values: Vec<Value>) -> Result<(), Error> {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for Value { labels, value } in values {
            let mut one = encoder.encode_family(&labels)?;
            one.encode_counter::<NoLabelSet, f64, f64>(&value, None)?;
        }
        Ok(())
    }

    fn gauges(&mut self, name: &str, help: &str, values: Vec<Value>) -> Result<(), Error> {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for Value { labels, value } in values {
            match labels.is_empty() {
                // A family would print empty braces.
                true => encoder.encode_gauge(&value)?,
                false => encoder.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }
}

fn model(name: &str) -> Vec<Label> {
    vec![("model", name.to_owned())]
}

fn with(mut labels: Vec<Label>, label: &'static str, value: &str) -> Vec<Label> {
    labels.push((label, value.to_owned()));
    labels
}

fn one(value: f64) -> Vec<Value> {
    vec![Value { labels: Vec::new(), value }]
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut to = Families(encoder);
        self.pipelines(&mut to)?;
        self.tables(&mut to)?;
        self.memory(&mut to)?;
        self.generations(&mut to)?;
        self.car(&mut to)
    }
}

impl Scrape {
    fn pipelines(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let names = self.serving.names();
        let stats: Vec<(String, Stats)> = names
            .into_iter()
            .filter_map(|name| self.serving.stats(&name).map(|stats| (name, stats)))
            .collect();
        let each = |value: fn(&Stats) -> u64| -> Vec<Value> {
            let of = |(name, stats): &(String, Stats)| Value {
                labels: model(name),
                value: value(stats) as f64,
            };
            stats.iter().map(of).collect()
        };

        to.counters("pipeline_requests", "Requests that a worker took", each(|s| s.requests))?;
        to.counters("pipeline_batches", "Batches of these requests", each(|s| s.batches))?;
        to.counters("pipeline_busy", "Requests refused for want of a slot", each(|s| s.busy))?;
        let help = "Requests that a worker could not score";
        to.counters("pipeline_failed", help, each(|s| s.failed))?;
        to.counters("pipeline_late", "Requests whose deadline passed", each(|s| s.expired))?;
        to.gauges("pipeline_waiting", "Requests that wait now", each(|s| s.waiting as u64))?;
        let help = "Lookups of tables that are not resident";
        to.counters("cache_lookups", help, each(|s| s.counters.cached_lookups))?;
        let help = "Of these, lookups whose row was not cached";
        to.counters("cache_misses", help, each(|s| s.counters.missed_lookups))?;
        to.counters("flash_pages_read", "Pages read for requests", each(|s| s.counters.pages))?;
        let help = "Of these, pages that failed their check";
        to.counters("flash_pages_damaged", help, each(|s| s.counters.pages_damaged))
    }

    fn tables(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let tables: Vec<_> = self
            .serving
            .names()
            .into_iter()
            .map(|name| (self.serving.table_counts(&name).unwrap_or_default(), name))
            .collect();
        let each = |value: fn(&TableCounts) -> u64| -> Vec<Value> {
            let of = |(counts, name): &(Vec<TableCounts>, String)| {
                let labels = |table: &str| with(model(name), "table", table);
                let one =
                    |of: &TableCounts| Value { labels: labels(&of.table), value: value(of) as f64 };
                counts.iter().map(one).collect::<Vec<_>>()
            };
            tables.iter().flat_map(of).collect()
        };

        to.counters("table_lookups", "Lookups of a table", each(|t| t.lookups))?;
        let help = "Rows that requests missed, each counted once a request";
        to.counters("table_misses", help, each(|t| t.misses))?;
        let help = "Missed rows that the miss policy or a deadline did not wait for";
        to.counters("table_defaulted", help, each(|t| t.defaulted))?;
        let help = "Missed rows that the table does not have";
        to.counters("table_absent", help, each(|t| t.absent))?;
        let help = "Missed rows whose page failed its check";
        to.counters("table_damaged", help, each(|t| t.damaged))?;

        let occupancy = |pick: fn(&CacheUse) -> u64| -> Vec<Value> {
            let names = self.serving.names().into_iter();
            let of = |name: String| {
                let cache = self.serving.cache_use(&name)?;
                Some(Value { labels: model(&name), value: pick(&cache) as f64 })
            };
            names.filter_map(of).collect()
        };
        let help = "Rows that the caches have room for";
        to.gauges("cache_rows_max", help, occupancy(|c| c.rows_max))?;
        let help = "Rows that are cached, estimated from a sample of the sets";
        to.gauges("cache_rows", help, occupancy(|c| c.rows))
    }

    fn memory(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let plans = self.serving.memory();
        let models = plans.iter().flat_map(|(name, plan)| {
            let line = |(line, bytes): (&str, u64)| Value {
                labels: with(model(name), "line", line),
                value: bytes as f64,
            };
            plan.lines().into_iter().map(line).collect::<Vec<_>>()
        });
        let beside = self.serving.memory_beside().lines().into_iter().map(|(line, bytes)| Value {
            labels: with(model(""), "line", line),
            value: bytes as f64,
        });
        let help = "The memory plan, by model and line";
        to.gauges("memory_bytes", help, models.chain(beside).collect())?;
        let max = self.serving.memory_bytes_max() as f64;
        to.gauges("memory_bytes_max", "The budget of all models", one(max))?;
        let used = self.bytes.used() as f64;
        to.gauges("server_bytes", "Bytes that requests and answers hold now", one(used))?;
        let open = self.connections.count() as f64;
        to.gauges("connections", "Open connections", one(open))
    }

    fn generations(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let generation = |name: String| {
            let generation = self.serving.generation(&name)?;
            let labels = with(model(&name), "lineage", &generation.lineage);
            Some(Value { labels, value: generation.sequence as f64 })
        };
        let generations = self.serving.names().into_iter().filter_map(generation);
        to.gauges("generation", "The sequence that a model serves", generations.collect())
    }

    fn car(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let states = facts.updates.iter().map(|(name, status)| {
            let mut state = String::new();
            // Writing to a string does not fail.
            let _ = write!(state, "{}", status.state);
            Value { labels: with(model(name), "state", &state), value: 1.0 }
        });
        to.gauges("update_state", "The state of a model's update", states.collect())?;
        let waits = facts.updates.iter().filter_map(|(name, status)| {
            Some(Value { labels: model(name), value: status.newest? as f64 })
        });
        let help = "The newest sequence that the repository lists for this car";
        to.gauges("update_newest", help, waits.collect())?;

        let wear = |pick: fn(&WearFacts) -> u64| -> Vec<Value> {
            let of = |wear: &WearFacts| Value {
                labels: vec![("directory", wear.directory.clone())],
                value: pick(wear) as f64,
            };
            facts.wear.iter().map(of).collect()
        };
        let help = "Bytes that installs and maintenance have written to flash";
        to.counters("flash_bytes_written", help, wear(|w| w.bytes_total))?;
        let help = "Bytes that they have written today";
        to.gauges("flash_bytes_written_today", help, wear(|w| w.bytes_today))?;
        let help = "Damaged pages of the last scrub";
        to.gauges("flash_pages_listed_damaged", help, wear(|w| w.damaged))?;

        let celsius = facts.celsius.map(one).unwrap_or_default();
        to.gauges("celsius", "The hottest thermal zone", celsius)?;
        let watts = facts.watts.map(one).unwrap_or_default();
        to.gauges("watts", "The sum of the power rails", watts)?;
        let help = "What is shed: 0 nothing, 1 maintenance, 2 requests too";
        to.gauges("shed_level", help, one(facts.shed_level.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use hatchback::SystemClock;
    use std::collections::BTreeSet;

    const ALERTS: &str = include_str!("../../monitoring/alerts.yml");
    const DASHBOARD: &str = include_str!("../../monitoring/dashboard.json");

    fn metrics() -> Metrics {
        let serving = Serving::new(1 << 20, 1, Arc::new(SystemClock::default()));
        let bytes = ByteBudget::new(1, 1);
        let connections = Connections::new(1, &bytes);
        let facts = Arc::new(Mutex::new(CarFacts::default()));
        Metrics::new(Scrape { serving: Arc::new(serving), bytes, connections, facts })
    }

    /// Returns the names of metrics in `text`, without what a query adds to them.
    fn names(text: &str) -> BTreeSet<String> {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let ends = ["_total", "_bucket", "_count", "_sum"];
        let name = |rest: &str| {
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            let name = &rest[..end];
            ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name).to_owned()
        };
        text.split("hatchback_").skip(1).map(name).collect()
    }

    #[test]
    fn every_metric_of_the_dashboard_and_the_alerts_exists() {
        let metrics = metrics();
        // A metric without a value is not printed.
        metrics.model("m");
        let text = metrics.text();
        let known: BTreeSet<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# HELP hatchback_")?.split(' ').next())
            .map(str::to_owned)
            .collect();
        for (file, text) in [("alerts.yml", ALERTS), ("dashboard.json", DASHBOARD)] {
            let used = names(text);
            assert!(used.len() > 5, "{file}: {used:?}");
            let missing: Vec<_> = used.difference(&known).collect();
            assert!(missing.is_empty(), "{file}: {missing:?} are not in {known:?}");
        }
        serde_json::from_str::<serde_json::Value>(DASHBOARD).unwrap();
    }

    /// Cars share one Prometheus. `promtool test rules alerts_test.yml` runs the rules with two.
    #[test]
    fn every_rule_and_panel_compares_the_series_of_one_instance() {
        for line in ALERTS.lines() {
            assert!(!line.contains("absent("), "another car's series would silence it: {line}");
            let is_grouped = ["by (", "on ("].iter().any(|word| line.contains(word));
            assert!(!is_grouped || line.contains("(instance"), "{line}");
        }
        let summaries: Vec<&str> =
            ALERTS.lines().filter(|line| line.contains("summary:")).collect();
        assert!(summaries.iter().all(|line| line.contains("$labels.instance")), "{summaries:?}");
        let expressions: Vec<&str> =
            DASHBOARD.lines().filter(|line| line.contains("\"expr\"")).collect();
        assert!(expressions.len() > 20);
        for line in expressions {
            let series = line.matches("hatchback_").count();
            assert_eq!(line.matches("instance=~").count(), series, "{line}");
        }

        match std::process::Command::new("promtool")
            .args(["test", "rules", "alerts_test.yml"])
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/monitoring"))
            .output()
        {
            Ok(tested) => assert!(tested.status.success(), "{tested:?}"),
            Err(_) => println!("SKIPPED: the alert rules with two cars: promtool is not installed"),
        }
    }

    #[test]
    fn what_callers_send_adds_no_label() {
        let metrics = metrics();
        let problem = crate::problem::not_served("evil");
        let protocol = crate::metrics::trace::Protocol::Http;
        metrics.refuse("", protocol, &problem, std::time::Duration::ZERO);
        let text = metrics.text();
        let line = "hatchback_requests_total{model=\"\",protocol=\"http\",outcome=\"not_found\"} 1";
        assert!(text.contains(line) && !text.contains("evil"), "{text}");
    }
}
