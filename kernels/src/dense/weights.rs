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

/// How the weights of a layer are stored in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// As in the ONNX file.
    #[default]
    F32,
    /// Rounded to `f16`: half of the memory. Sums are f32.
    F16,
    /// 8-bit integers and one scale for each output of a layer: a quarter of the memory. Products
    /// and sums are integers, and each sample's inputs are rounded to 8 bits.
    Int8,
}

/// A layer with weights `[inputs, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseLayer {
    /// Values that go in.
    pub inputs: usize,
    /// Values that come out.
    pub outputs: usize,
    /// How the weights are stored.
    pub weights: Weights,
}

impl fmt::Display for DenseLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}: {}", self.inputs, self.outputs, self.weights)
    }
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
