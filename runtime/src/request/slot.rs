//! The memory of one request: its batch, its scores, its stage, and the waker of its caller. Knows
//! no queue and no worker. Never allocates after its start.

use crate::bundle::manifest::Generation;
use crate::locks::lock;
use crate::model::Model;
use crate::request::error::RequestError;
use crate::schema::batch::Batch;
use hatchback_kernels::lookup::LookupStatus;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// The memory of one request.
pub struct Slot {
    request: Mutex<Request>,
    done: Condvar,
}

pub struct Request {
    stage: Stage,
    pub batch: Batch,
    /// `[batch_max, outputs]`.
    pub scores: Vec<f32>,
    /// `[batch_max]`.
    pub statuses: Vec<LookupStatus>,
    pub outputs: usize,
    /// The generation that scored the request.
    pub generation: Arc<Generation>,
    /// The time at which a worker took the request, by the queue's clock.
    pub taken_at: Duration,
    /// Woken when the request is done, for a caller that must not block.
    waker: Option<Waker>,
}

/// The stage of a request.
enum Stage {
    Waiting,
    Done(Result<(), RequestError>),
    /// The caller dropped its ticket before the request was done.
    Abandoned,
}

impl Slot {
    /// Allocates the memory of one request to `model`.
    pub fn new(model: &Model) -> Self {
        let batch_max = model.budget().batch_max as usize;
        let request = Request {
            stage: Stage::Abandoned,
            batch: model.batch(),
            scores: vec![0.0; batch_max * model.outputs()],
            statuses: vec![LookupStatus::default(); batch_max],
            outputs: model.outputs(),
            generation: Arc::clone(model.generation()),
            taken_at: Duration::ZERO,
            waker: None,
        };
        Self { request: Mutex::new(request), done: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Request> {
        lock(&self.request)
    }

    /// Begins a request, whose empty batch `fill` fills. Returns its samples.
    ///
    /// # Errors
    /// That of `fill`.
    pub fn begin<E>(&self, fill: impl FnOnce(&mut Batch) -> Result<(), E>) -> Result<usize, E> {
        let mut request = self.lock();
        request.stage = Stage::Waiting;
        request.batch.clear();
        fill(&mut request.batch).map(|()| request.batch.size())
    }

    /// Returns whether the request is answered.
    pub fn is_done(&self) -> bool {
        matches!(self.lock().stage, Stage::Done(_))
    }

    /// Returns whether the request is answered. If not, `waker` is woken when it is.
    pub fn poll_done(&self, waker: &Waker) -> bool {
        let mut request = self.lock();
        let is_done = matches!(request.stage, Stage::Done(_));
        if !is_done && !request.waker.as_ref().is_some_and(|before| before.will_wake(waker)) {
            request.waker = Some(waker.clone());
        }
        is_done
    }

    /// Waits for the answer as long as `left` returns a time above zero; `None` is no limit.
    pub fn wait(
        &self,
        left: impl Fn() -> Option<Duration>,
    ) -> Result<MutexGuard<'_, Request>, RequestError> {
        let mut request = self.lock();
        // From here on the condition variable wakes the caller, not the waker.
        request.waker = None;
        loop {
            match &request.stage {
                Stage::Done(Ok(())) => return Ok(request),
                Stage::Done(Err(e)) => return Err(e.clone()),
                _ => {}
            }
            request = match left() {
                // Only after the look at the stage: scores that have arrived are returned although
                // the deadline passed.
                Some(Duration::ZERO) => return Err(RequestError::DeadlineExceeded),
                Some(left) => {
                    let waited = self.done.wait_timeout(request, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.done.wait(request).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Records that the caller dropped its ticket. Returns whether the request was answered.
    pub fn abandon(&self) -> bool {
        let mut request = self.lock();
        let is_done = matches!(request.stage, Stage::Done(_));
        request.stage = Stage::Abandoned;
        request.waker = None;
        is_done
    }

    /// Appends the request, which a worker took at `now`, to `batch`. Returns false if its caller
    /// has dropped the ticket.
    pub fn append_to(&self, batch: &mut Batch, now: Duration) -> bool {
        let mut request = self.lock();
        request.taken_at = now;
        let is_wanted = matches!(request.stage, Stage::Waiting);
        assert!(!is_wanted || batch.append(&request.batch), "requests in flight fit one batch");
        is_wanted
    }

    /// Ends the request with `result`; `write` fills in its scores. Wakes its caller. Returns false
    /// if the caller has dropped the ticket.
    pub fn finish(
        &self,
        result: Result<(), RequestError>,
        write: impl FnOnce(&mut Request),
    ) -> bool {
        let (is_wanted, waker) = {
            let mut request = self.lock();
            let is_wanted = !matches!(request.stage, Stage::Abandoned);
            if is_wanted {
                write(&mut request);
                request.stage = Stage::Done(result);
            }
            // The waker runs code of the caller, so it is woken after the lock is released.
            (is_wanted, request.waker.take())
        };
        match waker {
            Some(waker) if is_wanted => waker.wake(),
            None if is_wanted => self.done.notify_all(),
            _ => {}
        }
        is_wanted
    }
}
