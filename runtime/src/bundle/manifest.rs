//! The manifest of a bundle: the generation, the schema, and the chunks of every blob with their
//! hashes. The encoding is a format number, then postcard. `decode` returns no manifest that fails
//! `check`.

use crate::limits::{
    CHUNK_BYTES, DELTA_PAGES_MAX, DELTAS_MAX, DENSE_BYTES_MAX, MANIFEST_BYTES_MAX, PAGE_BYTES,
    PROBE_BYTES_MAX,
};
use crate::schema::{KeySpace, Schema, SchemaError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The format of manifests.
pub const MANIFEST_FORMAT: u32 = 1;

/// A SHA-256 hash.
pub type Hash = [u8; 32];

/// Returns the SHA-256 of `bytes`.
pub fn sha256(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// Returns the hexadecimal digits of `hash`, or of a part of a hash.
pub fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of one consistent state of a model: dense network, tables and schema together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    /// The name of the model.
    pub lineage: String,
    /// The release's number, which grows with every release of the lineage.
    pub sequence: u64,
}

impl Generation {
    /// Checks that the lineage is a name.
    ///
    /// # Errors
    /// A text with the refused name and the characters that a name may have.
    pub fn check(&self) -> Result<(), String> {
        let printable = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let fits = (1..=crate::limits::NAME_BYTES_MAX).contains(&self.lineage.len());
        if fits && self.lineage.chars().all(printable) && !self.lineage.starts_with('.') {
            return Ok(());
        }
        let name = self.lineage.escape_debug();
        Err(format!("`{name}` is not 1..=120 of [A-Za-z0-9._-], or begins with a dot"))
    }
}

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.lineage, self.sequence)
    }
}

/// A piece of a blob as the bundle stores it. It is compressed (zstd) if and only if `stored` is
/// less than `raw`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Bytes in the bundle.
    pub stored: u32,
    /// Bytes of uncompressed content.
    pub raw: u32,
    /// SHA-256 of the stored bytes.
    pub sha256: Hash,
}

/// A byte string cut into chunks. The bundle stores the chunks of all blobs in manifest order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// SHA-256 of the whole content. Each read from flash checks the content against it.
    pub sha256: Hash,
    /// The chunks in order.
    pub chunks: Vec<Chunk>,
}

impl Blob {
    /// Returns the bytes of uncompressed content.
    pub fn raw_bytes(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.raw)).sum()
    }

    /// Returns the bytes in the bundle.
    pub fn stored_bytes(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.stored)).sum()
    }
}

/// The numbers of the blobs of one table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableBlobs {
    /// The segment with the table's rows: a base or a delta.
    pub segment: u32,
    /// The hot list: the most used keys, most used first (u64, little-endian).
    pub hot: Option<u32>,
    /// Whether the segment of a delta is a base, because the parent has no such table.
    pub whole: bool,
}

/// The changes that a delta within a budget of bytes left for a later delta.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Deferral {
    /// The trainer's newest window in the delta.
    pub window: u64,
    /// The trainer's step of that window.
    pub step: u64,
    /// Changes that wait for a later delta.
    pub rows: u64,
    /// The window since which the oldest of these waits.
    pub since: Option<u64>,
    /// The largest distance of a waiting row to the row that the fleet holds.
    pub distance_max: f32,
}

/// A segment of a table, as a bundle brings it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The sequence of the release that first brought the segment: the one in its pages' headers.
    pub sequence: u64,
    /// The number of its blob.
    pub segment: u32,
    /// Rows of the table with this segment and those before it.
    pub rows: u64,
}

/// The origin of a snapshot that restores an earlier release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The sequence of the earlier release.
    pub sequence: u64,
    /// The segments of each table: its base, then its deltas from the oldest.
    pub tables: Vec<Vec<Layer>>,
}

/// The content of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The generation that the bundle brings.
    pub generation: Generation,
    /// The sequence that a delta starts from; `None` for a snapshot.
    pub parent: Option<u64>,
    /// SHA-256 of the manifest of the generation that a delta was packed on: `publish` notes if
    /// that was not published. `None` for a snapshot, and for what `publish` makes itself.
    pub packed_on: Option<Hash>,
    /// The tables, features and network inputs of the model.
    pub schema: Schema,
    /// All blobs, in file order.
    pub blobs: Vec<Blob>,
    /// The blobs of each table.
    pub tables: Vec<TableBlobs>,
    /// The number of the blob with the ONNX file.
    pub dense: u32,
    /// The number of the blob with the probe set.
    pub probe: Option<u32>,
    /// The changes left for a later delta; `None` unless `select` made this one.
    pub deferral: Option<Deferral>,
    /// Where the content comes from; `None` unless `publish --restore` made this release.
    pub restored: Option<Restored>,
}

