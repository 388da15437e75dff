//! Counters of other parts, read at each scrape: the pipelines, the memory plans, the connections,
//! and the facts of the car. Never reads a file.

use crate::connections::Connections;
use crate::connections::memory::ByteBudget;
use crate::metrics::facts::{CarFacts, WearFacts};
use hatchback::locks::lock;
use hatchback::request::worker::Counters;
use hatchback::{CacheUse, Served, Serving, Stats, TableCounts, UpdateStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge};
use std::fmt::Error;
use std::sync::{Arc, Mutex};

type Label = (&'static str, String);
/// What a family reads a value of, with the labels of the value.
type Rows<T> = Vec<(Vec<Label>, T)>;
/// A family: its kind, its name, its help, and how it reads a value.
type Family<T> = (MetricType, &'static str, &'static str, fn(&T) -> u64);

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

/// The families of a pipeline.
const PIPELINE: [Family<Stats>; 6] = [
    (Counter, "pipeline_requests", "Requests that a worker took", |s| s.requests),
    (Counter, "pipeline_batches", "Batches of these requests", |s| s.batches),
    (Counter, "pipeline_busy", "Requests refused for want of a slot", |s| s.busy),
    (Counter, "pipeline_failed", "Requests that a worker could not score", |s| s.failed),
    (Counter, "pipeline_expired", "Requests whose deadline passed", |s| s.expired),
    (Gauge, "pipeline_waiting", "Requests that wait now", |s| s.waiting as u64),
];

/// The families of its workers' lookups.
const LOOKUPS: [Family<Counters>; 4] = [
    (Counter, "cache_lookups", "Lookups of tables that are not resident", |c| c.cached_lookups),
    (Counter, "cache_misses", "Of these, lookups whose row was not cached", |c| c.missed_lookups),
    (Counter, "flash_pages_read", "Pages read for requests", |c| c.pages),
    (Counter, "flash_pages_damaged", "Of these, pages that failed a check", |c| c.pages_damaged),
];

/// The families of a table. Of the missed rows, each is counted once a request.
const TABLE: [Family<TableCounts>; 5] = [
    (Counter, "table_lookups", "Lookups of a table", |t| t.lookups),
    (Counter, "table_misses", "Rows that requests missed, each once a request", |t| t.misses),
    (Counter, "table_defaulted", "Missed rows that no request waited for", |t| t.defaulted),
    (Counter, "table_absent", "Missed rows that the table does not have", |t| t.absent),
    (Counter, "table_damaged", "Missed rows whose page failed its check", |t| t.damaged),
];

/// The families of the caches of a model.
const CACHES: [Family<CacheUse>; 2] = [
    (Gauge, "cache_rows_max", "Rows that the caches have room for", |c| c.rows_max),
    (Gauge, "cache_rows", "Rows that are cached, estimated from a sample of the sets", |c| c.rows),
];

/// The families of a flash directory.
const WEAR: [Family<WearFacts>; 3] = [
    (Counter, "flash_bytes_written", "Bytes of installs and maintenance", |w| w.bytes_total),
    (Gauge, "flash_bytes_written_today", "Bytes that they have written today", |w| w.bytes_today),
    (Gauge, "flash_pages_listed_damaged", "Damaged pages of the last scrub", |w| w.damaged),
];

/// Writes families of values.
pub struct Families<'a>(pub DescriptorEncoder<'a>);

impl Families<'_> {
    /// Writes `families`: of each, its value in each of `rows`.
    pub fn each<T>(&mut self, rows: &Rows<T>, families: &[Family<T>]) -> Result<(), Error> {
        for (kind, name, help, value) in families {
            let mut encoder = self.0.encode_descriptor(name, help, None, *kind)?;
            for (labels, row) in rows {
                write(encoder.encode_family(labels)?, *kind, value(row) as f64)?;
            }
        }
        Ok(())
    }

    /// Writes a family without labels: its `value`, if there is one.
    pub fn one(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        value: Option<f64>,
    ) -> Result<(), Error> {
        let encoder = self.0.encode_descriptor(name, help, None, kind)?;
        value.map_or(Ok(()), |value| write(encoder, kind, value))
    }
}

