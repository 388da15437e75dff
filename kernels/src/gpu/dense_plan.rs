//! The plan of a dense network on the GPU: the nodes of the CPU's layout, each as one or a few
//! launches on a stream. Unless cuBLAS computes the products, the results equal the CPU's to the
//! bit. Weights are in device memory as f32, rounded like the CPU's packed weights. The results
//! between nodes are in buffers that each worker allocates at its start. Never waits for a run.
//!
//! Nodes of up to 1,024 values that follow one another and are no products share a launch.
//!
//! What only shared inputs reach is computed once a request. One launch then copies such a value to
//! each sample of its request, if other nodes read it.

use crate::cuda::cublas::{Cublas, Product};
use crate::cuda::cublas_library::CublasError;
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::matrix::{DeviceMatrix, Start};
use crate::cuda::memory::{Buffer, View};
use crate::dense::Activation;
use crate::dense::graph::functions::Map;
use crate::dense::graph::node::{Node as LayoutNode, VALUE};
use crate::dense::graph::onnx_graph::{Op, Operand};
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::gemm::Matrix;
use crate::dense::matrix::pairs::vectors;
use crate::dense::run::layout::{Layout, Place};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{
    DenseKernels, Groups, MatrixShape, ONCE_DEPTH, ONCE_WIDTH, OWN_ROWS_MAX, Operands, PairShape,
    ProductShape, ResultShape, RowColumns, Side, ValueStep,
};
use crate::gpu::numbers::StepNumber;
use crate::gpu::samples::RequestSize;
use std::sync::Arc;

/// Columns of the result of a product that is short, and of its operand.
const SHORT_WIDTH: usize = 32;
const SHORT_DEPTH: usize = 256;

/// A node of the layout, with its constants on the device.
struct Node {
    inputs: Vec<Id>,
    op: DeviceOp,
    output: Id,
}

/// How a product by weights takes its operands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The second operand, if there is one, has the sums that it continues.
    Plain,
    /// Two operands side by side.
    Joined,
    /// The second operand is a factor of the result, and a third is added.
    Crossed,
}

/// [`Op`] with its constants on the device.
enum DeviceOp {
    Matrix { rows: usize, matrix: DeviceMatrix, form: Form },
    Products { count: usize, shape: ProductShape },
    Pairs { rows: Vec<usize>, k: usize, picks: Buffer<u32> },
    Map(StepNumber),
    Zip { function: StepNumber, left: DeviceOperand, right: DeviceOperand },
    Sum { n: usize, inner: usize, divisor: f32 },
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
    /// Of each value, whether a request has it once.
    shared: Vec<bool>,
    /// The shared values that are copied to the samples of their requests.
    spread: Vec<Id>,
    output: Id,
    /// The first nodes that run before anything is looked up.
    early: usize,
    ending: Ending,
    bytes: usize,
}

/// What makes the scores of the network's result.
enum Ending {
    /// A launch after the nodes.
    Launch,
    /// The node of the result, if there is no activation.
    Node,
    /// The node of the result, or a further step of its launch.
    Step,
    /// The product of the result, if our kernels compute it. Of few rows they do so even beside
    /// cuBLAS, if the product is short: one column of tiles, and few steps.
    Product { is_short: bool },
}

/// The scores of a run.
#[derive(Clone, Copy)]
pub(crate) struct Scores<'a> {
    /// `[samples, outputs]`; the host may have this memory.
    pub values: View<'a, f32>,
    pub activation: Activation,
}

/// Where the work of a run goes, and what it reads.
#[derive(Clone, Copy)]
pub(crate) struct PlanWork<'a> {
    pub kernels: &'a DenseKernels,
    pub stream: &'a Stream,
    pub shape: RunShape<'a>,
    /// `[samples or requests, width]` of each part.
    pub inputs: &'a [View<'a, f32>],
}

/// One worker's memory for runs of a plan.
pub(crate) struct DevicePlanScratch {
    buffers: Vec<Buffer<f32>>,
    /// The copies of the plan's `spread`.
    spread: Vec<Buffer<f32>>,
    /// Computes the products by weights; `None` if this crate's kernels do.
    pub cublas: Option<Cublas>,
}

/// What a run computes.
#[derive(Clone, Copy)]
pub struct RunShape<'a> {
    /// Samples and requests.
    pub size: RequestSize,
    /// The request of each sample, `[samples]`; empty if each sample is a request of its own.
    pub request_of: View<'a, u32>,
}

