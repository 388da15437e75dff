//! The error that bundles, segments and flash directories share for one wrong field of a file.

use std::path::{Path, PathBuf};

/// A field of a file has a value that is not allowed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {field}: {problem}", path = path.display())]
#[allow(missing_docs)]
pub struct FieldError {
    pub path: PathBuf,
    pub field: String,
    /// The value and what is wrong with it.
    pub problem: String,
}

impl FieldError {
    /// Returns the error for `field` of the file at `path`.
    pub fn new(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), field: field.into(), problem: problem.into() }
    }
}
