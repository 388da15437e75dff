//! Sorts the rows of a table into segment order in bounded memory. It spills rows to partitions by
//! the top bits of their order, then sorts each partition alone. It splits a partition that is too
//! large for memory again. Never changes a row.

use crate::limits::SORT_PARTITIONS_MAX;
use anyhow::{Context, Result, bail};
use hatchback::schema::KeySpace;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;

/// Size of a partition. One of up to twice this size is sorted in memory.
const PARTITION_BYTES: u64 = 64 << 20;

/// A sort of rows into segment order.
pub struct RowSorter {
    rules: SortRules,
    table_rows: u64,
    partitions: Partitions,
}

/// What the sort needs to know of the rows.
struct SortRules {
    keys: KeySpace,
    row_bytes: usize,
    partition_bytes: u64,
}

impl RowSorter {
    /// Returns a sorter for `rows` rows of `row_bytes` bytes each. They are some or all of the
    /// `table_rows` rows of a table with this key space.
    ///
    /// # Errors
    /// The temporary files cannot be created.
    pub fn new(keys: KeySpace, table_rows: u64, rows: u64, row_bytes: usize) -> Result<Self> {
        Self::with_partitions_of(PARTITION_BYTES, keys, table_rows, rows, row_bytes)
    }

    fn with_partitions_of(
        partition_bytes: u64,
        keys: KeySpace,
        table_rows: u64,
        rows: u64,
        row_bytes: usize,
    ) -> Result<Self> {
        let orders = match keys {
            KeySpace::Index => 0..u128::from(table_rows),
            KeySpace::Sparse => 0..1 << 64,
        };
        let count = rows.saturating_mul(row_bytes as u64 + 8).div_ceil(partition_bytes);
        let partitions = Partitions::new(orders, count)?;
        Ok(Self { rules: SortRules { keys, row_bytes, partition_bytes }, table_rows, partitions })
    }

    /// Adds a row.
    ///
    /// # Errors
    /// The key is not in `0..table_rows` of an index table, or the temporary file cannot be
    /// written.
    pub fn push(&mut self, key: u64, row: &[u8]) -> Result<()> {
        let keys = self.rules.keys;
        if keys == KeySpace::Index && key >= self.table_rows {
            bail!("key {key} is not in 0..{}, the rows of this `index` table", self.table_rows)
        }
        let out = self.partitions.file_for(keys.order(key));
        out.write_all(&key.to_le_bytes()).and_then(|()| out.write_all(row)).with_context(named)
    }

    /// Passes all rows to `take`, in segment order.
    ///
    /// # Errors
    /// Two rows have the same key, a temporary file cannot be written or read, or `take` fails.
    pub fn finish(self, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        self.rules.each_row(self.partitions, &mut take)
    }
}

impl SortRules {
    /// Passes all rows of `partitions` to `take`, in segment order.
    fn each_row(
        &self,
        partitions: Partitions,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        for Partition { file, lowest, highest } in partitions.files {
            let file = file.into_inner().map_err(std::io::IntoInnerError::into_error);
            let mut file = file.with_context(named)?;
            let bytes = file.stream_position()?;
            file.seek(SeekFrom::Start(0))?;
            if bytes <= 2 * self.partition_bytes {
                self.sort(file, take)?;
                continue;
            }
            // The keys are not spread evenly over the table: these rows are a range of it.
            let orders = u128::from(lowest)..u128::from(highest) + 1;
            let split = self.split(orders, bytes, file)?;
            self.each_row(split, take)?;
        }
        Ok(())
    }

    /// Spreads the rows of `file`, whose orders are in `orders`, over smaller partitions.
    fn split(&self, orders: Range<u128>, bytes: u64, file: File) -> Result<Partitions> {
        let is_one_key = orders.end - orders.start == 1;
        let mut split = Partitions::new(orders, bytes.div_ceil(self.partition_bytes))?;
        let (mut record, mut rows) = (vec![0; 8 + self.row_bytes], BufReader::new(file));
        for _ in 0..bytes / record.len() as u64 {
            rows.read_exact(&mut record)?;
            if is_one_key {
                bail!("key {} occurs twice", key_of(&record));
            }
            split
                .file_for(self.keys.order(key_of(&record)))
                .write_all(&record)
                .with_context(named)?;
        }
        Ok(split)
    }

