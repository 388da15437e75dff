//! The daemon's front door: the Open Inference Protocol v2 over gRPC and HTTP, Prometheus metrics
//! and the status page, on Unix sockets, on loopback, and with certificates beyond it.
//!
//! **A request.** `listen` accepts a connection, and `connections` gives it a place. `route` finds
//! the function that answers a request. `infer` decodes the request (`grpc`, `http`, `tensors`)
//! straight into a slot of the runtime. The runtime scores a short request on the thread of its
//! connection. A worker scores every other one, while the thread serves its other connections.
//!
//! **Memory.** Every byte that a caller can make this crate keep is part of `ByteBudget` or of a
//! connection's fixed share. `front_bytes` is the sum, which the daemon counts in its budget.
//!
//! The crate has no scoring of its own and never opens a network connection. The runtime has no
//! sockets.

#![forbid(unsafe_code)]

mod connections;
mod front;
mod grpc;
mod http;
mod infer;
pub mod limits;
mod listen;
mod metrics;
mod models;
mod problem;
#[allow(missing_docs)]
pub mod proto;
mod route;
mod tensors;

pub use connections::gate::Gate;
pub use connections::tls::{Tls, TlsError};
pub use front::{Front, FrontOptions, front_bytes};
pub use listen::{Listener, Stopping, serve};
pub use metrics::facts::{CarFacts, ModelFolder, WearFacts};
pub use problem::{Code, Problem};
pub use route::decode_request;
