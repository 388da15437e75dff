//! Work recorded once and launched whole: one call into the driver for many kernels, with no host
//! between them. What a launch needs to know anew lies in memory that the kernels read.

#![allow(unsafe_code)]

use super::driver::{CudaError, Gpu, Stream};
use super::memory::report;
use cudarc::driver::{CudaGraph, DriverError, sys};
use std::sync::Arc;

/// How often a recording is begun: the process may have others that use the GPU and know nothing of
/// it.
const TRIES: usize = 4;

/// Recordings, and all that they name: `named` may change in what it holds, not in where that lies.
pub struct Graphs<T> {
    // Dropped before what they name.
    graphs: Vec<Recording>,
    named: T,
}

/// A graph, given back by a thread that has the GPU's context.
struct Recording {
    graph: CudaGraph,
    gpu: Arc<Gpu>,
}

impl Drop for Recording {
    fn drop(&mut self) {
        report("destroy a graph", self.gpu.context().bind_to_thread());
    }
}

// SAFETY: the driver lets any thread use a graph, one at a time, which `&mut self` sees to.
unsafe impl<T: Send> Send for Graphs<T> {}

fn call(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { call, error }
}

impl<T> Graphs<T> {
    /// No recordings yet.
    pub fn new(named: T) -> Self {
        Self { graphs: Vec::new(), named }
    }

    /// Records what `work` puts onto the stream that `stream` names; it must not wait, take or free
    /// memory that the device reaches or use another stream. What others in the process spoil is
    /// recorded anew, a few times. Returns the recording's number: they count from 0.
    ///
    /// # Errors
    /// The work fails or cannot be recorded.
    pub fn record<E: From<CudaError>>(
        &mut self,
        stream: impl Fn(&T) -> &Stream,
        mut work: impl FnMut(&mut T) -> Result<(), E>,
    ) -> Result<usize, E> {
        // Of this thread alone: other threads go on allocating meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (raw, gpu) = (stream(&self.named).raw().clone(), Arc::clone(stream(&self.named).gpu()));
        let invalid = DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        let _alone = gpu.recording();
        let mut tries = 0..TRIES;
        let graph = loop {
            raw.begin_capture(mode).map_err(call("record a graph"))?;
            let worked = work(&mut self.named);
            // The stream must leave the recording whatever became of the work.
            let graph = raw.end_capture(sys::CUgraphInstantiate_flags(0));
            tries.next();
            if tries.is_empty() || graph.as_ref().err() != Some(&invalid) {
                worked?;
                break graph.map_err(call("end a graph"));
            }
        };
        let graph = graph?.ok_or(CudaError::Driver { call: "record a graph", error: invalid })?;
        graph.upload().map_err(call("upload a graph"))?;
        self.graphs.push(Recording { graph, gpu: Arc::clone(&gpu) });
        Ok(self.graphs.len() - 1)
    }

    /// Puts all of recording `number` onto its stream, and returns.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn launch(
        &mut self,
        number: usize,
        stream: impl Fn(&T) -> &Stream,
    ) -> Result<(), CudaError> {
        self.graphs[number].graph.launch().map_err(call("launch a graph"))?;
        stream(&self.named).count_launch();
        Ok(())
    }

    /// What they name.
    pub fn named(&self) -> &T {
        &self.named
    }

    /// The same, to write what the next launch reads; the last one must have been waited for.
    pub fn named_mut(&mut self) -> &mut T {
        &mut self.named
    }
}
