//! A loaded dense network: the plan of this crate's kernels, or the fallback for a file with an
//! operator that the kernels do not have. An engine is read-only, so all workers share it. It never
//! owns its inputs.

use crate::dense::error::DenseError;
use crate::dense::fallback::Fallback;
use crate::dense::graph::bounds;
use crate::dense::graph::forms::widen_model;
use crate::dense::graph::interface::match_interface;
use crate::dense::graph::onnx;
use crate::dense::graph::onnx_graph::{Graph, Stop};
use crate::dense::graph::tensor::Size;
use crate::dense::matrix::math;
use crate::dense::matrix::microkernel;
use crate::dense::run::layout::Layout;
use crate::dense::run::plan::{Plan, PlanScratch};
use crate::dense::weights::{Activation, DenseLayer, Weights};
use crate::simd::isa::Isa;

/// A loaded network. Holding one proves that the schema feeds every input at its width, and that
/// the network ran once.
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

/// The memory of one worker's runs.
pub struct DenseScratch {
    batch_max: usize,
    plan: Option<Box<PlanScratch>>,
}

impl DenseEngine {
    /// Loads `onnx` on the best instruction set of this machine. `inputs` are the names and widths
    /// that the schema feeds, in the order that `run` takes them. The weights stay in memory as the
    /// file stores them: f32, f16 or int8. The fallback keeps them as f32.
    ///
    /// # Errors
    /// [`DenseError::Load`] if the file is malformed, `Unsupported` if it has what this version
    /// does not run, and `NoInput`, `NotFed`, `NoOutput` or `Width` if its inputs and outputs are
    /// not those of the schema.
    pub fn load(
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        output: &str,
        activation: Activation,
    ) -> Result<Self, DenseError> {
        Self::load_for(Isa::detect(), onnx, inputs, output, activation)
    }

    /// Loads `onnx` on `isa`, as [`DenseEngine::load`] does on the best instruction set.
    ///
    /// # Errors
    /// Those of [`DenseEngine::load`].
    pub fn load_for(
        isa: Isa,
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        output: &str,
        activation: Activation,
    ) -> Result<Self, DenseError> {
        let mut model = onnx::read(onnx.into())?;
        let shapes = match_interface(&model, inputs, output)?;
        let widths = inputs.iter().map(|(_, width)| *width).collect();
        let shaped: Vec<_> =
            inputs.iter().zip(&shapes).map(|((name, _), shape)| (*name, shape.clone())).collect();

        let mut graph = Graph::build(&model, &shaped, output);
        let mut held = Size::default();
        if let Err(Stop::Unsupported(_)) = &graph {
            let bounded = bounds::bound(&model, &shaped)?;
            held = bounded.held;
            if let Some(flat) = bounded.without_branches {
                model = flat;
                graph = Graph::build(&model, &shaped, output);
            }
        }
        let backend = match graph {
            Ok(graph) => Backend::Plan(Plan::new(Layout::for_cpu(graph), isa)),
            Err(Stop::Refused(e)) => return Err(e),
            Err(Stop::Unsupported(operator)) => {
                widen_model(&mut model);
                let network = Box::new(Fallback::load(&model, shaped, output, held)?);
                Backend::Fallback { network, operator }
            }
        };

        let mut engine = Self { backend, widths, outputs: 1, activation, isa };
        engine.outputs = engine.count_outputs()?;
        Ok(engine)
    }

    /// Runs samples and counts the outputs of one. An operator that fails does so here and not in
    /// the first request.
    fn count_outputs(&self) -> Result<usize, DenseError> {
        match &self.backend {
            Backend::Plan(plan) => {
                let zeros: Vec<Vec<f32>> = self.widths.iter().map(|w| vec![0.0; *w]).collect();
                plan.run(1, &zeros, &mut vec![0.0; plan.outputs()], &mut plan.scratch(1));
                Ok(plan.outputs())
            }
            Backend::Fallback { network, .. } => network.count_outputs(),
        }
    }

