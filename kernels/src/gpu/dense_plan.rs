//! A network laid out, run on a GPU: the nodes of the layout, each a launch or a few on a stream.
//! With our own products the results are the CPU's to the bit. The weights lie there as f32
//! (rounded as they were packed), a worker's results between nodes in buffers that it took at its
//! start. Nothing waits here.

use crate::cuda::cublas::{Cublas, CublasError};
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::memory::{Buffer, View};
use crate::dense::graph::{Id, Map, Op, Operand, Zip};
use crate::dense::layout::{Layout, Place};
use crate::gpu::dense_kernels::{DenseKernels, DeviceMatrix, Side};
use std::sync::Arc;

/// A node as it lies on the device.
struct Node {
    inputs: Vec<Id>,
    op: DeviceOp,
    output: Id,
}

/// `graph::Op` with its constants on the device.
enum DeviceOp {
    Matrix { rows: usize, matrix: DeviceMatrix },
    Products { count: usize, shape: (usize, usize, usize, bool) },
    Map(i32),
    Zip { what: i32, left: DeviceOperand, right: DeviceOperand },
    Sum { outer: usize, n: usize, inner: usize, divisor: f32 },
    Concat { outer: usize, parts: Vec<usize> },
    Pick(Buffer<u32>),
}

/// `graph::Operand` likewise.
enum DeviceOperand {
    Value { input: usize, picks: Option<Buffer<u32>> },
    Constant(Buffer<f32>),
}

/// A network on a GPU, ready to run. Read-only; all workers share it.
pub(crate) struct DevicePlan {
    nodes: Vec<Node>,
    widths: Vec<usize>,
    places: Vec<Place>,
    buffers: Vec<usize>,
    output: Id,
    bytes: usize,
}

/// One worker's memory.
pub(crate) struct DevicePlanScratch {
    buffers: Vec<Buffer<f32>>,
    /// Makes the products by weights; ours do where it is `None`.
    pub cublas: Option<Cublas>,
}

impl DevicePlan {
    /// Puts `layout` onto `gpu`.
    pub fn new(layout: &Layout, gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut upload = Upload { gpu, stream: gpu.stream()?, bytes: 0 };
        let mut nodes = Vec::with_capacity(layout.nodes.len());
        for node in &layout.nodes {
            let op = upload.op(&node.op)?;
            nodes.push(Node { inputs: node.inputs.clone(), op, output: node.output });
        }
        Ok(Self {
            nodes,
            widths: layout.widths.clone(),
            places: layout.places.clone(),
            buffers: layout.buffers.clone(),
            output: layout.output,
            bytes: upload.bytes,
        })
    }

    /// Bytes of weights and index tables.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Memory for runs of up to `batch_max` samples.
    pub fn scratch(
        &self,
        gpu: &Arc<Gpu>,
        batch_max: usize,
    ) -> Result<DevicePlanScratch, CudaError> {
        let buffers =
            self.buffers.iter().map(|w| gpu.buffer(w * batch_max)).collect::<Result<_, _>>()?;
        Ok(DevicePlanScratch { buffers, cublas: None })
    }

