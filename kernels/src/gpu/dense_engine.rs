//! The dense network on a GPU: TensorRT where it is, else the plan of our own kernels, with cuBLAS
//! for the products where that is. Whichever is taken must first give the CPU's scores on made-up
//! samples, to the bit where it is our kernels alone. Never chooses silently: what was taken, and
//! why the rest was not, is kept and logged.

use crate::cuda::cublas::{Cublas, CublasError};
use crate::cuda::driver::{CudaError, Gpu, Stream};
use crate::cuda::memory::{Buffer, View};
use crate::dense::graph::{Graph, Map, Stop};
use crate::dense::layout::Layout;
use crate::dense::{Activation, DenseEngine, DenseError, Weights, match_interface, onnx};
use crate::gpu::dense_kernels::DenseKernels;
use crate::gpu::dense_plan::{DevicePlan, DevicePlanScratch, map_number};
use crate::gpu::tensorrt::{self, Build, Plans, TensorRt, TensorRtError};
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Samples on which a GPU's scores are held against the CPU's.
const CHECKED: usize = 64;
/// How far a score may be from the CPU's, as a part of it or, below 1, of 1: where sums are f32 in
/// another order,
const F32_APART: f32 = 1e-4;
/// and where layers compute in FP16, whose numbers have 11 bits.
const F16_APART: f32 = 1e-2;

/// A dense network as the schema names its ends.
#[derive(Clone, Copy, Debug)]
pub struct DenseNetwork<'a> {
    /// The file.
    pub onnx: &'a [u8],
    /// Names and widths that the schema feeds, in the order that a run takes them.
    pub inputs: &'a [(&'a str, usize)],
    /// The output's name.
    pub output: &'a str,
    /// What makes scores of it.
    pub activation: Activation,
    /// How the weights are kept; TensorRT keeps them as it likes.
    pub weights: Weights,
}

/// TensorRT, if it may be used.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRtOptions {
    /// `libhatchback_tensorrt.so`, which `kernels/tensorrt/make` builds.
    pub shim: PathBuf,
    /// Where `libnvinfer` and its ONNX parser are, unless they are found by name.
    #[serde(default)]
    pub libraries: Option<(PathBuf, PathBuf)>,
    /// The folder that keeps the plans built here.
    pub plans: PathBuf,
    /// Whether layers may compute in FP16.
    pub fp16: bool,
    /// Device memory that a layer may take while it runs.
    pub workspace_bytes_max: u64,
}

/// What may run the network.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Tried first, if given.
    pub tensorrt: Option<TensorRtOptions>,
    /// Whether cuBLAS may make the products: faster on large ones, its sums in an order of its own.
    pub cublas: bool,
    /// Samples of a run at most.
    pub batch_max: usize,
}

/// A network on a GPU. Holding one proves that it gave the CPU's scores there, within the bound of
/// what runs it.
pub struct DeviceEngine {
    gpu: Arc<Gpu>,
    kernels: Arc<DenseKernels>,
    backend: Backend,
    widths: Vec<usize>,
    outputs: usize,
    activation: Activation,
    batch_max: usize,
    passed_over: Vec<String>,
}

enum Backend {
    TensorRt { engine: tensorrt::Engine, name: String },
    Plan { plan: Arc<DevicePlan>, cublas: bool },
}

/// The memory and handles of one worker's runs.
pub struct DeviceLane {
    batch_max: usize,
    lane: Lane,
}

enum Lane {
    TensorRt(tensorrt::Context),
    Plan(DevicePlanScratch),
}

