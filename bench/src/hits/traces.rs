//! Streams of lookups: synthetic ones, which are the same on every machine and in every version,
//! and real ones from files. Never reads or writes rows.

use anyhow::{Context, Result, ensure};
use hatchback::{RowKey, mix};
use hatchback_tools::workload::synthetic::CARDINALITIES;
use std::collections::HashMap;
use std::path::Path;

/// A stream of lookups. Row numbers run on from table to table.
pub struct Trace {
    /// Name in tables and JSON.
    pub name: String,
    /// Rows of each table.
    pub tables: Vec<usize>,
    /// Row number of each lookup, in order.
    pub lookups: Vec<u32>,
    /// Number of lookups at the start that only warm the cache up.
    pub warm_up: usize,
}

impl Trace {
    /// Returns the rows of all tables.
    pub fn rows(&self) -> usize {
        self.tables.iter().sum()
    }

    /// Returns the table and key of every row, by row number.
    pub fn row_keys(&self) -> Vec<RowKey> {
        let rows = self.tables.iter().zip(0..);
        rows.flat_map(|(&n, table)| (0..n as u64).map(move |key| RowKey { table, key })).collect()
    }
}

/// Random numbers that are the same on every machine (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

/// Draws rank `k` of `n` with a frequency proportional to `(k + 1)^-exponent`. The weights are
/// integers, so the result does not depend on how a machine rounds.
struct ZipfRanks(Vec<u64>);

impl ZipfRanks {
    fn new(n: usize, exponent: f64) -> Self {
        let weight =
            |k: usize| (((k + 1) as f64).powf(-exponent) * (1u64 << 40) as f64).round() as u64;
        let sum = |sum: &mut u64, k| {
            *sum += weight(k).max(1);
            Some(*sum)
        };
        Self((0..n).scan(0, sum).collect())
    }

    fn draw(&self, random: &mut Random) -> usize {
        let at = random.below(self.0.last().copied().unwrap_or(0) as usize) as u64;
        self.0.partition_point(|&up_to| up_to <= at)
    }
}

/// Lookups of a synthetic stream; the first half warms up.
const LOOKUPS: usize = 4_000_000;
/// Rows of a synthetic stream.
const ROWS: usize = 200_000;

/// Returns a stream over one table.
fn one_table(name: &str, lookup: impl FnMut() -> usize) -> Trace {
    let lookups = std::iter::repeat_with(lookup).map(|row| row as u32).take(LOOKUPS).collect();
    Trace { name: name.to_owned(), tables: vec![ROWS], lookups, warm_up: LOOKUPS / 2 }
}

/// Returns a stream by a power law that does not change.
pub fn zipf(exponent: f64) -> Trace {
    let (zipf, mut random) = (ZipfRanks::new(ROWS, exponent), Random(1));
    one_table(&format!("Zipf {exponent}"), || zipf.draw(&mut random))
}

/// Returns a stream by a power law that drifts: once in 1000 lookups a popular row and any other
/// row swap ranks.
pub fn drifting() -> Trace {
    let (zipf, mut random, mut n) = (ZipfRanks::new(ROWS, 1.05), Random(2), 0);
    let mut place: Vec<usize> = (0..ROWS).collect();
    one_table("drifting", || {
        n += 1;
        if n % 1000 == 0 {
            place.swap(zipf.draw(&mut random), random.below(ROWS));
        }
        place[zipf.draw(&mut random)]
    })
}

/// Returns a stream by a power law that a scan of a tenth of all rows interrupts once in 200,000
/// lookups.
pub fn scanning() -> Trace {
    let (zipf, mut random, mut n) = (ZipfRanks::new(ROWS, 1.05), Random(3), 0);
    one_table("scanning", || {
        n += 1;
        let (pass, at) = (n / 200_000, n % 200_000);
        if at < ROWS / 10 { (pass * (ROWS / 10) + at) % ROWS } else { zipf.draw(&mut random) }
    })
}

/// Returns a stream of sessions of 200 lookups: half of them on eight rows of the session's driver,
/// half on shared rows by a power law.
pub fn sessions() -> Trace {
    const OWN: usize = 8;
    const DRIVERS: usize = 5000;
    let (zipf, mut random) = (ZipfRanks::new(ROWS - OWN * DRIVERS, 1.05), Random(4));
    let (mut n, mut driver) = (0, 0);
    one_table("sessions", || {
        if n % 200 == 0 {
            driver = random.below(DRIVERS);
        }
        n += 1;
        if n % 2 == 0 {
            driver * OWN + random.below(OWN)
        } else {
            OWN * DRIVERS + zipf.draw(&mut random)
        }
    })
}