/// Why a manifest is not valid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The format number is unknown.
    #[error("format: {0} is not {MANIFEST_FORMAT}, the one that this version reads")]
    Format(u32),
    /// The bytes do not decode.
    #[error("does not decode ({0})")]
    Decode(String),
    /// The schema is not consistent.
    #[error("schema: {0}")]
    Schema(#[from] SchemaError),
    /// A field has a value that is not allowed.
    #[error("{field}: {problem}")]
    #[allow(missing_docs)]
    Field { field: String, problem: String },
}

fn fault<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, ManifestError> {
    Err(ManifestError::Field { field: field.into(), problem: problem.into() })
}

impl Manifest {
    /// Encodes the manifest: the format number, then postcard.
    ///
    /// # Errors
    /// [`ManifestError::Decode`] if postcard refuses the manifest.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        let mut bytes = MANIFEST_FORMAT.to_le_bytes().to_vec();
        bytes.extend(postcard::to_allocvec(self).map_err(refused)?);
        Ok(bytes)
    }

    /// Decodes and checks a manifest.
    ///
    /// # Errors
    /// [`ManifestError`] if the bytes are not a manifest of this format or if fields contradict
    /// each other.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let Some((format, body)) = bytes.split_first_chunk::<4>() else {
            return fault("format", format!("{} bytes are too few", bytes.len()));
        };
        let format = u32::from_le_bytes(*format);
        if format != MANIFEST_FORMAT {
            return Err(ManifestError::Format(format));
        }
        if bytes.len() > MANIFEST_BYTES_MAX {
            return fault("length", format!("{} bytes, over {MANIFEST_BYTES_MAX}", bytes.len()));
        }

        let (manifest, rest): (Self, &[u8]) = postcard::take_from_bytes(body).map_err(refused)?;
        if !rest.is_empty() {
            return fault("length", format!("{} bytes follow the manifest", rest.len()));
        }
        manifest.check()?;
        Ok(manifest)
    }

    /// Returns the segments that the bundle brings of table `number`, oldest first: one, but for a
    /// restored release.
    pub fn layers(&self, number: usize) -> Vec<Layer> {
        let (segment, rows) = (self.tables[number].segment, self.schema.tables[number].rows);
        let own = || vec![Layer { sequence: self.generation.sequence, segment, rows }];
        self.restored.as_ref().map_or_else(own, |restored| restored.tables[number].clone())
    }

    /// Returns the bytes of the segments of table `number`.
    pub fn segment_bytes(&self, number: usize) -> u64 {
        let bytes = |layer: Layer| self.blobs[layer.segment as usize].raw_bytes();
        self.layers(number).into_iter().map(bytes).sum()
    }

    /// Returns whether the segment of table `number` is a delta.
    pub fn is_delta(&self, number: usize) -> bool {
        self.parent.is_some() && !self.tables[number].whole
    }

    /// Returns whether this is a delta that changes no row of table `number`: its segment has only
    /// a trailer.
    pub fn leaves_alone(&self, number: usize) -> bool {
        self.is_delta(number) && self.segment_bytes(number) == PAGE_BYTES as u64
    }

    /// Checks every field against the others and against the limits.
    fn check(&self) -> Result<(), ManifestError> {
        self.generation.check().or_else(|problem| fault("lineage", problem))?;

        self.schema.check()?;
        if self.tables.len() != self.schema.tables.len() {
            let n = self.schema.tables.len();
            return fault("tables", format!("{} entries for {n} tables", self.tables.len()));
        }

        for (i, blob) in self.blobs.iter().enumerate() {
            check_chunks(i, blob)?;
        }

        for (i, table) in self.tables.iter().enumerate() {
            if table.whole && self.parent.is_none() {
                return fault(format!("tables[{i}].whole"), "belongs to a delta");
            }
            self.check_blob(&format!("tables[{i}].segment"), table.segment, u64::MAX)?;
            if let Some(hot) = table.hot {
                self.check_blob(
                    &format!("tables[{i}].hot"),
                    hot,
                    8 * crate::limits::HOT_KEYS_MAX as u64,
                )?;
            }
        }

        if self.packed_on.is_some() && self.parent.is_none() {
            return fault("packed_on", "belongs to a delta");
        }
        if self.deferral.is_some_and(|d| self.parent.is_none() || !d.distance_max.is_finite()) {
            return fault("deferral", "belongs to a delta and has a finite distance");
        }
        self.restored.as_ref().map_or(Ok(()), |restored| self.check_restored(restored))?;
        self.check_blob("dense", self.dense, DENSE_BYTES_MAX)?;
        self.probe.map_or(Ok(()), |probe| self.check_blob("probe", probe, PROBE_BYTES_MAX))
    }

    fn check_restored(&self, restored: &Restored) -> Result<(), ManifestError> {
        if self.parent.is_some() || restored.sequence >= self.generation.sequence {
            return fault("restored", "belongs to a snapshot and names an earlier release");
        }
        if restored.tables.len() != self.tables.len() {
            let n = self.tables.len();
            return fault("restored", format!("{} entries for {n} tables", restored.tables.len()));
        }
        restored.tables.iter().enumerate().try_for_each(|(t, layers)| self.check_layers(t, layers))
    }

    /// Checks the segments of a restored table.
    fn check_layers(&self, t: usize, layers: &[Layer]) -> Result<(), ManifestError> {
        let field = format!("restored.tables[{t}]");
        let table = &self.schema.tables[t];
        let (Some(base), Some(last)) = (layers.first(), layers.last()) else {
            return fault(field, "has no base");
        };
        let is_index = table.keys == KeySpace::Index;
        if base.segment != self.tables[t].segment || is_index && last.rows != table.rows {
            return fault(
                field,
                "does not begin with the table's segment, or ends with other rows",
            );
        }
        if layers.len() > 1 + DELTAS_MAX {
            return fault(field, format!("{} deltas, over {DELTAS_MAX}", layers.len() - 1));
        }
        for pair in layers.windows(2) {
            // A table of indexes never shrinks: its base has a row for every key below its last.
            let shrinks = is_index && pair[0].rows > pair[1].rows;
            if shrinks || pair[0].sequence >= pair[1].sequence {
                return fault(field, format!("sequence {} is out of order", pair[1].sequence));
            }
        }
        let delta_bytes_max = u64::from(DELTA_PAGES_MAX) * PAGE_BYTES as u64;
        let bytes_max = |n: usize| if n == 0 { u64::MAX } else { delta_bytes_max };
        let mut numbered = layers.iter().enumerate();
        numbered.try_for_each(|(n, layer)| self.check_blob(&field, layer.segment, bytes_max(n)))
    }

    fn check_blob(&self, field: &str, index: u32, bytes_max: u64) -> Result<(), ManifestError> {
        match self.blobs.get(index as usize).map(Blob::raw_bytes) {
            None => fault(field, format!("{index} of {} blobs", self.blobs.len())),
            Some(bytes) if bytes > bytes_max => {
                fault(field, format!("{bytes} bytes, over {bytes_max}"))
            }
            Some(_) => Ok(()),
        }
    }
}

fn refused(error: postcard::Error) -> ManifestError {
    ManifestError::Decode(error.to_string())
}

/// Checks that all chunks but the last are full and that none is stored in more bytes than its
/// content has.
fn check_chunks(i: usize, blob: &Blob) -> Result<(), ManifestError> {
    for (c, chunk) in blob.chunks.iter().enumerate() {
        let field = || format!("blobs[{i}].chunks[{c}]");
        let last = c + 1 == blob.chunks.len();
        if chunk.raw as usize > CHUNK_BYTES
            || chunk.raw == 0
            || (!last && chunk.raw as usize != CHUNK_BYTES)
        {
            return fault(
                field() + ".raw",
                format!("{} bytes, chunks have {CHUNK_BYTES}", chunk.raw),
            );
        }
        if chunk.stored > chunk.raw || chunk.stored == 0 {
            return fault(
                field() + ".stored",
                format!("{} bytes for {} of content", chunk.stored, chunk.raw),
            );
        }
    }
    Ok(())
}
