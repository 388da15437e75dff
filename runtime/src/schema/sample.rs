//! Samples, which people and tools write as one line of JSON each. A line may hold the raw values
//! of features with a key function; a sample holds keys. This file checks samples against the
//! schema and never scores them.

use crate::limits::SAMPLE_BYTES_MAX;
use crate::schema::key_function::KeyError;
use crate::schema::object::Object;
use crate::schema::raw_value::{RawValue, Shortened};
use crate::schema::sample_line::{
    DenseValues, ForeignNumber, Line, Outcome, UniqueMap, foreign_number,
};
use crate::schema::{Feature, Schema, optional_columns};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The features of one sample, with its outcome if that is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The dense features, in schema order. NaN is a missing value.
    pub dense: Vec<f32>,
    /// The keys of each sparse feature, in schema order.
    pub sparse: Vec<Vec<u64>>,
    /// The weights of each feature in schema order, one for each key: a weight multiplies the key's
    /// row. A feature without weights has an empty list. Empty if no feature of the model has
    /// weights.
    pub weights: Vec<Vec<f32>>,
    /// The observed outcome of each output, 0 or 1. Empty if none is known.
    pub labels: Vec<Option<f32>>,
    /// The score of each output that the trainer's framework computed. Empty if none is known.
    pub scores: Vec<Option<f32>>,
}

/// Why a sample is refused.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SampleError {
    /// The line is not the JSON of a sample.
    #[error("{0}")]
    Json(String),
    /// A field does not fit the schema.
    #[error("{field}: {problem}")]
    Field { field: String, problem: String },
}

debug_as_display!(SampleError);

fn fault<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, SampleError> {
    Err(SampleError::Field { field: field.into(), problem: problem.into() })
}

/// Checks the dense features of one sample against `schema`.
pub(super) fn check_dense(schema: &Schema, dense: &[f32]) -> Result<(), SampleError> {
    let width = schema.dense_features.len();
    if dense.len() != width {
        return fault("dense", format!("{} values, the model takes {width}", dense.len()));
    }
    match schema.dense_features.iter().zip(dense).position(|(feature, v)| feature.refuses(*v)) {
        Some(i) if dense[i].is_nan() => {
            let problem = format!(
                "`{}` is NaN, and has no value for `missing`",
                schema.dense_features[i].name
            );
            fault(format!("dense[{i}]"), problem)
        }
        Some(i) => {
            let problem = format!("`{}` is {}", schema.dense_features[i].name, dense[i]);
            fault(format!("dense[{i}]"), problem)
        }
        None => Ok(()),
    }
}

/// Checks the number of keys in a bag of `feature`.
pub(super) fn check_bag(feature: &Feature, keys: usize) -> Result<(), SampleError> {
    if !feature.retired && keys > feature.hotness_max as usize {
        let problem = format!("{keys} keys, at most {} fit", feature.hotness_max);
        return fault(format!("sparse.{}", feature.name), problem);
    }
    Ok(())
}

impl Sample {
    /// Parses one line: `{"dense": [..], "sparse": {"feature": [values..]}, "weights": {"feature":
    /// [..]}, "label": 0, "score": 0.5}`. Dense values may have names, `{"feature": 0.5}`. A dense
    /// value that is null or omitted is missing. A feature that the line omits has an empty bag.
    /// The values of a feature with a key function become keys. A model with several outputs has a
    /// label and a score for each: `{"ctr": 1, "cvr": 0}`. A field `model` is ignored.
    ///
    /// # Errors
    /// [`SampleError`] if the line is not such an object or does not fit the schema.
    pub fn from_json(line: &str, schema: &Schema) -> Result<Self, SampleError> {
        Self::from_line(parse(line, schema)?, schema)
    }

    /// Parses one line as [`Sample::from_json`] does, or a request of several samples, which all
    /// have the line's other fields: `{"sparse": {"user": [7]}, "candidates": [{"sparse": {"item":
    /// [3]}}]}`.
    ///
    /// # Errors
    /// [`SampleError`] if the line is no such object, a candidate does not fit the schema, or a
    /// value is in both.
    pub fn request_from_json(line: &str, schema: &Schema) -> Result<Vec<Self>, SampleError> {
        let mut request = parse(line, schema)?;
        let Some(candidates) = request.candidates.take() else {
            return Ok(vec![Self::from_line(request, schema)?]);
        };
        if request.label.is_some() || request.score.is_some() {
            return fault("candidates", "the label or the score belongs to a candidate");
        }
        let candidate = |(at, Object(mut own)): (usize, Object<Line<'_>>)| {
            let place = |field: &str| format!("candidates[{at}].{field}");
            let twice = "is also in the request of the candidate";
            own.add(&request).or_else(|field| fault(place(&field), twice))?;
            Self::from_line(own, schema).map_err(|e| match e {
                SampleError::Field { field, problem } => {
                    SampleError::Field { field: place(&field), problem }
                }
                e => e,
            })
        };
        candidates.into_iter().enumerate().map(candidate).collect()
    }

