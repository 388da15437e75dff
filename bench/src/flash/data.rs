//! The rows that every engine of `bench flash` stores, and the requested keys. A row is a function
//! of its key, so the bench checks every answer and keeps no rows in memory. Never measures.

use anyhow::{Context, Result, ensure};
use hatchback::{mix, unmix};
use hatchback_tools::workload::key_distributions::{ALPHA, Scatter};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};

/// One row in this many changes in an update.
const CHANGED_ONE_IN: u64 = 100;
/// Clears the top bit of the exponent of each f16, so that every value is finite.
const F16_MASK: u64 = 0xbfff_bfff_bfff_bfff;

/// A table of synthetic rows. Its keys are spread over all 64-bit words. Their orders (hashes)
/// ascend with the row number, one order in each of `rows` equal ranges.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Rows in the table.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: usize,
}

impl Data {
    /// Returns the order of row `i`.
    fn order(&self, i: u64) -> u64 {
        let start = (u128::from(i) << 64) / u128::from(self.rows);
        let width = u64::MAX / self.rows;
        start as u64 + mix(i ^ 0x5eed) % width
    }

    /// Returns whether update number `update` (from 1) changes the row of this order.
    fn changes(order: u64, update: u64) -> bool {
        mix(order ^ mix(update - 1)).is_multiple_of(CHANGED_ONE_IN)
    }

    /// Writes the row of `order` to `row`: as loaded (version 0) or as that update left it.
    fn fill(order: u64, version: u64, row: &mut [u8]) {
        let seed = order ^ mix(version);
        for (i, bytes) in row.chunks_mut(8).enumerate() {
            let word = mix(seed.wrapping_add(i as u64)) & F16_MASK;
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }

    /// Calls `take` with the order and the row of every key, ascending.
    ///
    /// # Errors
    /// The errors of `take`.
    pub fn each_row(&self, take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        self.each(0, |_| true, take)
    }

    /// Calls `take` as [`Data::each_row`] does, for the rows that the first update changes, in
    /// their new version.
    ///
    /// # Errors
    /// The errors of `take`.
    pub fn each_changed(&self, take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        self.each_changed_by(1, take)
    }

    /// Calls `take` for the rows that update number `update` (from 1) changes.
    ///
    /// # Errors
    /// The errors of `take`.
    pub fn each_changed_by(
        &self,
        update: u64,
        take: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.each(update, |order| Self::changes(order, update), take)
    }

    /// Returns the number of rows that the first update changes.
    pub fn changed(&self) -> u64 {
        (0..self.rows).filter(|i| Self::changes(self.order(*i), 1)).count() as u64
    }

    fn each(
        &self,
        version: u64,
        wanted: impl Fn(u64) -> bool,
        mut take: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut row = vec![0; self.row_bytes];
        for order in (0..self.rows).map(|i| self.order(i)).filter(|o| wanted(*o)) {
            Self::fill(order, version, &mut row);
            take(order, &row)?;
        }
        Ok(())
    }

    /// Checks that `rows` are those of `keys` after `updates` updates.
    ///
    /// # Errors
    /// A row is wrong; the error has its key.
    pub fn check(&self, keys: &[u64], updates: u64, rows: &[u8]) -> Result<()> {
        ensure!(
            rows.len() == keys.len() * self.row_bytes,
            "{} bytes for {} rows",
            rows.len(),
            keys.len()
        );
        let mut expected = vec![0; self.row_bytes];
        for (key, row) in keys.iter().zip(rows.chunks_exact(self.row_bytes)) {
            let order = mix(*key);
            let newest = (1..=updates).rev().find(|update| Self::changes(order, *update));
            Self::fill(order, newest.unwrap_or(0), &mut expected);
            ensure!(row == expected, "the row of key {key:#018x} is wrong");
        }
        Ok(())
    }
}

/// Draws keys of a table.
pub struct Draw {
    data: Data,
    rng: StdRng,
    zipf: Zipf<f64>,
    scatter: Scatter,
}

impl Draw {
    /// Creates a generator. Equal seeds draw equal keys.
    ///
    /// # Errors
    /// The table has no rows.
    pub fn new(data: Data, seed: u64) -> Result<Self> {
        let zipf = Zipf::new(data.rows as f64, ALPHA).context("a table without rows")?;
        let scatter = Scatter::of_table(0, data.rows);
        Ok(Self { data, rng: StdRng::seed_from_u64(seed), zipf, scatter })
    }

    /// Returns `n` keys, all rows with equal probability.
    pub fn uniform(&mut self, n: usize) -> Vec<u64> {
        (0..n).map(|_| unmix(self.data.order(self.rng.random_range(0..self.data.rows)))).collect()
    }

    /// Returns `n` keys by Zipf's law with the exponent of NVIDIA's synthetic models.
    pub fn zipf(&mut self, n: usize) -> Vec<u64> {
        (0..n).map(|_| self.zipf_key()).collect()
    }

    /// Returns the key of a popularity rank.
    fn key(&self, rank: u64) -> u64 {
        unmix(self.data.order(self.scatter.position(rank.min(self.data.rows - 1))))
    }

    fn zipf_key(&mut self) -> u64 {
        let rank = (self.zipf.sample(&mut self.rng) as u64).max(1) - 1;
        self.key(rank)
    }

    /// Returns at most `n` distinct page numbers below `pages`, ascending.
    pub fn pages(&mut self, n: usize, pages: u32) -> Vec<u32> {
        let mut drawn: Vec<u32> = (0..n).map(|_| self.rng.random_range(0..pages.max(1))).collect();
        drawn.sort_unstable();
        drawn.dedup();
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: Data = Data { rows: 5000, row_bytes: 20 };

    #[test]
    fn orders_ascend_and_rows_are_numbers() {
        let (mut last, mut count) = (None, 0);
        DATA.each_row(|order, row| {
            ensure!(last.is_none_or(|l| l < order));
            ensure!(row.chunks(2).all(|b| half::f16::from_le_bytes([b[0], b[1]]).is_finite()));
            (last, count) = (Some(order), count + 1);
            Ok(())
        })
        .unwrap();
        assert_eq!(count, DATA.rows);
        let mut changed = 0;
        DATA.each_changed(|order, row| {
            let key = [unmix(order)];
            changed += 1;
            ensure!(DATA.check(&key, 0, row).is_err());
            DATA.check(&key, 1, row)
        })
        .unwrap();
        assert!((20..100).contains(&changed), "{changed}");
    }

    #[test]
    fn drawn_keys_are_rows_of_the_table() {
        let mut orders = std::collections::BTreeSet::new();
        DATA.each_row(|order, _| {
            ensure!(orders.insert(order));
            Ok(())
        })
        .unwrap();
        let mut draw = Draw::new(DATA, 1).unwrap();
        let (uniform, zipf) = (draw.uniform(2000), draw.zipf(2000));
        assert!(uniform.iter().chain(&zipf).all(|k| orders.contains(&mix(*k))));
        let distinct = |keys: &[u64]| keys.iter().collect::<std::collections::BTreeSet<_>>().len();
        assert!(distinct(&zipf) < distinct(&uniform));
        let pages = draw.pages(100, 50);
        assert!(pages.is_sorted_by(|a, b| a < b) && pages.iter().all(|p| *p < 50));
    }

    #[test]
    fn wrong_rows_are_refused() {
        let keys = Draw::new(DATA, 2).unwrap().uniform(2);
        assert!(DATA.check(&keys, 0, &[0; 40]).unwrap_err().to_string().contains("is wrong"));
        assert!(DATA.check(&keys, 0, &[0; 20]).is_err());
    }
}
