//! The daemon as a car runs it: the check of the probe set, scores over the socket, `busy` when all
//! request slots are taken, several models, and answers to the received requests after SIGTERM.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tools::pack::{Overrides, pack_file};
use hatchback_tools::serve::install;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
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
        install(&bundle, &folder.path().join("flash")).unwrap();
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

    /// Writes a target that inherits from cpu.toml and has this budget.
    fn target(&self, budget: &str) -> PathBuf {
        for name in ["base", "cpu"] {
            let file = format!("{name}.toml");
            std::fs::copy(repository("targets").join(&file), self.folder.path().join(&file))
                .unwrap();
        }
        let path = self.folder.path().join("own.toml");
        std::fs::write(&path, format!("inherits = \"cpu\"\n[budget]\n{budget}\n")).unwrap();
        path
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Returns the command that serves on the CPU's target.
    fn serving(&self) -> Command {
        self.daemon(&["serve", "--socket", self.socket().to_str().unwrap()])
    }

    /// Starts the daemon and waits for its socket.
    fn serve(&self, target: &Path, flash: &[String]) -> Child {
        let socket = self.socket();
        let args = ["serve", "--socket", socket.to_str().unwrap()];
        self.start(self.daemon_on(target, flash, &args))
    }

    /// Runs `command`, which serves, and waits for its socket.
    fn start(&self, mut command: Command) -> Child {
        let mut child = command.spawn().unwrap();
        while UnixStream::connect(self.socket()).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "the daemon ended");
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

/// Checks that `answer` is the line's recorded score, within the error of its tables' codec.
fn check(line: &str, answer: &Value) {
    let expected: Value = serde_json::from_str(line).unwrap();
    let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
    assert!(difference.abs() < 0.01 && answer["status"]["fresh"].as_u64().unwrap() > 0, "{answer}");
}

#[test]
fn the_probe_set_is_checked() {
    let car = Car::new();
    assert!(car.daemon(&["check"]).status().unwrap().success());
    assert!(
        !car.daemon(&["check", "--tolerance", "0"]).status().unwrap().success(),
        "u8 rows are not exact"
    );
}

/// A sample of the probe set has values near the largest f32.
#[test]
fn a_probe_score_that_is_not_a_number_is_named() {
    let car = Car::new();
    let (model, flash) = (car.folder.path().join("coupon"), car.folder.path().join("without"));
    hatchback_tests::versions::copy(&repository("tools/demo/coupon"), &model);
    let mut lines = probe();
    let mut sample: Value = serde_json::from_str(&lines[3]).unwrap();
    sample["dense"].as_array_mut().unwrap().fill(3.4e38.into());
    lines[3] = sample.to_string();
    std::fs::write(model.join("probe.jsonl"), lines.join("\n")).unwrap();
    let bundle = car.folder.path().join("without.hatch");
    pack_file(&model.join("model.toml"), &bundle, Overrides::default(), &mut |_, _| {}).unwrap();
    install(&bundle, &flash).unwrap();

    let flash = [flash.to_str().unwrap().to_owned()];
    let refused =
        car.daemon_on(&repository("targets/cpu.toml"), &flash, &["check"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("probe sample 3"), "{said}");
    assert!(said.contains("score[0] is NaN"), "{said}");
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
    // After SIGTERM the socket is removed and the daemon ends, although callers are connected.
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

#[test]
fn a_caller_that_does_not_read_cannot_keep_the_daemon_from_ending() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let connection = car.connect();
    connection.get_ref().set_write_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    // Until its answers, and then its requests, fill the socket's buffers.
    while (&mut connection.get_ref()).write_all(b"{}\n{}\n{}\n{}\n").is_ok() {}
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_line_longer_than_any_sample_takes_no_memory() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let mut connection = car.connect();
    connection.get_mut().write_all(&vec![b' '; (64 << 10) + 1]).unwrap();
    connection.get_mut().shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(read(&mut connection)["error"], "the line is too long");
    let (line, mut connection) = (&probe()[0], car.connect());
    let padded = format!("{}{line}", " ".repeat((64 << 10) - line.len() - 1));
    check(line, &ask(&mut connection, &padded));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// The caller sends far more than the socket's buffers hold before it reads.
#[test]
fn a_caller_that_sends_an_endless_line_learns_why_it_is_refused() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let mut connection = car.connect();
    connection.get_mut().write_all(&vec![b'['; 4 << 20]).unwrap();
    assert_eq!(read(&mut connection)["error"], "the line is too long");
    assert_eq!(connection.read(&mut [0; 9]).unwrap(), 0, "the connection ends");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// The daemon accepts 256 connections. Those that send nothing, half a line, or take no answers
/// make room for new ones, the longest silent first.
#[test]
fn silent_connections_make_room_for_new_ones() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut good) = (&probe()[0], car.connect());
    check(line, &ask(&mut good, line));
    // A caller that sends requests until the socket's buffers are full, and reads no answer.
    let greedy = car.connect();
    greedy.get_ref().set_write_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    while (&mut greedy.get_ref()).write_all(b"{}\n{}\n{}\n{}\n").is_ok() {}

    let mut silent: Vec<BufReader<UnixStream>> = Vec::new();
    for number in 0..600 {
        // An answer proves that the daemon has accepted the connection: a client that runs ahead
        // of the daemon would make `good` the one that was silent longest.
        let mut connection = car.connect();
        check(line, &ask(&mut connection, line));
        if number % 2 == 0 {
            connection.get_mut().write_all(b"{\"dense\": [").unwrap();
        }
        silent.push(connection);
        if number % 20 == 0 {
            check(line, &ask(&mut good, line));
        }
    }
    let mut new = car.connect();
    check(line, &ask(&mut new, line));
    check(line, &ask(&mut good, line));

    let is_closed = |connection: &mut BufReader<UnixStream>| {
        connection.get_ref().set_nonblocking(true).unwrap();
        connection.read(&mut [0; 9]).is_ok_and(|bytes| bytes == 0)
    };
    assert!(silent[..300].iter_mut().all(is_closed), "the oldest are closed");
    assert!(!silent[500..].iter_mut().any(is_closed), "the newest are open");
    let broken = (&mut greedy.get_ref()).write_all(b"{}\n").unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::BrokenPipe, "the greedy caller is closed");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn callers_that_fail_in_a_loop_do_not_fill_the_log() {
    let car = Car::new();
    let log = car.folder.path().join("log");
    let mut command = car.serving();
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut daemon = car.start(command);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                (0..1000).for_each(|_| {
                    let _ = car.connect().get_mut().write_all(b"{");
                })
            });
        }
    });
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    let log = std::fs::read_to_string(log).unwrap();
    let lines = log.lines().filter(|line| line.contains("a connection ended early")).count();
    assert!((1..100).contains(&lines), "{lines} lines:\n{log}");
    assert!(log.contains(" more since the last such line"), "{log}");
}

