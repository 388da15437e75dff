//! The probe set of a bundle: samples with their recorded scores, in a compact encoding. FORMAT.md
//! draws it. Never checks samples against a schema.

use crate::limits::PROBE_BYTES_MAX;
use crate::schema::sample::Sample;
use serde::{Deserialize, Serialize};

/// The format of a probe set with at most one label and one score a sample, and without weights.
pub const PROBE_FORMAT: u32 = 1;
/// The format of any other probe set.
const OUTPUTS_FORMAT: u32 = 2;

/// Why a probe set is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("probe set: {0}")]
pub struct ProbeError(String);

/// A sample of format 1.
#[derive(Serialize, Deserialize)]
struct Sample1 {
    dense: Vec<f32>,
    sparse: Vec<Vec<u64>>,
    label: Option<f32>,
    score: Option<f32>,
}

/// A sample of format 2.
#[derive(Serialize, Deserialize)]
struct Sample2 {
    dense: Vec<f32>,
    sparse: Vec<Vec<u64>>,
    weights: Vec<Vec<f32>>,
    labels: Vec<Option<f32>>,
    scores: Vec<Option<f32>>,
}

impl From<Sample1> for Sample {
    fn from(from: Sample1) -> Self {
        let Sample1 { dense, sparse, label, score } = from;
        let list = |value: Option<f32>| value.map_or(Vec::new(), |value| vec![Some(value)]);
        Self { dense, sparse, weights: Vec::new(), labels: list(label), scores: list(score) }
    }
}

impl From<Sample2> for Sample {
    fn from(from: Sample2) -> Self {
        let Sample2 { dense, sparse, weights, labels, scores } = from;
        Self { dense, sparse, weights, labels, scores }
    }
}

fn is_plain(sample: &Sample) -> bool {
    sample.weights.is_empty() && sample.labels.len() <= 1 && sample.scores.len() <= 1
}

impl Sample {
    /// Encodes a probe set: a format number, then postcard.
    ///
    /// # Errors
    /// [`ProbeError`] if the set is too large.
    pub fn encode_set(samples: &[Self]) -> Result<Vec<u8>, ProbeError> {
        let (format, body) = if samples.iter().all(is_plain) {
            let plain = |s: &Self| Sample1 {
                dense: s.dense.clone(),
                sparse: s.sparse.clone(),
                label: s.label(0),
                score: s.score(0),
            };
            let samples: Vec<Sample1> = samples.iter().map(plain).collect();
            (PROBE_FORMAT, postcard::to_allocvec(&samples))
        } else {
            let whole = |s: &Self| Sample2 {
                dense: s.dense.clone(),
                sparse: s.sparse.clone(),
                weights: s.weights.clone(),
                labels: s.labels.clone(),
                scores: s.scores.clone(),
            };
            let samples: Vec<Sample2> = samples.iter().map(whole).collect();
            (OUTPUTS_FORMAT, postcard::to_allocvec(&samples))
        };

        let mut bytes = format.to_le_bytes().to_vec();
        bytes.extend(body.map_err(|e| ProbeError(e.to_string()))?);
        if bytes.len() as u64 > PROBE_BYTES_MAX {
            return Err(ProbeError(format!("{} bytes, over {PROBE_BYTES_MAX}", bytes.len())));
        }
        Ok(bytes)
    }

    /// Decodes a probe set.
    ///
    /// # Errors
    /// [`ProbeError`] if the bytes are not a probe set of a format that this version reads.
    pub fn decode_set(bytes: &[u8]) -> Result<Vec<Self>, ProbeError> {
        let Some((format, body)) = bytes.split_first_chunk::<4>() else {
            return Err(ProbeError(format!("{} bytes are too few", bytes.len())));
        };
        match u32::from_le_bytes(*format) {
            PROBE_FORMAT => whole::<Sample1>(body),
            OUTPUTS_FORMAT => whole::<Sample2>(body),
            other => Err(ProbeError(format!(
                "format {other} is not {PROBE_FORMAT} or {OUTPUTS_FORMAT}, those this version reads"
            ))),
        }
    }
}

fn whole<'a, T: Deserialize<'a> + Into<Sample>>(body: &'a [u8]) -> Result<Vec<Sample>, ProbeError> {
    match postcard::take_from_bytes::<Vec<T>>(body) {
        Ok((samples, [])) => Ok(samples.into_iter().map(Into::into).collect()),
        Ok((_, rest)) => Err(ProbeError(format!("{} bytes follow the set", rest.len()))),
        Err(e) => Err(ProbeError(format!("does not decode ({e})"))),
    }
}
