//! The probe: a generation scores the requests that the trainer recorded, before it is live and
//! once more before it is committed. Opens the generation by itself, small; never touches what is
//! served.

use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError};
use crate::io::reader::DeviceDepth;
use crate::model::budget::Budget;
use crate::model::{Model, OpenError};
use crate::request::worker::{SystemClock, Worker};
use crate::schema::batch::Batch;
use std::sync::Arc;

/// Cache for a probe, at most: it asks for few rows.
const CACHE_BYTES_MAX: u64 = 8 << 20;

/// How a probe went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Probed {
    /// Samples that came with a score.
    pub samples: u32,
    /// The largest difference from it.
    pub difference: f32,
}

/// Why there is no result.
#[derive(Debug)]
pub enum ProbeFault {
    /// The generation cannot be served or scores nonsense.
    Generation(String),
    /// The car's own device failed.
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

/// Scores the probe set of `flash`, one sample a request, in memory that `budget` allows; `rest` is
/// called in between.
///
/// # Errors
/// The generation cannot be opened, or a score is not a number or rests on damaged rows.
pub fn probe(flash: &Flash, budget: Budget, rest: &dyn Fn()) -> Result<Probed, ProbeFault> {
    let cache_bytes_max = budget.cache_bytes_max.min(CACHE_BYTES_MAX);
    let budget = Budget { workers: 1, slots: 1, gather_us: 0, cache_bytes_max, ..budget };
    let samples = flash.probe().map_err(|e| match e {
        e @ FlashError::Io { .. } => ProbeFault::Device(e),
        e => ProbeFault::Generation(e.to_string()),
    })?;
    let model =
        Arc::new(Model::cold(flash, budget, DeviceDepth::new(budget.reads_max as usize), rest)?);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let (mut batch, mut probed) = (Batch::new(model.schema(), 1), Probed::default());
    for (number, sample) in samples.iter().enumerate() {
        rest();
        let wrong =
            |problem: String| ProbeFault::Generation(format!("probe sample {number}: {problem}"));
        batch.clear();
        batch.push(model.schema(), sample).map_err(|e| wrong(e.to_string()))?;
        let scores = worker.score(&batch, None).map_err(|e| wrong(e.to_string()))?;
        if scores.status().damaged > 0 {
            return Err(wrong(format!("{} rows are damaged", scores.status().damaged)));
        }
        if let Some(value) = scores.values.iter().find(|v| !v.is_finite()) {
            return Err(wrong(format!("scores {value}")));
        }
        if let Some(expected) = sample.score {
            // `max` would pass over a recorded score that is no number.
            let difference = (scores.values[0] - expected).abs();
            if difference.is_nan() {
                return Err(wrong(format!("its recorded score is {expected}")));
            }
            probed.difference = probed.difference.max(difference);
            probed.samples += 1;
        }
    }
    Ok(probed)
}