    /// Returns the number of values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the number of parameters of the network.
    pub fn parameters(&self) -> usize {
        match &self.backend {
            Backend::Plan(plan) => plan.parameters(),
            Backend::Fallback { network, .. } => network.parameters(),
        }
    }

    /// Returns the bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        match &self.backend {
            Backend::Plan(plan) => plan.bytes(),
            Backend::Fallback { network, .. } => 4 * network.parameters(),
        }
    }

    /// Returns the layers with weights, in the order of execution. A network on the fallback has
    /// none.
    pub fn layers(&self) -> Vec<DenseLayer> {
        if let Backend::Plan(plan) = &self.backend { plan.layers() } else { Vec::new() }
    }

    /// Returns how the weights are stored, unless the layers differ.
    pub fn weights(&self) -> Option<Weights> {
        let layers = self.layers();
        let first = layers.first().map_or(Weights::F32, |layer| layer.weights);
        layers.iter().all(|layer| layer.weights == first).then_some(first)
    }

    /// Returns why the network runs on the fallback, which allocates in each run: the operator and
    /// the node. Returns `None` if the network runs on the kernels of this crate.
    pub fn falls_back_for(&self) -> Option<&str> {
        match &self.backend {
            Backend::Plan(_) => None,
            Backend::Fallback { operator, .. } => Some(operator),
        }
    }

    /// Returns what runs the network, in words.
    pub fn runs_on(&self) -> String {
        match self.falls_back_for() {
            None => {
                let engine = format!("the CPU, by Hatchback's kernels ({})", self.isa.name());
                match self.weights() {
                    Some(Weights::F32) => engine,
                    Some(weights) => format!("{engine}, with {weights} weights"),
                    None => format!("{engine}, with weights {}", names_of(&self.layers())),
                }
            }
            Some(reason) => {
                format!("the CPU, by rten, slower and with allocations, because of {reason}")
            }
        }
    }

    /// Creates the memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> DenseScratch {
        let plan = if let Backend::Plan(plan) = &self.backend {
            Some(Box::new(plan.scratch(batch_max)))
        } else {
            None
        };
        DenseScratch { batch_max, plan }
    }

    /// Returns the bytes of the memory for runs of up to `batch_max` samples, at most.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        match &self.backend {
            Backend::Plan(plan) => plan.scratch_bytes(batch_max),
            Backend::Fallback { network, .. } => network.run_bytes(batch_max),
        }
    }

    /// Scores `batch` samples. `inputs[i]` starts with `[batch, width of input i]`, `scores` is
    /// `[batch, outputs]`, and `scratch` was created by this engine.
    ///
    /// # Errors
    /// [`DenseError::Batch`] if the batch is larger than `scratch`, and `Run` or `Output` if the
    /// network failed.
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
                return Err(DenseError::Run("the scratch memory belongs to another engine".into()));
            }
        }

        if self.activation == Activation::Sigmoid {
            microkernel::each(self.isa, scores, math::finite_sigmoid);
        }
        Ok(())
    }

    /// Checks that inputs and scores have the sizes of `batch` samples.
    fn check<I: AsRef<[f32]>>(
        &self,
        batch: usize,
        inputs: &[I],
        scores: &[f32],
    ) -> Result<(), DenseError> {
        let short = |(data, width): (&I, &usize)| data.as_ref().len() < batch * width;
        if inputs.len() != self.widths.len() || inputs.iter().zip(&self.widths).any(short) {
            return Err(DenseError::Run(format!(
                "an input is missing or holds fewer than {batch} samples"
            )));
        }

        if scores.len() != batch * self.outputs {
            return Err(DenseError::Run(format!(
                "the buffer holds {} scores, which are not those of {batch} samples",
                scores.len()
            )));
        }
        Ok(())
    }
}

/// Returns the sizes and weights of `layers`, with commas between them.
fn names_of(layers: &[DenseLayer]) -> String {
    layers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
