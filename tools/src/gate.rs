//! `gate`: the accuracy gate before a release is signed. It scores held-out samples with the
//! candidate and with what the fleet holds, on the runtime of the car, and compares the figures
//! with a policy. A bundle that passes gets an approval, which `publish --policy` requires. A
//! refusal names each metric, its bound, and by how much the metric misses the bound. Never signs.

use crate::eval::{Evaluation, evaluate};
use crate::limits::HEADER_BYTES_MAX;
use crate::pack::read_samples;
use crate::pack::spec_line::parse_toml;
use crate::report::Json;
use crate::report::input;
use crate::report::temporary::TemporaryFolder;
use crate::repository::approval::{APPROVAL_FORMAT, Approval, approve, hash_of, withdraw};
use crate::repository::restore::with_retired;
use crate::serve::open_chain;
use crate::{report, say};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Manifest, hex, sha256};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::schema::Schema;
use hatchback::schema::change::check_change;
use hatchback::schema::sample::Sample;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The format of policy files.
const POLICY_FORMAT: u32 = 1;

/// Evaluates a bundle on held-out samples and approves it for `publish`
#[derive(Args, Debug)]
pub struct GateArgs {
    /// The bundle: a snapshot or a delta
    bundle: PathBuf,
    /// What the fleet holds: a flash directory, such as `STATE/fleet` of `select`, or a bundle. If
    /// that is a delta, once for each bundle from a snapshot on. A delta needs it
    #[arg(long)]
    fleet: Vec<PathBuf>,
    /// Held-out samples with labels, one line of JSON each
    #[arg(long)]
    samples: PathBuf,
    /// The policy file (TOML)
    #[arg(long)]
    policy: PathBuf,
    #[command(flatten)]
    json: Json,
}

/// A policy file: bounds of a release's figures. A bound that is left out is not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatePolicy {
    /// Version of the file's format: 1.
    pub format: u32,
    /// Least held-out samples.
    #[serde(default)]
    pub samples_min: u64,
    /// Least AUC of the candidate.
    pub auc_min: Option<f64>,
    /// Most that the AUC may be below that of what the fleet holds.
    pub auc_drop_max: Option<f64>,
    /// Most that the AUC may be below that of the trainer's recorded scores.
    pub trainer_auc_drop_max: Option<f64>,
    /// Largest logloss of the candidate.
    pub logloss_max: Option<f64>,
    /// Most that the logloss may be above that of what the fleet holds.
    pub logloss_rise_max: Option<f64>,
    /// Largest share of lookups whose key the candidate does not have, `0..=1`.
    pub absent_max: Option<f64>,
}

/// One bound of a policy and the figure that it was compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GateCheck {
    /// The name of the bound in the policy.
    pub bound: &'static str,
    /// Its value.
    pub limit: f64,
    /// The candidate's figure.
    pub found: f64,
    /// How far the figure misses the bound; 0 if it holds.
    pub missed_by: f64,
}

impl GateCheck {
    /// Formats a figure of the bound: a count has no fraction.
    fn figure(&self, value: f64) -> String {
        match self.bound {
            "samples_min" => report::count(value as u64),
            _ => format!("{value:.5}"),
        }
    }
}

/// The result of a gate.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GateReport {
    /// The generation of the candidate.
    pub candidate: String,
    /// SHA-256 of its manifest, hexadecimal.
    pub manifest: String,
    /// What the fleet holds.
    pub fleet: Option<String>,
    /// Held-out samples.
    pub samples: usize,
    /// AUC of the candidate, of the fleet, and of the trainer's scores.
    pub auc: [Option<f64>; 3],
    /// Logloss of the same.
    pub logloss: [Option<f64>; 3],
    /// Every bound of the policy.
    pub checks: Vec<GateCheck>,
    /// Whether all bounds hold.
    pub passed: bool,
}

