//! What callers of the daemon may use: connections, memory, rates, and a port of the loopback
//! device.

use crate::targets::{WrongValue, check};
use serde::Deserialize;
use std::net::SocketAddr;

/// What callers of the daemon may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerRules {
    /// Threads that run the connections.
    pub threads: u32,
    /// Open connections. For one more, the connection that was silent longest is closed.
    pub connections_max: u32,
    /// Bytes that all requests and answers in flight may hold together.
    pub bytes_max: u64,
    /// Bytes of the body of one request.
    pub request_bytes_max: u64,
    /// Requests a second on one connection; 0 for no limit.
    pub requests_per_s_max: u32,
    /// The address on which the daemon listens beside its Unix socket.
    pub tcp: Option<SocketAddr>,
}

impl ServerRules {
    /// Finds the first value that is out of its range.
    pub(super) fn check(&self) -> Result<(), WrongValue> {
        let Self { threads, connections_max, bytes_max, request_bytes_max, tcp, .. } = *self;
        check("server.threads", threads, (1..=64).contains(&threads), "must be 1 to 64")?;
        let are_connections = (1..=65_536).contains(&connections_max);
        let problem = "must be 1 to 65536";
        check("server.connections_max", connections_max, are_connections, problem)?;

        // A request is in memory as it came and decoded.
        let problem = "must be at least twice server.request_bytes_max = ".to_owned();
        let problem = problem + &request_bytes_max.to_string();
        let is_room = request_bytes_max <= bytes_max / 2 && request_bytes_max > 0;
        check("server.bytes_max", bytes_max, is_room, problem)?;

        let Some(address) = tcp else { return Ok(()) };
        let problem = "must be an address of the loopback device: a caller there is of this \
                       machine. For other callers put a proxy with mutual TLS before it";
        check("server.tcp", address, address.ip().is_loopback(), problem)
    }
}
