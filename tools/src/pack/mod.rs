//! `pack`: turns a trainer's files into a bundle. It reads the rows of each table in two passes:
//! the first learns the value ranges and refuses bad rows before anything is written, the second
//! encodes. Memory is bounded by one block and one sort partition. Never holds a whole table.

pub mod codec_error;
pub(crate) mod ending;
pub(crate) mod hot;
pub mod hugectr_network;
mod job;
pub mod key_spec;
mod learn;
mod merge;
pub mod network;
pub mod overrides;
mod share;
pub mod sort;
pub mod spec;
pub(crate) mod spec_line;
pub(crate) mod table;
mod table_major;
pub(crate) mod weights;

use crate::pack::codec_error::CodecError;
use crate::pack::spec_line::at_line;
use crate::report::input;
use anyhow::{Context, Result};
use hatchback::bundle::manifest::Generation;
use hatchback::schema::Schema;
use hatchback::schema::sample::Sample;
use std::io::{BufRead, BufReader};
use std::path::Path;

pub use ending::Proof;
pub use job::PackJob;
pub use overrides::Overrides;

/// The bundle that `pack` wrote.
#[derive(Debug)]
pub struct Packed {
    /// The generation of the bundle.
    pub generation: Generation,
    /// The schema of the model.
    pub schema: Schema,
    /// Bytes of the bundle file.
    pub bytes: u64,
    /// The engine of the dense network on this machine's CPU.
    pub dense_engine: String,
    /// Rows of the trainer's files that were left out because they are rare.
    pub rows_left_out: u64,
    /// The error of each table's codec.
    pub codec_errors: Vec<CodecError>,
    /// What the probe set scored.
    pub proof: Proof,
}

/// Reads a file of samples, one line of JSON each.
///
/// # Errors
/// The file cannot be read, or a line is not a sample of the schema; the error names the line.
pub fn read_samples(path: &Path, schema: &Schema) -> Result<Vec<Sample>> {
    let file = input::open(path).with_context(|| path.display().to_string())?;
    let mut samples = Vec::new();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let at = || at_line(path, Some(number + 1));
        let line = line.with_context(at)?;
        if !line.trim().is_empty() {
            samples.push(Sample::from_json(&line, schema).with_context(at)?);
        }
    }

    Ok(samples)
}
