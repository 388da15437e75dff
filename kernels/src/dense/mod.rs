//! The dense network: an ONNX file on the CPU, its weights packed once, run straight from the
//! buffers that the lookup filled. What recommendation models are made of runs on kernels of our
//! own, which take no memory in a run and whose scores do not depend on the batch or on the
//! instruction set, to the bit; any other ONNX file runs on rten. `device_engine.rs` is the same on
//! a GPU. Never owns its inputs.

mod fallback;
pub(crate) mod gemm;
pub(crate) mod graph;
pub(crate) mod layout;
mod math;
mod microkernel;
pub(crate) mod onnx;
mod operators;
mod plan;
#[cfg(test)]
mod tests;

use crate::cuda::driver::CudaError;
pub use crate::gpu::dense_engine::{
    DenseNetwork, DeviceEngine, DeviceLane, DeviceOptions, TensorRtOptions,
};
use crate::gpu::tensorrt::TensorRtError;
use crate::simd::isa::Isa;
use fallback::Fallback;
use graph::{Graph, Stop};
use layout::Layout;
use plan::{Plan, PlanScratch};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What is applied to the network's output to make scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The output is the score.
    None,
    /// The output is a logit: `1 / (1 + exp(-x))`, within 1.2e-7.
    Sigmoid,
}

/// How the weights of the dense network are kept in memory. Sums are `f32` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// As they came.
    #[default]
    F32,
    /// Rounded to `f16`: half of the memory.
    F16,
    /// 8-bit integers and one scale for each output of a layer: a quarter of the memory.
    Int8,
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        })
    }
}

/// Why a dense network cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DenseError {
    /// The ONNX file does not parse, contradicts itself, or an operator is not supported.
    #[error("dense network: {0}")]
    Load(String),
    /// The schema names an input that the network does not have.
    #[error("dense network: no input named `{0}`")]
    NoInput(String),
    /// The network has an input that the schema does not feed.
    #[error("dense network: input `{0}` is not fed by the schema")]
    NotFed(String),
    /// The network has no such output.
    #[error("dense network: no output named `{0}`")]
    NoOutput(String),
    /// An input has another width than the features that feed it.
    #[error(
        "dense network: input `{name}` takes {network} values a sample, the schema feeds {schema}"
    )]
    Width {
        /// Input name.
        name: String,
        /// Values a sample in the ONNX file.
        network: usize,
        /// Values a sample by the schema.
        schema: usize,
    },
    /// The output does not hold the same number of values for each sample.
    #[error("dense network: output `{name}` has {values} values for {batch} samples")]
    Output {
        /// Output name.
        name: String,
        /// Values in the output.
        values: usize,
        /// Samples in the batch.
        batch: usize,
    },
    /// A run was asked for more samples than its memory was taken for.
    #[error("dense network: {batch} samples, the memory is for {max}")]
    Batch {
        /// Samples asked for.
        batch: usize,
        /// Samples at most.
        max: usize,
    },
    /// The network failed while it ran.
    #[error("dense network: {0}")]
    Run(String),
    /// On the GPU the scores are not the CPU's.
    #[error("dense network: {backend}: a score is {apart:e} from the CPU's, {bound:e} is allowed")]
    Apart {
        /// What ran it.
        backend: String,
        /// The largest distance, as a part of the score where that is above 1.
        apart: f32,
        /// The bound.
        bound: f32,
    },
    /// The GPU cannot be used.
    #[error("dense network: {0}")]
    Cuda(#[source] Box<CudaError>),
    /// TensorRT cannot.
    #[error("dense network: {0}")]
    TensorRt(#[source] Box<TensorRtError>),
}

/// A loaded network. Holding one proves that every input is fed at its width and that it ran once.
pub struct DenseEngine {
    backend: Backend,
    widths: Vec<usize>,
    outputs: usize,
    activation: Activation,
    isa: Isa,
}

enum Backend {
    Plan(Plan),
    Fallback { network: Box<Fallback>, operator: String },
}

/// The memory that one worker's runs take.
pub struct DenseScratch {
    batch_max: usize,
    plan: Option<PlanScratch>,
}

impl DenseEngine {
    /// Loads `onnx`; `inputs` are the names and widths that the schema feeds, in the order that
    /// `run` takes them. `weights` is how the weights are kept; the fallback keeps them as they
    /// are.
    ///
    /// # Errors
    /// The file does not load, or its inputs and outputs are not the schema's.
    pub fn load(
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        output: &str,
        activation: Activation,
        weights: Weights,
    ) -> Result<Self, DenseError> {
        Self::load_for(Isa::detect(), onnx, inputs, output, activation, weights)
    }

    /// The same on an instruction set of choice.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_for(
        isa: Isa,
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        output: &str,
        activation: Activation,
        weights: Weights,
    ) -> Result<Self, DenseError> {
        let model = onnx::read(onnx.into())?;
        let shapes = match_interface(&model, inputs, output)?;
        let widths = inputs.iter().map(|(_, width)| *width).collect();
        let named: Vec<_> =
            inputs.iter().zip(&shapes).map(|((name, _), shape)| (*name, shape.clone())).collect();
        let backend = match Graph::build(&model, &named, output, weights) {
            Ok(graph) => Backend::Plan(Plan::new(Layout::new(graph), isa)),
            Err(Stop::Refused(e)) => return Err(e),
            Err(Stop::Unsupported(operator)) => {
                let network = Box::new(Fallback::load(&model, named, output)?);
                Backend::Fallback { network, operator }
            }
        };
        let mut engine = Self { backend, widths, outputs: 1, activation, isa };
        engine.outputs = engine.count_outputs()?;
        Ok(engine)
    }

    /// Runs one sample of zeros: what is not supported shows here, not in the first request.
    fn count_outputs(&self) -> Result<usize, DenseError> {
        let zeros: Vec<Vec<f32>> = self.widths.iter().map(|w| vec![0.0; *w]).collect();
        match &self.backend {
            Backend::Plan(plan) => {
                plan.run(1, &zeros, &mut vec![0.0; plan.outputs()], &mut plan.scratch(1));
                Ok(plan.outputs())
            }
            Backend::Fallback { network, .. } => Ok(network.run(1, &zeros)?.len()),
        }
    }

    /// Values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Parameters in the network.
    pub fn parameters(&self) -> usize {
        match &self.backend {
            Backend::Plan(plan) => plan.parameters(),
            Backend::Fallback { network, .. } => network.parameters(),
        }
    }

    /// Bytes that the weights take, as packed.
    pub fn bytes(&self) -> usize {
        match &self.backend {
            Backend::Plan(plan) => plan.bytes(),
            Backend::Fallback { network, .. } => 4 * network.parameters(),
        }
    }

    /// The operator that our kernels do not have, so that the network runs on the fallback, which
    /// takes memory in each run; `None` if it runs on our kernels.
    pub fn falls_back_for(&self) -> Option<&str> {
        match &self.backend {
            Backend::Plan(_) => None,
            Backend::Fallback { operator, .. } => Some(operator),
        }
    }

    /// The instruction set that it runs on.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> DenseScratch {
        let plan = if let Backend::Plan(plan) = &self.backend {
            Some(plan.scratch(batch_max))
        } else {
            None
        };
        DenseScratch { batch_max, plan }
    }

    /// The bytes of that.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        if let Backend::Plan(plan) = &self.backend { plan.scratch_bytes(batch_max) } else { 0 }
    }

    /// Scores `batch` samples. `inputs[i]` begins with `[batch, width of input i]`, `scores` is
    /// `[batch, outputs]`; `scratch` is this engine's.
    ///
    /// # Errors
    /// The batch is larger than the memory, or the network failed.
    pub fn run<I: AsRef<[f32]>>(
        &self,
        batch: usize,
        inputs: &[I],
        scores: &mut [f32],
        scratch: &mut DenseScratch,
    ) -> Result<(), DenseError> {
        if batch > scratch.batch_max {
            return Err(DenseError::Batch { batch, max: scratch.batch_max });
        }
        self.check(batch, inputs, scores)?;
        match (&self.backend, &mut scratch.plan) {
            (Backend::Plan(plan), Some(scratch)) => plan.run(batch, inputs, scores, scratch),
            (Backend::Fallback { network, .. }, _) => {
                let values = network.run(batch, inputs)?;
                if values.len() != scores.len() {
                    let name = network.output_name().to_owned();
                    return Err(DenseError::Output { name, values: values.len(), batch });
                }
                scores.copy_from_slice(&values);
            }
            (Backend::Plan(_), None) => {
                return Err(DenseError::Run("the scratch is another engine's".into()));
            }
        }
        if self.activation == Activation::Sigmoid {
            microkernel::each(self.isa, scores, math::sigmoid);
        }
        Ok(())
    }

    fn check<I: AsRef<[f32]>>(
        &self,
        batch: usize,
        inputs: &[I],
        scores: &[f32],
    ) -> Result<(), DenseError> {
        let short = |(data, width): (&I, &usize)| data.as_ref().len() < batch * width;
        if inputs.len() != self.widths.len() || inputs.iter().zip(&self.widths).any(short) {
            return Err(DenseError::Run(format!("inputs do not hold {batch} samples")));
        }
        if scores.len() != batch * self.outputs {
            return Err(DenseError::Run(format!("{} scores for {batch} samples", scores.len())));
        }
        Ok(())
    }
}

