//! The description of an engine that TensorRT builds. Never calls TensorRT.

/// The types in which layers may compute, beside f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Types {
    /// None.
    F32,
    /// FP16.
    F16,
    /// TF32: f32 with factors of 11 bits.
    Tf32,
}

/// What an engine is built from.
#[derive(Clone, Debug)]
pub struct Build<'a> {
    /// The ONNX file.
    pub onnx: &'a [u8],
    /// Names of the inputs, and their shapes for one sample.
    pub inputs: Vec<(&'a str, Vec<usize>)>,
    /// The output's name.
    pub output: &'a str,
    /// The batch size that TensorRT optimises for.
    pub batch_typical: usize,
    /// The largest batch size.
    pub batch_max: usize,
    /// Largest device memory that a layer may use while it runs.
    pub workspace_bytes_max: u64,
    /// The types in which layers may compute.
    pub types: Types,
    /// TensorRT for RTX only: the compute capability to build for, 86 for 8.6, on a machine without
    /// such a GPU.
    pub compute_capability: Option<i32>,
}
