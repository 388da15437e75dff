//! `bench deadline`: answers later than their deadline, while the flash device stalls for 10 ms to
//! 2 s. Callers send requests with deadlines of 1 to 50 ms, beside updates and merges, with more
//! callers than request slots, and on busy CPUs. Two groups of as many threads do the same without
//! sending: sleepers and controls draw a request and sleep until a deadline. An overrun is an
//! answer that is later than its bound and every sleeper beside it. The scheduler alone makes some
//! of those, by chance: the controls, judged by the same rule, say how many. One process plays the
//! daemon.

use super::bars::Bar;
use super::delta::pack_generations;
use super::load::{serving, skewed_load};
use super::punctuality::{Lateness, Overruns, Sleeper, Timeline};
use super::results::{BenchReport, HostMachine};
use super::stalling_disk::StallingDisk;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::flash::Flash;
use hatchback::io::disk::Disk;
use hatchback::limits::DEADLINE_WAIT_US;
use hatchback::maintenance::MaintenanceRules;
use hatchback::maintenance::background::Background;
use hatchback::maintenance::share::{BusyBounds, Urgency};
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::batch::Batch;
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{MissPolicy, Schema};
use hatchback_tools::report;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::Lookups;
use hatchback_tools::serve::progress_bar;
use hatchback_tools::workload::key_distributions::Workload;
use indicatif::ProgressBar;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Shortest and longest stall, seconds. Lengths are log-uniform.
const STALL_S: [f64; 2] = [0.010, 2.0];
/// Shortest and longest time between two stalls, seconds.
const PAUSE_S: [f64; 2] = [0.050, 0.500];
/// Shortest and longest deadline, seconds.
pub(super) const DEADLINE_S: [f64; 2] = [0.001, 0.050];
/// Deltas that are applied, one row in a hundred each.
const DELTAS: u64 = 8;
/// Callers for each request slot while there are too many callers.
const CALLERS_PER_SLOT: u32 = 4;
/// Shortest and longest pause of a caller after `Busy`, seconds.
pub(super) const BUSY_PAUSE_S: [f64; 2] = [0.001, 0.010];
/// Time after its deadline for which a caller waits.
const RETURNS_AFTER: Duration = Duration::from_micros(DEADLINE_WAIT_US);
/// Name of the served model.
const NAME: &str = "model";

/// Measures answers later than their deadline, while the flash device stalls
#[derive(Args, Debug)]
pub struct DeadlineArgs {
    /// Requests in all [default: 1000000; quick: 20000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(4..))]
    requests: Option<u64>,
    /// Rows of the largest tables of the synthetic model [default: 400000; quick: 40000]
    #[arg(long)]
    rows_max: Option<u64>,
    /// Concurrent callers, and request slots
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=256))]
    callers: u32,
    /// Fewer requests, a smaller model
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    json: Json,
}

/// What happens beside the requests of a phase. The flash device stalls in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Phase {
    Stalls,
    Updates,
    TooManyCallers,
    BusyCpus,
}

const PHASES: [Phase; 4] = [Phase::Stalls, Phase::Updates, Phase::TooManyCallers, Phase::BusyCpus];

/// The figures of one phase.
#[derive(Clone, Debug, Serialize)]
pub struct DeadlineFigures {
    phase: Phase,
    /// Time of the phase.
    pub seconds: f64,
    /// Share of the time in which the device stalled.
    pub stalled: f64,
    /// Updates that were applied.
    pub updates: u64,
    /// What the callers saw.
    #[serde(flatten)]
    pub seen: Seen,
    /// Answers, relative to their deadlines.
    pub answers: Lateness,
    /// Threads that slept instead of sending, relative to the ends of their sleeps.
    pub sleepers: Lateness,
    /// Threads that slept instead of sending, until a caller without an answer would return.
    pub controls: Lateness,
    /// Answers and controls that were later than the bound and every sleeper beside them.
    pub overruns: Overruns,
}

