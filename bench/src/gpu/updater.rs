//! A thread that overwrites cached rows while requests run. Never changes which rows are cached.

use super::model::GpuModel;
use crate::filled_cache::TABLES;
use anyhow::{Result, anyhow};
use hatchback::RowKey;
use hatchback_kernels::cuda::memory::Mapped;
use hatchback_kernels::gpu::tables::RowChanges;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Rows of one update.
const UPDATED: usize = 256;

/// What a thread needs to overwrite cached rows.
struct Updater {
    keys: Arc<[Vec<u64>]>,
    row_words: usize,
    changes: RowChanges,
    /// The new rows, `[UPDATED, row_words]`.
    staged: Mapped<u8>,
}

impl Updater {
    fn new(model: &GpuModel) -> Result<Self> {
        let (row_bytes, samples) = (model.format.row_bytes(), &model.tables.samples);
        let row_words = row_bytes.div_ceil(4);
        let mut staged = model.gpu.mapped::<u8>(UPDATED * 4 * row_words)?;
        for (number, row) in staged.chunks_exact_mut(4 * row_words).enumerate() {
            row[..row_bytes].copy_from_slice(samples.row(number));
        }
        let changes = RowChanges::new(&model.tables.on_gpu, UPDATED)?;
        Ok(Self { keys: Arc::clone(model.tables.draw.cached()), row_words, staged, changes })
    }

    /// Overwrites rows until `stop` is set. Returns their number.
    fn update_until(&mut self, stop: &AtomicBool) -> Result<u64> {
        let mut updated = 0;
        while !stop.load(Ordering::Relaxed) {
            for slot in 0..UPDATED {
                let (table, at) = (slot % TABLES, updated as usize + slot);
                let key = self.keys[table][at % self.keys[table].len()];
                let row = RowKey { table: table as u16, key };
                self.changes.add(row, slot as u32, Default::default());
            }
            let done = self.changes.update(&self.staged, self.row_words)?;
            updated += done.iter().map(|&done| u64::from(done)).sum::<u64>();
        }
        Ok(updated)
    }
}

/// Overwrites cached rows of `model` on another thread, without a pause, while `work` runs. Returns
/// the result of `work` and the number of overwritten rows.
///
/// # Errors
/// An update fails, and the errors of `work`.
pub fn under_updates<T>(model: &GpuModel, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let mut updater = Updater::new(model)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let updates = scope.spawn(|| updater.update_until(&stop));
        let done = work();
        stop.store(true, Ordering::Relaxed);
        let updated = updates.join().map_err(|_| anyhow!("the updates panicked"))??;
        Ok((done?, updated))
    })
}
