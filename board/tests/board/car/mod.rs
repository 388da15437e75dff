//! A car with real processes, for the tests of kills and of a hostile user: six generations of the
//! coupon model, a signed repository, the daemon, the sync process, and a client that checks every
//! answer. Listens on Unix sockets only.

#![allow(clippy::unwrap_used, clippy::expect_used, dead_code)]

use hatchback::clock::SystemClock;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::Pipeline;
use hatchback::{Program, Sample, UpdateState, UpdateStatus, Updater};
use hatchback_tests::client::Client;
use hatchback_tests::models::open_model;
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::repository::keys::{RoleCounts, new_fleet};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::serve::install;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime};

/// Generations of the model.
pub const GENERATIONS: usize = 6;
/// The generation that only the thief of a key has signed.
pub const EVIL: usize = 7;
/// Largest difference of an answer from the score of its generation.
const TOLERANCE: f64 = 2e-6;
/// Least difference between the scores of a sample in two generations.
const DISTANCE: f64 = 2e-5;
/// Time after which a process that does not answer counts as hanging. Answers take milliseconds.
pub const HANGS: Duration = Duration::from_secs(60);
/// Pause between two answers. Each shows the state of milliseconds; more of them take the CPU from
/// the daemon's work on what the test did.
const ASK_PAUSE: Duration = Duration::from_millis(5);
/// The lineage of the model, and its name in the car.
pub const LINEAGE: &str = "coupon-dlrm";
const MODEL: &str = "coupon";
/// Lifetime of the metadata, s.
const LASTING_S: u64 = 30 * 24 * 3600;

/// Returns a path of the source tree.
pub fn tree(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

// The releases.

/// The generations of the model: bundles, and the score of each sample.
pub struct Releases {
    folder: tempfile::TempDir,
    /// The requests, one line each.
    lines: Vec<String>,
    /// For each generation the score of each line.
    scores: Vec<Vec<f64>>,
}

/// The generations of the model. The last is the thief's.
pub static RELEASES: LazyLock<Releases> = LazyLock::new(Releases::new);

impl Releases {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let probe = std::fs::read_to_string(tree("tools/demo/coupon/probe.jsonl")).unwrap();
        let lines: Vec<String> = probe.lines().map(str::to_owned).collect();
        let mut made = Self { folder, lines, scores: Vec::new() };
        (1..=EVIL).for_each(|generation| made.add(generation));

        for line in 0..made.lines.len() {
            let mut scores: Vec<f64> = made.scores.iter().map(|scores| scores[line]).collect();
            scores.sort_by(f64::total_cmp);
            let is_distinct = scores.windows(2).all(|pair| pair[1] - pair[0] > DISTANCE);
            assert!(is_distinct, "line {line}: {scores:?}");
        }
        made
    }

    /// Packs a generation as a snapshot and as the delta onto the one before. Its probe set records
    /// its own scores.
    fn add(&mut self, generation: usize) {
        let model = self.folder.path().join(format!("model{generation}"));
        std::fs::create_dir_all(&model).unwrap();
        for name in ["model.toml", "dense.onnx", "tables.safetensors"] {
            std::fs::copy(tree("tools/demo/coupon").join(name), model.join(name)).unwrap();
        }
        let spec = std::fs::read_to_string(model.join("model.toml")).unwrap();
        let spec = spec.replace("sequence = 1", &format!("sequence = {generation}"));
        std::fs::write(model.join("model.toml"), spec).unwrap();
        change_rows(&model.join("tables.safetensors"), generation);
        std::fs::write(model.join("probe.jsonl"), self.lines.join("\n")).unwrap();

        let (spec, scratch) = (model.join("model.toml"), model.join("scratch"));
        let job = || PackJob::read(&spec, Overrides::default()).unwrap();
        job().pack(None, &scratch, &mut |_, _| {}).unwrap();
        self.scores.push(scores(&scratch, &self.lines));
        let probe = self.lines.iter().zip(self.scores.last().unwrap()).map(|(line, score)| {
            let mut sample: Value = serde_json::from_str(line).unwrap();
            sample["score"] = (*score).into();
            format!("{sample}\n")
        });
        std::fs::write(model.join("probe.jsonl"), probe.collect::<String>()).unwrap();

        let snapshot = self.snapshot(generation);
        job().pack(None, &snapshot, &mut |_, _| {}).unwrap();
        if generation > 1 {
            let parent = install(&self.snapshot(generation - 1), &model.join("parent")).unwrap();
            let delta = self.delta(generation);
            job().pack(Some(&parent), &delta, &mut |_, _| {}).unwrap();
        }
    }

    /// Returns the snapshot of a generation.
    pub fn snapshot(&self, generation: usize) -> PathBuf {
        self.folder.path().join(format!("{generation}.hatch"))
    }

    /// Returns the delta that leads to a generation.
    pub fn delta(&self, generation: usize) -> PathBuf {
        self.folder.path().join(format!("{generation}.delta.hatch"))
    }

    /// Returns the generation whose score for line `at` is in `answer`, if the status is clean.
    fn generation(&self, at: usize, answer: &Value) -> Option<u64> {
        let (score, status) = (answer["score"][0].as_f64()?, &answer["status"]);
        let is_clean = status["fresh"].as_u64()? > 0
            && ["defaulted", "absent", "damaged"].iter().all(|name| status[name] == 0);
        let of = |scores: &Vec<f64>| (scores[at] - score).abs() < TOLERANCE;
        self.scores.iter().position(of).filter(|_| is_clean).map(|at| at as u64 + 1)
    }
}

