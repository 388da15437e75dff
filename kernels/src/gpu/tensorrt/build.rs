//! The description of an engine that TensorRT builds. Never calls TensorRT.

use crate::gpu::input_type::InputType;

/// The types in which layers may compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Types {
    /// Only f32.
    F32,
    /// Also FP16.
    F16,
    /// Also TF32: f32 with factors of 11 bits.
    Tf32,
}

/// A range of batch sizes for which TensorRT optimises together, in one profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchClass {
    /// The smallest batch.
    pub least: usize,
    /// The largest batch, for which it is fastest.
    pub most: usize,
}

impl BatchClass {
    /// Returns the classes of all batches up to `batch_max`: 1, 2 to 8, 9 to 64, and so on.
    pub fn up_to(batch_max: usize) -> Vec<Self> {
        let ends = (0..).map(|n| 1usize << (3 * n)).take_while(|&most| most < batch_max);
        let mut least = 1;
        let class = |most| {
            let class = Self { least, most };
            least = most + 1;
            class
        };
        ends.chain([batch_max.max(1)]).map(class).collect()
    }
}

/// An input of a network.
#[derive(Clone, Debug)]
pub struct BuildInput<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its shape for one sample.
    pub shape: Vec<usize>,
    /// Its type; F16 only with [`Types::F16`].
    pub of: InputType,
}

/// The input of a build of an engine.
#[derive(Clone, Debug)]
pub struct Build<'a> {
    /// The ONNX file.
    pub onnx: &'a [u8],
    /// The inputs.
    pub inputs: Vec<BuildInput<'a>>,
    /// The output's name.
    pub output: &'a str,
    /// The batch sizes for which TensorRT optimises, ascending and without gaps.
    pub batches: Vec<BatchClass>,
    /// Largest device memory that a layer may use while it runs.
    pub workspace_bytes_max: u64,
    /// The types in which layers may compute.
    pub types: Types,
    /// TensorRT for RTX only: the compute capability to build for, 86 for 8.6, on a machine without
    /// such a GPU.
    pub compute_capability: Option<i32>,
}

#[cfg(test)]
mod tests {
    use super::BatchClass;

    #[test]
    fn every_batch_has_one_class() {
        let ends = |batch_max| {
            let classes = BatchClass::up_to(batch_max);
            classes.iter().map(|class| (class.least, class.most)).collect::<Vec<_>>()
        };
        assert_eq!(ends(0), [(1, 1)]);
        assert_eq!(ends(1), [(1, 1)]);
        assert_eq!(ends(8), [(1, 1), (2, 8)]);
        assert_eq!(ends(40), [(1, 1), (2, 8), (9, 40)]);
        assert_eq!(ends(65), [(1, 1), (2, 8), (9, 64), (65, 65)]);
        assert_eq!(ends(65_536).len(), 7);
    }
}
