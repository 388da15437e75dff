//! Counters of other parts, read at each scrape: the pipelines, the memory plans, the connections,
//! and the facts of the car. Never reads a file.

use crate::connections::Connections;
use crate::connections::memory::ByteBudget;
use crate::metrics::facts::{CarFacts, WearFacts};
use hatchback::{Generation, Serving, TableCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge};
use std::fmt::Error;
use std::sync::{Arc, Mutex, PoisonError};

type Label = (&'static str, String);
/// What a family reads a value of, with the labels of the value.
type Rows<T> = Vec<(Vec<Label>, T)>;

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
    /// Writes a counter or a gauge: the `value` of each of `rows`.
    fn family<T>(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        rows: &Rows<T>,
        value: fn(&T) -> u64,
    ) -> Result<(), Error> {
        let mut encoder = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, row) in rows {
            let (mut one, value) = (encoder.encode_family(labels)?, value(row) as f64);
            match kind {
                Counter => one.encode_counter::<NoLabelSet, f64, f64>(&value, None)?,
                _ => one.encode_gauge(&value)?,
            }
        }
        Ok(())
    }

    /// Writes the gauge `value`, which has no labels, if there is one.
    fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> Result<(), Error> {
        let mut encoder = self.0.encode_descriptor(name, help, None, Gauge)?;
        // A family without labels would print empty braces.
        value.map_or(Ok(()), |value| encoder.encode_gauge(&value))
    }
}

fn model(name: &str) -> Vec<Label> {
    vec![("model", name.to_owned())]
}

fn with(name: &str, label: &'static str, value: impl ToString) -> Vec<Label> {
    vec![("model", name.to_owned()), (label, value.to_string())]
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut to = Families(encoder);
        self.pipelines(&mut to)?;
        self.tables(&mut to)?;
        self.memory(&mut to)?;
        self.car(&mut to)
    }
}

impl Scrape {
    /// Returns what `read` finds of each model that is served.
    fn models<T>(&self, read: impl Fn(&str) -> Option<T>) -> Rows<T> {
        let names = self.serving.names().into_iter();
        names.filter_map(|name| Some((model(&name), read(&name)?))).collect()
    }

    fn pipelines(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let stats = self.models(|name| self.serving.stats(name));
        let help = "Requests that a worker took";
        to.family(Counter, "pipeline_requests", help, &stats, |s| s.requests)?;
        let help = "Batches of these requests";
        to.family(Counter, "pipeline_batches", help, &stats, |s| s.batches)?;
        let help = "Requests refused for want of a slot";
        to.family(Counter, "pipeline_busy", help, &stats, |s| s.busy)?;
        let help = "Requests that a worker could not score";
        to.family(Counter, "pipeline_failed", help, &stats, |s| s.failed)?;
        let help = "Requests whose deadline passed";
        to.family(Counter, "pipeline_late", help, &stats, |s| s.expired)?;
        let help = "Requests that wait now";
        to.family(Gauge, "pipeline_waiting", help, &stats, |s| s.waiting as u64)?;
        let help = "Lookups of tables that are not resident";
        to.family(Counter, "cache_lookups", help, &stats, |s| s.counters.cached_lookups)?;
        let help = "Of these, lookups whose row was not cached";
        to.family(Counter, "cache_misses", help, &stats, |s| s.counters.missed_lookups)?;
        let help = "Pages read for requests";
        to.family(Counter, "flash_pages_read", help, &stats, |s| s.counters.pages)?;
        let help = "Of these, pages that failed their check";
        to.family(Counter, "flash_pages_damaged", help, &stats, |s| s.counters.pages_damaged)?;

        let generations = self.models(|name| self.serving.generation(name));
        let lineage = |(labels, of): (Vec<Label>, Generation)| {
            let lineage = ("lineage", of.lineage.clone());
            (labels.into_iter().chain([lineage]).collect(), of)
        };
        let generations = generations.into_iter().map(lineage).collect();
        let help = "The sequence that a model serves";
        to.family(Gauge, "generation", help, &generations, |of| of.sequence)
    }