impl DeviceEngine {
    /// Loads `network` onto `gpu`.
    ///
    /// # Errors
    /// The file does not load, nothing here can run it, or what runs it does not give the CPU's
    /// scores.
    pub fn load(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
    ) -> Result<Self, DenseError> {
        let model = onnx::read(network.onnx.to_vec().into())?;
        let shapes = match_interface(&model, network.inputs, network.output)?;
        let named: Vec<_> = network
            .inputs
            .iter()
            .zip(&shapes)
            .map(|((name, _), shape)| (*name, shape.clone()))
            .collect();
        let cpu = |weights| {
            let DenseNetwork { onnx, inputs, output, activation, .. } = *network;
            DenseEngine::load(onnx.to_vec(), inputs, output, activation, weights)
        };
        let kernels = Arc::new(DenseKernels::load(gpu)?);
        let reference = cpu(network.weights)?;
        let engine = |backend| Self {
            gpu: Arc::clone(gpu),
            kernels: Arc::clone(&kernels),
            backend,
            widths: network.inputs.iter().map(|(_, width)| *width).collect(),
            outputs: reference.outputs(),
            activation: network.activation,
            batch_max: options.batch_max,
            passed_over: Vec::new(),
        };
        let mut passed_over = Vec::new();
        if let Some(tensorrt) = &options.tensorrt {
            let bound = if tensorrt.fp16 { F16_APART } else { F32_APART };
            let trained = cpu(Weights::F32)?;
            let take = |backend| engine(backend).checked(&trained, bound);
            match take_tensorrt(gpu, network, named.clone(), (tensorrt, options.batch_max), take) {
                Ok(engine) => return Ok(engine),
                Err(e) => pass_over(&e, &mut passed_over),
            }
        }
        let layout = match Graph::build(&model, &named, network.output, network.weights) {
            Ok(graph) => Layout::new(graph),
            Err(Stop::Refused(e)) => return Err(e),
            Err(Stop::Unsupported(operator)) => {
                return Err(DenseError::Run(format!("no kernel on the GPU for {operator}")));
            }
        };
        let plan = Arc::new(DevicePlan::new(&layout, gpu)?);
        if options.cublas {
            let opened = Cublas::open(gpu).map_err(DenseError::from);
            let backend = opened.map(|_| Backend::Plan { plan: Arc::clone(&plan), cublas: true });
            match backend.and_then(|b| engine(b).checked(&reference, F32_APART)) {
                Ok(engine) => return Ok(Self { passed_over, ..engine }),
                Err(e) => pass_over(&e, &mut passed_over),
            }
        }
        let engine = engine(Backend::Plan { plan, cublas: false }).checked(&reference, 0.0)?;
        Ok(Self { passed_over, ..engine })
    }

    /// What runs the network, in words.
    pub fn runs_on(&self) -> String {
        match &self.backend {
            Backend::TensorRt { name, .. } => name.clone(),
            Backend::Plan { cublas: true, .. } => "our kernels, products by cuBLAS".to_owned(),
            Backend::Plan { cublas: false, .. } => "our kernels, to the CPU's bits".to_owned(),
        }
    }

    /// What would have been taken before that, and why it was not.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// Whether the scores are the CPU's to the bit.
    pub fn is_exact(&self) -> bool {
        matches!(self.backend, Backend::Plan { cublas: false, .. })
    }

    /// Whether a recorded run keeps its lane to itself, so that each recording needs one:
    /// TensorRT's states do.
    pub fn records_keep_lanes(&self) -> bool {
        matches!(self.backend, Backend::TensorRt { .. })
    }

    /// Values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Device memory of the weights; TensorRT's are in its own keeping and count nothing here.
    pub fn bytes(&self) -> usize {
        if let Backend::Plan { plan, .. } = &self.backend { plan.bytes() } else { 0 }
    }

    /// Device memory of a lane for up to `batch_max` samples.
    pub fn lane_bytes(&self, batch_max: usize) -> u64 {
        match &self.backend {
            Backend::TensorRt { engine, .. } => engine.context_bytes(),
            Backend::Plan { plan, .. } => plan.scratch_bytes(batch_max) as u64,
        }
    }

