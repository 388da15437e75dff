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
    /// Returns the bar that `value` must reach: at least `bar`. It is not run without a value, and
    /// with one that is not finite: a ratio to nothing.
    pub fn at_least(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name, value, bar, |value, bar| value >= bar)
    }

    /// Returns the bar that `value` must not exceed: at most `bar`. As [`Bar::at_least`].
    pub fn at_most(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name, value, bar, |value, bar| value <= bar)
    }

    /// Returns the bar that `value` must stay below. As [`Bar::at_least`].
    pub fn below(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name, value, bar, |value, bar| value < bar)
    }

    fn judged(
        name: impl Into<String>,
        value: impl Into<Option<f64>>,
        bar: f64,
        holds: fn(f64, f64) -> bool,
    ) -> Self {
        let Some(value) = value.into().filter(|value| value.is_finite()) else {
            return Self::not_run(name, bar, "not measured");
        };
        let result = BarResult::Measured { value, holds: holds(value, bar) };
        Self { name: name.into(), bar, result }
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

/// Returns the largest of `values`; `None` without any, or if one is not finite.
pub fn largest(values: impl Iterator<Item = f64>) -> Option<f64> {
    let finite = values.map(|value| Some(value).filter(|value| value.is_finite()));
    finite.collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::max)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_without_a_measurement_neither_holds_nor_is_missed() {
        for value in [None, Some(f64::NAN), Some(f64::INFINITY), Some(f64::NEG_INFINITY)] {
            for bar in [Bar::at_least("a", value, 1.0), Bar::at_most("a", value, 1.0)] {
                assert_eq!(bar, Bar::not_run("a", 1.0, "not measured"));
                assert_eq!(bar.to_string(), "a: not run: not measured");
            }
        }
        assert_eq!(largest([].into_iter()), None);
        assert_eq!(largest([1.0, f64::NAN].into_iter()), None);
        assert_eq!(largest([-2.0, -1.0].into_iter()), Some(-1.0));
    }
}
