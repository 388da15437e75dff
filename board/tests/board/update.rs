//! The two processes of a car: `sync` stages a published release; `serve` takes it through probe
//! and probation and serves it, while callers ask all the time.

use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::update::Updater;
use hatchback::update::program::Program;
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback_tests::client::Client;
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::repository::keys::{RoleCounts, new_fleet};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::serve::install;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// The daemon; it is killed when its test ends or fails.
struct Daemon(Child);

impl Daemon {
    /// Sends SIGTERM and expects a normal end.
    fn stop(&mut self) {
        Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap();
        assert!(self.0.wait().unwrap().success());
    }

    /// Returns the scheduling classes, as Linux numbers them, of the threads named `name...`.
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
        new_fleet(
            &fleet.at("keys"),
            [RoleCounts { keys: 1, threshold: 1 }; 4],
            fleet.now() + 10_000,
        )
        .unwrap();
        for name in ["base", "cpu"] {
            let file = format!("{name}.toml");
            std::fs::copy(repository("targets").join(&file), fleet.at(&file)).unwrap();
        }
        // The daemon finds models and updates in these folders; `sync` receives them as arguments.
        let [models, updates] = ["models", "updates"].map(|name| fleet.at(name));
        std::fs::create_dir_all(fleet.at("updates/coupon")).unwrap();
        let own = format!(
            "inherits = \"cpu\"\n[update]\nrequests_min = 50\n[machine]\nmodels = {models:?}\n\
             updates = {updates:?}\n"
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

    /// Publishes the demo's model as generation `sequence`, with recorded scores that differ by
    /// `off`.
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
        let job = PackJob::read(&model.join("model.toml"), Overrides::default()).unwrap();
        job.pack(None, &bundle, &mut |_, _| {}).unwrap();
        let change = Change { bundles: vec![bundle], ..Change::default() };
        let store = Objects::directory(&self.at("repository")).unwrap();
        publish(&store, &self.at("keys"), &change, self.now()).unwrap();
    }

    fn daemon(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(self.at("own.toml")).args(args);
        command
    }

    /// Runs `sync` once. Returns whether it succeeded.
    fn sync(&self) -> bool {
        let [flash, from] = ["models/coupon", "repository"].map(|name| self.at(name));
        let [state, root] = ["updates/coupon", "keys/1.root.json"].map(|name| self.at(name));
        let [flash, from, state, root] =
            [&flash, &from, &state, &root].map(|p| p.to_str().unwrap());
        let args =
            ["--flash", flash, "sync", "--once", "--from", from, "--state", state, "--root", root];
        loop {
            let run = self.daemon(&args).output().unwrap();
            // The serving process locks the directory for a moment after its state can be read.
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

    /// Returns the number of recorded starts on the current release that did not end normally.
    fn starts(&self) -> u32 {
        self.status().trials
    }

    fn status(&self) -> UpdateStatus {
        let (directory, flash) = (self.at("updates/coupon"), self.at("models/coupon"));
        let (disk, program) = (disk::system(), Program::this());
        Updater { disk, directory, flash, lineage: None, cohort: 0, program }.status().unwrap()
    }

    /// Asks until the update is in `state`. From the first score on, every answer must be a score.
    fn ask_until(&self, state: UpdateState) -> UpdateStatus {
        while UnixStream::connect(self.at("socket")).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut connection = Client::connect(&self.at("socket")).unwrap();
        let mut scored = false;
        for line in probe().lines().cycle() {
            let answer = ask(&mut connection, "coupon", line);
            scored |= answer["score"].is_array();
            if scored {
                check(line, &answer);
            }
            let status = self.status();
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

/// Returns the answer of `model` to `line`.
fn ask(connection: &mut Client, model: &str, line: &str) -> Value {
    connection.ask(model, line).unwrap()
}

/// Checks that `answer` is the line's recorded score.
fn check(line: &str, answer: &Value) {
    let expected: Value = serde_json::from_str(line).unwrap();
    let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
    assert!(difference.abs() < 0.01, "{answer}");
}

/// A car of two models, one of which has no generation yet.
#[test]
fn a_model_that_waits_for_its_first_release_does_not_keep_others_from_being_served() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);
    install(&fleet.at("1.hatch"), &fleet.at("models/other")).unwrap();
    let mut daemon = fleet.serve();
    while UnixStream::connect(fleet.at("socket")).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }

    let mut connection = Client::connect(&fleet.at("socket")).unwrap();
    let text = probe();
    let line = text.lines().next().unwrap();
    check(line, &ask(&mut connection, "other", line));
    assert_eq!(ask(&mut connection, "coupon", line)["error"], "no model `coupon` is served");
    assert!(fleet.sync());
    assert_eq!(fleet.ask_until(UpdateState::Committed).live.as_deref(), Some("coupon-dlrm@1"));
    // On a slow machine the daemon may have closed the silent connection.
    let mut connection = Client::connect(&fleet.at("socket")).unwrap();
    check(line, &ask(&mut connection, "other", line));

    // Its maintenance starts too, and writes its catalog.
    while !Catalog::path_in(&fleet.at("models/coupon")).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }

    daemon.stop();
}

#[test]
fn a_published_release_is_served_if_its_probe_and_probation_succeed() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);

    // A new car: nothing is live, so nothing is served before its first release.
    let mut daemon = fleet.serve();
    assert!(fleet.sync());

    let status = fleet.ask_until(UpdateState::Committed);
    assert_eq!(status.live.as_deref(), Some("coupon-dlrm@1"));

    // Live, and on probation until it has served its requests.
    fleet.publish(2, 0.0);
    assert!(fleet.sync());

    fleet.ask_until(UpdateState::Probation);
    let status = fleet.ask_until(UpdateState::Committed);
    assert_eq!(status.live.as_deref(), Some("coupon-dlrm@2"));

    // Updates and maintenance run in the idle class, or in the batch class when idle gives them too
    // little time. The workers of models that they loaded run in neither.
    let (own, [batch, idle]) = (daemon.classes("hatchbackd")[0], [3, 5]);
    assert!([[batch], [idle]].contains(&daemon.classes("update").try_into().unwrap()));
    assert!(![batch, idle].contains(&own));
    assert_eq!(daemon.classes("worker"), [own; 2], "two workers");

    // A release whose probe scores differ from the recorded ones is never live.
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
    assert!(matches!(fleet.status().state, UpdateState::Idle | UpdateState::Failed));

    // Once after a normal end, and once after a kill.
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

