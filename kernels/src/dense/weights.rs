//! How the weights of a network are stored, and what turns its output into scores.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The function that turns the network's output into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The output is the score.
    None,
    /// The output is a logit, and the score is `1 / (1 + exp(-x))`, within 1.2e-7.
    Sigmoid,
}

/// How the weights of the dense network are stored in memory. Sums are always `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// As in the ONNX file.
    #[default]
    F32,
    /// Rounded to `f16`: half of the memory.
    F16,
    /// 8-bit integers and one scale for each output of a layer: a quarter of the memory.
    Int8,
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        })
    }
}
