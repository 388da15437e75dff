//! `precision` of a target: whether a GPU that computes a dense network less precisely than the CPU
//! keeps the scores of the packed probe set. The kernels' crate checks generated samples before.

use crate::flash::Flash;
use crate::limits::WEIGHT_CHECK_SAMPLES_MAX;
use crate::model::{Model, OpenError};
use crate::request::weight_choice::Probe;
use hatchback_kernels::dense::DenseEngine;
use hatchback_kernels::gpu::{DeviceEngine, GpuDenseError, Precision};

/// Returns `model`, whose tables are on a GPU, and whether `engine` gives the scores that `on_cpu`
/// gives for the probe set, within the bound of `precision`. Without a probe set it is true.
///
/// # Errors
/// [`OpenError::Flash`] if the probe set cannot be read, [`OpenError::Weights`] if a sample cannot
/// be scored, [`OpenError::Cuda`] if the GPU fails.
pub(crate) fn keeps_scores(
    model: Model,
    flash: &Flash,
    on_cpu: &DenseEngine,
    engine: &DeviceEngine,
    precision: Precision,
) -> Result<(Model, bool), OpenError> {
    let (name, samples) = (model.generation().to_string(), flash.probe()?);
    if samples.is_empty() {
        log::warn!("{name}: {} is not checked: no probe set in the bundle", engine.runs_on());
        return Ok((model, true));
    }

    let (model, probe) = Probe::collect(model, on_cpu, &samples)?;
    let difference = match engine.difference(&probe.inputs, &probe.scores) {
        Ok(difference) => difference,
        Err(GpuDenseError::Cuda(e)) => return Err(OpenError::Cuda(*e)),
        Err(e) => {
            log::warn!("{name}: {}: {e}", engine.runs_on());
            f32::INFINITY
        }
    };

    let (bound, samples) = (precision.difference_bound(), samples.len());
    let checked = samples.min(WEIGHT_CHECK_SAMPLES_MAX);
    let keeps = difference <= bound;
    match keeps {
        true => log::info!("{name}: {checked} probe samples score at most {difference:.1e} apart"),
        false => log::warn!(
            "{name}: {}: a probe sample scores {difference:.1e} from the CPU, {bound:.1e} is \
             allowed; the network runs exactly",
            engine.runs_on()
        ),
    }
    Ok((model, keeps))
}
