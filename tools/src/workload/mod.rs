//! Made-up models, keys and requests.

pub mod key_distributions;
pub mod onnx;
pub mod synthetic;