/// Runs the measurement.
///
/// # Errors
/// The runtime refuses a bundle or a request, or a file cannot be written.
pub fn run(args: &DeadlineArgs) -> Result<()> {
    let rows_max = args.rows_max.unwrap_or(if args.quick { 40_000 } else { 400_000 });
    let requests = args.requests.unwrap_or(if args.quick { 20_000 } else { 1_000_000 });
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let misses = [MissPolicy::Deadline, MissPolicy::Wait];
    let mut bundles = pack_generations(rows_max, DELTAS, misses, folder.path())?.into_iter();
    let snapshot = bundles.next().context("no snapshot")?;
    let stalling = StallingDisk::default();
    let (disk, flash, budget) = stalling.install(&snapshot, &folder.path().join("flash"))?;
    let workers = thread::available_parallelism()?.get() as u32;
    let budget = Budget { slots: args.callers, workers, ..budget };
    let serving = serving(&budget);
    let served = serving.load(NAME, &flash, budget)?;
    let workload = skewed_load(&flash, 0)?;

    let progress = progress_bar(requests, "sending", "{human_pos}/{human_len} requests");
    let mut run =
        Run { serving, served, stalling, disk, flash, budget, workload, bundles, progress };
    let share = requests / PHASES.len() as u64;
    let figures = PHASES.map(|phase| run.phase(phase, share, args.callers));
    run.progress.finish_and_clear();
    let points = figures.into_iter().collect::<Result<Vec<_>>>()?;

    let (machine, model) = (HostMachine::this(), run.flash.manifest().generation.to_string());
    let bars = bars(&points);
    publish(args, &BenchReport { bench: "deadline", machine, model, bars, points })
}

/// The served model and what is done to it.
struct Run {
    serving: Serving,
    served: Arc<Served>,
    stalling: StallingDisk,
    disk: Arc<dyn Disk>,
    flash: Flash,
    budget: Budget,
    workload: Workload,
    /// Deltas that were not applied yet.
    bundles: std::vec::IntoIter<PathBuf>,
    progress: ProgressBar,
}

/// What the callers of a phase saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Seen {
    /// Requests that a slot took.
    pub requests: u64,
    /// Requests with every row that their deadline let them wait for.
    pub whole: u64,
    /// Requests with scores, of which some rows were late.
    pub late: u64,
    /// Requests whose deadline passed before they had scores.
    pub without_scores: u64,
    /// Requests that were refused because every slot was taken.
    pub busy: u64,
    /// Requests whose status counts other lookups than the request had.
    pub wrong_statuses: u64,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.whole += other.whole;
        self.late += other.late;
        self.without_scores += other.without_scores;
        self.busy += other.busy;
        self.wrong_statuses += other.wrong_statuses;
    }
}

