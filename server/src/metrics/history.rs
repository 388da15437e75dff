//! The last minutes of each model, second by second, for the status page. Never grows beyond
//! `HISTORY_S_MAX` seconds a model.

use crate::limits::HISTORY_S_MAX;
use crate::metrics::{Metrics, Recent};
use hatchback::Serving;
use hatchback::locks::lock;
use hatchback::request::worker::Counters;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

/// One second of a model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Second {
    #[serde(flatten)]
    pub requests: Recent,
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
    /// Adds the second that has passed. Forgets models that are not served any more.
    pub fn add_second(&self, serving: &Serving, metrics: &Metrics) {
        let (served, mut models) = (serving.served(), lock(&self.0));
        models.retain(|name, _| served.iter().any(|served| served.name() == name));
        for served in served {
            let counters = served.stats().unwrap_or_default().counters;
            let requests = metrics.model(served.name()).take_recent();
            let past = models.entry(served.name().to_owned()).or_default();
            let since = counters.since(&past.counters);
            past.counters = counters;

            if past.seconds.len() == HISTORY_S_MAX {
                past.seconds.pop_front();
            }
            let hit_percent = (since.cached_lookups > 0).then(|| 100.0 * since.hit_rate() as f32);
            past.seconds.push_back(Second { requests, hit_percent, pages: since.pages });
        }
    }

    /// Returns the last seconds of the model `name`, the oldest first.
    pub fn of(&self, name: &str) -> Vec<Second> {
        let models = lock(&self.0);
        models.get(name).map(|past| past.seconds.iter().copied().collect()).unwrap_or_default()
    }
}
