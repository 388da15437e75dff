//! `hatchbackd check`: scores the probe sets of the models and compares them with the scores that
//! the trainer recorded. Serves no callers.

use crate::cli::NamedDirectory;
use crate::models;
use anyhow::{Context, Result, anyhow, ensure};
use hatchback::flash::Flash;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::batch::Batch;
use hatchback::targets::Target;
use hatchback::update::probe::Probed;
use hatchback_link::program::explain;
use serde::Serialize;
use std::collections::BTreeMap;

/// The models, and the memory of all.
#[derive(Serialize)]
pub struct Checked {
    models: Vec<CheckedModel>,
    memory_bytes: u64,
    memory_bytes_max: u64,
    /// The release of TensorRT, or why it cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensorrt: Option<String>,
}

/// A model and the check of its probe set.
#[derive(Serialize)]
struct CheckedModel {
    name: String,
    generation: String,
    /// The bytes of each part.
    memory: BTreeMap<&'static str, u64>,
    #[serde(flatten)]
    probe: Option<Probe>,
    /// Why the model failed.
    error: Option<String>,
}

/// A probe set whose scores are those of the trainer.
#[derive(Serialize)]
struct Probe {
    /// Samples whose scores were compared.
    probe_samples: u32,
    /// The largest difference from the recorded score.
    probe_difference: f32,
}

/// Loads `models` into `serving` and checks the probe set of each. A score may differ from its
/// recorded score by `tolerance`. Returns every model, and the error of one that failed: it has no
/// recorded scores, has damaged rows, differs by more than `tolerance`, or has a score that is not
/// a number.
///
/// # Errors
/// A model cannot be loaded.
pub fn run(
    serving: &Serving,
    target: &Target,
    models: &[NamedDirectory],
    tolerance: f32,
) -> Result<(Checked, Result<()>)> {
    let load = |model| models::load(serving, target, model);
    let served = models.iter().map(load).collect::<Result<Vec<_>>>()?;
    models::log_memory(serving);

    let (mut checked, mut faults) = (Vec::new(), Vec::new());
    // Every model is checked: the first fault must not hide those of the others.
    for (model, served) in models.iter().zip(served) {
        let (name, flash) = models::open(model)?;
        let probe = check(&served, &flash, tolerance);
        let probe = probe.with_context(|| format!("model `{name}`")).map_err(|e| faults.push(e));
        let memory = served.model().map(|model| model.memory().lines()).unwrap_or_default();
        checked.push(CheckedModel {
            generation: flash.manifest().generation.to_string(),
            memory: memory.into_iter().collect(),
            error: probe.is_err().then(|| faults.last().map(explain)).flatten(),
            probe: probe.ok(),
            name,
        });
    }

    let last = faults.pop();
    faults.iter().for_each(|fault| log::error!("{}", explain(fault)));
    let (memory_bytes, memory_bytes_max) = (serving.memory_taken(), serving.memory_bytes_max());
    let tensorrt = serving.tensorrt().map(|found| found.unwrap_or_else(|why| why));
    let checked = Checked { models: checked, memory_bytes, memory_bytes_max, tensorrt };
    Ok((checked, last.map_or(Ok(()), Err)))
}

/// Scores the probe set, one sample a request.
fn check(served: &Served, flash: &Flash, tolerance: f32) -> Result<Probe> {
    let (name, schema) = (served.name(), &flash.manifest().schema);
    let (mut batch, mut probed) = (Batch::new(schema, 1), Probed::default());
    for (number, sample) in flash.probe()?.iter().enumerate() {
        batch.clear();
        batch.push(schema, sample)?;
        let ticket = served.submit(&batch, None)?;
        let answer = ticket.wait().with_context(|| format!("probe sample {number}"))?;

        let damaged = answer.scores().status().damaged;
        ensure!(damaged == 0, "{damaged} rows of a probe sample are damaged on flash");
        let added = probed.add(sample, answer.scores().values);
        added.map_err(|problem| anyhow!("probe sample {number}: {problem}"))?;
    }

    let Probed { samples, difference, .. } = probed;
    ensure!(samples > 0, "the bundle has no probe set with recorded scores");
    ensure!(
        difference <= tolerance,
        "a probe score differs from the recorded one by {difference}; {tolerance} is allowed"
    );
    log::info!("`{name}`: {samples} probe samples equal the trainer's within {difference:.1e}");
    Ok(Probe { probe_samples: samples, probe_difference: difference })
}
