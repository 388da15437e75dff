//! Why a request has no answer: a code that both protocols have, a message for a person, and for a
//! request that may be repeated, the time to wait. Shows no more than a short part of a caller's
//! text.

use crate::limits::{CALLER_NAME_BYTES_MAX, MESSAGE_BYTES_MAX};
use hatchback::{BatchError, RequestError, Shortened};
use hyper::StatusCode;
use std::fmt;
use std::time::Duration;

/// The kind of a problem: a status of gRPC with its counterpart in HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The request is malformed or does not fit the model.
    Invalid,
    /// The deadline passed.
    Late,
    /// There is no such model, version or path.
    NotFound,
    /// The path has another method.
    Method,
    /// The caller may not do this.
    Denied,
    /// A limit refuses the request now; the caller may repeat it.
    Busy,
    /// The caller sends requests too often; the caller may repeat it.
    TooOften,
    /// The request is larger than a limit.
    TooLarge,
    /// The state of the model or of the car does not allow this.
    Refused,
    /// The server does not have this function.
    Unimplemented,
    /// The request failed in the server.
    Internal,
    /// A score is NaN or infinite: most likely a fault of the release.
    NotFinite,
    /// The server stops, or the model is not served now.
    Unavailable,
}

impl Code {
    /// Returns the status of gRPC, that of HTTP, and the name of the outcome in the metrics.
    fn row(self) -> (u32, StatusCode, &'static str) {
        match self {
            Self::Invalid => (3, StatusCode::BAD_REQUEST, "invalid"),
            Self::Late => (4, StatusCode::GATEWAY_TIMEOUT, "late"),
            Self::NotFound => (5, StatusCode::NOT_FOUND, "not_found"),
            Self::Method => (12, StatusCode::METHOD_NOT_ALLOWED, "not_found"),
            Self::Denied => (7, StatusCode::FORBIDDEN, "denied"),
            Self::Busy => (8, StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Self::TooOften => (8, StatusCode::TOO_MANY_REQUESTS, "too_often"),
            Self::TooLarge => (8, StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            Self::Refused => (9, StatusCode::CONFLICT, "refused"),
            Self::Unimplemented => (12, StatusCode::NOT_IMPLEMENTED, "unimplemented"),
            Self::Internal => (13, StatusCode::INTERNAL_SERVER_ERROR, "failed"),
            Self::NotFinite => (13, StatusCode::INTERNAL_SERVER_ERROR, "not_finite"),
            Self::Unavailable => (14, StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        }
    }

    /// Returns the number of the status of gRPC.
    pub fn grpc(self) -> u32 {
        self.row().0
    }

    /// Returns the status of HTTP.
    pub fn http(self) -> StatusCode {
        self.row().1
    }

    /// Returns the name of the outcome in the metrics.
    pub fn outcome(self) -> &'static str {
        self.row().2
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The kind.
    pub code: Code,
    /// What happened, to what, and what to do.
    pub message: String,
    /// When the caller should repeat the request.
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// Returns a problem of this kind. Cuts a message over `MESSAGE_BYTES_MAX`: the errors of
    /// parsers may quote a whole body.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MESSAGE_BYTES_MAX {
            message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
            message.shrink_to_fit();
            message.push('\u{2026}');
        }
        Self { code, message, retry_after: None }
    }

    /// Returns a problem of the request itself.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }

    /// Returns a refusal that the caller may repeat after `retry_after`.
    pub fn busy(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(Code::Busy, message) }
    }
}

/// Returns `name`, which a caller sent.
///
/// # Errors
/// The name is longer than any that the server has.
pub fn checked(name: &str) -> Result<&str, Problem> {
    let (bytes, short) = (name.len(), Shortened(name));
    let message = || format!("name `{short}`: {bytes} bytes; at most {CALLER_NAME_BYTES_MAX}");
    if bytes > CALLER_NAME_BYTES_MAX { Err(Problem::invalid(message())) } else { Ok(name) }
}

/// Returns the problem of a model that is not served.
pub fn not_served(name: &str) -> Problem {
    let name = Shortened(name);
    Problem::new(Code::NotFound, format!("no model `{name}` is served"))
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<BatchError> for Problem {
    fn from(e: BatchError) -> Self {
        Self::invalid(e.to_string())
    }
}

impl From<RequestError> for Problem {
    fn from(e: RequestError) -> Self {
        let code = match &e {
            RequestError::Busy(_) | RequestError::Replaced => Code::Busy,
            RequestError::NotServed => Code::NotFound,
            RequestError::DeadlineExceeded => Code::Late,
            // A caller whose values pass the checks cannot prevent it, so an alert must see it.
            RequestError::NotFinite(_) => Code::NotFinite,
            RequestError::Score(_) | RequestError::Panicked => Code::Internal,
        };
        Self::new(code, e.to_string())
    }
}
