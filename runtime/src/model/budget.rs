//! The memory budget, which limits a model's use of memory, and the memory plan, which sums the
//! model's actual use.

use serde::Deserialize;
use std::fmt;

/// The limits of a model's memory and work. Every field is a maximum. The memory is allocated when
/// the model is opened and does not grow afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Bytes of all memory of the model.
    pub memory_bytes_max: u64,
    /// Bytes of the embedding caches.
    pub cache_bytes_max: u64,
    /// Bytes of the tables that are kept whole in memory.
    pub resident_bytes_max: u64,
    /// Request slots: requests that wait or are served at the same time. A further request is
    /// refused with `Busy`.
    pub slots: u32,
    /// Requests that are served at the same time, one thread each.
    pub workers: u32,
    /// Microseconds that a request waits for others to be scored in one batch with it. With 0 a
    /// worker batches only the requests that already wait.
    pub batch_delay_us_max: u32,
    /// Samples in a request.
    pub batch_max: u32,
    /// Lookups of one worker that wait for flash at the same time. A request with more misses is
    /// served in several rounds.
    pub misses_max: u32,
    /// Page reads of all workers in flight. More than the queue depth of the device gains nothing.
    pub reads_max: u32,
    /// Which engine may run the dense network on the CPU.
    pub dense_engine: EngineRule,
}

/// Which engine may run the dense network on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineRule {
    /// Hatchback's own, or the fallback rten, which allocates memory in each request.
    #[default]
    Any,
    /// Only Hatchback's own engine.
    Own,
}

impl Default for Budget {
    /// A budget for a desk: 64 MiB of cache, 64 MiB of resident tables, one worker, 16 slots,
    /// batches of 256.
    fn default() -> Self {
        Self {
            memory_bytes_max: 1 << 30,
            cache_bytes_max: 64 << 20,
            resident_bytes_max: 64 << 20,
            slots: 16,
            workers: 1,
            batch_delay_us_max: 0,
            batch_max: 256,
            misses_max: 16 << 10,
            reads_max: 64,
            dense_engine: EngineRule::Any,
        }
    }
}

/// The memory that a model uses, one line for each part of it.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlan {
    lines: Vec<(&'static str, u64)>,
    opening_bytes: u64,
}

impl MemoryPlan {
    /// Adds a line.
    pub(crate) fn add(&mut self, part: &'static str, bytes: u64) {
        self.lines.push((part, bytes));
    }

    /// Replaces the line of a part, or adds it.
    pub(crate) fn set(&mut self, part: &'static str, bytes: u64) {
        match self.lines.iter_mut().find(|(line, _)| *line == part) {
            Some((_, before)) => *before = bytes,
            None => self.add(part, bytes),
        }
    }

    /// Removes the line of a part whose memory was freed.
    pub(crate) fn remove(&mut self, part: &str) {
        self.lines.retain(|(line, _)| *line != part);
    }

    /// Records memory that opening took temporarily beside the total. The largest record counts.
    pub(crate) fn record_peak(&mut self, bytes: u64) {
        self.opening_bytes = self.opening_bytes.max(bytes);
    }

    /// Returns each part of the model that takes memory, with its bytes.
    pub fn lines(&self) -> &[(&'static str, u64)] {
        &self.lines
    }

    /// Returns the sum of all lines in bytes.
    pub fn total(&self) -> u64 {
        self.lines.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes that opening the model took beside the total and freed again. During a
    /// copy to a GPU the data is in memory twice, and a swap holds the new parts beside the old
    /// ones.
    pub fn opening_bytes(&self) -> u64 {
        self.opening_bytes
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (part, bytes) in &self.lines {
            writeln!(f, "{bytes:>14}  {part}")?;
        }
        write!(f, "{:>14}  total", self.total())?;

        match self.opening_bytes {
            0 => Ok(()),
            bytes => write!(
                f,
                "\n{bytes:>14}  more while opening, beside what is served or in transit to the GPU"
            ),
        }
    }
}
