//! The limits that `hatchback-bench gpu` compares with: a plain gather of rows for a lookup, and a
//! graph whose kernels do nothing for a request. No request runs them.

#![allow(unsafe_code)]

use crate::cuda::branch::Branch;
use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream, images};
use crate::cuda::graph::{GraphShape, Graphs};
use crate::cuda::memory::Buffer;
use std::sync::Arc;

static IMAGES: Images = images!("gather");

/// Threads of a block, and units that each thread has in flight.
const THREADS: u32 = 256;
const UNITS: u64 = 4;

/// `PlainGather` of `gather.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgument {
    rows: u64,
    slots: u64,
    out: u64,
    row_words: u32,
    count: u32,
}

const _: () = assert!(size_of::<GatherArgument>() == 32);

/// The kernels of the gather on one GPU.
pub struct PlainGather {
    lines: Kernel,
    words: Kernel,
}

impl PlainGather {
    /// Loads the kernels.
    ///
    /// # Errors
    /// `CudaError::NoKernels`.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = gpu.module(&IMAGES)?;
        Ok(Self { lines: module.kernel("gather_lines")?, words: module.kernel("gather_words")? })
    }

    /// Puts onto `stream` a copy of the rows at `slots` of `rows`, each of `row_words` words, to
    /// the start of `out`. Every slot is one of the rows.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn launch(
        &self,
        stream: &Stream,
        rows: &Buffer<u32>,
        slots: &Buffer<u32>,
        row_words: usize,
        out: &Buffer<u32>,
    ) -> Result<()> {
        let values = slots.len() * row_words;
        assert!(row_words > 0 && out.len() >= values && values < u32::MAX as usize);
        let (kernel, unit) = match row_words.is_multiple_of(4) {
            true => (&self.lines, 4),
            false => (&self.words, 1),
        };
        let argument = GatherArgument {
            rows: rows.address(),
            slots: slots.address(),
            out: out.address(),
            row_words: row_words as u32,
            count: slots.len() as u32,
        };
        let units = (values / unit) as u64;
        let blocks = units.div_ceil(u64::from(THREADS) * UNITS);
        // SAFETY: the kernel's parameter; `out` has room, and the caller vouches for the slots.
        unsafe { stream.launch(kernel, blocks as u32, THREADS, argument) }
    }
}

/// A graph of kernels that do nothing: the least time of any graph of its shape.
pub struct EmptyGraph(Graphs<EmptyNodes>);

struct EmptyNodes {
    stream: Stream,
    branch: Branch,
    kernel: Kernel,
}

impl EmptyNodes {
    /// Puts one chain onto the stream, and beside it the other nodes onto the branch, which must
    /// not be the longer one.
    fn enqueue(&self, GraphShape { nodes, chain }: GraphShape) -> Result<()> {
        let Self { stream, branch, kernel } = self;
        assert!(nodes <= 2 * chain, "{nodes} nodes and a chain of {chain} need more branches");
        // Without rows each thread returns at once.
        let nothing = GatherArgument { rows: 0, slots: 0, out: 0, row_words: 1, count: 0 };
        // SAFETY: the kernel's parameter; without slots the kernel uses no address.
        let launch = |stream: &Stream| unsafe { stream.launch(kernel, 1, THREADS, nothing) };
        branch.fork(stream)?;
        (0..chain).try_for_each(|_| launch(stream))?;
        (chain..nodes).try_for_each(|_| launch(branch.stream()))?;
        branch.join(stream)
    }
}

impl EmptyGraph {
    /// Records a graph of `shape`.
    ///
    /// # Errors
    /// `CudaError`, if the GPU refuses to record.
    pub fn new(gpu: &Arc<Gpu>, shape: GraphShape) -> Result<Self> {
        let (stream, kernel) = (gpu.stream()?, PlainGather::load(gpu)?.words);
        let nodes = EmptyNodes { stream, branch: Branch::new(gpu)?, kernel };
        // The driver loads the kernel at its first launch, which it does not record.
        nodes.enqueue(shape)?;
        nodes.stream.wait()?;
        let mut graphs = Graphs::new(nodes);
        graphs.record(|nodes| &nodes.stream, |nodes| nodes.enqueue(shape))?;
        Ok(Self(graphs))
    }

    /// Returns the shape of the graph, if the driver told it.
    pub fn shape(&self) -> Option<GraphShape> {
        self.0.shape(0)
    }

    /// Runs the graph and waits for it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn run(&mut self) -> Result<()> {
        self.0.launch(0, |nodes| &nodes.stream, |_, launch| launch())?;
        self.0.resources().stream.wait()
    }
}
