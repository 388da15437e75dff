//! The last minutes of each model, second by second, for the status page. Never grows beyond
//! `HISTORY_S_MAX` seconds a model.

use crate::limits::HISTORY_S_MAX;
use crate::metrics::Metrics;
use hatchback::Serving;
use hatchback::request::worker::Counters;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One second of a model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Second {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that were refused or failed.
    pub failed: u64,
    /// `None` without an answer.
    pub p50_us: Option<u64>,
    pub p99_us: Option<u64>,
    /// Share of the lookups of cached tables that the caches answered, per cent; `None` without
    /// any.
    pub hit_percent: Option<f32>,
    /// Pages read from flash.
    pub pages: u64,
}

/// The last seconds of one model.
#[derive(Debug, Default)]
struct Past {
    seconds: VecDeque<Second>,
    /// The counters at the last second.
    counters: Counters,
}

/// The last seconds of each model.
#[derive(Debug, Default)]
pub struct History(Mutex<BTreeMap<String, Past>>);

impl History {
    fn models(&self) -> MutexGuard<'_, BTreeMap<String, Past>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the second that has passed. Forgets models that are not served any more.
    pub fn add_second(&self, serving: &Serving, metrics: &Metrics) {
        let (names, mut models) = (serving.names(), self.models());
        models.retain(|name, _| names.contains(name));
        for name in names {
            let counters = serving.stats(&name).map(|stats| stats.counters);
            let counters = counters.unwrap_or_default();
            let past = models.entry(name.clone()).or_default();
            let since = counters.since(&past.counters);
            past.counters = counters;

            let second = metrics.model(&name).take_recent(|recent| Second {
                answered: recent.answered,
                failed: recent.failed,
                p50_us: recent.latency_us(0.5),
                p99_us: recent.latency_us(0.99),
                hit_percent: (since.cached_lookups > 0).then(|| 100.0 * since.hit_rate() as f32),
                pages: since.pages,
            });
            if past.seconds.len() == HISTORY_S_MAX {
                past.seconds.pop_front();
            }
            past.seconds.push_back(second);
        }
    }

    /// Returns the last seconds of the model `name`, the oldest first.
    pub fn of(&self, name: &str) -> Vec<Second> {
        let models = self.models();
        models.get(name).map(|past| past.seconds.iter().copied().collect()).unwrap_or_default()
    }
}
