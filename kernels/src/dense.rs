//! The dense network on the CPU: an ONNX file run by rten, fed from the buffers that the lookup filled.
//! Never looks inside the network and never owns its inputs.

use rten::{Dimension, Model, NodeId, RunOptions, ThreadPool, ValueOrView, ValueView};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What is applied to the network's output to make scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The output is the score.
    None,
    /// The output is a logit: `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// Why a dense network cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DenseError {
    /// The ONNX file does not parse, or an operator is not supported.
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
    #[error("dense network: input `{name}` takes {network} values a sample, the schema feeds {schema}")]
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
    /// The network failed while it ran.
    #[error("dense network: {0}")]
    Run(String),
}

/// A loaded network. Holding one proves that every input is fed at its width and that it ran once.
pub struct DenseEngine {
    model: Model,
    inputs: Vec<Input>,
    output: NodeId,
    output_name: String,
    outputs: usize,
    activation: Activation,
    options: RunOptions,
}

struct Input {
    id: NodeId,
    /// Dimensions after the batch.
    shape: Vec<usize>,
    width: usize,
}

impl DenseEngine {
    /// Loads `onnx`; `inputs` are the names and widths that the schema feeds, in the order that `run` takes
    /// them. `threads` is how many threads one run may use.
    ///
    /// # Errors
    /// The file does not load, or its inputs and outputs are not the schema's.
    pub fn load(
        onnx: Vec<u8>,
        inputs: &[(&str, usize)],
        output: &str,
        activation: Activation,
        threads: usize,
    ) -> Result<Self, DenseError> {
        let model = Model::load(onnx).map_err(|e| DenseError::Load(e.to_string()))?;
        for &id in model.input_ids() {
            let name = name_of(&model, id);
            if !inputs.iter().any(|(n, _)| *n == name) {
                return Err(DenseError::NotFed(name));
            }
        }
        let inputs =
            inputs.iter().map(|(name, width)| Input::find(&model, name, *width)).collect::<Result<_, _>>()?;
        let output_name = output.to_owned();
        let output = model.output_ids().iter().copied().find(|&id| name_of(&model, id) == output);
        let output = output.ok_or_else(|| DenseError::NoOutput(output_name.clone()))?;
        let mut options = RunOptions::default();
        options.thread_pool = Some(Arc::new(ThreadPool::with_num_threads(threads)));
        let mut engine = Self { model, inputs, output, output_name, outputs: 1, activation, options };
        engine.outputs = engine.count_outputs()?;
        Ok(engine)
    }

    /// Runs one sample of zeros: an operator that is not supported shows here, not in the first request.
    fn count_outputs(&self) -> Result<usize, DenseError> {
        let zeros: Vec<Vec<f32>> = self.inputs.iter().map(|i| vec![0.0; i.width]).collect();
        let views: Vec<&[f32]> = zeros.iter().map(Vec::as_slice).collect();
        Ok(self.raw(1, &views)?.len())
    }

    /// Values in one sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Parameters in the network.
    pub fn parameters(&self) -> usize {
        self.model.total_params()
    }

    /// Scores `batch` samples. `inputs[i]` is `[batch, width of input i]`, `scores` is `[batch, outputs]`.
    ///
    /// # Errors
    /// The network failed, or its output has another size.
    pub fn run(&self, batch: usize, inputs: &[&[f32]], scores: &mut [f32]) -> Result<(), DenseError> {
        let values = self.raw(batch, inputs)?;
        if values.len() != scores.len() {
            let name = self.output_name.clone();
            return Err(DenseError::Output { name, values: values.len(), batch });
        }
        match self.activation {
            Activation::None => scores.copy_from_slice(&values),
            Activation::Sigmoid => {
                scores.iter_mut().zip(&values).for_each(|(s, x)| *s = 1.0 / (1.0 + (-x).exp()));
            }
        }
        Ok(())
    }

    fn raw(&self, batch: usize, inputs: &[&[f32]]) -> Result<Vec<f32>, DenseError> {
        let mut fed: Vec<(NodeId, ValueOrView)> = Vec::with_capacity(inputs.len());
        for (input, data) in self.inputs.iter().zip(inputs) {
            let shape: Vec<usize> = std::iter::once(batch).chain(input.shape.iter().copied()).collect();
            let view = ValueView::from_shape(&shape, data).map_err(|e| DenseError::Run(e.to_string()))?;
            fed.push((input.id, view.into()));
        }
        let mut values = self
            .model
            .run(fed, &[self.output], Some(self.options.clone()))
            .map_err(|e| DenseError::Run(e.to_string()))?;
        let value = values.pop().ok_or_else(|| DenseError::NoOutput(self.output_name.clone()))?;
        let tensor: rten_tensor::Tensor<f32> = value
            .try_into()
            .map_err(|_| DenseError::Run(format!("output `{}` is not a float tensor", self.output_name)))?;
        Ok(tensor.into_data())
    }
}

impl Input {
    fn find(model: &Model, name: &str, width: usize) -> Result<Self, DenseError> {
        let index = model.input_ids().iter().position(|&id| name_of(model, id) == name);
        let index = index.ok_or_else(|| DenseError::NoInput(name.to_owned()))?;
        let dims = model.input_shape(index).unwrap_or_default();
        let fixed: Option<Vec<usize>> = dims.iter().skip(1).map(fixed).collect();
        // A network that leaves its widths open takes `[batch, width]`.
        let shape = fixed.filter(|s| !s.is_empty()).unwrap_or_else(|| vec![width]);
        let network = shape.iter().product();
        if network != width {
            return Err(DenseError::Width { name: name.to_owned(), network, schema: width });
        }
        Ok(Self { id: model.input_ids()[index], shape, width })
    }
}

fn fixed(dimension: &Dimension) -> Option<usize> {
    match dimension {
        Dimension::Fixed(n) => Some(*n),
        Dimension::Symbolic(_) => None,
    }
}

fn name_of(model: &Model, id: NodeId) -> String {
    model.node_info(id).and_then(|n| n.name().map(str::to_owned)).unwrap_or_default()
}
