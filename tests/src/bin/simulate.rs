//! `simulate`: runs the simulation of the whole car for many seeds, or replays one. Prints how
//! often each fault and each event came, and every failure with its seed, its step and the end of
//! its trace.

use anyhow::{Context, Result};
use clap::Parser;
use hatchback_tests::whole_car::faults::Fault;
use hatchback_tests::whole_car::repository::Prepared;
use hatchback_tests::whole_car::scenarios;
use hatchback_tests::whole_car::{Outcome, simulate};
use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Simulates the whole car, one seed after another
#[derive(Parser, Debug)]
struct Args {
    /// Number of seeds
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Replays this seed with every line of its trace
    #[arg(long)]
    seed: Option<u64>,
    /// Runs for so many minutes instead of a number of seeds
    #[arg(long)]
    minutes: Option<u64>,
    /// Only these classes of faults, separated by commas; `none` for none
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Without these classes of faults
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Runs the scenarios whose names contain this instead
    #[arg(long)]
    scenario: Option<String>,
    /// Failures to print in full
    #[arg(long, default_value_t = 3)]
    show: usize,
    /// Threads; each runs seeds of its own
    #[arg(long, default_value_t = 2)]
    threads: u64,
}

/// The sum of all outcomes.
#[derive(Default)]
struct Summary {
    seeds: u64,
    /// The traces of all seeds, whatever their order.
    hash: u64,
    counts: BTreeMap<&'static str, u64>,
    failures: Vec<Outcome>,
}

impl Summary {
    fn add(&mut self, outcome: Outcome) {
        self.seeds += 1;
        self.hash ^= outcome.hash;
        for (what, n) in &outcome.counts {
            *self.counts.entry(what).or_default() += n;
        }
        if outcome.failure.is_some() {
            self.failures.push(outcome);
        }
    }

    fn print(&mut self, show: usize, took: Duration) {
        self.failures.sort_by_key(|outcome| outcome.seed);
        for outcome in self.failures.iter().take(show) {
            print(outcome);
        }
        let mut kinds: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for outcome in &self.failures {
            let what = outcome.failure.as_ref().map(|f| kind_of(&f.what)).unwrap_or_default();
            kinds.entry(what).or_default().push(outcome.seed);
        }
        println!("events of {} seeds:", self.seeds);
        for (what, n) in &self.counts {
            println!("{n:>12}  {what}");
        }
        let ms = took.as_millis() as f64 / self.seeds.max(1) as f64;
        println!("{} seeds in {:.1} s, {ms:.1} ms each", self.seeds, took.as_secs_f64());
        println!("hash of all traces: {:016x}", self.hash);
        println!("{} seeds failed", self.failures.len());
        for (what, seeds) in kinds {
            let some: Vec<u64> = seeds.iter().copied().take(8).collect();
            println!("{:>6}  {what}; seeds {some:?}", seeds.len());
        }
    }
}

/// Returns a failure without its numbers, so that equal failures count together.
fn kind_of(what: &str) -> String {
    let words = what.split(' ').filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
    words.take(30).collect::<Vec<_>>().join(" ")
}

fn print(outcome: &Outcome) {
    outcome.lines.iter().for_each(|line| println!("{line}"));
    if let Some(failure) = &outcome.failure {
        println!("seed {} failed at step {}: {}", outcome.seed, failure.step, failure.what);
    }
}

fn faults(args: &Args) -> Result<BTreeSet<Fault>> {
    let named = |names: &[String]| -> Result<BTreeSet<Fault>> {
        let known = || Fault::ALL.map(Fault::name).join(", ");
        let of = |name: &String| {
            Fault::from_name(name).with_context(|| format!("no fault `{name}`; one of {}", known()))
        };
        names.iter().filter(|name| *name != "none").map(of).collect()
    };
    let only = if args.only.is_empty() { Fault::ALL.into() } else { named(&args.only)? };
    let without = named(&args.without)?;
    Ok(only.difference(&without).copied().collect())
}

fn run_seeds(args: &Args, prepared: &Arc<Prepared>, allowed: &BTreeSet<Fault>) -> Summary {
    let (next, start) = (AtomicU64::new(args.from), Instant::now());
    let summary = Mutex::new(Summary::default());
    let is_over = |seed: u64| match args.minutes {
        Some(minutes) => start.elapsed() >= Duration::from_secs(60 * minutes),
        None => seed >= args.from + args.seeds,
    };
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if is_over(seed) {
                        break;
                    }
                    let outcome = simulate(prepared, seed, allowed, false);
                    summary.lock().unwrap_or_else(PoisonError::into_inner).add(outcome);
                }
            });
        }
    });
    summary.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn run_scenarios(name: &str, args: &Args, prepared: &Arc<Prepared>) -> Summary {
    let mut summary = Summary::default();
    for scenario in scenarios::ALL.iter().filter(|s| s.name.contains(name)) {
        let seeds = args.seed.map_or(0..scenario.seeds, |seed| seed..seed + 1);
        let mut failed = 0;
        for seed in seeds.clone() {
            let outcome = scenario.run(prepared, seed, args.seed.is_some());
            failed += u64::from(outcome.failure.is_some());
            summary.add(outcome);
        }
        println!("{failed} of {} seeds failed: {}", seeds.end - seeds.start, scenario.name);
    }
    summary
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let filter = if args.seed.is_some() { "info" } else { "off" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(filter)).init();
    std::panic::set_hook(Box::new(|panic| log::error!("{panic}")));

    let (allowed, start) = (faults(&args)?, Instant::now());
    let prepared = Arc::new(Prepared::new());
    println!("prepared in {:.1} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let mut summary = match (&args.scenario, args.seed) {
        (Some(name), _) => run_scenarios(name, &args, &prepared),
        (None, Some(seed)) => {
            let mut summary = Summary::default();
            summary.add(simulate(&prepared, seed, &allowed, true));
            summary
        }
        (None, None) => run_seeds(&args, &prepared, &allowed),
    };
    summary.print(args.show, start.elapsed());
    let is_whole = summary.failures.is_empty();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
