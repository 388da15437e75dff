//! The memory that holds a model's tables and its dense network. The enum has exactly the three
//! legal combinations. Both are in host memory, both are on a GPU, or the tables are on a GPU and
//! the dense network is in host memory. Never moves data.

use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::dense::DenseEngine;
use hatchback_kernels::gpu::DeviceEngine;
use hatchback_kernels::gpu::tables::DeviceTables;
use std::sync::Arc;

/// The caches and resident tables of a model in host memory. A
/// [`ServedTable`](crate::model::served_tables::ServedTable) refers to them by number. The
/// generations of a model share them.
pub(crate) struct CpuTables {
    pub caches: Vec<Arc<Cache>>,
    pub residents: Vec<Arc<Resident>>,
}

/// A model's tables and its dense network, in the memory of their device.
pub(crate) enum ModelBackend {
    /// Both are in host memory.
    Cpu { tables: Arc<CpuTables>, dense: Arc<DenseEngine> },
    /// The tables are on a GPU, the dense network is in host memory.
    GpuTables { tables: Arc<DeviceTables>, dense: Arc<DenseEngine> },
    /// Both are on a GPU.
    Gpu { tables: Arc<DeviceTables>, dense: Arc<DeviceEngine> },
}

impl ModelBackend {
    /// Returns the tables if they are in host memory.
    #[inline]
    pub fn cpu_tables(&self) -> Option<&CpuTables> {
        match self {
            Self::Cpu { tables, .. } => Some(tables),
            Self::GpuTables { .. } | Self::Gpu { .. } => None,
        }
    }

    /// Returns the tables if they are on a GPU.
    pub fn device_tables(&self) -> Option<&Arc<DeviceTables>> {
        match self {
            Self::Cpu { .. } => None,
            Self::GpuTables { tables, .. } | Self::Gpu { tables, .. } => Some(tables),
        }
    }

    /// Returns the dense network if it is in host memory.
    pub fn cpu_dense(&self) -> Option<&DenseEngine> {
        match self {
            Self::Cpu { dense, .. } | Self::GpuTables { dense, .. } => Some(dense),
            Self::Gpu { .. } => None,
        }
    }

    /// Returns the caches in host memory; none if they are on a GPU.
    pub fn cpu_caches(&self) -> &[Arc<Cache>] {
        self.cpu_tables().map_or(&[], |tables| &tables.caches)
    }

    /// Returns the resident tables in host memory; none if they are on a GPU.
    pub fn cpu_residents(&self) -> &[Arc<Resident>] {
        self.cpu_tables().map_or(&[], |tables| &tables.residents)
    }

    /// Returns the number of rows that all caches together have room for.
    pub fn cache_slots(&self) -> usize {
        let on_gpu = self.device_tables().map_or(0, |tables| tables.slots());
        on_gpu + self.cpu_caches().iter().map(|cache| cache.slots()).sum::<usize>()
    }

    /// Returns whether the cache for rows of `row_bytes` can ever hold `row`. True without such a
    /// cache.
    pub fn can_hold(&self, row_bytes: usize, row: RowKey) -> bool {
        let on_gpu = || self.device_tables().is_none_or(|tables| tables.can_hold(row_bytes, row));
        let cache = self.cpu_caches().iter().find(|cache| cache.row_bytes() == row_bytes);
        cache.map_or_else(on_gpu, |cache| cache.can_hold(row))
    }

    /// Returns the device that looks up rows.
    pub fn lookup_device(&self) -> Device {
        let on_gpu = |tables: &Arc<DeviceTables>| Device::Cuda(Arc::clone(tables.gpu()));
        self.device_tables().map_or(Device::Cpu, on_gpu)
    }

    /// Returns whether the tables are on a GPU and the dense network does not run on TensorRT.
    pub fn lacks_tensorrt(&self) -> bool {
        match self {
            Self::Cpu { .. } => false,
            Self::GpuTables { .. } => true,
            Self::Gpu { dense, .. } => !dense.graphs_own_scratch(),
        }
    }

    /// Returns what runs the dense network, in words.
    pub fn dense_runs_on(&self) -> String {
        match self {
            Self::Gpu { dense, .. } => dense.runs_on(),
            Self::Cpu { dense, .. } | Self::GpuTables { dense, .. } => dense.runs_on(),
        }
    }
}

/// Returns the content of `shared`, whose only owner is a model that is still being opened. Workers
/// share a model's parts only through the model.
pub(crate) fn sole_owner<T>(shared: Arc<T>) -> T {
    match Arc::try_unwrap(shared) {
        Ok(owned) => owned,
        Err(_) => panic!("a model that is still being opened is shared with a worker"),
    }
}
