//! The dense network on a GPU. Three backends are tried in this order: TensorRT, the plan of
//! Hatchback's kernels with cuBLAS for the products, and the plan of Hatchback's kernels alone. The
//! first two are tried only if the target allows another precision than the CPU's. A backend is
//! used only if it gives the CPU's scores on generated samples. They must be equal to the bit for
//! the kernels alone, and within the bound of its precision for the others. The engine logs the
//! backend that it uses. `dense_loader.rs` chooses it.

use crate::cuda::Device;
use crate::cuda::cublas::{Cublas, workspace_bytes};
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::memory::{Buffer, View};
use crate::dense::run::sharing::InputPart;
use crate::dense::{Activation, DenseEngine, DenseError};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{
    DenseKernels, IMAGES, OWN_ROWS_MAX, REREAD_BYTES_MAX, ResultShape, RowColumns,
};
use crate::gpu::dense_plan::{DevicePlan, DevicePlanScratch, PlanWork, RunShape, Scores};
use crate::gpu::input_type::InputType;
use crate::gpu::launch::{CHANGES, LOOKUP};
use crate::gpu::numbers::StepNumber;
use crate::gpu::precision::Precision;
use crate::gpu::samples::RequestSize;
use crate::gpu::tensorrt::{self, OpenBuild, Plans, TensorRt, TensorRtError};
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
    /// The parts of the inputs that a run takes; empty if each input is one that is not shared.
    pub parts: &'a [InputPart],
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

impl TensorRtOptions {
    /// Opens TensorRT for `gpu`.
    ///
    /// # Errors
    /// As [`TensorRt::open`], or [`TensorRtError::UnknownGpu`] if the release is older than `gpu`.
    pub fn open(&self, gpu: &Gpu) -> Result<Arc<TensorRt>, TensorRtError> {
        let libraries = self.libraries.as_ref();
        let libraries = libraries.map(|(core, parser)| (core.as_path(), parser.as_path()));
        let tensorrt = TensorRt::open(&self.shim, libraries)?;
        tensorrt.version().check_gpu(gpu.sm())?;
        Ok(tensorrt)
    }
}

/// A target's options for dense networks on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuDense {
    /// TensorRT, which is tried first.
    pub tensorrt: Option<TensorRtOptions>,
    /// How precisely a network is computed. `Exact` allows neither TensorRT nor cuBLAS.
    pub precision: Precision,
}

impl GpuDense {
    /// Returns the options of TensorRT and the precision, if the target allows TensorRT.
    pub fn tensorrt(&self) -> Option<(&TensorRtOptions, Precision)> {
        let options = self.tensorrt.as_ref().filter(|_| self.precision != Precision::Exact)?;
        Some((options, self.precision))
    }

    /// Returns the release of TensorRT, or why it cannot be used on `device`; `None` if the target
    /// does not allow it there.
    pub fn release_on(&self, device: &Device) -> Option<Result<String, TensorRtError>> {
        let (Some((options, _)), Device::Cuda(gpu)) = (self.tensorrt(), device) else {
            return None;
        };
        Some(options.open(gpu).map(|tensorrt| tensorrt.version().to_string()))
    }

    /// Counts a build of the plan of the network `onnx`, which nobody has parsed yet, until the
    /// result is dropped. Returns `None` if the target does not allow TensorRT.
    ///
    /// # Errors
    /// [`GpuDenseError::TensorRt`] if TensorRT is missing, or if too many builds of this network
    /// ended with the process.
    pub fn begin_build(&self, gpu: &Gpu, onnx: &[u8]) -> Result<Option<OpenBuild>, GpuDenseError> {
        let Some((options, _)) = self.tensorrt() else { return Ok(None) };
        let tensorrt = options.open(gpu)?;
        Ok(Some(Plans::new(&options.plans).begin_build(&tensorrt, onnx)?))
    }

    /// Returns the bytes that the driver takes on `device`, with our kernels and the libraries that
    /// the target allows. Loads what is not loaded yet; what cannot be loaded takes nothing. Of
    /// TensorRT it has the library and a runtime. The parser, which a build loads, is in no line of
    /// the memory plan.
    pub fn driver_bytes(&self, device: &Device) -> u64 {
        let Device::Cuda(gpu) = device else { return 0 };
        let start = |options: &TensorRtOptions| {
            let tensorrt = options.open(gpu)?;
            tensorrt.start(gpu).map(|()| tensorrt)
        };
        let load = || {
            let modules = [CHANGES, LOOKUP, IMAGES].map(|images| gpu.module(&images));
            let factors = self.precision.factors();
            let tensorrt = self.tensorrt().map(|(options, _)| start(options));
            (modules, tensorrt, factors.map(|factors| Cublas::open(gpu, factors)))
        };
        gpu.opened_bytes + gpu.footprint_of(load).1
    }
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
    /// Numbers of the parts that the host fills. What only these reach runs beside the lookups.
    pub fed: Vec<usize>,
}