impl Run {
    /// Sends `requests` requests while `phase` happens beside them.
    fn phase(&mut self, phase: Phase, requests: u64, callers: u32) -> Result<DeadlineFigures> {
        let callers =
            if phase == Phase::TooManyCallers { callers * CALLERS_PER_SLOT } else { callers };
        let [answers, sleepers, controls] = [(); 3].map(|()| Timeline::start());
        let (stop, left) = (AtomicBool::new(false), AtomicU64::new(requests));
        let (start, bundles) = (Instant::now(), &mut self.bundles);
        let (serving, served) = (&self.serving, &*self.served);
        let (stalling, progress) = (&self.stalling, &self.progress);
        let updates =
            Updates { disk: &self.disk, flash: &self.flash, serving, budget: self.budget };
        let (workload, schema) = (&self.workload, &self.flash.manifest().schema);

        let (seen, stalled, updates) = thread::scope(|scope| {
            let stop = &stop;
            let caller = |seed| {
                let caller =
                    Caller { serving, served, schema, left: &left, answers: &answers, progress };
                let workload = workload.with_seed(u64::from(seed));
                scope.spawn(move || caller.send(workload, u64::from(seed)))
            };
            let callers: Vec<_> = (0..callers).map(caller).collect();
            let groups = [(&sleepers, Duration::ZERO), (&controls, RETURNS_AFTER)];
            let each = (0..callers.len() as u64).flat_map(|seed| groups.map(|group| (seed, group)));
            let sleeping: Vec<_> = each
                .map(|(seed, (timeline, oversleep))| {
                    let sleeper = Sleeper { oversleep, timeline };
                    let mut next = next_deadline(workload.with_seed(seed), schema, seed);
                    scope.spawn(move || sleeper.sleep_until(stop, &mut next))
                })
                .collect();
            let stalls = scope.spawn(|| stall_until(stop, stalling));
            if phase == Phase::BusyCpus {
                (0..self.budget.workers).for_each(|_| drop(scope.spawn(|| spin_until(stop))));
            }
            let updater = (phase == Phase::Updates).then(|| {
                scope.spawn(|| updates.merge_until(stop));
                scope.spawn(|| updates.apply_until(stop, bundles))
            });

            // Before any error is returned: the scope waits for every thread that `stop` ends.
            let called: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
            stop.store(true, Ordering::Release);
            let mut seen = Seen::default();
            for called in called {
                seen.add(&called.map_err(|_| anyhow!("a caller panicked"))??);
            }
            for sleeper in sleeping {
                sleeper.join().map_err(|_| anyhow!("a sleeper panicked"))??;
            }
            let stalled = stalls.join().map_err(|_| anyhow!("the stalls panicked"))?;
            let updates = updater.map_or(Ok(Ok(0)), |thread| thread.join());
            Ok::<_, anyhow::Error>((
                seen,
                stalled,
                updates.map_err(|_| anyhow!("an update panicked"))??,
            ))
        })?;

        let seconds = start.elapsed().as_secs_f64();
        Ok(DeadlineFigures {
            phase,
            seconds,
            stalled: stalled.as_secs_f64() / seconds,
            updates,
            answers: answers.lateness(),
            sleepers: sleepers.lateness(),
            controls: controls.lateness(),
            overruns: Overruns::of(seen.requests, &answers, &controls, &sleepers),
            seen,
        })
    }
}

/// Returns a function that draws a request, as a caller does, and returns the time to its deadline.
fn next_deadline(
    mut workload: Workload,
    schema: &Schema,
    seed: u64,
) -> impl FnMut() -> Result<Duration> + Send + use<> {
    let (mut batch, mut rng) = (Batch::new(schema, 1), StdRng::seed_from_u64(seed));
    move || {
        workload.fill(&mut batch, 1)?;
        Ok(draw(&mut rng, DEADLINE_S))
    }
}

/// A caller that sends one request after another.
struct Caller<'a> {
    serving: &'a Serving,
    served: &'a Served,
    schema: &'a Schema,
    /// Requests that no caller has sent yet.
    left: &'a AtomicU64,
    answers: &'a Timeline,
    progress: &'a ProgressBar,
}