impl GatePolicy {
    /// Reads the policy at `path`.
    ///
    /// # Errors
    /// The file cannot be read, a key or a value is wrong, or it has no bound.
    pub fn load(path: &Path) -> Result<Self> {
        let text =
            input::read_text(path, HEADER_BYTES_MAX).with_context(|| path.display().to_string())?;
        let policy: Self = parse_toml(&text, path)?;
        let (name, format) = (path.display(), policy.format);
        ensure!(
            format == POLICY_FORMAT,
            "{name}: format: {format} is not supported, only {POLICY_FORMAT} is"
        );

        let bounds = policy.bounds();
        ensure!(bounds.iter().any(Option::is_some), "{name}: a policy needs a bound");
        let wrong = bounds.into_iter().flatten().find(|bound| !bound.is_finite());
        match wrong {
            None => Ok(policy),
            Some(bound) => bail!("{name}: a bound is {bound}, not a finite number"),
        }
    }

    fn bounds(&self) -> [Option<f64>; 6] {
        [
            self.auc_min,
            self.auc_drop_max,
            self.trainer_auc_drop_max,
            self.logloss_max,
            self.logloss_rise_max,
            self.absent_max,
        ]
    }

    /// Compares the figures of the candidate `new` with the bounds. `old` are the figures of what
    /// the fleet holds.
    ///
    /// # Errors
    /// A bound needs a figure that the samples or the command line do not give.
    pub fn check(&self, new: &Evaluation, old: Option<&Evaluation>) -> Result<Vec<GateCheck>> {
        let mut checks = Vec::new();
        let quality = &new.first_output;
        let samples = self.samples_min as f64;
        // Where only `absent_max` is asked for, the samples need no labels.
        let is_judged = self.bounds()[..5].iter().any(Option::is_some);
        let found = if is_judged { quality.labelled } else { new.samples };
        let old = old.map(|old| &old.first_output);
        add(&mut checks, Bound::AtLeast, "samples_min", Some(samples), Some(found as f64))?;
        add(&mut checks, Bound::AtLeast, "auc_min", self.auc_min, quality.auc)?;
        add(&mut checks, Bound::AtMost, "logloss_max", self.logloss_max, quality.logloss)?;

        let drop = |from: Option<f64>| Some(from? - quality.auc?);
        let rise = old.and_then(|old| Some(quality.logloss? - old.logloss?));
        let absent = new.rows.absent as f64 / new.lookups.max(1) as f64;
        let fleet_drop = drop(old.and_then(|old| old.auc));
        for (bound, limit, found) in [
            ("auc_drop_max", self.auc_drop_max, fleet_drop),
            ("trainer_auc_drop_max", self.trainer_auc_drop_max, drop(quality.reference_auc)),
            ("logloss_rise_max", self.logloss_rise_max, rise),
            ("absent_max", self.absent_max, Some(absent)),
        ] {
            add(&mut checks, Bound::AtMost, bound, limit, found)?;
        }
        Ok(checks)
    }
}

/// Whether a figure must be at least its limit, or at most.
#[derive(Clone, Copy)]
enum Bound {
    AtLeast,
    AtMost,
}

fn add(
    checks: &mut Vec<GateCheck>,
    kind: Bound,
    bound: &'static str,
    limit: Option<f64>,
    found: Option<f64>,
) -> Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    let found = found.with_context(|| no_figure(bound))?;
    let missed_by = match kind {
        Bound::AtLeast => limit - found,
        Bound::AtMost => found - limit,
    };
    checks.push(GateCheck { bound, limit, found, missed_by: missed_by.max(0.0) });
    Ok(())
}

fn no_figure(bound: &str) -> String {
    format!(
        "policy: {bound} needs labels of both kinds, 0 to 1, for a comparison with the fleet \
         --fleet, and for one with the trainer recorded scores"
    )
}

