//! The request path: batches, misses, policies, queues, damaged pages, swaps.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod caller_thread;
mod damaged_pages;
mod miss_policies;
mod pipeline;
mod request_path;
mod serving;
mod shared;
mod transitions;
