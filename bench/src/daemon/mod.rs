//! `bench daemon`: gRPC on a Unix socket beside the call of the library, and throughput and latency
//! under a rising number of callers over gRPC. An echo shows what the socket itself takes, which no
//! front door can undercut. The front door, the models and the callers are in
//! one process, with a request slot for each caller. The two ways take turns on the same requests.
//! Then C and Python take turns with the library, each in a process of its own. Never draws
//! requests while it measures.

mod args;
mod beside;
pub mod caller;
mod control;
mod deadline;
mod front_door;
mod hostile;
mod languages;
mod paired;
mod soak;
mod stage;
mod swaps;

use super::bars::Bar;
use super::load::{CallTotals, call_for};
use super::results::{BenchReport, HostMachine};
use anyhow::{Context, Result};
pub use args::DaemonArgs;
use front_door::{Daemon, DaemonStep, RULES, Requests, call_grpc};
use hatchback::schema::batch::Batch;
use hyper::body::Bytes;
use languages::LanguagePlan;
use paired::Pairs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Turns of each way.
const TURNS: u32 = 40;
/// The most that gRPC may add to the call of the library, p50, µs.
const ADDED_US_MAX: f64 = 60.0;
/// Turns of the most callers, and of the callers of the best step.
const LADDER_TURNS: u32 = 10;
/// Least throughput with the most callers, as a share of the best step's.
const SHARE_MIN: f64 = 0.95;

/// The most bytes that the echo reads at once.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Runs the measurement.
///
/// # Errors
/// The runtime refuses the model, a request fails, or a file cannot be written.
pub fn run(args: &DaemonArgs) -> Result<()> {
    if let Some(minutes) = args.soak {
        let time = Duration::try_from_secs_f64(60.0 * minutes).context("--soak")?;
        return soak::run(args, time);
    }
    if let Some(swaps) = args.swaps {
        return swaps::run(args, swaps);
    }
    if args.deadline {
        return deadline::run(args, args.time(60.0, 8.0));
    }

    let mut prepared = args.model.prepare()?;
    let serve = &mut prepared.serve;
    serve.cache_mib = args.cache_mib;
    let (flash, mut budget) = (serve.flash()?, serve.budget()?);
    if args.model.target.is_none() {
        // A slot for each caller: a refusal over gRPC costs as much as a small answer.
        let callers = args.clients.iter().copied().max().unwrap_or(1);
        (budget.workers, budget.slots) = (HostMachine::this().cores as u32, callers.max(64));
    }
    let daemon = Daemon::new(&flash, budget)?;
    let requests = Requests::draw(&daemon, &flash, args.batch as usize)?;
    let model = flash.manifest().generation.to_string();

    let (mut points, mut bars) = daemon
        .serve(RULES, Vec::new(), budget, |socket| measure(args, &daemon, &requests, socket))?;
    let (target, time) = (args.model.target.as_deref(), args.time(4.0, 1.0));
    let plan = LanguagePlan { flash: &flash, target, requests: &requests, time };
    let (steps, more) = languages::measure(&args.languages, &plan)?;
    points.extend(steps);
    bars.extend(more);
    publish(
        args,
        &BenchReport { bench: "daemon", machine: HostMachine::this(), model, bars, points },
    )
}

/// Measures both ways in turns, and then each number of callers. The first turn warms up.
fn measure(
    args: &DaemonArgs,
    daemon: &Daemon,
    requests: &Requests,
    socket: &Path,
) -> Result<(Vec<DaemonStep>, Vec<Bar>)> {
    let (time, mut added) = (args.time(4.0, 1.0), Pairs::default());
    let (mut library, mut grpc) = (CallTotals::default(), CallTotals::default());
    let mut echo = CallTotals::default();
    for turn in 0..=TURNS {
        let ours = call_library(daemon, requests, time / TURNS)?;
        let theirs = call_grpc(socket, &requests.messages, 1, time / TURNS)?;
        let bare = call_echo(&requests.messages, time / TURNS)?;
        if turn > 0 {
            library.add_later(&ours);
            grpc.add_later(&theirs);
            echo.add_later(&bare);
            added.add(theirs.p50_us() - ours.p50_us());
        }
    }

    let name = "gRPC on a Unix socket over the library call, p50, µs";
    let latency = added.at_most(name, ADDED_US_MAX);
    let mut steps = vec![
        DaemonStep::of(&library, "library", 1),
        DaemonStep::of(&echo, "echo", 1),
        DaemonStep::of(&grpc, "gRPC", 1),
    ];
    for &clients in args.clients.iter().filter(|clients| **clients > 1) {
        call_grpc(socket, &requests.messages, clients, time / 4)?;
        let totals = call_grpc(socket, &requests.messages, clients, time)?;
        steps.push(DaemonStep::of(&totals, "gRPC", clients));
    }
    let call = |clients| call_grpc(socket, &requests.messages, clients, time / 2);
    let throughput = share_of_best(&steps[2..], call)?;
    Ok((steps, vec![latency, throughput]))
}