    /// A worker's memory for runs of up to `batch_max` samples.
    ///
    /// # Errors
    /// There is not enough, or `batch_max` is beyond what the network was loaded for.
    pub fn lane(&self, batch_max: usize) -> Result<DeviceLane, DenseError> {
        if batch_max > self.batch_max {
            return Err(DenseError::Batch { batch: batch_max, max: self.batch_max });
        }
        let lane = match &self.backend {
            Backend::TensorRt { engine, .. } => Lane::TensorRt(engine.context()?),
            Backend::Plan { plan, cublas } => {
                let mut scratch = plan.scratch(&self.gpu, batch_max)?;
                scratch.cublas = cublas.then(|| Cublas::open(&self.gpu)).transpose()?;
                Lane::Plan(scratch)
            }
        };
        Ok(DeviceLane { batch_max, lane })
    }

    /// Puts a run of `batch` samples onto `stream`. `inputs[i]` begins with `[batch, width of input
    /// i]`, `scores` with room for `[batch, outputs]`; `lane` is this engine's. What is named must
    /// stay until the stream has passed.
    ///
    /// # Errors
    /// The batch is larger than the lane, or the device refuses.
    pub fn enqueue(
        &self,
        stream: &Stream,
        batch: usize,
        inputs: &[Buffer<f32>],
        scores: View<f32>,
        lane: &mut DeviceLane,
    ) -> Result<(), DenseError> {
        if batch > lane.batch_max {
            return Err(DenseError::Batch { batch, max: lane.batch_max });
        }
        let short = |(values, width): (&Buffer<f32>, &usize)| values.len() < batch * width;
        if inputs.len() != self.widths.len() || inputs.iter().zip(&self.widths).any(short) {
            return Err(DenseError::Run(format!("inputs do not hold {batch} samples")));
        }
        let (values, sigmoid) = (batch * self.outputs, map_number(Map::Sigmoid));
        if scores.len() < values {
            return Err(DenseError::Run(format!(
                "room for {} scores, {batch} samples",
                scores.len()
            )));
        }
        let scores = scores.first(values);
        match (&self.backend, &mut lane.lane) {
            (Backend::TensorRt { .. }, Lane::TensorRt(context)) => {
                context.enqueue(stream, batch, inputs, scores)?;
                if self.activation == Activation::Sigmoid {
                    self.kernels.map(stream, sigmoid, scores, scores)?;
                }
            }
            (Backend::Plan { plan, .. }, Lane::Plan(scratch)) => {
                let result = plan.enqueue(&self.kernels, stream, batch, inputs, scratch)?;
                match self.activation {
                    Activation::Sigmoid => self.kernels.map(stream, sigmoid, result, scores)?,
                    Activation::None => {
                        self.kernels.concat(
                            stream,
                            result,
                            (batch, self.outputs),
                            (self.outputs, 0),
                            scores,
                        )?;
                    }
                }
            }
            _ => return Err(DenseError::Run("the lane is another engine's".to_owned())),
        }
        Ok(())
    }

    /// Puts a copy of `from` to the beginning of `to` onto `stream`.
    ///
    /// # Errors
    /// The device refuses.
    pub fn copy(&self, stream: &Stream, from: View<f32>, to: View<f32>) -> Result<(), CudaError> {
        let n = from.len();
        if n == 0 { Ok(()) } else { self.kernels.concat(stream, from, (1, n), (n, 0), to) }
    }

    /// Itself, if it gives the CPU's scores on made-up samples, in batches of one and of many.
    fn checked(self, reference: &DenseEngine, bound: f32) -> Result<Self, DenseError> {
        let samples = self.batch_max.min(CHECKED);
        let stream = self.gpu.stream()?;
        let (mut lane, mut scratch) = (self.lane(samples)?, reference.scratch(samples));
        let inputs: Vec<Vec<f32>> =
            self.widths.iter().enumerate().map(|(i, w)| made_up(i as u64, samples * w)).collect();
        let mut fed = Vec::new();
        for values in &inputs {
            let mut buffer = self.gpu.buffer::<f32>(values.len())?;
            stream.upload(values, &mut buffer, 0)?;
            fed.push(buffer);
        }
        let mut scores = self.gpu.buffer::<f32>(samples * self.outputs)?;
        for batch in [samples, 1] {
            stream.upload(&vec![f32::NAN; scores.len()], &mut scores, 0)?;
            self.enqueue(&stream, batch, &fed, scores.view(), &mut lane)?;
            let (mut ours, mut theirs) =
                (vec![0.0; batch * self.outputs], vec![0.0; batch * self.outputs]);
            stream.download(&scores, 0, &mut ours)?;
            reference.run(batch, &inputs, &mut theirs, &mut scratch)?;
            let apart = ours.iter().zip(&theirs).map(|(a, b)| apart(*a, *b)).fold(0.0, f32::max);
            if apart > bound {
                return Err(DenseError::Apart { backend: self.runs_on(), apart, bound });
            }
        }
        log::info!("dense network: {}", self.runs_on());
        Ok(self)
    }
}

