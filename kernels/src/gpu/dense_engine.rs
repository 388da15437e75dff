//! The dense network on a GPU. Three backends are tried in this order: TensorRT, the plan of
//! Hatchback's kernels with cuBLAS for the products, and the plan of Hatchback's kernels alone. The
//! first two are tried only if the target allows another precision than the CPU's. A backend is
//! used only if it gives the CPU's scores on generated samples. They must be equal to the bit for
//! the kernels alone, and within the bound of its precision for the others. The engine logs the
//! backend that it uses, and why it rejected the earlier ones.

use crate::cuda::cublas::Cublas;
use crate::cuda::cublas_library::Factors;
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::memory::{Buffer, View};
use crate::dense::graph::onnx;
use crate::dense::graph::onnx_graph::{Graph, Stop};
use crate::dense::run::layout::Layout;
use crate::dense::{Activation, DenseEngine, DenseError, match_interface, widen};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{Columns, DenseKernels, ResultShape, RowColumns};
use crate::gpu::dense_plan::{DevicePlan, DevicePlanScratch, RunShape};
use crate::gpu::input_type::InputType;
use crate::gpu::numbers::MapNumber;
use crate::gpu::precision::Precision;
use crate::gpu::tensorrt::{self, BatchClass, Build, BuildInput, Plans, TensorRt};
use crate::simd::isa::Isa;
use serde::Deserialize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Samples on which a GPU's scores are compared with the CPU's.
const CHECK_SAMPLES: usize = 64;

/// A dense network, and the names of its inputs and output in the schema.
#[derive(Clone, Copy, Debug)]
pub struct DenseNetwork<'a> {
    /// The ONNX file.
    pub onnx: &'a [u8],
    /// Names and widths of the inputs, in the order that a run takes them.
    pub inputs: &'a [(&'a str, usize)],
    /// Of each input, whether a request has one value; empty if no input is shared.
    pub shared: &'a [bool],
    /// The output's name.
    pub output: &'a str,
    /// The function that turns the output into scores.
    pub activation: Activation,
}

/// Options of TensorRT.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRtOptions {
    /// Path of `libhatchback_tensorrt.so`, which `kernels/tensorrt/make` builds.
    pub shim: PathBuf,
    /// Paths of `libnvinfer` and its ONNX parser; without them the loader finds both by name.
    #[serde(default)]
    pub libraries: Option<(PathBuf, PathBuf)>,
    /// The folder that keeps the plans built on this machine.
    pub plans: PathBuf,
    /// Largest device memory that a layer may use while it runs.
    pub workspace_bytes_max: u64,
}

/// A target's options for dense networks on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuDense {
    /// TensorRT, which is tried first.
    pub tensorrt: Option<TensorRtOptions>,
    /// How precisely a network is computed. `Exact` allows neither TensorRT nor cuBLAS.
    pub precision: Precision,
}

/// The options for one network: its backends, and its batches.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The backends.
    pub dense: GpuDense,
    /// The largest number of samples in a run.
    pub batch_max: usize,
    /// Numbers of the inputs that may be f16 if the network computes in f16. Only lookups fill
    /// these inputs, in pieces of four columns.
    pub f16_inputs: Vec<usize>,
}

/// A network on a GPU. Holding one proves that it gave the CPU's scores on that GPU, within the
/// bound of its backend.
pub struct DeviceEngine {
    gpu: Arc<Gpu>,
    kernels: Arc<DenseKernels>,
    backend: Backend,
    widths: Vec<usize>,
    types: Vec<InputType>,
    /// Of each input, whether a request has one value.
    shared: Vec<bool>,
    outputs: usize,
    activation: Activation,
    batch_max: usize,
    rejected: Vec<String>,
}

enum Backend {
    TensorRt { engine: tensorrt::Engine, name: String },
    Plan { plan: Arc<DevicePlan>, precision: Precision },
}

/// The memory and handles of one worker's runs, like `DenseScratch` on the CPU.
pub struct DeviceScratch {
    batch_max: usize,
    backend: BackendScratch,
}

