//! `bench daemon --deadline`: answers later than their deadline over gRPC, beside those of the call
//! of the library, while the flash device stalls. Both ways take turns, with as many callers and
//! the same deadlines. Sleepers and controls send nothing: how late they wake is what the system's
//! scheduler costs in the same moment.

use super::args::DaemonArgs;
use super::caller::{Caller, Outcome, on_event_loop};
use super::front_door::{Daemon, RULES, Requests};
use crate::bars::Bar;
use crate::deadline::{BUSY_PAUSE_S, DEADLINE_S, draw, stall_until};
use crate::delta::pack_generations;
use crate::punctuality::{Lateness, Overruns, Sleeper, Timeline};
use crate::results::{BenchReport, HostMachine};
use crate::stalling_disk::StallingDisk;
use anyhow::{Context, Result, anyhow};
use hatchback::RequestError;
use hatchback::limits::DEADLINE_WAIT_US;
use hatchback::model::budget::Budget;
use hatchback::schema::MissPolicy;
use hatchback_tools::report;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Callers of each way, sleepers, and controls.
const CALLERS: u64 = 32;
/// Turns of each way.
const TURNS: u32 = 4;
/// The status of gRPC of a request without scores in time.
const DEADLINE_EXCEEDED: u32 = 4;

/// A way to ask for scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Library,
    Grpc,
}

/// How punctual the answers of one way were.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PunctualityStep {
    way: Way,
    /// Requests that a slot took.
    requests: u64,
    /// Requests whose deadline passed before they had scores.
    without_scores: u64,
    /// Requests that were refused because every slot was taken.
    busy: u64,
    /// Answers, relative to their deadlines.
    answers: Lateness,
    /// Threads that slept instead of sending, relative to the ends of their sleeps.
    sleepers: Lateness,
    /// Answers and controls that were later than the bound and every sleeper beside them.
    overruns: Overruns,
}

/// What callers saw.
#[derive(Clone, Copy, Default)]
struct Seen {
    with_scores: u64,
    without_scores: u64,
    busy: u64,
}

impl Seen {
    /// Returns the requests that a slot took.
    fn requests(self) -> u64 {
        self.with_scores + self.without_scores
    }

    fn add(&mut self, other: Self) {
        self.with_scores += other.with_scores;
        self.without_scores += other.without_scores;
        self.busy += other.busy;
    }
}

/// The answers of one way over all its turns.
struct Watch {
    answers: Timeline,
    sleepers: Timeline,
    controls: Timeline,
    seen: Seen,
}

/// The model and the requests for it.
struct Stage<'a> {
    daemon: &'a Daemon,
    requests: &'a Requests,
    disk: &'a StallingDisk,
    socket: &'a Path,
}

/// Runs the measurement for `time` each way.
///
/// # Errors
/// The runtime refuses the model, or a request fails for another reason than its deadline.
pub fn run(args: &DaemonArgs, time: Duration) -> Result<()> {
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let misses = [MissPolicy::Deadline, MissPolicy::Wait];
    let bundles = pack_generations(args.model.rows_max(), 0, misses, folder.path())?;
    let stalling = StallingDisk::default();
    let (_, flash, budget) = stalling.install(&bundles[0], &folder.path().join("flash"))?;
    let workers = HostMachine::this().cores as u32;
    let budget = Budget { slots: CALLERS as u32, workers, ..budget };

    let daemon = Daemon::new(&flash, budget)?;
    let requests = Requests::draw(&daemon, &flash, 1)?;
    let points = daemon.serve(RULES, Vec::new(), budget, |socket| {
        let stage = Stage { daemon: &daemon, requests: &requests, disk: &stalling, socket };
        stage.measure(time)
    })?;
    let model = flash.manifest().generation.to_string();
    let bars = points.iter().map(PunctualityStep::bar).collect();
    let machine = HostMachine::this();
    publish(args, &BenchReport { bench: "daemon deadline", machine, model, bars, points })
}

