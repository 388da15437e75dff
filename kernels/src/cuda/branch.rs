//! A second stream beside a main one. Recorded into a graph, the work on both is two branches,
//! which the GPU runs at the same time. Never waits on the host.

use crate::cuda::driver::{Event, Gpu, Result, Stream};
use std::sync::Arc;

/// A stream that is ordered with a main stream by events.
pub(crate) struct Branch {
    stream: Stream,
    of_main: Event,
    of_branch: Event,
}

/// The functions return the driver's error.
impl Branch {
    /// Creates a branch on `gpu`.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self { stream: gpu.stream()?, of_main: gpu.event()?, of_branch: gpu.event()? })
    }

    /// Returns the branch's stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Lets later work of the branch start after the work of `main` so far.
    pub fn fork(&self, main: &Stream) -> Result<()> {
        main.record(&self.of_main)?;
        self.stream.after(&self.of_main)
    }

    /// Lets later work of `main` start after the work of the branch so far.
    pub fn join(&self, main: &Stream) -> Result<()> {
        self.stream.record(&self.of_branch)?;
        main.after(&self.of_branch)
    }

    /// Lets later work of each start after the work of both so far.
    pub fn meet(&self, main: &Stream) -> Result<()> {
        // The branch must not wait for what `main` does after the join.
        main.record(&self.of_main)?;
        self.join(main)?;
        self.stream.after(&self.of_main)
    }
}
