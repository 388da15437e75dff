//! The TensorRT plans of the served models. A start and a swap use only a plan that is kept. If it
//! is missing, the network runs on our kernels or on the CPU. Another thread builds the plan here,
//! proves it on the probe set, and swaps the model to itself. No request waits for a build.

use crate::flash::{Flash, FlashError};
use crate::maintenance::share::Urgency;
use crate::model::{Model, OpenError};
use crate::request::precision_check;
use crate::request::serving::{Serving, ServingError, Swapped};
use hatchback_kernels::gpu::{BuiltPlan, GpuDense};
use std::sync::Arc;

/// The missing plan of a served model.
pub struct PlanJob {
    name: String,
    flash: Flash,
    model: Arc<Model>,
    dense: GpuDense,
    built: Option<BuiltPlan>,
}

/// The end of [`Serving::take_plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanTaken {
    /// The network runs on the plan.
    Swapped(Swapped),
    /// The scores of the probe set are beyond the bound.
    Rejected,
    /// Another generation is live.
    Outdated,
    /// Maintenance or an update has the flash directory. The caller tries again.
    Busy,
}

impl PlanJob {
    /// Builds the plan, unless a good one is kept. This may take minutes.
    ///
    /// # Errors
    /// [`OpenError`]: TensorRT is missing or refuses, or its scores are not the CPU's.
    pub fn build(&mut self) -> Result<(), OpenError> {
        self.built = self.model.build_plan(&self.flash, &self.dense)?;
        Ok(())
    }

    /// Returns the name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Serving {
    /// Returns whether `name` may run on TensorRT and does not.
    pub fn lacks_plan(&self, name: &str) -> bool {
        let model = self.model(name).filter(|_| self.allows_tensorrt());
        model.is_some_and(|model| model.backend().lacks_tensorrt())
    }

    /// Returns the work on the missing plan of `name`. Returns `None` if it lacks none, or if
    /// another generation is live and its swap is due.
    ///
    /// # Errors
    /// [`OpenError::Flash`] if the flash directory of the model cannot be opened.
    pub fn plan_job(&self, name: &str) -> Result<Option<PlanJob>, OpenError> {
        let Some(model) = self.model(name).filter(|_| self.lacks_plan(name)) else {
            return Ok(None);
        };
        let Some(flash) = self.get(name).map(|served| served.flash()) else { return Ok(None) };
        let flash = flash?;
        let (name, dense) = (name.to_owned(), self.dense().clone());
        // Otherwise an update has installed another generation, and its swap is due.
        let is_live = flash.record().id() == model.id();
        Ok(is_live.then_some(PlanJob { name, flash, model, dense, built: None }))
    }

    /// Keeps the plan of `job` if it gives the probe set the CPU's scores within the bound of the
    /// precision. Then swaps the model to its own generation, whose network runs on the plan. Calls
    /// `yield_now` between pieces of work.
    ///
    /// # Errors
    /// [`ServingError::Open`] if the probe set cannot be scored, or those of [`Serving::swap`].
    pub fn take_plan(
        &self,
        job: &mut PlanJob,
        yield_now: &dyn Fn(Urgency),
    ) -> Result<PlanTaken, ServingError> {
        let (name, id) = (&job.name, job.model.id());
        let refuse = |source| ServingError::Open { name: name.clone(), source };
        // A merge may have replaced segments during the build, and must not do so now.
        let lock = job.flash.lock();
        if matches!(lock, Err(FlashError::Busy { .. })) {
            return Ok(PlanTaken::Busy);
        }
        let Some(flash) = self.get(name).map(|served| served.flash()) else {
            return Ok(PlanTaken::Outdated);
        };
        let flash = flash.map_err(|e| refuse(e.into()))?;
        if flash.record().id() != id || self.model(name).map(|model| model.id()) != Some(id) {
            return Ok(PlanTaken::Outdated);
        }

        let (budget, rest) = (*job.model.budget(), &|| yield_now(Urgency::Unawaited));
        if let Some(plan) = job.built.take() {
            let probe = Model::open_to_probe(&flash, budget, rest).map_err(refuse)?;
            let precision = job.dense.precision;
            let keeps = precision_check::keeps_scores(probe, &flash, plan.engine(), precision);
            if !keeps.map_err(refuse)?.1 {
                plan.reject();
                return Ok(PlanTaken::Rejected);
            }
            plan.keep();
        }
        self.swap(name, &flash, budget, yield_now).map(PlanTaken::Swapped)
    }
}
