//! `bench daemon --soak MINUTES`: good callers, loads and unloads of a second model, updates with
//! swaps over gRPC, stalls of the flash device and, half of the time, hostile callers. Reports
//! memory, open files, latency and errors over the run. A good caller must never see an error.

use super::args::DaemonArgs;
use super::beside::Beside;
use super::caller::on_event_loop;
use super::control::Sockets;
use super::front_door::{DaemonStep, call_grpc};
use super::hostile::attack;
use super::stage::{LOOK, OTHER, Stage, change};
use crate::bars::Bar;
use crate::results::{BenchReport, HostMachine};
use anyhow::{Result, anyhow};
use hatchback_tools::report;
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Good callers.
const CALLERS: u32 = 4;
/// Parts of the run; the first warms up.
const PARTS: u32 = 6;
/// The most that memory and latency may grow from the second part to the last, per cent.
pub const GROWTH_PERCENT_MAX: f64 = 2.0;
/// The longest latency under attack, as a multiple of that without: an attacker gets a share of the
/// processors and no more.
const ATTACKED_MAX: f64 = 2.0;
/// Time between two stalls of the flash device, and of each.
const STALL_EVERY: Duration = Duration::from_millis(500);
const STALL: Duration = Duration::from_millis(5);

/// The figures of one part of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct SoakPart {
    /// The good callers without hostile ones.
    calm: DaemonStep,
    /// Their p50 as a multiple of that of a front door whose model never changes.
    p50_share: f64,
    /// The good callers beside hostile ones.
    attacked: DaemonStep,
    /// Memory of the process at the end, without the control's model, bytes.
    memory_bytes: u64,
    /// Least number of open files after a turn of the callers without hostile ones.
    open_files: u64,
    /// Loads and unloads until then.
    loads: u64,
    /// Swaps until then, each after an update or a rollback.
    swaps: u64,
    /// Connections of hostile callers until then.
    attacks: u64,
}

/// Runs the soak for `time`.
///
/// # Errors
/// A good caller loses its connection, or a load, unload, update or swap fails.
pub fn run(args: &DaemonArgs, time: Duration) -> Result<()> {
    let stage = Stage::new(args)?;
    let points = stage.serve(|sockets| soak(&stage, sockets, time))?;
    let (machine, model, bars) = (HostMachine::this(), stage.model.clone(), bars(&points));
    publish(args, &BenchReport { bench: "soak", machine, model, bars, points })
}

/// Runs everything for `time`; returns the figures of each part.
fn soak(stage: &Stage, sockets: &Sockets<'_>, time: Duration) -> Result<Vec<SoakPart>> {
    let (beside, socket) = (Beside::default(), sockets.measured);
    thread::scope(|scope| {
        let loading = scope.spawn(|| load_models(socket, &beside));
        let swapping = scope.spawn(|| swap_models(stage, socket, &beside));
        scope.spawn(|| attack(socket, &stage.requests.messages, &beside));
        scope.spawn(|| {
            while beside.goes_on() {
                thread::sleep(STALL_EVERY);
                stage.stalling.stall_until(Instant::now() + STALL);
            }
        });
        let measured: Result<Vec<SoakPart>> =
            (0..PARTS).map(|_| part(stage, sockets, &beside, time / PARTS)).collect();
        beside.is_over.store(true, Ordering::Relaxed);
        loading.join().map_err(|_| anyhow!("the caller that loads models panicked"))??;
        swapping.join().map_err(|_| anyhow!("the caller that swaps models panicked"))??;
        measured
    })
}

fn part(stage: &Stage, sockets: &Sockets<'_>, beside: &Beside, time: Duration) -> Result<SoakPart> {
    let messages = &stage.requests.messages;
    beside.is_attacked.store(true, Ordering::Relaxed);
    let attacked = call_grpc(sockets.measured, messages, CALLERS, time / 2)?;
    beside.is_attacked.store(false, Ordering::Relaxed);
    let calm = sockets.call(messages, CALLERS, time / 2)?;
    Ok(SoakPart {
        calm: DaemonStep::of(&calm.measured, "gRPC", CALLERS),
        p50_share: calm.p50_share(),
        attacked: DaemonStep::of(&attacked, "gRPC", CALLERS),
        memory_bytes: stage.memory_bytes()?,
        open_files: calm.open_files,
        loads: beside.loads.load(Ordering::Relaxed),
        swaps: beside.swaps.load(Ordering::Relaxed),
        attacks: beside.attacks.load(Ordering::Relaxed),
    })
}

