//! Every maximum of the front door. The `[server]` section of a target sets those that a machine
//! may choose.

use hatchback::limits::{FEATURES_MAX, NAME_BYTES_MAX};
use std::time::Duration;

/// Bytes that the system buffers for a socket, in each direction. Linux doubles the number.
pub const SOCKET_BYTES_MAX: usize = 16 << 10;
/// Bytes that a connection takes beside the bodies of its requests: buffers of the socket and of
/// its protocol, window of HTTP/2, and the state of its streams.
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
/// One connection holds at most this part of `server.bytes_max`, or one request of the largest
/// size. One with this part of a share is small: for it, any larger connection makes room.
pub const SHARES: usize = 8;
/// One in so many places of connections stays free for callers that come.
pub const SPARE_PLACES: usize = 16;
/// Time in which a part of what a connection holds must move: one byte in `SHARES`, of a body or of
/// an answer. Otherwise its bytes weigh `SHARES` times when a connection is closed to make room.
pub const SILENT_TIME_MIN: Duration = Duration::from_secs(1);
/// Bytes that one connection reads before the others have their turn, at most.
pub const TURN_BYTES_MAX: usize = 16 << 10;
/// Bytes that it reads in its first turn.
pub const TURN_BYTES_FIRST: usize = 1 << 10;
/// Bytes that it reads in a turn if its bytes belong to no request.
pub const TURN_BYTES_MIN: usize = 512;
/// Turns that the others have before a request whose caller has read no answer for long.
pub const TURNS_WAIT_MAX: u32 = 16;
/// Bytes of frames that belong to no request and that a caller may send in `ANSWER_TIME_MAX`.
pub const FLOOD_BYTES_MAX: usize = 1 << 20;
/// Bytes of frames that each request may have beside its headers and its body.
pub const REQUEST_FRAME_BYTES: usize = 1 << 10;
/// Time in which a caller must take an answer; up to twice this time, because connections are
/// examined once in it.
pub const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// Time in which the body of a request must arrive.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(10);
/// Time for which the answer to a refused request waits for the rest of its body.
pub const REST_TIME_MAX: Duration = Duration::from_secs(1);
/// Time in which the headers of a request must arrive. With HTTP/1.1 it begins with the first byte
/// of a connection and after each answer. A connection that is silent from its start stays until
/// places are short.
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
/// Bytes of a caller's trace, `traceparent`; a longer one is dropped.
pub const TRACE_BYTES_MAX: usize = 128;
/// Bytes of a name that a caller sends. A model may have the name of a folder, which has at most
/// 255 bytes; that of an input is the name of a feature with an ending.
pub const CALLER_NAME_BYTES_MAX: usize = 255;
const _: () = assert!(NAME_BYTES_MAX + ".offsets".len() <= CALLER_NAME_BYTES_MAX);
/// Bytes of a request's method and path, for which `REQUEST_BYTES` has room.
pub const PATH_BYTES_MAX: usize = 1 << 10;
/// Bytes of the message of a problem.
pub const MESSAGE_BYTES_MAX: usize = 1 << 10;
/// The longest time after which a refused caller is told to retry.
pub const RETRY_MAX: Duration = Duration::from_secs(2);