impl Caller<'_> {
    /// Sends requests of one sample until none is left.
    fn send(&self, mut workload: Workload, seed: u64) -> Result<Seen> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut batch, mut seen) = (Batch::new(self.schema, 1), Seen::default());
        let take = |left: u64| left.checked_sub(1);
        while self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            workload.fill(&mut batch, 1)?;
            while !self.send_one(&batch, draw(&mut rng, DEADLINE_S), &mut seen)? {
                thread::sleep(draw(&mut rng, BUSY_PAUSE_S));
            }
            self.progress.inc(1);
        }
        Ok(seen)
    }

    /// Sends `batch` with a deadline after `time`. Returns false if every slot was taken.
    fn send_one(&self, batch: &Batch, time: Duration, seen: &mut Seen) -> Result<bool> {
        let (due, deadline) = (Instant::now() + time, self.serving.now() + time);
        let answered = self.served.submit(batch, Some(deadline)).and_then(|ticket| {
            let answer = ticket.wait()?;
            let mut lookups = Lookups::default();
            lookups.count(answer.scores().statuses);
            Ok(lookups)
        });
        self.answers.record(due);

        match answered {
            Err(RequestError::Busy(_)) => {
                seen.busy += 1;
                return Ok(false);
            }
            Err(RequestError::DeadlineExceeded) => seen.without_scores += 1,
            Err(e) => return Err(e.into()),
            Ok(lookups) => {
                seen.whole += u64::from(lookups.late_samples == 0);
                seen.late += u64::from(lookups.late_samples > 0);
                seen.wrong_statuses += u64::from(!self.is_exact(&lookups, batch)?);
            }
        }
        seen.requests += 1;
        Ok(true)
    }

    /// Returns whether `lookups` counts each lookup of `batch` once, and says late if and only if a
    /// row is missing. The model has every key, and its pages are sound.
    fn is_exact(&self, lookups: &Lookups, batch: &Batch) -> Result<bool> {
        let Lookups { fresh, defaulted, absent, damaged, late_samples } = *lookups;
        let keys = |lookup: &Lookup| batch.bags(lookup.feature.into()).keys.len();
        let sent: usize = self.schema.lookups.iter().map(keys).sum();
        Ok(fresh + defaulted == sent as u64
            && absent + damaged == 0
            && (defaulted > 0) == (late_samples > 0))
    }
}

/// Returns a time between `bounds` seconds whose logarithm is uniform.
pub(super) fn draw(rng: &mut StdRng, bounds: [f64; 2]) -> Duration {
    let [low, high] = bounds.map(f64::ln);
    Duration::from_secs_f64(rng.random_range(low..high).exp())
}

/// Stalls the device again and again until `stop`. Returns the sum of the stalls.
pub(super) fn stall_until(stop: &AtomicBool, disk: &StallingDisk) -> Duration {
    let (mut rng, mut sum) = (StdRng::seed_from_u64(0), Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(draw(&mut rng, PAUSE_S));
        let stall = draw(&mut rng, STALL_S);
        disk.stall_until(Instant::now() + stall);
        thread::sleep(stall);
        sum += stall;
    }
    sum
}

/// Keeps a CPU busy until `stop`.
fn spin_until(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

/// The updates of the served model.
struct Updates<'a> {
    disk: &'a Arc<dyn Disk>,
    flash: &'a Flash,
    serving: &'a Serving,
    budget: Budget,
}

impl Updates<'_> {
    /// Applies `bundles` until `stop`. Returns how many.
    fn apply_until(
        &self,
        stop: &AtomicBool,
        bundles: &mut dyn Iterator<Item = PathBuf>,
    ) -> Result<u64> {
        let background = Background::enter(BusyBounds { percent_min: 25, percent_max: 60 });
        let rest = |urgency| background.yield_now(urgency, thread::sleep);
        let mut applied = 0;
        while !stop.load(Ordering::Relaxed) {
            let Some(path) = bundles.next() else { break };
            let mut bundle = BundleReader::open(&path)?;
            let directory = self.flash.directory();
            let flash =
                Flash::install(self.disk, directory, &mut bundle, |_| rest(Urgency::Awaited))?;
            self.serving.swap(NAME, &flash, self.budget, &rest)?;
            applied += 1;
        }
        Ok(applied)
    }

    /// Merges deltas until `stop`, as soon as a table has one.
    fn merge_until(&self, stop: &AtomicBool) {
        let rules = MaintenanceRules { deltas_max: 0, ..MaintenanceRules::default() };
        let (background, start) = (Background::enter(rules.busy()), Instant::now());
        let Ok(flash) = Flash::open(self.disk, self.flash.directory()) else { return };
        let mut steps = MaintenanceSteps::new(flash, None, rules, None, Duration::ZERO);
        while !stop.load(Ordering::Relaxed) {
            if steps.step(background.clock(), start.elapsed()) {
                background.yield_now(Urgency::Awaited, thread::sleep);
            } else {
                // Shorter than in a car, so that merges follow the deltas closely.
                thread::sleep(Duration::from_millis(100));
                background.resume();
            }
        }
    }
}

