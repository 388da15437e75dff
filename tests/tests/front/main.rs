//! The front door: tensors, values, TLS, and callers that stall.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod front_stalls;
mod front_tensors;
mod front_tls;
mod front_values;