fn write(mut to: MetricEncoder<'_>, kind: MetricType, value: f64) -> Result<(), Error> {
    match kind {
        Counter => to.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        _ => to.encode_gauge(&value),
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
    fn models<T>(&self, read: impl Fn(&Served) -> Option<T>) -> Rows<T> {
        let models = self.serving.served().into_iter();
        models.filter_map(|served| Some((model(served.name()), read(&served)?))).collect()
    }

    fn pipelines(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let stats = self.models(Served::stats);
        to.each(&stats, &PIPELINE)?;
        to.each(&stats.into_iter().map(|(labels, of)| (labels, of.counters)).collect(), &LOOKUPS)?;
        to.each(&self.models(|served| served.model()?.cache_use()), &CACHES)?;
        let generations = self.serving.served().into_iter().filter_map(|served| {
            let generation = Arc::clone(served.model()?.generation());
            Some((with(served.name(), "lineage", &generation.lineage), generation.sequence))
        });
        to.each(
            &generations.collect(),
            &[(Gauge, "generation", "The sequence that a model serves", |n| *n)],
        )
    }

    fn tables(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let of_model = |served: Arc<Served>| -> Rows<TableCounts> {
            let counts = served.table_counts().into_iter();
            counts.map(|of| (with(served.name(), "table", &of.table), of)).collect()
        };
        to.each(&self.serving.served().into_iter().flat_map(of_model).collect(), &TABLE)
    }

    fn memory(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let plans = self.serving.memory().into_iter().map(|(name, plan)| (name, plan.lines()));
        let beside = (String::new(), self.serving.memory_beside().lines());
        let of_plan = |(name, lines): (String, Vec<(&'static str, u64)>)| -> Rows<u64> {
            lines.iter().map(|(line, bytes)| (with(&name, "line", line), *bytes)).collect()
        };
        let lines = plans.chain([beside]).flat_map(of_plan).collect();
        let help = "The memory plan, by model and line";
        to.each(&lines, &[(Gauge, "memory_bytes", help, |bytes| *bytes)])?;
        let max = self.serving.memory_bytes_max() as f64;
        to.one(Gauge, "memory_bytes_max", "The budget of all models", Some(max))?;
        let (help, used) = ("Bytes that requests and answers hold now", self.bytes.used() as f64);
        to.one(Gauge, "server_bytes", help, Some(used))?;
        to.one(Gauge, "connections", "Open connections", Some(self.connections.count() as f64))
    }

    fn car(&self, to: &mut Families<'_>) -> Result<(), Error> {
        let CarFacts { updates, wear, celsius, watts, shed_level } = lock(&self.facts).clone();
        let state = |(name, of): &(String, UpdateStatus)| (with(name, "state", of.state), 1);
        let states = updates.iter().map(state).collect();
        to.each(&states, &[(Gauge, "update_state", "The state of a model's update", |one| *one)])?;
        let newest = updates.iter().filter_map(|(name, of)| Some((model(name), of.newest?)));
        let help = "The newest sequence that the repository lists for this car";
        to.each(&newest.collect(), &[(Gauge, "update_newest", help, |newest| *newest)])?;

        let of_directory = |wear: WearFacts| (vec![("directory", wear.directory.clone())], wear);
        to.each(&wear.into_iter().map(of_directory).collect(), &WEAR)?;
        to.one(Gauge, "celsius", "The hottest thermal zone", celsius)?;
        to.one(Gauge, "watts", "The sum of the power rails", watts)?;
        let help = "What is shed: 0 nothing, 1 maintenance, 2 requests too";
        to.one(Gauge, "shed_level", help, Some(shed_level.into()))
    }
}
