//! What the rest of the daemon passes to the front door: the folders of models, and the facts of
//! the car. Plain data.

use hatchback::UpdateStatus;
use serde::Serialize;
use std::path::PathBuf;

/// A folder that holds a model.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    /// The name that the model is served under.
    pub name: String,
    /// The flash directory.
    pub directory: PathBuf,
}

/// Facts of the car that other parts of the daemon supply.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CarFacts {
    /// The update of each model that has one, by the model's name.
    pub updates: Vec<(String, UpdateStatus)>,
    /// The wear of each flash directory.
    pub wear: Vec<WearFacts>,
    /// The temperature of the hottest thermal zone.
    pub celsius: Option<f64>,
    /// The sum of the power rails.
    pub watts: Option<f64>,
    /// Level of load shedding: 0 nothing, 1 maintenance, 2 requests too.
    pub shed_level: u8,
}

/// The wear of a flash directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WearFacts {
    /// The flash directory.
    pub directory: String,
    /// Bytes that installs and maintenance have written.
    pub bytes_total: u64,
    /// Bytes that they have written today.
    pub bytes_today: u64,
    /// Damaged pages of the last scrub.
    pub damaged: u64,
}
