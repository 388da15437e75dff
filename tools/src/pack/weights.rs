//! Chooses the form of the network's weights. A matrix gets the narrowest form with which the
//! scores of the probe set stay within [`SCORE_DIFFERENCE_MAX`] of those with f32 weights, on the
//! rows that a car has. The scores are equal to the bit on every CPU, and so is the choice. Never
//! changes a file.

use anyhow::{Context, Result};
use hatchback::limits::{PROBE_INPUTS_MAX, SCORE_DIFFERENCE_MAX};
use hatchback::request::probe_inputs::ProbeInputs;
use hatchback::request::worker::Worker;
use hatchback::schema::Schema;
use hatchback::schema::sample::Sample;
use hatchback::{Budget, Flash, Model, SystemClock, Weights};
use hatchback_kernels::dense::graph::onnx::ModelProto;
use hatchback_kernels::dense::{Forms, forms, narrow, widen};
use prost::Message;
use std::collections::HashMap;
use std::sync::Arc;

/// Returns `onnx`, the network of a delta, with the form of each matrix as in `parent`, if that
/// keeps the scores of the probe set. The parent's rows stand for those of the delta, which differ
/// in few. If the new weights do not bear the forms, they get forms of their own.
///
/// # Errors
/// A network does not load or run, or the parent cannot be opened.
pub(crate) fn as_parent(
    onnx: &[u8],
    schema: &Schema,
    parent: &Flash,
    samples: &[Sample],
) -> Result<Vec<u8>> {
    let forms = forms(&parent.dense()?)?;
    // A parent with other inputs cannot score the samples of this network.
    if !has_same_inputs(&parent.manifest().schema, schema) {
        return Ok(onnx.to_vec());
    }
    if forms.values().all(|form| *form == Weights::F32) {
        return Ok(onnx.to_vec());
    }
    let wide = widen(onnx.to_vec())?;
    let narrowed = narrow(&wide, &forms)?;
    schema.load_dense(narrowed.clone())?;
    let own = parent.probe()?;
    let samples = if samples.is_empty() { &own } else { samples };
    if samples.is_empty() {
        return Ok(narrowed);
    }

    let model = Arc::new(Model::open_to_probe(parent, Budget::default(), &|| {})?);
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    let first = &samples[..samples.len().min(PROBE_INPUTS_MAX)];
    let inputs = ProbeInputs::collect(&mut worker, first)?;
    let scores = |onnx: &[u8]| anyhow::Ok(inputs.scores(&schema.load_dense(onnx.to_vec())?)?);
    let difference = furthest(&scores(&narrowed)?, &scores(&wide)?);
    match difference <= SCORE_DIFFERENCE_MAX {
        true => Ok(narrowed),
        false => choose(&wide, schema, &inputs),
    }
}

/// Returns whether samples and network inputs of both schemas have the same shape.
fn has_same_inputs(before: &Schema, schema: &Schema) -> bool {
    let features = |schema: &Schema| -> Vec<_> {
        let shape = schema.features.iter().map(|f| (f.name.clone(), f.hotness_max, f.retired));
        shape.collect()
    };
    let widths = |schema: &Schema| -> Vec<usize> {
        schema.network.inputs.iter().map(|input| schema.input_width(input)).collect()
    };
    features(before) == features(schema)
        && widths(before) == widths(schema)
        && before.network.inputs == schema.network.inputs
        && before.dense_features == schema.dense_features
}

/// Returns whether a network has weights that can be stored narrower.
///
/// # Errors
/// The network does not load.
pub(crate) fn can_be_narrow(onnx: &[u8]) -> Result<bool> {
    Ok(!forms(onnx)?.is_empty())
}

/// Returns `onnx` with the narrowest weights that keep the scores of `inputs`.
///
/// # Errors
/// The network does not load or run.
pub(crate) fn choose(onnx: &[u8], schema: &Schema, inputs: &ProbeInputs) -> Result<Vec<u8>> {
    let wide = widen(onnx.to_vec())?;
    let engine = schema.load_dense(wide.clone())?;
    let trained = inputs.scores(&engine)?;
    let candidates = forms(&wide)?;
    if candidates.is_empty() {
        return Ok(wide);
    }
    let model = ModelProto::decode(wide.as_slice()).context("the network")?;
    let stored = model.graph.iter().flat_map(|graph| &graph.initializer);
    let sizes = stored.map(|t| (t.name().to_owned(), t.sizes().iter().product())).collect();
    let choice = Choice { wide: &wide, schema, inputs, trained, sizes };
    narrow(&wide, &choice.run(candidates)?).map_err(Into::into)
}

struct Choice<'a> {
    wide: &'a [u8],
    schema: &'a Schema,
    inputs: &'a ProbeInputs,
    /// The scores with f32 weights.
    trained: Vec<f32>,
    /// The number of weights of each matrix.
    sizes: HashMap<String, usize>,
}

impl Choice<'_> {
    /// Returns the narrowest forms that keep the scores. First tries int8 for all matrices. If the
    /// scores move too far, tries int8 for one after the other: those whose rounding moves the
    /// scores least, for each weight, come first. Then tries f16 for the rest.
    fn run(&self, mut chosen: Forms) -> Result<Forms> {
        let names: Vec<String> = chosen.keys().cloned().collect();
        let all: Forms = names.iter().map(|name| (name.clone(), Weights::Int8)).collect();
        if self.difference(&all)? <= SCORE_DIFFERENCE_MAX {
            return Ok(all);
        }

        let mut order = Vec::new();
        for name in &names {
            let alone = [(name.clone(), Weights::Int8)].into();
            let weights = self.sizes.get(name).copied().unwrap_or(1);
            order.push((self.difference(&alone)? / weights as f32, name));
        }
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        for weights in [Weights::Int8, Weights::F16] {
            for (_, name) in &order {
                if chosen[*name] != Weights::F32 {
                    continue;
                }
                let mut tried = chosen.clone();
                tried.insert((*name).clone(), weights);
                if self.difference(&tried)? <= SCORE_DIFFERENCE_MAX {
                    chosen = tried;
                }
            }
        }
        Ok(chosen)
    }

    /// Returns the largest difference of a score from the trained one; infinite if a matrix cannot
    /// have its form, or if only the trained network has a finite score.
    fn difference(&self, wanted: &Forms) -> Result<f32> {
        let narrowed = narrow(self.wide, wanted)?;
        let found = forms(&narrowed)?;
        if wanted.iter().any(|(name, form)| found.get(name) != Some(form)) {
            return Ok(f32::INFINITY);
        }
        let loaded = self.schema.load_dense(narrowed);
        let Ok(engine) = loaded else { return Ok(f32::INFINITY) };
        Ok(furthest(&self.inputs.scores(&engine)?, &self.trained))
    }
}

fn furthest(found: &[f32], trained: &[f32]) -> f32 {
    let pairs = found.iter().zip(trained).filter(|(_, trained)| trained.is_finite());
    let differences = pairs.map(|(found, trained)| (found - trained).abs());
    differences.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) })
}
