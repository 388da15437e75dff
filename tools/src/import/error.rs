//! The reasons for which an import refuses a table. Every message names the file, the field and the
//! value, for the user of `hatchback pack`.

use std::fmt::Display;
use std::io;
use std::path::Path;

use thiserror::Error;

use crate::report::printable;

/// The reason for which a table was refused.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ImportError {
    /// The file cannot be read: it is missing, access is denied, or it shrank during the import.
    #[error("{file}: cannot read its {field}: {source}")]
    Io {
        file: String,
        /// The part of the file that was read.
        field: &'static str,
        source: io::Error,
    },
    /// A file is longer or shorter than its header and the table's other files demand.
    #[error("{file}: size {size} {why}")]
    Size {
        file: String,
        /// Size of the file in bytes.
        size: u64,
        /// The size that is expected, with the reason.
        why: String,
    },
    /// A field of a header or of model.toml has a value that is not allowed.
    #[error("{file}: {field} is {value}, {why}")]
    Field {
        file: String,
        /// Name of the field in the layout.
        field: String,
        value: String,
        /// The value that is expected.
        why: String,
    },
    /// The width of the rows differs from the `dim` of model.toml.
    #[error("{file}: dim is {dim}, but the table declares dim {declared}")]
    Dim {
        file: String,
        /// Values in a row of the file.
        dim: u64,
        /// Values in a row according to model.toml.
        declared: u64,
    },
    /// The number of keys or counts differs from the number of rows.
    #[error("{file}: {found} {field} for {rows} rows")]
    Rows {
        file: String,
        /// `keys` or `counts`.
        field: &'static str,
        /// Number of keys or counts.
        found: u64,
        /// Number of rows.
        rows: u64,
    },
    /// The data contain a number that a table must not contain.
    #[error("{file}: row {row}, column {column} is {value}, {why}")]
    Value {
        /// The file and, if the file has several, the tensor.
        file: String,
        /// The row, counted from 0 in file order.
        row: u64,
        /// The column, counted from 0.
        column: u64,
        value: String,
        why: &'static str,
    },
}

impl ImportError {
    pub(super) fn io(path: &Path, field: &'static str, source: io::Error) -> Self {
        Self::Io { file: path.display().to_string(), field, source }
    }

    pub(super) fn size(path: &Path, size: u64, why: impl Into<String>) -> Self {
        Self::Size { file: path.display().to_string(), size, why: why.into() }
    }

    pub(super) fn field(
        path: &Path,
        field: impl Into<String>,
        value: impl Display,
        why: impl Into<String>,
    ) -> Self {
        let file = path.display().to_string();
        let (value, why) = (printable(&value.to_string()), printable(&why.into()));
        Self::Field { file, field: field.into(), value, why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MESSAGE_CHARS_MAX;

    #[test]
    fn messages_name_file_field_and_value() {
        let path = Path::new("tables/key");
        let size = ImportError::size(path, 1001, "is not a multiple of 8 (one i64 key a row)");
        assert_eq!(
            size.to_string(),
            "tables/key: size 1001 is not a multiple of 8 (one i64 key a row)"
        );
        let field = ImportError::field(path, "key type", 7, "not 0 (u32) or 1 (i64)");
        assert_eq!(field.to_string(), "tables/key: key type is 7, not 0 (u32) or 1 (i64)");
        let dim = ImportError::Dim { file: "a.npy".into(), dim: 5, declared: 4 };
        assert_eq!(dim.to_string(), "a.npy: dim is 5, but the table declares dim 4");
        let io = ImportError::io(path, "keys", io::ErrorKind::NotFound.into());
        assert_eq!(io.to_string(), "tables/key: cannot read its keys: entity not found");
    }

    #[test]
    fn control_characters_of_a_file_never_reach_the_terminal() {
        let long = format!("\u{1b}[2J{}", "x".repeat(1000));
        let message =
            ImportError::field(Path::new("a.npy"), "header", &long, long.clone()).to_string();
        assert!(
            message.starts_with("a.npy: header is \u{fffd}[2Jxx") && !message.contains('\u{1b}')
        );
        assert!(message.len() < 2 * MESSAGE_CHARS_MAX + 40);
    }
}
