//! Bars: the figures that the design demands, beside the figures that a run measured. Never
//! measures.

use hatchback_tools::report::{self, digits};
use serde::Serialize;
use std::fmt;

/// A demanded figure and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// The measured quantity, with its unit.
    pub name: String,
    /// The demanded value.
    pub bar: f64,
    /// The measured value, or the reason for its absence.
    #[serde(flatten)]
    pub result: BarResult,
}

/// The result of a demanded figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum BarResult {
    /// The run measured the figure.
    Measured {
        /// The measured value.
        value: f64,
        /// Whether the value satisfies the bar.
        holds: bool,
    },
    /// The run did not measure the figure.
    NotRun {
        /// The reason.
        #[serde(rename = "not run")]
        reason: String,
    },
}

impl Bar {
    /// Returns the bar that `value` must reach: at least `bar`.
    pub fn at_least(name: impl Into<String>, value: f64, bar: f64) -> Self {
        let result = BarResult::Measured { value, holds: value >= bar };
        Self { name: name.into(), bar, result }
    }

    /// Returns the bar that `value` must not exceed: at most `bar`.
    pub fn at_most(name: impl Into<String>, value: f64, bar: f64) -> Self {
        let result = BarResult::Measured { value, holds: value <= bar };
        Self { name: name.into(), bar, result }
    }

    /// Returns [`Bar::at_least`] for a figure that needs a peer; `None` if the peer did not run.
    pub fn at_least_if(name: impl Into<String>, value: Option<f64>, bar: f64) -> Self {
        match value {
            Some(value) => Self::at_least(name, value, bar),
            None => Self::not_run(name, bar, "a peer did not run"),
        }
    }

    /// Returns a bar whose figure the run did not measure.
    pub fn not_run(name: impl Into<String>, bar: f64, reason: impl Into<String>) -> Self {
        Self { name: name.into(), bar, result: BarResult::NotRun { reason: reason.into() } }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            BarResult::Measured { value, holds } => {
                let holds = if *holds { "holds" } else { "MISSED" };
                write!(f, "{}: {value:.3}, demanded {}: {holds}", self.name, self.bar)
            }
            BarResult::NotRun { reason } => write!(f, "{}: not run: {reason}", self.name),
        }
    }
}

/// Returns the table of `bars` for a terminal.
pub fn bars_table(bars: &[Bar]) -> comfy_table::Table {
    let mut table = report::table(&["bar", "found", "demanded", ""]);
    for bar in bars {
        let (found, holds) = match &bar.result {
            BarResult::Measured { value, holds: true } => (digits(*value), "holds"),
            BarResult::Measured { value, holds: false } => (digits(*value), "MISSED"),
            BarResult::NotRun { reason } => ("not run".to_owned(), reason.as_str()),
        };
        table.add_row([bar.name.clone(), found, digits(bar.bar), holds.to_owned()]);
    }
    table
}