/// Loads and unloads the second model until the run is over.
fn load_models(socket: &Path, beside: &Beside) -> Result<()> {
    on_event_loop(async {
        while beside.goes_on() {
            for method in ["RepositoryModelLoad", "RepositoryModelUnload"] {
                change(socket, method, OTHER).await?;
                beside.loads.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(LOOK).await;
            }
        }
        Ok(())
    })
}

/// Applies an update and rolls it back until the run is over. After each the daemon swaps to the
/// live generation, because a caller asks it to.
fn swap_models(stage: &Stage, socket: &Path, beside: &Beside) -> Result<()> {
    on_event_loop(async {
        while beside.goes_on() {
            stage.swap_twice(socket).await?;
            beside.swaps.fetch_add(2, Ordering::Relaxed);
        }
        Ok(())
    })
}

fn bars(points: &[SoakPart]) -> Vec<Bar> {
    let refused = |step: &DaemonStep| (step.busy + step.errors) as f64;
    let errors: f64 = points.iter().map(|p| refused(&p.calm) + refused(&p.attacked)).sum();
    let mut bars = vec![Bar::at_most("requests of good callers refused or failed", errors, 0.0)];
    let (Some(first), Some(last)) = (points.get(1), points.last()) else { return bars };
    let growth = |name: &str, of: fn(&SoakPart) -> f64| {
        let percent = 100.0 * (of(last) / of(first) - 1.0);
        Bar::at_most(format!("growth of {name}, per cent"), percent, GROWTH_PERCENT_MAX)
    };
    bars.push(growth("memory", |part| part.memory_bytes as f64));
    bars.push(growth("open files", |part| part.open_files as f64));
    bars.push(growth("p50 beside a control", |part| part.p50_share));

    let share = |of: fn(&DaemonStep) -> f64| {
        let sum = |half: fn(&SoakPart) -> &DaemonStep| -> f64 {
            points[1..].iter().map(|part| of(half(part))).sum()
        };
        let is_answered =
            |p: &SoakPart| p.calm.latency.requests > 0 && p.attacked.latency.requests > 0;
        let is_measured = points[1..].iter().all(is_answered);
        is_measured.then(|| sum(|part| &part.attacked) / sum(|part| &part.calm))
    };
    let attacked = [
        ("p50 under attack, as a multiple", share(|step| step.latency.p50_us)),
        ("p99 under attack, as a multiple", share(|step| step.latency.p99_us)),
    ];
    bars.extend(attacked.map(|(name, share)| Bar::at_most(name, share, ATTACKED_MAX)));
    bars
}

fn publish(args: &DaemonArgs, report: &BenchReport<SoakPart>) -> Result<()> {
    let about = format!("{}: {CALLERS} good callers\n{}", report.model, report.machine);
    let heads = "requests/s, p50, p99, control, attacked p50, p99, refused, memory, files, loads, \
                 swaps, attacks";
    report.publish(&about, heads, SoakPart::cells, &args.json)
}

impl SoakPart {
    fn cells(&self) -> [String; 12] {
        let [_, _, rate, p50, p99, ..] = self.calm.cells();
        let [_, _, _, attacked_p50, attacked_p99, ..] = self.attacked.cells();
        let refused = [&self.calm, &self.attacked].map(|step| step.busy + step.errors);
        [
            rate,
            p50,
            p99,
            format!("x {:.3}", self.p50_share),
            attacked_p50,
            attacked_p99,
            report::count(refused.iter().sum()),
            report::bytes(self.memory_bytes),
            report::count(self.open_files),
            report::count(self.loads),
            report::count(self.swaps),
            report::count(self.attacks),
        ]
    }
}
