//! Every maximum of the front door. The `[server]` section of a target sets those that a machine
//! may choose.

use hatchback::limits::FEATURES_MAX;
use std::time::Duration;

/// Bytes that a connection takes beside the bodies of its requests: buffers of the socket's
/// protocol, window of HTTP/2, and the state of its streams.
pub const CONNECTION_BYTES_MAX: u64 = 128 << 10;
/// Further bytes of a connection with TLS: a handshake of at most 64 KiB, and the bytes that wait
/// to be encrypted and to be sent.
pub const TLS_BYTES_MAX: u64 = (64 << 10) + 2 * TLS_BUFFER_BYTES_MAX as u64 + (32 << 10);
/// Bytes of the buffer of plain data, and of the buffer of encrypted data, of a TLS connection.
pub const TLS_BUFFER_BYTES_MAX: usize = 16 << 10;
/// Bytes of the headers of a request.
pub const HEADER_BYTES_MAX: u32 = 16 << 10;
/// Bytes of the read buffer of a connection that speaks HTTP/1.1; its headers must fit.
pub const HTTP1_BUFFER_BYTES_MAX: usize = 32 << 10;
/// Requests in flight on one connection of HTTP/2.
pub const STREAMS_MAX: u32 = 128;
/// Bytes that a caller may send on one connection before the requests are read.
pub const WINDOW_BYTES_MAX: u32 = 64 << 10;
/// Bytes of an answer that wait in HTTP/2 until the caller takes them, for each request.
pub const SEND_BYTES_MAX: usize = 16 << 10;
/// Bytes that every request is charged beside its headers and its body.
pub const REQUEST_BYTES: usize = 2 << 10;
/// Bytes of the body of a request that asks for no scores.
pub const CONTROL_BYTES_MAX: usize = 64 << 10;
/// Time in which the body of a request must arrive.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(10);
/// Time in which the headers of a request must arrive once its first byte came.
pub const HEADER_TIME_MAX: Duration = Duration::from_secs(10);
/// Time in which a caller must show its certificate.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(5);
/// Time in which requests that were received are answered after SIGTERM.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(5);
/// Longest time to wait that a request may ask for.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Tensors of a request: inputs (keys and offsets of each feature, dense features), their raw
/// values, and requested outputs.
pub const TENSORS_MAX: usize = 3 * (2 * FEATURES_MAX + 1);
/// Dimensions of a tensor.
pub const DIMENSIONS_MAX: usize = 8;
/// The longest latency in the percentiles, µs; a longer one counts as this.
pub const PERCENTILE_US_MAX: u64 = 60_000_000;
/// Slow requests that are kept with where their time went.
pub const SLOWEST_MAX: usize = 32;
/// Age at which a slow request makes room for any newer one.
pub const SLOWEST_AGE_MAX: Duration = Duration::from_secs(600);
/// Seconds of history that the status page shows.
pub const HISTORY_S_MAX: usize = 300;
/// Bytes of a caller's own names in a trace: the id of a request, or its trace id.
pub const TRACE_BYTES_MAX: usize = 128;
/// Threads that open models, for each thread that runs connections.
pub const BLOCKING_THREADS_MAX: usize = 4;
/// The longest time after which a refused caller is told to retry.
pub const RETRY_MAX: Duration = Duration::from_secs(2);
