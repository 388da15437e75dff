//! The memory budget, which limits a model's use of memory. `memory_plan.rs` sums the actual use.

use serde::Deserialize;

/// The limits of a model's memory and work. Every field is a maximum. The memory is allocated when
/// the model is opened and does not grow afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Bytes of all memory of the model.
    pub memory_bytes_max: u64,
    /// Bytes of the embedding caches.
    pub cache_bytes_max: u64,
    /// Bytes of the tables that are kept whole in memory.
    pub resident_bytes_max: u64,
    /// Request slots: requests that wait or are served at the same time. A further request is
    /// refused with `Busy`.
    pub slots: u32,
    /// Requests that are served at the same time, one thread each.
    pub workers: u32,
    /// Microseconds that a request waits for others to be scored in one batch with it. With 0 a
    /// worker batches only the requests that already wait.
    pub batch_delay_us_max: u32,
    /// Samples in a request.
    pub batch_max: u32,
    /// Lookups of one worker that wait for flash at the same time. A request with more misses is
    /// served in several rounds.
    pub misses_max: u32,
    /// Page reads of all workers in flight. More than the queue depth of the device gains nothing.
    pub reads_max: u32,
}

impl Default for Budget {
    /// A budget for a desk: 64 MiB of cache, 64 MiB of resident tables, one worker, 16 slots,
    /// batches of 256.
    fn default() -> Self {
        Self {
            memory_bytes_max: 1 << 30,
            cache_bytes_max: 64 << 20,
            resident_bytes_max: 64 << 20,
            slots: 16,
            workers: 1,
            batch_delay_us_max: 0,
            batch_max: 256,
            misses_max: 16 << 10,
            reads_max: 64,
        }
    }
}
