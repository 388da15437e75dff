//! The order of queries and changes on a GPU: no query runs while a cache changes. The host puts
//! events between both, and does not wait for them. A change starts after all queries that were
//! launched before it. A query starts after all changes that were launched before it. Queries of
//! several workers run concurrently. Kernels can therefore read rows without a lock, a fence or a
//! validation.
//!
//! If there were no changes since a worker's last query, the next one waits for no event. The
//! callers make all launches.

use crate::cuda::driver::{Event, Gpu, Result, Stream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The order of queries and changes on one GPU.
pub(crate) struct Turns {
    state: Mutex<State>,
}

struct State {
    /// The event after the last changes.
    changed: Event,
    /// Launches of changes so far.
    changes: u64,
    /// For each reader the event after its last query.
    queried: Vec<Weak<Event>>,
}

/// One worker's queries. A worker has at most one query in flight.
pub(crate) struct Reader {
    queried: Arc<Event>,
    /// The number of changes after which the worker's stream is already ordered.
    seen: AtomicU64,
}

impl Turns {
    /// Creates the order of one GPU.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let (changed, queried) = (gpu.event()?, Vec::new());
        Ok(Self { state: Mutex::new(State { changed, changes: 0, queried }) })
    }

    /// Adds a reader, which takes part until it is dropped.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn reader(&self, gpu: &Arc<Gpu>) -> Result<Reader> {
        let queried = Arc::new(gpu.event()?);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.queried.retain(|event| event.strong_count() > 0);
        state.queried.push(Arc::downgrade(&queried));
        Ok(Reader { queried, seen: AtomicU64::new(0) })
    }

    /// Calls `launch`, which puts a query of `reader` onto `stream`, after all changes so far. The
    /// query must end with [`Reader::end_query`].
    ///
    /// # Errors
    /// `CudaError::Driver`, or the error of `launch`.
    pub fn query(
        &self,
        reader: &Reader,
        stream: &Stream,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if reader.seen.load(Ordering::Relaxed) != state.changes {
            stream.after(&state.changed)?;
            reader.seen.store(state.changes, Ordering::Relaxed);
        }
        launch()
    }

    /// Calls `launch`, which puts changes onto `stream`, after all queries so far. All changes must
    /// use the same stream.
    ///
    /// # Errors
    /// `CudaError::Driver`, or the error of `launch`.
    pub fn change(&self, stream: &Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for queried in state.queried.iter().filter_map(Weak::upgrade) {
            stream.after(&queried)?;
        }
        state.changes += 1;
        let launched = launch();
        // Some of the changes may be launched although others failed.
        stream.record(&state.changed)?;
        launched
    }
}

impl Reader {
    /// Marks the end of a query on `stream`: later work on the stream reads no cache. A graph can
    /// record it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn end_query(&self, stream: &Stream) -> Result<()> {
        stream.record_each_launch(&self.queried)
    }
}
