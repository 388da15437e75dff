//! The model that a pipeline serves now, which its callers and workers share, and its replacement.
//!
//! The generations of a model share their caches and resident tables. A *transition* keeps requests
//! of two generations apart:
//!
//! 1. [`LiveModel::bar`] bars the rows that may differ: from now on no worker inserts them.
//! 2. The swap waits until each worker has begun a new batch ([`LiveModel::renew`]). No insert that
//!    began before step 1 is then in progress.
//! 3. The swap removes the barred rows from the caches. Both generations read them from flash.
//! 4. [`LiveModel::switch`] waits until no lookup runs, replaces the changed rows of the resident
//!    tables, and exchanges the model. Only lookups read resident tables.
//! 5. The swap waits until each worker has left the old model.
//! 6. [`LiveModel::lift`] allows the inserts again.

use crate::clock::Clock;
use crate::locks::lock;
use crate::model::Model;
use crate::model::generation_change::GenerationChange;
use crate::request::worker::backend::WorkerBackend;
use crate::request::worker::table_counts::{TableCounters, TableCounts};
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::driver::CudaError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Duration;

/// Attempts of a swap to lock the model between two lookups.
const WRITE_TRIES: u32 = 50;
/// Pause between two attempts.
const WRITE_PAUSE: Duration = Duration::from_micros(20);

/// The model that is served now.
pub(crate) struct LiveModel {
    /// Locked for reading during each lookup, for writing while the model is exchanged.
    current: RwLock<Current>,
    /// The model in `current`, for callers, who do not wait for lookups.
    model: Mutex<Arc<Model>>,
    /// Counts the changes of `current`.
    version: AtomicU64,
    is_changing: AtomicBool,
    change: Mutex<Option<Arc<GenerationChange>>>,
    /// The backends that workers have left, for the thread of the swap to free.
    retired: Mutex<Vec<WorkerBackend>>,
    /// The counters of each worker.
    table_counters: Mutex<Vec<Arc<TableCounters>>>,
}

/// One model, and the workers that use it.
pub(crate) struct Current {
    pub model: Arc<Model>,
    pub version: u64,
    /// The first version whose model fills missing values and makes keys as this one does.
    pub filled_since: u64,
    /// A reference count: each worker that has seen this version has a clone.
    pub users: Arc<()>,
    /// Backends that were made in advance for the workers that will move to this model.
    backends: Mutex<Vec<WorkerBackend>>,
}

/// The new model for [`LiveModel::switch`].
pub(crate) struct Successor {
    pub model: Arc<Model>,
    /// Whether it fills missing values and makes keys as the model before it.
    pub fills_alike: bool,
    /// One backend for each worker. A further worker makes its own.
    pub backends: Vec<WorkerBackend>,
}

impl LiveModel {
    pub fn new(model: Arc<Model>) -> Arc<Self> {
        let of_callers = Mutex::new(Arc::clone(&model));
        let (users, backends) = (Arc::default(), Mutex::default());
        // A worker that leaves the model allocates nothing.
        let retired = Mutex::new(Vec::with_capacity(model.budget().workers as usize));
        Arc::new(Self {
            current: RwLock::new(Current { model, version: 0, filled_since: 0, users, backends }),
            model: of_callers,
            version: AtomicU64::new(0),
            is_changing: AtomicBool::new(false),
            change: Mutex::default(),
            retired,
            table_counters: Mutex::default(),
        })
    }

