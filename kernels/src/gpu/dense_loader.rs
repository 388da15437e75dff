//! Chooses the backend of a dense network on a GPU, and builds the plan of TensorRT that a later
//! choice will find. A choice never waits for a build: without a kept plan it takes the next
//! backend. Logs the reason why it rejected a backend.

use crate::cuda::cublas::Cublas;
use crate::cuda::cublas_library::Factors;
use crate::cuda::driver::Gpu;
use crate::dense::graph::onnx;
use crate::dense::graph::onnx::ModelProto;
use crate::dense::graph::onnx_graph::{Graph, Stop};
use crate::dense::run::layout::{GpuLayout, Layout};
use crate::dense::run::sharing::{InputPart, divide_inputs};
use crate::dense::{DenseEngine, match_interface, widen};
use crate::gpu::dense_engine::{
    Backend, DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, TensorRtOptions,
};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{DenseKernels, NARROW, PairShape};
use crate::gpu::dense_plan::DevicePlan;
use crate::gpu::input_type::InputType;
use crate::gpu::precision::Precision;
use crate::gpu::tensorrt::{BatchClass, Build, BuildInput, Plans, TensorRt, TensorRtError};
use crate::simd::isa::Isa;
use std::path::PathBuf;
use std::sync::Arc;

/// Attempts to build or load a plan of which all but the last failed while a graph was recorded.
/// Starts and swaps record, for milliseconds, so a third failure has another reason.
const ATTEMPTS: usize = 3;

/// A plan that was built here and gave the CPU's scores on generated samples. No engine uses it
/// before it is kept.
pub struct BuiltPlan {
    engine: DeviceEngine,
    plans: Plans,
    path: PathBuf,
}

impl BuiltPlan {
    /// Returns the network on this plan, to prove its scores.
    pub fn engine(&self) -> &DeviceEngine {
        &self.engine
    }

    /// Keeps the plan for every later [`DeviceEngine::load`].
    pub fn keep(self) {
        self.plans.settle(&self.path, true);
    }

    /// Records that the scores of this plan are wrong, so that it is not built again.
    pub fn reject(self) {
        self.plans.settle(&self.path, false);
    }
}

impl DeviceEngine {
    /// Loads `network` onto `gpu` with the first backend of `options` that gives the CPU's scores.
    /// Never builds a plan: TensorRT is used only if [`DeviceEngine::build_plan`] has kept one.
    ///
    /// # Errors
    /// [`GpuDenseError::Dense`] if the file does not load, [`GpuDenseError::Unsupported`] if the
    /// GPU has no kernel for an operator, or the error of the last backend.
    pub fn load(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
    ) -> Result<Self, GpuDenseError> {
        Loader::of(gpu, network, options, |loader| loader.load(&options.dense))
    }

    /// Builds the plan of `network` for TensorRT, which may take minutes, unless one waits for its
    /// proof. Returns `None` if the kept plan is good, or if `options` do not allow TensorRT.
    ///
    /// # Errors
    /// [`GpuDenseError`]: TensorRT is missing or refuses, or its scores are not the CPU's.
    pub fn build_plan(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
    ) -> Result<Option<BuiltPlan>, GpuDenseError> {
        let Some((tensorrt, precision)) = options.dense.tensorrt() else { return Ok(None) };
        Loader::of(gpu, network, options, |loader| {
            let build = |inputs: &Inputs<'_>| loader.build_plan(inputs);
            loader.on_tensorrt(tensorrt, precision, &mut Vec::new(), build)
        })
    }

    /// Loads the plan of `network` that was built before and waits for its proof. Never builds one.
    /// Returns `None` if no plan waits for a proof.
    ///
    /// # Errors
    /// [`GpuDenseError`], with [`TensorRtError::NoPlan`] if only other plans wait.
    pub fn unproven_plan(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
    ) -> Result<Option<BuiltPlan>, GpuDenseError> {
        let Some((tensorrt, precision)) = options.dense.tensorrt() else { return Ok(None) };
        if !Plans::new(&tensorrt.plans).has_unproven() {
            return Ok(None);
        }
        Loader::of(gpu, network, options, |loader| {
            let find = |inputs: &Inputs<'_>| loader.load_unproven(inputs);
            loader.on_tensorrt(tensorrt, precision, &mut Vec::new(), find).map(Some)
        })
    }
}

/// The common parts of all backends of one network.
struct Loader<'a> {
    gpu: &'a Arc<Gpu>,
    network: &'a DenseNetwork<'a>,
    model: &'a ModelProto,
    /// Names of the inputs, and their shapes for one sample.
    inputs: &'a [(&'a str, Vec<usize>)],
    parts: &'a [InputPart],
    kernels: Arc<DenseKernels>,
    /// The network on the CPU, whose scores each backend must give.
    reference: &'a DenseEngine,
    batch_max: usize,
    f16_inputs: &'a [usize],
    fed: &'a [usize],
}

/// The inputs of a plan of TensorRT, and where it is kept.
struct Inputs<'a> {
    tensorrt: &'a Arc<TensorRt>,
    plans: Plans,
    path: PathBuf,
    build: Build<'a>,
    precision: Precision,
}

