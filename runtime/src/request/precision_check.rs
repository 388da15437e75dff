//! The check for `precision` of a target. A GPU may compute a dense network less precisely than the
//! CPU only if the scores of the packed probe set stay within a bound. Before this the kernels'
//! crate has made the same check with generated samples.

use crate::flash::Flash;
use crate::limits::WEIGHT_CHECK_SAMPLES_MAX;
use crate::model::{Model, OpenError};
use crate::request::weight_choice::Probe;
use hatchback_kernels::dense::DenseEngine;
use hatchback_kernels::gpu::{DeviceEngine, GpuDenseError, Precision};

/// Returns `model`, whose tables are on a GPU, and whether `engine` and `on_cpu` give the probe set
/// the same scores, within the bound of `precision`. Without a probe set it returns true.
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
        true => log::info!("{name}: {checked} probe samples differ by at most {difference:.1e}"),
        false => log::warn!(
            "{name}: {}: the score of a probe sample differs by {difference:.1e}, {bound:.1e} is \
             allowed; the network runs with precision \"exact\"",
            engine.runs_on()
        ),
    }
    Ok((model, keeps))
}