fn bars(points: &[DeadlineFigures]) -> Vec<Bar> {
    let sum = |of: fn(&DeadlineFigures) -> u64| points.iter().map(of).sum::<u64>();
    let requests = sum(|p| p.seen.requests);
    let name = format!("overruns beyond those of the controls, of {requests} requests");
    let beyond: f64 = points.iter().map(|p| p.overruns.beyond_chance()).sum();
    vec![
        Bar::at_most(name, (requests > 0).then_some(beyond), 0.0).because("no request was taken"),
        Bar::at_most("answers with a wrong status", sum(|p| p.seen.wrong_statuses) as f64, 0.0),
    ]
}

fn publish(args: &DeadlineArgs, report: &BenchReport<DeadlineFigures>) -> Result<()> {
    let answered: u64 = report.points.iter().map(|p| p.seen.whole + p.seen.late).sum();
    ensure!(answered > 0, "no request had scores; the device stalled all the time");
    let heads = "beside, stalled, updates, requests, whole, late rows, no scores, busy, \
                 answers over, sleepers over, controls over, latest answer, latest sleeper, \
                 overruns, of controls";
    let about = Lateness::about(&format!("{}:", report.model));
    report.publish(&about, heads, DeadlineFigures::cells, &args.json)
}

impl DeadlineFigures {
    fn cells(&self) -> [String; 15] {
        let over = |of: &Lateness| format!("{} of {}", of.over, report::count(of.count));
        [
            match self.phase {
                Phase::Stalls => "nothing else",
                Phase::Updates => "updates, merges",
                Phase::TooManyCallers => "too many callers",
                Phase::BusyCpus => "busy CPUs",
            }
            .to_owned(),
            report::percent(self.stalled),
            self.updates.to_string(),
            report::count(self.seen.requests),
            report::count(self.seen.whole),
            report::count(self.seen.late),
            report::count(self.seen.without_scores),
            report::count(self.seen.busy),
            over(&self.answers),
            over(&self.sleepers),
            over(&self.controls),
            report::micros(self.answers.latest_us),
            report::micros(self.sleepers.latest_us),
            self.overruns.answers.to_string(),
            self.overruns.controls.to_string(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::report_of;

    /// The sleepers and the stalls run until they are stopped.
    #[test]
    fn a_caller_that_fails_ends_its_phase() {
        let folder = tempfile::tempdir().unwrap();
        let bundles = pack_generations(1000, 0, [MissPolicy::Wait; 2], folder.path()).unwrap();
        let stalling = StallingDisk::default();
        let place = folder.path().join("flash");
        let (disk, flash, budget) = stalling.install(&bundles[0], &place).unwrap();
        let serving = serving(&budget);
        let served = serving.load(NAME, &flash, budget).unwrap();
        serving.unload(NAME).unwrap();
        let workload = skewed_load(&flash, 0).unwrap();
        let (bundles, progress) = (Vec::new().into_iter(), ProgressBar::hidden());
        let mut run =
            Run { serving, served, stalling, disk, flash, budget, workload, bundles, progress };
        assert!(run.phase(Phase::Stalls, 10, 2).is_err());
    }

    #[test]
    fn every_request_is_counted_and_every_status_is_exact() {
        let report = report_of("deadline --quick --requests 400 --rows-max 2000 --callers 4");
        let points = report["points"].as_array().unwrap();
        for point in points {
            let count = |name: &str| point[name].as_u64().unwrap();
            assert_eq!(count("requests"), 100, "{point}");
            assert_eq!(count("whole") + count("late") + count("without_scores"), 100, "{point}");
            assert_eq!(count("wrong_statuses"), 0, "{point}");
        }
        // A phase of 100 requests may end before its first stall.
        assert!(points.iter().any(|point| point["stalled"].as_f64().unwrap() > 0.0), "{report}");
    }
}
