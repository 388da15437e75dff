//! The first step of a request: checks that the batch fits the model and its budget. Reads no key
//! and no value.

use crate::model::Model;
use crate::request::error::ScoreError;
use crate::schema::batch::Batch;
use hatchback_kernels::lookup::Bags;

/// Checks that `batch` has the shape of the model's schema and at most `batch_max` samples.
///
/// # Errors
/// [`ScoreError::Request`] with the first field that does not fit.
pub(crate) fn check_batch(model: &Model, batch: &Batch) -> Result<(), ScoreError> {
    let (schema, max) = (model.schema(), model.budget().batch_max as usize);
    let refuse = |field, problem| Err(ScoreError::Request { field, problem });

    if batch.size() > max {
        return refuse("batch", format!("{} samples, the budget allows {max}", batch.size()));
    }
    if batch.features() != schema.features.len() {
        let problem = format!("{} of {} sparse features", batch.features(), schema.features.len());
        return refuse("features", problem);
    }
    for (values, rows, shared) in
        [(batch.dense(), batch.size(), false), (batch.shared_dense(), batch.ends().len(), true)]
    {
        if values.len() != rows * schema.dense_width(shared) {
            let field = if shared { "shared dense" } else { "dense" };
            return refuse(field, format!("{} values for {rows} rows", values.len()));
        }
    }

    let is_too_long = |&f: &usize| batch.hotness(f) > schema.features[f].hotness_max as usize;
    if let Some(f) = (0..batch.features()).find(is_too_long) {
        let problem = format!("feature {f} has a bag of {} keys", batch.hotness(f));
        return refuse("hotness", problem);
    }
    let bags = |shared| if shared { batch.ends().len() } else { batch.size() };
    let differs = |&f: &usize| batch.bags(f).offsets.len() != bags(schema.features[f].shared) + 1;
    match (0..batch.features()).find(differs) {
        Some(f) => {
            let (name, bags) = (&schema.features[f].name, batch.bags(f).offsets.len() - 1);
            refuse("shared", format!("{bags} bags of `{name}` for {} samples", batch.size()))
        }
        None => check_weights(model, batch),
    }
}

/// Checks that each feature with weights has one for each key, and that no other feature has
/// weights.
fn check_weights(model: &Model, batch: &Batch) -> Result<(), ScoreError> {
    for (f, feature) in model.schema().features.iter().enumerate() {
        let Bags { keys, weights, .. } = batch.bags(f);
        let expected = if feature.weighted { keys.len() } else { 0 };
        if weights.len() != expected {
            let problem =
                format!("{} for {} keys of `{}`", weights.len(), keys.len(), feature.name);
            return Err(ScoreError::Request { field: "weights", problem });
        }
    }
    Ok(())
}