/// Returns a stream of requests with one key of each of 26 tables. The tables have the sizes of
/// Criteo's, divided by 190.
pub fn criteo_tables() -> Trace {
    let tables: Vec<usize> =
        CARDINALITIES.iter().map(|&rows| (rows / 190).max(3) as usize).collect();
    let mut random = Random(5);
    let mut first = 0;
    let zipfs: Vec<(usize, ZipfRanks)> = tables
        .iter()
        .map(|&rows| {
            first += rows;
            (first - rows, ZipfRanks::new(rows, 1.05))
        })
        .collect();
    let requests = LOOKUPS / tables.len();
    let request = |_| {
        zipfs
            .iter()
            .map(|(first, zipf)| (first + zipf.draw(&mut random)) as u32)
            .collect::<Vec<_>>()
    };
    let lookups: Vec<u32> = (0..requests).flat_map(request).collect();
    Trace { name: "26 tables".to_owned(), warm_up: lookups.len() / 2, tables, lookups }
}

/// Returns a stream over the fields `columns` of a CSV file, row by row. Each column is a table of
/// its distinct values. The caches start cold.
///
/// # Errors
/// The file cannot be read, or a column is missing.
pub fn csv(path: &Path, columns: &[String]) -> Result<Trace> {
    let shown = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(shown)?;
    let mut lines = text.lines();
    let heads: Vec<&str> = lines.next().with_context(shown)?.split(',').collect();
    let at = |column: &String| {
        let at = heads.iter().position(|head| head == column);
        at.with_context(|| format!("{}: no column `{column}`", shown()))
    };
    let at = columns.iter().map(at).collect::<Result<Vec<_>>>()?;
    ensure!(!at.is_empty(), "{}: --columns is empty", shown());

    let mut values: Vec<HashMap<&str, usize>> = vec![HashMap::new(); at.len()];
    let mut keys = Vec::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        for (values, &at) in values.iter_mut().zip(&at) {
            let field = fields
                .get(at)
                .with_context(|| format!("{}: a line without field {at}", shown()))?;
            let next = values.len();
            keys.push(*values.entry(field).or_insert(next));
        }
    }

    let tables: Vec<usize> = values.iter().map(HashMap::len).collect();
    let firsts: Vec<usize> = tables
        .iter()
        .scan(0, |first, rows| {
            *first += rows;
            Some(*first - rows)
        })
        .collect();
    let row = |(n, key): (usize, &usize)| (firsts[n % at.len()] + key) as u32;
    let name = path.file_stem().map_or_else(shown, |stem| stem.to_string_lossy().into_owned());
    Ok(Trace { name, tables, lookups: keys.iter().enumerate().map(row).collect(), warm_up: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_law_has_its_shares() {
        let trace = zipf(1.05);
        let share =
            |k: u32| trace.lookups.iter().filter(|&&r| r < k).count() as f64 / LOOKUPS as f64;
        // Sums of k^-1.05 by another program.
        for (below, expected) in [(1, 0.10291), (100, 0.48350), (10_000, 0.81935)] {
            assert!((share(below) - expected).abs() < 2e-3, "{below}: {}", share(below));
        }
        assert!(trace.lookups.iter().all(|&r| (r as usize) < ROWS));
    }

    #[test]
    fn rows_are_numbered_through() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "x,y,z\n1,a,0\n2,a,0\n1,b,0\n").unwrap();
        let columns = ["z", "x", "y"].map(str::to_owned);
        let trace = csv(&path, &columns).unwrap();
        assert_eq!((trace.name.as_str(), &trace.tables[..]), ("a", &[1, 2, 2][..]));
        assert_eq!(trace.lookups, [0, 1, 3, 0, 2, 3, 0, 1, 4]);
        assert_eq!(trace.row_keys()[4], RowKey { table: 2, key: 1 });
        assert!(csv(&path, &["w".to_owned()]).err().unwrap().to_string().contains("no column `w`"));
    }

    #[test]
    fn tables_get_a_key_each() {
        let trace = criteo_tables();
        let keys = trace.row_keys();
        assert!(
            trace
                .lookups
                .chunks(26)
                .take(1000)
                .all(|r| r.iter().zip(0..).all(|(r, t)| keys[*r as usize].table == t))
        );
    }
}
