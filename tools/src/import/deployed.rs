//! A table of an HPS repository whose keys count up from 0, as the deployment of NVIDIA's DLRM and
//! DCNv2 recipe writes it. That deployment pads short tables with rows of zeros, and may put all
//! tables one after the other into one folder. So a table is a range of the keys, and the key of a
//! row becomes its position in the range. Reads the keys to check them, and never reads a row.

use super::array::{Array, Layout};
use super::column::{Column, key_decoder};
use super::error::ImportError;
use super::hugectr;
use std::path::Path;

/// Keys that are checked at a time.
const BLOCK_KEYS: u64 = 1 << 16;

/// Opens the rows whose keys are `first` and up, `rows` of them or all.
pub(super) fn open(folder: &Path, first: u64, rows: Option<u64>) -> Result<Layout, ImportError> {
    let Layout { values, keys, counts } = hugectr::open(folder)?;
    let left = values.rows.saturating_sub(first);
    let taken = rows.unwrap_or(left);
    if taken == 0 || taken > left {
        let (field, value) = match rows {
            Some(rows) if left > 0 => ("rows", rows),
            _ => ("first", first),
        };
        let why =
            format!("but the folder has {} rows, and the table begins at {first}", values.rows);
        return Err(ImportError::field(folder, field, value, why));
    }

    let range = |array: Array| Array {
        start: array.start + first * array.width * array.dtype.size(),
        rows: taken,
        ..array
    };
    if let Some(keys) = keys.map(range) {
        check_keys(&keys, first)?;
    }
    Ok(Layout { values: range(values), keys: None, counts: counts.map(range) })
}

/// Checks that the keys are `first`, `first + 1` and so on.
fn check_keys(keys: &Array, first: u64) -> Result<(), ImportError> {
    let mut column = Column::open(keys, key_decoder("keys", keys)?)?;
    let (mut row, mut block) = (0, Vec::new());
    while row < keys.rows {
        block.clear();
        column.read(BLOCK_KEYS.min(keys.rows - row), &mut block)?;
        for key in &block {
            if *key != first + row {
                let (file, value) = (keys.name.clone(), key.to_string());
                let why = "the keys of a deployed table count up by one";
                return Err(ImportError::Value { file, row: first + row, column: 0, value, why });
            }
            row += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::rows::RowBlock;
    use super::super::source::Source;
    use std::path::Path;

    /// Writes a folder of rows of two values, which are the key and its double.
    fn folder(keys: &[i64]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        std::fs::write(folder.path().join("key"), bytes).unwrap();
        let row = |key: &i64| [*key as f32, 2.0 * *key as f32];
        let rows: Vec<u8> = keys.iter().flat_map(row).flat_map(f32::to_le_bytes).collect();
        std::fs::write(folder.path().join("emb_vector"), rows).unwrap();
        folder
    }

    fn read(folder: &Path, first: u64, rows: Option<u64>) -> Result<RowBlock, String> {
        let source = Source::Deployed { path: folder.to_owned(), first, rows };
        let open = source.open(Path::new("/"), 2).map_err(|e| e.to_string())?;
        assert!(!open.has_keys());
        let mut block = RowBlock::default();
        open.blocks().unwrap().next(&mut block).map_err(|e| e.to_string())?;
        Ok(block)
    }

    #[test]
    fn a_range_of_the_keys_is_a_table_of_its_own() {
        let folder = folder(&(0..100).collect::<Vec<_>>());
        let block = read(folder.path(), 40, Some(3)).unwrap();
        assert_eq!(block.keys, [0, 1, 2]);
        assert_eq!(block.rows, [40.0, 80.0, 41.0, 82.0, 42.0, 84.0]);
        assert_eq!(read(folder.path(), 0, None).unwrap().keys.len(), 100);
        assert_eq!(read(folder.path(), 98, None).unwrap().rows, [98.0, 196.0, 99.0, 198.0]);
    }

    #[test]
    fn ranges_and_keys_that_do_not_fit_are_refused_by_name() {
        let good = folder(&[0, 1, 2, 3]);
        let refused = |first, rows, what: &str| {
            let error = read(good.path(), first, rows).unwrap_err();
            assert!(error.contains(what), "{error}");
        };
        refused(4, None, "first is 4, but the folder has 4 rows");
        refused(u64::MAX, Some(1), "first is 18446744073709551615");
        refused(2, Some(3), "rows is 3, but the folder has 4 rows, and the table begins at 2");
        refused(0, Some(0), "rows is 0");

        let hashed = folder(&[0, 1, 7, 3]);
        let error = read(hashed.path(), 1, None).unwrap_err();
        assert!(error.contains("key: row 2, column 0 is 7, the keys of a deployed"), "{error}");
        assert!(read(hashed.path(), 3, Some(1)).is_ok());
    }
}
