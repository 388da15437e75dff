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

/// The value of our failure that has no finite one, such as a score that is not a number: no bar
/// that demands at most some value holds with it.
pub const WORST: f64 = 1e9;
/// The reason of a bar without a value.
const NO_VALUE: &str = "the run has no figure for it";

impl Bar {
    /// Returns the bar that `value` must reach: at least `bar`. It is not run without a value, and
    /// with one that is not finite: a ratio to nothing.
    pub fn at_least(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name.into(), value.into(), bar, |value, bar| value >= bar)
    }

    /// Returns the bar that `value` must not exceed: at most `bar`. As [`Bar::at_least`].
    pub fn at_most(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name.into(), value.into(), bar, |value, bar| value <= bar)
    }

    /// Returns the bar that `value` must stay below. As [`Bar::at_least`].
    pub fn below(name: impl Into<String>, value: impl Into<Option<f64>>, bar: f64) -> Self {
        Self::judged(name.into(), value.into(), bar, |value, bar| value < bar)
    }

    fn judged(name: String, value: Option<f64>, bar: f64, holds: fn(f64, f64) -> bool) -> Self {
        let result = match value {
            Some(value) if value.is_finite() => {
                BarResult::Measured { value, holds: holds(value, bar) }
            }
            Some(value) => BarResult::NotRun { reason: format!("the figure is {value}") },
            None => BarResult::NotRun { reason: NO_VALUE.to_owned() },
        };
        Self { name, bar, result }
    }

    /// Returns the bar with the reason why the run has no value for it, if it has none.
    pub fn because(self, why: &str) -> Self {
        let nothing = BarResult::NotRun { reason: NO_VALUE.to_owned() };
        if self.result == nothing { Self::not_run(self.name, self.bar, why) } else { self }
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
        for (value, why) in [
            (None, "no peer"),
            (Some(f64::NAN), "the figure is NaN"),
            (Some(f64::INFINITY), "the figure is inf"),
            (Some(f64::NEG_INFINITY), "the figure is -inf"),
        ] {
            for bar in [Bar::at_least("a", value, 1.0), Bar::at_most("a", value, 1.0)] {
                let bar = bar.because("no peer");
                assert_eq!(bar, Bar::not_run("a", 1.0, why));
                assert_eq!(bar.to_string(), format!("a: not run: {why}"));
            }
        }
        assert_eq!(
            Bar::at_most("a", None::<f64>, 1.0).to_string(),
            format!("a: not run: {NO_VALUE}")
        );
        assert_eq!(Bar::at_most("a", 1.0, 1.0).because("no peer"), Bar::at_least("a", 1.0, 1.0));
        assert_eq!(largest([].into_iter()), None);
        assert_eq!(largest([1.0, f64::NAN].into_iter()), None);
        assert_eq!(largest([-2.0, -1.0].into_iter()), Some(-1.0));
    }

    #[test]
    fn only_below_excludes_the_demanded_value() {
        let [below, most] = [Bar::below("a", 1.0, 1.0), Bar::at_most("a", 1.0, 1.0)];
        assert_eq!(below.result, BarResult::Measured { value: 1.0, holds: false });
        assert_eq!(most.result, BarResult::Measured { value: 1.0, holds: true });
    }
}
