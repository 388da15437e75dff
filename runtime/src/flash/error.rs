//! Why a flash directory cannot be used, or why a bundle cannot be installed into one.

use crate::bundle::BundleError;
use crate::bundle::manifest::{Generation, ManifestError};
use crate::flash::segment::SegmentError;
use crate::io::disk::{is_damage, is_full};
use crate::io::field_error::FieldError;
use crate::io::paired_record::CopyError;
use crate::schema::probe_set::ProbeError;
use hatchback_kernels::dense::DenseError;
use std::io;
use std::path::{Path, PathBuf};

/// Free space that an install leaves for records, folders and the file system.
pub(super) const SPARE_BYTES: u64 = 1 << 20;

/// The error of a flash directory or of an install. The live generation is unchanged.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum FlashError {
    /// The system refused to read or write a file.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The bundle is not valid.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A segment, in the bundle or on flash, is not valid.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// No copy of the live record can be used.
    #[error("{path}: {problem}", path = path.display())]
    Live { path: PathBuf, problem: String },
    /// The parent of the offered delta, the live generation, is damaged. Only a snapshot replaces
    /// it.
    #[error("the live generation is damaged, so only a snapshot can follow it: {0}")]
    Base(Box<FlashError>),
    /// A manifest on flash is not valid.
    #[error("{path}: {source}", path = path.display())]
    Manifest { path: PathBuf, source: ManifestError },
    /// The probe set does not decode.
    #[error("{path}: {source}", path = path.display())]
    Probe { path: PathBuf, source: ProbeError },
    /// The dense network does not load or does not fit the schema.
    #[error("{path}: {source}", path = path.display())]
    Dense { path: PathBuf, source: DenseError },
    /// A field of a file on flash is not valid.
    #[error(transparent)]
    Field(FieldError),
    /// The bundle is of another model than the live one.
    #[error("{path}: holds {live}, the bundle is {offered}", path = path.display())]
    Lineage { path: PathBuf, live: Generation, offered: Generation },
    /// The bundle is not newer than the live generation. A downgrade is published as a new release
    /// with a higher sequence.
    #[error(
        "{path}: {live} is live with other content; {offered} needs a higher sequence",
        path = path.display()
    )]
    NotNewer { path: PathBuf, live: Generation, offered: Generation },
    /// The bundle is a delta from a generation that is not live.
    #[error("{path}: is a delta from sequence {parent}, {live} is live", path = path.display())]
    Parent { path: PathBuf, parent: u64, live: String },
    /// The bundle is a delta, and a table that it changes has [`crate::limits::DELTAS_MAX`] deltas.
    /// Nothing was written. A merge of the deltas makes room. A snapshot replaces all deltas.
    #[error(
        "{path}: table `{table}` takes no further delta before maintenance merges those it has",
        path = path.display()
    )]
    Full { path: PathBuf, table: String },
    /// A table of a delta does not match the live table.
    #[error(
        "{path}: table `{table}`: {field} differs from the live generation's",
        path = path.display()
    )]
    Schema { path: PathBuf, table: String, field: &'static str },
    /// The live generation is older than the one that was served here: it is a step of a rebuild.
    #[error(
        "{path}: {live} is not served: sequence {least} was damaged and is being rebuilt from it",
        path = path.display()
    )]
    Rebuilding { path: PathBuf, live: Generation, least: u64 },
    /// Another process changes the directory and holds the lock at `path`. Nothing was changed.
    #[error(
        "{path}: another process is changing the directory; try again later",
        path = path.display()
    )]
    Busy { path: PathBuf },
    /// A reader without the lock found another live record after each read.
    #[error("the directory changed each time while it was read; try again")]
    Changing,
    /// The file system has too little room. Nothing was written.
    #[error(
        "{path}: {needed} bytes are needed and {free} are free; make room on this file system",
        path = path.display()
    )]
    Space { path: PathBuf, needed: u64, free: u64 },
}

debug_as_display!(FlashError);

impl From<CopyError> for FlashError {
    fn from(CopyError { path, source }: CopyError) -> Self {
        Self::Io { path, source }
    }
}

impl FlashError {
    /// Returns whether a file of the flash directory is missing, damaged or of another kind. Other
    /// errors may be temporary.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_damage(source),
            Self::Segment(e) => e.is_damage(),
            Self::Live { .. }
            | Self::Base(_)
            | Self::Manifest { .. }
            | Self::Probe { .. }
            | Self::Field(_) => true,
            _ => false,
        }
    }

    /// Returns the bytes that the file system lacks; `None` for another error. An install may need
    /// fewer, if it can remove a generation.
    pub(crate) fn missing_bytes(&self) -> Option<u64> {
        match self {
            Self::Space { needed, free, .. } => Some(needed.saturating_sub(*free)),
            Self::Io { source, .. } if is_full(source) => Some(SPARE_BYTES),
            _ => None,
        }
    }

    /// Returns the error for `field` of the file at `path`.
    pub(crate) fn field(path: &Path, field: &str, problem: impl Into<String>) -> Self {
        Self::Field(FieldError::new(path, field, problem))
    }
}

/// Returns a function that adds `path` to an error of the system.
pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> FlashError + '_ {
    move |source| FlashError::Io { path: path.to_owned(), source }
}
