//! A peer in Python: a program of `bench/peers` in the environment that `bench/peers/setup` makes.
//! The bench and the program exchange lines of JSON. Also the means of a fair comparison: one core
//! for all engines, and CPU time. Never starts a measurement.

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// Program that makes the peers ready.
pub const SETUP: &str = "bench/peers/setup";
/// Environment that [`SETUP`] makes.
pub const VENV: &str = "bench/peers/venv";

/// A program of `bench/peers`.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    name: &'static str,
    text: &'static str,
}

/// Embedding bags of PyTorch and FBGEMM.
pub const LOOKUPS: Program =
    Program { name: "lookups.py", text: include_str!("../peers/lookups.py") };
/// A whole DLRM in ONNX Runtime and PyTorch.
pub const DLRM: Program = Program { name: "dlrm.py", text: include_str!("../peers/dlrm.py") };
/// Eight more model families in ONNX Runtime.
pub const FAMILIES: Program =
    Program { name: "families.py", text: include_str!("../peers/families.py") };
/// The dense networks of one driver's candidates in ONNX Runtime.
pub const CANDIDATES: Program =
    Program { name: "candidates.py", text: include_str!("../peers/candidates.py") };
/// Functions that all programs import.
const SHARED: Program = Program { name: "peer.py", text: include_str!("../peers/peer.py") };

/// A program's answer to `setup`.
#[derive(Deserialize)]
pub struct PeerAbout {
    /// Names of its engines.
    pub engines: Vec<String>,
    /// Versions of its libraries.
    pub about: String,
}

/// A program's answer to `round`.
#[derive(Deserialize)]
pub struct RoundTimes {
    /// CPU time of each call, µs.
    pub times_us: Vec<f64>,
}

/// A program's answer to `scores`.
#[derive(Deserialize)]
pub struct PeerScores {
    /// Scores, sample after sample.
    pub scores: Vec<f32>,
}

/// The best percentiles over several rounds, each from the round that is best in it, µs.
#[derive(Clone, Copy)]
pub struct BestTimes {
    /// Half of the calls take less.
    pub p50_us: f64,
    /// 99 % of the calls take less.
    pub p99_us: f64,
}

impl Default for BestTimes {
    fn default() -> Self {
        Self { p50_us: f64::INFINITY, p99_us: f64::INFINITY }
    }
}

impl BestTimes {
    /// Adds the times of one round.
    pub fn add_round(&mut self, mut times_us: Vec<f64>) {
        self.p50_us = self.p50_us.min(percentile(&mut times_us, 0.5));
        self.p99_us = self.p99_us.min(percentile(&mut times_us, 0.99));
    }
}

/// Longest time that a program may take for one answer. A setup fills gigabytes.
const ANSWER_MAX: Duration = Duration::from_secs(1200);

/// A process that answers on its output what it is asked on its input, in lines.
pub struct LineProgram {
    child: Child,
    lines: Receiver<String>,
    input: Option<ChildStdin>,
    answer_max: Duration,
}

impl LineProgram {
    /// Starts `command`.
    ///
    /// # Errors
    /// The system does not start it.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let spawned = command.spawn();
        let named = || command.get_program().to_string_lossy().into_owned();
        let mut child = spawned.with_context(named)?;
        let output = child.stdout.take().context("no standard output")?;
        let (to, lines) = mpsc::channel();
        // Only another thread can wait for a line with a limit of time.
        thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.try_for_each(|line| to.send(line))
        });
        let input = child.stdin.take();
        Ok(Self { child, lines, input, answer_max: ANSWER_MAX })
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The program has ended.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the program has no input")?;
        writeln!(input, "{line}").context("the program has ended")
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// The program ends, or takes too long.
    pub fn line(&mut self) -> Result<String> {
        match self.lines.recv_timeout(self.answer_max) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the program gave no answer within {:?}", self.answer_max)
            }
            Err(RecvTimeoutError::Disconnected) => {
                // Its output is closed, so it is ending; without input, it has nothing to wait for.
                self.input = None;
                bail!("the program ended: {}", self.child.wait()?)
            }
        }
    }
}

