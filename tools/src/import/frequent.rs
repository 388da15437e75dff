//! The rows of a table that training used often enough. Holds one bit a row beside the counts of
//! the rows that stay; never holds a row.

use crate::import::{RowSource, TakeBlock};
use anyhow::{Context, Result};

/// A source without its rare rows. A key whose row was left out is absent from the model.
pub struct FrequentRows<S> {
    source: S,
    stays: Vec<bool>,
    counts: Vec<u64>,
}

impl<S: RowSource> FrequentRows<S> {
    /// Leaves out the rows that training used less than `min_count` times.
    ///
    /// # Errors
    /// The source has no counts, or they cannot be read.
    pub fn new(source: S, min_count: u64) -> Result<Self> {
        let counts = source.counts()?.context("--min-count needs `counts` in the source")?;
        let stays: Vec<bool> = counts.iter().map(|count| *count >= min_count).collect();
        let counts: Vec<u64> = counts.into_iter().filter(|count| *count >= min_count).collect();
        Ok(Self { source, stays, counts })
    }

    /// Returns the number of rows that are left out.
    pub fn left_out(&self) -> u64 {
        (self.stays.len() - self.counts.len()) as u64
    }
}

impl<S: RowSource> RowSource for FrequentRows<S> {
    fn rows(&self) -> u64 {
        self.counts.len() as u64
    }

    /// A row's position is no longer its key, because rows before it may be left out.
    fn has_keys(&self) -> bool {
        true
    }

    fn counts(&self) -> Result<Option<Vec<u64>>> {
        Ok(Some(self.counts.clone()))
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let (mut at, mut kept_keys, mut kept_rows) = (0, Vec::new(), Vec::new());
        self.source.each_block(&mut |keys, rows| {
            kept_keys.clear();
            kept_rows.clear();
            let dim = rows.len() / keys.len().max(1);
            for (key, row) in keys.iter().zip(rows.chunks_exact(dim.max(1))) {
                if self.stays[at] {
                    kept_keys.push(*key);
                    kept_rows.extend_from_slice(row);
                }
                at += 1;
            }
            if kept_keys.is_empty() { Ok(()) } else { take(&kept_keys, &kept_rows) }
        })
    }
}