/// A network on a GPU. Holding one proves that it gave the CPU's scores on that GPU, within the
/// bound of its backend.
pub struct DeviceEngine {
    pub(super) gpu: Arc<Gpu>,
    pub(super) kernels: Arc<DenseKernels>,
    pub(super) backend: Backend,
    pub(super) parts: Vec<InputPart>,
    /// The type of each part.
    pub(super) types: Vec<InputType>,
    /// The parts that the host fills.
    pub(super) fed: Vec<usize>,
    pub(super) outputs: usize,
    pub(super) activation: Activation,
    pub(super) batch_max: usize,
    pub(super) rejected: Vec<String>,
}

pub(super) enum Backend {
    TensorRt { engine: Arc<tensorrt::Engine>, name: String },
    Plan { plan: Arc<DevicePlan>, precision: Precision },
}

/// The memory and handles of one worker's runs, like `DenseScratch` on the CPU.
pub struct DeviceScratch {
    batch_max: usize,
    backend: BackendScratch,
}

enum BackendScratch {
    /// TensorRT knows neither requests nor parts: it takes copies of such inputs for each sample.
    TensorRt {
        context: tensorrt::Context,
        joined: Vec<Option<Buffer<f32>>>,
        /// `[batch, outputs]` before the sigmoid, if there is one: the caller's scores may be in
        /// host memory, which the sigmoid should only write.
        logits: Option<Buffer<f32>>,
    },
    Plan(DevicePlanScratch),
}

impl DeviceEngine {
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

    /// Returns the type of each part of an input.
    pub fn input_types(&self) -> &[InputType] {
        &self.types
    }

    /// Returns the parts that the host fills.
    pub(crate) fn fed(&self) -> &[usize] {
        &self.fed
    }

    /// Returns the words of one row of part `number`.
    pub(crate) fn input_words(&self, number: usize) -> usize {
        self.types[number].words(self.parts[number].width)
    }

    /// Returns the bytes of the weights in device memory. For TensorRT, which does not report them,
    /// it is the size of the plan.
    pub fn bytes(&self) -> u64 {
        match &self.backend {
            Backend::TensorRt { engine, .. } => engine.bytes(),
            Backend::Plan { plan, .. } => plan.bytes() as u64,
        }
    }

    /// Returns the bytes of device memory of a worker's scratches for up to `batches` samples each.
    pub fn scratch_bytes(&self, batches: impl Iterator<Item = usize>) -> u64 {
        let common = match &self.backend {
            Backend::TensorRt { engine, .. } => engine.run_bytes(),
            Backend::Plan { .. } => 0,
        };
        common + batches.map(|batch_max| self.own_scratch_bytes(batch_max)).sum::<u64>()
    }

    /// Returns the bytes of a scratch without those that a worker's scratches have in common.
    fn own_scratch_bytes(&self, batch_max: usize) -> u64 {
        match &self.backend {
            Backend::TensorRt { engine, .. } => {
                let joined: usize = self.joined_words().iter().flatten().sum();
                let words = joined + self.logit_words().unwrap_or(0);
                engine.context_bytes() + 4 * (words * batch_max) as u64
            }
            Backend::Plan { plan, precision } => {
                let workspace = precision.factors().map_or(0, |_| workspace_bytes(self.gpu.sm()));
                (plan.scratch_bytes(batch_max) + workspace) as u64
            }
        }
    }

    /// Allocates a worker's memory for runs of up to `batch_max` samples.
    ///
    /// # Errors
    /// [`GpuDenseError`]: there is not enough memory, or the network was loaded for smaller
    /// batches.
    pub fn scratch(&self, batch_max: usize) -> Result<DeviceScratch, GpuDenseError> {
        Ok(self.scratches([batch_max].into_iter())?.remove(0))
    }

    /// Allocates the scratches of a worker, for runs of up to `batches` samples each. The runs are
    /// one after the other on one stream, because contexts of TensorRT share their memory.
    ///
    /// # Errors
    /// As [`DeviceEngine::scratch`].
    pub(crate) fn scratches(
        &self,
        batches: impl Iterator<Item = usize>,
    ) -> Result<Vec<DeviceScratch>, GpuDenseError> {
        let memory = match &self.backend {
            Backend::TensorRt { engine, .. } => {
                let words = (engine.run_bytes() as usize).div_ceil(size_of::<f32>());
                Some(Arc::new(self.gpu.buffer(words)?))
            }
            Backend::Plan { .. } => None,
        };
        batches.map(|batch_max| self.scratch_in(batch_max, memory.as_ref())).collect()
    }

