//! The two processes of a car: `sync` stages what was published, `serve` takes it through its probe
//! and its probation and serves it, while callers ask all the time.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::update::state::{UpdateState, UpdateStatus};
use hatchback_tools::pack::{Overrides, pack_file};
use hatchback_tools::repository::keys::new_fleet;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::serve::lay_on_flash;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Ends with its test, whatever becomes of that.
struct Daemon(Child);

impl Daemon {
    /// Asks it to end, which it does in good order.
    fn stop(&mut self) {
        Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap();
        assert!(self.0.wait().unwrap().success());
    }

    /// The scheduling classes, as Linux numbers them, of the threads whose names begin with `name`.
    fn classes(&self, name: &str) -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap().flatten();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        let of = stats.filter_map(|stat| {
            let (_, rest) = stat.split_once('(')?;
            let (called, fields) = rest.rsplit_once(") ")?;
            called.starts_with(name).then(|| fields.split(' ').nth(38)?.parse().ok())?
        });
        of.collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Fleet {
    folder: tempfile::TempDir,
}

impl Fleet {
    fn new() -> Self {
        let fleet = Self { folder: tempfile::tempdir().unwrap() };
        new_fleet(&fleet.at("keys"), [(1, 1); 4], fleet.now() + 10_000).unwrap();
        for name in ["base", "cpu"] {
            let file = format!("{name}.toml");
            std::fs::copy(repository("targets").join(&file), fleet.at(&file)).unwrap();
        }
        // The daemon finds model and updates by itself; the syncing process is told.
        let [models, updates] = ["models", "updates"].map(|name| fleet.at(name));
        std::fs::create_dir_all(fleet.at("updates/coupon")).unwrap();
        let own = format!(
            "inherits = \"cpu\"\n[update]\nrequests_min = 50\n[machine]\nmodels = {models:?}\nupdates = {updates:?}\n"
        );
        std::fs::write(fleet.at("own.toml"), own).unwrap();
        fleet
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn now(&self) -> u64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
    }

    /// Publishes the demo's model as generation `sequence`, its recorded scores off by so much.
    fn publish(&self, sequence: u64, off: f64) {
        let model = self.at(&format!("model{sequence}"));
        std::fs::create_dir_all(&model).unwrap();
        for entry in std::fs::read_dir(repository("tools/demo/coupon")).unwrap() {
            let path = entry.unwrap().path();
            let Ok(bytes) = std::fs::read(&path) else { continue };
            std::fs::write(model.join(path.file_name().unwrap()), bytes).unwrap();
        }
        let spec = std::fs::read_to_string(model.join("model.toml")).unwrap();
        let spec = spec.replace("sequence = 1", &format!("sequence = {sequence}"));
        std::fs::write(model.join("model.toml"), spec).unwrap();
        let probe = std::fs::read_to_string(model.join("probe.jsonl")).unwrap();
        let moved = probe.lines().map(|line| {
            let mut sample: Value = serde_json::from_str(line).unwrap();
            sample["score"] = (sample["score"].as_f64().unwrap() + off).into();
            format!("{sample}\n")
        });
        std::fs::write(model.join("probe.jsonl"), moved.collect::<String>()).unwrap();
        let bundle = self.at(&format!("{sequence}.hatch"));
        pack_file(&model.join("model.toml"), &bundle, Overrides::default(), &mut |_, _| {})
            .unwrap();
        let change = Change { bundles: vec![bundle], ..Change::default() };
        let store = Objects::directory(&self.at("repository")).unwrap();
        publish(&store, &self.at("keys"), &change, self.now()).unwrap();
    }

    fn daemon(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(self.at("own.toml")).args(args);
        command
    }