    /// The bytes of that.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        4 * self.buffers.iter().sum::<usize>() * batch_max
    }

    /// Puts a run of `n` samples onto `stream`; returns where the result will lie.
    pub fn enqueue<'a>(
        &self,
        kernels: &DenseKernels,
        stream: &Stream,
        n: usize,
        inputs: &'a [Buffer<f32>],
        scratch: &'a mut DevicePlanScratch,
    ) -> Result<View<'a, f32>, CublasError> {
        let DevicePlanScratch { buffers, cublas } = scratch;
        for node in &self.nodes {
            self.step(kernels, stream, node, n, inputs, (buffers, cublas.as_mut()))?;
        }
        Ok(self.value(self.output, n, inputs, buffers))
    }

    fn value<'a>(
        &self,
        id: Id,
        n: usize,
        inputs: &'a [Buffer<f32>],
        buffers: &'a [Buffer<f32>],
    ) -> View<'a, f32> {
        let all = match self.places[id] {
            Place::Input(i) => inputs[i].view(),
            Place::Buffer(b) => buffers[b].view(),
        };
        all.first(n * self.widths[id])
    }

    fn step(
        &self,
        kernels: &DenseKernels,
        stream: &Stream,
        node: &Node,
        n: usize,
        inputs: &[Buffer<f32>],
        (buffers, cublas): (&[Buffer<f32>], Option<&mut Cublas>),
    ) -> Result<(), CublasError> {
        let read = |i: usize| self.value(node.inputs[i], n, inputs, buffers);
        let (out, width) = (self.value(node.output, n, inputs, buffers), self.widths[node.output]);
        match &node.op {
            DeviceOp::Matrix { rows, matrix } => match cublas {
                Some(cublas) => {
                    cublas.multiply(stream, n * rows, read(0), matrix, out)?;
                    kernels.finish(stream, n * rows, matrix, out)?;
                }
                None => kernels.matrix(stream, n * rows, read(0), matrix, out)?,
            },
            DeviceOp::Products { count, shape } => {
                kernels.products(stream, n * count, *shape, (read(0), read(1)), out)?;
            }
            DeviceOp::Map(what) => kernels.map(stream, *what, read(0), out)?,
            DeviceOp::Zip { what, left, right } => {
                let left = self.side(left, node, n, inputs, buffers);
                let right = self.side(right, node, n, inputs, buffers);
                kernels.zip(stream, *what, (left, right), (n, width), out)?;
            }
            DeviceOp::Sum { outer, n: count, inner, divisor } => {
                kernels.sum(stream, read(0), (n * outer, *count, *inner), *divisor, out)?;
            }
            DeviceOp::Concat { outer, parts } => {
                let (stride, mut first) = (parts.iter().sum(), 0);
                for (i, &part) in parts.iter().enumerate() {
                    kernels.concat(stream, read(i), (n * outer, part), (stride, first), out)?;
                    first += part;
                }
            }
            DeviceOp::Pick(picks) => {
                kernels.pick(
                    stream,
                    (read(0), self.widths[node.inputs[0]]),
                    picks.view(),
                    n,
                    out,
                )?;
            }
        }
        Ok(())
    }

    fn side<'a>(
        &self,
        operand: &'a DeviceOperand,
        node: &Node,
        n: usize,
        inputs: &'a [Buffer<f32>],
        buffers: &'a [Buffer<f32>],
    ) -> Side<'a> {
        match operand {
            DeviceOperand::Value { input, picks } => {
                let id = node.inputs[*input];
                let picks = picks.as_ref().map_or(View::none(), Buffer::view);
                Side { values: self.value(id, n, inputs, buffers), picks, width: self.widths[id] }
            }
            DeviceOperand::Constant(values) => {
                Side { values: values.view(), picks: View::none(), width: 0 }
            }
        }
    }
}

/// Constants on their way to the device.
struct Upload<'a> {
    gpu: &'a Arc<Gpu>,
    stream: Stream,
    bytes: usize,
}

impl Upload<'_> {
    fn floats(&mut self, values: &[f32]) -> Result<Buffer<f32>, CudaError> {
        let mut buffer = self.gpu.buffer(values.len())?;
        self.stream.upload(values, &mut buffer, 0)?;
        self.bytes += size_of_val(values);
        Ok(buffer)
    }

    fn picks(&mut self, picks: &[u32]) -> Result<Buffer<u32>, CudaError> {
        let mut buffer = self.gpu.buffer(picks.len())?;
        self.stream.upload(picks, &mut buffer, 0)?;
        self.bytes += size_of_val(picks);
        Ok(buffer)
    }

    fn operand(&mut self, operand: &Operand) -> Result<DeviceOperand, CudaError> {
        Ok(match operand {
            Operand::Constant(values) => DeviceOperand::Constant(self.floats(values)?),
            Operand::Value { input, picks } => {
                let picks = picks.as_deref().map(|p| self.picks(p)).transpose()?;
                DeviceOperand::Value { input: *input, picks }
            }
        })
    }

    fn op(&mut self, op: &Op) -> Result<DeviceOp, CudaError> {
        Ok(match op {
            Op::Matrix { rows, matrix } => {
                let (k, n, relu) = (matrix.k, matrix.n, matrix.relu);
                let (scale, bias) = matrix.finish();
                let (scale, bias) = (self.floats(scale)?, self.floats(bias)?);
                let weights = self.floats(&matrix.unpacked())?;
                DeviceOp::Matrix {
                    rows: *rows,
                    matrix: DeviceMatrix { k, n, weights, scale, bias, relu },
                }
            }
            Op::Products { count, m, k, n, transposed } => {
                DeviceOp::Products { count: *count, shape: (*m, *k, *n, *transposed) }
            }
            Op::Map(map) => DeviceOp::Map(map_number(*map)),
            Op::Zip { zip, left, right } => {
                let what = match zip {
                    Zip::Add => 0,
                    Zip::Sub => 1,
                    Zip::Mul => 2,
                    Zip::Div => 3,
                };
                DeviceOp::Zip { what, left: self.operand(left)?, right: self.operand(right)? }
            }
            Op::Sum { outer, n, inner, divisor } => {
                DeviceOp::Sum { outer: *outer, n: *n, inner: *inner, divisor: *divisor }
            }
            Op::Concat { outer, parts } => DeviceOp::Concat { outer: *outer, parts: parts.clone() },
            Op::Pick(picks) => DeviceOp::Pick(self.picks(picks)?),
        })
    }
}

/// The number by which the kernel knows `map`.
pub(crate) fn map_number(map: Map) -> i32 {
    match map {
        Map::Relu => 0,
        Map::Sigmoid => 1,
        Map::Tanh => 2,
    }
}