    /// Allocates a scratch whose context of TensorRT, if it has one, runs in `memory`.
    fn scratch_in(
        &self,
        batch_max: usize,
        memory: Option<&Arc<Buffer<f32>>>,
    ) -> Result<DeviceScratch, GpuDenseError> {
        if batch_max > self.batch_max {
            return Err(DenseError::Batch { batch: batch_max, max: self.batch_max }.into());
        }
        let backend = match (&self.backend, memory) {
            (Backend::TensorRt { engine, .. }, Some(memory)) => {
                let buffer = |words: usize| self.gpu.buffer(batch_max * words);
                let joined = self.joined_words().into_iter();
                let joined = joined.map(|words| words.map(buffer).transpose());
                let joined = joined.collect::<Result<_, _>>()?;
                let logits = self.logit_words().map(buffer).transpose()?;
                BackendScratch::TensorRt { context: engine.context(memory)?, joined, logits }
            }
            (Backend::TensorRt { .. }, None) => unreachable!("`scratches` allocates memory"),
            (Backend::Plan { plan, precision }, _) => {
                let mut scratch = plan.scratch(&self.gpu, batch_max)?;
                let cublas = precision.factors().map(|factors| Cublas::open(&self.gpu, factors));
                scratch.cublas = cublas.transpose()?;
                BackendScratch::Plan(scratch)
            }
        };
        Ok(DeviceScratch { batch_max, backend })
    }

