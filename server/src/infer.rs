//! A request for scores, whatever its protocol: makes a batch of its tensors and queues it. Lends
//! the runtime its thread for a short request; for others it waits without blocking the thread.
//! Records where the time went.

use crate::connections::gate::Turn;
use crate::connections::memory::Reservation;
use crate::connections::{Connection, Work};
use crate::front::Front;
use crate::limits::TIMEOUT_MAX;
use crate::metrics::ModelMetrics;
use crate::metrics::trace::{Names, Protocol, Trace};
use crate::models::describe;
use crate::problem::{Code, Problem, not_served};
use crate::tensors::outputs::{Asked, Best, Numbers, Output, Want, Wants};
use crate::tensors::values::Tensor;
use crate::tensors::{Differences, Layout, fill};
use hatchback::limits::{DEADLINE_GRACE_US, DEADLINE_WAIT_US};
use hatchback::request::pipeline::Answer;
use hatchback::{Queued, RequestError, Ticket};
use hyper::header::HeaderValue;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::task::yield_now;

/// A request in the server: its caller, its arrival, and its bytes of the budget.
pub struct Call<'a> {
    pub front: &'a Arc<Front>,
    pub connection: &'a Connection,
    pub protocol: Protocol,
    pub received: Instant,
    pub memory: Reservation,
    /// The name of the served model that the request is for; empty where there is none.
    pub model: String,
    /// The caller's trace (`traceparent`), passed through.
    pub trace: Option<HeaderValue>,
    /// Whether the caller may load, unload and act.
    pub may_change: bool,
}

impl<'a> Call<'a> {
    /// Counts the request as in progress: its connection is not closed for another one until the
    /// result is dropped.
    ///
    /// # Errors
    /// The connection is already closing.
    pub fn begin_work(&self) -> Result<Work<'a>, Problem> {
        let closing =
            || Problem::new(Code::Unavailable, "the connection is being closed for another one");
        self.connection.begin_work().ok_or_else(closing)
    }
}

/// The content of a request for scores.
pub struct Order<'a> {
    pub model: &'a str,
    /// Empty for the version that is served.
    pub version: &'a str,
    /// Time from the arrival of the request to its deadline.
    pub timeout: Option<Duration>,
    pub tensors: &'a [Tensor<'a>],
    /// The outputs that the request names; empty if it wants every output.
    pub asked: &'a [Asked<'a>],
    /// The encoding of the outputs if the request names none.
    pub every: Want,
    /// How many of the best samples the answer has; `None` if all.
    pub top_k: Option<usize>,
}

/// Returns the shorter of two times: the one in the request's parameter and that of the gRPC call,
/// less a millisecond. The runtime answers at most a millisecond after the deadline, so the answer
/// still arrives before the call ends.
pub fn shorter_timeout(parameter: Option<Duration>, call: Option<Duration>) -> Option<Duration> {
    let grace = Duration::from_micros(DEADLINE_GRACE_US);
    let call = call.map(|time| time.saturating_sub(grace));
    [parameter, call].into_iter().flatten().min().map(|time| time.min(TIMEOUT_MAX))
}

/// The outputs that the answer will contain.
struct View {
    layout: Arc<Layout>,
    wants: Wants,
    top_k: Option<usize>,
    differences: Differences,
}

/// A request that waits to be scored.
pub struct Submitted<'a> {
    front: &'a Front,
    queued: Queued,
    view: View,
    deadline: Option<Instant>,
    at: Instant,
    /// The same time by the clock of the pipeline.
    at_clock: Duration,
    model: Arc<ModelMetrics>,
    _turn: Turn<'a>,
    _work: Work<'a>,
}

/// A request that a worker has answered.
pub struct Scored {
    ticket: Ticket,
    view: View,
    submitted: Instant,
    submitted_clock: Duration,
    done: Instant,
    model: Arc<ModelMetrics>,
}

/// Submits what `order` asks for.
///
/// # Errors
/// The model is not served, a tensor does not fit it, the time is over, or a limit refuses the
/// request.
pub fn submit<'a>(call: &mut Call<'a>, order: &Order<'_>) -> Result<Submitted<'a>, Problem> {
    let front = call.front;
    if front.serving.schema(order.model).is_none() {
        return Err(not_served(order.model));
    }
    // Only now: metrics are kept by this name, so it must be that of a served model.
    order.model.clone_into(&mut call.model);
    if !order.version.is_empty() {
        describe::version(front, order.model, order.version)?;
    }

    let busy = |message: String| Problem::busy(message, front.retry_after(order.model));
    let work = call.begin_work()?;
    let turn = front.gate.turn().ok_or_else(|| busy("busy: the car sheds load".to_owned()))?;

    let (received, at_clock) = (call.received.elapsed(), front.serving.now());
    let left = order.timeout.map(|timeout| timeout.saturating_sub(received));
    if left == Some(Duration::ZERO) {
        return Err(RequestError::DeadlineExceeded.into());
    }
    let (mut view, memory) = (None, &mut call.memory);
    let deadline = left.map(|left| at_clock + left);
    let queued = front.serving.queue_with(order.model, deadline, |model, batch| {
        let layout = front.layout(order.model, model.schema());
        let wants = Wants::new(&layout.outputs, order.asked, order.every, order.top_k.is_some())?;
        let batch_max = model.budget().batch_max as usize;
        let differences = fill(batch, &layout, order.tensors, batch_max, memory)?;
        view = Some(View { layout, wants, top_k: order.top_k, differences });
        Ok::<(), Problem>(())
    });
    let queued = queued.map_err(|e| match e {
        // No slot is free. A refusal by the byte budget has a time to wait already.
        Problem { code: Code::Busy, retry_after: None, message } => busy(message),
        e => e,
    })?;

    let at = Instant::now();
    let gone = || not_served(order.model);
    Ok(Submitted {
        front,
        queued,
        // Never missing: `queue_with` succeeded, so the closure has run.
        view: view.ok_or_else(gone)?,
        deadline: left.map(|left| call.received + received + left),
        at,
        at_clock: front.serving.now(),
        model: front.metrics.model(order.model),
        _turn: turn,
        _work: work,
    })
}

