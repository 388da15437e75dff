//! The plan of a dense network on the GPU: the nodes of the CPU's layout, each as one or a few
//! launches on a stream. Unless cuBLAS computes the products, the results equal the CPU's to the
//! bit. Weights are in device memory as f32, rounded like the CPU's packed weights. The results
//! between nodes are in buffers that each worker allocates at its start. Never waits for a run.

use crate::cuda::cublas::{Cublas, Product};
use crate::cuda::cublas_library::CublasError;
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::matrix::DeviceMatrix;
use crate::cuda::memory::{Buffer, View};
use crate::dense::graph::onnx_graph::{Op, Operand};
use crate::dense::graph::tensor::Id;
use crate::dense::run::layout::{Layout, Place};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{Columns, DenseKernels, ProductShape, ResultShape, Side, SumShape};
use crate::gpu::numbers::{MapNumber, ZipNumber};
use std::sync::Arc;

/// A node of the layout, with its constants on the device.
struct Node {
    inputs: Vec<Id>,
    op: DeviceOp,
    output: Id,
}

/// [`Op`] with its constants on the device.
enum DeviceOp {
    Matrix { rows: usize, matrix: DeviceMatrix },
    Products { count: usize, shape: ProductShape },
    Map(MapNumber),
    Zip { function: ZipNumber, left: DeviceOperand, right: DeviceOperand },
    Sum { outer: usize, n: usize, inner: usize, divisor: f32 },
    Concat { outer: usize, parts: Vec<usize> },
    Pick(Buffer<u32>),
}

/// [`Operand`] with its constants on the device.
enum DeviceOperand {
    Value { input: usize, picks: Option<Buffer<u32>> },
    Constant(Buffer<f32>),
}

/// A network on a GPU, ready to run. It is read-only; all workers share it.
pub(crate) struct DevicePlan {
    nodes: Vec<Node>,
    widths: Vec<usize>,
    places: Vec<Place>,
    buffers: Vec<usize>,
    output: Id,
    bytes: usize,
}

/// One worker's memory for runs of a plan.
pub(crate) struct DevicePlanScratch {
    buffers: Vec<Buffer<f32>>,
    /// Computes the products by weights; `None` if this crate's kernels do.
    pub cublas: Option<Cublas>,
}

impl DevicePlan {
    /// Uploads `layout` to `gpu`.
    ///
    /// # Errors
    /// [`GpuDenseError::Unsupported`] if there is no kernel for a node, or [`GpuDenseError::Cuda`].
    pub fn new(layout: &Layout, gpu: &Arc<Gpu>) -> Result<Self, GpuDenseError> {
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

    /// Returns the bytes of weights and index tables.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Allocates memory for runs of up to `batch_max` samples.
    pub fn scratch(
        &self,
        gpu: &Arc<Gpu>,
        batch_max: usize,
    ) -> Result<DevicePlanScratch, CudaError> {
        let buffers =
            self.buffers.iter().map(|w| gpu.buffer(w * batch_max)).collect::<Result<_, _>>()?;
        Ok(DevicePlanScratch { buffers, cublas: None })
    }

    /// Returns the bytes of a scratch for up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        4 * self.buffers.iter().sum::<usize>() * batch_max
    }

    /// Puts a run of `samples` samples onto `stream`; returns the view of its result.
    pub fn enqueue<'a>(
        &self,
        kernels: &DenseKernels,
        stream: &Stream,
        samples: usize,
        inputs: &'a [Buffer<f32>],
        scratch: &'a mut DevicePlanScratch,
    ) -> Result<View<'a, f32>, CublasError> {
        let DevicePlanScratch { buffers, cublas } = scratch;
        let run = Run { plan: self, kernels, stream, samples, inputs, buffers };
        for node in &self.nodes {
            run.enqueue_node(node, cublas.as_mut())?;
        }
        Ok(run.value(self.output))
    }
}

/// One run of a plan while it is put onto a stream.
struct Run<'a, 'r> {
    plan: &'r DevicePlan,
    kernels: &'r DenseKernels,
    stream: &'r Stream,
    samples: usize,
    inputs: &'a [Buffer<f32>],
    buffers: &'a [Buffer<f32>],
}

