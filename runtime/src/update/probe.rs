//! The probe: a generation scores the recorded samples of its probe set, before it becomes live and
//! again before it is committed. The probe opens the generation separately with a small cache and
//! never touches the model that serves requests.

use crate::clock::SystemClock;
use crate::flash::{Flash, FlashError};
use crate::model::budget::Budget;
use crate::model::{Model, OpenError};
use crate::request::worker::Worker;
use crate::schema::batch::Batch;
use crate::schema::sample::Sample;
use std::sync::Arc;

/// The result of a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Probed {
    /// Samples that use damaged rows. Their scores are not compared.
    pub damaged: u32,
    /// Samples that have a recorded score.
    pub samples: u32,
    /// The largest difference between a score and its recorded score.
    pub difference: f32,
}

impl Probed {
    /// Returns whether damage kept every score from being compared: the probe says nothing.
    pub fn is_unproven(&self) -> bool {
        self.damaged > 0 && self.samples == 0
    }

    /// Adds the `scores` of a sample, and compares them with its recorded ones.
    ///
    /// # Errors
    /// A score or a recorded score is not a number.
    pub fn add(&mut self, sample: &Sample, scores: &[f32]) -> Result<(), String> {
        if let Some(score) = scores.iter().find(|score| !score.is_finite()) {
            return Err(format!("its score is {score}"));
        }
        let mut is_recorded = false;
        for (output, score) in scores.iter().enumerate() {
            let Some(expected) = sample.score(output) else { continue };
            // `f32::max` would ignore a recorded score that is not a number.
            let difference = (score - expected).abs();
            if difference.is_nan() {
                return Err(format!("the recorded score is {expected}"));
            }
            self.difference = self.difference.max(difference);
            is_recorded = true;
        }
        self.samples += u32::from(is_recorded);
        Ok(())
    }
}

/// Why a probe has no result.
#[derive(Debug)]
pub enum ProbeFault {
    /// A sample cannot be scored, or its score is wrong. The release is to blame.
    Release(String),
    /// The generation cannot be opened by this version of the program.
    Version(String),
    /// The car's flash, memory or GPU failed.
    Car {
        /// The failure.
        problem: String,
        /// A file of the flash directory is missing or damaged.
        is_damage: bool,
    },
}

impl From<FlashError> for ProbeFault {
    fn from(e: FlashError) -> Self {
        Self::Car { is_damage: e.is_damage(), problem: e.to_string() }
    }
}

impl From<OpenError> for ProbeFault {
    fn from(e: OpenError) -> Self {
        let (problem, is_fault_of_release) = (e.to_string(), e.is_fault_of_release());
        match e {
            // The install verified every file, so a wrong file was damaged later.
            OpenError::Flash(e) => e.into(),
            OpenError::Segment(e) => FlashError::from(e).into(),
            _ if is_fault_of_release => Self::Version(problem),
            _ => Self::Car { problem, is_damage: false },
        }
    }
}

/// Scores the probe set of `flash`, one sample a request, within `budget`. Calls `yield_now`
/// between samples.
///
/// # Errors
/// `ProbeFault::Release` if the model cannot score a sample, or if a score is not a number.
/// `ProbeFault::{Version, Car}` if this version or the car cannot open the generation.
pub fn probe(flash: &Flash, budget: Budget, yield_now: &dyn Fn()) -> Result<Probed, ProbeFault> {
    let samples = flash.probe()?;
    let model = Arc::new(Model::open_to_probe(flash, budget, yield_now)?);
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let (mut batch, mut probed) = (Batch::new(model.schema(), 1), Probed::default());

    for (number, sample) in samples.iter().enumerate() {
        yield_now();
        let wrong =
            |problem: String| ProbeFault::Release(format!("probe sample {number}: {problem}"));
        batch.clear();
        batch.push(model.schema(), sample).map_err(|e| wrong(e.to_string()))?;
        // A damaged row may make a score that is not a number.
        let scored = worker.score_requests(&batch, None).map_err(|e| wrong(e.to_string()))?;
        if scored.has_damage(0..1) {
            probed.damaged += 1;
        } else {
            let scores = scored.request(0..1).map_err(|e| wrong(e.to_string()))?;
            probed.add(sample, scores.values).map_err(wrong)?;
        }
    }
    Ok(probed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_blamed_for_its_own_faults_only() {
        let problem = "an unknown feature".to_owned();
        let of_release = OpenError::Probe { sample: 3, problem };
        assert!(matches!(ProbeFault::from(of_release), ProbeFault::Version(_)));

        let (field, value, problem) = ("memory_bytes_max", 7, "too small".to_owned());
        let fault = ProbeFault::from(OpenError::Budget { field, value, problem });
        assert!(matches!(fault, ProbeFault::Car { is_damage: false, .. }), "{fault:?}");
    }
}
