//! The messages with which HugeCTR's trainer publishes rows to Kafka, up to version 23.09. Decodes
//! one message, names topics, and gathers the newest rows. Checks every length, where HugeCTR's own
//! reader trusts the message. Never opens a connection.

pub mod gather;
pub mod message;
pub mod topic;

pub use gather::{GatheredRows, MessageSource};
pub use message::{HpsMessage, KeyWidth, MessageError};
pub use topic::{TopicError, topic_name};
