//! Sorts the rows of a table into segment order in bounded memory. It spills rows to partitions by
//! the top bits of their order, then sorts each partition alone. Never changes a row.

use crate::limits::SORT_PARTITIONS_MAX;
use anyhow::{Context, Result, bail};
use hatchback::schema::KeySpace;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};

/// Size of a partition, which is sorted in memory.
const PARTITION_BYTES: u64 = 64 << 20;

/// A sort of rows into segment order.
pub struct RowSorter {
    keys: KeySpace,
    table_rows: u64,
    row_bytes: usize,
    partitions: Vec<BufWriter<File>>,
}

impl RowSorter {
    /// Returns a sorter for `rows` rows of `row_bytes` bytes each. They are some or all of the
    /// `table_rows` rows of a table with this key space.
    ///
    /// # Errors
    /// The temporary files cannot be created.
    pub fn new(keys: KeySpace, table_rows: u64, rows: u64, row_bytes: usize) -> Result<Self> {
        let bytes = rows.saturating_mul(row_bytes as u64 + 8);
        let n = bytes.div_ceil(PARTITION_BYTES).clamp(1, SORT_PARTITIONS_MAX);
        let partition = || Ok(BufWriter::with_capacity(1 << 16, tempfile::tempfile()?));
        let partitions =
            (0..n).map(|_| partition()).collect::<Result<_>>().context("a temporary file")?;
        Ok(Self { keys, table_rows, row_bytes, partitions })
    }

    /// Adds a row.
    ///
    /// # Errors
    /// The key is not in `0..table_rows` of an index table, or the temporary file cannot be
    /// written.
    pub fn push(&mut self, key: u64, row: &[u8]) -> Result<()> {
        let order = u128::from(self.keys.order(key));
        let span = match self.keys {
            KeySpace::Index if key >= self.table_rows => {
                bail!("key {key} is not in 0..{}, the rows of this `index` table", self.table_rows)
            }
            KeySpace::Index => u128::from(self.table_rows),
            KeySpace::Sparse => 1 << 64,
        };
        let partition = (order * self.partitions.len() as u128 / span) as usize;
        let out = &mut self.partitions[partition];
        out.write_all(&key.to_le_bytes())?;
        Ok(out.write_all(row)?)
    }

    /// Passes all rows to `take`, in segment order.
    ///
    /// # Errors
    /// Two rows have the same key, or `take` fails.
    pub fn finish(self, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        for partition in self.partitions {
            let mut file = partition.into_inner().map_err(std::io::IntoInnerError::into_error)?;
            file.seek(SeekFrom::Start(0))?;
            let mut records = Vec::new();
            BufReader::new(file).read_to_end(&mut records)?;

            let record =
                |i: &u32| &records[*i as usize * (8 + self.row_bytes)..][..8 + self.row_bytes];
            let mut order: Vec<(u64, u32)> = (0..(records.len() / (8 + self.row_bytes)) as u32)
                .map(|i| (self.keys.order(key_of(record(&i))), i))
                .collect();
            order.sort_unstable();

            if let Some(twice) = order.windows(2).find(|w| w[0].0 == w[1].0) {
                bail!("key {} occurs twice", key_of(record(&twice[0].1)));
            }

            for (_, i) in &order {
                take(key_of(record(i)), &record(i)[8..])?;
            }
        }
        Ok(())
    }
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
        let mut sorter = RowSorter::new(keys, input.len() as u64, input.len() as u64, 3)?;
        // Several partitions, as a table of several GB has.
        sorter.partitions = (0..5).map(|_| BufWriter::new(tempfile::tempfile().unwrap())).collect();
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