enum BackendScratch {
    /// TensorRT knows no requests: it takes the shared inputs as copies for each sample.
    TensorRt {
        context: tensorrt::Context,
        spread: Vec<Option<Buffer<f32>>>,
    },
    Plan(DevicePlanScratch),
}

impl DeviceEngine {
    /// Loads `network` onto `gpu` with the first backend of `options` that gives the CPU's scores.
    ///
    /// # Errors
    /// [`GpuDenseError::Dense`] if the file does not load, [`GpuDenseError::Unsupported`] if the
    /// GPU has no kernel for an operator, or the error of the last backend.
    pub fn load(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
    ) -> Result<Self, GpuDenseError> {
        // A GPU computes with f32 weights; each backend narrows what its precision allows.
        let onnx = widen(network.onnx.to_vec())?;
        let network = &DenseNetwork { onnx: &onnx, ..*network };
        let model = onnx::read(onnx.clone().into())?;
        let shapes = match_interface(&model, network.inputs, network.output)?;
        let inputs: Vec<_> = network
            .inputs
            .iter()
            .zip(&shapes)
            .map(|((name, _), shape)| (*name, shape.clone()))
            .collect();
        let DenseNetwork { onnx, inputs: fed, shared, output, activation } = *network;
        let mut shared = shared.to_vec();
        shared.resize(fed.len(), false);
        let isa = Isa::detect();
        let onnx = onnx.to_vec();
        let reference = DenseEngine::load_for(isa, onnx, fed, &shared, output, activation)?;
        let loader = Loader {
            gpu,
            network,
            shared: &shared,
            kernels: Arc::new(DenseKernels::load(gpu)?),
            reference: &reference,
            batch_max: options.batch_max,
            f16_inputs: &options.f16_inputs,
        };

        let mut rejected = Vec::new();
        let GpuDense { tensorrt, precision } = &options.dense;
        let precision = *precision;
        if let Some(tensorrt) = tensorrt.as_ref().filter(|_| precision != Precision::Exact) {
            match loader.load_tensorrt(tensorrt, precision, &inputs, &mut rejected) {
                Ok(engine) => return Ok(Self { rejected, ..engine }),
                Err(e) => reject(&e, &mut rejected),
            }
        }

        let layout = match Graph::build(&model, &inputs, network.output) {
            Ok(graph) => Layout::for_gpu(graph, &shared),
            Err(Stop::Refused(e)) => return Err(e.into()),
            Err(Stop::Unsupported(operator)) => return Err(GpuDenseError::Unsupported(operator)),
        };
        let plan = Arc::new(DevicePlan::new(&layout, gpu)?);
        if let Some(factors) = precision.factors() {
            match loader.load_cublas(&plan, precision, factors, &mut rejected) {
                Ok(engine) => return Ok(Self { rejected, ..engine }),
                Err(e) => reject(&e, &mut rejected),
            }
        }

        let backend = Backend::Plan { plan, precision: Precision::Exact };
        let engine = loader.engine(backend).check(&reference, 0.0)?;
        Ok(Self { rejected, ..engine })
    }

    /// Returns the backend in words.
    pub fn runs_on(&self) -> String {
        match &self.backend {
            Backend::TensorRt { name, .. } => name.clone(),
            Backend::Plan { precision: Precision::Exact, .. } => {
                "Hatchback's kernels, equal to the CPU to the bit".to_owned()
            }
            Backend::Plan { precision, .. } => {
                format!("Hatchback's kernels, products by cuBLAS in {}", precision.name())
            }
        }
    }

    /// Returns the reasons why earlier backends were rejected.
    pub fn rejected(&self) -> &[String] {
        &self.rejected
    }

    /// Returns whether the scores equal the CPU's to the bit.
    pub fn is_exact(&self) -> bool {
        matches!(self.backend, Backend::Plan { precision: Precision::Exact, .. })
    }

    /// Returns whether a graph must own the scratch that it was recorded with, as TensorRT's
    /// contexts require.
    pub fn graphs_own_scratch(&self) -> bool {
        matches!(self.backend, Backend::TensorRt { .. })
    }

    /// Returns the number of values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the type of each input.
    pub fn input_types(&self) -> &[InputType] {
        &self.types
    }

    /// Returns the words of one sample of input `number`.
    pub(crate) fn input_words(&self, number: usize) -> usize {
        self.types[number].words(self.widths[number])
    }

