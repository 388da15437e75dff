//! The daemon as the car runs it: the probe check, scores over the socket, refusal when all workers are held,
//! and a drain on SIGTERM.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tools::pack::{Overrides, pack_file};
use hatchback_tools::serve::lay_on_flash;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

struct Car {
    folder: tempfile::TempDir,
}

impl Car {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("b");
        let spec = repository("tools/demo/coupon/model.toml");
        pack_file(&spec, &bundle, Overrides::default(), &mut |_, _| {}).unwrap();
        lay_on_flash(&bundle, &folder.path().join("flash")).unwrap();
        Self { folder }
    }

    fn daemon(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(repository("targets/cpu.toml"));
        command.arg("--flash").arg(self.folder.path().join("flash")).args(args);
        command
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Starts the daemon and waits for its socket.
    fn serve(&self) -> Child {
        let child = self.daemon(&["serve", "--socket", self.socket().to_str().unwrap()]).spawn().unwrap();
        while UnixStream::connect(self.socket()).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        child
    }
}

fn ask(connection: &mut BufReader<UnixStream>, line: &str) -> Value {
    writeln!(connection.get_mut(), "{line}").unwrap();
    let mut answer = String::new();
    connection.read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// A connection that a worker answers, after those that only looked whether the socket is there were let go.
fn connect(car: &Car, line: &str) -> (BufReader<UnixStream>, Value) {
    loop {
        let mut connection = BufReader::new(UnixStream::connect(car.socket()).unwrap());
        // A refused connection may be closed before its answer is read.
        let _ = writeln!(connection.get_mut(), "{line}");
        let mut answer = String::new();
        if connection.read_line(&mut answer).is_ok() && answer.contains("score") {
            return (connection, serde_json::from_str(&answer).unwrap());
        }
    }
}

#[test]
fn the_probe_set_is_checked() {
    let car = Car::new();
    assert!(car.daemon(&["check"]).status().unwrap().success());
    assert!(!car.daemon(&["check", "--tolerance", "0"]).status().unwrap().success(), "u8 rows are not exact");
}

#[test]
fn scores_over_the_socket_and_drains() {
    let car = Car::new();
    let mut daemon = car.serve();
    let text = std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let (mut first, _) = connect(&car, lines[0]);
    for line in &lines {
        let (expected, answer): (Value, Value) = (serde_json::from_str(line).unwrap(), ask(&mut first, line));
        let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
        assert!(difference.abs() < 0.01 && answer["status"]["fresh"].as_u64().unwrap() > 0);
    }
    assert!(ask(&mut first, "{}")["error"].as_str().unwrap().contains("dense"));
    // targets/cpu.toml has two workers: with both held the third caller is told so at once.
    let (_second, _) = connect(&car, lines[1]);
    let mut answer = String::new();
    BufReader::new(UnixStream::connect(car.socket()).unwrap()).read_line(&mut answer).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&answer).unwrap()["error"], "busy");
    // SIGTERM: the socket goes, the daemon ends by itself although callers are still connected.
    Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status().unwrap();
    assert!(daemon.wait().unwrap().success());
    assert!(!car.socket().exists());
}
