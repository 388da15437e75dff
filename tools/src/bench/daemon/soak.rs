//! `bench daemon --soak MINUTES`: good callers, loads and unloads of a second model, and hostile
//! callers, all at the same time. Reports memory, open files, latency and errors over the run. A
//! good caller must never see an error.

use super::caller::{Caller, Outcome, on_event_loop, repository_request};
use super::front_door::{Daemon, DaemonStep, MODEL, Requests, WayTotals, call_grpc};
use crate::bench::bars::Bar;
use crate::bench::results::{BenchReport, HostMachine, open_files, prints_tables, resident_memory};
use crate::report;
use crate::say;
use anyhow::{Result, anyhow};
use hatchback::model::budget::Budget;
use hatchback_server::ModelFolder;
use hyper::body::Bytes;
use serde::Serialize;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The model that is loaded and unloaded.
const OTHER: &str = "other";
/// Good callers.
const CALLERS: u32 = 4;
/// Parts of the run; the first warms up.
const PARTS: u32 = 6;
/// The most that memory may grow from the second part to the last, per cent.
const GROWTH_PERCENT_MAX: f64 = 2.0;
/// Hostile callers that are connected at the same time.
const HOSTILE: usize = 32;

/// The figures of one part of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct SoakPart {
    /// The good callers.
    callers: DaemonStep,
    /// Memory of the process at the end, bytes.
    memory_bytes: u64,
    /// Open files at the end.
    open_files: u64,
    /// Loads and unloads until then.
    changes: u64,
    /// Connections of hostile callers until then.
    attacks: u64,
}

/// What runs beside the good callers.
#[derive(Default)]
struct Beside {
    is_over: AtomicBool,
    changes: AtomicU64,
    attacks: AtomicU64,
}

/// Runs the soak for `time`.
///
/// # Errors
/// A good caller sees an error, or a load or unload fails.
pub fn run(
    json: Option<&PathBuf>,
    daemon: &Daemon,
    directory: &Path,
    budget: Budget,
    requests: &Requests,
    time: Duration,
) -> Result<()> {
    let other = ModelFolder { name: OTHER.to_owned(), directory: directory.to_owned() };
    // The second model gets what the first leaves.
    let small = Budget { cache_bytes_max: budget.cache_bytes_max / 8, ..budget };
    let points = daemon.serve(vec![other], small, |socket| soak(socket, requests, time))?;

    let first = points.get(1).or(points.first());
    let growth = first
        .zip(points.last())
        .map(|(first, last)| 100.0 * (last.memory_bytes as f64 / first.memory_bytes as f64 - 1.0));
    let bars =
        growth.map(|growth| Bar::at_most("growth of memory, per cent", growth, GROWTH_PERCENT_MAX));
    let model = MODEL.to_owned();
    let bars = bars.into_iter().collect();
    publish(json, &BenchReport { bench: "soak", machine: HostMachine::this(), model, bars, points })
}

/// Runs everything for `time`; returns the figures of each part.
fn soak(socket: &Path, requests: &Requests, time: Duration) -> Result<Vec<SoakPart>> {
    let beside = Beside::default();
    thread::scope(|scope| {
        let changing = scope.spawn(|| change_models(socket, &beside));
        let attacking = scope.spawn(|| attack(socket, &requests.messages, &beside));
        let measured: Result<Vec<SoakPart>> =
            (0..PARTS).map(|_| part(socket, requests, &beside, time / PARTS)).collect();
        beside.is_over.store(true, Ordering::Relaxed);
        changing.join().map_err(|_| anyhow!("the caller that loads models panicked"))??;
        attacking.join().map_err(|_| anyhow!("the hostile caller panicked"))?;
        measured
    })
}

fn part(socket: &Path, requests: &Requests, beside: &Beside, time: Duration) -> Result<SoakPart> {
    let totals: WayTotals = call_grpc(socket, &requests.messages, CALLERS, time)?;
    Ok(SoakPart {
        callers: totals.step("gRPC", CALLERS),
        memory_bytes: resident_memory()?.now,
        open_files: open_files()?,
        changes: beside.changes.load(Ordering::Relaxed),
        attacks: beside.attacks.load(Ordering::Relaxed),
    })
}

/// Loads and unloads the second model until the run is over.
fn change_models(socket: &Path, beside: &Beside) -> Result<()> {
    let request = repository_request(OTHER)?;
    on_event_loop(async {
        let mut caller = Caller::connect(socket).await?;
        while !beside.is_over.load(Ordering::Relaxed) {
            for method in ["RepositoryModelLoad", "RepositoryModelUnload"] {
                while let Outcome::Busy(wait) = caller.call(method, request.clone()).await? {
                    tokio::time::sleep(wait).await;
                }
                beside.changes.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    })
}

/// Connects again and again and sends what no good caller sends. Errors are what the front door
/// owes such a caller.
fn attack(socket: &Path, messages: &[Bytes], beside: &Beside) {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let headers = format!("GET / HTTP/1.1\r\nx: {}\r\n", "a".repeat(60_000));
    let endless = b"POST /v2/models/bench/infer HTTP/1.1\r\ncontent-length: 4000000\r\n\r\n{";
    let garbage: Vec<u8> = messages[0].iter().rev().copied().collect();
    let kinds: [&[u8]; 6] = [b"", preface, headers.as_bytes(), endless, &garbage, b"{}\n"];

    let mut open: Vec<UnixStream> = Vec::new();
    let start = Instant::now();
    for kind in kinds.iter().cycle() {
        if beside.is_over.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(mut stream) = UnixStream::connect(socket) {
            let _ = stream.set_nonblocking(true);
            let _ = stream.write(kind);
            let _ = stream.read(&mut [0; 512]);
            open.push(stream);
            beside.attacks.fetch_add(1, Ordering::Relaxed);
        }
        if open.len() > HOSTILE {
            open.remove(0);
        }
        // Two thousand connections a second at most: the good callers need a processor too.
        let attacks = beside.attacks.load(Ordering::Relaxed);
        let due = Duration::from_micros(500 * attacks);
        thread::sleep(due.saturating_sub(start.elapsed()).min(Duration::from_millis(5)));
    }
}

fn publish(json: Option<&PathBuf>, report: &BenchReport<SoakPart>) -> Result<()> {
    if prints_tables(json) {
        say!("{}", report.machine)?;
        let heads = ["requests/s", "p50", "p99", "busy", "memory", "files", "changes", "attacks"];
        let mut table = report::table(&heads);
        table.add_rows(report.points.iter().map(SoakPart::cells));
        say!("{table}")?;
        report.bars.iter().try_for_each(|bar| say!("{bar}"))?;
    }
    report.write_to(json)
}

impl SoakPart {
    fn cells(&self) -> [String; 8] {
        let [_, _, rate, p50, p99, _, busy] = self.callers.cells();
        let counts = [self.open_files, self.changes, self.attacks].map(report::count);
        let [files, changes, attacks] = counts;
        [rate, p50, p99, busy, report::bytes(self.memory_bytes), files, changes, attacks]
    }
}
