//! The memory budget: what a model may take, and the sum of what it does take, line by line.

use hatchback_kernels::dense::Weights;
use serde::Deserialize;
use std::fmt;

/// What a model may use. Every field is a maximum, taken when the model is opened and never
/// exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// All memory of the model together.
    pub memory_bytes_max: u64,
    /// The embedding caches.
    pub cache_bytes_max: u64,
    /// The tables that are kept whole.
    pub resident_bytes_max: u64,
    /// Requests waiting or being served; one more is told `busy`.
    pub slots: u32,
    /// Requests served at once, a thread each.
    pub workers: u32,
    /// How long a request waits for others to be scored with it, µs; with 0 only those that wait
    /// anyway are.
    pub gather_us: u32,
    /// Samples in a request.
    pub batch_max: u32,
    /// Lookups of one worker that may wait for flash at once; a request with more is served in
    /// several rounds.
    pub misses_max: u32,
    /// Page reads of all workers that may be in flight at once; the device's queue depth is enough.
    pub reads_max: u32,
    /// How the weights of the dense network are kept.
    pub dense_weights: Weights,
}

impl Default for Budget {
    /// A desk: 64 MiB of cache, 64 MiB of resident tables, one worker, 16 slots, batches of 256.
    fn default() -> Self {
        Self {
            memory_bytes_max: 1 << 30,
            cache_bytes_max: 64 << 20,
            resident_bytes_max: 64 << 20,
            slots: 16,
            workers: 1,
            gather_us: 0,
            batch_max: 256,
            misses_max: 16 << 10,
            reads_max: 64,
            dense_weights: Weights::F32,
        }
    }
}

/// The memory that a model takes, one line for each user of it.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlan {
    lines: Vec<(&'static str, u64)>,
    opening: u64,
}

impl MemoryPlan {
    /// Adds a line.
    pub(crate) fn add(&mut self, what: &'static str, bytes: u64) {
        self.lines.push((what, bytes));
    }

    /// What takes memory, and how many bytes.
    pub fn lines(&self) -> &[(&'static str, u64)] {
        &self.lines
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.lines.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Takes a line out again, of what is given back.
    pub(crate) fn remove(&mut self, what: &str) {
        self.lines.retain(|(line, _)| *line != what);
    }

    /// Notes what was there for a moment beside the sum; of several moments the most counts.
    pub(crate) fn note_opening(&mut self, bytes: u64) {
        self.opening = self.opening.max(bytes);
    }

    /// Bytes that were taken beside the sum while the model was opened, and given back: what was on
    /// its way to a GPU was there twice, and what came from one in pieces.
    pub fn opening(&self) -> u64 {
        self.opening
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, bytes) in &self.lines {
            writeln!(f, "{bytes:>14}  {what}")?;
        }
        write!(f, "{:>14}  total", self.total())?;
        match self.opening {
            0 => Ok(()),
            bytes => {
                write!(f, "\n{bytes:>14}  more while it was opened, on its way to or from the GPU")
            }
        }
    }
}
