//! The streaming reader of every layout. Reads a table from its first row to its last, one block at
//! a time, as u64 keys and f32 values. Holds one block, never a table, and never returns a NaN or
//! an infinity.

use super::array::{Array, Layout};
use super::column::{Column, key_decoder, value_decoder};
use super::error::ImportError;

/// Bytes of a block's values at most, unless a single row takes more.
pub const BLOCK_BYTES: usize = 1 << 20;

/// A table whose headers are checked and whose rows are not read yet. Holding one proves that the
/// files have exactly the size that their headers state and that the table has at least one row of
/// the declared dim. Keys and counts, if the table has any, are
/// one a row.
#[derive(Debug)]
pub struct Rows {
    layout: Layout,
    dim: usize,
}

/// Some rows of a table, in file order. The caller reuses it from block to block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowBlock {
    /// One key a row: the stored key (a negative one as the u64 of the same bits), or the row's
    /// position in the table if the source has no keys.
    pub keys: Vec<u64>,
    /// The values, `[keys.len(), dim]`, all finite.
    pub rows: Vec<f32>,
}

/// A pass over a table, from its first row to its last.
#[derive(Debug)]
pub struct Blocks {
    keys: Option<Column<u64>>,
    values: Column<f32>,
    dim: usize,
    /// The positions in the table of the next row and of the end.
    next: u64,
    end: u64,
}

impl Rows {
    pub(super) fn new(layout: Layout, dim: usize) -> Result<Self, ImportError> {
        let values = &layout.values;
        value_decoder(values)?;
        if values.width != dim as u64 {
            let (dim, declared) = (values.width, dim as u64);
            return Err(ImportError::Dim { file: values.name.clone(), dim, declared });
        }
        check_one_a_row("keys", layout.keys.as_ref(), values.rows)?;
        check_one_a_row("counts", layout.counts.as_ref(), values.rows)?;
        Ok(Self { layout, dim })
    }

    /// Returns the number of rows: at least 1.
    pub fn rows(&self) -> u64 {
        self.layout.values.rows
    }

    /// Returns the number of values in a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Returns whether the source stores keys. If not, the key of a row is its position.
    pub fn has_keys(&self) -> bool {
        self.layout.keys.is_some()
    }

    /// Returns whether the source has counts.
    pub fn has_counts(&self) -> bool {
        self.layout.counts.is_some()
    }

    /// Starts a pass from the first row. A caller may make any number of passes.
    ///
    /// # Errors
    /// [`ImportError::Io`]: a file cannot be opened.
    pub fn blocks(&self) -> Result<Blocks, ImportError> {
        let open_keys = |array: &Array| Column::open(array, key_decoder("keys", array)?);
        let keys = self.layout.keys.as_ref().map(open_keys).transpose()?;
        let values = Column::open(&self.layout.values, value_decoder(&self.layout.values)?)?;
        Ok(Blocks { keys, values, dim: self.dim, next: 0, end: self.rows() })
    }

    /// Returns how often each row was looked up, in row order, if the source has counts. Allocates
    /// 8 bytes a row.
    ///
    /// # Errors
    /// The counts cannot be read, or one is negative.
    pub fn counts(&self) -> Result<Option<Vec<u64>>, ImportError> {
        let Some(array) = &self.layout.counts else { return Ok(None) };
        let mut column = Column::open(array, key_decoder("counts", array)?)?;
        let mut counts = Vec::new();

        while (counts.len() as u64) < array.rows {
            let left = array.rows - counts.len() as u64;
            column.read(rows_per_block(1).min(left), &mut counts)?;
        }

        check_not_negative(array, &counts)?;
        Ok(Some(counts))
    }
}

impl Blocks {
    /// Replaces the content of `block` by the next rows. Returns false and an empty block after the
    /// last row.
    ///
    /// # Errors
    /// The file cannot be read, or a value is not finite. The pass is over then, and the content of
    /// `block` is undefined.
    pub fn next(&mut self, block: &mut RowBlock) -> Result<bool, ImportError> {
        block.keys.clear();
        block.rows.clear();
        let (first, count) = (self.next, rows_per_block(self.dim).min(self.end - self.next));
        self.values.read(count, &mut block.rows)?;
        match &mut self.keys {
            Some(keys) => keys.read(count, &mut block.keys)?,
            None => block.keys.extend(first..first + count),
        }
        self.next += count;
        self.check_finite(first, &block.rows)?;
        Ok(count > 0)
    }

