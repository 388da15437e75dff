//! A process to be killed: installs, compacts and rolls back on a real directory until it is, and
//! says on stdout what it is about to do and what is done. Knows nothing of the rows; the parent
//! checks those.
//!
//! Usage: flash_worker DIRECTORY SEED BUNDLE... where bundle n (from 1) leads to generation n: its
//! delta, then its snapshot.

use anyhow::{Context, Result};
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::maintenance::{Did, Maintenance, MaintenanceRules};
use hatchback_tests::random::Random;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Compacts whatever has a delta.
const RULES: MaintenanceRules = MaintenanceRules {
    deltas_max: 0,
    changed_percent_max: 0,
    scrub_every: Duration::ZERO,
    wear: hatchback::maintenance::wear::WearBudget { bytes_per_day_max: u64::MAX },
    busy_percent_max: 100,
};

/// Tells the parent, who may kill this process at once.
fn say(word: &str, generation: u64) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word} {generation}")?;
    Ok(out.flush()?)
}

fn install(directory: &Path, bundle: &Path) -> Result<Flash> {
    Ok(Flash::install(&disk::system(), directory, &mut BundleReader::open(bundle)?, |_| ())?)
}

fn compact(upkeep: &mut Maintenance, flash: &mut Flash) -> Result<()> {
    // 40 steps of 2 pages may end amid a merge; the next install then makes it worthless.
    for second in 0..40 {
        if upkeep.step(flash, Duration::from_secs(second), 2)? == Did::Nothing {
            break;
        }
    }
    Ok(())
}

/// One step from what is live to what is live next; both are said before.
fn step(
    flash: Flash,
    upkeep: &mut Maintenance,
    bundles: &[PathBuf],
    random: &mut Random,
) -> Result<Flash> {
    let live = flash.manifest().generation.sequence;
    let (directory, last) = (flash.directory().to_owned(), bundles.len() as u64 / 2);
    let mut flash = flash;
    match random.below(3) {
        0 if flash.record().previous.is_some() => {
            let to = flash.record().previous.as_ref().map_or(live, |p| p.generation.sequence);
            say("to", to)?;
            flash = flash.rollback()?;
        }
        1 if live < last => {
            say("to", live + 1)?;
            let kind = random.below(2);
            flash = install(&directory, &bundles[(live * 2 + kind) as usize])?;
        }
        _ => {
            say("to", live)?;
            compact(upkeep, &mut flash)?;
        }
    }
    say("at", flash.manifest().generation.sequence)?;
    Ok(flash)
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let directory = PathBuf::from(args.next().context("no directory")?);
    let mut random = Random::new(args.next().context("no seed")?.parse()?);
    let bundles: Vec<PathBuf> = args.map(PathBuf::from).collect();
    let mut flash = if directory.join("live").exists() {
        Flash::open(&disk::system(), &directory)?
    } else {
        say("to", 1)?;
        install(&directory, &bundles[0])?
    };
    say("at", flash.manifest().generation.sequence)?;
    let (catalog, notes, found) = Catalog::open(&directory.join("catalog"), &flash)?;
    println!("catalog {found:?}");
    let mut upkeep = Maintenance::new(RULES, Some(catalog), notes);
    loop {
        flash = step(flash, &mut upkeep, &bundles, &mut random)?;
    }
}
