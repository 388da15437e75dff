//! The fallback: rten runs a network with an operator that this crate's kernels do not have. The
//! fallback loads only files that were read and checked before. It allocates in every run.

use crate::dense::error::DenseError;
use crate::dense::onnx::ModelProto;
use prost::Message;
use rten::{Model, NodeId, RunOptions, ThreadPool, ValueOrView, ValueView};
use std::sync::Arc;

/// A network that rten runs.
pub(super) struct Fallback {
    model: Model,
    /// Each input with the shape of one sample.
    inputs: Vec<(NodeId, Vec<usize>)>,
    output: NodeId,
    output_name: String,
    options: RunOptions,
}

impl Fallback {
    /// Loads `model` from a new encoding and not from the bytes of the file, so that rten parses
    /// only what the check has seen. `inputs` are names and shapes of one sample.
    pub fn load(
        model: &ModelProto,
        inputs: Vec<(&str, Vec<usize>)>,
        output: &str,
    ) -> Result<Self, DenseError> {
        let model =
            Model::load(model.encode_to_vec()).map_err(|e| DenseError::Load(e.to_string()))?;
        let find = |ids: &[NodeId], name: &str| {
            let has_name =
                |&id: &NodeId| model.node_info(id).is_some_and(|n| n.name() == Some(name));
            ids.iter().copied().find(has_name)
        };

        let input = |(name, shape): (&str, Vec<usize>)| match find(model.input_ids(), name) {
            Some(id) => Ok((id, shape)),
            None => Err(DenseError::NoInput(name.to_owned())),
        };
        let inputs = inputs.into_iter().map(input).collect::<Result<_, _>>()?;
        let output_name = output.to_owned();
        let output = find(model.output_ids(), output)
            .ok_or_else(|| DenseError::NoOutput(output_name.clone()))?;

        let mut options = RunOptions::default();
        options.thread_pool = Some(Arc::new(ThreadPool::with_num_threads(1)));
        Ok(Self { model, inputs, output, output_name, options })
    }

    pub fn parameters(&self) -> usize {
        self.model.total_params()
    }

    pub fn output_name(&self) -> &str {
        &self.output_name
    }

    /// Runs `batch` samples and returns the output. `inputs[i]` starts with the values of the
    /// batch.
    pub fn run<I: AsRef<[f32]>>(&self, batch: usize, inputs: &[I]) -> Result<Vec<f32>, DenseError> {
        let mut fed: Vec<(NodeId, ValueOrView)> = Vec::with_capacity(inputs.len());
        for ((id, shape), data) in self.inputs.iter().zip(inputs) {
            let data = &data.as_ref()[..batch * shape.iter().product::<usize>()];
            let shape: Vec<usize> = std::iter::once(batch).chain(shape.iter().copied()).collect();
            let view =
                ValueView::from_shape(&shape, data).map_err(|e| DenseError::Run(e.to_string()))?;
            fed.push((*id, view.into()));
        }

        let mut values = self
            .model
            .run(fed, &[self.output], Some(self.options.clone()))
            .map_err(|e| DenseError::Run(e.to_string()))?;
        let value = values.pop().ok_or_else(|| DenseError::NoOutput(self.output_name.clone()))?;
        let tensor: rten_tensor::Tensor<f32> = value.try_into().map_err(|_| {
            DenseError::Run(format!("output `{}` is not a float tensor", self.output_name))
        })?;
        Ok(tensor.into_data())
    }
}
