//! CUDA graphs: work that is recorded once and launched as a whole, with one call into the driver
//! for many kernels. What differs between launches is in memory that the kernels read. Never waits
//! for a launch.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::{Call, CudaError, report};
use cudarc::driver::{CudaGraph, DriverError, sys};
use std::sync::Arc;

/// Attempts to record: code elsewhere in the process that uses the GPU may invalidate a recording.
const RECORD_ATTEMPTS: usize = 4;

/// Graphs, and the resources that they use. The contents of `resources` may change, but the
/// addresses that were recorded may not.
pub struct Graphs<T> {
    // Dropped before the resources that they use.
    graphs: Vec<Recording>,
    resources: T,
}

/// One recorded graph. Dropping it binds the GPU's context to the thread first.
struct Recording {
    graph: CudaGraph,
    gpu: Arc<Gpu>,
}

impl Drop for Recording {
    fn drop(&mut self) {
        report("destroy a graph", self.gpu.context().bind_to_thread());
    }
}

// SAFETY: the driver lets any thread use a graph, one at a time; launching takes `&mut self`.
unsafe impl<T: Send> Send for Graphs<T> {}

impl<T> Graphs<T> {
    /// Creates a set without graphs.
    pub fn new(resources: T) -> Self {
        Self { graphs: Vec::new(), resources }
    }

    /// Records what `work` puts onto the stream that `stream` returns, and returns the graph's
    /// number; numbers count from 0. `work` must not wait, allocate or free memory that the device
    /// can access, or use another stream. A recording that other code of the process invalidates is
    /// repeated, up to `RECORD_ATTEMPTS` times, so `work` may run more than once.
    ///
    /// # Errors
    /// The error of `work`, or [`CudaError::Driver`] if the work cannot be recorded.
    pub fn record<E: From<CudaError>>(
        &mut self,
        stream: impl Fn(&T) -> &Stream,
        mut work: impl FnMut(&mut T) -> Result<(), E>,
    ) -> Result<usize, E> {
        // Records this thread only: other threads may allocate at the same time.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (raw, gpu) =
            (stream(&self.resources).raw().clone(), Arc::clone(stream(&self.resources).gpu()));
        let invalid = DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        let _no_wait = gpu.recording();

        let mut attempts = 0..RECORD_ATTEMPTS;
        let graph = loop {
            raw.begin_capture(mode).call("record a graph")?;
            let worked = work(&mut self.resources);
            // The recording must end even if the work failed.
            let graph = raw.end_capture(sys::CUgraphInstantiate_flags(0));
            attempts.next();
            if attempts.is_empty() || graph.as_ref().err() != Some(&invalid) {
                worked?;
                break graph.call("end a graph");
            }
        };

        let graph = graph?.ok_or(CudaError::Driver { call: "record a graph", error: invalid })?;
        graph.upload().call("upload a graph")?;
        self.graphs.push(Recording { graph, gpu: Arc::clone(&gpu) });
        Ok(self.graphs.len() - 1)
    }

    /// Launches graph `number` on its stream, and does not wait. `turn` calls its second argument
    /// when the graph may be launched.
    ///
    /// # Errors
    /// [`CudaError::Driver`], or the error of `turn`.
    pub fn launch(
        &mut self,
        number: usize,
        stream: impl Fn(&T) -> &Stream,
        turn: impl FnOnce(&T, &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let graph = &self.graphs[number].graph;
        turn(&self.resources, &|| graph.launch().call("launch a graph"))?;
        stream(&self.resources).count_launch();
        Ok(())
    }

    /// Returns the resources.
    pub fn resources(&self) -> &T {
        &self.resources
    }

    /// Returns the resources, to write what the next launch reads. The caller must have waited for
    /// the last launch.
    pub fn resources_mut(&mut self) -> &mut T {
        &mut self.resources
    }
}