impl Loader<'_> {
    /// Reads `network` and returns the result of `work` on it.
    fn of<T>(
        gpu: &Arc<Gpu>,
        network: &DenseNetwork,
        options: &DeviceOptions,
        work: impl FnOnce(&Loader<'_>) -> Result<T, GpuDenseError>,
    ) -> Result<T, GpuDenseError> {
        // A GPU computes with f32 weights; each backend narrows what its precision allows.
        let onnx = widen(network.onnx.to_vec())?;
        let network = &DenseNetwork { onnx: &onnx, ..*network };
        let model = onnx::read(onnx.clone().into())?;
        let shapes = match_interface(&model, network.inputs, network.output)?;
        let named = network.inputs.iter().zip(shapes);
        let inputs: Vec<_> = named.map(|((name, _), shape)| (*name, shape)).collect();
        let DenseNetwork { onnx, inputs: fed, parts, output, activation } = *network;
        let whole = InputPart::whole(fed, &vec![false; fed.len()]);
        let parts = if parts.is_empty() { &whole } else { parts };
        let isa = Isa::detect();
        let reference = DenseEngine::load_for(isa, onnx.to_vec(), fed, parts, output, activation)?;
        work(&Loader {
            gpu,
            network,
            model: &model,
            inputs: &inputs,
            parts,
            kernels: Arc::new(DenseKernels::load(gpu)?),
            reference: &reference,
            batch_max: options.batch_max,
            f16_inputs: &options.f16_inputs,
            fed: &options.fed,
        })
    }

    /// Loads the network with the first backend of `dense` that gives the CPU's scores.
    fn load(&self, dense: &GpuDense) -> Result<DeviceEngine, GpuDenseError> {
        let (mut rejected, precision) = (Vec::new(), dense.precision);
        if let Some((tensorrt, precision)) = dense.tensorrt() {
            let kept = |inputs: &Inputs<'_>| self.load_kept(inputs);
            match self.on_tensorrt(tensorrt, precision, &mut rejected, kept) {
                Ok(engine) => return Ok(DeviceEngine { rejected, ..engine }),
                Err(e) => reject(&e, &mut rejected),
            }
        }

        let layout = match Graph::build(self.model, self.inputs, self.network.output) {
            Ok(mut graph) => {
                divide_inputs(&mut graph, self.parts);
                // cuBLAS takes one operand.
                let (own_products, fits_pairs) = (precision.factors().is_none(), PairShape::fits);
                let (parts, fed, narrow) = (self.parts, self.fed, NARROW);
                let on = GpuLayout { parts, fed, own_products, narrow, fits_pairs };
                Layout::for_gpu(graph, &on)
            }
            Err(Stop::Refused(e)) => return Err(e.into()),
            Err(Stop::Unsupported(operator)) => return Err(GpuDenseError::Unsupported(operator)),
        };
        let plan = Arc::new(DevicePlan::new(&layout, self.gpu)?);
        if let Some(factors) = precision.factors() {
            match self.load_cublas(&plan, precision, factors, &mut rejected) {
                Ok(engine) => return Ok(DeviceEngine { rejected, ..engine }),
                Err(e) => reject(&e, &mut rejected),
            }
        }

        let backend = Backend::Plan { plan, precision: Precision::Exact };
        let engine = self.engine(backend).check(self.reference, 0.0)?;
        Ok(DeviceEngine { rejected, ..engine })
    }

    fn engine(&self, backend: Backend) -> DeviceEngine {
        DeviceEngine {
            types: vec![InputType::F32; self.parts.len()],
            fed: self.fed.to_vec(),
            gpu: Arc::clone(self.gpu),
            kernels: Arc::clone(&self.kernels),
            backend,
            parts: self.parts.to_vec(),
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

    /// Opens TensorRT and returns the result of `work`. With precision f16 the inputs that may be
    /// f16 are f16 at first. If that is refused, they are f32, and the reason is added to
    /// `rejected`.
    fn on_tensorrt<T>(
        &self,
        options: &TensorRtOptions,
        precision: Precision,
        rejected: &mut Vec<String>,
        work: impl Fn(&Inputs<'_>) -> Result<T, GpuDenseError>,
    ) -> Result<T, GpuDenseError> {
        // Each call has a library of its own: a start never waits for the lock that a build holds.
        let tensorrt = &options.open(self.gpu)?;
        let with = |f16_inputs: &[usize]| {
            let mut inputs = Vec::with_capacity(self.inputs.len());
            for (i, (name, shape)) in self.inputs.iter().enumerate() {
                let of = if f16_inputs.contains(&i) { InputType::F16 } else { InputType::F32 };
                inputs.push(BuildInput { name, shape: shape.clone(), of });
            }
            let build = Build {
                onnx: self.network.onnx,
                inputs,
                output: self.network.output,
                batches: BatchClass::up_to(self.batch_max),
                workspace_bytes_max: options.workspace_bytes_max,
                types: precision.types(),
                compute_capability: None,
            };
            let plans = Plans::new(&options.plans);
            let path = plans.path(tensorrt, &self.gpu.kind(), &build);
            work(&Inputs { tensorrt, plans, path, build, precision })
        };
        if precision == Precision::F16 && !self.f16_inputs.is_empty() {
            match with(self.f16_inputs) {
                Ok(loaded) => return Ok(loaded),
                Err(e @ GpuDenseError::Cuda(_)) => return Err(e),
                Err(e) => reject(&GpuDenseError::F16Inputs(Box::new(e)), rejected),
            }
        }
        with(&[])
    }

    /// Loads the kept plan.
    fn load_kept(&self, inputs: &Inputs<'_>) -> Result<DeviceEngine, GpuDenseError> {
        let path = inputs.path.clone();
        let plan = inputs.plans.kept(&path)?.ok_or(TensorRtError::NoPlan { path })?;
        self.load_plan(inputs, &plan, "kept from before")
    }

    /// Calls `work`, and again if a recording may have been what failed it: TensorRT's threads wait
    /// for the whole GPU, which a driver refuses meanwhile.
    fn repeated<T>(
        &self,
        mut work: impl FnMut() -> Result<T, GpuDenseError>,
    ) -> Result<T, GpuDenseError> {
        let mut again = 1..ATTEMPTS;
        loop {
            let before = self.gpu.recordings();
            match work() {
                Err(GpuDenseError::TensorRt(e))
                    if matches!(*e, TensorRtError::Refused(_))
                        && self.gpu.recordings() != before
                        && again.next().is_some() =>
                {
                    log::warn!("a plan failed beside a recording, and is tried again: {e}");
                }
                done => return done,
            }
        }
    }

    /// Builds the plan, unless the kept one is good.
    fn build_plan(&self, inputs: &Inputs<'_>) -> Result<Option<BuiltPlan>, GpuDenseError> {
        match self.load_kept(inputs) {
            Ok(_) => return Ok(None),
            Err(e) if e.is_final() => return Err(e),
            Err(e) => log::info!("{e}"),
        }
        match self.load_unproven(inputs) {
            Ok(plan) => return Ok(Some(plan)),
            Err(e @ GpuDenseError::ScoresDiffer { .. }) => return Err(e),
            Err(e) => log::debug!("{e}"),
        }

        let Inputs { tensorrt, plans, path, build, .. } = inputs;
        let at = plans.timings(tensorrt, &self.gpu.kind());
        let mut timings = plans.kept(&at).ok().flatten().unwrap_or_default();
        let plan = self.repeated(|| Ok(tensorrt.build(build, &mut timings)?))?;
        plans.keep_unproven(path, &plan);
        plans.keep(&at, &timings);
        self.load_built(inputs, &plan, "built now").map(Some)
    }

    /// Loads the plan that was built before and waits for its proof.
    fn load_unproven(&self, inputs: &Inputs<'_>) -> Result<BuiltPlan, GpuDenseError> {
        let Inputs { plans, path, .. } = inputs;
        let plan = plans.unproven(path);
        let plan = plan.ok_or_else(|| TensorRtError::NoPlan { path: path.clone() })?;
        self.load_built(inputs, &plan, "built before")
    }

    fn load_built(
        &self,
        inputs: &Inputs<'_>,
        plan: &[u8],
        origin: &str,
    ) -> Result<BuiltPlan, GpuDenseError> {
        let (plans, path) = (inputs.plans.clone(), inputs.path.clone());
        let before = self.gpu.recordings();
        match self.load_plan(inputs, plan, origin) {
            Ok(engine) => Ok(BuiltPlan { engine, plans, path }),
            Err(e) => {
                if matches!(e, GpuDenseError::ScoresDiffer { .. }) {
                    // Another build would give the same scores.
                    plans.settle(&path, false);
                } else if self.gpu.recordings() == before {
                    // A recording may also have failed the load of a good plan, which took minutes.
                    plans.forget(&path);
                }
                Err(e)
            }
        }
    }

    /// Loads `plan` and checks its scores.
    fn load_plan(
        &self,
        inputs: &Inputs<'_>,
        plan: &[u8],
        origin: &str,
    ) -> Result<DeviceEngine, GpuDenseError> {
        let Inputs { tensorrt, build, precision, .. } = inputs;
        let of_part = |part: &InputPart| build.inputs[part.input].of;
        let types: Vec<InputType> = self.parts.iter().map(of_part).collect();
        let name = format!("TensorRT {}, {}, plan {origin}", tensorrt.version(), precision.name());
        self.repeated(|| {
            let (name, types) = (name.clone(), types.clone());
            let engine = tensorrt.load(self.gpu, plan, build)?;
            let engine = self.engine(Backend::TensorRt { engine, name });
            DeviceEngine { types, ..engine }.check(self.reference, precision.difference_bound())
        })
    }
}

fn reject(why: &GpuDenseError, rejected: &mut Vec<String>) {
    log::info!("a backend for the dense network on the GPU is rejected: {why}");
    rejected.push(why.to_string());
}