/// Evaluates a bundle against a policy.
///
/// # Errors
/// A file is refused, a sample has no score, or a bound has no figure.
pub fn evaluate_gate(
    bundle: &Path,
    fleet: &[PathBuf],
    samples: &Path,
    policy: &GatePolicy,
) -> Result<GateReport> {
    let scratch = TemporaryFolder::new()?;
    let held = open_chain("--fleet", fleet, &scratch.path().join("fleet"))?;
    let mut reader = BundleReader::open(bundle)?;
    let delta = reader.manifest().parent.is_some();
    let schema = reader.manifest().schema.clone();
    let lines = read_samples(samples, &schema)?;
    ensure!(!lines.is_empty(), "{}: has no sample", samples.display());

    let score_held = |flash: &Flash| score(flash, &read_for_fleet(samples, flash, &schema)?);
    let old = held.as_ref().map(score_held).transpose()?;
    let directory = match &held {
        Some(flash) if delta => flash.directory().to_owned(),
        None if delta => bail!("{}: is a delta; pass --fleet", bundle.display()),
        _ => scratch.path().join("candidate"),
    };
    // The candidate is written beside the live generation and is never made live.
    let prepared = Flash::prepare(&disk::system(), &directory, &mut reader, |_| ())?;
    let new = score(prepared.flash(), &lines)?;
    new.check_scores().with_context(|| bundle.display().to_string())?;

    let checks = policy.check(&new, old.as_ref())?;
    let old = old.unwrap_or_default().first_output;
    let quality = &new.first_output;
    Ok(GateReport {
        candidate: new.generation.clone(),
        manifest: hex(&sha256(reader.manifest_bytes())),
        fleet: held.map(|flash| flash.manifest().generation.to_string()),
        samples: new.samples,
        auc: [quality.auc, old.auc, quality.reference_auc],
        logloss: [quality.logloss, old.logloss, quality.reference_logloss],
        passed: checks.iter().all(|check| check.missed_by == 0.0),
        checks,
    })
}

/// Reads the samples at `path`, which are the `candidate`'s, as the release in `fleet` takes them:
/// its own key functions and missing values, also for features that the candidate has retired.
fn read_for_fleet(path: &Path, fleet: &Flash, candidate: &Schema) -> Result<Vec<Sample>> {
    let Manifest { generation, schema, .. } = fleet.manifest();
    // Each list of the candidate begins with the fleet's, so what it added is at the ends.
    let changed = check_change(schema, candidate);
    changed.with_context(|| format!("callers of {generation} cannot use the candidate"))?;
    let mut read = with_retired(schema, candidate);
    read.network.outputs.clone_from(&candidate.network.outputs);

    let mut samples = read_samples(path, &read)?;
    for Sample { dense, sparse, weights, labels, scores } in &mut samples {
        dense.truncate(schema.dense_features.len());
        sparse.truncate(schema.features.len());
        weights.truncate(schema.features.len());
        for values in [labels, scores] {
            values.truncate(schema.network.outputs.len());
        }
    }
    Ok(samples)
}

fn score(flash: &Flash, samples: &[Sample]) -> Result<Evaluation> {
    evaluate(&Arc::new(Model::from_flash(flash, Budget::default())?), samples, 1)
}

impl GateReport {
    fn print(&self) -> Result<()> {
        let mut table = report::table(&[&self.candidate, "candidate", "fleet", "trainer"]);
        for (what, values) in [("AUC", self.auc), ("logloss", self.logloss)] {
            let [new, old, trainer] = values.map(report::quality);
            table.add_row([what.to_owned(), new, old, trainer]);
        }
        say!("{table}")?;

        let mut table = report::table(&["bound", "limit", "found", ""]);
        for check in &self.checks {
            let [limit, found] = [check.limit, check.found].map(|v| check.figure(v));
            let missed = (check.missed_by > 0.0).then_some(check.missed_by);
            let missed = report::or_dash(missed, |v| format!("MISSED BY {}", check.figure(v)));
            table.add_row([check.bound.to_owned(), limit, found, missed]);
        }
        say!("{table}")
    }

