//! Changes the caches and resident tables of a model during a swap, in host memory or on a GPU.
//! Changes on a GPU are collected, and one launch makes many of them. Never decides which rows
//! change.

use crate::model::backend::{CpuTables, ModelBackend};
use crate::model::opened::Model;
use hatchback_kernels::cache::Epoch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::memory::Mapped;
use hatchback_kernels::gpu::tables::{DeviceTables, ResidentWrites, RowChanges};
use std::sync::Arc;

/// Rows that one launch changes on a GPU.
const ROWS_PER_LAUNCH: usize = 2048;

/// Writes rows of cached and resident tables.
pub(crate) enum RowWriter<'a> {
    Cpu(&'a Model),
    Gpu(Box<GpuWriter>),
}

/// Collected changes to caches on a GPU.
pub(crate) struct GpuWriter {
    /// Dropped first: its drop waits for the changes, which read the staged rows.
    changes: RowChanges,
    /// The rows whose bytes are staged, each in the slot of its own number.
    rows: Vec<RowKey>,
    /// `[ROWS_PER_LAUNCH, stride]` bytes.
    staged: Mapped<u8>,
    stride: usize,
}

impl<'a> RowWriter<'a> {
    /// Allocates memory for the changes to the caches of `model`.
    ///
    /// # Errors
    /// `CudaError` if the GPU has no memory.
    pub fn on(model: &'a Model) -> Result<Self, CudaError> {
        match model.backend() {
            ModelBackend::Cpu { .. } => Ok(Self::Cpu(model)),
            ModelBackend::GpuTables { tables, .. } | ModelBackend::Gpu { tables, .. } => {
                let stride = model.schema().row_bytes_max().next_multiple_of(4);
                Ok(Self::Gpu(Box::new(GpuWriter {
                    changes: RowChanges::new(tables, ROWS_PER_LAUNCH)?,
                    rows: Vec::with_capacity(ROWS_PER_LAUNCH),
                    staged: tables.gpu().mapped(ROWS_PER_LAUNCH * stride)?,
                    stride,
                })))
            }
        }
    }

    /// Returns the bytes that the writer takes on a GPU.
    pub fn bytes(model: &Model) -> u64 {
        let stride = model.schema().row_bytes_max().next_multiple_of(4);
        let on_gpu = RowChanges::bytes(ROWS_PER_LAUNCH) + ROWS_PER_LAUNCH * stride;
        if model.backend().device_tables().is_some() { on_gpu as u64 } else { 0 }
    }

    /// Removes `rows` from the caches. Passes each row that was cached to `cached`. Calls
    /// `yield_now` between pieces of work.
    ///
    /// # Errors
    /// `CudaError::Driver`. Some rows may be removed.
    pub fn invalidate(
        &mut self,
        rows: impl Iterator<Item = RowKey>,
        yield_now: &dyn Fn(),
        mut cached: impl FnMut(RowKey),
    ) -> Result<(), CudaError> {
        match self {
            Self::Cpu(model) => {
                for (number, row) in rows.enumerate() {
                    if number.is_multiple_of(ROWS_PER_LAUNCH) {
                        yield_now();
                    }
                    if model.cpu_cache(row.table).is_some_and(|cache| cache.invalidate(row)) {
                        cached(row);
                    }
                }
                Ok(())
            }
            Self::Gpu(gpu) => {
                for row in rows {
                    gpu.rows.push(row);
                    if gpu.rows.len() == ROWS_PER_LAUNCH {
                        yield_now();
                        gpu.invalidate(&mut cached)?;
                    }
                }
                gpu.invalidate(&mut cached)
            }
        }
    }

    /// Inserts `row`, which no other thread changes, into its cache. On a GPU the row is in the
    /// cache after the next [`RowWriter::flush`] at the latest.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn insert(&mut self, row: RowKey, bytes: &[u8]) -> Result<(), CudaError> {
        match self {
            Self::Cpu(model) => {
                if let Some(cache) = model.cpu_cache(row.table) {
                    // No other thread changes the row, so its set has the epoch that it had at the
                    // read.
                    cache.insert(row, bytes, cache.epoch(row));
                }
                Ok(())
            }
            Self::Gpu(gpu) => {
                let at = gpu.rows.len() * gpu.stride;
                gpu.staged[at..at + bytes.len()].copy_from_slice(bytes);
                gpu.rows.push(row);
                if gpu.rows.len() == ROWS_PER_LAUNCH { gpu.insert() } else { Ok(()) }
            }
        }
    }

    /// Makes the collected inserts.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn flush(&mut self) -> Result<(), CudaError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Gpu(gpu) => gpu.insert(),
        }
    }
}