/// Changes every row of a small table and one row in eleven of a larger one, in the file of the
/// tables.
fn change_rows(path: &Path, generation: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    let head_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let head: Value = serde_json::from_slice(&bytes[8..8 + head_bytes]).unwrap();
    for (table, one_in) in [("destination", 1), ("coupon_x_income_x_age", 11)] {
        let offset = |n: usize| head[table]["data_offsets"][n].as_u64().unwrap() as usize;
        let row_bytes = 4 * head[table]["shape"][1].as_u64().unwrap() as usize;
        let rows = &mut bytes[8 + head_bytes..][offset(0)..offset(1)];
        for (n, row) in rows.chunks_mut(row_bytes).enumerate() {
            let is_changed = (n + generation).is_multiple_of(one_in);
            for value in row.chunks_mut(4).filter(|_| is_changed) {
                let old = f32::from_le_bytes(value.try_into().unwrap());
                value.copy_from_slice(&(old + 0.02 * (generation - 1) as f32).to_le_bytes());
            }
        }
    }
    std::fs::write(path, bytes).unwrap();
}

/// Returns the scores of `lines` by the bundle at `bundle`.
fn scores(bundle: &Path, lines: &[String]) -> Vec<f64> {
    let flash = bundle.with_extension("flash");
    install(bundle, &flash).unwrap();
    let model = Arc::new(open_model(&flash, Budget::default()).unwrap());
    let pipeline = Pipeline::new(Arc::clone(&model), Arc::new(SystemClock::default())).unwrap();
    let score = |line: &String| {
        let mut batch = model.batch();
        batch.push(model.schema(), &Sample::from_json(line, model.schema()).unwrap()).unwrap();
        let ticket = pipeline.submit(&batch, None).unwrap();
        f64::from(ticket.wait().unwrap().scores().values[0])
    };
    lines.iter().map(score).collect()
}

/// The keys and the repository of a fleet, in one folder.
pub struct Fleet(pub PathBuf);

impl Fleet {
    /// Makes the keys of a fleet in `folder`.
    pub fn new(folder: &Path) -> Self {
        let fleet = Self(folder.to_owned());
        let counts = [RoleCounts { keys: 1, threshold: 1 }; 4];
        new_fleet(&fleet.keys(), counts, now() + LASTING_S).unwrap();
        fleet
    }

    pub fn keys(&self) -> PathBuf {
        self.0.join("keys")
    }

    pub fn repository(&self) -> PathBuf {
        self.0.join("repository")
    }

    /// Publishes bundles, and makes the repository readable to all.
    pub fn publish(&self, bundles: Vec<PathBuf>) {
        self.change(Change { bundles, ..Change::default() });
    }

    /// Publishes `change`.
    pub fn change(&self, change: Change) {
        let change = Change { expires_s: LASTING_S, ..change };
        let store = Objects::directory(&self.repository()).unwrap();
        publish(&store, &self.keys(), &change, now()).unwrap();
        let open = Command::new("chmod").args(["-R", "a+rX"]).arg(self.repository()).status();
        assert!(open.unwrap().success());
    }
}

