//! The TensorRT plans of the served models, and of their next releases. A start and a swap use only
//! a plan that is kept. If it is missing, the network runs on our kernels or on the CPU. Another
//! thread builds the plan here. A plan that was built before its release becomes live is proven at
//! the start of the swap. One that was built later is proven here, and the model is swapped to
//! itself. No request and no swap waits for a build.

use crate::bundle::manifest::Hash;
use crate::flash::{Flash, FlashError};
use crate::maintenance::share::Urgency;
use crate::model::budget::Budget;
use crate::model::{Model, OpenError};
use crate::request::open::{GpuNetwork, NextNetwork};
use crate::request::precision_check;
use crate::request::served::PlanMemory;
use crate::request::serving::{Serving, ServingError, Swapped};
use crate::schema::Schema;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::{BuiltPlan, DeviceEngine, GpuDense};
use std::sync::Arc;

/// The missing plan of a network.
pub struct PlanJob {
    name: String,
    manifest: Hash,
    network: GpuNetwork,
    gpu: Arc<Gpu>,
    dense: GpuDense,
    built: Option<BuiltPlan>,
    _memory: PlanMemory,
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
    /// Builds the plan, unless a good one is kept or waits for its proof. This may take minutes.
    ///
    /// # Errors
    /// [`OpenError`]: TensorRT is missing or refuses, or its scores are not the CPU's.
    pub fn build(&mut self) -> Result<(), OpenError> {
        // Before anything of the network is parsed: a crash there must count too.
        let _counted = self.dense.begin_build(&self.gpu, &self.network.onnx)?;
        self.built = self.network.on(&self.gpu, &self.dense, DeviceEngine::build_plan)?;
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
        let Some(served) = self.get(name) else { return Ok(None) };
        let flash = served.flash()?;
        // Otherwise an update has installed another generation, and its swap is due.
        if flash.record().id() != model.id() {
            return Ok(None);
        }
        let onnx = flash.dense()?;
        let memory = served.plan_memory(&onnx);
        let (taken, max) = (self.memory_taken(), self.memory_bytes_max());
        if taken > max {
            let problem = format!("a plan waits: {taken} bytes are taken with its network");
            return Err(OpenError::Budget { field: "memory_bytes_max", value: max, problem });
        }
        let schema = Schema::clone(model.schema());
        Ok(self.job_of(name, NextNetwork { manifest: model.id().manifest, schema, onnx }, memory))
    }

    /// Returns the work on the plan of the next release of `name`, once for each that was offered.
    pub fn next_plan_job(&self, name: &str) -> Option<PlanJob> {
        let (network, memory) = self.get(name)?.take_next()?;
        self.job_of(name, network, memory)
    }

    fn job_of(&self, name: &str, next: NextNetwork, memory: PlanMemory) -> Option<PlanJob> {
        let Device::Cuda(gpu) = self.lookups() else { return None };
        let batch_max = self.model(name)?.budget().batch_max as usize;
        let NextNetwork { manifest, schema, onnx } = next;
        let network = GpuNetwork { schema: Arc::new(schema), onnx, batch_max };
        let (name, gpu, dense) = (name.to_owned(), Arc::clone(gpu), self.dense().clone());
        Some(PlanJob { name, manifest, network, gpu, dense, built: None, _memory: memory })
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
        let name = job.name.clone();
        let refuse = |source| ServingError::Open { name: name.clone(), source };
        let Some(handle) = self.get(&name) else { return Ok(PlanTaken::Outdated) };
        let Some(served) = handle.model() else { return Ok(PlanTaken::Outdated) };
        // A merge may have replaced segments during the build, and must not do so now.
        let flash = handle.flash().map_err(|e| refuse(e.into()))?;
        let lock = flash.lock();
        if matches!(lock, Err(FlashError::Busy { .. })) {
            return Ok(PlanTaken::Busy);
        }
        let flash = handle.flash().map_err(|e| refuse(e.into()))?;
        if flash.record().id() != served.id() || served.id().manifest != job.manifest {
            return Ok(PlanTaken::Outdated);
        }

        let (budget, rest) = (*served.budget(), &|| yield_now(Urgency::Unawaited));
        drop(served);
        if let Some(plan) = job.built.take()
            && !self.prove(plan, &flash, budget, rest).map_err(refuse)?
        {
            return Ok(PlanTaken::Rejected);
        }
        self.swap(&name, &flash, budget, yield_now).map(PlanTaken::Swapped)
    }

    /// Proves the plan that was built for the live generation of `flash` before that became live,
    /// so that the swap to it finds the plan. Does nothing if there is none.
    pub(crate) fn prove_next(&self, flash: &Flash, budget: Budget, rest: &dyn Fn()) {
        let Device::Cuda(gpu) = self.lookups() else { return };
        if !self.allows_tensorrt() {
            return;
        }
        let find = || {
            let manifest = flash.manifest();
            let (schema, batch_max) = (Arc::new(manifest.schema.clone()), budget.batch_max);
            let batch_max = batch_max as usize;
            let network = GpuNetwork { schema, onnx: flash.dense()?, batch_max };
            network.on(gpu, self.dense(), DeviceEngine::unproven_plan)
        };
        match find() {
            Ok(Some(plan)) => {
                if let Err(e) = self.prove(plan, flash, budget, rest) {
                    log::warn!("a plan of TensorRT waits for its proof: {e}");
                }
            }
            Ok(None) => {}
            Err(e) => log::debug!("no plan of TensorRT was built before: {e}"),
        }
    }

    /// Keeps `plan` if it gives the probe set of `flash` the CPU's scores within the bound of the
    /// precision. Otherwise records that it is useless.
    fn prove(
        &self,
        plan: BuiltPlan,
        flash: &Flash,
        budget: Budget,
        rest: &dyn Fn(),
    ) -> Result<bool, OpenError> {
        let probe = Model::open_to_probe(flash, budget, rest)?;
        let precision = self.dense().precision;
        let keeps = precision_check::keeps_scores(probe, flash, plan.engine(), precision)?.1;
        if keeps {
            plan.keep();
        } else {
            plan.reject();
        }
        Ok(keeps)
    }
}