    fn tables(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let of_model = |name: String| -> Rows<TableCounts> {
            let counts = self.serving.table_counts(&name).unwrap_or_default().into_iter();
            counts.map(|of| (with(&name, "table", &of.table), of)).collect()
        };
        let tables = self.serving.names().into_iter().flat_map(of_model).collect();
        to.family(Counter, "table_lookups", "Lookups of a table", &tables, |t| t.lookups)?;
        let help = "Rows that requests missed, each counted once a request";
        to.family(Counter, "table_misses", help, &tables, |t| t.misses)?;
        let help = "Missed rows that the miss policy or a deadline did not wait for";
        to.family(Counter, "table_defaulted", help, &tables, |t| t.defaulted)?;
        let help = "Missed rows that the table does not have";
        to.family(Counter, "table_absent", help, &tables, |t| t.absent)?;
        let help = "Missed rows whose page failed its check";
        to.family(Counter, "table_damaged", help, &tables, |t| t.damaged)?;

        let caches = self.models(|name| self.serving.cache_use(name));
        let help = "Rows that the caches have room for";
        to.family(Gauge, "cache_rows_max", help, &caches, |cache| cache.rows_max)?;
        let help = "Rows that are cached, estimated from a sample of the sets";
        to.family(Gauge, "cache_rows", help, &caches, |cache| cache.rows)
    }

    fn memory(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let plans = self.serving.memory().into_iter().map(|(name, plan)| (name, plan.lines()));
        let beside = (String::new(), self.serving.memory_beside().lines());
        let of_plan = |(name, lines): (String, Vec<(&'static str, u64)>)| -> Rows<u64> {
            lines.iter().map(|(line, bytes)| (with(&name, "line", line), *bytes)).collect()
        };
        let lines = plans.chain([beside]).flat_map(of_plan).collect();
        to.family(Gauge, "memory_bytes", "The memory plan, by model and line", &lines, |bytes| {
            *bytes
        })?;
        let max = self.serving.memory_bytes_max() as f64;
        to.gauge("memory_bytes_max", "The budget of all models", Some(max))?;
        let used = self.bytes.used() as f64;
        to.gauge("server_bytes", "Bytes that requests and answers hold now", Some(used))?;
        to.gauge("connections", "Open connections", Some(self.connections.count() as f64))
    }

    fn car(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let updates = facts.updates.iter();
        let states = updates.clone().map(|(name, of)| (with(name, "state", of.state), 1));
        to.family(
            Gauge,
            "update_state",
            "The state of a model's update",
            &states.collect(),
            |one| *one,
        )?;
        let newest = updates.filter_map(|(name, of)| Some((model(name), of.newest?)));
        let help = "The newest sequence that the repository lists for this car";
        to.family(Gauge, "update_newest", help, &newest.collect(), |newest| *newest)?;

        let of_directory = |wear: WearFacts| (vec![("directory", wear.directory.clone())], wear);
        let wear = facts.wear.into_iter().map(of_directory).collect();
        let help = "Bytes that installs and maintenance have written to flash";
        to.family(Counter, "flash_bytes_written", help, &wear, |w| w.bytes_total)?;
        let help = "Bytes that they have written today";
        to.family(Gauge, "flash_bytes_written_today", help, &wear, |w| w.bytes_today)?;
        let help = "Damaged pages of the last scrub";
        to.family(Gauge, "flash_pages_listed_damaged", help, &wear, |w| w.damaged)?;

        to.gauge("celsius", "The hottest thermal zone", facts.celsius)?;
        to.gauge("watts", "The sum of the power rails", facts.watts)?;
        let help = "What is shed: 0 nothing, 1 maintenance, 2 requests too";
        to.gauge("shed_level", help, Some(facts.shed_level.into()))
    }
}