impl Stage<'_> {
    fn measure(&self, time: Duration) -> Result<Vec<PunctualityStep>> {
        let mut ways = [Way::Library, Way::Grpc].map(|way| {
            let [answers, sleepers, controls] = [(); 3].map(|()| Timeline::start());
            (way, Watch { answers, sleepers, controls, seen: Seen::default() })
        });
        for _ in 0..TURNS {
            for (way, watch) in &mut ways {
                self.turn(*way, watch, time / TURNS)?;
            }
        }
        let step = |(way, watch): &(Way, Watch)| PunctualityStep {
            way: *way,
            requests: watch.seen.requests(),
            without_scores: watch.seen.without_scores,
            busy: watch.seen.busy,
            answers: watch.answers.lateness(),
            sleepers: watch.sleepers.lateness(),
            overruns: Overruns::of(
                watch.seen.requests(),
                &watch.answers,
                &watch.controls,
                &watch.sleepers,
            ),
        };
        Ok(ways.iter().map(step).collect())
    }

    /// Sends requests in this way for `time`, while the device stalls again and again.
    fn turn(&self, way: Way, watch: &mut Watch, time: Duration) -> Result<()> {
        let (stop, until) = (AtomicBool::new(false), Instant::now() + time);
        let Watch { answers, sleepers, controls, seen } = watch;
        let returns_after = Duration::from_micros(DEADLINE_WAIT_US);
        let groups = [(&*sleepers, Duration::ZERO), (&*controls, returns_after)];
        thread::scope(|scope| {
            let stop = &stop;
            for (seed, (timeline, oversleep)) in
                (0..CALLERS).flat_map(|seed| groups.map(|group| (seed, group)))
            {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut next = move || Ok(draw(&mut rng, DEADLINE_S));
                let sleeper = Sleeper { oversleep, timeline };
                scope.spawn(move || sleeper.sleep_until(stop, &mut next));
            }
            scope.spawn(|| stall_until(stop, self.disk));
            let answers = &*answers;
            let call = move |seed| match way {
                Way::Library => self.call_library(seed, answers, until),
                Way::Grpc => on_event_loop(self.call_grpc(seed, answers, until)),
            };
            let callers: Vec<_> =
                (0..CALLERS).map(|seed| scope.spawn(move || call(seed))).collect();
            let called: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
            stop.store(true, Ordering::Relaxed);
            for called in called {
                seen.add(called.map_err(|_| anyhow!("a caller panicked"))??);
            }
            Ok(())
        })
    }

    /// Calls the library until `until`, with deadlines that `seed` draws.
    fn call_library(&self, seed: u64, answers: &Timeline, until: Instant) -> Result<Seen> {
        let serving = &self.daemon.serving;
        let (mut rng, mut seen) = (StdRng::seed_from_u64(seed), Seen::default());
        for batch in self.requests.batches.iter().cycle().skip(37 * seed as usize) {
            let time = draw(&mut rng, DEADLINE_S);
            let due = Instant::now() + time;
            let ticket = self.daemon.served.submit(batch, Some(serving.now() + time));
            let answered = ticket.and_then(|ticket| ticket.wait().map(drop));
            answers.record(due);
            match answered {
                Err(RequestError::Busy(_)) => {
                    seen.busy += 1;
                    thread::sleep(draw(&mut rng, BUSY_PAUSE_S));
                }
                Err(RequestError::DeadlineExceeded) => seen.without_scores += 1,
                answered => {
                    answered?;
                    seen.with_scores += 1;
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        Ok(seen)
    }

    /// Calls over gRPC until `until`, with deadlines that `seed` draws.
    async fn call_grpc(&self, seed: u64, answers: &Timeline, until: Instant) -> Result<Seen> {
        let mut caller = Caller::connect(self.socket).await?;
        let (mut rng, mut seen) = (StdRng::seed_from_u64(seed), Seen::default());
        for message in self.requests.messages.iter().cycle().skip(37 * seed as usize) {
            let time = draw(&mut rng, DEADLINE_S);
            let due = Instant::now() + time;
            let outcome = caller.infer(message.clone(), Some(time)).await?;
            answers.record(due);
            match outcome {
                Outcome::Answered(_) => seen.with_scores += 1,
                Outcome::Refused(refusal) if refusal.status == DEADLINE_EXCEEDED => {
                    seen.without_scores += 1;
                }
                Outcome::Refused(refusal) => {
                    refusal.busy()?;
                    seen.busy += 1;
                    tokio::time::sleep(draw(&mut rng, BUSY_PAUSE_S)).await;
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        Ok(seen)
    }
}

impl PunctualityStep {
    fn name(&self) -> &'static str {
        match self.way {
            Way::Library => "library",
            Way::Grpc => "gRPC",
        }
    }

    fn bar(&self) -> Bar {
        let way = self.name();
        let name = format!("{way}: overruns beyond those of the controls");
        let beyond = (self.requests > 0).then(|| self.overruns.beyond_chance());
        Bar::at_most(name, beyond, 0.0).because("no request was taken")
    }

    fn cells(&self) -> [String; 10] {
        let over = |of: &Lateness| format!("{} of {}", of.over, report::count(of.count));
        [
            self.name().to_owned(),
            report::count(self.requests),
            report::count(self.without_scores),
            report::count(self.busy),
            over(&self.answers),
            over(&self.sleepers),
            report::micros(self.answers.latest_us),
            report::micros(self.sleepers.latest_us),
            self.overruns.answers.to_string(),
            self.overruns.controls.to_string(),
        ]
    }
}

fn publish(args: &DaemonArgs, report: &BenchReport<PunctualityStep>) -> Result<()> {
    let about = Lateness::about(&format!("{}: {CALLERS} callers,", report.model));
    let heads = "way, requests, no scores, busy, answers over, sleepers over, latest answer, \
                 latest sleeper, overruns, of controls";
    report.publish(&about, heads, PunctualityStep::cells, &args.json)
}