    /// Sorts the rows of `file` in memory and passes them to `take`.
    fn sort(&self, mut file: File, take: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let mut records = Vec::new();
        file.read_to_end(&mut records)?;

        let record = |i: &u32| &records[*i as usize * (8 + self.row_bytes)..][..8 + self.row_bytes];
        let mut order: Vec<(u64, u32)> = (0..(records.len() / (8 + self.row_bytes)) as u32)
            .map(|i| (self.keys.order(key_of(record(&i))), i))
            .collect();
        order.sort_unstable();

        if let Some(twice) = order.windows(2).find(|w| w[0].0 == w[1].0) {
            bail!("key {} occurs twice", key_of(record(&twice[0].1)));
        }
        order.iter().try_for_each(|(_, i)| take(key_of(record(i)), &record(i)[8..]))
    }
}

/// Temporary files, each for an equal part of a range of orders.
struct Partitions {
    orders: Range<u128>,
    files: Vec<Partition>,
}

struct Partition {
    file: BufWriter<File>,
    /// The lowest and the highest order of its rows.
    lowest: u64,
    highest: u64,
}

impl Partitions {
    fn new(orders: Range<u128>, count: u64) -> Result<Self> {
        let partition = || {
            let file = BufWriter::with_capacity(1 << 16, tempfile::tempfile()?);
            Ok(Partition { file, lowest: u64::MAX, highest: 0 })
        };
        let count = count.clamp(1, SORT_PARTITIONS_MAX);
        let files = (0..count).map(|_| partition()).collect::<Result<_>>();
        Ok(Self { orders, files: files.with_context(named)? })
    }

    /// Returns the file for a row of this order.
    fn file_for(&mut self, order: u64) -> &mut BufWriter<File> {
        let Range { start, end } = self.orders;
        let at = (u128::from(order) - start) * self.files.len() as u128 / (end - start);
        let partition = &mut self.files[at as usize];
        partition.lowest = partition.lowest.min(order);
        partition.highest = partition.highest.max(order);
        &mut partition.file
    }
}

/// Returns where the temporary files are, which may be another file system than that of the bundle.
fn named() -> String {
    format!("{}: a temporary file (TMPDIR)", std::env::temp_dir().display())
}

fn key_of(record: &[u8]) -> u64 {
    let mut key = [0; 8];
    key.copy_from_slice(&record[..8]);
    u64::from_le_bytes(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::mix;

    fn sorted(keys: KeySpace, input: &[u64]) -> Result<Vec<u64>> {
        sorted_of(keys, input.len() as u64, input)
    }

    /// Sorts with several partitions, as a table of several GB has.
    fn sorted_of(keys: KeySpace, table_rows: u64, input: &[u64]) -> Result<Vec<u64>> {
        let rows = input.len() as u64;
        let mut sorter = RowSorter::with_partitions_of(rows * 11 / 5, keys, table_rows, rows, 3)?;
        for key in input {
            sorter.push(*key, &[*key as u8; 3])?;
        }
        let mut out = Vec::new();
        sorter.finish(|key, row| {
            assert_eq!(row, [key as u8; 3]);
            out.push(key);
            Ok(())
        })?;
        Ok(out)
    }

    #[test]
    fn orders_across_partitions() {
        let scattered: Vec<u64> = (0..1000u64).map(|i| i * 7919 % 1000).collect();
        assert_eq!(sorted(KeySpace::Index, &scattered).unwrap(), (0..1000).collect::<Vec<_>>());
        let sparse: Vec<u64> = scattered.iter().map(|k| k << 40 | k).collect();
        let out = sorted(KeySpace::Sparse, &sparse).unwrap();
        assert!(out.is_sorted_by_key(|k| mix(*k)) && out.len() == 1000);
    }

    #[test]
    fn splits_partitions_that_are_too_large() {
        // Every key is in a small part of the table, as in a range of a table with ascending keys.
        let input: Vec<u64> = (0..1000).map(|i| 700_000_000 + i * 7919 % 1000).collect();
        let expected: Vec<u64> = (700_000_000..700_001_000).collect();
        assert_eq!(sorted_of(KeySpace::Index, 1 << 40, &input).unwrap(), expected);

        let mut twice = input;
        twice.extend(vec![700_000_500; 1000]);
        let said = |keys| sorted_of(keys, 1 << 40, &twice).unwrap_err().to_string();
        assert_eq!(said(KeySpace::Index), "key 700000500 occurs twice");
        assert_eq!(said(KeySpace::Sparse), "key 700000500 occurs twice");
    }

    #[test]
    fn refuses_wrong_keys() {
        assert!(sorted(KeySpace::Index, &[0, 3, 1]).unwrap_err().to_string().contains("key 3"));
        assert!(
            sorted(KeySpace::Index, &[0, 1, 1])
                .unwrap_err()
                .to_string()
                .contains("key 1 occurs twice")
        );
        assert!(
            sorted(KeySpace::Sparse, &[9, 1, 9])
                .unwrap_err()
                .to_string()
                .contains("key 9 occurs twice")
        );
    }
}
