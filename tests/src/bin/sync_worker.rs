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
use hatchback::update::host::{Host, Policy, Watched};
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::program::Program;
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::T0;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Prints each state once when it is seen.
struct States {
    sync: Updater,
    before: Mutex<Option<UpdateState>>,
}

impl States {
    /// Prints the state if it is another one. The parent may have closed the pipe.
    fn look(&self) {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(UpdateStatus { state, .. }) = self.sync.status() else { return };
        if before.replace(state) != Some(state) {
            let _ = writeln!(std::io::stdout(), "{state}");
        }
    }
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
    let watched = Some(Watched { requests: 10, faults, ..Watched::default() });
    let states = Arc::new(States { sync: sync.clone(), before: Mutex::default() });
    let host = Host {
        policy,
        budget: Budget::default(),
        watched,
        unservable: None,
        root: None,
        boot: 0,
        yield_now: &|| states.look(),
    };

    sync.begin_process(1, T0 + 50)?;
    // Some states last only as long as one write. A second thread looks for these. Without a free
    // core it would miss the others, so this thread looks too.
    let others = Arc::clone(&states);
    std::thread::spawn(move || {
        loop {
            others.look();
        }
    });
    loop {
        while sync.advance(&host, T0 + 50)? || sync.consent(T0 + 50)? {
            states.look();
        }
        let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
        let state = sync.fetch(&mut fetcher, T0 + 50, |_, _| states.look())?.state;
        states.look();
        if matches!(state, UpdateState::Idle | UpdateState::Committed | UpdateState::Failed) {
            return sync.end_trial().map_err(Into::into);
        }
    }
}
