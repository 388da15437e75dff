//! `bench daemon --swaps N`: good callers, and a caller that makes the daemon swap N times over
//! gRPC, one swap right after the other. Reports the latency of requests and of swaps, memory and
//! open files over the run. A good caller must never see an error.

use super::args::DaemonArgs;
use super::beside::Beside;
use super::caller::on_event_loop;
use super::control::{Sockets, Turns};
use super::front_door::DaemonStep;
use super::soak::GROWTH_PERCENT_MAX;
use super::stage::Stage;
use crate::bars::Bar;
use crate::peer::percentile;
use crate::results::{BenchReport, HostMachine};
use anyhow::{Result, anyhow};
use hatchback_tools::report;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use serde::Serialize;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Good callers.
const CALLERS: u32 = 2;
/// Parts of the run; the first warms up.
const PARTS: u64 = 24;
/// Parts at each end of the run whose medians are compared.
const COMPARED: usize = 7;
/// Time between two looks whether a part's swaps are done.
const LOOK: Duration = Duration::from_millis(500);

/// The figures of one part of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct SwapPart {
    /// The good callers.
    requests: DaemonStep,
    /// Their p50 as a multiple of that of a front door without swaps.
    p50_share: f64,
    /// Calls that swap to another generation, as their caller sees them.
    swap_calls: Percentiles,
    /// Memory of the process at the end, without the control's model, bytes.
    memory_bytes: u64,
    /// Least number of open files after a turn.
    open_files: u64,
    /// Swaps until then.
    swaps: u64,
}

/// Runs `swaps` swaps.
///
/// # Errors
/// A good caller loses its connection, or an update or swap fails.
pub fn run(args: &DaemonArgs, swaps: u32) -> Result<()> {
    let stage = Stage::new(args)?;
    let points = stage.serve(|sockets| measure(&stage, sockets, u64::from(swaps)))?;
    let (machine, model, bars) = (HostMachine::this(), stage.model.clone(), bars(&points));
    publish(args, &BenchReport { bench: "swaps", machine, model, bars, points })
}

fn measure(stage: &Stage, sockets: &Sockets<'_>, swaps: u64) -> Result<Vec<SwapPart>> {
    let (beside, calls) = (Beside::default(), Mutex::new(Latencies::default()));
    thread::scope(|scope| {
        let swapping = scope.spawn(|| {
            let swapped = swap(stage, sockets, &beside, &calls, swaps);
            // A swap that fails ends the run too.
            beside.is_over.store(true, Ordering::Relaxed);
            swapped
        });
        let until = |part: u64| part * swaps / PARTS;
        let parts: Result<Vec<SwapPart>> = (1..=PARTS)
            .map(|number| part(stage, sockets, &beside, &calls, until(number)))
            .collect();
        beside.is_over.store(true, Ordering::Relaxed);
        swapping.join().map_err(|_| anyhow!("the caller that swaps models panicked"))??;
        parts
    })
}

/// Swaps `swaps` times, or until the run is over.
fn swap(
    stage: &Stage,
    sockets: &Sockets<'_>,
    beside: &Beside,
    calls: &Mutex<Latencies>,
    swaps: u64,
) -> Result<()> {
    on_event_loop(async {
        while beside.goes_on() && beside.swaps.load(Ordering::Relaxed) < swaps {
            let times = stage.swap_twice(sockets.measured).await?;
            let mut calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
            times.into_iter().for_each(|time| calls.record(time));
            beside.swaps.fetch_add(2, Ordering::Relaxed);
        }
        Ok(())
    })
}

/// Calls the front door until `swaps` swaps are done. Calls at least once.
fn part(
    stage: &Stage,
    sockets: &Sockets<'_>,
    beside: &Beside,
    calls: &Mutex<Latencies>,
    swaps: u64,
) -> Result<SwapPart> {
    let mut turns = Turns::default();
    loop {
        turns.add(&sockets.call(&stage.requests.messages, CALLERS, LOOK)?);
        if beside.swaps.load(Ordering::Relaxed) >= swaps || !beside.goes_on() {
            break;
        }
    }
    let called = std::mem::take(&mut *calls.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(SwapPart {
        requests: DaemonStep::of(&turns.measured, "gRPC", CALLERS),
        p50_share: turns.p50_share(),
        swap_calls: called.percentiles(),
        memory_bytes: stage.memory_bytes()?,
        open_files: turns.open_files,
        swaps: beside.swaps.load(Ordering::Relaxed),
    })
}

fn bars(points: &[SwapPart]) -> Vec<Bar> {
    let refused = points.iter().map(|part| part.requests.busy + part.requests.errors);
    let name = "requests of good callers refused or failed";
    let mut bars = vec![Bar::at_most(name, refused.sum::<u64>() as f64, 0.0)];
    let median = |parts: &[SwapPart], of: fn(&SwapPart) -> f64| {
        percentile(&mut parts.iter().map(of).collect::<Vec<f64>>(), 0.5)
    };
    let (first, last) = (&points[1..=COMPARED], &points[points.len() - COMPARED..]);
    let growth = |name: &str, of: fn(&SwapPart) -> f64| {
        let percent = 100.0 * (median(last, of) / median(first, of) - 1.0);
        Bar::at_most(format!("growth of {name}, per cent"), percent, GROWTH_PERCENT_MAX)
    };
    bars.push(growth("memory", |part| part.memory_bytes as f64));
    bars.push(growth("open files", |part| part.open_files as f64));
    bars.push(growth("p50 of requests beside a control", |part| part.p50_share));
    bars.push(growth("p50 of swaps", |part| part.swap_calls.p50_us));
    bars
}

fn publish(args: &DaemonArgs, report: &BenchReport<SwapPart>) -> Result<()> {
    let about = format!("{}: {CALLERS} good callers\n{}", report.model, report.machine);
    let heads = "requests/s, p50, p99, control, swap p50, p99, refused, memory, files, swaps";
    report.publish(&about, heads, SwapPart::cells, &args.json)
}

impl SwapPart {
    fn cells(&self) -> [String; 10] {
        let [_, _, rate, p50, p99, ..] = self.requests.cells();
        [
            rate,
            p50,
            p99,
            format!("x {:.3}", self.p50_share),
            report::micros(self.swap_calls.p50_us),
            report::micros(self.swap_calls.p99_us),
            report::count(self.requests.busy + self.requests.errors),
            report::bytes(self.memory_bytes),
            report::count(self.open_files),
            report::count(self.swaps),
        ]
    }
}
