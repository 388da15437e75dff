//! The memory plan: the bytes of each part of a model. `request/memory.rs` computes it before each
//! step of opening. A plan is replaced whole, and never edited.

use std::fmt;

/// A part of a model, or of its process, that takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Caches,
    Residents,
    Indexes,
    Vocabularies,
    DenseWeights,
    DenseInputs,
    DenseResults,
    Misses,
    PageBuffers,
    Scores,
    Batches,
    Slots,
    Queues,
    GpuShared,
    GpuWeights,
    GpuDense,
    AwaitedPlans,
    /// What the process takes beside its models.
    Beside(&'static str),
}

impl Part {
    /// Returns the name in reports.
    fn name(self) -> &'static str {
        match self {
            Self::Caches => "embedding caches",
            Self::Residents => "resident tables",
            Self::Indexes => "indexes of the segments and overlays of their deltas",
            Self::Vocabularies => "vocabularies of the key functions",
            Self::DenseWeights => "dense network weights",
            Self::DenseInputs => "dense network inputs, all workers",
            Self::DenseResults => "dense network results between layers, all workers",
            Self::Misses => "miss lists, staging rows and negative caches, all workers",
            Self::PageBuffers => "page buffers, all workers",
            Self::Scores => "scores and statuses, all workers",
            Self::Batches => "batches, all workers",
            Self::Slots => "request slots: batches, scores and statuses",
            Self::Queues => "queues of requests and of keys to prefetch",
            Self::GpuShared => "keys, rings and changes that the GPU shares, all workers",
            Self::GpuWeights => "dense network on the GPU, weights",
            Self::GpuDense => "dense network on the GPU, all workers",
            Self::AwaitedPlans => "networks whose TensorRT plans are being built, or will be",
            Self::Beside(name) => name,
        }
    }
}

/// The parts that are made after the tables were opened.
const LATER: [Part; 8] = [
    Part::DenseInputs,
    Part::DenseResults,
    Part::Misses,
    Part::PageBuffers,
    Part::Scores,
    Part::Batches,
    Part::Slots,
    Part::Queues,
];

/// The memory that a model uses, one line for each part of it.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlan {
    parts: Vec<(Part, u64)>,
    opening_bytes: u64,
}

impl MemoryPlan {
    /// Returns the plan of `parts`. Opening takes `opening_bytes` more for a while.
    pub(crate) fn new(parts: Vec<(Part, u64)>, opening_bytes: u64) -> Self {
        Self { parts, opening_bytes }
    }

    /// Returns the plan if opening takes at least `bytes` more for a while.
    pub(crate) fn with_opening(self, bytes: u64) -> Self {
        Self { opening_bytes: self.opening_bytes.max(bytes), ..self }
    }

    /// Returns the plan with one more part, the last.
    pub(crate) fn and(mut self, part: Part, bytes: u64) -> Self {
        self.parts.push((part, bytes));
        self
    }

    /// Returns the bytes of `parts` together.
    pub(crate) fn bytes_of(&self, parts: &[Part]) -> u64 {
        self.parts.iter().filter(|(own, _)| parts.contains(own)).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the name of each part of the model that takes memory, with its bytes.
    pub fn lines(&self) -> Vec<(&'static str, u64)> {
        self.parts.iter().map(|(part, bytes)| (part.name(), *bytes)).collect()
    }

    /// Returns the sum of all lines in bytes.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes of what is made after the tables were opened: workers and request slots.
    pub(crate) fn later_bytes(&self) -> u64 {
        self.bytes_of(&LATER)
    }

    /// Returns the bytes that opening the model took beside the total and freed again. A start
    /// lists the rows that it reads. A copy to a GPU is in memory twice for a while. A swap has the
    /// new parts beside the old ones.
    pub fn opening_bytes(&self) -> u64 {
        self.opening_bytes
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (part, bytes) in self.lines() {
            writeln!(f, "{bytes:>14}  {part}")?;
        }
        write!(f, "{:>14}  total", self.total())?;

        match self.opening_bytes {
            0 => Ok(()),
            bytes => write!(f, "\n{bytes:>14}  more for a while, during an open or a swap"),
        }
    }
}
