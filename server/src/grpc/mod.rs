//! The framing of gRPC: one message each way, the time limit of a call, and its status in the
//! trailers. Knows no method.
//!
//! Each call has one message each way. For these, gRPC over HTTP/2 is a prefix of five bytes and
//! three headers, so hyper carries it without a further library. Messages are never compressed.

pub mod infer;
pub mod reflection;
pub mod wire;

use crate::http::{AnswerBody, Answered, header_text};
use crate::problem::{Code, Problem};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use std::time::Duration;

/// Bytes before a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
pub const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The time to wait before a retry, in milliseconds.
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");
/// ASCII characters that a status message escapes.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Returns whether `headers` are those of a gRPC call.
pub fn is_call(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    content_type.strip_prefix(b"application/grpc").is_some_and(|rest| {
        // `application/grpc-web` is another protocol.
        rest.is_empty() || rest[0] == b'+' || rest[0] == b';'
    })
}

/// Returns the only message of a call's body.
///
/// # Errors
/// The body is not exactly one message, or the message is compressed.
pub fn message_of(body: &Bytes) -> Result<Bytes, Problem> {
    let Some((&[flag, a, b, c, d], rest)) = body.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(Problem::invalid(format!("{} bytes are not a gRPC message", body.len())));
    };
    if flag != 0 {
        let message = "the message is compressed; send it with the encoding `identity`";
        return Err(Problem::new(Code::Unimplemented, message));
    }
    let bytes = u32::from_be_bytes([a, b, c, d]) as usize;
    if rest.len() != bytes {
        let found = rest.len();
        return Err(Problem::invalid(format!("{found} bytes, the prefix says {bytes}")));
    }
    Ok(body.slice(PREFIX_BYTES..))
}

/// Returns whether `body` has all of a message.
pub fn is_whole(body: &[u8]) -> bool {
    let Some((&[_, a, b, c, d], rest)) = body.split_first_chunk::<PREFIX_BYTES>() else {
        return false;
    };
    rest.len() >= u32::from_be_bytes([a, b, c, d]) as usize
}

/// Returns the time that the caller waits for its answer, from `headers`.
///
/// # Errors
/// `grpc-timeout` is not one to eight digits with a unit.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Problem> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
    let wrong = || Problem::invalid(format!("grpc-timeout: `{}`", header_text(value)));
    let Some((unit, digits)) = value.as_bytes().split_last() else { return Err(wrong()) };
    // Eight digits are the protocol's limit. Even as hours they fit into 64 bits.
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return Err(wrong());
    }
    let number = digits.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    Ok(Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return Err(wrong()),
    }))
}

/// Returns `message` with its prefix.
pub fn frame(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut frame = Vec::with_capacity(PREFIX_BYTES + length);
    // The first byte is 0: the message is not compressed.
    frame.push(0);
    frame.extend((length as u32).to_be_bytes());
    // Encoding into a vector, which grows, cannot fail.
    let _ = message.encode(&mut frame);
    frame
}

/// Returns the answer with `data`, a framed message.
pub fn reply(data: Bytes) -> Answered {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, HeaderValue::from_static("0"));
    let mut response = Response::new(AnswerBody { data, trailers: Some(trailers) });
    add_headers(response.headers_mut());
    response
}

fn add_headers(headers: &mut HeaderMap) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(ACCEPTED, HeaderValue::from_static("identity"));
}

/// Returns the answer to a call that has a problem.
pub fn refusal(problem: &Problem) -> Answered {
    let mut response = Response::new(AnswerBody::default());
    let headers = response.headers_mut();
    add_headers(headers);
    // The status of HTTP stays 200: a client of gRPC reads this one.
    headers.insert(STATUS, HeaderValue::from(problem.code.grpc()));
    let text = utf8_percent_encode(&problem.message, ESCAPED).to_string();
    // Percent-encoding leaves visible ASCII only, so this succeeds.
    if let Ok(text) = HeaderValue::from_str(&text) {
        headers.insert(MESSAGE, text);
    }
    if let Some(wait) = problem.retry_after {
        headers.insert(PUSHBACK, HeaderValue::from((wait.as_millis() as u64).max(1)));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_message_may_have_any_text() {
        let problem = Problem::busy("100 % voll: \u{e4}\n", Duration::from_micros(1));
        let headers = refusal(&problem).headers().clone();
        assert_eq!(headers[MESSAGE], "100 %25 voll: %C3%A4%0A");
        assert_eq!(
            (&headers[STATUS], &headers[PUSHBACK]),
            (&"8".parse().unwrap(), &"1".parse().unwrap())
        );
    }
}