impl Submitted<'_> {
    /// Waits until the request is answered, or until `DEADLINE_WAIT_US` after its deadline. A short
    /// request is scored on this thread, in one batch with those that other connections of the
    /// thread have sent by now. Dropping the future abandons the request.
    pub async fn wait(self) -> Scored {
        // `_turn` and `_work` stay in `self`, and so until the request is answered.
        let Self { front, queued, view, deadline, at, at_clock, model, .. } = self;
        // The thread reads what its other connections have sent, so that one batch has all of it.
        yield_now().await;
        let ticket = queued.start();
        match deadline {
            _ if ticket.is_done() => {}
            None => done(&ticket).await,
            Some(deadline) => {
                let mut done = pin!(done(&ticket));
                let until = deadline + Duration::from_micros(DEADLINE_WAIT_US);
                let mut over = pin!(front.alarm.sleep_until(until));
                poll_fn(|context| match done.as_mut().poll(context) {
                    Poll::Pending => over.as_mut().poll(context),
                    Poll::Ready(()) => Poll::Ready(()),
                })
                .await;
            }
        }
        let done = Instant::now();
        Scored { ticket, view, submitted: at, submitted_clock: at_clock, done, model }
    }
}

/// Waits until `ticket` is done.
async fn done(ticket: &Ticket) {
    poll_fn(|context| match ticket.poll_done(context.waker()) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

/// An answer, and the outputs of it that the request wants.
pub struct Shown<'a> {
    answer: &'a Answer<'a>,
    view: &'a View,
    best: Option<Best>,
}

impl Shown<'_> {
    /// Returns the sequence of the generation that scored the request.
    pub fn sequence(&self) -> u64 {
        self.answer.generation().sequence
    }

    /// Returns the wanted outputs, each with its encoding and its numbers.
    pub fn outputs(&self) -> impl Iterator<Item = (&Output, Want, Numbers<'_>)> {
        let View { layout, wants, .. } = self.view;
        let wanted = wants.of(&layout.outputs);
        let numbers = |output| Numbers::of(output, self.answer, self.best.as_ref());
        wanted.map(move |(output, want)| (output, want, numbers(output)))
    }

    /// Returns how the inputs of the request differed from the model's.
    pub fn differences(&self) -> &Differences {
        &self.view.differences
    }

    /// Returns how many numbers the wanted outputs have in sum.
    pub fn numbers(&self) -> usize {
        self.outputs().map(|(_, _, numbers)| numbers.count()).sum()
    }
}

impl Scored {
    /// Encodes the answer with `encode`, and then records where the time went.
    ///
    /// # Errors
    /// The request has no scores, or `encode` fails.
    pub fn encode<T>(
        self,
        call: &mut Call<'_>,
        id: &str,
        encode: impl FnOnce(&Shown<'_>, &mut Call<'_>) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let answer = self.ticket.wait()?;
        let ranked = self.view.top_k.map(|k| k.min(answer.scores().statuses.len()));
        call.memory.grow(ranked.unwrap_or_default() * size_of::<u32>())?;
        let best = ranked.map(|k| Best::new(&answer, k));
        let encoded = encode(&Shown { answer: &answer, view: &self.view, best }, call)?;

        let status = answer.scores().status();
        let (samples, late) = (answer.scores().statuses.len(), count_late(&answer));
        let queued = answer.taken_at().saturating_sub(self.submitted_clock);
        let waited = self.done - self.submitted;
        // The two clocks are read at different moments, and `waited - queued` must not underflow.
        let queued = queued.min(waited);
        let trace = Trace {
            total: call.received.elapsed(),
            decode: self.submitted - call.received,
            queue: queued,
            score: waited - queued,
            encode: self.done.elapsed(),
            samples,
            status,
            generation: answer.generation().sequence,
            at: self.done,
        };
        let front = call.front;
        (front.on_answer)(&call.model, answer.generation(), waited);
        drop(answer);

        self.model.answer(call.protocol, &trace, late);
        self.model.count_inputs(&self.view.differences);
        let traced = call.trace.as_ref().and_then(|value| value.to_str().ok()).unwrap_or("");
        let names = Names { model: &call.model, id, protocol: call.protocol, trace: traced };
        front.slowest.note(&trace, &names);
        Ok(encoded)
    }
}

/// Returns the number of samples that the deadline cut short.
fn count_late(answer: &Answer<'_>) -> usize {
    answer.scores().statuses.iter().filter(|status| status.late).count()
}
