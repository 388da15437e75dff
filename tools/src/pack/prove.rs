//! Tests a new bundle before it leaves the machine: installs it into a temporary folder beside it,
//! as a car does, and scores its probe set. Never touches another generation.

use anyhow::{Context, Result, bail};
use hatchback::Budget;
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::update::probe::{ProbeFault, Probed, probe};
use std::path::Path;

/// The result of a proof.
#[derive(Debug)]
pub enum Proof {
    /// The probe set was scored.
    Scored(Probed),
    /// This machine cannot score it, which is no fault of the bundle.
    NotScored(String),
}

/// Installs the snapshot `bundle` and scores its probe set. Does nothing if it has no probe set.
///
/// # Errors
/// The bundle is refused, or a score differs from its recorded score by more than `difference_max`.
pub fn prove(bundle: &Path, difference_max: f32) -> Result<Proof> {
    let mut reader = BundleReader::open(bundle)?;
    if reader.manifest().probe.is_none() {
        return Ok(Proof::Scored(Probed::default()));
    }

    let beside = bundle.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = tempfile::Builder::new().prefix(".pack-").tempdir_in(beside)?;
    let flash = Flash::install(&disk::system(), folder.path(), &mut reader, |_| {})
        .context("the bundle cannot be installed")?;

    match probe(&flash, Budget::default(), &|| {}) {
        Ok(probed) if probed.difference > difference_max => bail!(
            "a probe score differs from the recorded one by {}, over {difference_max}",
            probed.difference
        ),
        Ok(probed) => Ok(Proof::Scored(probed)),
        Err(ProbeFault::Release(problem)) => bail!("{problem}"),
        Err(ProbeFault::Car { problem, .. }) => Ok(Proof::NotScored(problem)),
    }
}
