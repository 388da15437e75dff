//! Builds the TensorRT plans that served models lack, and then those of their next releases, one at
//! a time, and takes them into service. Each generation gets one attempt before it is live, and one
//! after, in a process: a build that fails would fail again.

use crate::flash::live::LiveId;
use crate::maintenance::share::Urgency;
use crate::request::plans::{PlanJob, PlanTaken};
use crate::request::served::Served;
use crate::request::serving::Serving;
use std::collections::BTreeMap;

/// The plans of all models of a process.
#[derive(Default)]
pub struct PlanSteps {
    /// The generation of each model that had its attempt.
    tried: BTreeMap<String, LiveId>,
    /// A plan that is built and not in service yet.
    built: Option<PlanJob>,
}

impl PlanSteps {
    /// Builds the next missing plan, which may take minutes, or takes the built one into service.
    /// Returns whether more work may be due. Calls `yield_now` between small pieces of work.
    pub fn step(&mut self, serving: &Serving, yield_now: &dyn Fn(Urgency)) -> bool {
        let Some(job) = self.built.take() else { return self.build(serving) };
        self.take(serving, job, yield_now)
    }

    fn build(&mut self, serving: &Serving) -> bool {
        for served in serving.served() {
            let (name, id) = (served.name(), served.model().map(|model| model.id()));
            let Some(id) = id.filter(|id| self.tried.get(name) != Some(id)) else { continue };
            let job = serving.plan_job(name);
            let Ok(job) = job.inspect_err(|e| log::debug!("`{name}`: its plan waits: {e}")) else {
                continue;
            };
            if job.is_none() && serving.lacks_plan(name) {
                // The swap to another generation is due. If it fails, this one is looked at again.
                continue;
            }
            self.tried.insert(name.to_owned(), id);
            let Some(mut job) = job else {
                served.note_plan(String::new());
                continue;
            };
            log::info!("`{name}`: TensorRT builds a plan; requests do not wait for it");
            served.note_plan("TensorRT builds a plan".to_owned());
            match job.build() {
                Ok(()) => self.built = Some(job),
                Err(e) => refuse(&served, &e.to_string()),
            }
            return true;
        }
        serving.names().iter().find_map(|name| serving.next_plan_job(name)).is_some_and(build_next)
    }

    fn take(&mut self, serving: &Serving, mut job: PlanJob, yield_now: &dyn Fn(Urgency)) -> bool {
        let taken = serving.take_plan(&mut job, yield_now);
        let name = job.name();
        let Some(served) = serving.get(name) else { return true };
        match taken {
            Ok(PlanTaken::Swapped(swapped)) => {
                served.note_plan(String::new());
                log::info!("`{name}`: the plan of TensorRT is in service; {swapped}");
            }
            Ok(PlanTaken::Rejected) => {
                refuse(&served, "the scores of the probe set are beyond the bound");
            }
            Ok(PlanTaken::Outdated) => {}
            Ok(PlanTaken::Busy) => {
                self.built = Some(job);
                return false;
            }
            Err(e) => refuse(&served, &e.to_string()),
        }
        true
    }
}

/// Builds the plan of a release before it is live. The swap to the release proves the plan.
fn build_next(mut job: PlanJob) -> bool {
    log::info!("`{}`: TensorRT builds the plan of the next release", job.name());
    if let Err(e) = job.build() {
        log::warn!("`{}`: no plan of TensorRT for the next release: {e}", job.name());
    }
    true
}

/// Records why `served` stays without a plan.
fn refuse(served: &Served, reason: &str) {
    log::warn!("`{}`: the network does not run on TensorRT: {reason}", served.name());
    served.note_plan(format!("no plan of TensorRT: {reason}"));
}