    fn from_line(line: Line<'_>, schema: &Schema) -> Result<Self, SampleError> {
        let Line { dense, sparse, weights, label, score, candidates, .. } = line;
        if candidates.is_some() {
            return fault("candidates", "a line of several samples is not taken here");
        }
        let UniqueMap(mut bags) = sparse;
        let raw: Vec<Vec<RawValue<'_>>> = schema
            .features
            .iter()
            .map(|feature| {
                let bag = bags.remove(&feature.name).filter(|_| !feature.retired);
                bag.unwrap_or_default()
            })
            .collect();
        let mut sample = Self { dense: dense_of(dense, schema)?, ..Self::default() };
        for (f, feature) in schema.features.iter().enumerate() {
            let at = |feature: &Feature, i: usize, e: KeyError| SampleError::Field {
                field: format!("sparse.{}[{i}]", feature.name),
                problem: e.to_string(),
            };
            let keys = raw[f].iter().enumerate();
            let keys = keys.map(|(i, raw)| feature.key_of(raw).map_err(|e| at(feature, i, e)));
            let mut keys = keys.collect::<Result<Vec<u64>, _>>()?;
            let value = |c: usize, i: usize| Ok(raw[c][i].clone());
            let refused = |c: usize, e| at(&schema.features[c], 0, e);
            schema.cross(f, |c| raw[c].len(), value, refused, |key| keys.push(key))?;
            sample.sparse.push(keys);
        }
        no_other("sparse", &bags)?;

        let UniqueMap(mut weights) = weights;
        weights.retain(|name, _| !schema.features.iter().any(|f| f.retired && f.name == *name));
        if schema.features.iter().any(|feature| feature.weighted) {
            let mut of = |name: &String| weights.remove(name).unwrap_or_default();
            sample.weights = schema.features.iter().map(|feature| of(&feature.name)).collect();
        }
        no_other("weights", &weights)?;
        sample.labels = of_outputs("label", label, schema)?;
        sample.scores = of_outputs("score", score, schema)?;
        sample.check(schema)?;
        Ok(sample)
    }

    /// Returns the label of an output, if it is known.
    pub fn label(&self, output: usize) -> Option<f32> {
        self.labels.get(output).copied().flatten()
    }

    /// Returns the recorded score of an output, if it is known.
    pub fn score(&self, output: usize) -> Option<f32> {
        self.scores.get(output).copied().flatten()
    }

    /// Checks the sample against a schema.
    ///
    /// # Errors
    /// [`SampleError::Field`] with the first field that does not fit.
    pub fn check(&self, schema: &Schema) -> Result<(), SampleError> {
        check_dense(schema, &self.dense)?;
        if self.sparse.len() != schema.features.len() {
            let (given, taken) = (self.sparse.len(), schema.features.len());
            return fault("sparse", format!("{given} features, the model takes {taken}"));
        }
        for (f, (bag, feature)) in self.sparse.iter().zip(&schema.features).enumerate() {
            check_bag(feature, bag.len())?;
            self.check_weights(f, schema)?;
        }

        let outputs = schema.network.outputs.len();
        for (field, values) in [("label", &self.labels), ("score", &self.scores)] {
            if !values.is_empty() && values.len() != outputs {
                let problem = format!("{} values, the model has {outputs} outputs", values.len());
                return fault(field, problem);
            }
        }
        Ok(())
    }

    /// Checks that feature `f` has a finite weight for each key, or no weights if it is not
    /// weighted.
    fn check_weights(&self, f: usize, schema: &Schema) -> Result<(), SampleError> {
        let weights = self.weights.get(f).map_or(&[] as &[f32], Vec::as_slice);
        check_weights(&schema.features[f], self.sparse[f].len(), weights)
    }
}