impl<'a> Run<'a, '_> {
    fn value(&self, id: Id) -> View<'a, f32> {
        let all = match self.plan.places[id] {
            Place::Input(i) => self.inputs[i].view(),
            Place::Buffer(b) => self.buffers[b].view(),
        };
        all.first(self.samples * self.plan.widths[id])
    }

    fn enqueue_node(&self, node: &Node, cublas: Option<&mut Cublas>) -> Result<(), CublasError> {
        let Self { plan, kernels, stream, samples, .. } = *self;
        let read = |i: usize| self.value(node.inputs[i]);
        let shape_of = |id: Id| ResultShape { samples, width: plan.widths[id] };
        let out = self.value(node.output);

        match &node.op {
            DeviceOp::Matrix { rows, matrix } => match cublas {
                Some(cublas) => {
                    let product = cublas.multiply(stream, samples * rows, read(0), matrix, out)?;
                    if product == Product::Unfinished {
                        kernels.finish(stream, samples * rows, matrix, out)?;
                    }
                }
                None => kernels.matrix(stream, samples * rows, read(0), matrix, out)?,
            },
            DeviceOp::Products { count, shape } => {
                kernels.products(stream, samples * count, *shape, [read(0), read(1)], out)?;
            }
            DeviceOp::Map(function) => kernels.map(stream, *function, read(0), out)?,
            DeviceOp::Zip { function, left, right } => {
                let sides = [self.side(left, node), self.side(right, node)];
                kernels.zip(stream, *function, sides, shape_of(node.output), out)?;
            }
            DeviceOp::Sum { outer, n, inner, divisor } => {
                let shape = SumShape { outer: samples * outer, n: *n, inner: *inner };
                kernels.sum(stream, read(0), shape, *divisor, out)?;
            }
            DeviceOp::Concat { outer, parts } => {
                let (rows, stride, mut first) = (samples * outer, parts.iter().sum(), 0);
                for (i, &part) in parts.iter().enumerate() {
                    kernels.concat(stream, read(i), Columns { rows, part, stride, first }, out)?;
                    first += part;
                }
            }
            DeviceOp::Pick(picks) => {
                kernels.pick(stream, read(0), shape_of(node.inputs[0]), picks.view(), out)?;
            }
        }
        Ok(())
    }

    fn side<'s>(&self, operand: &'s DeviceOperand, node: &Node) -> Side<'s>
    where
        'a: 's,
    {
        match operand {
            DeviceOperand::Value { input, picks } => {
                let id = node.inputs[*input];
                let picks = picks.as_ref().map_or(View::none(), Buffer::view);
                Side { values: self.value(id), picks, width: self.plan.widths[id] }
            }
            DeviceOperand::Constant(values) => {
                Side { values: values.view(), picks: View::none(), width: 0 }
            }
        }
    }
}

/// Uploads constants and counts their bytes.
struct Upload<'a> {
    gpu: &'a Arc<Gpu>,
    stream: Stream,
    bytes: usize,
}

impl Upload<'_> {
    fn floats(&mut self, values: &[f32]) -> Result<Buffer<f32>, CudaError> {
        let buffer = self.gpu.buffer(values.len())?;
        self.stream.upload(values, &buffer, 0)?;
        self.bytes += size_of_val(values);
        Ok(buffer)
    }

    fn picks(&mut self, picks: &[u32]) -> Result<Buffer<u32>, CudaError> {
        let buffer = self.gpu.buffer(picks.len())?;
        self.stream.upload(picks, &buffer, 0)?;
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

    fn op(&mut self, op: &Op) -> Result<DeviceOp, GpuDenseError> {
        let missing = |what: String| GpuDenseError::Unsupported(what);
        Ok(match op {
            Op::Matrix { rows, matrix } => {
                let (k, n, relu) = (matrix.k, matrix.n, matrix.relu);
                let (scale, bias) = matrix.finish();
                let is_scaled = scale.iter().any(|scale| *scale != 1.0);
                let (scale, bias) = (self.floats(scale)?, self.floats(bias)?);
                let weights = self.floats(&matrix.unpacked())?;
                DeviceOp::Matrix {
                    rows: *rows,
                    matrix: DeviceMatrix { k, n, weights, scale, is_scaled, bias, relu },
                }
            }

            Op::Products { count, m, k, n, transposed } => {
                let shape = ProductShape { m: *m, k: *k, n: *n, transposed: *transposed };
                DeviceOp::Products { count: *count, shape }
            }

            Op::Pairs { .. } => unreachable!("only the CPU's layout has pairs"),
            Op::Map(map) => {
                DeviceOp::Map(MapNumber::of(*map).ok_or_else(|| missing(format!("{map:?}")))?)
            }
            Op::Zip { zip, left, right } => {
                let function = ZipNumber::of(*zip).ok_or_else(|| missing(format!("{zip:?}")))?;
                let (left, right) = (self.operand(left)?, self.operand(right)?);
                DeviceOp::Zip { function, left, right }
            }

            Op::Sum { outer, n, inner, divisor } => {
                DeviceOp::Sum { outer: *outer, n: *n, inner: *inner, divisor: *divisor }
            }
            Op::Concat { outer, parts } => DeviceOp::Concat { outer: *outer, parts: parts.clone() },
            Op::Pick(picks) => DeviceOp::Pick(self.picks(picks)?),
            Op::Select(_) => return Err(missing("Where".to_owned())),
            Op::Fold { fold, .. } => return Err(missing(format!("Reduce{fold:?}"))),
            Op::Softmax { .. } => return Err(missing("Softmax".to_owned())),
            Op::Recurrent(_) => return Err(missing("a recurrent operator".to_owned())),
            Op::Lookup { .. } => return Err(missing("Gather by computed indices".to_owned())),
            Op::Order { .. } => return Err(missing("TopK".to_owned())),
            Op::Check { .. } => return Err(missing("arithmetic on integers".to_owned())),
        })
    }
}
