//! The front door: tensors, values, pages, TLS, and callers that stall.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod front_best;
mod front_differences;
mod front_pages;
mod front_stalls;
mod front_tensors;
mod front_tls;
mod front_values;