    /// Returns the current model. It stays current while the guard exists.
    pub fn read(&self) -> RwLockReadGuard<'_, Current> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current model, unless a switch holds or awaits the lock.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, Current>> {
        match self.current.try_read() {
            Ok(current) => Some(current),
            Err(TryLockError::Poisoned(current)) => Some(current.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until no lookup runs. No lookup starts while the guard exists. Returns the time of
    /// `clock` since which lookups may have been kept waiting. First tries to lock between two
    /// lookups: a thread that awaits the lock would keep the next lookups waiting.
    fn write(&self, clock: &dyn Clock) -> (RwLockWriteGuard<'_, Current>, Duration) {
        for _ in 0..WRITE_TRIES {
            let start = clock.now();
            match self.current.try_write() {
                Ok(current) => return (current, start),
                Err(TryLockError::Poisoned(current)) => return (current.into_inner(), start),
                Err(TryLockError::WouldBlock) => std::thread::sleep(WRITE_PAUSE),
            }
        }
        let start = clock.now();
        (self.current.write().unwrap_or_else(PoisonError::into_inner), start)
    }

    /// Returns the current model, without waiting for a lookup.
    pub fn model(&self) -> Arc<Model> {
        Arc::clone(&lock(&self.model))
    }

    /// Returns the counters of a further worker. A worker that takes the place of one that panicked
    /// continues its counters.
    pub fn new_table_counters(&self) -> Arc<TableCounters> {
        let mut counters = lock(&self.table_counters);
        // Without this reuse the list would grow with every panic.
        if let Some(left) = counters.iter().find(|counters| Arc::strong_count(counters) == 1) {
            return Arc::clone(left);
        }
        let new = Arc::new(TableCounters::new(self.model().schema().tables.len()));
        counters.push(Arc::clone(&new));
        new
    }

    /// Returns the counts of each table's lookups since the model was loaded.
    pub fn table_counts(&self) -> Vec<TableCounts> {
        let named = |name: &String| TableCounts { table: name.clone(), ..TableCounts::default() };
        let model = self.model();
        let mut sums: Vec<_> = model.schema().tables.iter().map(|t| named(&t.name)).collect();
        lock(&self.table_counters).iter().for_each(|counters| counters.add_to(&mut sums));
        sums
    }

    /// Returns the number of the current version.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Refuses inserts of the rows of `change` from now on.
    pub fn bar(&self, change: Arc<GenerationChange>) {
        // Before the flag: a worker that sees the flag must find the change.
        *lock(&self.change) = Some(change);
        self.is_changing.store(true, Ordering::Release);
    }

    /// Returns whether `row` must not be inserted now.
    #[inline]
    pub fn bars(&self, row: RowKey) -> bool {
        self.is_changing.load(Ordering::Acquire)
            && lock(&self.change).as_ref().is_some_and(|change| change.contains(row))
    }

    /// Starts a new version of the same model. Returns the reference count of the old version:
    /// workers whose last batch began before. Also returns the longest time for which a lookup may
    /// have waited.
    pub fn renew(&self, clock: &dyn Clock) -> (Arc<()>, Duration) {
        let (mut current, start) = self.write(clock);
        current.version += 1;
        self.version.store(current.version, Ordering::Release);
        // Workers that see the new version clone a new count, so the old one can only fall.
        let users = std::mem::take(&mut current.users);
        drop(current);
        (users, clock.now().saturating_sub(start))
    }

    /// Waits until no lookup runs, calls `patch`, and exchanges the model. Returns the reference
    /// count of the old version, and the longest time for which a lookup may have waited.
    ///
    /// # Errors
    /// That of `patch`; the model stays.
    pub fn switch(
        &self,
        to: Successor,
        clock: &dyn Clock,
        patch: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(Arc<()>, Duration), CudaError> {
        let (mut current, start) = self.write(clock);
        // The only step that may fail comes first, and leaves the old model in place.
        patch()?;
        *lock(&self.model) = Arc::clone(&to.model);
        current.model = to.model;
        // Freed after the pause.
        let _unused = std::mem::replace(&mut current.backends, Mutex::new(to.backends));
        current.version += 1;
        if !to.fills_alike {
            current.filled_since = current.version;
        }
        // After `model`: a caller that reads the version first fills its request by that model, or
        // by a later one.
        self.version.store(current.version, Ordering::Release);
        let users = std::mem::take(&mut current.users);
        drop(current);
        Ok((users, clock.now().saturating_sub(start)))
    }

    /// Keeps `backend`, which a worker has left, until [`LiveModel::take_retired`].
    pub fn retire(&self, backend: WorkerBackend) {
        lock(&self.retired).push(backend);
    }

    /// Returns the backends that workers have left. Dropping them frees their memory.
    pub fn take_retired(&self) -> Vec<WorkerBackend> {
        lock(&self.retired).drain(..).collect()
    }

    /// Allows all inserts again.
    pub fn lift(&self) {
        self.is_changing.store(false, Ordering::Release);
        *lock(&self.change) = None;
    }
}

impl Current {
    /// Returns a backend for a worker on this model.
    ///
    /// # Errors
    /// `CudaError` if the GPU has no memory for a further worker.
    pub fn backend(&self) -> Result<WorkerBackend, CudaError> {
        let ready = lock(&self.backends).pop();
        ready.map_or_else(|| WorkerBackend::new(&self.model), Ok)
    }
}
