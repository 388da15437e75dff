//! The probe: a generation scores the recorded samples of its probe set, before it becomes live and
//! again before it is committed. The probe opens the generation separately with a small cache and
//! never touches the model that serves requests.

use crate::clock::SystemClock;
use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError};
use crate::io::reader::DeviceDepth;
use crate::limits::PROBE_CACHE_BYTES_MAX;
use crate::model::budget::Budget;
use crate::model::{Model, OpenError};
use crate::request::worker::Worker;
use crate::schema::batch::Batch;
use std::sync::Arc;

/// The result of a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Probed {
    /// Samples that have a recorded score.
    pub samples: u32,
    /// The largest difference between a score and its recorded score.
    pub difference: f32,
}

/// Why a probe has no result.
#[derive(Debug)]
pub enum ProbeFault {
    /// The generation cannot be opened, or a score is wrong. The release is to blame.
    Generation(String),
    /// The car's flash device failed.
    Device(FlashError),
}

impl From<OpenError> for ProbeFault {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::Flash(e @ FlashError::Io { .. }) => Self::Device(e),
            OpenError::Segment(e @ SegmentError::Io { .. }) => Self::Device(e.into()),
            e => Self::Generation(e.to_string()),
        }
    }
}

/// Scores the probe set of `flash`, one sample a request, within `budget`. Calls `yield_now`
/// between samples.
///
/// # Errors
/// `ProbeFault::Generation` also if a score is not a number or uses damaged rows.
pub fn probe(flash: &Flash, budget: Budget, yield_now: &dyn Fn()) -> Result<Probed, ProbeFault> {
    let cache_bytes_max = budget.cache_bytes_max.min(PROBE_CACHE_BYTES_MAX);
    let budget = Budget { workers: 1, slots: 1, batch_delay_us_max: 0, cache_bytes_max, ..budget };
    let samples = flash.probe().map_err(|e| match e {
        e @ FlashError::Io { .. } => ProbeFault::Device(e),
        e => ProbeFault::Generation(e.to_string()),
    })?;

    let depth = DeviceDepth::new(budget.reads_max as usize);
    let model = Arc::new(Model::open_cold(flash, budget, depth, yield_now)?);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let (mut batch, mut probed) = (Batch::new(model.schema(), 1), Probed::default());

    for (number, sample) in samples.iter().enumerate() {
        yield_now();
        let wrong =
            |problem: String| ProbeFault::Generation(format!("probe sample {number}: {problem}"));
        batch.clear();
        batch.push(model.schema(), sample).map_err(|e| wrong(e.to_string()))?;
        let score = score(&mut worker, &batch).map_err(wrong)?;

        if let Some(expected) = sample.score {
            // `f32::max` would ignore a recorded score that is not a number.
            let difference = (score - expected).abs();
            if difference.is_nan() {
                return Err(wrong(format!("the recorded score is {expected}")));
            }
            probed.difference = probed.difference.max(difference);
            probed.samples += 1;
        }
    }
    Ok(probed)
}

/// Returns the score of the one sample of `batch`.
fn score(worker: &mut Worker, batch: &Batch) -> Result<f32, String> {
    let scores = worker.score(batch, None).map_err(|e| e.to_string())?;
    if scores.status().damaged > 0 {
        return Err(format!("{} of its rows are damaged", scores.status().damaged));
    }
    if let Some(value) = scores.values.iter().find(|v| !v.is_finite()) {
        return Err(format!("its score is {value}"));
    }
    Ok(scores.values[0])
}