    /// One look of the syncing process.
    fn sync(&self) -> bool {
        let [flash, from] = ["models/coupon", "repository"].map(|name| self.at(name));
        let [state, root] = ["updates/coupon", "keys/1.root.json"].map(|name| self.at(name));
        let [flash, from, state, root] =
            [&flash, &from, &state, &root].map(|p| p.to_str().unwrap());
        let args =
            ["--flash", flash, "sync", "--once", "--from", from, "--state", state, "--root", root];
        loop {
            let run = self.daemon(&args).output().unwrap();
            // The serving process holds the directory for a moment after its state can be read.
            if !String::from_utf8_lossy(&run.stderr).contains("another process is syncing") {
                return run.status.success();
            }
        }
    }

    fn serve(&self) -> Daemon {
        self.serve_on("socket")
    }

    fn serve_on(&self, socket: &str) -> Daemon {
        let (socket, root) = (self.at(socket), self.at("keys/1.root.json"));
        let [socket, root] = [&socket, &root].map(|p| p.to_str().unwrap());
        Daemon(self.daemon(&["serve", "--socket", socket, "--root", root]).spawn().unwrap())
    }

    /// Starts with the release in hand that were counted and did not end.
    fn starts(&self) -> u32 {
        UpdateStatus::read(disk::system().as_ref(), &self.at("updates/coupon")).unwrap().starts
    }

    /// Asks over and over until the update is in `state`; from the first score on every answer is
    /// one.
    fn ask_until(&self, state: UpdateState) -> UpdateStatus {
        while UnixStream::connect(self.at("socket")).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut connection = BufReader::new(UnixStream::connect(self.at("socket")).unwrap());
        let mut scored = false;
        for line in probe().lines().cycle() {
            // Who asks without a pause leaves nothing to an update, which runs where nobody else
            // wants the CPU.
            std::thread::sleep(Duration::from_millis(1));
            let answer = ask(&mut connection, "coupon", line);
            scored |= answer["score"].is_array();
            if scored {
                check(line, &answer);
            }
            let status =
                UpdateStatus::read(disk::system().as_ref(), &self.at("updates/coupon")).unwrap();
            if scored && status.state == state {
                return status;
            }
        }
        unreachable!()
    }
}

fn probe() -> String {
    std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap()
}

/// What `model` answers to `line`.
fn ask(connection: &mut BufReader<UnixStream>, model: &str, line: &str) -> Value {
    let addressed = line.replacen('{', &format!("{{\"model\": {model:?}, "), 1);
    writeln!(connection.get_mut(), "{addressed}").unwrap();
    let mut answer = String::new();
    connection.read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// The line's own score.
fn check(line: &str, answer: &Value) {
    let expected: Value = serde_json::from_str(line).unwrap();
    let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
    assert!(difference.abs() < 0.01, "{answer}");
}

/// A car of two models, one of which has none yet.
#[test]
fn a_model_that_waits_for_its_first_release_holds_up_no_other() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);
    lay_on_flash(&fleet.at("1.hatch"), &fleet.at("models/other")).unwrap();
    let mut daemon = fleet.serve();
    while UnixStream::connect(fleet.at("socket")).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut connection = BufReader::new(UnixStream::connect(fleet.at("socket")).unwrap());
    let (text, mut first) = (probe(), String::new());
    let line = text.lines().next().unwrap();
    check(line, &ask(&mut connection, "other", line));
    assert_eq!(ask(&mut connection, "coupon", line)["error"], "no such model is served");
    // Who names none is not given another model's score, although one alone is served.
    writeln!(connection.get_mut(), "{line}").unwrap();
    connection.read_line(&mut first).unwrap();
    assert!(first.contains("model: is to be one of other"), "{first}");
    assert!(fleet.sync());
    assert_eq!(fleet.ask_until(UpdateState::Committed).live.as_deref(), Some("coupon-dlrm@1"));
    check(line, &ask(&mut connection, "other", line));
    // Its upkeep begins too, and writes its catalog.
    while !Catalog::place(&fleet.at("models/coupon")).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
}