    /// Returns the bounds that do not hold, as one line.
    pub fn refusal(&self) -> String {
        let missed = self.checks.iter().filter(|check| check.missed_by > 0.0);
        let line = |check: &GateCheck| {
            let [found, missed_by] = [check.found, check.missed_by].map(|v| check.figure(v));
            let GateCheck { bound, limit, .. } = check;
            format!("{bound} is {limit}, the candidate has {found}: missed by {missed_by}")
        };
        missed.map(line).collect::<Vec<_>>().join("; ")
    }
}

/// Runs the command.
///
/// # Errors
/// A file is refused, or the bundle misses a bound. An earlier approval is withdrawn then.
pub fn run(args: &GateArgs) -> Result<()> {
    withdraw(&args.bundle)?;
    let hashes = || anyhow::Ok([hash_of(&args.policy)?, hash_of(&args.samples)?]);
    let read = hashes()?;
    let policy = GatePolicy::load(&args.policy)?;
    let found = evaluate_gate(&args.bundle, &args.fleet, &args.samples, &policy)?;
    args.json.write(&found, || found.print())?;

    let name = args.bundle.display();
    ensure!(found.passed, "{name}: {} is refused: {}", found.candidate, found.refusal());
    let (policy, samples) = (args.policy.display(), args.samples.display());
    ensure!(hashes()? == read, "{policy} or {samples} changed during the evaluation: run it again");
    let [policy, samples] = read;
    let format = APPROVAL_FORMAT;
    approve(&args.bundle, &Approval { format, manifest: found.manifest, policy, samples })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::OutputQuality;

    fn evaluation(auc: f64, logloss: f64) -> Evaluation {
        Evaluation {
            samples: 100,
            first_output: OutputQuality {
                labelled: 95,
                auc: Some(auc),
                logloss: Some(logloss),
                ..OutputQuality::default()
            },
            lookups: 200,
            ..Evaluation::default()
        }
    }

    #[test]
    fn a_refusal_names_each_missed_bound_and_by_how_much() {
        let policy = GatePolicy {
            format: 1,
            samples_min: 90,
            auc_min: Some(0.75),
            auc_drop_max: Some(0.01),
            logloss_rise_max: Some(0.25),
            absent_max: Some(0.0),
            ..GatePolicy::default()
        };
        let (new, old) = (evaluation(0.6875, 0.5), evaluation(0.75, 0.5));
        let checks = policy.check(&new, Some(&old)).unwrap();
        assert_eq!(checks.len(), 5);
        let report = GateReport { checks, ..GateReport::default() };
        assert_eq!(
            report.refusal(),
            "auc_min is 0.75, the candidate has 0.68750: missed by 0.06250; \
             auc_drop_max is 0.01, the candidate has 0.06250: missed by 0.05250"
        );
        let better = policy.check(&evaluation(0.76, 0.5), Some(&old)).unwrap();
        assert!(better.iter().all(|check| check.missed_by == 0.0));
    }

    #[test]
    fn a_bound_without_its_figure_is_an_error() {
        let policy = GatePolicy { format: 1, auc_drop_max: Some(0.1), ..GatePolicy::default() };
        let missing = policy.check(&evaluation(0.7, 0.5), None).unwrap_err().to_string();
        assert!(missing.contains("auc_drop_max needs") && missing.contains("--fleet"), "{missing}");
        let policy =
            GatePolicy { format: 1, trainer_auc_drop_max: Some(0.1), ..GatePolicy::default() };
        assert!(policy.check(&evaluation(0.7, 0.5), None).is_err());
    }

    #[test]
    fn a_policy_with_a_wrong_key_or_without_bounds_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate.toml");
        for (text, problem) in [
            ("format = 1\nauc_mim = 0.7\n", "auc_mim"),
            ("format = 2\nauc_min = 0.7\n", "format: 2 is not supported"),
            ("format = 1\n", "a policy needs a bound"),
            ("format = 1\nauc_min = nan\n", "a bound is NaN"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = report::explain(&GatePolicy::load(&path).unwrap_err());
            assert!(error.contains(problem) && error.contains("gate.toml"), "{error}");
        }
    }
}
