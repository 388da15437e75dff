//! Limits of the daemon's callers: connections, memory, rates, and a port. Callers on other
//! machines need a certificate.

use crate::targets::{WrongValue, check};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Limits of the daemon's callers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerRules {
    /// Threads that run the connections.
    pub threads: u32,
    /// Open connections. A further one closes the connection that was silent longest.
    pub connections_max: u32,
    /// Bytes that all requests and answers in flight may hold together.
    pub bytes_max: u64,
    /// Bytes of the body of one request.
    pub request_bytes_max: u64,
    /// Requests a second on one connection; 0 for no limit.
    pub requests_per_s_max: u32,
    /// The address on which the daemon listens beside its Unix socket.
    pub tcp: Option<SocketAddr>,
    /// The certificates by which the daemon and its callers at that address know each other.
    pub tls: Option<TlsRules>,
}

/// PEM files with the certificates by which the daemon and its callers know each other.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsRules {
    /// The daemon's certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authorities that sign the callers' certificates.
    pub client_ca: PathBuf,
}

impl ServerRules {
    /// Finds the first value that is out of its range.
    pub(super) fn check(&self) -> Result<(), WrongValue> {
        let Self { threads, connections_max, bytes_max, request_bytes_max, .. } = *self;
        check("server.threads", threads, (1..=64).contains(&threads), "must be 1 to 64")?;
        let are_connections = (1..=65_536).contains(&connections_max);
        let problem = "must be 1 to 65536";
        check("server.connections_max", connections_max, are_connections, problem)?;

        let (name, problem) = ("server.request_bytes_max", "must be above 0");
        check(name, request_bytes_max, request_bytes_max > 0, problem)?;
        // A request is in memory twice: as received, and decoded.
        let problem = "must be at least twice server.request_bytes_max = ".to_owned();
        let problem = problem + &request_bytes_max.to_string();
        let is_room = request_bytes_max <= bytes_max / 2;
        check("server.bytes_max", bytes_max, is_room, problem)?;

        match (self.tcp, &self.tls) {
            (None, Some(_)) => {
                check("server.tls", "{..}", false, "is for an address, and server.tcp is not set")
            }
            (Some(address), None) => {
                let problem = "is not on the loopback device: a caller there needs a certificate. \
                               Set server.tls = { certificate, key, client_ca }";
                check("server.tcp", address, address.ip().is_loopback(), problem)
            }
            _ => Ok(()),
        }
    }
}
