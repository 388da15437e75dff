//! The whole car in a simulation, as `tests/src/whole_car` describes it. A fixed number of seeds
//! and the scenario of every defect that was found must pass. Equal seeds give equal traces. The
//! program `simulate` runs any number of seeds.

#![allow(clippy::unwrap_used)]

use hatchback_tests::whole_car::faults::Fault;
use hatchback_tests::whole_car::repository::Prepared;
use hatchback_tests::whole_car::{Outcome, scenarios, simulate};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

const FIRST_SEED: u64 = 1_000;
/// So many further ranges of seeds may run until each event has come.
const MORE_RANGES: u64 = 3;
/// From so many seeds on, a live release must have been rolled back: one seed of some hundred does.
const SEEDS_WITH_ROLLBACKS: usize = 500;

/// Seeds of a range, and ten times those of a scenario.
fn seeds() -> u64 {
    std::env::var("HATCHBACK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

static PREPARED: LazyLock<Arc<Prepared>> = LazyLock::new(|| Arc::new(Prepared::new()));

fn all() -> BTreeSet<Fault> {
    Fault::ALL.into()
}

/// Prints the ends of the traces of some failed outcomes. Returns the number of failed ones.
fn failures(outcomes: &[Outcome], what: &str) -> usize {
    let mut failed = 0;
    for outcome in outcomes {
        let Some(failure) = &outcome.failure else { continue };
        failed += 1;
        if failed <= 2 {
            outcome.lines.iter().for_each(|line| println!("{line}"));
            let (seed, step) = (outcome.seed, failure.step);
            println!("{what}: seed {seed} failed at step {step}: {}", failure.what);
        }
    }
    println!("{what}: {failed} of {} seeds failed", outcomes.len());
    failed
}

/// Returns how often each event came in all outcomes.
fn counts(outcomes: &[Outcome]) -> BTreeMap<&'static str, u64> {
    let mut sum = BTreeMap::new();
    for (what, n) in outcomes.iter().flat_map(|outcome| &outcome.counts) {
        *sum.entry(*what).or_default() += n;
    }
    sum
}

#[test]
fn a_car_survives_every_fault_and_heals_after_it() {
    LazyLock::force(&PREPARED);
    let (mut outcomes, seeds) = (Vec::new(), seeds());
    for range in 0..=MORE_RANGES {
        let first = FIRST_SEED + range * seeds;
        let half = |odd: u64| {
            let seeds = (first..first + seeds).filter(|seed| seed % 2 == odd);
            seeds.map(|seed| simulate(&PREPARED, seed, &all(), false)).collect::<Vec<_>>()
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| half(1));
            outcomes.extend(half(0));
            outcomes.extend(other.join().unwrap());
        });
        if missing(&outcomes).is_empty() {
            break;
        }
    }
    outcomes.sort_by_key(|outcome| outcome.seed);

    let counts = counts(&outcomes);
    println!("events of {} seeds: {counts:#?}", outcomes.len());
    let failed = failures(&outcomes, "random faults");
    assert_eq!(failed, 0, "replay each seed with `simulate --seed N`");
    let missing = missing(&outcomes);
    assert!(missing.is_empty(), "{missing:?} hardly came: {counts:?}");
}

/// Returns the events that hardly came: a simulation without them proves nothing.
fn missing(outcomes: &[Outcome]) -> Vec<String> {
    let (counts, often) = (counts(outcomes), outcomes.len() as u64 / 25);
    let rare = ["swaps", "merges", "installs", "commits", "preemptions"];
    let rare =
        rare.into_iter().chain(["power cuts", "ends in order", "attacks", "damaged answers"]);
    let rare = rare.chain(["restores by delta", "restores by snapshot"]);
    let rare = rare.filter(|what| counts.get(what).is_none_or(|n| *n < often)).map(str::to_owned);
    let faults = Fault::ALL.into_iter().map(|fault| format!("fault {}", fault.name()));
    let rollbacks = (outcomes.len() >= SEEDS_WITH_ROLLBACKS).then(|| "rollbacks".to_owned());
    let once = faults.chain(rollbacks);
    rare.chain(once.filter(|what| !counts.contains_key(what.as_str()))).collect()
}

#[test]
fn no_defect_that_was_found_comes_back() {
    let failed = scenarios::ALL.iter().map(|scenario| {
        let run = |seed| scenario.run(&PREPARED, seed, false);
        let few = scenario.seeds.min(seeds().div_ceil(10));
        failures(&(0..few).map(run).collect::<Vec<_>>(), scenario.name)
    });
    let failed: usize = failed.sum();
    assert_eq!(failed, 0, "replay each seed with `simulate --scenario NAME --seed N`");
}

#[test]
fn equal_seeds_give_equal_traces() {
    for seed in 0..4 {
        let hash = || simulate(&PREPARED, seed, &all(), false).hash;
        assert_eq!(hash(), hash(), "seed {seed}");
    }
}