// The processes.

/// A user and group by number.
#[derive(Clone, Copy)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

/// A process that is killed when it is dropped.
pub struct Process(pub Child);

impl Process {
    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Sends SIGTERM. Returns whether the process ended normally.
    pub fn stop(&mut self) -> bool {
        Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap();
        let start = Instant::now();
        while self.is_running() {
            assert!(start.elapsed() < HANGS, "the process does not end after SIGTERM");
            std::thread::sleep(Duration::from_millis(2));
        }
        self.0.wait().unwrap().success()
    }

    /// Returns the most memory that the process had, bytes.
    pub fn memory_bytes_max(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A car: its directories, and the users of its two processes.
pub struct Car {
    folder: PathBuf,
    pub daemon_user: Option<User>,
    pub sync_user: Option<User>,
    client: Option<Client>,
    /// Number of requests sent; the next request has the next line.
    sent: usize,
    /// Right answers.
    pub answers: u64,
}

impl Car {
    /// Makes a car in `folder`. A release must serve `requests_min` requests on probation.
    pub fn new(folder: &Path, requests_min: u64) -> Self {
        let car = Self {
            folder: folder.to_owned(),
            daemon_user: None,
            sync_user: None,
            client: None,
            sent: 0,
            answers: 0,
        };
        for path in [car.flash(), car.sync_directory(), folder.join("etc"), folder.join("run")] {
            std::fs::create_dir_all(path).unwrap();
        }
        for name in ["base.toml", "cpu.toml"] {
            std::fs::copy(tree("targets").join(name), folder.join("etc").join(name)).unwrap();
        }
        // Another process copies. A child that another thread starts here could still have the
        // copy open for writing, and a file that is open for writing cannot be executed.
        let mut copy = Command::new("cp");
        copy.arg(env!("CARGO_BIN_EXE_hatchbackd")).arg(folder.join("etc/hatchbackd"));
        assert!(copy.status().unwrap().success(), "{copy:?}");
        car.set_requests_min(requests_min);
        car
    }

    /// Writes the target with this `requests_min`.
    pub fn set_requests_min(&self, requests_min: u64) {
        let [models, updates] = ["models", "updates"].map(|name| self.folder.join(name));
        let target = format!(
            "inherits = \"cpu\"\n[budget]\nmemory_bytes_max = 67_108_864\n\
             cache_bytes_max = 262_144\nresident_bytes_max = 65_536\nslots = 16\nbatch_max = 16\n\
             misses_max = 1024\n[link]\npoll_minutes = 1\n[update]\n\
             requests_min = {requests_min}\n[machine]\nmodels = {models:?}\nupdates = {updates:?}\n"
        );
        std::fs::write(self.folder.join("etc/car.toml"), target).unwrap();
    }

    /// Trusts the first root of `fleet`.
    pub fn trust(&self, fleet: &Fleet) {
        let (from, to) = (fleet.keys().join("1.root.json"), self.root());
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o644)).unwrap();
    }

    pub fn flash(&self) -> PathBuf {
        self.folder.join("models").join(MODEL)
    }

    pub fn sync_directory(&self) -> PathBuf {
        self.folder.join("updates").join(MODEL)
    }

    pub fn root(&self) -> PathBuf {
        self.folder.join("etc/1.root.json")
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("run/socket")
    }

    /// Returns the log of `process`.
    fn log(&self, process: &str) -> PathBuf {
        self.folder.join(format!("{process}.log"))
    }

