//! The trace of an answered request: its caller, its model, and where the time went. Plain data.

use hatchback::LookupStatus;
use std::time::{Duration, Instant};

/// The protocol of a request, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    Http,
}

impl Protocol {
    /// Returns the name in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
        }
    }
}

/// The names of a request.
pub struct Names<'a> {
    pub model: &'a str,
    /// The caller's id of the request.
    pub id: &'a str,
    pub protocol: Protocol,
    /// The caller's trace, as `traceparent` gives it.
    pub trace: &'a str,
}

/// Where the time of a request went.
#[derive(Clone, Debug)]
pub struct Trace {
    /// From the headers to the end of the answer.
    pub total: Duration,
    /// Until the request was submitted: its body arrived and was decoded.
    pub decode: Duration,
    /// Until a worker took the request.
    pub queue: Duration,
    /// Until the worker had answered it.
    pub score: Duration,
    /// Until the answer was encoded.
    pub encode: Duration,
    pub samples: usize,
    /// The sum of the samples' statuses.
    pub status: LookupStatus,
    pub generation: u64,
    pub at: Instant,
}
