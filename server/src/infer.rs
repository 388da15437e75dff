//! A request for scores, whatever its protocol: makes a batch of its tensors and queues it. Lends
//! the runtime its thread for a short request; for others it waits without blocking the thread.
//! Records where the time went.

use crate::connections::alarm::sleep_until;
use crate::connections::gate::Turn;
use crate::connections::memory::Reservation;
use crate::connections::{Connection, Work};
use crate::front::Front;
use crate::limits::{REQUEST_BYTES, TIMEOUT_MAX};
use crate::metrics::ModelMetrics;
use crate::metrics::slowest::SlowRequest;
use crate::metrics::trace::{Protocol, Trace};
use crate::models::describe;
use crate::problem::{Code, Problem, not_served};
use crate::tensors::outputs::{Asked, Best, Numbers, Output, Want, Wants};
use crate::tensors::values::Tensor;
use crate::tensors::{Differences, Layout, fill};
use hatchback::limits::{DEADLINE_GRACE_US, DEADLINE_WAIT_US};
use hatchback::request::pipeline::Answer;
use hatchback::{Queued, RequestError, Served, Shortened, Ticket};
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use std::borrow::Cow;
use std::future::poll_fn;
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
    /// The time that a call of gRPC waits for its answer.
    pub timeout: Option<Duration>,
    /// Whether the caller may load, unload and act.
    pub may_change: bool,
}

impl Call<'_> {
    /// Returns the request with the caller's `id` as it is shown among the slow ones.
    fn slow(&self, id: &str, times: Trace) -> SlowRequest {
        let trace = self.trace.as_ref().and_then(|value| value.to_str().ok()).unwrap_or("");
        let [id, trace] = [id, trace].map(|text| Shortened(text).to_string());
        let total_us = times.total().as_micros() as u64;
        SlowRequest {
            model: self.model.clone(),
            protocol: self.protocol,
            id,
            trace,
            total_us,
            times,
        }
    }
}

/// The text of a parameter that is no number.
pub const NO_NUMBER: &str = "of another type";

/// The content of a request for scores.
#[derive(Default)]
pub struct Order<'a> {
    pub model: &'a str,
    /// Empty for the version that is served.
    pub version: &'a str,
    /// The caller's id of the request.
    pub id: Cow<'a, str>,
    /// Time from the arrival of the request to its deadline.
    pub timeout: Option<Duration>,
    pub tensors: Vec<Tensor<'a>>,
    /// The outputs that the request names; empty if it wants every output.
    pub asked: Vec<Asked<'a>>,
    /// The encoding of the outputs if the request names none.
    pub every: Want,
    /// How many of the best samples the answer has; `None` if all.
    pub top_k: Option<usize>,
}

impl Order<'_> {
    /// Takes the parameter `name` of the request, which has the value `text`: `timeout`,
    /// microseconds, of which 0 is no limit, or `top_k`. Skips every other one.
    ///
    /// # Errors
    /// The value is no integer, or too small.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), Problem> {
        let integer = |least: u64| {
            let wrong = || {
                let (text, rule) = (Shortened(text), format!("an integer of {least} or more"));
                Problem::invalid(format!("parameters.{name} is {text}, must be {rule}"))
            };
            text.parse().ok().filter(|number| *number >= least).ok_or_else(wrong)
        };
        match name {
            "timeout" => {
                let timeout = Duration::from_micros(integer(0)?);
                self.timeout = Some(timeout).filter(|timeout| !timeout.is_zero());
            }
            "top_k" => self.top_k = Some(integer(1)? as usize),
            _ => {}
        }
        Ok(())
    }
}

/// Returns the shorter of two times: the one in the request's parameter and that of the gRPC call,
/// less a millisecond. The runtime answers at most a millisecond after the deadline, so the answer
/// still arrives before the call ends.
fn shorter_timeout(parameter: Option<Duration>, call: Option<Duration>) -> Option<Duration> {
    let grace = Duration::from_micros(DEADLINE_GRACE_US);
    let call = call.map(|time| time.saturating_sub(grace));
    [parameter, call].into_iter().flatten().min().map(|time| time.min(TIMEOUT_MAX))
}

/// The outputs that the answer will contain.
struct View {
    id: String,
    /// Empty for the version that answers.
    version: String,
    layout: Arc<Layout>,
    wants: Wants,
    top_k: Option<usize>,
    differences: Differences,
}

/// A request that waits to be scored.
pub struct Submitted<'a> {
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

/// Returns the right to serve a request to the model `served`.
///
/// # Errors
/// The car sheds load.
pub fn turn<'a>(front: &'a Front, served: &Served) -> Result<Turn<'a>, Problem> {
    let busy = || Problem::busy("busy: the car sheds load", front.retry_after(served));
    front.gate.turn().ok_or_else(busy)
}

