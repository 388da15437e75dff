//! The lookups for a plan: those of a log of samples, or draws from the counts of the files in a
//! `model.toml`. Passes each request on immediately, and keeps only a few samples of a log.

use crate::pack::spec::ModelSpec;
use crate::plan::simulate::{Curve, Lookup};
use crate::report::input;
use anyhow::{Context, Result, ensure};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Schema};
use hatchback::{RowKey, mix};
use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Samples of a log that are kept, to be served later.
const KEPT_SAMPLES: usize = 2000;
/// Requests that a plan needs.
const REQUESTS_MIN: u64 = 1000;
/// Rows that are told apart to see whether a log is too short.
const ROWS_MAX: usize = 1 << 20;
/// Draws for each row that training used, and the fewest and the most draws of all.
const DRAWS_PER_ROW: u64 = 16;
const DRAWS_MIN: u64 = 2_000_000;
const DRAWS_MAX: u64 = 60_000_000;

/// How a stream becomes requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamRules {
    /// Samples of a request.
    pub batch: usize,
    /// Per cent of the stream that only warms the caches up.
    pub warm_up_percent: u64,
}

/// The samples of a log that are served later, and what its length says about a plan.
pub struct Log {
    /// The first samples.
    pub samples: Vec<Sample>,
    /// Requests.
    requests: u64,
    /// Lookups of cached tables.
    lookups: u64,
    /// Rows that these looked up, as far as they are counted.
    rows: HashSet<RowKey>,
}

impl Log {
    fn count(&mut self, lookups: &[Lookup]) {
        self.requests += 1;
        if self.rows.len() < ROWS_MAX {
            self.lookups += lookups.len() as u64;
            self.rows.extend(lookups.iter().map(|lookup| lookup.row));
        }
    }

    /// Returns why no plan follows from a log as short as this; `None` if it is long enough.
    pub fn too_short(&self) -> Option<String> {
        let (requests, lookups, rows) = (self.requests, self.lookups, self.rows.len() as u64);
        if requests < REQUESTS_MIN {
            return Some(format!("it has {requests} requests, a plan needs {REQUESTS_MIN}"));
        }
        let problem = || format!("{rows} of its {lookups} lookups are the first of their row");
        // Of a log with more rows than are counted, the first lookups say nothing.
        (rows > lookups / 2 && self.rows.len() < ROWS_MAX).then(problem)
    }
}

/// Passes every request of the samples in the file `log` to `curve`.
///
/// # Errors
/// The file cannot be read, or a line is not a sample of the model; the error names the line.
pub fn read_log(log: &Path, schema: &Schema, rules: StreamRules, curve: &mut Curve) -> Result<Log> {
    let shown = || log.display().to_string();
    let file = input::open(log).with_context(shown)?;
    let warm_up = file.metadata().with_context(shown)?.len() / 100 * rules.warm_up_percent;
    let (mut lookups, mut samples, mut bytes) = (Vec::new(), 0, 0);
    let mut read = Log { samples: Vec::new(), requests: 0, lookups: 0, rows: HashSet::new() };
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let at = || format!("{}:{number}", log.display());
        let line = line.with_context(at)?;
        bytes += line.len() as u64 + 1;
        if line.trim().is_empty() {
            continue;
        }
        let sample = Sample::from_json(&line, schema).with_context(at)?;
        push_lookups(schema, &sample, curve, &mut lookups);
        samples += 1;
        if samples % rules.batch == 0 {
            curve.request(&lookups, bytes > warm_up);
            read.count(&lookups);
            lookups.clear();
        }
        if read.samples.len() < KEPT_SAMPLES {
            read.samples.push(sample);
        }
    }
    ensure!(samples > 0, "{}: has no sample", log.display());
    if !lookups.is_empty() {
        curve.request(&lookups, true);
        read.count(&lookups);
    }
    Ok(read)
}

/// Adds the lookups of cached tables.
fn push_lookups(schema: &Schema, sample: &Sample, curve: &Curve, lookups: &mut Vec<Lookup>) {
    for declared in schema.lookups.iter().filter(|declared| curve.is_cached(declared.table)) {
        let table = &schema.tables[usize::from(declared.table)];
        let keys = &sample.sparse[usize::from(declared.feature)];
        lookups.extend(keys.iter().map(|&key| Lookup {
            is_present: table.keys == KeySpace::Sparse || key < table.rows,
            row: RowKey { table: declared.table, key },
        }));
    }
}

/// The rows of a table that were used, with the sum of the counts up to each.
struct CountedRows {
    keys: Vec<u64>,
    sums: Vec<u64>,
}

impl CountedRows {
    fn total(&self) -> u64 {
        self.sums.last().copied().unwrap_or_default()
    }

    fn draw(&self, random: u64) -> u64 {
        let at = ((u128::from(random) * u128::from(self.total())) >> 64) as u64;
        self.keys[self.sums.partition_point(|sum| *sum <= at)]
    }
}

