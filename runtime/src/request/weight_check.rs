//! Checks that a dense network with narrow weights gives the scores of the trained one. Both score
//! the probe set from the same rows when a model is opened. Never changes a model.
//! `weight_choice.rs` makes such a check for each layer.

use crate::clock::SystemClock;
use crate::flash::Flash;
use crate::limits::{SCORE_DIFFERENCE_MAX, WEIGHT_CHECK_SAMPLES_MAX};
use crate::model::backend::sole_owner;
use crate::model::budget::DenseWeights;
use crate::model::{Model, OpenError};
use crate::request::worker::{ScoreError, Worker};
use hatchback_kernels::dense::Weights;
use std::sync::Arc;

/// Returns `model` if narrow weights do not change its scores. During the check the network is in
/// memory twice.
///
/// # Errors
/// [`OpenError::Weights`] if the score of a probe sample differs by more than
/// [`SCORE_DIFFERENCE_MAX`] or a sample cannot be scored.
pub(crate) fn check(model: Model, flash: &Flash) -> Result<Model, OpenError> {
    let weights = match model.budget().dense_weights {
        DenseWeights::F32 | DenseWeights::Auto => return Ok(model),
        narrow => narrow.at_first(),
    };
    let samples = flash.probe()?;
    if samples.is_empty() {
        log::warn!(
            "{}: {weights} weights are not checked, because the bundle has no probe set",
            model.generation()
        );
        return Ok(model);
    }

    let model = Arc::new(model);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let trained = model.schema().load_dense(flash.dense()?, Weights::F32)?;
    let mut scratch = trained.scratch(1);
    let (mut batch, mut expected) = (model.batch(), vec![0.0; model.outputs()]);

    for (sample, probe) in samples.iter().take(WEIGHT_CHECK_SAMPLES_MAX).enumerate() {
        let refuse = |problem| OpenError::Weights { weights, sample, problem };
        batch.clear();
        batch.push(model.schema(), probe).map_err(|e| refuse(e.to_string()))?;
        let found = match worker.score(&batch, None) {
            Ok(scores) => Some(scores.values.to_vec()),
            Err(ScoreError::NotFinite(_)) => None,
            Err(e) => return Err(refuse(e.to_string())),
        };
        trained.run(1, worker.inputs(), &mut expected, &mut scratch)?;
        check_scores(found.as_deref(), &expected).map_err(refuse)?;
    }

    drop(worker);
    Ok(sole_owner(model))
}

/// Checks the scores of one sample with narrow weights, `None` if one is not a number, against
/// those with f32 weights.
fn check_scores(found: Option<&[f32]>, expected: &[f32]) -> Result<(), String> {
    let Some(found) = found else {
        // If the trained network has no score either, this check passes, and the probe rejects the
        // release.
        let is_number = expected.iter().all(|score| score.is_finite());
        return if is_number {
            Err(format!("has no score, with f32 weights {expected:?}"))
        } else {
            Ok(())
        };
    };
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found - expected).abs();
        if difference > SCORE_DIFFERENCE_MAX || difference.is_nan() {
            return Err(format!(
                "scores {found}, with f32 weights {expected}; {SCORE_DIFFERENCE_MAX} is allowed"
            ));
        }
    }
    Ok(())
}