#[test]
fn what_is_published_is_served_if_it_proves_itself() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);
    // A new car: nothing is live, so nothing is served before its first release.
    let mut daemon = fleet.serve();
    assert!(fleet.sync());
    let status = fleet.ask_until(UpdateState::Committed);
    assert_eq!(status.live.as_deref(), Some("coupon-dlrm@1"));
    // Live meanwhile, and watched until it has served its requests.
    fleet.publish(2, 0.0);
    assert!(fleet.sync());
    fleet.ask_until(UpdateState::Probation);
    let status = fleet.ask_until(UpdateState::Committed);
    assert_eq!(status.live.as_deref(), Some("coupon-dlrm@2"));
    // Updates and upkeep run where nobody else wants the CPU; who serves what they brought does
    // not.
    let (own, idle) = (daemon.classes("hatchbackd")[0], 5);
    assert_eq!(daemon.classes("update"), [idle]);
    assert_eq!(daemon.classes("worker"), [own; 2], "two workers");
    // One that scores other than its trainer said is never live.
    fleet.publish(3, 0.5);
    assert!(fleet.sync());
    let status = fleet.ask_until(UpdateState::Failed);
    assert_eq!(status.live.as_deref(), Some("coupon-dlrm@2"));
    assert!(
        status.error.unwrap().contains("a probe score differs by 0.5"),
        "{:?}",
        status.history.last()
    );
    assert!(fleet.sync());
    assert!(
        UpdateStatus::read(disk::system().as_ref(), &fleet.at("updates/coupon"))
            .unwrap()
            .state
            .is_fetching()
    );
    // In good order, and again after a kill.
    daemon.stop();
    let daemon = fleet.serve();
    fleet.publish(4, 0.0);
    assert!(fleet.sync());
    fleet.ask_until(UpdateState::Probation);
    drop(daemon);
    let _ = std::fs::remove_file(fleet.at("socket"));
    let mut daemon = fleet.serve();
    assert_eq!(fleet.ask_until(UpdateState::Committed).live.as_deref(), Some("coupon-dlrm@4"));
    daemon.stop();
}

/// With a release on probation: what ends a start for another reason is no sign against it, and
/// whoever holds the record keeps nothing from being served.
#[test]
fn only_starts_that_die_count_against_a_release() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);
    let daemon = fleet.serve();
    assert!(fleet.sync());
    fleet.ask_until(UpdateState::Probation);
    drop(daemon);
    std::fs::remove_file(fleet.at("socket")).unwrap();
    assert_eq!(fleet.starts(), 0, "it was not there when the start began");
    // The record is somebody else's all the time.
    let lock = disk::system().lock(&fleet.at("updates/coupon/lock")).unwrap().unwrap();
    let mut daemon = fleet.serve();
    while UnixStream::connect(fleet.at("socket")).is_err() {
        assert!(daemon.0.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut connection = BufReader::new(UnixStream::connect(fleet.at("socket")).unwrap());
    let text = probe();
    let line = text.lines().next().unwrap();
    check(line, &ask(&mut connection, "coupon", line));
    daemon.stop();
    drop(lock);
    // There is no place for the socket.
    assert!(!fleet.serve_on("nowhere/socket").0.wait().unwrap().success());
    assert_eq!(fleet.starts(), 0);
    // Told to stop while another model is opened, which does not end: its record is a pipe that
    // nobody writes to.
    std::fs::create_dir(fleet.at("models/other")).unwrap();
    assert!(Command::new("mkfifo").arg(fleet.at("models/other/live")).status().unwrap().success());
    let mut daemon = fleet.serve();
    while fleet.starts() == 0 {
        assert!(daemon.0.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
    assert_eq!(fleet.starts(), 0);
    std::fs::remove_dir_all(fleet.at("models/other")).unwrap();
    // One that is killed does count.
    let daemon = fleet.serve();
    while UnixStream::connect(fleet.at("socket")).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(daemon);
    assert_eq!(fleet.starts(), 1);
}