impl From<usize> for RunShape<'_> {
    fn from(samples: usize) -> Self {
        Self { size: samples.into(), request_of: View::none() }
    }
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
            let op = upload.op(&node.op, layout.widths[node.output])?;
            nodes.push(Node { inputs: node.inputs.clone(), op, output: node.output });
        }
        Ok(Self {
            nodes,
            widths: layout.widths.clone(),
            places: layout.places.clone(),
            buffers: layout.buffers.clone(),
            shared: layout.shared.clone(),
            spread: spread_of(layout),
            ending: ending_of(layout),
            output: layout.output,
            early: layout.early,
            bytes: upload.bytes,
        })
    }

    /// Returns the bytes of weights and index tables.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether our kernels read each row of input `id` once, however many columns their
    /// results have.
    pub fn reads_once(&self, id: Id) -> bool {
        let mut readers = self.nodes.iter().filter(|node| node.inputs.contains(&id));
        readers.all(|node| match &node.op {
            DeviceOp::Matrix { matrix, form, .. } => {
                let is_factor = *form == Form::Crossed && node.inputs[1..].contains(&id);
                !is_factor && is_read_once(matrix)
            }
            op => matches!(op, DeviceOp::Concat { .. }),
        })
    }

    /// Allocates memory for runs of up to `batch_max` samples.
    pub fn scratch(
        &self,
        gpu: &Arc<Gpu>,
        batch_max: usize,
    ) -> Result<DevicePlanScratch, CudaError> {
        let make = |width: usize| gpu.buffer(width * batch_max);
        let buffers = self.buffers.iter().map(|width| make(*width)).collect::<Result<_, _>>()?;
        let spread = self.spread.iter().map(|&id| make(self.widths[id]));
        Ok(DevicePlanScratch { buffers, spread: spread.collect::<Result<_, _>>()?, cublas: None })
    }

    /// Returns the bytes of a scratch for up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        let spread: usize = self.spread.iter().map(|&id| self.widths[id]).sum();
        4 * (self.buffers.iter().sum::<usize>() + spread) * batch_max
    }

    /// Puts the nodes onto the stream that run before anything is looked up.
    pub fn enqueue_early(
        &self,
        work: PlanWork<'_>,
        scratch: &mut DevicePlanScratch,
    ) -> Result<(), CublasError> {
        let DevicePlanScratch { buffers, spread, cublas } = scratch;
        let run = Run { plan: self, work, buffers, spread, scores: None };
        run.enqueue(&self.nodes[..self.early], cublas.as_mut())
    }

    /// Puts the other nodes and `scores` onto the stream.
    pub fn enqueue_rest(
        &self,
        work: PlanWork<'_>,
        scores: Scores<'_>,
        scratch: &mut DevicePlanScratch,
    ) -> Result<(), CublasError> {
        let DevicePlanScratch { buffers, spread, cublas } = scratch;
        let is_written = match self.ending {
            Ending::Launch => false,
            Ending::Node => scores.activation == Activation::None,
            Ending::Step => true,
            Ending::Product { is_short } => {
                cublas.is_none() || is_short && work.shape.size.samples <= OWN_ROWS_MAX
            }
        };
        let run = Run { plan: self, work, buffers, spread, scores: is_written.then_some(scores) };
        // Shared nodes come first.
        let of_requests = self.nodes.iter().take_while(|node| self.shared[node.output]).count();
        let (of_requests, of_samples) = self.nodes.split_at(of_requests.max(self.early));
        run.enqueue(&of_requests[self.early..], cublas.as_mut())?;
        run.spread()?;
        run.enqueue(of_samples, cublas.as_mut())?;
        if !is_written {
            run.enqueue_scores(scores)?;
        }
        Ok(())
    }
}

/// Returns whether our kernels read each row of an operand of `matrix` once.
fn is_read_once(matrix: &DeviceMatrix) -> bool {
    matrix.k <= ONCE_DEPTH && matrix.n <= ONCE_WIDTH
}