    /// Returns the bytes of the weights in device memory. For TensorRT, which does not report them,
    /// it is the size of the plan.
    pub fn bytes(&self) -> u64 {
        match &self.backend {
            Backend::TensorRt { engine, .. } => engine.bytes(),
            Backend::Plan { plan, .. } => plan.bytes() as u64,
        }
    }

    /// Returns the bytes of device memory of a scratch for up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> u64 {
        match &self.backend {
            Backend::TensorRt { engine, .. } => {
                let words = (0..self.shared.len()).filter(|i| self.shared[*i]);
                let spread: usize = words.map(|i| self.input_words(i)).sum();
                engine.context_bytes() + 4 * (spread * batch_max) as u64
            }
            Backend::Plan { plan, .. } => plan.scratch_bytes(batch_max) as u64,
        }
    }

    /// Allocates a worker's memory for runs of up to `batch_max` samples.
    ///
    /// # Errors
    /// [`GpuDenseError`]: there is not enough memory, or the network was loaded for smaller
    /// batches.
    pub fn scratch(&self, batch_max: usize) -> Result<DeviceScratch, GpuDenseError> {
        if batch_max > self.batch_max {
            return Err(DenseError::Batch { batch: batch_max, max: self.batch_max }.into());
        }
        let backend = match &self.backend {
            Backend::TensorRt { engine, .. } => {
                let copy = |i: usize| self.gpu.buffer(batch_max * self.input_words(i));
                let shared = self.shared.iter().enumerate();
                let spread = shared.map(|(i, shared)| shared.then(|| copy(i)).transpose());
                let spread = spread.collect::<Result<_, _>>()?;
                BackendScratch::TensorRt { context: engine.context()?, spread }
            }
            Backend::Plan { plan, precision } => {
                let mut scratch = plan.scratch(&self.gpu, batch_max)?;
                let cublas = precision.factors().map(|factors| Cublas::open(&self.gpu, factors));
                scratch.cublas = cublas.transpose()?;
                BackendScratch::Plan(scratch)
            }
        };
        Ok(DeviceScratch { batch_max, backend })
    }

    /// Puts a run of `shape` onto `stream`. `inputs[i]` has room for `[samples, width of input i]`
    /// values of the input's type. A shared input begins with `[requests, width]`, the others are
    /// full. `scores` has room for `[samples, outputs]`, and `scratch` is of this engine. All of
    /// them must stay alive until the stream has run the work.
    ///
    /// # Errors
    /// [`GpuDenseError::Dense`] if the batch is larger than the scratch,
    /// [`GpuDenseError::Buffers`], or the backend's error.
    pub fn enqueue<'s>(
        &self,
        stream: &Stream,
        shape: impl Into<RunShape<'s>>,
        inputs: &[Buffer<f32>],
        scores: View<f32>,
        scratch: &mut DeviceScratch,
    ) -> Result<(), GpuDenseError> {
        let shape = shape.into();
        let batch = shape.size.samples;
        if batch > scratch.batch_max {
            return Err(DenseError::Batch { batch, max: scratch.batch_max }.into());
        }
        let short = |(i, words): (usize, &Buffer<f32>)| words.len() < batch * self.input_words(i);
        if inputs.len() != self.widths.len() || inputs.iter().enumerate().any(short) {
            return Err(GpuDenseError::Buffers(format!("inputs do not hold {batch} samples")));
        }
        let values = batch * self.outputs;
        if scores.len() < values {
            let problem = format!("room for {} scores, {batch} samples", scores.len());
            return Err(GpuDenseError::Buffers(problem));
        }

        let scores = scores.first(values);
        match (&self.backend, &mut scratch.backend) {
            (Backend::TensorRt { .. }, BackendScratch::TensorRt { context, spread }) => {
                let inputs = self.spread_inputs(stream, shape, inputs, spread)?;
                context.enqueue(stream, batch, &inputs, scores)?;
                if self.activation == Activation::Sigmoid {
                    self.kernels.map(stream, MapNumber::Sigmoid, scores, scores)?;
                }
            }
            (Backend::Plan { plan, .. }, BackendScratch::Plan(scratch)) => {
                let result = plan.enqueue(&self.kernels, stream, shape, inputs, scratch)?;
                match self.activation {
                    Activation::Sigmoid => {
                        self.kernels.map(stream, MapNumber::Sigmoid, result, scores)?;
                    }
                    Activation::None => {
                        let (part, stride) = (self.outputs, self.outputs);
                        let all = Columns { rows: batch, part, stride, first: 0 };
                        self.kernels.concat(stream, result, all, scores)?;
                    }
                }
            }
            _ => {
                let problem = "the scratch belongs to another engine".to_owned();
                return Err(GpuDenseError::Buffers(problem));
            }
        }
        Ok(())
    }

    /// Puts a copy of `from` to the start of `to` onto `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn copy(&self, stream: &Stream, from: View<f32>, to: View<f32>) -> Result<(), CudaError> {
        let n = from.len();
        if n == 0 {
            return Ok(());
        }
        self.kernels.concat(stream, from, Columns { rows: 1, part: n, stride: n, first: 0 }, to)
    }

    /// Returns the inputs for each sample: those of requests are copied to `spread`.
    fn spread_inputs<'a>(
        &self,
        stream: &Stream,
        shape: RunShape<'_>,
        inputs: &'a [Buffer<f32>],
        spread: &'a [Option<Buffer<f32>>],
    ) -> Result<Vec<View<'a, f32>>, CudaError> {
        type Pair<'a> = (&'a Buffer<f32>, &'a Option<Buffer<f32>>);
        let input = |(i, (from, copy)): (usize, Pair<'a>)| -> Result<View<'a, f32>, CudaError> {
            let Some(copy) = copy.as_ref().filter(|_| !shape.request_of.is_empty()) else {
                return Ok(from.view());
            };
            let width = self.input_words(i);
            let copied = ResultShape { samples: shape.size.samples, width };
            let [from, to] =
                [from, copy].map(|b| RowColumns { values: b.view(), first: 0, stride: width });
            self.gather(stream, from, shape.request_of, copied, to)?;
            Ok(copy.view())
        };
        inputs.iter().zip(spread).enumerate().map(input).collect()
    }

    /// Puts a copy of `shape` words onto `stream`, as `DenseKernels::gather` makes it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn gather(
        &self,
        stream: &Stream,
        from: RowColumns,
        numbers: View<u32>,
        shape: ResultShape,
        to: RowColumns,
    ) -> Result<(), CudaError> {
        self.kernels.gather(stream, from, numbers, shape, to)
    }

    /// Returns the largest difference of a score from `expected`, `[samples, outputs]`, for
    /// `inputs`, `[samples, width]` each. The difference is relative to the score, or to 1 for
    /// scores below 1.
    ///
    /// # Errors
    /// [`GpuDenseError`] if the network does not run.
    pub fn difference(&self, inputs: &[Vec<f32>], expected: &[f32]) -> Result<f32, GpuDenseError> {
        let all = expected.len() / self.outputs;
        let (stream, batch_max) = (self.gpu.stream()?, self.batch_max.min(CHECK_SAMPLES));
        let mut scratch = self.scratch(batch_max)?;
        let scores = self.gpu.buffer::<f32>(batch_max * self.outputs)?;
        let mut most = 0.0f32;
        for first in (0..all).step_by(batch_max.max(1)) {
            let batch = batch_max.min(all - first);
            let samples = first..first + batch;
            let uploaded = self.upload_inputs(&stream, inputs, samples)?;
            self.enqueue(&stream, batch, &uploaded, scores.view(), &mut scratch)?;
            let mut found = vec![0.0; batch * self.outputs];
            stream.download(&scores, 0, &mut found)?;
            let expected = &expected[first * self.outputs..][..found.len()];
            let differences = found.iter().zip(expected).map(|(gpu, cpu)| difference(*gpu, *cpu));
            most = differences.fold(most, f32::max);
        }
        Ok(most)
    }

    /// Uploads `samples` of `inputs`, `[.., width]` each, converted to the types of the inputs.
    fn upload_inputs(
        &self,
        stream: &Stream,
        inputs: &[Vec<f32>],
        samples: Range<usize>,
    ) -> Result<Vec<Buffer<f32>>, CudaError> {
        let upload = |(values, (width, of)): (&Vec<f32>, (&usize, &InputType))| {
            let words = of.encode(&values[samples.start * width..samples.end * width]);
            let buffer = self.gpu.buffer(words.len())?;
            stream.upload(&words, &buffer, 0)?;
            Ok(buffer)
        };
        inputs.iter().zip(self.widths.iter().zip(&self.types)).map(upload).collect()
    }

    /// Returns the engine if it gives the CPU's scores on generated samples, in a batch of one and
    /// in a batch of many.
    fn check(self, reference: &DenseEngine, bound: f32) -> Result<Self, GpuDenseError> {
        let samples = self.batch_max.min(CHECK_SAMPLES);
        let stream = self.gpu.stream()?;
        let (mut on_gpu, mut on_cpu) = (self.scratch(samples)?, reference.scratch(samples));

        let inputs: Vec<Vec<f32>> =
            self.widths.iter().enumerate().map(|(i, w)| generate(i as u64, samples * w)).collect();
        let uploaded = self.upload_inputs(&stream, &inputs, 0..samples)?;

        let scores = self.gpu.buffer::<f32>(samples * self.outputs)?;
        for batch in [samples, 1] {
            stream.upload(&vec![f32::NAN; scores.len()], &scores, 0)?;
            self.enqueue(&stream, batch, &uploaded, scores.view(), &mut on_gpu)?;
            let mut gpu_scores = vec![0.0; batch * self.outputs];
            stream.download(&scores, 0, &mut gpu_scores)?;

            let mut cpu_scores = vec![0.0; batch * self.outputs];
            reference.run(batch, &inputs, &mut cpu_scores, &mut on_cpu)?;
            let pairs = gpu_scores.iter().zip(&cpu_scores);
            let difference = pairs.map(|(gpu, cpu)| difference(*gpu, *cpu)).fold(0.0, f32::max);
            if difference > bound {
                let backend = self.runs_on();
                return Err(GpuDenseError::ScoresDiffer { backend, difference, bound });
            }
        }
        log::info!("the dense network runs on {}", self.runs_on());
        Ok(self)
    }
}

