//! The daemon as the car runs it: the probe check, scores over the socket, `busy` when all request slots are taken,
//! several models, and a drain on SIGTERM.

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
        self.daemon_on(&repository("targets/cpu.toml"), &[self.flash()], args)
    }

    fn daemon_on(&self, target: &Path, flash: &[String], args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(target);
        flash.iter().for_each(|flash| {
            command.arg("--flash").arg(flash);
        });
        command.args(args);
        command
    }

    fn flash(&self) -> String {
        self.folder.path().join("flash").to_str().unwrap().to_owned()
    }

    /// A target like the CPU's with this budget on top.
    fn target(&self, budget: &str) -> PathBuf {
        for name in ["base", "cpu"] {
            let file = format!("{name}.toml");
            std::fs::copy(repository("targets").join(&file), self.folder.path().join(&file)).unwrap();
        }
        let path = self.folder.path().join("own.toml");
        std::fs::write(&path, format!("inherits = \"cpu\"\n[budget]\n{budget}\n")).unwrap();
        path
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Starts the daemon and waits for its socket.
    fn serve(&self, target: &Path, flash: &[String]) -> Child {
        let socket = self.socket();
        let args = ["serve", "--socket", socket.to_str().unwrap()];
        let child = self.daemon_on(target, flash, &args).spawn().unwrap();
        while UnixStream::connect(self.socket()).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        child
    }

    fn connect(&self) -> BufReader<UnixStream> {
        BufReader::new(UnixStream::connect(self.socket()).unwrap())
    }
}

fn stop(daemon: &Child) {
    Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status().unwrap();
}

fn probe() -> Vec<String> {
    let text = std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn read(connection: &mut BufReader<UnixStream>) -> Value {
    let mut answer = String::new();
    connection.read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

fn ask(connection: &mut BufReader<UnixStream>, line: &str) -> Value {
    writeln!(connection.get_mut(), "{line}").unwrap();
    read(connection)
}

/// The line's own score, within what its tables' codec allows.
fn check(line: &str, answer: &Value) {
    let expected: Value = serde_json::from_str(line).unwrap();
    let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
    assert!(difference.abs() < 0.01 && answer["status"]["fresh"].as_u64().unwrap() > 0, "{answer}");
}

#[test]
fn the_probe_set_is_checked() {
    let car = Car::new();
    assert!(car.daemon(&["check"]).status().unwrap().success());
    assert!(!car.daemon(&["check", "--tolerance", "0"]).status().unwrap().success(), "u8 rows are not exact");
}

#[test]
fn many_connections_are_served_and_drained() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let lines = probe();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let mut connection = car.connect();
                lines.iter().for_each(|line| check(line, &ask(&mut connection, line)));
                assert!(ask(&mut connection, "{}")["error"].as_str().unwrap().contains("dense"));
            });
        }
    });
    // SIGTERM: the socket goes, the daemon ends by itself although callers are still connected.
    let (_idle, mut asking) = (car.connect(), car.connect());
    check(&lines[0], &ask(&mut asking, &lines[0]));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    assert!(!car.socket().exists());
}

#[test]
fn a_daemon_whose_socket_was_removed_ends() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    std::fs::remove_file(car.socket()).unwrap();
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// One slot, and a request that waits in it for others to join: the next is told so at once. What was received before
/// the SIGTERM is answered.
#[test]
fn a_request_too_many_is_busy_and_what_was_received_is_answered() {
    let car = Car::new();
    let target = car.target("slots = 1\nworkers = 1\ngather_us = 300_000");
    let mut daemon = car.serve(&target, &[car.flash()]);
    let (line, mut first, mut second) = (&probe()[0], car.connect(), car.connect());
    let mut busy = 0;
    while busy == 0 {
        writeln!(first.get_mut(), "{line}").unwrap();
        let answer = ask(&mut second, line);
        busy += u32::from(answer["error"] == "busy");
        // Whichever came first has the slot.
        let other = read(&mut first);
        check(line, if answer["error"] == "busy" { &other } else { &answer });
    }
    assert_eq!(busy, 1);
    writeln!(first.get_mut(), "{line}").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    stop(&daemon);
    check(line, &read(&mut first));
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn several_models_are_served_by_name_within_one_budget() {
    let car = Car::new();
    let flash = ["left", "right"].map(|name| format!("{name}={}", car.flash()));
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &flash);
    let (line, mut connection) = (&probe()[0], car.connect());
    for name in ["left", "right"] {
        let addressed = line.replacen('{', &format!("{{\"model\": \"{name}\", "), 1);
        check(line, &ask(&mut connection, &addressed));
    }
    assert_eq!(ask(&mut connection, line)["error"], "model: is to be one of left, right");
    let unknown = line.replacen('{', "{\"model\": \"middle\", ", 1);
    assert_eq!(ask(&mut connection, &unknown)["error"], "no such model is served");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    // What holds one does not hold two.
    let target =
        car.target("memory_bytes_max = 300_000_000\ncache_bytes_max = 200_000_000\nresident_bytes_max = 0");
    let check = |flash: &[String]| car.daemon_on(&target, flash, &["check"]).output().unwrap();
    assert!(check(&flash[..1]).status.success());
    let refused = String::from_utf8(check(&flash).stderr).unwrap();
    assert!(refused.contains("model `right`: memory_bytes_max = 300000000"), "{refused}");
}
