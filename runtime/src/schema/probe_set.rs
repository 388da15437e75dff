//! The probe set of a bundle: samples with their recorded scores, in a compact encoding. FORMAT.md
//! draws it. Never checks samples against a schema.

use crate::limits::PROBE_BYTES_MAX;
use crate::schema::sample::Sample;

/// The format of a probe set.
pub const PROBE_FORMAT: u32 = 1;

/// Why a probe set is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("probe set: {0}")]
pub struct ProbeError(String);

impl Sample {
    /// Encodes a probe set: a format number, then postcard.
    ///
    /// # Errors
    /// [`ProbeError`] if the set is too large.
    pub fn encode_set(samples: &[Self]) -> Result<Vec<u8>, ProbeError> {
        let refused = |e: postcard::Error| ProbeError(e.to_string());
        let mut bytes = PROBE_FORMAT.to_le_bytes().to_vec();
        bytes.extend(postcard::to_allocvec(samples).map_err(refused)?);
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
        let format = u32::from_le_bytes(*format);
        if format != PROBE_FORMAT {
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
