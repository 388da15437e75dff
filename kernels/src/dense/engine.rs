//! A loaded dense network: the plan of this crate's kernels. An engine is read-only, so all workers
//! share it. It never owns its inputs.

use crate::dense::error::DenseError;
use crate::dense::graph::interface::match_interface;
use crate::dense::graph::onnx;
use crate::dense::graph::onnx_graph::{Graph, Stop};
use crate::dense::matrix::math;
use crate::dense::matrix::microkernel;
use crate::dense::run::layout::Layout;
use crate::dense::run::plan::{MultiplyAdds, Plan, PlanScratch};
use crate::dense::run::sharing::{InputPart, divide_inputs};
use crate::dense::weights::{Activation, DenseLayer, Weights};
use crate::simd::isa::Isa;

/// A loaded network. Holding one proves that the schema feeds every input at its width, and that
/// the network ran once.
pub struct DenseEngine {
    plan: Plan,
    widths: Vec<usize>,
    /// Of each part of an input, whether a request has one value.
    shared: Vec<bool>,
    activation: Activation,
    isa: Isa,
}

/// The memory of one worker's runs.
pub struct DenseScratch {
    batch_max: usize,
    plan: Box<PlanScratch>,
}

impl DenseEngine {
    /// Loads `onnx` on the best instruction set of this machine. `inputs` are the names and widths
    /// that the schema feeds, in the order that `run` takes them. The weights stay in memory as the
    /// file stores them: f32, f16 or int8.
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
        let parts = InputPart::whole(inputs, &vec![false; inputs.len()]);
        Self::load_for(Isa::detect(), onnx, inputs, &parts, output, activation)
    }

    /// Loads `onnx` on `isa`, as [`DenseEngine::load`] does on the best instruction set. A run
    /// takes `parts`, one or more for each of `inputs`, in their order and with their widths. What
    /// only shared parts reach is computed once by [`DenseEngine::run_requests`].
    ///
    /// # Errors
    /// Those of [`DenseEngine::load`].
    pub fn load_for(
        isa: Isa,
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        parts: &[InputPart],
        output: &str,
        activation: Activation,
    ) -> Result<Self, DenseError> {
        let model = onnx::read(onnx.into())?;
        let shapes = match_interface(&model, inputs, output)?;
        let shaped: Vec<_> =
            inputs.iter().zip(&shapes).map(|((name, _), shape)| (*name, shape.clone())).collect();
        let mut graph = Graph::build(&model, &shaped, output).map_err(|stop| match stop {
            Stop::Unsupported(operator) => DenseError::Unsupported(operator),
            Stop::Refused(e) => e,
        })?;

        // An operator that fails does so here and not in the first request.
        divide_inputs(&mut graph, parts);
        let shared: Vec<bool> = parts.iter().map(|part| part.shared).collect();
        let widths: Vec<usize> = parts.iter().map(|part| part.width).collect();
        let plan = Plan::new(Layout::for_cpu(graph, parts), isa);
        let zeros: Vec<Vec<f32>> = widths.iter().map(|w| vec![0.0; *w]).collect();
        plan.run(1, &zeros, &mut vec![0.0; plan.outputs()], &mut plan.scratch(1));
        Ok(Self { plan, widths, shared, activation, isa })
    }

    /// Returns the number of values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.plan.outputs()
    }

    /// Returns the values that each part of an input has for a sample, or for a request if it is
    /// shared.
    pub fn widths(&self) -> &[usize] {
        &self.widths
    }

    /// Returns the multiply-adds of a sample, and those that a request needs once.
    pub fn multiply_adds(&self) -> MultiplyAdds {
        self.plan.multiply_adds()
    }

    /// Returns the number of parameters of the network.
    pub fn parameters(&self) -> usize {
        self.plan.parameters()
    }

    /// Returns the bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.plan.bytes()
    }

    /// Returns the layers with weights, in the order of execution.
    pub fn layers(&self) -> Vec<DenseLayer> {
        self.plan.layers()
    }

    /// Returns how the weights are stored, unless the layers differ.
    pub fn weights(&self) -> Option<Weights> {
        let layers = self.layers();
        let first = layers.first().map_or(Weights::F32, |layer| layer.weights);
        layers.iter().all(|layer| layer.weights == first).then_some(first)
    }

    /// Returns what runs the network, in words.
    pub fn runs_on(&self) -> String {
        let engine = format!("the CPU, by Hatchback's kernels ({})", self.isa.name());
        match self.weights() {
            Some(Weights::F32) => engine,
            Some(weights) => format!("{engine}, with {weights} weights"),
            None => format!("{engine}, with weights {}", names_of(&self.layers())),
        }
    }

    /// Creates the memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> DenseScratch {
        DenseScratch { batch_max, plan: Box::new(self.plan.scratch(batch_max)) }
    }

    /// Returns the bytes of the memory for runs of up to `batch_max` samples, at most.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        self.plan.scratch_bytes(batch_max)
    }

    /// Scores `batch` samples. `inputs[i]` starts with `[batch, width of part i]`, `scores` is
    /// `[batch, outputs]`, and `scratch` was created by this engine. A sample whose indices,
    /// lengths or integers are out of their range has NaN as its scores, and so has a logit that is
    /// no finite number.
    ///
    /// # Errors
    /// [`DenseError::Batch`] if the batch is larger than `scratch`, and `Run` if a buffer has
    /// another size.
    pub fn run<I: AsRef<[f32]>>(
        &self,
        batch: usize,
        inputs: &[I],
        scores: &mut [f32],
        scratch: &mut DenseScratch,
    ) -> Result<(), DenseError> {
        self.check([batch, batch], inputs, scores, scratch)?;
        self.plan.run(batch, inputs, scores, &mut scratch.plan);
        self.activate(scores);
        Ok(())
    }

    /// Scores several requests. The samples of request `i` end before sample `ends[i]`. A shared
    /// input starts with `[requests, width]`. The scores have the same bits as those of
    /// [`DenseEngine::run`], where each sample has a copy of the shared values.
    ///
    /// # Errors
    /// Those of [`DenseEngine::run`], and `Run` if `ends` descend.
    pub fn run_requests<I: AsRef<[f32]>>(
        &self,
        ends: &[usize],
        inputs: &[I],
        scores: &mut [f32],
        scratch: &mut DenseScratch,
    ) -> Result<(), DenseError> {
        let batch = ends.last().copied().unwrap_or(0);
        if let Some(pair) = ends.windows(2).find(|pair| pair[0] > pair[1]) {
            let problem = format!("a request ends at sample {} after {}", pair[1], pair[0]);
            return Err(DenseError::Run(problem));
        }
        self.check([batch, ends.len()], inputs, scores, scratch)?;
        self.plan.run_requests(ends, inputs, scores, &mut scratch.plan);
        self.activate(scores);
        Ok(())
    }

    fn activate(&self, scores: &mut [f32]) {
        if self.activation == Activation::Sigmoid {
            microkernel::each(self.isa, scores, math::finite_sigmoid);
        }
    }

    /// Checks that inputs and scores have the sizes of `batch` samples of `requests` requests, and
    /// that the memory holds these.
    fn check<I: AsRef<[f32]>>(
        &self,
        [batch, requests]: [usize; 2],
        inputs: &[I],
        scores: &[f32],
        scratch: &DenseScratch,
    ) -> Result<(), DenseError> {
        if batch > scratch.batch_max {
            return Err(DenseError::Batch { batch, max: scratch.batch_max });
        }
        let rows = self.shared.iter().map(|shared| if *shared { requests } else { batch });
        let mut needed = self.widths.iter().zip(rows).map(|(width, rows)| width * rows);
        let is_short = |data: &I| needed.next().is_none_or(|needed| data.as_ref().len() < needed);
        if inputs.len() != self.widths.len() || inputs.iter().any(is_short) {
            return Err(DenseError::Run(format!(
                "an input is missing or holds fewer than {batch} samples"
            )));
        }

        if scores.len() != batch * self.outputs() {
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
