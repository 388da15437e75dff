//! Why a segment cannot be read or must not be used.

use crate::io::disk::is_damage;
use crate::io::field_error::FieldError;
use crate::io::page::PageFault;
use hatchback_kernels::cache::codec::RowFault;
use std::io;
use std::path::{Path, PathBuf};

/// The error of a segment.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SegmentError {
    /// The system refused to read or write the file.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A page is damaged, misplaced or not in order.
    #[error("{path}: page {page}: {source}", path = path.display())]
    Page { path: PathBuf, page: u32, source: PageFault },
    /// A row decodes to a value that is not a finite number.
    #[error("{path}: page {page}: row {row}: {source}", path = path.display())]
    Row { path: PathBuf, page: u32, row: usize, source: RowFault },
    /// The segment is not the one that the manifest describes.
    #[error(transparent)]
    Field(FieldError),
}

impl SegmentError {
    /// Returns whether the file is missing, damaged or of another kind. Other errors may be
    /// temporary.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_damage(source),
            _ => true,
        }
    }

    /// Returns the error for `field` of the segment at `path`.
    pub(crate) fn field(path: &Path, field: &str, problem: impl Into<String>) -> Self {
        Self::Field(FieldError::new(path, field, problem))
    }
}