/// The shape of one sample of each input, once every input of the file is fed and `output` is one
/// of its outputs.
pub(crate) fn match_interface(
    model: &onnx::ModelProto,
    inputs: &[(&str, usize)],
    output: &str,
) -> Result<Vec<Vec<usize>>, DenseError> {
    let graph = model.graph.as_ref().ok_or_else(|| DenseError::Load("no graph".to_owned()))?;
    // Older files list their initializers among the inputs.
    let stored = |name: &str| graph.initializer.iter().any(|t| t.name() == name);
    let fed = |name: &str| inputs.iter().any(|(n, _)| *n == name);
    if let Some(value) = graph.input.iter().find(|v| !fed(v.name()) && !stored(v.name())) {
        return Err(DenseError::NotFed(value.name().to_owned()));
    }
    if !graph.output.iter().any(|v| v.name() == output) {
        return Err(DenseError::NoOutput(output.to_owned()));
    }
    let shape = |(name, width): &(&str, usize)| {
        let value = graph.input.iter().find(|v| v.name() == *name);
        let value = value.ok_or_else(|| DenseError::NoInput((*name).to_owned()))?;
        // A network that leaves its widths open takes `[batch, width]`.
        let shape = value.sizes().filter(|s| !s.is_empty()).unwrap_or_else(|| vec![*width]);
        match shape.iter().try_fold(1usize, |product, s| product.checked_mul(*s)) {
            Some(network) if network == *width => Ok(shape),
            network => {
                let network = network.unwrap_or(usize::MAX);
                Err(DenseError::Width { name: (*name).to_owned(), network, schema: *width })
            }
        }
    };
    inputs.iter().map(shape).collect()
}
