//! The request flow: a batch of dense features and sparse keys becomes scores with statuses.

mod changed_rows;
pub(crate) mod check;
pub mod error;
pub mod explain;
pub(crate) mod memory;
pub(crate) mod negative_cache;
pub mod open;
pub(crate) mod opening;
pub mod pipeline;
pub mod plans;
pub(crate) mod precision_check;
pub mod probe_inputs;
pub(crate) mod queue;
pub mod served;
pub mod serving;
pub(crate) mod slot;
pub(crate) mod successor;
pub mod transition;
pub mod worker;
pub(crate) mod worker_state;
pub(crate) mod workers;