    /// Puts a run of `shape` onto `stream`. `inputs[i]` has room for `[samples, width of part i]`
    /// values of the part's type. A shared part begins with `[requests, width]`, the others are
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
        let inputs: Vec<View<f32>> = inputs.iter().map(Buffer::view).collect();
        self.enqueue_early(stream, shape, &inputs, scratch)?;
        self.enqueue_rest(stream, shape, &inputs, scores, scratch)
    }

    /// Puts the part of a run onto `stream` that needs nothing looked up. For the arguments see
    /// [`DeviceEngine::enqueue`].
    ///
    /// # Errors
    /// As [`DeviceEngine::enqueue`].
    pub(crate) fn enqueue_early(
        &self,
        stream: &Stream,
        shape: RunShape<'_>,
        inputs: &[View<f32>],
        scratch: &mut DeviceScratch,
    ) -> Result<(), GpuDenseError> {
        self.check_sizes(shape, inputs, scratch)?;
        // TensorRT runs a network as one.
        if let (Backend::Plan { plan, .. }, BackendScratch::Plan(scratch)) =
            (&self.backend, &mut scratch.backend)
        {
            plan.enqueue_early(
                PlanWork { kernels: &self.kernels, stream, shape, inputs },
                scratch,
            )?;
        }
        Ok(())
    }

    fn check_sizes(
        &self,
        shape: RunShape<'_>,
        inputs: &[View<f32>],
        scratch: &DeviceScratch,
    ) -> Result<(), GpuDenseError> {
        let RequestSize { samples: batch, requests } = shape.size;
        if batch > scratch.batch_max {
            return Err(DenseError::Batch { batch, max: scratch.batch_max }.into());
        }
        let rows = |i: usize| if self.parts[i].shared { requests } else { batch };
        let short = |(i, words): (usize, &View<f32>)| words.len() < rows(i) * self.input_words(i);
        if inputs.len() != self.parts.len() || inputs.iter().enumerate().any(short) {
            return Err(GpuDenseError::Buffers(format!("inputs do not hold {batch} samples")));
        }
        Ok(())
    }

    /// Returns whether a run reads `rows` rows of part `part` where the host wrote them. Otherwise
    /// they are copied to the device first.
    pub(crate) fn reads_in_place(&self, part: usize, rows: usize) -> bool {
        let Backend::Plan { plan, .. } = &self.backend else {
            // A context of TensorRT keeps the addresses of its inputs.
            return false;
        };
        4 * rows * self.input_words(part) <= REREAD_BYTES_MAX
            || rows <= OWN_ROWS_MAX && plan.reads_once(part)
    }

    /// Puts the rest of a run onto `stream`, after [`DeviceEngine::enqueue_early`].
    ///
    /// # Errors
    /// As [`DeviceEngine::enqueue`].
    pub(crate) fn enqueue_rest(
        &self,
        stream: &Stream,
        shape: RunShape<'_>,
        inputs: &[View<f32>],
        scores: View<f32>,
        scratch: &mut DeviceScratch,
    ) -> Result<(), GpuDenseError> {
        self.check_sizes(shape, inputs, scratch)?;
        let batch = shape.size.samples;
        let values = batch * self.outputs;
        if scores.len() < values {
            let problem = format!("room for {} scores, {batch} samples", scores.len());
            return Err(GpuDenseError::Buffers(problem));
        }

        let (scores, activation) = (scores.first(values), self.activation);
        match (&self.backend, &mut scratch.backend) {
            (Backend::TensorRt { .. }, BackendScratch::TensorRt { context, joined, logits }) => {
                let inputs = self.join_inputs(stream, shape, inputs, joined)?;
                match logits {
                    None => context.enqueue(stream, batch, &inputs, scores)?,
                    Some(logits) => {
                        let logits = logits.view().first(values);
                        context.enqueue(stream, batch, &inputs, logits)?;
                        self.kernels.map(stream, StepNumber::Score, logits, scores)?;
                    }
                }
            }
            (Backend::Plan { plan, .. }, BackendScratch::Plan(scratch)) => {
                let work = PlanWork { kernels: &self.kernels, stream, shape, inputs };
                plan.enqueue_rest(work, Scores { values: scores, activation }, scratch)?;
            }
            _ => {
                let problem = "the scratch belongs to another engine".to_owned();
                return Err(GpuDenseError::Buffers(problem));
            }
        }
        Ok(())
    }

    /// Returns the values of a sample before the sigmoid, if there is one.
    fn logit_words(&self) -> Option<usize> {
        (self.activation == Activation::Sigmoid).then_some(self.outputs)
    }

    /// Returns of each input the words of a sample of its copy, if it is shared or has several
    /// parts.
    fn joined_words(&self) -> Vec<Option<usize>> {
        let inputs = self.parts.last().map_or(0, |part| part.input + 1);
        let words = |input: usize| {
            let parts: Vec<usize> = self.parts_of(input).collect();
            let is_copied = parts.len() > 1 || self.parts[parts[0]].shared;
            is_copied.then(|| parts.into_iter().map(|part| self.input_words(part)).sum())
        };
        (0..inputs).map(words).collect()
    }

    fn parts_of(&self, input: usize) -> impl Iterator<Item = usize> {
        (0..self.parts.len()).filter(move |part| self.parts[*part].input == input)
    }

    /// Returns the inputs for each sample: the parts of one are copied to `joined`.
    fn join_inputs<'a>(
        &self,
        stream: &Stream,
        shape: RunShape<'_>,
        parts: &'a [View<'a, f32>],
        joined: &'a [Option<Buffer<f32>>],
    ) -> Result<Vec<View<'a, f32>>, CudaError> {
        let input = |(input, copy): (usize, &'a Option<Buffer<f32>>)| {
            let Some(copy) = copy else {
                let whole = self.parts_of(input).map(|part| parts[part]).next();
                return Ok(whole.unwrap_or_else(View::none));
            };
            let stride = self.parts_of(input).map(|part| self.input_words(part)).sum();
            let mut first = 0;
            for part in self.parts_of(input) {
                let width = self.input_words(part);
                let from = RowColumns { values: parts[part], first: 0, stride: width };
                let to = RowColumns { values: copy.view(), first, stride };
                let is_shared = self.parts[part].shared;
                let numbers = if is_shared { shape.request_of } else { View::none() };
                let copied = ResultShape { samples: shape.size.samples, width };
                self.kernels.gather(stream, from, numbers, copied, to)?;
                first += width;
            }
            Ok(copy.view())
        };
        joined.iter().enumerate().map(input).collect()
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
            // A score that no kernel writes is no number.
            stream.upload(&vec![f32::NAN; scores.len()], &scores, 0)?;
            let enqueued = self.enqueue(&stream, batch, &uploaded, scores.view(), &mut scratch);
            // A run that failed may have launched some of its work.
            stream.wait()?;
            enqueued?;
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
        let upload = |(values, (part, of)): (&Vec<f32>, (&InputPart, &InputType))| {
            let width = part.width;
            let words = of.encode(&values[samples.start * width..samples.end * width]);
            let buffer = self.gpu.buffer(words.len())?;
            stream.upload(&words, &buffer, 0)?;
            Ok(buffer)
        };
        inputs.iter().zip(self.parts.iter().zip(&self.types)).map(upload).collect()
    }

    /// Returns the engine if it gives the CPU's scores on generated samples, in a batch of one and
    /// in a batch of many.
    pub(super) fn check(self, reference: &DenseEngine, bound: f32) -> Result<Self, GpuDenseError> {
        let samples = self.batch_max.min(CHECK_SAMPLES);
        let mut on_cpu = reference.scratch(samples);
        let parts = self.parts.iter().enumerate();
        let inputs: Vec<Vec<f32>> =
            parts.map(|(i, part)| generate(i as u64, samples * part.width)).collect();
        for batch in [samples, 1] {
            let mut expected = vec![0.0; batch * self.outputs];
            reference.run(batch, &inputs, &mut expected, &mut on_cpu)?;
            let difference = self.difference(&inputs, &expected)?;
            if difference > bound {
                let backend = self.runs_on();
                return Err(GpuDenseError::ScoresDiffer { backend, difference, bound });
            }
        }
        log::info!("the dense network runs on {}", self.runs_on());
        Ok(self)
    }
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
