//! Synthetic models, keys and requests, for measurements and tests. Never serves one.

pub mod key_distributions;
pub use crate::import::onnx_writer as onnx;
pub mod synthetic;
