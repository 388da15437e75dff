//! The time to open a model on a GPU, part by part. Never serves.

use anyhow::Result;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::gpu::GpuDense;
use hatchback_tools::report;
use hatchback_tools::serve::worker;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time to open a model, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OpeningTimes {
    /// The driver, the GPU's context and its first stream.
    pub gpu_ms: f64,
    /// The rows from flash into host memory.
    pub rows_ms: f64,
    /// The caches and resident tables to the GPU, with the lookup's kernels.
    pub tables_ms: f64,
    /// The dense network to the GPU, with the check of its scores.
    pub network_ms: f64,
    /// The memory and the recorded graphs of the first worker.
    pub first_worker_ms: f64,
    /// Those of the other workers.
    pub other_workers_ms: f64,
}

impl OpeningTimes {
    /// Opens the live generation of `flash` on `device` within `budget`, and closes it again.
    /// `gpu` is the time that the GPU took.
    ///
    /// # Errors
    /// The model cannot be opened.
    pub fn measure(
        flash: &Flash,
        budget: Budget,
        device: &Device,
        dense: &GpuDense,
        gpu: Duration,
    ) -> Result<Self> {
        let mut since = Instant::now();
        let mut lap =
            || std::mem::replace(&mut since, Instant::now()).elapsed().as_secs_f64() * 1e3;
        let model = Model::from_flash(flash, budget)?;
        let rows_ms = lap();
        let model = model.move_to_device(device)?;
        let tables_ms = lap();
        let model = Arc::new(model.move_dense_to_gpu(flash, dense)?);
        let network_ms = lap();
        let _first = worker(&model);
        let first_worker_ms = lap();
        let _others: Vec<_> = (1..budget.workers).map(|_| worker(&model)).collect();
        let other_workers_ms = lap();
        let gpu_ms = gpu.as_secs_f64() * 1e3;
        Ok(Self { gpu_ms, rows_ms, tables_ms, network_ms, first_worker_ms, other_workers_ms })
    }

    /// Returns the table of the parts.
    pub fn table(&self) -> comfy_table::Table {
        let mut table = report::table(&["opening a model", "ms"]);
        for (part, ms) in [
            ("driver and GPU", self.gpu_ms),
            ("rows from flash", self.rows_ms),
            ("tables to the GPU", self.tables_ms),
            ("network to the GPU", self.network_ms),
            ("graphs of the first worker", self.first_worker_ms),
            ("graphs of the other workers", self.other_workers_ms),
        ] {
            table.add_row([part.to_owned(), report::digits(ms)]);
        }
        table
    }
}
