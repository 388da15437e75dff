//! A request for scores, whatever its protocol: makes a batch of its tensors, submits it, and waits
//! for the worker without blocking a thread. Notes where the time went.

use crate::connections::{Connection, Work};
use crate::describe;
use crate::front::Front;
use crate::gate::Turn;
use crate::limits::TIMEOUT_MAX;
use crate::memory::Reservation;
use crate::metrics::ModelMetrics;
use crate::problem::{Code, Problem};
use crate::tensors::{GENERATION, SCORE, STATUS, STATUS_FIELDS, Tensor, batch_of};
use crate::trace::{Names, Protocol, Trace};
use hatchback::limits::DEADLINE_GRACE_US;
use hatchback::request::pipeline::Answer;
use hatchback::{LookupStatus, RequestError, Ticket};
use hyper::header::HeaderValue;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// A request in the server: who asks, since when, and what it holds of the budget.
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
}

/// What a request asks for.
pub struct Order<'a> {
    pub model: &'a str,
    /// Empty for the version that is served.
    pub version: &'a str,
    /// Time from the arrival of the request to its deadline.
    pub timeout: Option<Duration>,
    pub tensors: &'a [Tensor<'a>],
}

/// Which outputs a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub score: bool,
    pub status: bool,
    pub generation: bool,
}

impl Wanted {
    pub const ALL: Self = Self { score: true, status: true, generation: true };
    pub const NONE: Self = Self { score: false, status: false, generation: false };

    /// Adds the output `name`.
    ///
    /// # Errors
    /// The model has no such output.
    pub fn add(&mut self, name: &str) -> Result<(), Problem> {
        match name {
            SCORE => self.score = true,
            STATUS => self.status = true,
            GENERATION => self.generation = true,
            _ => {
                let name = name.escape_debug();
                return Err(Problem::invalid(format!("the model has no output `{name}`")));
            }
        }
        Ok(())
    }
}

/// Returns the shorter of the time that a caller gives in the request and that of its call of gRPC.
/// The library answers a millisecond after a deadline at the latest, so a call's own time ends a
/// millisecond later than the deadline.
pub fn shorter_timeout(parameter: Option<Duration>, call: Option<Duration>) -> Option<Duration> {
    let grace = Duration::from_micros(DEADLINE_GRACE_US);
    let call = call.map(|time| time.saturating_sub(grace));
    [parameter, call].into_iter().flatten().min().map(|time| time.min(TIMEOUT_MAX))
}

/// A request that a worker will score.
pub struct Submitted<'a> {
    ticket: Ticket,
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
    let layout = front.layout(order.model)?;
    order.model.clone_into(&mut call.model);
    if !order.version.is_empty() {
        describe::version(front, order.model, order.version)?;
    }
    let batch_max = front.serving.budget(order.model).map_or(1, |budget| budget.batch_max as usize);
    let batch = batch_of(&layout, order.tensors, batch_max, &mut call.memory)?;

    let busy = |message: String| Problem::busy(message, front.retry_after(order.model));
    let closing = || Problem::new(Code::Unavailable, "the connection makes room for another one");
    let work = call.connection.begin_work().ok_or_else(closing)?;
    let turn = front.gate.turn().ok_or_else(|| busy("busy: the car sheds load".to_owned()))?;

    let (at, at_clock) = (Instant::now(), front.serving.now());
    let left = order.timeout.map(|timeout| timeout.saturating_sub(at - call.received));
    if left == Some(Duration::ZERO) {
        return Err(RequestError::DeadlineExceeded.into());
    }
    let ticket = front.serving.submit(order.model, &batch, left.map(|left| at_clock + left));
    let ticket = ticket.map_err(|e| match e {
        RequestError::Busy(_) => busy(e.to_string()),
        e => e.into(),
    })?;
    let model = front.metrics.model(order.model);
    let deadline = left.map(|left| at + left);
    Ok(Submitted { ticket, deadline, at, at_clock, model, _turn: turn, _work: work })
}

impl Submitted<'_> {
    /// Waits until a worker has answered the request, or until the library's time after its
    /// deadline is over. Dropping the future gives the request up.
    ///
    /// # Errors
    /// The server ends.
    pub async fn wait(self) -> Result<Scored, Problem> {
        let Self { mut ticket, deadline, at, at_clock, model, .. } = self;
        let is_done = match deadline {
            None => {
                done(&ticket).await;
                true
            }
            Some(deadline) => tokio::time::timeout_at(deadline.into(), done(&ticket)).await.is_ok(),
        };
        if !is_done {
            // The library waits for less than a millisecond more. The timers of the event queue
            // have whole milliseconds, so a thread that may block does this.
            let rest = tokio::task::spawn_blocking(move || {
                let _ = ticket.wait();
                ticket
            });
            let stopping = |_| Problem::new(Code::Unavailable, "the server stops");
            ticket = rest.await.map_err(stopping)?;
        }
        Ok(Scored { ticket, submitted: at, submitted_clock: at_clock, done: Instant::now(), model })
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

impl Scored {
    /// Returns the answer, which `encode` turns into bytes; then notes where the time went.
    ///
    /// # Errors
    /// The request has no scores, or `encode` fails.
    pub fn encode<T>(
        self,
        call: &Call<'_>,
        id: &str,
        encode: impl FnOnce(&Answer<'_>) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let answer = self.ticket.wait()?;
        let encoded = encode(&answer)?;

        let status = answer.scores().status();
        let (samples, late) = (answer.scores().statuses.len(), count_late(&answer));
        let queued = answer.taken_at().saturating_sub(self.submitted_clock);
        let waited = self.done - self.submitted;
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
        let traced = call.trace.as_ref().and_then(|value| value.to_str().ok()).unwrap_or("");
        let names = Names { model: &call.model, id, protocol: call.protocol, trace: traced };
        front.slowest.note(&trace, &names);
        Ok(encoded)
    }
}

/// Returns the samples that the deadline cut short.
fn count_late(answer: &Answer<'_>) -> usize {
    answer.scores().statuses.iter().filter(|status| status.late).count()
}

/// Returns the numbers of a status, in the order of the output.
pub fn status_numbers(status: &LookupStatus) -> [i32; STATUS_FIELDS] {
    let LookupStatus { fresh, defaulted, absent, damaged, late } = *status;
    [fresh as i32, defaulted as i32, absent as i32, damaged as i32, i32::from(late)]
}