fn parse<'a>(line: &'a str, schema: &Schema) -> Result<Line<'a>, SampleError> {
    // Some editors write a byte order mark before the first line.
    let line = line.strip_prefix('\u{feff}').unwrap_or(line);
    if line.len() > SAMPLE_BYTES_MAX {
        return fault("length", format!("{} bytes, over {SAMPLE_BYTES_MAX}", line.len()));
    }
    let Object(line) =
        serde_json::from_str(line).map_err(|e| match foreign_number(line, e.column()) {
            None => SampleError::Json(e.to_string()),
            Some(ForeignNumber { field, dense, text }) => {
                let feature = dense.and_then(|i| schema.dense_features.get(i));
                let name = feature.map_or(String::new(), |feature| format!("`{}` ", feature.name));
                let takes_null = feature.is_some_and(|feature| feature.missing.is_some());
                let hint = if takes_null { "; null is a missing value" } else { "" };
                let is_decimal = text.contains(|c: char| c.is_ascii_digit());
                let why = if is_decimal { "beyond a 32-bit float" } else { "no JSON number" };
                SampleError::Field {
                    field,
                    problem: format!("{name}is {}, {why}{hint}", Shortened(text)),
                }
            }
        })?;
    Ok(line)
}

/// Checks the weights of a bag of `feature` with `keys` keys.
pub(super) fn check_weights(
    feature: &Feature,
    keys: usize,
    weights: &[f32],
) -> Result<(), SampleError> {
    if feature.retired {
        return Ok(());
    }
    let field = || format!("weights.{}", feature.name);
    match (feature.weighted, weights.len()) {
        (false, 0) => {}
        (false, n) => return fault(field(), format!("{n} weights, the feature takes none")),
        (true, n) if n != keys => return fault(field(), format!("{n} weights, {keys} keys")),
        (true, _) => {}
    }
    match weights.iter().position(|weight| !weight.is_finite()) {
        Some(i) => fault(format!("{}[{i}]", field()), format!("is {}", weights[i])),
        None => Ok(()),
    }
}

/// Returns the dense values in schema order. Missing ones that the schema replaces are replaced.
fn dense_of(values: DenseValues, schema: &Schema) -> Result<Vec<f32>, SampleError> {
    let values = match values {
        DenseValues::List(values) => values,
        DenseValues::Named(UniqueMap(mut named)) => {
            let mut take = |name: &String| named.remove(name).flatten();
            let values = schema.dense_names().map(&mut take).collect();
            if let Some(name) = named.keys().next() {
                let name = Shortened(name);
                return fault("dense", format!("the model has no dense feature `{name}`"));
            }
            values
        }
    };
    let mut dense: Vec<f32> = values.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
    let (features, width) = (schema.dense_features.iter(), schema.dense_features.len());
    if dense.len() < width && dense.len() + optional_columns(features.clone()) >= width {
        dense.resize(width, f32::NAN);
    }
    dense.iter_mut().zip(features).for_each(|(value, feature)| *value = feature.filled(*value));
    Ok(dense)
}

/// Refuses the first entry of `left`: the entries whose names belong to no feature.
fn no_other<T>(field: &str, left: &BTreeMap<String, T>) -> Result<(), SampleError> {
    match left.keys().next() {
        Some(name) if field == "weights" => {
            fault(field, format!("the feature `{}` takes no weights", Shortened(name)))
        }
        Some(name) => fault(field, format!("the model has no feature `{}`", Shortened(name))),
        None => Ok(()),
    }
}

/// Returns the values of a label or score, one for each output; empty if none is known.
fn of_outputs(
    field: &str,
    outcome: Option<Outcome>,
    schema: &Schema,
) -> Result<Vec<Option<f32>>, SampleError> {
    let outputs = &schema.network.outputs;
    let values = match outcome {
        None => return Ok(Vec::new()),
        Some(Outcome::One(value)) if outputs.len() == 1 => vec![Some(value)],
        Some(Outcome::One(_)) => {
            let names: Vec<&str> = outputs.iter().map(|output| output.name.as_str()).collect();
            return fault(field, format!("one value for the outputs `{}`", names.join("`, `")));
        }
        Some(Outcome::List(values)) => values,
        Some(Outcome::Named(UniqueMap(mut named))) => {
            let mut of = |name: &String| named.remove(name).flatten();
            let values = outputs.iter().map(|output| of(&output.name)).collect();
            if let Some(name) = named.keys().next() {
                return fault(field, format!("there is no output `{}`", Shortened(name)));
            }
            values
        }
    };
    if let Some(value) = values.iter().flatten().find(|value| !value.is_finite()) {
        return fault(field, format!("{value} is beyond the range of f32"));
    }
    Ok(if values.iter().all(Option::is_none) { Vec::new() } else { values })
}