/// A release is on probation. A start that ends for another reason does not count against the
/// release, and a locked record does not keep the model from being served.
#[test]
fn only_starts_that_die_count_against_a_release() {
    let fleet = Fleet::new();
    fleet.publish(1, 0.0);
    let daemon = fleet.serve();
    assert!(fleet.sync());

    fleet.ask_until(UpdateState::Probation);
    drop(daemon);
    std::fs::remove_file(fleet.at("socket")).unwrap();
    assert_eq!(fleet.starts(), 0, "it was not live when the process started");

    // Another process holds the record's lock throughout.
    let lock =
        disk::system().lock(&fleet.at("models/coupon/updating"), Duration::ZERO).unwrap().unwrap();
    let mut daemon = fleet.serve();

    while UnixStream::connect(fleet.at("socket")).is_err() {
        assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon ended");
        std::thread::sleep(Duration::from_millis(5));
    }

    let mut connection = Client::connect(&fleet.at("socket")).unwrap();
    let text = probe();
    let line = text.lines().next().unwrap();
    check(line, &ask(&mut connection, "coupon", line));

    daemon.stop();
    drop(lock);

    // The folder of the socket does not exist.
    assert!(!fleet.serve_on("nowhere/socket").0.wait().unwrap().success());
    assert_eq!(fleet.starts(), 0);

    // SIGTERM while the daemon opens another model, which never ends: the model's record is a pipe
    // without a writer.
    std::fs::create_dir(fleet.at("models/other")).unwrap();
    assert!(
        Command::new("mkfifo").arg(fleet.at("models/other/live.a")).status().unwrap().success()
    );

    let mut daemon = fleet.serve();
    while fleet.starts() == 0 {
        assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon ended");
        std::thread::sleep(Duration::from_millis(5));
    }

    daemon.stop();
    assert_eq!(fleet.starts(), 0);
    std::fs::remove_dir_all(fleet.at("models/other")).unwrap();

    // A start that is killed does count.
    let daemon = fleet.serve();
    while UnixStream::connect(fleet.at("socket")).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }

    drop(daemon);
    assert_eq!(fleet.starts(), 1);
    std::fs::remove_file(fleet.at("socket")).unwrap();

    // The record of the first answer does not wait until the machine is idle. Without an answer the
    // trial ends after a minute, and with it this wait.
    let mut daemon = fleet.serve();
    let batch = 3;
    while fleet.starts() == 1 || fleet.starts() > 0 && daemon.classes("update") != [batch] {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((fleet.starts(), daemon.classes("update")), (2, vec![batch]));

    let mut connection = Client::connect(&fleet.at("socket")).unwrap();
    check(line, &ask(&mut connection, "coupon", line));
    while fleet.starts() > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }

    daemon.stop();
}