/// Returns what makes the scores of `layout`.
fn ending_of(layout: &Layout) -> Ending {
    let output = layout.output;
    let is_read = layout.nodes.iter().any(|node| node.inputs.contains(&output));
    match layout.nodes[layout.early..].iter().find(|node| node.output == output) {
        Some(_) if is_read || layout.shared[output] => Ending::Launch,
        // These products read their results, and the host's memory is slow to read.
        Some(LayoutNode { op: Op::Matrix { .. }, inputs, .. }) if inputs.len() > 1 => {
            Ending::Launch
        }
        Some(LayoutNode { op: Op::Crossed { .. }, .. }) => Ending::Launch,
        Some(LayoutNode { op: Op::Matrix { matrix, .. } | Op::Joined(matrix), .. }) => {
            let is_short = matrix.k <= SHORT_DEPTH && matrix.n <= SHORT_WIDTH;
            Ending::Product { is_short }
        }
        Some(node) if node.op.is_product() => Ending::Node,
        Some(_) => Ending::Step,
        None => Ending::Launch,
    }
}

/// Returns the shared values that a node of each sample reads, or that are the result. The sums
/// that a product continues are copied by that product.
fn spread_of(layout: &Layout) -> Vec<Id> {
    let own = layout.nodes.iter().filter(|node| !layout.shared[node.output]);
    let operands = own.flat_map(|node| match &node.op {
        Op::Matrix { .. } => &node.inputs[..1],
        _ => &node.inputs[..],
    });
    let mut spread: Vec<Id> = operands.copied().chain([layout.output]).collect();
    spread.retain(|&id| layout.shared[id]);
    spread.sort_unstable();
    spread.dedup();
    spread
}

/// One run of a plan while it is put onto a stream.
struct Run<'a> {
    plan: &'a DevicePlan,
    work: PlanWork<'a>,
    buffers: &'a [Buffer<f32>],
    spread: &'a [Buffer<f32>],
    /// The scores, if the node of the result writes them.
    scores: Option<Scores<'a>>,
}

impl<'a> Run<'a> {
    /// Returns the number of samples, or of requests, that have value `id`.
    fn rows(&self, id: Id) -> usize {
        let RequestSize { samples, requests } = self.work.shape.size;
        if self.plan.shared[id] { requests } else { samples }
    }

