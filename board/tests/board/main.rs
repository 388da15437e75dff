//! The daemon as a process: machines, updates, serving, boundaries and kills.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod boundary;
mod car;
mod kills;
mod machine;
mod maintenance;
mod serve;
mod update;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

/// Starts `daemon`, which serves at `socket`, and waits until it does.
fn serve(daemon: &mut Command, socket: &Path) -> Child {
    let mut child = daemon.spawn().unwrap();
    while UnixStream::connect(socket).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "the daemon ended before it served");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}
