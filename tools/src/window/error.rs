//! Why a window is refused. Every message names the file, the field and the value.

use crate::report::printable;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// The reason for which a window was refused or could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum WindowError {
    /// The system refused to read or write a file.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A field has a value that is not allowed.
    #[error("{path}: {field} is {value}, {why}", path = path.display())]
    Field { path: PathBuf, field: String, value: String, why: String },
    /// A row holds a number that is not finite.
    #[error("{path}: row {row} of table `{table}`, column {column} is {value}, not finite",
            path = path.display())]
    NotFinite { path: PathBuf, table: String, row: u64, column: usize, value: f32 },
    /// A window is missing between two others: its changes would be lost.
    #[error("{path}: window {missing} is missing, but window {found} is closed",
            path = path.display())]
    Gap { path: PathBuf, missing: u64, found: u64 },
}

impl WindowError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn field(
        path: &Path,
        field: impl Into<String>,
        value: impl Display,
        why: impl Into<String>,
    ) -> Self {
        let (field, why) = (printable(&field.into()), printable(&why.into()));
        Self::Field { path: path.to_owned(), field, value: printable(&value.to_string()), why }
    }
}