/// Measures the most callers of `steps` and the callers of its best step in turns. If the most
/// callers are the best step, their share is 1.
fn share_of_best(steps: &[DaemonStep], call: impl Fn(u32) -> Result<CallTotals>) -> Result<Bar> {
    let best = steps.iter().max_by(|a, b| a.requests_per_s.total_cmp(&b.requests_per_s));
    let best = best.map_or(1, |step| step.clients);
    let most = steps.iter().map(|step| step.clients).max().unwrap_or(1);
    let name = format!("requests/s with {most} callers, share of those with {best}, the best step");
    if best == most {
        return Ok(Bar::at_least(name, 1.0, SHARE_MIN));
    }
    let mut share = Pairs::default();
    for _ in 0..LADDER_TURNS {
        let rate =
            |clients| anyhow::Ok(DaemonStep::of(&call(clients)?, "gRPC", clients).requests_per_s);
        share.add(rate(most)? / rate(best)?);
    }
    Ok(share.at_least(&name, SHARE_MIN))
}

/// Calls the library for `time`, one request after the other.
fn call_library(daemon: &Daemon, requests: &Requests, time: Duration) -> Result<CallTotals> {
    let call = |batch: &Batch| Ok(daemon.served.submit(batch, None)?.wait().map(drop)?);
    call_for(&requests.batches, time, call)
}

/// Sends `messages` in turn over a Unix socket, for `time`, to a thread that only sends one byte
/// back for each.
fn call_echo(messages: &[Bytes], time: Duration) -> Result<CallTotals> {
    let (mut ours, mut theirs) = UnixStream::pair()?;
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut message = [0; MESSAGE_BYTES_MAX];
        while theirs.read(&mut message)? > 0 {
            theirs.write_all(&[0])?;
        }
        Ok(())
    });
    let totals = call_for(messages, time, |message| {
        // A longer message would be read in parts, with an answer to each.
        ours.write_all(&message[..message.len().min(MESSAGE_BYTES_MAX)])?;
        Ok(ours.read_exact(&mut [0])?)
    })?;
    drop(ours);
    match echo.join() {
        Ok(ended) => ended?,
        Err(panic) => std::panic::resume_unwind(panic),
    }
    Ok(totals)
}

fn publish(args: &DaemonArgs, report: &BenchReport<DaemonStep>) -> Result<()> {
    let about = format!("{}: {} samples a request\n{}", report.model, args.batch, report.machine);
    let heads = "way, callers, requests/s, p50, p99, p99.9, busy";
    report.publish(&about, heads, DaemonStep::cells, &args.json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::BarResult;
    use crate::tests::{parse, report_of};

    #[test]
    fn a_measurement_with_models_of_its_own_takes_no_option_of_another() {
        for what in ["--soak 1", "--swaps 24", "--deadline"] {
            assert!(parse::<DaemonArgs>(&format!("daemon {what} --rows-max 9")).is_ok(), "{what}");
            for ignored in "m.hatch,--resident-mib 1,--target t,--flash f,--cache-mib 1".split(',')
            {
                let line = format!("daemon {what} {ignored}");
                assert!(parse::<DaemonArgs>(&line).is_err(), "{line}");
            }
        }
    }

    #[test]
    fn a_short_run_answers_over_both_ways() {
        let report = report_of("daemon --quick --clients 1,3 --seconds 0.2");
        assert_eq!(report["points"].as_array().unwrap().len(), 4);
        assert_eq!(report["bars"][0]["bar"], ADDED_US_MAX);
        assert!(report["points"][3]["latency"]["requests"].as_u64().unwrap() > 3, "{report}");
    }

    /// A machine whose rate falls all the time, on which eight callers have 0.9 times the rate of
    /// two.
    #[test]
    fn the_share_of_the_best_step_does_not_see_a_machine_that_slows_down() {
        let totals = |ms| {
            let mut totals =
                CallTotals { time: Duration::from_millis(ms), ..CallTotals::default() };
            (0..1000).for_each(|_| totals.latencies.record(Duration::from_millis(1)));
            totals
        };
        let slower = std::cell::Cell::new(900);
        let call = |clients| {
            slower.set(slower.get() + 1);
            Ok(totals(if clients == 8 { slower.get() * 10 / 9 } else { slower.get() }))
        };
        let steps = [(2, 500), (4, 800), (8, 1500)]
            .map(|(clients, ms)| DaemonStep::of(&totals(ms), "gRPC", clients));

        let bar = share_of_best(&steps, call).unwrap();
        assert!(bar.name.contains("with 8 callers, share of those with 2"), "{}", bar.name);
        let BarResult::Measured { value, holds } = bar.result else { panic!("{bar:?}") };
        assert!((0.89..0.92).contains(&value) && !holds, "{value}");
        let bar = share_of_best(&steps[..1], call).unwrap();
        assert_eq!(bar.result, BarResult::Measured { value: 1.0, holds: true });
    }

    #[test]
    fn a_short_soak_has_no_error() {
        report_of("daemon --quick --soak 0.05");
    }

    #[test]
    fn swaps_over_grpc_cost_no_request() {
        let report = report_of("daemon --quick --swaps 24");
        assert_eq!(report["bars"][0]["value"], 0.0, "{report}");
        assert_eq!(report["points"][23]["swaps"], 24, "{report}");
    }

    #[test]
    fn a_short_run_with_stalls_answers_over_both_ways() {
        let report = report_of("daemon --quick --deadline --seconds 0.4");
        for step in report["points"].as_array().unwrap() {
            assert!(step["requests"].as_u64().unwrap() >= 32, "{step}");
        }
    }
}