/// What `take` makes of the network on TensorRT.
fn take_tensorrt(
    gpu: &Arc<Gpu>,
    network: &DenseNetwork,
    inputs: Vec<(&str, Vec<usize>)>,
    (options, batch_max): (&TensorRtOptions, usize),
    take: impl Fn(Backend) -> Result<DeviceEngine, DenseError>,
) -> Result<DeviceEngine, DenseError> {
    let libraries =
        options.libraries.as_ref().map(|(core, parser)| (core.as_path(), parser.as_path()));
    let tensorrt = TensorRt::open(&options.shim, libraries)?;
    let build = Build {
        onnx: network.onnx,
        inputs,
        output: network.output,
        batch_typical: batch_max.min(CHECKED),
        batch_max,
        workspace_bytes_max: options.workspace_bytes_max,
        fp16: options.fp16,
        compute_capability: None,
    };
    let types = if options.fp16 { "FP16" } else { "FP32" };
    let take = |plan: &[u8], made| {
        let name = format!("TensorRT {}, {types}, plan {made}", tensorrt.version());
        take(Backend::TensorRt { engine: tensorrt.load(gpu, plan, &build)?, name })
    };
    let plans = Plans::new(&options.plans);
    let path = plans.path(&tensorrt, gpu.name(), &build);
    if let Some(plan) = plans.kept(&path)? {
        match take(&plan, "kept from before") {
            Err(e) if !matches!(e, DenseError::Cuda(_)) => {
                log::warn!("{}: {e}; built anew", path.display())
            }
            taken => return taken,
        }
    }
    let plan = tensorrt.build(&build)?;
    let taken = take(&plan, "built now");
    // Another build would give no other scores.
    let is_no_use = matches!(taken, Err(DenseError::Apart { .. }));
    plans.keep(&path, if is_no_use { &[] } else { &plan });
    taken
}

fn pass_over(why: &DenseError, passed_over: &mut Vec<String>) {
    log::info!("passed over: {why}");
    passed_over.push(why.to_string());
}

/// How far `a` is from `b`, as a part of it: nothing only if their bits are the same or both are
/// NaN, and without end from a NaN.
fn apart(a: f32, b: f32) -> f32 {
    let part = (a - b).abs() / b.abs().max(1.0);
    match a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan() {
        true => 0.0,
        false if part.is_nan() => f32::INFINITY,
        false => part.max(f32::MIN_POSITIVE),
    }
}

/// Values from -1 to 1, the same every time, a few of them zero.
fn made_up(seed: u64, len: usize) -> Vec<f32> {
    let value = |i: u64| {
        let bits = (seed << 40 ^ i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = (bits ^ bits >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        if bits.is_multiple_of(16) { 0.0 } else { bits as i32 as f32 / 2f32.powi(31) }
    };
    (0..len as u64).map(value).collect()
}

impl From<TensorRtError> for DenseError {
    fn from(e: TensorRtError) -> Self {
        Self::TensorRt(Box::new(e))
    }
}

impl From<CudaError> for DenseError {
    fn from(e: CudaError) -> Self {
        Self::Cuda(Box::new(e))
    }
}

impl From<CublasError> for DenseError {
    fn from(e: CublasError) -> Self {
        match e {
            CublasError::Cuda(e) => e.into(),
            e => Self::Run(e.to_string()),
        }
    }
}
