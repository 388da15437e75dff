//! The daemon's front door: the Open Inference Protocol v2 over gRPC and HTTP, Prometheus metrics
//! and the status page, on Unix sockets, on loopback, and with certificates beyond it.
//!
//! **A request.** `listen` accepts a connection, and `connections` gives it a place. `route` finds
//! the function that answers a request. `infer` decodes the request (`grpc_infer`, `http_infer`,
//! `values`, `tensors`) straight into a slot of the runtime. The runtime scores a short request on
//! the thread of its connection. A worker scores every other one, while the thread serves its other
//! connections.
//!
//! **Memory.** Every byte that a caller can make this crate keep is part of `ByteBudget` or of a
//! connection's fixed share. `front_bytes` is the sum, which the daemon counts in its budget.
//!
//! The crate has no scoring of its own and never opens a network connection. The runtime has no
//! sockets.

#![forbid(unsafe_code)]

mod alarm;
mod connections;
mod control;
mod describe;
mod facts;
mod front;
mod gate;
mod grpc;
mod grpc_infer;
mod grpc_request;
mod history;
mod http;
mod http_infer;
mod infer;
pub mod limits;
mod listen;
mod log_limit;
mod memory;
mod metrics;
mod outputs;
mod page;
mod problem;
#[allow(missing_docs)]
pub mod proto;
mod repository;
mod route;
mod scrape;
mod slowest;
mod status;
mod tensors;
mod tls;
mod trace;
mod values;
mod wire;

pub use facts::{CarFacts, ModelFolder, WearFacts};
pub use front::{Front, FrontOptions, front_bytes};
pub use gate::Gate;
pub use grpc_infer::decode as decode_grpc;
pub use http_infer::decode as decode_http;
pub use listen::{Listener, Stopping, serve};
pub use log_limit::LogLimit;
pub use problem::{Code, Problem};
pub use tls::{Tls, TlsError};