    fn value(&self, id: Id) -> View<'a, f32> {
        let all = match self.plan.places[id] {
            Place::Input(i) => self.work.inputs[i],
            Place::Buffer(b) => self.buffers[b].view(),
        };
        all.first(self.rows(id) * self.plan.widths[id])
    }

    /// Returns value `id` of each sample.
    fn of_samples(&self, id: Id) -> View<'a, f32> {
        match self.plan.spread.binary_search(&id) {
            Ok(number) if !self.work.shape.request_of.is_empty() => self.spread[number]
                .view()
                .first(self.work.shape.size.samples * self.plan.widths[id]),
            _ => self.value(id),
        }
    }

    /// Copies the shared values that nodes of each sample read.
    fn spread(&self) -> Result<(), CudaError> {
        let copies: &[Id] =
            if self.work.shape.request_of.is_empty() { &[] } else { &self.plan.spread[..] };
        copies.iter().try_for_each(|&id| self.copy(id, self.of_samples(id)))
    }

    /// Copies value `id` to each sample, in `to`.
    fn copy(&self, id: Id, to: View<f32>) -> Result<(), CudaError> {
        let width = self.plan.widths[id];
        let shared = self.plan.shared[id];
        let numbers = if shared { self.work.shape.request_of } else { View::none() };
        let shape = ResultShape { samples: self.work.shape.size.samples, width };
        let columns = |values| RowColumns { values, first: 0, stride: width };
        self.work.kernels.gather(
            self.work.stream,
            columns(self.value(id)),
            numbers,
            shape,
            columns(to),
        )
    }

    /// Returns operand `i` of `node`.
    fn operand(&self, node: &Node, i: usize) -> View<'a, f32> {
        let id = node.inputs[i];
        if self.plan.shared[node.output] { self.value(id) } else { self.of_samples(id) }
    }

    /// Returns the scores, if `node` writes them.
    fn scores_of(&self, node: &Node) -> Option<Scores<'a>> {
        self.scores.filter(|_| node.output == self.plan.output)
    }

    /// Puts `nodes`, all of requests or all of samples, onto the stream.
    fn enqueue(
        &self,
        nodes: &'a [Node],
        mut cublas: Option<&mut Cublas>,
    ) -> Result<(), CublasError> {
        let PlanWork { kernels, stream, .. } = self.work;
        let Some(first) = nodes.first() else { return Ok(()) };
        let (samples, mut steps) = (self.rows(first.output), Vec::new());
        for node in nodes {
            if !self.add_steps(node, &mut steps) {
                kernels.steps(stream, samples, &steps)?;
                steps.clear();
                self.enqueue_product(node, cublas.as_deref_mut())?;
            }
        }
        Ok(kernels.steps(stream, samples, &steps)?)
    }

    /// Adds the steps of `node`; returns false if it is a product.
    fn add_steps(&self, node: &'a Node, steps: &mut Vec<ValueStep<'a>>) -> bool {
        let width = self.plan.widths[node.output];
        let scores = self.scores_of(node);
        // A sigmoid reads its operand, and the host's memory is slow to read.
        let unfinished = scores.filter(|scores| scores.activation == Activation::Sigmoid);
        let out = match scores {
            Some(scores) if unfinished.is_none() => scores.values,
            _ => self.value(node.output),
        };
        let whole = |i: usize| {
            let width = self.plan.widths[node.inputs[i]];
            Side { values: self.operand(node, i), picks: View::none(), width }
        };
        let step = |function, sides| ValueStep::new(function, sides, width, out);
        match &node.op {
            DeviceOp::Map(function) => steps.push(step(*function, [whole(0), Side::none()])),
            DeviceOp::Zip { function, left, right } => {
                steps.push(step(*function, [self.side(left, node), self.side(right, node)]));
            }
            DeviceOp::Sum { n, inner, divisor } => {
                let groups = Groups { inner: *inner, stride: n * inner, n: *n, divisor: *divisor };
                let sum = step(StepNumber::Sum, [whole(0), Side::none()]);
                steps.push(ValueStep { groups, ..sum });
            }
            DeviceOp::Concat { outer, parts } => {
                let (stride, mut before) = (parts.iter().sum(), 0);
                for (i, &inner) in parts.iter().enumerate() {
                    let groups = Groups { inner, stride, n: 1, divisor: 1.0 };
                    let sides = [whole(i), Side::none()];
                    let copy =
                        ValueStep::new(StepNumber::Copy, sides, outer * inner, out.skip(before));
                    steps.push(ValueStep { groups, pitch: width, ..copy });
                    before += inner;
                }
            }
            DeviceOp::Pick(picks) => {
                let side = Side { picks: picks.view(), ..whole(0) };
                steps.push(step(StepNumber::Copy, [side, Side::none()]));
            }
            DeviceOp::Matrix { .. } | DeviceOp::Products { .. } | DeviceOp::Pairs { .. } => {
                return false;
            }
        }
        if let Some(Scores { values, .. }) = unfinished {
            let side = Side { values: out, picks: View::none(), width };
            let sides = [side, Side::none()];
            steps.push(ValueStep::new(StepNumber::Score, sides, width, values));
        }
        true
    }

    /// Puts a product onto the stream.
    fn enqueue_product(&self, node: &Node, cublas: Option<&mut Cublas>) -> Result<(), CublasError> {
        let PlanWork { kernels, stream, .. } = self.work;
        let (samples, scores) = (self.rows(node.output), self.scores_of(node));
        let out = scores.map_or_else(|| self.value(node.output), |scores| scores.values);
        let read = |i: usize| self.operand(node, i);

        match &node.op {
            DeviceOp::Matrix { rows, matrix, form } => {
                let m = samples * rows;
                let start = match node.inputs.get(1) {
                    Some(&sums) if *form == Form::Plain => {
                        self.copy(sums, out)?;
                        Start::Sums
                    }
                    _ => Start::Zero,
                };
                // Ours read the host's memory once, and write scores.
                let is_once = read(0).on_host() && is_read_once(matrix);
                let Some(cublas) = cublas.filter(|_| !is_once && scores.is_none()) else {
                    let is_score = scores.is_some_and(|s| s.activation == Activation::Sigmoid);
                    let shape = MatrixShape { m, start, is_score };
                    let view = |i: usize| {
                        if i < node.inputs.len() { read(i) } else { View::none() }
                    };
                    let plain = Operands::of(read(0));
                    let operands = match form {
                        Form::Plain => plain,
                        Form::Joined => Operands { rest: read(1), ..plain },
                        Form::Crossed => Operands { factor: read(1), addend: view(2), ..plain },
                    };
                    return Ok(kernels.matrix(stream, shape, operands, matrix, out)?);
                };
                let product = cublas.multiply(stream, m, read(0), matrix, out, start)?;
                if product == Product::Unfinished {
                    kernels.finish(stream, m, matrix, out)?;
                }
            }
            DeviceOp::Products { count, shape } => {
                kernels.products(stream, samples * count, *shape, [read(0), read(1)], out)?;
            }
            DeviceOp::Pairs { rows, k, picks } => {
                let shape = PairShape { samples, rows, k: *k };
                kernels.pairs(stream, shape, read, picks.view(), out)?;
            }
            _ => unreachable!("the caller passes products only"),
        }
        Ok(())
    }

    /// Puts the launch onto the stream that makes `scores` of the result.
    fn enqueue_scores(&self, Scores { values, activation }: Scores<'_>) -> Result<(), CudaError> {
        let PlanWork { kernels, stream, shape, .. } = self.work;
        let result = self.of_samples(self.plan.output);
        match activation {
            Activation::Sigmoid => kernels.map(stream, StepNumber::Score, result, values),
            Activation::None => {
                let width = self.plan.widths[self.plan.output];
                let [from, to] =
                    [result, values].map(|values| RowColumns { values, first: 0, stride: width });
                let shape = ResultShape { samples: shape.size.samples, width };
                kernels.gather(stream, from, View::none(), shape, to)
            }
        }
    }

    fn side(&self, operand: &'a DeviceOperand, node: &Node) -> Side<'a> {
        match operand {
            DeviceOperand::Value { input, picks } => {
                let picks = picks.as_ref().map_or(View::none(), Buffer::view);
                let width = self.plan.widths[node.inputs[*input]];
                Side { values: self.operand(node, *input), picks, width }
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

    fn matrix(&mut self, matrix: &Matrix) -> Result<DeviceMatrix, CudaError> {
        let (k, n, relu) = (matrix.k, matrix.n, matrix.relu);
        let (scale, bias) = matrix.finish();
        let is_scaled = scale.iter().any(|scale| *scale != 1.0);
        let (scale, bias) = (self.floats(scale)?, self.floats(bias)?);
        let weights = self.floats(&matrix.unpacked())?;
        Ok(DeviceMatrix { k, n, weights, scale, is_scaled, bias, relu })
    }

    /// Uploads `op`, whose result has `width` values.
    fn op(&mut self, op: &Op, width: usize) -> Result<DeviceOp, GpuDenseError> {
        let missing = |what: String| GpuDenseError::Unsupported(what);
        Ok(match op {
            Op::Matrix { rows, matrix } => {
                DeviceOp::Matrix { rows: *rows, matrix: self.matrix(matrix)?, form: Form::Plain }
            }
            Op::Joined(matrix) => {
                DeviceOp::Matrix { rows: 1, matrix: self.matrix(matrix)?, form: Form::Joined }
            }
            Op::Crossed { rows, matrix } => {
                DeviceOp::Matrix { rows: *rows, matrix: self.matrix(matrix)?, form: Form::Crossed }
            }

            Op::Products { count, m, k, n, transposed } => {
                let shape = ProductShape { m: *m, k: *k, n: *n, transposed: *transposed };
                DeviceOp::Products { count: *count, shape }
            }

            Op::Pairs { rows, k, picks } => {
                let n = rows.iter().sum();
                let pick = |&pick: &u32| match pick & VALUE {
                    0 => {
                        let [later, earlier] = vectors(n, pick as usize);
                        (later << 16 | earlier) as u32
                    }
                    _ => {
                        let value = (pick ^ VALUE) as usize;
                        VALUE | ((value / k) << 16 | (value % k)) as u32
                    }
                };
                let picks: Vec<u32> = picks.iter().map(pick).collect();
                DeviceOp::Pairs { rows: rows.clone(), k: *k, picks: self.picks(&picks)? }
            }
            Op::Map(Map::Neg) => DeviceOp::Zip {
                function: StepNumber::Multiply,
                left: DeviceOperand::Value { input: 0, picks: None },
                right: DeviceOperand::Constant(self.floats(&vec![-1.0; width])?),
            },
            Op::Map(map) => {
                DeviceOp::Map(StepNumber::of_map(*map).ok_or_else(|| missing(format!("{map:?}")))?)
            }
            Op::Zip { zip, left, right } => {
                let function =
                    StepNumber::of_zip(*zip).ok_or_else(|| missing(format!("{zip:?}")))?;
                let (left, right) = (self.operand(left)?, self.operand(right)?);
                DeviceOp::Zip { function, left, right }
            }

            Op::Sum { n, inner, divisor, .. } => {
                DeviceOp::Sum { n: *n, inner: *inner, divisor: *divisor }
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
