//! What the command line of `pack` adds to a model.toml. Reads nothing.

use super::spec::CodecChoice;
use anyhow::{Context, Result};
use hatchback::io::in_order::WorkPool;
use hatchback::schema::Placement;
use std::num::NonZeroUsize;

/// Choices of the command line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// Replaces the codec of each table.
    pub codec: Option<CodecChoice>,
    /// Replaces the placement of each table.
    pub placement: Option<Placement>,
    /// Leaves out the rows of sparse tables that training used less often.
    pub min_count: Option<u64>,
    /// Refuses a snapshot if a probe score differs more from the recorded one. Without it the probe
    /// set only chooses the form of the network's weights.
    pub probe_difference_max: Option<f32>,
    /// Threads that encode and compress; without it as many as the process may use. The bytes of
    /// the bundle do not depend on it.
    pub threads: Option<NonZeroUsize>,
}

impl Overrides {
    pub(super) fn workers(self) -> Result<WorkPool> {
        WorkPool::new(self.threads).context("the threads of `pack`")
    }
}