impl Drop for LineProgram {
    fn drop(&mut self) {
        // A program that hangs would not end with its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running program.
pub struct Peer {
    program: LineProgram,
    _programs: TempDir,
}

impl Peer {
    /// Starts `program` with the Python of the environment `venv`.
    ///
    /// # Errors
    /// The environment has no Python, or Python does not start.
    pub fn start(venv: &Path, program: Program) -> Result<Self> {
        let python = venv.join("bin/python");
        ensure!(python.exists(), "no {}", python.display());
        let programs = tempfile::tempdir().context("a temporary folder")?;
        for Program { name, text } in [program, SHARED] {
            std::fs::write(programs.path().join(name), text)?;
        }

        let mut command = Command::new(&python);
        command.arg(programs.path().join(program.name)).stderr(Stdio::null());
        Ok(Self { program: LineProgram::start(command)?, _programs: programs })
    }

    /// Sends one line of `kind` and waits for the answer.
    ///
    /// # Errors
    /// The program has ended, takes too long, answers with an error, or answers with other fields
    /// than `T` has.
    pub fn request<T: DeserializeOwned>(
        &mut self,
        kind: &str,
        options: &impl Serialize,
    ) -> Result<T> {
        self.program.send(&json!({ kind: options }).to_string())?;
        let answer: Value = serde_json::from_str(&self.program.line()?)?;
        if let Some(error) = answer.get("error") {
            bail!("{error}");
        }
        serde_json::from_value(answer).with_context(|| format!("an answer to {kind}"))
    }
}

/// Pins this thread, and every process that it starts later, to one core: the last one that it may
/// use.
///
/// # Errors
/// The system refuses to set the affinity.
pub fn stay_on_one_core() -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    let last = (0..CpuSet::MAX_CPU).rev().find(|&core| allowed.is_set(core)).context("no core")?;
    let mut one = CpuSet::new();
    one.set(last);
    Ok(sched_setaffinity(None, &one)?)
}

/// Returns the CPU time that all threads of this process have used, µs.
pub fn cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// Returns the time that `share` of the calls do not exceed; NaN without calls. Sorts `times_us`.
pub fn percentile(times_us: &mut [f64], share: f64) -> f64 {
    times_us.sort_by(f64::total_cmp);
    let at = (times_us.len() as f64 * share) as usize;
    times_us.get(at.min(times_us.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn percentiles() {
        let mut times: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!((percentile(&mut times, 0.5), percentile(&mut times, 0.99)), (101.0, 199.0));
        assert_eq!(percentile(&mut [3.0], 0.99), 3.0);
        assert!(percentile(&mut [], 0.5).is_nan());
    }

    /// An environment whose "Python" is this shell script.
    fn environment(script: &str) -> TempDir {
        let venv = tempfile::tempdir().unwrap();
        let python = venv.path().join("bin/python");
        std::fs::create_dir(venv.path().join("bin")).unwrap();
        std::fs::write(&python, format!("#!/bin/sh\n{script}")).unwrap();
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        venv
    }

    #[test]
    fn lines_go_both_ways() {
        let venv = environment(
            "test -s \"$1\" || exit 1; while read -r line; do echo \"{\\\"got\\\": $line}\"; done",
        );
        let mut peer = Peer::start(venv.path(), DLRM).unwrap();
        for n in [1, 2] {
            let answer: Value = peer.request("round", &json!({ "n": n })).unwrap();
            assert_eq!(answer, json!({ "got": { "round": { "n": n } } }));
        }
    }

    #[test]
    fn errors_of_the_program_are_reported() {
        let refused = |script: &str| {
            let venv = environment(script);
            let mut peer = Peer::start(venv.path(), LOOKUPS).unwrap();
            peer.request::<Value>("setup", &json!({})).unwrap_err().to_string()
        };
        assert!(refused("read -r line; echo '{\"error\": \"no AVX2\"}'").contains("no AVX2"));
        assert!(refused("read -r line; exit 3").contains("ended: exit status: 3"));
        let venv = environment("read -r line; exec sleep 1000");
        let mut peer = Peer::start(venv.path(), LOOKUPS).unwrap();
        peer.program.answer_max = Duration::from_millis(50);
        let silent = peer.request::<Value>("setup", &json!({})).unwrap_err().to_string();
        assert!(silent.contains("no answer within 50ms"), "{silent}");
        drop(peer);

        let nowhere = Peer::start(Path::new("/nonexistent"), DLRM).err().unwrap().to_string();
        assert!(nowhere.contains("/nonexistent/bin/python"));
    }
}