impl GpuWriter {
    fn invalidate(&mut self, mut cached: impl FnMut(RowKey)) -> Result<(), CudaError> {
        let Self { changes, rows, staged, stride } = self;
        rows.iter().for_each(|&row| changes.add(row, 0, Epoch::default()));
        let done = changes.invalidate(staged, *stride / 4)?;
        rows.drain(..).zip(done).filter(|(_, was)| **was != 0).for_each(|(row, _)| cached(row));
        Ok(())
    }

    fn insert(&mut self) -> Result<(), CudaError> {
        let Self { changes, rows, staged, stride } = self;
        if rows.is_empty() {
            return Ok(());
        }
        let mut epochs = vec![Epoch::default(); rows.len()];
        rows.iter().for_each(|&row| changes.add(row, 0, Epoch::default()));
        // An insert needs the epoch of its set, and the sets are on the GPU. One probe reads those
        // of all rows.
        changes.probe(|number, _, epoch| epochs[number] = epoch)?;
        for (slot, (row, epoch)) in rows.drain(..).zip(epochs).enumerate() {
            changes.add(row, slot as u32, epoch);
        }
        changes.insert(staged, *stride / 4).map(drop)
    }
}

/// The rows of one resident table that a swap replaces: each slot with its new bytes, in ascending
/// order of slots.
pub(crate) struct ResidentPatch {
    pub number: usize,
    pub rows: Vec<(u32, Vec<u8>)>,
}

/// Returns how often a new resident row is in memory: a GPU of `backend` gets a copy.
pub(crate) fn copies_of(backend: &ModelBackend) -> usize {
    if backend.device_tables().is_some() { 2 } else { 1 }
}

impl ResidentPatch {
    /// Returns the bytes of a patch of `rows` rows, with the copy that a GPU of `backend` gets.
    pub fn bytes(rows: usize, row_bytes: usize, backend: &ModelBackend) -> u64 {
        (rows * (size_of::<(u32, Vec<u8>)>() + copies_of(backend) * row_bytes)) as u64
    }

    /// Prefetches the rows that [`ResidentWriter::write`] replaces in host memory.
    pub fn prefetch(&self, backend: &ModelBackend) {
        let Some(tables) = backend.cpu_tables() else { return };
        self.rows.iter().for_each(|(slot, _)| tables.residents[self.number].prefetch_row(*slot));
    }
}

/// The changed rows of all resident tables, ready to be written.
pub(crate) enum ResidentWriter<'a> {
    Cpu(&'a CpuTables, &'a [ResidentPatch]),
    Gpu(&'a DeviceTables, ResidentWrites),
}

impl<'a> ResidentWriter<'a> {
    /// Prepares the rows of `patches` for the tables of `backend`.
    ///
    /// # Errors
    /// `CudaError` if the GPU has no memory for them.
    pub fn new(patches: &'a [ResidentPatch], backend: &'a ModelBackend) -> Result<Self, CudaError> {
        match backend {
            ModelBackend::Cpu { tables, .. } => Ok(Self::Cpu(tables, patches)),
            ModelBackend::GpuTables { tables, .. } | ModelBackend::Gpu { tables, .. } => {
                let rows = patches.iter().map(|patch| (patch.number, patch.rows.as_slice()));
                Ok(Self::Gpu(tables, tables.stage_residents(rows)?))
            }
        }
    }

    /// Replaces the rows, which no lookup may read until it returns. On a GPU it is one launch,
    /// however many rows there are.
    ///
    /// # Errors
    /// `CudaError::Driver`. Some rows may be replaced.
    pub fn write(&self) -> Result<(), CudaError> {
        match self {
            Self::Cpu(tables, patches) => {
                for ResidentPatch { number, rows } in *patches {
                    let table = &tables.residents[*number];
                    rows.iter().for_each(|(slot, bytes)| table.write(*slot, bytes));
                }
                Ok(())
            }
            Self::Gpu(tables, writes) => tables.write_residents(writes),
        }
    }
}

/// Returns the slot of each of `keys` in the resident table of `storage`, `None` for a key that the
/// table does not have.
///
/// # Errors
/// `CudaError::Driver`.
pub(crate) fn resident_slots(
    backend: &ModelBackend,
    number: usize,
    keys: &[u64],
) -> Result<Vec<Option<u32>>, CudaError> {
    let on_device = |tables: &Arc<DeviceTables>| tables.resident_slots(number, keys);
    match backend.cpu_tables() {
        Some(tables) => {
            let table = &tables.residents[number];
            Ok(keys.iter().map(|&key| table.slot(key)).collect())
        }
        None => backend.device_tables().map_or(Ok(Vec::new()), on_device),
    }
}
