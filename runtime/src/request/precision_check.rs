//! The check for `precision` of a target. A GPU may compute a dense network less precisely than the
//! CPU only if the scores of the packed probe set stay within a bound. Before this the kernels'
//! crate has made the same check with generated samples.

use crate::clock::SystemClock;
use crate::flash::Flash;
use crate::limits::PROBE_INPUTS_MAX;
use crate::model::backend::sole_owner;
use crate::model::{Model, OpenError};
use crate::request::probe_inputs::ProbeInputs;
use crate::request::worker::Worker;
use hatchback_kernels::dense::widen;
use hatchback_kernels::gpu::{DeviceEngine, GpuDenseError, Precision};
use std::sync::Arc;

/// Returns `model`, whose tables are on a GPU, and whether `engine` gives the probe set the scores
/// of the CPU with f32 weights, within the bound of `precision`. Without a probe set it returns
/// true.
///
/// # Errors
/// [`OpenError::Flash`] if the probe set or the network cannot be read, [`OpenError::Probe`] if a
/// sample cannot be scored, [`OpenError::Cuda`] if the GPU fails.
pub(crate) fn keeps_scores(
    model: Model,
    flash: &Flash,
    engine: &DeviceEngine,
    precision: Precision,
) -> Result<(Model, bool), OpenError> {
    let (name, samples) = (model.generation().to_string(), flash.probe()?);
    if samples.is_empty() {
        log::warn!("{name}: {} is not checked: no probe set in the bundle", engine.runs_on());
        return Ok((model, true));
    }

    // A GPU computes with f32 weights whatever the form in the file, so the reference does too.
    let on_cpu = model.schema().load_dense(widen(flash.dense()?)?)?;
    // Until the check ends, the host has both forms of the network beside that of the GPU.
    let both = model.backend().cpu_dense().map_or(0, |dense| dense.bytes()) + on_cpu.bytes();
    let memory = model.memory().clone().with_opening(both as u64);
    let model = model.with_memory(memory);
    let samples = &samples[..samples.len().min(PROBE_INPUTS_MAX)];
    let model = Arc::new(model);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let probe = ProbeInputs::collect(&mut worker, samples)?;
    drop(worker);
    let difference = match engine.difference(probe.inputs(), &probe.scores(&on_cpu)?) {
        Ok(difference) => difference,
        Err(GpuDenseError::Cuda(e)) => return Err(OpenError::Cuda(*e)),
        Err(e) => {
            log::warn!("{name}: {}: {e}", engine.runs_on());
            f32::INFINITY
        }
    };

    let (bound, checked) = (precision.difference_bound(), samples.len());
    let keeps = difference <= bound;
    match keeps {
        true => log::info!("{name}: {checked} probe samples differ by at most {difference:.1e}"),
        false => log::warn!(
            "{name}: {}: the score of a probe sample differs by {difference:.1e}, {bound:.1e} is \
             allowed; the network runs with precision \"exact\"",
            engine.runs_on()
        ),
    }
    Ok((sole_owner(model), keeps))
}
