//! The inputs that the dense network has for the samples of a probe set: pooled rows and dense
//! features. With them the scores of several networks, or of one on several engines, are compared
//! on the same rows. Never changes a model.

use crate::model::{Model, OpenError};
use crate::request::worker::{ScoreError, Worker};
use crate::schema::sample::Sample;
use hatchback_kernels::dense::{DenseEngine, DenseError};

/// The inputs of some samples.
pub struct ProbeInputs {
    samples: usize,
    /// `[samples, width]` of each input.
    inputs: Vec<Vec<f32>>,
}

impl ProbeInputs {
    /// Looks up the rows of `samples`, one request each.
    ///
    /// # Errors
    /// [`OpenError::Probe`] if a sample cannot be scored.
    pub fn collect(worker: &mut Worker, samples: &[Sample]) -> Result<Self, OpenError> {
        let widths: Vec<usize> = worker.model().input_widths().to_vec();
        let mut batch = worker.model().batch();
        let mut inputs = vec![Vec::new(); widths.len()];
        for (number, sample) in samples.iter().enumerate() {
            let refuse = |problem| OpenError::Probe { sample: number, problem };
            batch.clear();
            let model: &Model = worker.model();
            batch.push(model.schema(), sample).map_err(|e| refuse(e.to_string()))?;
            match worker.score(&batch, None) {
                Ok(_) | Err(ScoreError::NotFinite(_)) => {}
                Err(e) => return Err(refuse(e.to_string())),
            }
            for ((all, from), width) in inputs.iter_mut().zip(worker.inputs()).zip(&widths) {
                all.extend_from_slice(&from[..*width]);
            }
        }
        Ok(Self { samples: samples.len(), inputs })
    }

    /// Returns `[samples, width]` of each input.
    pub fn inputs(&self) -> &[Vec<f32>] {
        &self.inputs
    }

    /// Returns the scores of `network`, `[samples, outputs]`.
    ///
    /// # Errors
    /// Those of [`DenseEngine::run`].
    pub fn scores(&self, network: &DenseEngine) -> Result<Vec<f32>, DenseError> {
        let mut scores = vec![0.0; self.samples * network.outputs()];
        network.run(self.samples, &self.inputs, &mut scores, &mut network.scratch(self.samples))?;
        Ok(scores)
    }
}
