//! CUDA graphs: work that is recorded once and launched as a whole, with one call into the driver
//! for many kernels. Data that differs between launches is in memory that the kernels read. Never
//! waits for a launch.

#![allow(unsafe_code)]

use crate::cuda::calls::Calls;
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::{CudaError, DriverError, check, report};
use cudarc::driver::sys;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// Pauses before the attempts to record after the first, in ms. Other code of the process may
/// invalidate a recording, such as a build of TensorRT, which waits for the GPU again and again.
const RECORD_PAUSES_MS: [u64; 3] = [1, 20, 400];
/// More edges than the graph of a request has.
const EDGES_MAX: usize = 1024;

impl Stream {
    fn begin_recording(&self) -> Result<(), CudaError> {
        self.bind()?;
        // Records this thread only, so other threads may allocate at the same time.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let result = unsafe { (self.gpu().driver().begin_recording)(self.raw(), mode as u32) };
        check("record a graph", result)
    }
}

/// Returns whether other code of the process has invalidated a recording.
fn is_invalidated(e: &CudaError) -> bool {
    matches!(e, CudaError::Driver { error: DriverError::RECORDING_INVALIDATED, .. })
}

/// Graphs, and the resources that they use. The contents of `resources` may change, but the
/// addresses that were recorded may not.
pub struct Graphs<T> {
    // Dropped before the resources that they use.
    graphs: Vec<Recording>,
    resources: T,
}

/// The size of a graph, which bounds the time of short nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GraphShape {
    /// All nodes.
    pub nodes: usize,
    /// Nodes of the longest chain, each of which starts after the one before.
    pub chain: usize,
}

/// One recorded graph.
struct Recording {
    graph: sys::CUgraphExec,
    /// Each pair of nodes of which the second waits for the first; none if the driver lists none.
    edges: Vec<(usize, usize)>,
    gpu: Arc<Gpu>,
}

/// Returns the edges of `recorded`, if the driver lists them and they are fewer than `EDGES_MAX`.
fn edges_of(driver: &Calls, recorded: sys::CUgraph) -> Vec<(usize, usize)> {
    let (mut count, mut from, mut to) = (EDGES_MAX, vec![0; EDGES_MAX], vec![0; EDGES_MAX]);
    // SAFETY: the graph is alive, and both lists have room for `count` handles.
    let listed = driver.edges.is_some_and(|edges| unsafe {
        edges(recorded, from.as_mut_ptr().cast(), to.as_mut_ptr().cast(), &mut count) == 0
    });
    from.truncate(if listed && count < EDGES_MAX { count } else { 0 });
    from.into_iter().zip(to).collect()
}

impl Recording {
    /// Ends the recording of `stream`, and makes a graph of it.
    ///
    /// # Errors
    /// [`CudaError::Driver`]; code 901 if other code has invalidated the recording.
    fn end(stream: &Stream) -> Result<Self, CudaError> {
        let (driver, gpu) = (stream.gpu().driver(), Arc::clone(stream.gpu()));
        let (mut recorded, mut graph) = (null_mut(), null_mut());
        let edges;
        // SAFETY: the stream is alive; the calls write one handle each. After the graph is made, it
        // no longer needs the recording.
        unsafe {
            check("end a graph", (driver.end_recording)(stream.raw(), &mut recorded))?;
            if recorded.is_null() {
                let error = DriverError::RECORDING_INVALIDATED;
                return Err(CudaError::Driver { call: "record a graph", error });
            }
            let made = check("end a graph", (driver.new_graph)(&mut graph, recorded, 0));
            edges = edges_of(driver, recorded);
            report(check("free a recording", (driver.free_recording)(recorded)));
            made?;
        }
        Ok(Self { graph, edges, gpu })
    }

    fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the graph and the stream are alive.
        let result = unsafe { (self.gpu.driver().upload_graph)(self.graph, stream.raw()) };
        check("upload a graph", result)
    }

    fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.bind()?;
        // SAFETY: the graph and the stream are alive.
        let result = unsafe { (self.gpu.driver().launch_graph)(self.graph, stream.raw()) };
        check("launch a graph", result)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        report(self.gpu.bind().and_then(|()| {
            // SAFETY: the only owner is being dropped; the driver keeps the graph while it runs.
            let result = unsafe { (self.gpu.driver().free_graph)(self.graph) };
            check("destroy a graph", result)
        }));
    }
}

// SAFETY: the driver lets any thread use a graph, one at a time; launching takes `&mut self`.
unsafe impl<T: Send> Send for Graphs<T> {}

impl<T> Graphs<T> {
    /// Creates an empty set of graphs with `resources`.
    pub fn new(resources: T) -> Self {
        Self { graphs: Vec::new(), resources }
    }

    /// Records the work that `work` puts onto the stream that `stream` returns. Returns the graph's
    /// number; numbers count from 0. `work` must not wait, allocate or free memory that the device
    /// can access, or use another stream. If other code of the process invalidates a recording, it
    /// is repeated after each of `RECORD_PAUSES_MS`. So `work` may run more than once.
    ///
    /// # Errors
    /// The error of `work`, or [`CudaError::Driver`] if the work cannot be recorded.
    pub fn record<E: From<CudaError>>(
        &mut self,
        stream: impl Fn(&T) -> &Stream,
        mut work: impl FnMut(&mut T) -> Result<(), E>,
    ) -> Result<usize, E> {
        let gpu = Arc::clone(stream(&self.resources).gpu());
        let mut pauses = RECORD_PAUSES_MS.into_iter();
        let graph = loop {
            let mut recordings = gpu.recording();
            *recordings += 1;
            stream(&self.resources).begin_recording()?;
            let worked = work(&mut self.resources);
            // The recording must end even if the work failed.
            let graph = Recording::end(stream(&self.resources));
            // In a pause other threads may wait for the device.
            drop(recordings);
            let is_invalidated = graph.as_ref().is_err_and(is_invalidated);
            let Some(ms) = pauses.next().filter(|_| is_invalidated) else {
                worked?;
                break graph?;
            };
            std::thread::sleep(Duration::from_millis(ms));
        };

        graph.upload(stream(&self.resources))?;
        self.graphs.push(graph);
        Ok(self.graphs.len() - 1)
    }

    /// Launches graph `number` on its stream, and does not wait. `turn` calls its second argument,
    /// which launches the graph, in the right order with other work.
    ///
    /// # Errors
    /// [`CudaError::Driver`], or the error of `turn`.
    pub fn launch(
        &mut self,
        number: usize,
        stream: impl Fn(&T) -> &Stream,
        turn: impl FnOnce(&T, &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let graph = &self.graphs[number];
        turn(&self.resources, &|| graph.launch(stream(&self.resources)))?;
        stream(&self.resources).count_launch();
        Ok(())
    }

    /// Returns the shape of graph `number`; `None` if the driver did not list its edges.
    pub fn shape(&self, number: usize) -> Option<GraphShape> {
        let edges = &self.graphs[number].edges;
        // The place of each node in the longest chain to it that the passes so far have found. No
        // chain is longer than all edges, so as many passes find the longest.
        let mut places = BTreeMap::new();
        for (from, to) in edges.iter().flat_map(|_| edges) {
            let after = *places.entry(from).or_insert(1) + 1;
            let place = places.entry(to).or_insert(1);
            *place = after.max(*place);
        }
        Some(GraphShape { nodes: places.len(), chain: *places.values().max()? })
    }

    /// Returns the resources.
    pub fn resources(&self) -> &T {
        &self.resources
    }

    /// Returns the resources, so that the caller can write the data of the next launch. The caller
    /// must have waited for the last launch.
    pub fn resources_mut(&mut self) -> &mut T {
        &mut self.resources
    }
}