/// The common parts of all backends of one network.
struct Loader<'a> {
    gpu: &'a Arc<Gpu>,
    network: &'a DenseNetwork<'a>,
    /// Of each input, whether a request has one value.
    shared: &'a [bool],
    kernels: Arc<DenseKernels>,
    /// The network on the CPU, whose scores each backend must give.
    reference: &'a DenseEngine,
    batch_max: usize,
    f16_inputs: &'a [usize],
}

impl Loader<'_> {
    fn engine(&self, backend: Backend) -> DeviceEngine {
        DeviceEngine {
            types: vec![InputType::F32; self.network.inputs.len()],
            gpu: Arc::clone(self.gpu),
            kernels: Arc::clone(&self.kernels),
            backend,
            widths: self.network.inputs.iter().map(|(_, width)| *width).collect(),
            shared: self.shared.to_vec(),
            outputs: self.reference.outputs(),
            activation: self.network.activation,
            batch_max: self.batch_max,
            rejected: Vec::new(),
        }
    }

    fn load_cublas(
        &self,
        plan: &Arc<DevicePlan>,
        precision: Precision,
        factors: Factors,
        rejected: &mut Vec<String>,
    ) -> Result<DeviceEngine, GpuDenseError> {
        // Every scratch opens its own handle. This one only checks whether the libraries are
        // present.
        if let Some(why) = Cublas::open(self.gpu, factors)?.refused_epilogues() {
            log::info!("bias and Relu are launches of their own: {why}");
            rejected.push(format!("bias and Relu in the products: {why}"));
        }
        let backend = Backend::Plan { plan: Arc::clone(plan), precision };
        self.engine(backend).check(self.reference, precision.difference_bound())
    }

    /// Loads the network on TensorRT. With precision f16 it first tries f16 for the inputs that may
    /// be f16. If that is refused, they are f32, and the reason is added to `rejected`.
    fn load_tensorrt(
        &self,
        options: &TensorRtOptions,
        precision: Precision,
        inputs: &[(&str, Vec<usize>)],
        rejected: &mut Vec<String>,
    ) -> Result<DeviceEngine, GpuDenseError> {
        let libraries =
            options.libraries.as_ref().map(|(core, parser)| (core.as_path(), parser.as_path()));
        let tensorrt = TensorRt::open(&options.shim, libraries)?;
        let with = |f16_inputs: &[usize]| {
            let mut fed = Vec::with_capacity(inputs.len());
            for (i, (name, shape)) in inputs.iter().enumerate() {
                let of = if f16_inputs.contains(&i) { InputType::F16 } else { InputType::F32 };
                fed.push(BuildInput { name, shape: shape.clone(), of });
            }
            fed
        };
        let load = |inputs| self.load_plan(&tensorrt, options, precision, inputs);
        if precision == Precision::F16 && !self.f16_inputs.is_empty() {
            match load(with(self.f16_inputs)) {
                Ok(engine) => return Ok(engine),
                Err(e @ GpuDenseError::Cuda(_)) => return Err(e),
                Err(e) => reject(&GpuDenseError::F16Inputs(Box::new(e)), rejected),
            }
        }
        load(with(&[]))
    }

    /// Loads the stored plan of the network with `inputs`, or builds one and stores it.
    fn load_plan(
        &self,
        tensorrt: &TensorRt,
        options: &TensorRtOptions,
        precision: Precision,
        inputs: Vec<BuildInput<'_>>,
    ) -> Result<DeviceEngine, GpuDenseError> {
        let input_types: Vec<InputType> = inputs.iter().map(|input| input.of).collect();
        let build = Build {
            onnx: self.network.onnx,
            inputs,
            output: self.network.output,
            batches: BatchClass::up_to(self.batch_max),
            workspace_bytes_max: options.workspace_bytes_max,
            types: precision.types(),
            compute_capability: None,
        };
        let (types, bound) = (precision.name(), precision.difference_bound());
        let load_plan = |plan: &[u8], origin| {
            let name = format!("TensorRT {}, {types}, plan {origin}", tensorrt.version());
            let engine = tensorrt.load(self.gpu, plan, &build)?;
            let engine = self.engine(Backend::TensorRt { engine, name });
            DeviceEngine { types: input_types.clone(), ..engine }.check(self.reference, bound)
        };

        let plans = Plans::new(&options.plans);
        let path = plans.path(tensorrt, self.gpu.name(), &build);
        if let Some(plan) = plans.kept(&path)? {
            match load_plan(&plan, "kept from before") {
                Err(e) if !matches!(e, GpuDenseError::Cuda(_)) => {
                    log::warn!("{}: {e}; the plan is built again", path.display());
                }
                loaded => return loaded,
            }
        }

        let plan = tensorrt.build(&build)?;
        let loaded = load_plan(&plan, "built now");
        // Another build would give the same scores. An empty plan records that.
        let useless = matches!(loaded, Err(GpuDenseError::ScoresDiffer { .. }));
        plans.keep(&path, if useless { &[] } else { &plan });
        loaded
    }
}

fn reject(why: &GpuDenseError, rejected: &mut Vec<String>) {
    log::info!("a backend for the dense network on the GPU is rejected: {why}");
    rejected.push(why.to_string());
}

/// Returns the difference of `a` from `b`, relative to `b`, or to 1 if `b` is below 1. It is 0 only
/// if their bits are equal or both are NaN, and infinite if only one is NaN.
fn difference(a: f32, b: f32) -> f32 {
    let part = (a - b).abs() / b.abs().max(1.0);
    match a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan() {
        true => 0.0,
        false if part.is_nan() => f32::INFINITY,
        false => part.max(f32::MIN_POSITIVE),
    }
}

/// Returns values from -1 to 1, some of them zero. The same seed gives the same values.
fn generate(seed: u64, len: usize) -> Vec<f32> {
    let value = |i: u64| {
        let bits = (seed << 40 ^ i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = (bits ^ bits >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        if bits.is_multiple_of(16) { 0.0 } else { bits as i32 as f32 / 2f32.powi(31) }
    };
    (0..len as u64).map(value).collect()
}
