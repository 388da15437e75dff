//! Runs work on the threads of a pool and returns the results in the order of the work. Holds a
//! bounded number of results. Only packing uses such a pool; the car never packs.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// A pool of threads, or none.
#[derive(Clone, Debug, Default)]
pub struct WorkPool {
    /// `None` if work runs on the thread that starts it.
    pool: Option<Arc<ThreadPool>>,
}

impl WorkPool {
    /// Returns `threads` threads, or as many as the process may use. With one thread, work runs on
    /// the thread that starts it.
    ///
    /// # Errors
    /// The system refused to start a thread.
    pub fn new(threads: Option<NonZeroUsize>) -> io::Result<Self> {
        let all = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = threads.unwrap_or_else(all);
        if threads == NonZeroUsize::MIN {
            return Ok(Self::default());
        }
        let builder = ThreadPoolBuilder::new().num_threads(threads.get());
        let pool = builder.thread_name(|number| format!("worker-{number}")).build();
        Ok(Self { pool: Some(Arc::new(pool.map_err(io::Error::other)?)) })
    }

    /// Returns the number of pieces of work that may be in progress: for each thread one that runs
    /// and one that waits.
    fn under_way_max(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| 2 * pool.current_num_threads())
    }
}

/// Work in progress, oldest first.
pub struct InOrder<R> {
    workers: WorkPool,
    results: VecDeque<Receiver<R>>,
}

impl<R: Send + 'static> InOrder<R> {
    /// Returns a queue without work.
    pub fn new(workers: &WorkPool) -> Self {
        Self { workers: workers.clone(), results: VecDeque::new() }
    }

    /// Starts `work`. If the most work is in progress already, waits for the oldest result and
    /// returns it. The caller must use that result before the next one.
    pub fn start(&mut self, work: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        let Some(pool) = &self.workers.pool else { return Some(work()) };
        let (done, result) = sync_channel(1);
        pool.spawn(move || {
            // The receiver was dropped if the caller returned early with an error.
            let _ = done.send(work());
        });
        self.results.push_back(result);
        if self.results.len() > self.workers.under_way_max() { self.wait() } else { None }
    }

    /// Waits for the oldest result. Returns `None` if no work is in progress.
    ///
    /// # Panics
    /// If the work panicked.
    pub fn wait(&mut self) -> Option<R> {
        let result = self.results.pop_front()?.recv();
        assert!(result.is_ok(), "work of a pool ended without a result");
        result.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_work_and_are_bounded() {
        for threads in [1, 3] {
            let workers = WorkPool::new(NonZeroUsize::new(threads)).unwrap();
            let (mut work, mut done) = (InOrder::new(&workers), Vec::new());
            for number in 0..200u64 {
                let slow = number % 7 == 0;
                let result = work.start(move || {
                    if slow {
                        std::thread::yield_now();
                    }
                    number
                });
                done.extend(result);
                assert!(work.results.len() <= 2 * threads);
            }
            while let Some(result) = work.wait() {
                done.push(result);
            }
            assert!(done.into_iter().eq(0..200), "{threads} threads");
        }
    }
}
