//! A typed array inside a file: where its bytes are, and their number type. Every layout consists
//! of one to three arrays. Checks sizes; never reads the array.

use std::path::{Path, PathBuf};

use super::dtype::Dtype;
use super::error::ImportError;
use super::head::file_size;

/// An array `[rows, width]` of numbers in C order. Holding one proves that all its bytes were in
/// the file when its layout was read. Only a part of an array may be empty.
#[derive(Clone, Debug)]
pub(super) struct Array {
    pub(super) file: PathBuf,
    /// For messages: the file and, if the file has several arrays, the array's own name.
    pub(super) name: String,
    /// Offset of the array's first byte in the file.
    pub(super) start: u64,
    pub(super) rows: u64,
    /// Numbers in a row; 1 for keys and counts.
    pub(super) width: u64,
    pub(super) dtype: Dtype,
}

/// The size of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) rows: u64,
    /// Numbers in a row.
    pub(super) width: u64,
}

/// The arrays of one table.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) values: Array,
    pub(super) keys: Option<Array>,
    pub(super) counts: Option<Array>,
}

impl Array {
    /// Returns the array of this shape that fills `file` from `start` to exactly its end. A file
    /// without rows is refused, because it may be a copy that was cut off.
    pub(super) fn to_end(
        file: &Path,
        start: u64,
        shape: Shape,
        dtype: Dtype,
    ) -> Result<Self, ImportError> {
        if shape.rows == 0 {
            return Err(Self::empty(file, shape));
        }
        Self::of_shape(file, start, shape, dtype)
    }

    fn empty(file: &Path, Shape { rows, width }: Shape) -> ImportError {
        ImportError::field(file, "shape", format!("[{rows}, {width}]"), "an empty table")
    }

    /// Returns the array of this shape, which the file itself states, like [`Array::to_end`]. It
    /// may have no rows: the table then grows by deltas.
    pub(super) fn of_shape(
        file: &Path,
        start: u64,
        shape: Shape,
        dtype: Dtype,
    ) -> Result<Self, ImportError> {
        let Shape { rows, width } = shape;
        let (size, each) = (file_size(file)?, dtype.size());

        let end = rows
            .checked_mul(width)
            .and_then(|n| n.checked_mul(each))
            .and_then(|n| n.checked_add(start));

        if width == 0 {
            return Err(Self::empty(file, shape));
        }
        if end != Some(size) {
            let why =
                format!("is not{} {rows} rows x {width} {dtype} of {each} bytes", header(start));
            return Err(ImportError::size(file, size, why));
        }
        Ok(Self { file: file.into(), name: file.display().to_string(), start, rows, width, dtype })
    }

    /// Returns the array of one number a row from `start` to the end of `file`.
    pub(super) fn column(file: &Path, start: u64, dtype: Dtype) -> Result<Self, ImportError> {
        let (rest, each) = (rest(file, start)?, dtype.size());
        if rest % each != 0 {
            let why = format!("is not{} a multiple of {each} (one {dtype} a row)", header(start));
            return Err(ImportError::size(file, start + rest, why));
        }
        Self::to_end(file, start, Shape { rows: rest / each, width: 1 }, dtype)
    }

    /// Returns the array of `rows` rows from `start` to the end of `file`.
    pub(super) fn matrix(
        file: &Path,
        start: u64,
        rows: u64,
        dtype: Dtype,
    ) -> Result<Self, ImportError> {
        let (rest, column) = (rest(file, start)?, rows.saturating_mul(dtype.size()));
        if rest.checked_rem(column) != Some(0) {
            let why = format!(
                "is not{} a multiple of {column} ({rows} rows of {dtype} values)",
                header(start)
            );
            return Err(ImportError::size(file, start + rest, why));
        }
        Self::to_end(file, start, Shape { rows, width: rest / column }, dtype)
    }
}

fn header(start: u64) -> String {
    if start == 0 { String::new() } else { format!(" {start} of header +") }
}

/// Returns rows and width if a shape has `rank` axes.
pub(super) fn rows_and_width(rank: usize, shape: &[u64]) -> Option<Shape> {
    match (rank, shape) {
        (1, &[rows]) => Some(Shape { rows, width: 1 }),
        (2, &[rows, width]) => Some(Shape { rows, width }),
        _ => None,
    }
}

fn rest(file: &Path, start: u64) -> Result<u64, ImportError> {
    let size = file_size(file)?;
    size.checked_sub(start)
        .ok_or_else(|| ImportError::size(file, size, format!("is less than its header of {start}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(size: usize) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![0; size]).unwrap();
        file
    }

    fn message<T>(result: Result<T, ImportError>, file: &tempfile::NamedTempFile) -> String {
        let message = result.err().unwrap().to_string();
        message.strip_prefix(&format!("{}: ", file.path().display())).unwrap().to_owned()
    }

    #[test]
    fn sizes_are_exact() {
        let file = file_of(120);
        assert!(Array::to_end(file.path(), 20, Shape { rows: 5, width: 5 }, Dtype::F32).is_ok());
        for (rows, width) in [(5, 4), (5, 6), (u64::MAX, 2), (u64::MAX / 4, 4), (1 << 62, 1)] {
            let shape = Shape { rows, width };
            let refused = message(Array::to_end(file.path(), 20, shape, Dtype::F32), &file);
            assert!(refused.starts_with("size 120 is not 20 of header +"), "{refused}");
        }
    }

    #[test]
    fn empty_arrays_are_refused() {
        let file = file_of(16);
        for (rows, width) in [(0, 4), (4, 0), (0, 0)] {
            let shape = Shape { rows, width };
            assert!(
                message(Array::to_end(file.path(), 16, shape, Dtype::F32), &file)
                    .contains("an empty table")
            );
        }
        assert!(
            message(Array::column(file.path(), 16, Dtype::I64), &file).contains("an empty table")
        );
        assert!(
            message(Array::matrix(file.path(), 16, 4, Dtype::F32), &file)
                .contains("an empty table")
        );
        assert!(
            message(Array::matrix(file.path(), 16, 0, Dtype::F32), &file).contains("multiple of 0")
        );
    }

    #[test]
    fn a_size_that_does_not_divide_says_what_it_should_divide_by() {
        let file = file_of(1001);
        let keys = message(Array::column(file.path(), 0, Dtype::I64), &file);
        assert_eq!(keys, "size 1001 is not a multiple of 8 (one i64 a row)");
        let values = message(Array::matrix(file.path(), 1, 3, Dtype::F32), &file);
        assert_eq!(
            values,
            "size 1001 is not 1 of header + a multiple of 12 (3 rows of f32 values)"
        );
        let short = message(Array::column(file.path(), 1002, Dtype::I64), &file);
        assert_eq!(short, "size 1001 is less than its header of 1002");
    }
}