/// The caller sends a byte from time to time and never ends its line.
#[test]
fn a_caller_that_never_ends_its_line_cannot_keep_the_daemon_from_ending() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let connection = car.connect();
    std::thread::scope(|scope| {
        let mut sending = connection.get_ref();
        scope.spawn(move || {
            while sending.write_all(b" ").is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        stop(&daemon);
        assert!(daemon.wait().unwrap().success());
    });
}

#[test]
fn the_socket_of_a_killed_daemon_is_taken_over() {
    let car = Car::new();
    let mut daemon = car.start(car.serving());
    // While it answers, a second daemon is refused and the first goes on.
    let refused = car.serving().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("another process answers on it"), "{said}");
    let (line, mut connection) = (&probe()[0], car.connect());
    check(line, &ask(&mut connection, line));

    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(car.socket().exists());
    let mut daemon = car.start(car.serving());
    let mut connection = car.connect();
    check(line, &ask(&mut connection, line));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success() && !car.socket().exists());

    // Whatever else has the socket's name stays.
    std::fs::write(car.socket(), "a letter").unwrap();
    let refused = car.serving().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("of another kind"), "{said}");
    assert_eq!(std::fs::read(car.socket()).unwrap(), b"a letter");
}

#[test]
fn a_daemon_that_ends_leaves_the_socket_of_its_successor() {
    let car = Car::new();
    let mut first = car.start(car.serving());
    std::fs::remove_file(car.socket()).unwrap();
    let mut second = car.start(car.serving());
    stop(&first);
    assert!(first.wait().unwrap().success());
    let (line, mut connection) = (&probe()[0], car.connect());
    check(line, &ask(&mut connection, line));
    stop(&second);
    assert!(second.wait().unwrap().success());
}

