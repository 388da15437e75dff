//! Features of one key, whose vectors of f32 rows lie side by side in the last input of a network:
//! the set-up of tests that run a [`Step`].

use hatchback_kernels::cache::codec::{Codec, RowFormat};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::dense::InputPart;
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, Keys, LookupLimits};
use hatchback_kernels::gpu::step::{Step, StepInputs};
use hatchback_kernels::gpu::tables::DeviceTables;
use hatchback_kernels::gpu::{DeviceEngine, DeviceOptions, GpuDense, Precision};
use hatchback_kernels::lookup::Pooling;
use hatchback_kernels::lookup::miss_list::MissList;
use std::sync::Arc;

/// The features.
pub struct OneKey {
    /// The table of each.
    pub tables: Vec<u16>,
    /// End of the keys of every table.
    pub keys_end: u64,
    /// Columns of a row.
    pub dim: usize,
}

impl OneKey {
    /// Returns the encoding of all rows.
    pub fn format(&self) -> RowFormat {
        RowFormat::new(Codec::F32, self.dim, 0).unwrap()
    }

    /// Returns the limits of requests of up to `batch_max` samples.
    pub fn limits(&self, batch_max: usize, misses_max: usize, keys: Keys) -> LookupLimits {
        let row_bytes_max = self.format().row_bytes();
        LookupLimits { batch_max, misses_max, row_bytes_max, keys, is_shared: false }
    }

    /// Makes a worker of the network `engine` with these `inputs`, and the list of its misses.
    pub fn step(
        &self,
        tables: &Arc<DeviceTables>,
        engine: &Arc<DeviceEngine>,
        inputs: &[(&str, usize)],
        limits: LookupLimits,
    ) -> (Step, MissList) {
        let (last, default_row) = (inputs.len() - 1, vec![0.0; self.dim]);
        let feature = |(number, &table): (usize, &u16), input| FeatureOnDevice {
            table,
            format: self.format(),
            keys_end: Some(self.keys_end),
            default_row: &default_row,
            pooling: Pooling::Sum,
            weighted: false,
            shared: false,
            hotness_max: 1,
            input,
            input_type: engine.input_types()[last],
            stride: inputs[last].1,
            column: number * self.dim,
            width: self.dim,
        };
        let features = |inputs: &[u64]| {
            self.tables.iter().enumerate().map(|table| feature(table, inputs[last])).collect()
        };
        let parts = InputPart::whole(inputs, &vec![false; inputs.len()]);
        let inputs = StepInputs { parts: &parts, copies: &[] };
        let step = Step::new(tables, engine, inputs, features, limits).unwrap();
        let device = Device::Cuda(Arc::clone(tables.gpu()));
        let misses = MissList::on(&device, limits.misses_max, limits.row_bytes_max).unwrap();
        (step, misses)
    }
}

/// Returns the options of our kernels alone; the host fills the inputs `fed`.
pub fn exact(batch_max: usize, fed: Vec<usize>) -> DeviceOptions {
    let dense = GpuDense { tensorrt: None, precision: Precision::Exact };
    DeviceOptions { dense, batch_max, f16_inputs: Vec::new(), fed }
}
