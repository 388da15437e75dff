//! The request flow: a batch of dense features and sparse keys becomes scores with statuses.

pub mod gpu;
pub mod negative_cache;
pub mod pipeline;
pub(crate) mod queue;
pub mod serving;
pub mod weight_check;
pub mod worker;
