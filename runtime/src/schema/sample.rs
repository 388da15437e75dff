//! Samples: one line of JSON each for people and tools, and a compact encoding for the probe set of
//! a bundle. Checks samples against the schema; never scores them.

use crate::limits::{NAME_BYTES_MAX, PROBE_BYTES_MAX, SAMPLE_BYTES_MAX};
use crate::schema::{Feature, Schema};
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Format number of an encoded probe set.
pub const PROBE_FORMAT: u32 = 1;

/// The features of one sample, with its outcome if that is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The dense features, in schema order.
    pub dense: Vec<f32>,
    /// The keys of each sparse feature, in schema order.
    pub sparse: Vec<Vec<u64>>,
    /// The observed outcome, 0 or 1.
    pub label: Option<f32>,
    /// The score that the trainer's framework computed.
    pub score: Option<f32>,
}

/// A sample as a line of JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    dense: Vec<f32>,
    #[serde(default)]
    sparse: LineBags,
    label: Option<f32>,
    score: Option<f32>,
    /// The model that the sample is for. A server of several models reads it.
    #[serde(rename = "model")]
    _model: Option<IgnoredAny>,
}

/// The keys of the features of a line, by name. A name that occurs twice is refused: one of its
/// bags would silently be lost.
#[derive(Default)]
struct LineBags(BTreeMap<String, Vec<u64>>);

impl<'de> Deserialize<'de> for LineBags {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(LineBagsVisitor)
    }
}

struct LineBagsVisitor;

impl<'de> Visitor<'de> for LineBagsVisitor {
    type Value = LineBags;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object with the keys of each sparse feature")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<LineBags, A::Error> {
        let mut bags = BTreeMap::new();
        while let Some((name, keys)) = entries.next_entry::<String, Vec<u64>>()? {
            if bags.contains_key(&name) {
                let name = name.escape_debug();
                return Err(A::Error::custom(format!("sparse: the feature `{name}` occurs twice")));
            }
            bags.insert(name, keys);
        }
        Ok(LineBags(bags))
    }
}

/// Why a sample is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SampleError {
    /// The line is not the JSON of a sample.
    #[error("{0}")]
    Json(String),
    /// A field does not fit the schema.
    #[error("{field}: {problem}")]
    Field { field: String, problem: String },
}

/// Why a probe set is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("probe set: {0}")]
pub struct ProbeError(String);

fn fault<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, SampleError> {
    Err(SampleError::Field { field: field.into(), problem: problem.into() })
}

/// Checks the dense features of one sample against `schema`.
pub(super) fn check_dense(schema: &Schema, dense: &[f32]) -> Result<(), SampleError> {
    let width = schema.dense_features.len();
    if dense.len() != width {
        return fault("dense", format!("{} values, the model takes {width}", dense.len()));
    }
    match dense.iter().position(|v| !v.is_finite()) {
        Some(i) => {
            let problem = format!("`{}` is {}", schema.dense_features[i], dense[i]);
            fault(format!("dense[{i}]"), problem)
        }
        None => Ok(()),
    }
}

/// Checks the number of keys in a bag of `feature`.
pub(super) fn check_bag(feature: &Feature, keys: usize) -> Result<(), SampleError> {
    if keys > feature.hotness_max as usize {
        let problem = format!("{keys} keys, at most {} fit", feature.hotness_max);
        return fault(format!("sparse.{}", feature.name), problem);
    }
    Ok(())
}

impl Sample {
    /// Parses one line: `{"dense": [..], "sparse": {"feature": [keys..]}, "label": 0, "score":
    /// 0.5}`. A feature that the line omits has an empty bag. A field `model` is ignored.
    ///
    /// # Errors
    /// [`SampleError`] if the line is not such an object or does not fit the schema.
    pub fn from_json(line: &str, schema: &Schema) -> Result<Self, SampleError> {
        if line.len() > SAMPLE_BYTES_MAX {
            return fault("length", format!("{} bytes, over {SAMPLE_BYTES_MAX}", line.len()));
        }

        let mut parsed: Line =
            serde_json::from_str(line).map_err(|e| SampleError::Json(e.to_string()))?;
        let sparse = schema
            .features
            .iter()
            .map(|f| parsed.sparse.0.remove(&f.name).unwrap_or_default())
            .collect();
        if let Some(name) = parsed.sparse.0.keys().next() {
            return fault("sparse", format!("the model has no feature `{}`", name.escape_debug()));
        }

        let sample = Self { dense: parsed.dense, sparse, label: parsed.label, score: parsed.score };
        sample.check(schema)?;
        Ok(sample)
    }

    /// Returns the largest number of bytes of a sample as JSON, however a serializer writes it. A
    /// line with more blanks than one around each value may be longer.
    pub fn json_bytes_max(schema: &Schema) -> usize {
        // A number with all its digits, a key, an escaped name, and the other fields: each with the
        // punctuation around it.
        let (value, key, name, other) = (64, 32, 6 * NAME_BYTES_MAX + 32, 1024);
        let bag = |hotness_max: u32| name + key * hotness_max as usize;
        let bags: usize = schema.features.iter().map(|f| bag(f.hotness_max)).sum();
        (other + name + value * schema.dense_features.len() + bags).min(SAMPLE_BYTES_MAX)
    }

    /// Checks the sample against a schema.
    ///
    /// # Errors
    /// [`SampleError::Field`] with the first field that does not fit.
    pub fn check(&self, schema: &Schema) -> Result<(), SampleError> {
        check_dense(schema, &self.dense)?;
        if self.sparse.len() != schema.features.len() {
            return fault(
                "sparse",
                format!(
                    "{} features, the model takes {}",
                    self.sparse.len(),
                    schema.features.len()
                ),
            );
        }
        for (bag, feature) in self.sparse.iter().zip(&schema.features) {
            check_bag(feature, bag.len())?;
        }
        Ok(())
    }

    /// Encodes a probe set: a format number, then postcard.
    ///
    /// # Errors
    /// [`ProbeError`] if the set is too large.
    pub fn encode_set(samples: &[Self]) -> Result<Vec<u8>, ProbeError> {
        let mut bytes = PROBE_FORMAT.to_le_bytes().to_vec();
        bytes.extend(postcard::to_allocvec(samples).map_err(|e| ProbeError(e.to_string()))?);
        if bytes.len() as u64 > PROBE_BYTES_MAX {
            return Err(ProbeError(format!("{} bytes, over {PROBE_BYTES_MAX}", bytes.len())));
        }
        Ok(bytes)
    }

    /// Decodes a probe set.
    ///
    /// # Errors
    /// [`ProbeError`] if the bytes are not a probe set of this format.
    pub fn decode_set(bytes: &[u8]) -> Result<Vec<Self>, ProbeError> {
        let Some((format, body)) = bytes.split_first_chunk::<4>() else {
            return Err(ProbeError(format!("{} bytes are too few", bytes.len())));
        };
        if u32::from_le_bytes(*format) != PROBE_FORMAT {
            let format = u32::from_le_bytes(*format);
            return Err(ProbeError(format!(
                "format {format} is not {PROBE_FORMAT}, the one this version reads"
            )));
        }
        match postcard::take_from_bytes::<Vec<Self>>(body) {
            Ok((samples, [])) => Ok(samples),
            Ok((_, rest)) => Err(ProbeError(format!("{} bytes follow the set", rest.len()))),
            Err(e) => Err(ProbeError(format!("does not decode ({e})"))),
        }
    }
}
