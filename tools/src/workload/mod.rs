//! Synthetic models, keys and requests, for measurements and tests. Never serves one.

pub mod key_distributions;
pub mod onnx;
pub mod synthetic;
