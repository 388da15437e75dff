//! Why a table could not be imported. Every message names the file, the field and the value, so
//! that whoever runs `hatchback pack` knows where to look. An import never panics and never
//! repairs: it refuses.

use std::fmt::Display;
use std::io;
use std::path::Path;

use thiserror::Error;

/// How much of a file's own text a message repeats.
const TEXT_CHARS_MAX: usize = 300;

/// The reason for which a table was refused. All of them are for the person who packs the model.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The operating system refused: no such file, no permission, or the file shrank while it was
    /// read.
    #[error("{file}: cannot read its {field}: {source}")]
    Io {
        /// The file.
        file: String,
        /// Which part was wanted.
        field: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file is longer or shorter than its header and its neighbours say.
    #[error("{file}: size {size} {why}")]
    Size {
        /// The file.
        file: String,
        /// Its size in bytes.
        size: u64,
        /// What the size should have been, and why.
        why: String,
    },
    /// A field of a header, or of the declaration, holds something that cannot be read.
    #[error("{file}: {field} is {value}, {why}")]
    Field {
        /// The file.
        file: String,
        /// The field's name in the layout.
        field: String,
        /// What it holds.
        value: String,
        /// What it should have held.
        why: String,
    },
    /// The rows have another width than model.toml declares.
    #[error("{file}: dim is {dim}, but the table declares dim {declared}")]
    Dim {
        /// The file of the values.
        file: String,
        /// Values per row in the file.
        dim: u64,
        /// Values per row in the declaration.
        declared: u64,
    },
    /// There is not one key, or one count, for each row.
    #[error("{file}: {found} {field} for {rows} rows")]
    Rows {
        /// The file of the keys or counts.
        file: String,
        /// `keys` or `counts`.
        field: &'static str,
        /// How many there are.
        found: u64,
        /// How many rows of values there are.
        rows: u64,
    },
    /// A number in the data that no table may hold.
    #[error("{file}: row {row}, column {column} is {value}, {why}")]
    Value {
        /// The file, and the tensor where it holds several.
        file: String,
        /// The row, counted from 0 in file order.
        row: u64,
        /// The column, counted from 0.
        column: u64,
        /// The number.
        value: String,
        /// What is wrong with it.
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

/// Text that may come from a damaged or hostile file, fit for a terminal: no control characters and
/// not too long.
fn printable(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(message.len() < 2 * TEXT_CHARS_MAX + 40);
    }
}
