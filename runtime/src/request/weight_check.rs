//! Whether a dense network with narrow weights still gives the scores of the one that was trained:
//! both score the probe set from the same rows when a model is opened. Never changes a model.

use crate::flash::Flash;
use crate::model::{Model, OpenError};
use crate::request::worker::{SystemClock, Worker};
use hatchback_kernels::dense::Weights;
use std::sync::Arc;

/// How far a score may move, absolute.
pub const SCORE_DIFFERENCE_MAX: f32 = 1e-3;

/// Samples of the probe set that are scored: enough to show a network that does not bear it, few
/// enough for a start.
const SAMPLES_MAX: usize = 512;

/// Hands `model` back if narrow weights do not change its scores. For this time the network is in
/// memory twice.
///
/// # Errors
/// The score of a probe sample moves by more than [`SCORE_DIFFERENCE_MAX`], or a sample cannot be
/// scored.
pub(crate) fn check(model: Model, flash: &Flash) -> Result<Model, OpenError> {
    let weights = model.budget().dense_weights;
    if weights == Weights::F32 {
        return Ok(model);
    }
    let samples = flash.probe()?;
    if samples.is_empty() {
        log::warn!(
            "{}: no probe set shows what {weights} weights do to the scores",
            model.generation()
        );
    }
    let model = Arc::new(model);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let trained = model.schema().load_dense(flash.dense()?, Weights::F32)?;
    let mut scratch = trained.scratch(1);
    let (mut batch, mut expected) = (model.batch(), vec![0.0; model.outputs()]);
    for (sample, probe) in samples.iter().take(SAMPLES_MAX).enumerate() {
        let refuse = |problem| OpenError::Weights { weights, sample, problem };
        batch.clear();
        batch.push(model.schema(), probe).map_err(|e| refuse(e.to_string()))?;
        let found = worker.score(&batch, None).map_err(|e| refuse(e.to_string()))?.values.to_vec();
        trained.run(1, worker.inputs(), &mut expected, &mut scratch)?;
        for (found, expected) in found.iter().zip(&expected) {
            let difference = (found - expected).abs();
            // A score that is no number with both is the probe's to refuse.
            if difference > SCORE_DIFFERENCE_MAX || found.is_nan() != expected.is_nan() {
                let problem = format!(
                    "scores {found}, with f32 weights {expected}; {SCORE_DIFFERENCE_MAX} is allowed"
                );
                return Err(refuse(problem));
            }
        }
    }
    drop(worker);
    let Some(model) = Arc::into_inner(model) else { unreachable!("the worker is gone") };
    Ok(model)
}
