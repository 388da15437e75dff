//! Filled tables on a GPU, with random rows. Never reads flash.

use super::keys::KeyDraw;
use crate::filled_cache::{FilledCache, SampleRows, TABLES};
use anyhow::Result;
use hatchback::RowFormat;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use std::sync::Arc;

/// Different rows. Tables repeat them: no part of a GPU looks for equal rows.
const SAMPLE_ROWS: usize = 4096;

/// Tables of one format in one cache on the GPU.
pub struct FilledTables {
    /// The tables on the GPU.
    pub on_gpu: Arc<DeviceTables>,
    /// The rows that they hold.
    pub samples: SampleRows,
    /// Rows of each table.
    pub rows: usize,
    /// Draws their keys.
    pub draw: KeyDraw,
}

impl FilledTables {
    /// Fills one cache on `gpu` with `rows` rows of each table. The tables have as many keys again
    /// that are not cached.
    ///
    /// # Errors
    /// `rows` is too small for a cache, or the GPU has no memory for it.
    pub fn new(gpu: &Arc<Gpu>, format: RowFormat, rows: usize) -> Result<Self> {
        /// Keys of even a small table that are not cached.
        const NOT_CACHED: usize = 1 << 15;
        let keys_end = rows + rows.max(NOT_CACHED);
        let samples = SampleRows::random(format, SAMPLE_ROWS)?;
        let FilledCache { cache, keys } = FilledCache::hashed(keys_end, rows, &samples)?;
        let storage = vec![TableStorage::Cached(0); TABLES];
        let on_gpu = Arc::new(DeviceTables::new(gpu, storage, vec![cache], &[])?);
        Ok(Self { on_gpu, samples, rows, draw: KeyDraw::new(keys, rows, keys_end) })
    }
}