/// Draws requests from the counts of the model.toml at `spec`, and passes them to `curve`. Each key
/// is drawn with the probability of its count, independently of earlier draws.
///
/// # Errors
/// The file or a table's source is refused, or a table that would be cached has no counts.
pub fn draw_counts(
    spec: &Path,
    schema: &Schema,
    rules: StreamRules,
    curve: &mut Curve,
) -> Result<()> {
    let tables = read_counts(spec, schema, curve)?;
    let rows: u64 = tables.iter().flatten().map(|table| table.keys.len() as u64).sum();
    let is_cached = |l: &usize| curve.is_cached(schema.lookups[*l].table);
    // Of each lookup its table and the keys of its longest bag.
    let declared: Vec<(u16, u64)> = (0..schema.lookups.len())
        .filter(is_cached)
        .map(|l| (schema.lookups[l].table, schema.feature_of(l).hotness_max.into()))
        .collect();
    // The counts of all tables come from the same samples, so their ratios are those of the bag
    // lengths. A feature that few samples have makes the other bags too long, so the schema bounds
    // them.
    let sharing = |table: u16| declared.iter().filter(|of| of.0 == table).count().max(1) as u64;
    let per_lookup = |table: u16| {
        let total = tables[usize::from(table)].as_ref().map_or(0, CountedRows::total);
        (total / sharing(table)).max(1)
    };
    let least = declared.iter().map(|&(table, _)| per_lookup(table)).min().unwrap_or(1);
    let bag_of = |&(table, hotness_max): &(u16, u64)| (per_lookup(table) / least).min(hotness_max);
    let bags: Vec<u64> = declared.iter().map(bag_of).collect();
    let in_request = bags.iter().sum::<u64>().max(1) * rules.batch as u64;
    // At least one request is counted, however large it is, and one before it warms the caches up.
    let draws = (DRAWS_PER_ROW.saturating_mul(rows)).clamp(DRAWS_MIN, DRAWS_MAX);
    let requests = (draws / in_request).max(2);
    let warm_up = requests * rules.warm_up_percent / 100;
    let warm_up = if rules.warm_up_percent > 0 { warm_up.max(1) } else { 0 };

    let (mut random, mut lookups) = (0, Vec::new());
    for request in 0..requests {
        lookups.clear();
        for _ in 0..rules.batch {
            for (&(table, _), &bag) in declared.iter().zip(&bags) {
                let Some(rows) = &tables[usize::from(table)] else { continue };
                for _ in 0..bag {
                    random += 1;
                    let row = RowKey { table, key: rows.draw(mix(random)) };
                    lookups.push(Lookup { is_present: true, row });
                }
            }
        }
        curve.request(&lookups, request >= warm_up);
    }
    Ok(())
}

/// Reads the counts of each table that is cached.
fn read_counts(path: &Path, schema: &Schema, curve: &Curve) -> Result<Vec<Option<CountedRows>>> {
    let spec = ModelSpec::load(path)?;
    let base = path.parent().unwrap_or(Path::new("."));
    let mut tables = Vec::new();
    for (number, table) in schema.tables.iter().enumerate() {
        if !curve.is_cached(number as u16) {
            tables.push(None);
            continue;
        }
        let place = || format!("{}: table `{}`", path.display(), table.name);
        let source = spec.tables.iter().find(|of| of.name == table.name).with_context(place)?;
        let rows = source.source.open(base, source.dim).with_context(place)?;
        let counts = rows.counts()?.with_context(|| format!("{}: has no counts", place()))?;
        let (mut counted, mut at, mut sum) =
            (CountedRows { keys: Vec::new(), sums: Vec::new() }, 0, 0);
        crate::import::RowSource::each_block(&rows, &mut |keys, _| {
            for (key, count) in keys.iter().zip(&counts[at..]).filter(|(_, count)| **count > 0) {
                sum = count.checked_add(sum).with_context(|| {
                    format!("{}: key {key}: the counts add up to 2^64 or more", place())
                })?;
                counted.keys.push(*key);
                counted.sums.push(sum);
            }
            at += keys.len();
            Ok(())
        })?;
        ensure!(sum > 0, "{}: every count is 0", place());
        tables.push(Some(counted));
    }
    Ok(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is said of a log whose requests look up `keys` of each.
    fn said(requests: u64, keys: impl Fn(u64) -> u64) -> Option<String> {
        let mut log = Log { samples: Vec::new(), requests: 0, lookups: 0, rows: HashSet::new() };
        for request in 0..requests {
            let row = RowKey { table: 0, key: keys(request) };
            log.count(&[Lookup { is_present: true, row }]);
        }
        log.too_short()
    }

    #[test]
    fn a_log_of_few_requests_or_of_new_rows_is_too_short() {
        assert!(said(10, |i| i).unwrap().contains("it has 10 requests, a plan needs 1000"));
        assert!(said(1500, |i| i).unwrap().contains("1500 of its 1500 lookups are the first"));
        assert_eq!(said(1500, |i| i % 700), None);
    }
}
