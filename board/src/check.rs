//! `hatchbackd check`: scores the probe sets of the models and compares them with the scores that
//! the trainer recorded. Serves no callers.

use crate::cli::NamedDirectory;
use crate::models;
use anyhow::{Context, Result, ensure};
use hatchback::flash::Flash;
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::targets::Target;
use hatchback_link::program::explain;

/// Loads `models` into `serving` and checks the probe set of each. A score may differ from its
/// recorded score by `tolerance`.
///
/// # Errors
/// A model cannot be loaded, has no recorded scores, has damaged rows, differs by more than
/// `tolerance`, or has a score that is not a number.
pub fn run(
    serving: &Serving,
    target: &Target,
    models: &[NamedDirectory],
    tolerance: f32,
) -> Result<()> {
    models.iter().try_for_each(|model| models::load(serving, target, model))?;
    models::log_memory(serving);

    // Every model is checked: the first fault must not hide those of the others.
    let check = |model| {
        let (name, flash) = models::open(model)?;
        check(serving, &name, &flash, tolerance).with_context(|| format!("model `{name}`"))
    };
    let mut faults: Vec<_> = models.iter().filter_map(|model| check(model).err()).collect();
    let last = faults.pop();
    faults.iter().for_each(|fault| log::error!("{}", explain(fault)));
    last.map_or(Ok(()), Err)
}

/// Scores the probe set, one sample a request.
fn check(serving: &Serving, name: &str, flash: &Flash, tolerance: f32) -> Result<()> {
    let schema = &flash.manifest().schema;
    let (mut batch, mut difference, mut compared) = (Batch::new(schema, 1), 0f32, 0);
    for (number, sample) in flash.probe()?.iter().enumerate() {
        batch.clear();
        batch.push(schema, sample)?;
        let ticket = serving.submit(name, &batch, None)?;
        let answer = ticket.wait().with_context(|| format!("probe sample {number}"))?;

        let damaged = answer.scores().status().damaged;
        ensure!(damaged == 0, "{damaged} rows of a probe sample are damaged on flash");
        for (output, score) in answer.scores().values.iter().enumerate() {
            let Some(expected) = sample.score(output) else { continue };
            // `f32::max` would ignore a recorded score that is not a number.
            ensure!(
                expected.is_finite(),
                "probe sample {number}: the recorded score is {expected}"
            );
            difference = difference.max((score - expected).abs());
            compared += 1;
        }
    }

    ensure!(compared > 0, "the bundle has no probe set with recorded scores");
    ensure!(
        difference <= tolerance,
        "a probe score differs from the recorded one by {difference}; {tolerance} is allowed"
    );
    log::info!("`{name}`: {compared} probe scores equal the trainer's within {difference:.1e}");
    Ok(())
}
