//! A weight matrix in device memory, for the dense kernels and cuBLAS.

use crate::cuda::memory::Buffer;

/// A weight matrix `[k, n]` on the device, with the scale, bias and Relu that follow a product by
/// it.
pub struct DeviceMatrix {
    /// Rows.
    pub k: usize,
    /// Columns.
    pub n: usize,
    /// `[k, n]`.
    pub weights: Buffer<f32>,
    /// `[n]`.
    pub scale: Buffer<f32>,
    /// Whether any scale is not 1.
    pub is_scaled: bool,
    /// `[n]`.
    pub bias: Buffer<f32>,
    /// Whether negative results become zero.
    pub relu: bool,
}

/// What the sums of a product start with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Zero.
    Zero,
    /// The values of the result.
    Sums,
}
