//! A process for tests to kill: takes a car through its updates until none is left, and prints
//! every state that it enters. The test checks the rows; this process does not.
//!
//! Usage: sync_worker REPOSITORY SYNC_DIRECTORY FLASH_DIRECTORY FAULTS, where FAULTS is the number
//! of faults on probation.

use anyhow::{Context, Result};
use hatchback::clock::SystemClock;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::update::Updater;
use hatchback::update::apply::{Host, Policy, Watched};
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::program::Program;
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::T0;

/// Prints `state`. The parent may have closed the pipe.
fn print(state: UpdateState) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{state}");
}

/// Prints states from a second thread, because some last only as long as one write.
fn print_states(sync: &Updater) {
    let sync = sync.clone();
    std::thread::spawn(move || {
        let mut before = None;
        loop {
            let Ok(UpdateStatus { state, .. }) = sync.status() else { continue };
            if before.replace(state) != Some(state) {
                print(state);
            }
        }
    });
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, repository, directory, flash, faults] = args.as_slice() else { anyhow::bail!("usage") };
    let (directory, flash) = (directory.into(), flash.into());
    let program = Program::this();
    let sync =
        Updater { disk: disk::system(), directory, flash, lineage: None, cohort: 0, program };

    let (mut link, clock) = (DirectoryLink(repository.into()), SystemClock::default());
    let faults = faults.parse().context("faults")?;
    let policy = Policy { consent: true, requests_min: 10, ..Policy::default() };
    let watched = Some(Watched { requests: 10, faults, latency_us_p99: 5 });
    let host = Host {
        policy,
        budget: Budget::default(),
        watched,
        unservable: None,
        root: None,
        boot: 0,
        yield_now: &|| {},
    };

    sync.begin_process(1, T0 + 50)?;
    print_states(&sync);
    loop {
        while sync.advance(&host, T0 + 50)? || sync.consent(T0 + 50)? {}
        let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
        let state = sync.fetch(&mut fetcher, T0 + 50, |_, _| {})?.state;
        if matches!(state, UpdateState::Idle | UpdateState::Committed | UpdateState::Failed) {
            return sync.end_trial().map_err(Into::into);
        }
    }
}