    /// Returns the end of both logs.
    pub fn logs(&self) -> String {
        let end = |process| {
            let text = std::fs::read(self.log(process)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            format!("{process}:\n{}\n", lines[lines.len().saturating_sub(12)..].join("\n"))
        };
        [end("daemon"), end("sync")].concat()
    }

    fn command(&self, user: Option<User>, log: &str) -> Command {
        let log = File::options().create(true).append(true).open(self.log(log)).unwrap();
        let mut command = Command::new("sh");
        // A process that reads an endless file must not take all memory of the machine.
        command.args(["-c", "umask 027; ulimit -v 4194304; exec \"$0\" \"$@\""]);
        command.arg(self.folder.join("etc/hatchbackd"));
        command.arg("--target").arg(self.folder.join("etc/car.toml"));
        command.stdout(log.try_clone().unwrap()).stderr(log).current_dir("/");
        if let Some(User { uid, gid }) = user {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// Starts the daemon.
    pub fn serve(&mut self) -> Process {
        self.client = None;
        let _ = std::fs::remove_file(self.socket());
        let mut command = self.command(self.daemon_user, "daemon");
        command.arg("serve").arg("--socket").arg(self.socket()).arg("--root").arg(self.root());
        Process(command.spawn().unwrap())
    }

    /// Starts a sync process that ends after one poll.
    pub fn sync_from(&self, repository: &Path) -> Process {
        let mut command = self.command(self.sync_user, "sync");
        command.arg("--flash").arg(self.flash()).args(["sync", "--once", "--from"]).arg(repository);
        command.arg("--state").arg(self.sync_directory()).arg("--root").arg(self.root());
        Process(command.spawn().unwrap())
    }

    /// Asks once. Returns the generation that answered; `None` if no answer came.
    ///
    /// # Panics
    /// If the answer is not exactly one generation's, or if none comes although the daemon lives.
    pub fn ask(&mut self) -> Option<u64> {
        if self.client.is_none() {
            let client = Client::connect(&self.socket()).ok()?;
            client.stream().set_read_timeout(Some(HANGS)).unwrap();
            self.client = Some(client);
        }
        let (releases, client) = (&*RELEASES, self.client.as_mut()?);
        let at = self.sent % releases.lines.len();
        self.sent += 1;
        let answer = match client.ask(MODEL, &releases.lines[at]) {
            Ok(answer) => answer,
            Err(e) => {
                let is_timeout = matches!(
                    e.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                );
                assert!(!is_timeout, "no answer in {HANGS:?}\n{}", self.logs());
                self.client = None;
                return None;
            }
        };
        if answer["code"] == 404 {
            return None;
        }
        let generation = releases.generation(at, &answer);
        assert!(
            generation.is_some_and(|g| g != EVIL as u64),
            "line {at}: {answer} is of generation {generation:?}; scores {:?}\n{}",
            releases.scores.iter().map(|scores| scores[at]).collect::<Vec<f64>>(),
            self.logs()
        );
        self.answers += 1;
        generation
    }

    /// Asks for `time`, with pauses. Returns the generation that answered last.
    pub fn ask_for(&mut self, time: Duration) -> Option<u64> {
        let (start, mut last) = (Instant::now(), None);
        while start.elapsed() < time {
            last = self.ask().or(last);
            std::thread::sleep(ASK_PAUSE);
        }
        last
    }

    /// Asks until an answer comes. Returns its generation; `None` if the daemon ended or hangs.
    pub fn first_answer(&mut self, daemon: &mut Process) -> Option<u64> {
        let start = Instant::now();
        while start.elapsed() < HANGS && daemon.is_running() {
            if let Some(generation) = self.ask() {
                return Some(generation);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }

    // Records on disk.

    fn updater(&self) -> Updater {
        Updater {
            disk: disk::system(),
            directory: self.sync_directory(),
            flash: self.flash(),
            lineage: None,
            cohort: 0,
            program: Program::this(),
        }
    }

    /// Returns the state of the update.
    pub fn status(&self) -> UpdateStatus {
        self.updater().status().unwrap_or_default()
    }

    /// Returns whether the car has committed `generation` and waits for nothing.
    pub fn is_at(&self, generation: usize) -> bool {
        let status = self.status();
        matches!(status.state, UpdateState::Committed | UpdateState::Idle)
            && status.live == Some(format!("{LINEAGE}@{generation}"))
    }

    /// Returns the recorded marks against releases. There must be none, because every published
    /// release is good.
    pub fn marks(&self) -> Vec<String> {
        let history = self.status().history.into_iter();
        let rolled = history.filter(|event| event.state == UpdateState::RollingBack);
        let mut marks: Vec<String> =
            rolled.map(|e| format!("{:?} {}", e.release, e.note.unwrap_or_default())).collect();
        marks.extend(self.status().refused);
        marks
    }
}
