//! The trace of an answered request: its caller, its model, and where the time went. Plain data.

use hatchback::LookupStatus;
use serde::{Serialize, Serializer};
use std::time::{Duration, Instant};

/// The protocol of a request, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
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

/// The names of the stages of a request, in their order.
pub const STAGES: [&str; 4] = ["decode", "queue", "score", "encode"];

/// Where the time of a request went.
#[derive(Clone, Debug, Serialize)]
pub struct Trace {
    /// Until the request was submitted: its body arrived and was decoded.
    #[serde(rename = "decode_us", serialize_with = "us")]
    pub decode: Duration,
    /// Until a worker took the request.
    #[serde(rename = "queue_us", serialize_with = "us")]
    pub queue: Duration,
    /// Until the worker had answered it.
    #[serde(rename = "score_us", serialize_with = "us")]
    pub score: Duration,
    /// Until the answer was encoded.
    #[serde(rename = "encode_us", serialize_with = "us")]
    pub encode: Duration,
    pub samples: usize,
    /// The sum of the samples' statuses.
    #[serde(flatten)]
    pub status: LookupStatus,
    pub generation: u64,
    /// When the request was answered; shown as its age.
    #[serde(rename = "age_s", serialize_with = "age_s")]
    pub at: Instant,
}

impl Trace {
    /// Returns the times of the stages, in the order of [`STAGES`].
    pub fn stages(&self) -> [Duration; 4] {
        [self.decode, self.queue, self.score, self.encode]
    }

    /// Returns the time from the headers of the request to the end of its answer.
    pub fn total(&self) -> Duration {
        self.stages().iter().sum()
    }
}

fn us<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(time.as_micros() as u64)
}

fn age_s<S: Serializer>(at: &Instant, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(at.elapsed().as_secs())
}
