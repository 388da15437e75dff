//! A process for the test `kill`: installs, compacts and rolls back in a real directory until the
//! test kills it. It prints each step before and after. The test checks the rows; this process does
//! not.
//!
//! Usage: flash_worker DIRECTORY SEED BUNDLE... with the delta and the snapshot of each generation,
//! from generation 1.

use anyhow::{Context, Result};
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use hatchback_tests::random::Random;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rules that merge every delta.
const RULES: MaintenanceRules = MaintenanceRules {
    deltas_max: 0,
    changed_percent_max: 0,
    scrub_every: Duration::ZERO,
    wear_bytes_per_day_max: u64::MAX,
    busy_percent_min: 1,
    busy_percent_max: 100,
};

/// Prints a word to the test, which may kill this process immediately.
fn print(word: &str, generation: u64) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word} {generation}")?;
    Ok(out.flush()?)
}

fn install(directory: &Path, bundle: &Path) -> Result<Flash> {
    Ok(Flash::install(&disk::system(), directory, &mut BundleReader::open(bundle)?, |_| ())?)
}

fn compact(maintenance: &mut Maintenance, flash: &mut Flash) -> Result<()> {
    // 40 steps of 2 pages may stop within a merge, whose work the next install makes useless.
    for second in 0..40 {
        if maintenance.step(flash, Duration::from_secs(second), 2)? == StepOutcome::Nothing {
            break;
        }
    }
    Ok(())
}

/// Does one step, printed before and after.
fn step(
    flash: Flash,
    maintenance: &mut Maintenance,
    bundles: &[PathBuf],
    random: &mut Random,
) -> Result<Flash> {
    let live = flash.manifest().generation.sequence;
    let (directory, last) = (flash.directory().to_owned(), bundles.len() as u64 / 2);
    let mut flash = flash;
    match random.below(3) {
        0 if flash.record().previous.is_some() => {
            let to = flash.record().previous.as_ref().map_or(live, |p| p.generation.sequence);
            print("to", to)?;
            flash = flash.rollback()?;
        }
        1 if live < last => {
            print("to", live + 1)?;
            let kind = random.below(2);
            flash = install(&directory, &bundles[(live * 2 + kind) as usize])?;
        }
        _ => {
            print("to", live)?;
            compact(maintenance, &mut flash)?;
        }
    }
    print("at", flash.manifest().generation.sequence)?;
    Ok(flash)
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let directory = PathBuf::from(args.next().context("no directory")?);
    let mut random = Random::new(args.next().context("no seed")?.parse()?);
    let bundles: Vec<PathBuf> = args.map(PathBuf::from).collect();
    let mut flash = if directory.join("live.a").exists() {
        Flash::open(&disk::system(), &directory)?
    } else {
        print("to", 1)?;
        install(&directory, &bundles[0])?
    };
    print("at", flash.manifest().generation.sequence)?;
    let (catalog, entries, found) = Catalog::open(&directory.join("catalog"), &flash)?;
    println!("catalog {found:?}");
    let mut maintenance = Maintenance::new(RULES, Some(catalog), entries);
    loop {
        flash = step(flash, &mut maintenance, &bundles, &mut random)?;
    }
}
