//! The fallback: rten runs a network with an operator that this crate's kernels do not have. The
//! fallback loads only files that were read, checked and bounded before: rten allocates what a file
//! asks for. It allocates in every run.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::ModelProto;
use crate::dense::graph::tensor::Size;
use prost::Message;
use rten::{
    Model, ModelOptions, NodeId, RunOptions, ShapeInferenceMode, ThreadPool, ValueOrView, ValueView,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Difference by which a sample's output may depend on the samples beside it, because they change
/// the order of rten's sums: a part of the output, or of 1 if that is smaller.
const ORDER_DIFFERENCE_MAX: f32 = 1e-3;

/// A network that rten runs.
pub(super) struct Fallback {
    model: Model,
    /// Each input with the shape of one sample.
    inputs: Vec<(NodeId, Vec<usize>)>,
    output: NodeId,
    output_name: String,
    options: RunOptions,
    /// The values that a run holds at once, at most.
    held: Size,
}

impl Fallback {
    /// Loads `model` from a new encoding and not from the bytes of the file, so that rten parses
    /// only what the check has seen. `inputs` are names and shapes of one sample, and `held` is
    /// what `bounds.rs` found.
    pub fn load(
        model: &ModelProto,
        inputs: Vec<(&str, Vec<usize>)>,
        output: &str,
        held: Size,
    ) -> Result<Self, DenseError> {
        let mut options = ModelOptions::with_all_ops();
        // The inferred sizes are terms of the batch, and a few nodes can double a term to any
        // length.
        options.shape_inference(ShapeInferenceMode::Off);
        let file = model.encode_to_vec();
        let model = guarded(|| options.load(file).map_err(|e| e.to_string()))
            .map_err(|e| DenseError::Unsupported(format!("a network that rten refuses: {e}")))?;
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
        Ok(Self { model, inputs, output, output_name, options, held })
    }

    pub fn parameters(&self) -> usize {
        self.model.total_params()
    }

    /// Returns the bytes that a run of `batch` samples holds at once, at most.
    pub fn run_bytes(&self, batch: usize) -> usize {
        let Size { fixed, batches } = self.held;
        let values = i64::try_from(batch).unwrap_or(i64::MAX).saturating_mul(batches);
        usize::try_from(values.saturating_add(fixed.max(0)).saturating_mul(4)).unwrap_or(usize::MAX)
    }

    pub fn output_name(&self) -> &str {
        &self.output_name
    }

    /// Runs pairs of different samples, each alone and both together. Returns the number of values
    /// in one sample's output.
    ///
    /// # Errors
    /// [`DenseError::SamplesMeet`] if a sample's output depends on the other sample, and
    /// [`DenseError::Run`] or [`DenseError::Output`] if the network fails.
    pub fn count_outputs(&self) -> Result<usize, DenseError> {
        // The first sample is zero, and no value is below 0: a value may be an index.
        let zeros = self.sample(&|_| 0.0);
        let some = self.sample(&|i| (i * 7919 % 1009) as f32 / 1009.0);
        let other = self.sample(&|i| (i * 104_729 % 2003) as f32 / 2003.0);
        let outputs = self.run(1, &zeros)?.len();
        for pair in [[&zeros, &some], [&some, &other]] {
            self.check_pair(pair, outputs)?;
        }
        Ok(outputs)
    }

    /// Returns a sample with `value(i)` as its value number `i`.
    fn sample(&self, value: &dyn Fn(usize) -> f32) -> Vec<Vec<f32>> {
        let widths = self.inputs.iter().map(|(_, shape)| shape.iter().product::<usize>());
        widths.enumerate().map(|(n, w)| (0..w).map(|i| value(31 * n + i)).collect()).collect()
    }

    fn check_pair(&self, pair: [&Vec<Vec<f32>>; 2], outputs: usize) -> Result<(), DenseError> {
        let both: Vec<Vec<f32>> =
            pair[0].iter().zip(pair[1]).map(|(a, b)| [a.as_slice(), b].concat()).collect();
        let together = self.run(2, &both)?;
        if together.len() != 2 * outputs {
            let (name, values) = (self.output_name.clone(), together.len());
            return Err(DenseError::Output { name, values, batch: 2 });
        }

        let alone = [self.run(1, pair[0])?, self.run(1, pair[1])?].concat();
        let far = |(a, b): &(&f32, &f32)| {
            let same = a == b || (a.is_nan() && b.is_nan());
            let off = (*a - *b).abs() / a.abs().max(1.0);
            !same && (off.is_nan() || off > ORDER_DIFFERENCE_MAX)
        };
        match alone.iter().zip(&together).find(far) {
            Some((&alone, &together)) => {
                Err(DenseError::SamplesMeet { name: self.output_name.clone(), alone, together })
            }
            None => Ok(()),
        }
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

        let run = || self.model.run(fed, &[self.output], Some(self.options.clone()));
        let mut values = guarded(|| run().map_err(|e| e.to_string())).map_err(run_error)?;
        let value = values.pop().ok_or_else(|| DenseError::NoOutput(self.output_name.clone()))?;
        let tensor: rten_tensor::Tensor<f32> = value.try_into().map_err(|_| {
            DenseError::Run(format!("output `{}` is not a float tensor", self.output_name))
        })?;
        Ok(tensor.into_data())
    }
}

/// Returns the error of a failed run. rten has some forms of operators by name only.
fn run_error(problem: String) -> DenseError {
    if problem.contains("unsupported") {
        DenseError::Unsupported(problem)
    } else {
        DenseError::Run(problem)
    }
}

/// Returns what `call` returns; a panic inside rten is an error of the network that caused it.
fn guarded<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("rten panicked".to_owned()))
}
