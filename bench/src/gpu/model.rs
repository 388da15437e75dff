//! The measured model: MLPerf's DLRM with filled tables on a GPU, and the requests of its workers.
//! Never measures.

use super::tables::FilledTables;
use crate::dlrm;
use crate::filled_cache::TABLES;
use anyhow::{Context, Result};
use hatchback::{Activation, Codec, Pooling, RowFormat};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::dense::InputPart;
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, Keys, LookupLimits};
use hatchback_kernels::gpu::step::{Step, StepInputs};
use hatchback_kernels::gpu::{
    BuiltPlan, DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, InputType,
};
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_tools::workload::synthetic::{CRITEO_ONNX, DENSE};
use std::sync::Arc;

/// The model's options.
pub struct ModelOptions {
    /// Rows of each table.
    pub rows: usize,
    /// Samples of the largest batch.
    pub batch_max: usize,
    /// Small sizes and few rounds.
    pub quick: bool,
    /// What runs the dense network.
    pub dense: GpuDense,
}

/// The network, the width of its rows, and the names of its inputs.
pub struct MeasuredNetwork {
    /// The ONNX file.
    pub onnx: Vec<u8>,
    /// Columns of a row.
    pub dim: usize,
    /// Names of the inputs: the dense features, and the rows of all tables.
    pub inputs: [&'static str; 2],
}

impl MeasuredNetwork {
    /// Returns MLPerf's network, or a small one.
    pub fn new(quick: bool) -> Self {
        if quick {
            Self { onnx: CRITEO_ONNX.to_vec(), dim: 32, inputs: ["dense", "emb"] }
        } else {
            Self { onnx: dlrm::network(), dim: dlrm::DIM, inputs: ["dense", "rows"] }
        }
    }

    /// Returns the widths of the two inputs.
    fn widths(&self) -> [usize; 2] {
        [DENSE, TABLES * self.dim]
    }

    /// Loads the network on `gpu`.
    fn load(&self, gpu: &Arc<Gpu>, options: &ModelOptions) -> Result<Arc<DeviceEngine>> {
        let [dense, rows] = self.widths();
        let inputs = [(self.inputs[0], dense), (self.inputs[1], rows)];
        let network = DenseNetwork {
            onnx: &self.onnx,
            inputs: &inputs,
            parts: &[],
            output: "logit",
            activation: Activation::Sigmoid,
        };
        let (dense, fed) = (options.dense.clone(), vec![0]);
        let device =
            DeviceOptions { dense, batch_max: options.batch_max, f16_inputs: vec![1], fed };
        // Measured is the network with its plan, as it is a while after a start.
        match DeviceEngine::build_plan(gpu, &network, &device) {
            Ok(plan) => plan.into_iter().for_each(BuiltPlan::keep),
            Err(e) => hatchback_tools::report::note(format!("no plan: {e}")),
        }
        Ok(Arc::new(DeviceEngine::load(gpu, &network, &device)?))
    }
}

/// An input of the network on the device.
#[derive(Clone, Copy)]
pub struct DeviceInput {
    /// Its address, `[batch, TABLES, dim]`.
    pub address: u64,
    /// Its type.
    pub input_type: InputType,
}

/// Returns one feature of each table: bags of `hotness` keys, whose sums go to `input`.
pub fn features(
    format: RowFormat,
    hotness: usize,
    default_row: &[f32],
    input: DeviceInput,
) -> Vec<FeatureOnDevice<'_>> {
    let dim = format.dim();
    let feature = |table: usize| FeatureOnDevice {
        table: table as u16,
        format,
        keys_end: None,
        default_row,
        pooling: Pooling::Sum,
        weighted: false,
        shared: false,
        hotness_max: hotness,
        input: input.address,
        input_type: input.input_type,
        stride: TABLES * dim,
        column: table * dim,
        width: dim,
    };
    (0..TABLES).map(feature).collect()
}

/// The model on the GPU.
pub struct GpuModel {
    /// The GPU.
    pub gpu: Arc<Gpu>,
    /// The tables.
    pub tables: FilledTables,
    /// The dense network.
    pub engine: Arc<DeviceEngine>,
    /// The encoding of all rows.
    pub format: RowFormat,
    widths: [usize; 2],
}

impl GpuModel {
    /// Fills the tables and loads the network.
    ///
    /// # Errors
    /// The GPU has too little memory, or the network is refused.
    pub fn new(gpu: &Arc<Gpu>, options: &ModelOptions) -> Result<Self> {
        let network = MeasuredNetwork::new(options.quick);
        let format = RowFormat::new(Codec::F16, network.dim, 0).context("no such row")?;
        let tables = FilledTables::new(gpu, format, options.rows)?;
        let engine = network.load(gpu, options)?;
        Ok(Self { gpu: Arc::clone(gpu), tables, engine, format, widths: network.widths() })
    }

    /// Returns the limits of requests of up to `batch_max` samples, of which `missing_max` have
    /// missing rows.
    pub fn limits(&self, batch_max: usize, missing_max: usize) -> LookupLimits {
        LookupLimits {
            batch_max,
            misses_max: TABLES * missing_max,
            row_bytes_max: self.format.row_bytes(),
            keys: Keys::on(&self.gpu),
            is_shared: false,
        }
    }

    /// Records the requests of one worker.
    ///
    /// # Errors
    /// The GPU has too little memory.
    pub fn step(&self, limits: LookupLimits) -> Result<Step> {
        let default_row = vec![0.0; self.format.dim()];
        let input_type = self.engine.input_types()[1];
        let features_of = |addresses: &[u64]| {
            features(
                self.format,
                1,
                &default_row,
                DeviceInput { address: addresses[1], input_type },
            )
        };
        let (tables, engine) = (&self.tables.on_gpu, &self.engine);
        let part =
            |input| InputPart { input, width: self.widths[input], shared: false, vectors: true };
        let inputs = StepInputs { parts: &[part(0), part(1)], copies: &[] };
        Ok(Step::new(tables, engine, inputs, features_of, limits)?)
    }

    /// Allocates the miss list of one worker.
    ///
    /// # Errors
    /// The GPU can map too little memory.
    pub fn miss_list(&self, limits: LookupLimits) -> Result<MissList> {
        let device = Device::Cuda(Arc::clone(&self.gpu));
        Ok(MissList::on(&device, limits.misses_max, limits.row_bytes_max)?)
    }
}