    fn check_finite(&self, first: u64, rows: &[f32]) -> Result<(), ImportError> {
        let Some(at) = rows.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let (row, column) = (first + (at / self.dim) as u64, (at % self.dim) as u64);
        let (value, why) = match self.values.f64_at(at) {
            Some(value) if value.is_finite() => (format!("{value:?}"), "too large for f32"),
            _ => (format!("{:?}", rows[at]), "not a finite number"),
        };
        Err(ImportError::Value { file: self.values.name.clone(), row, column, value, why })
    }
}

fn rows_per_block(dim: usize) -> u64 {
    (BLOCK_BYTES / dim.saturating_mul(size_of::<f32>()).max(1)).max(1) as u64
}

fn check_one_a_row(
    field: &'static str,
    array: Option<&Array>,
    rows: u64,
) -> Result<(), ImportError> {
    let Some(array) = array else { return Ok(()) };
    key_decoder(field, array)?;
    match array.rows == rows {
        true => Ok(()),
        false => {
            Err(ImportError::Rows { file: array.name.clone(), field, found: array.rows, rows })
        }
    }
}

fn check_not_negative(array: &Array, counts: &[u64]) -> Result<(), ImportError> {
    let negative = |count: &u64| array.dtype.is_signed_integer() && count.cast_signed() < 0;
    let Some(row) = counts.iter().position(negative) else { return Ok(()) };
    let (file, value) = (array.name.clone(), counts[row].cast_signed().to_string());
    let row = row as u64;
    Err(ImportError::Value { file, row, column: 0, value, why: "a count below 0" })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::super::array::Shape;
    use super::super::dtype::Dtype;
    use super::*;

    fn table(
        raw: &[u8],
        (rows, width): (u64, u64),
        dtype: Dtype,
    ) -> (tempfile::NamedTempFile, Array) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), raw).unwrap();
        let array = Array::to_end(file.path(), 0, Shape { rows, width }, dtype).unwrap();
        (file, array)
    }

    fn rows_of(array: &Array) -> Rows {
        let layout = Layout { values: array.clone(), keys: None, counts: None };
        Rows::new(layout, array.width as usize).unwrap()
    }

    fn le_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    fn first_error(array: &Array) -> String {
        let mut blocks = rows_of(array).blocks().unwrap();
        let mut block = RowBlock::default();
        loop {
            match blocks.next(&mut block) {
                Ok(more) => assert!(more, "no error in the whole table"),
                Err(error) => return error.to_string().replace(&array.name, "t"),
            }
        }
    }

    #[test]
    fn a_table_larger_than_a_block_comes_in_blocks_and_twice() {
        let (dim, count) = (256, 2500);
        let (_file, array) =
            table(&le_bytes((0..dim * count).map(|i| i as f32)), (count, dim), Dtype::F32);
        let rows = rows_of(&array);
        for _pass in 0..2 {
            let (mut blocks, mut block, mut next) =
                (rows.blocks().unwrap(), RowBlock::default(), 0);
            while blocks.next(&mut block).unwrap() {
                assert!(size_of_val(block.rows.as_slice()) <= BLOCK_BYTES);
                assert_eq!(block.rows[0], (next * dim) as f32);
                assert!(block.keys.iter().copied().eq(next..next + block.keys.len() as u64));
                next += block.keys.len() as u64;
            }
            assert_eq!((next, block), (count, RowBlock::default()));
            assert!(!blocks.next(&mut RowBlock::default()).unwrap());
        }
    }

    #[test]
    fn a_row_wider_than_a_block_is_read_alone() {
        let dim = BLOCK_BYTES as u64 / 4 + 1;
        let (_file, array) = table(&le_bytes((0..2 * dim).map(|i| i as f32)), (2, dim), Dtype::F32);
        let (mut blocks, mut block) = (rows_of(&array).blocks().unwrap(), RowBlock::default());
        assert!(blocks.next(&mut block).unwrap() && block.keys == [0]);
        assert!(
            blocks.next(&mut block).unwrap() && block.keys == [1] && block.rows[0] == dim as f32
        );
        assert!(!blocks.next(&mut block).unwrap());
    }

    #[test]
    fn nan_and_infinity_are_named_where_they_stand() {
        let mut values = vec![0.5; 300_000 * 2];
        values[600_001 - 2] = f32::NAN;
        let (_file, array) = table(&le_bytes(values), (300_000, 2), Dtype::F32);
        assert_eq!(first_error(&array), "t: row 299999, column 1 is NaN, not a finite number");
        let (_file, array) = table(&[0, 0, 0x80, 0xff], (1, 2), Dtype::Bf16);
        assert_eq!(first_error(&array), "t: row 0, column 1 is -inf, not a finite number");
        let (_file, array) = table(&f64::INFINITY.to_le_bytes(), (1, 1), Dtype::F64);
        assert_eq!(first_error(&array), "t: row 0, column 0 is inf, not a finite number");
    }

    #[test]
    fn a_double_too_large_for_f32_is_refused_not_made_infinite() {
        let raw: Vec<u8> =
            [1.0, -3.5e38, 2.0, 3.0].into_iter().flat_map(f64::to_le_bytes).collect();
        let (_file, array) = table(&raw, (2, 2), Dtype::F64);
        assert_eq!(first_error(&array), "t: row 0, column 1 is -3.5e38, too large for f32");
    }

    #[test]
    fn dtype_dim_and_counts_must_agree() {
        let (_file, array) = table(&[0; 48], (6, 2), Dtype::F32);
        let (_other, keys) = table(&[0xff; 40], (5, 1), Dtype::I64);
        let layout = |values: &Array, keys, counts| Layout { values: values.clone(), keys, counts };
        let refused = |layout, dim| Rows::new(layout, dim).unwrap_err();
        assert!(matches!(
            refused(layout(&array, None, None), 3),
            ImportError::Dim { dim: 2, declared: 3, .. }
        ));
        assert!(matches!(refused(layout(&array, None, None), 0), ImportError::Dim { .. }));
        let too_few = refused(layout(&array, Some(keys.clone()), None), 2);
        assert!(matches!(too_few, ImportError::Rows { field: "keys", found: 5, rows: 6, .. }));
        let too_few = refused(layout(&array, None, Some(keys.clone())), 2);
        assert!(matches!(too_few, ImportError::Rows { field: "counts", .. }));
        assert!(
            refused(layout(&keys, None, None), 1).to_string().contains("dtype of values is i64")
        );
        assert!(
            refused(layout(&array, Some(array.clone()), None), 2)
                .to_string()
                .contains("dtype of keys is f32")
        );
    }

    #[test]
    fn a_negative_count_is_refused_and_a_negative_key_is_not() {
        let (_file, values) = table(&[0; 40], (5, 2), Dtype::F32);
        let raw: Vec<u8> = [7i64, 0, -1, 3, 2].into_iter().flat_map(i64::to_le_bytes).collect();
        let (_other, keys) = table(&raw, (5, 1), Dtype::I64);
        let rows =
            Rows::new(Layout { values, keys: Some(keys.clone()), counts: Some(keys) }, 2).unwrap();
        let error = rows.counts().unwrap_err().to_string();
        assert!(error.ends_with("row 2, column 0 is -1, a count below 0"), "{error}");
        let mut block = RowBlock::default();
        assert!(rows.blocks().unwrap().next(&mut block).unwrap());
        assert_eq!(block.keys, [7, 0, u64::MAX, 3, 2]);
    }

    #[test]
    fn a_file_that_shrinks_after_it_was_checked_is_an_error() {
        let (file, array) = table(&[0; 48], (6, 2), Dtype::F32);
        let rows = rows_of(&array);
        std::fs::write(file.path(), [0; 47]).unwrap();
        let error = rows.blocks().unwrap().next(&mut RowBlock::default()).unwrap_err();
        assert!(
            matches!(&error, ImportError::Io { file: name, .. } if Path::new(name) == file.path())
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_are_either_finite_values_or_an_error(
            raw in prop::collection::vec(any::<u8>(), 1..400),
        ) {
            for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
                let whole = &raw[..raw.len() - raw.len() % dtype.size() as usize];
                if whole.is_empty() { continue; }
                let (_file, array) = table(whole, (whole.len() as u64 / dtype.size(), 1), dtype);
                let mut block = RowBlock::default();
                if rows_of(&array).blocks().unwrap().next(&mut block).is_ok() {
                    prop_assert!(block.rows.iter().all(|value| value.is_finite()));
                    prop_assert_eq!(block.rows.len(), block.keys.len());
                }
            }
        }
    }
}