/// Submits what `order` asks for.
///
/// # Errors
/// The model is not served, a tensor does not fit it, the time is over, or a limit refuses the
/// request.
pub fn submit<'a>(call: &mut Call<'a>, order: &Order<'_>) -> Result<Submitted<'a>, Problem> {
    let front = call.front;
    let served = front.served(order.model)?;
    // Only now: metrics are kept by this name, so it must be that of a served model.
    order.model.clone_into(&mut call.model);
    describe::version(&served, order.version)?;

    let work = call.connection.begin_work()?;
    let turn = turn(front, &served)?;

    let (received, at_clock) = (call.received.elapsed(), front.serving.now());
    let timeout = shorter_timeout(order.timeout, call.timeout);
    let left = timeout.map(|timeout| timeout.saturating_sub(received));
    if left == Some(Duration::ZERO) {
        return Err(RequestError::DeadlineExceeded.into());
    }
    let (mut view, memory) = (None, &mut call.memory);
    let deadline = left.map(|left| at_clock + left);
    let queued = served.queue_with(deadline, |model, batch| {
        let layout = front.layout(order.model, model.schema());
        let wants = Wants::new(&layout.outputs, &order.asked, order.every, order.top_k.is_some())?;
        let batch_max = model.budget().batch_max as usize;
        let differences = fill(batch, &layout, &order.tensors, batch_max, memory)?;
        let (id, top_k) = (order.id.clone().into_owned(), order.top_k);
        let version = order.version.to_owned();
        view = Some(View { id, version, layout, wants, top_k, differences });
        Ok::<(), Problem>(())
    });
    let queued = queued.map_err(|e| match e {
        // No slot is free. A refusal by the byte budget has a time to wait already.
        Problem { code: Code::Busy, retry_after: None, message } => {
            Problem::busy(message, front.retry_after(&served))
        }
        e => e,
    })?;

    Ok(Submitted {
        queued,
        // Never missing: `queue_with` succeeded, so the closure has run.
        view: view.ok_or_else(|| not_served(order.model))?,
        deadline: left.map(|left| call.received + received + left),
        at: Instant::now(),
        at_clock: front.serving.now(),
        model: front.metrics.model(order.model),
        _turn: turn,
        _work: work,
    })
}

impl Submitted<'_> {
    /// Waits until the request is answered, or until `DEADLINE_WAIT_US` after its deadline. A short
    /// request is scored on this thread, in one batch with those that other connections of the
    /// thread have sent by now. Encodes the answer with `encode`, and then records where the time
    /// went. Dropping the future abandons the request. Its slot has the samples, so `body` is
    /// dropped before.
    ///
    /// # Errors
    /// The request has no scores, or `encode` fails.
    pub async fn answer<T>(
        self,
        call: &mut Call<'_>,
        body: Bytes,
        encode: impl FnOnce(&Shown<'_>, &mut Call<'_>) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        drop(body);
        // The notes stay for the answer, which names them.
        call.memory.shrink(REQUEST_BYTES + self.view.differences.bytes());
        // `_turn` and `_work` stay in `self`, and so until the request is answered.
        let Self { queued, view, deadline, at: submitted, at_clock, model, .. } = self;
        // The thread reads what its other connections have sent, so that one batch has all of it.
        yield_now().await;
        let ticket = queued.start();
        wait(&ticket, deadline).await;
        let done = Instant::now();

        let answer = ticket.wait().map_err(|e| match e {
            // The new generation takes it at once.
            RequestError::Replaced => Problem::busy(e.to_string(), Duration::ZERO),
            e => e.into(),
        })?;
        // A swap may have come after the check in `submit`.
        describe::check_version(&call.model, answer.generation().sequence, &view.version)?;
        let statuses = answer.scores().statuses;
        let (samples, late) = (statuses.len(), statuses.iter().filter(|s| s.late).count());
        let ranked = view.top_k.map(|k| k.min(samples));
        call.memory.grow(ranked.unwrap_or_default() * size_of::<u32>())?;
        let best = ranked.map(|k| Best::new(&answer, k));
        let encoded = encode(&Shown { answer: &answer, view: &view, best }, call)?;

        let waited = done - submitted;
        // The two clocks are read at different moments, and `waited - queue` must not underflow.
        let queue = answer.taken_at().saturating_sub(at_clock).min(waited);
        let trace = Trace {
            decode: submitted - call.received,
            queue,
            score: waited - queue,
            encode: done.elapsed(),
            samples,
            status: answer.scores().status(),
            generation: answer.generation().sequence,
            at: done,
        };
        (call.front.on_answer)(&call.model, answer.generation(), waited);
        drop(answer);
        model.answer(call.protocol, &trace, late, &view.differences);
        call.front.slowest.note(trace.total().as_micros() as u64, || call.slow(&view.id, trace));
        Ok(encoded)
    }
}

/// Waits until `ticket` is done, or until `DEADLINE_WAIT_US` after `deadline`.
async fn wait(ticket: &Ticket, deadline: Option<Instant>) {
    if ticket.is_done() {
        return;
    }
    let done = poll_fn(|context| match ticket.poll_done(context.waker()) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    });
    match deadline.map(|deadline| deadline + Duration::from_micros(DEADLINE_WAIT_US)) {
        None => done.await,
        Some(end) => tokio::select! { biased; () = done => {}, () = sleep_until(end) => {} },
    }
}

/// An answer, and the outputs of it that the request wants.
pub struct Shown<'a> {
    answer: &'a Answer<'a>,
    view: &'a View,
    best: Option<Best>,
}

impl Shown<'_> {
    /// Returns the caller's id of the request.
    pub fn id(&self) -> &str {
        &self.view.id
    }

    /// Returns the sequence of the generation that scored the request.
    pub fn sequence(&self) -> u64 {
        self.answer.generation().sequence
    }

    /// Returns the wanted outputs, each with its encoding and its numbers.
    pub fn outputs(&self) -> impl Iterator<Item = (&Output, Want, Numbers<'_>)> {
        let View { layout, wants, .. } = self.view;
        let wanted = wants.of(&layout.outputs);
        let (scores, sequence, best) = (self.answer.scores(), self.sequence(), self.best.as_ref());
        let numbers = move |output| Numbers { output, scores, sequence, best };
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