/// Values near the largest f32 make NaN of the model's score.
#[test]
fn a_score_that_is_not_a_number_is_an_error() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut connection) = (&probe()[0], car.connect());
    let mut sample: Value = serde_json::from_str(line).unwrap();
    sample["dense"].as_array_mut().unwrap().fill(3.4e38.into());
    let answer = ask(&mut connection, &sample.to_string());
    let error = answer["error"].as_str().unwrap();
    assert!(error.starts_with("sample 0: score[0] is NaN: "), "{answer}");
    assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
    check(line, &ask(&mut connection, line));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_feature_that_a_line_names_twice_is_refused() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut connection) = (&probe()[0], car.connect());
    let twice = line.replacen("\"sparse\":{", "\"sparse\":{\"weather\":[1],", 1);
    assert_ne!(line, &twice);
    let error = ask(&mut connection, &twice)["error"].as_str().unwrap().to_owned();
    assert!(error.contains("`weather` occurs twice"), "{error}");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// One bit of both copies of a model's live record is flipped: its callers receive an error, others
/// are served.
#[test]
fn a_damaged_model_does_not_keep_others_from_being_served() {
    let car = Car::new();
    let damaged = car.folder.path().join("damaged");
    hatchback_tests::versions::copy(&car.folder.path().join("flash"), &damaged);
    for name in ["live.a", "live.b"] {
        let mut record = std::fs::read(damaged.join(name)).unwrap();
        let middle = record.len() / 2;
        record[middle] ^= 1;
        std::fs::write(damaged.join(name), record).unwrap();
    }
    let flash = [format!("damaged={}", damaged.display()), format!("whole={}", car.flash())];
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &flash);
    let (line, mut connection) = (&probe()[0], car.connect());
    let to = |name: &str| line.replacen('{', &format!("{{\"model\": \"{name}\", "), 1);

    check(line, &ask(&mut connection, &to("whole")));
    assert_eq!(ask(&mut connection, &to("damaged"))["error"], "no such model is served");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());

    // Alone, and without updates that could replace it, it keeps the daemon from starting.
    let alone = car.daemon_on(
        &repository("targets/cpu.toml"),
        &flash[..1],
        &["serve", "--socket", "/nowhere"],
    );

    let said = { alone }.output().unwrap();
    assert!(
        !said.status.success() && String::from_utf8_lossy(&said.stderr).contains("damaged/live")
    );
}

/// Each segment is an open file: the daemon raises the limit to the most that is allowed.
#[test]
fn the_limit_of_open_files_is_raised() {
    let car = Car::new();
    let daemon = car.daemon(&["serve", "--socket", car.socket().to_str().unwrap()]);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
        .arg(daemon.get_program())
        .args(daemon.get_args());
    let mut daemon = shell.spawn().unwrap();
    while UnixStream::connect(car.socket()).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().collect();
    assert!(files[0] == files[1] && files[0] != "64", "{limits}");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// One slot, and a request in it that waits for others to join its batch: the next request receives
/// `busy` immediately. Requests that were received before SIGTERM are answered.
#[test]
fn a_request_without_a_slot_is_busy_and_received_requests_are_answered() {
    let car = Car::new();
    let target = car.target("slots = 1\nworkers = 1\nbatch_delay_us_max = 300_000");
    let mut daemon = car.serve(&target, &[car.flash()]);
    let (line, mut first, mut second) = (&probe()[0], car.connect(), car.connect());
    let mut busy = 0;
    while busy == 0 {
        writeln!(first.get_mut(), "{line}").unwrap();
        let answer = ask(&mut second, line);
        busy += u32::from(answer["error"] == "busy");
        // The request that arrived first has the slot.
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
    assert_eq!(ask(&mut connection, line)["error"], "`model` must be one of left, right");
    let unknown = line.replacen('{', "{\"model\": \"middle\", ", 1);
    assert_eq!(ask(&mut connection, &unknown)["error"], "no such model is served");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    // A budget for one model does not hold two.
    let target = car.target(
        "memory_bytes_max = 300_000_000\ncache_bytes_max = 200_000_000\nresident_bytes_max = 0",
    );
    let check = |flash: &[String]| car.daemon_on(&target, flash, &["check"]).output().unwrap();
    assert!(check(&flash[..1]).status.success());
    let refused = String::from_utf8(check(&flash).stderr).unwrap();
    assert!(refused.contains("model `right`: memory_bytes_max = 300000000"), "{refused}");
}
