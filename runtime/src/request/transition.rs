//! A transition: replaces the model of a pipeline with the next generation, which shares its caches
//! and resident tables. `worker/live_model.rs` explains why no request sees rows of two
//! generations. Requests are served throughout.

use crate::clock::Clock;
use crate::maintenance::background::outside_idle_class;
use crate::maintenance::share::Urgency;
use crate::model::row_writer::{ResidentWriter, RowWriter};
use crate::request::changed_rows::{read_again, remove_changed};
use crate::request::pipeline::Pipeline;
use crate::request::successor::Opened;
use crate::request::worker::backend::WorkerBackend;
use crate::request::worker::live_model::Successor;
use hatchback_kernels::cuda::driver::CudaError;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The effects of a swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Swapped {
    /// Cached rows that were removed because they changed, and read anew after the swap.
    pub read: usize,
    /// Cached rows that were removed and not read again: they no longer exist, or could not be
    /// read.
    pub dropped: usize,
    /// Rows of resident tables that were replaced.
    pub patched: usize,
    /// Longest time for which no lookup could start.
    #[serde(skip)]
    pub pause: Duration,
}

impl fmt::Display for Swapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, dropped, patched, pause } = self;
        write!(
            f,
            "lookups paused for at most {pause:?}; cached rows: {read} read anew, {dropped} \
             dropped; resident rows: {patched} replaced"
        )
    }
}

/// Serves `opened` in place of the model of `pipeline`. Returns when no request uses the old model.
/// Calls `yield_now` between pieces of work. Nobody waits for the rows that it reads at the end.
///
/// # Errors
/// `CudaError` if the GPU failed. The old model is still served; some of its rows may no longer be
/// cached.
pub(crate) fn run(
    pipeline: &Pipeline,
    opened: Opened,
    clock: &dyn Clock,
    yield_now: &dyn Fn(Urgency),
) -> Result<Swapped, CudaError> {
    let yield_awaited = &|| yield_now(Urgency::Awaited);
    let Opened { model, change, patches } = opened;
    let (model, change) = (Arc::new(model), Arc::new(change));
    let workers = model.budget().workers;
    // All memory is taken before the first change, so that a lack of memory leaves the old model as
    // it is.
    let backends: Vec<_> =
        (0..workers).map(|_| WorkerBackend::new(&model)).collect::<Result<_, _>>()?;
    let mut writer = RowWriter::on(&model)?;
    let residents = ResidentWriter::new(&patches, model.backend())?;

    let live = pipeline.live();
    // Nobody else frees the old model, and no worker its own memory: a request would wait.
    let old = live.model();
    live.bar(Arc::clone(&change));
    // A thread of the idle class could lose its CPU while it has the lock, and every lookup would
    // wait.
    let (users, first_pause) = outside_idle_class(|| live.renew(clock));
    pipeline.wait_until_left(&users, yield_awaited);
    let removed = remove_changed(&mut writer, &model, &change, yield_awaited);
    let switched = removed.and_then(|removed| {
        // Lookups wait for the rows.
        patches.iter().for_each(|patch| patch.prefetch(model.backend()));
        let fills_alike = old.schema().fills_as(model.schema());
        let successor = Successor { model: Arc::clone(&model), fills_alike, backends };
        let write = || residents.write();
        let (users, pause) = outside_idle_class(|| live.switch(successor, clock, write))?;
        Ok((removed, users, pause))
    });
    let (mut removed, users, pause) = switched.inspect_err(|_| live.lift())?;

    // A model that is swapped to itself, for its plan, may be on probation, which counts answers.
    if old.id() != model.id() {
        pipeline.reset_stats();
    }
    pipeline.wait_until_left(&users, yield_awaited);
    live.lift();
    // Each waits for its own streams and for the changes so far, and then frees. A handle of cuBLAS
    // waits for all requests that have begun.
    drop((live.take_retired(), old, residents));
    // The new model is served whether or not its changed rows return to the caches.
    let yield_unawaited = &|| yield_now(Urgency::Unawaited);
    let read = read_again(&mut writer, &model, &mut removed, yield_unawaited);
    let read = read.unwrap_or_else(|e| {
        log::error!("the changed rows of {} stay out of the caches: {e}", model.generation());
        0
    });
    Ok(Swapped {
        read,
        dropped: removed.iter().map(|of_table| of_table.keys.len()).sum::<usize>() - read,
        patched: patches.iter().map(|patch| patch.rows.len()).sum(),
        pause: pause.max(first_pause),
    })
}
