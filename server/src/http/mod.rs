//! Bodies and answers of HTTP: a request's body is read within its limits. Knows no route.

pub mod infer;
pub mod page;

use crate::connections::Connection;
use crate::front::Front;
use crate::infer::Call;
use crate::limits::{BODY_TIME_MAX, REST_TIME_MAX};
use crate::problem::{Code, Problem};
use hatchback::Shortened;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, Response, StatusCode};
use serde::Serialize;
use serde_json::json;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The time to wait before a retry, in milliseconds; `retry-after` has whole seconds only.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// The body of an answer: bytes, and for gRPC the trailers with its status.
#[derive(Debug, Default)]
pub struct AnswerBody {
    pub data: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = if self.data.is_empty() {
            self.trailers.take().map(Frame::trailers)
        } else {
            Some(Frame::data(std::mem::take(&mut self.data)))
        };
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        // A call of gRPC has no `content-length`: its end is the trailers.
        match self.trailers {
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.data.len() as u64),
        }
    }
}

/// An answer of the front door.
pub type Answered = Response<AnswerBody>;

/// Returns the value of a header for a message.
pub fn header_text(value: &HeaderValue) -> String {
    Shortened(&String::from_utf8_lossy(value.as_bytes())).to_string()
}

/// Returns an answer with `data` of this type.
pub fn reply(status: StatusCode, content_type: &'static str, data: Bytes) -> Answered {
    let mut response = Response::new(AnswerBody { data, trailers: None });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns `value` as JSON.
pub fn json_reply(value: &impl Serialize) -> Answered {
    // Numbers and text always serialize.
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    reply(StatusCode::OK, "application/json", bytes.into())
}

/// Returns the answer to a request that has a problem.
pub fn refusal(problem: &Problem) -> Answered {
    let text = json!({"error": problem.message}).to_string();
    let mut response = reply(problem.code.http(), "application/json", text.into());
    if let (Code::Method, Some((_, allowed))) = (problem.code, problem.message.rsplit_once(' ')) {
        // The message ends with the method.
        let allowed = HeaderValue::from_str(allowed);
        response.headers_mut().extend(allowed.ok().map(|allowed| (ALLOW, allowed)));
    }
    if let Some(wait) = problem.retry_after {
        let seconds = wait.as_millis().div_ceil(1000).max(1) as u64;
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        let ms = (wait.as_millis() as u64).max(1);
        response.headers_mut().insert(RETRY_AFTER_MS, HeaderValue::from(ms));
    }
    response
}

/// Reads `body`, which may have `bytes_max` bytes, and counts it in the memory of `call`.
///
/// # Errors
/// The body is longer, the budget has no room for it, or it does not arrive in time.
pub async fn read_body(
    call: &mut Call<'_>,
    body: &mut Incoming,
    bytes_max: usize,
) -> Result<Bytes, Problem> {
    read_until(call, body, bytes_max, |_| false).await
}

/// Reads `body` like [`read_body`], to its end or until `is_whole` holds for what was read.
///
/// # Errors
/// As for [`read_body`].
pub async fn read_until(
    call: &mut Call<'_>,
    body: &mut Incoming,
    bytes_max: usize,
    is_whole: fn(&[u8]) -> bool,
) -> Result<Bytes, Problem> {
    let too_large = || {
        let message = format!("the body has more than {bytes_max} bytes");
        Problem::new(Code::TooLarge, message)
    };
    // A body that announces too many bytes is refused before the first is kept.
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(too_large());
    }
    let read = tokio::time::timeout(BODY_TIME_MAX, async {
        let announced = body.size_hint().exact().map_or(bytes_max, |bytes| bytes as usize);
        let mut read = Vec::new();
        while let Some(data) = next_data(call.connection, body).await {
            let data = data.map_err(|e| Problem::invalid(format!("the body ended early: {e}")))?;
            let bytes = read.len() + data.len();
            if bytes > bytes_max {
                return Err(too_large());
            }

            if bytes > read.capacity() {
                // Room for what has arrived: a caller may announce a body and never send it.
                let capacity = (2 * read.capacity()).min(announced).max(bytes);
                call.front.connections.grow(&mut call.memory, capacity - read.capacity())?;
                read.reserve_exact(capacity - read.len());
            }
            // Copied, because a frame of one byte keeps the whole buffer of its connection.
            read.extend_from_slice(&data);
            if is_whole(&read) {
                break;
            }
        }
        Ok(read.into())
    });
    read.await.unwrap_or_else(|_| {
        let problem = format!("the body did not arrive within {BODY_TIME_MAX:?}");
        Err(Problem::new(Code::Late, problem))
    })
}

/// Reads the rest of `body` and drops it, up to the size that a body may have. Ends after
/// `REST_TIME_MAX`: the answer waits for it.
pub async fn skip_rest(front: &Front, connection: &Connection, body: &mut Incoming) {
    let bytes_max = front.rules.request_bytes_max;
    let mut left = Some(bytes_max).filter(|max| body.size_hint().lower() <= *max);
    let rest = async {
        while let Some(most) = left
            && let Some(Ok(data)) = next_data(connection, body).await
        {
            left = most.checked_sub(data.len() as u64);
        }
    };
    let _ = tokio::time::timeout(REST_TIME_MAX, rest).await;
}

/// Returns the next bytes of `body`, which belong to a request of `connection`.
async fn next_data(connection: &Connection, body: &mut Incoming) -> Option<hyper::Result<Bytes>> {
    loop {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        let data = match frame.map(Frame::into_data) {
            Ok(Ok(data)) => data,
            Ok(Err(_trailers)) => continue,
            Err(e) => return Some(Err(e)),
        };
        // With the heads of its frames, unless they are tiny.
        connection.count_used(data.len() + data.len() / 64);
        connection.note_moved(data.len());
        return Some(Ok(data));
    }
}
