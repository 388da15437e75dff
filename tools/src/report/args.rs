//! Parsers of the numbers on the command line. Each refuses a value outside its range and says
//! which range that is; clap adds the name of the flag and the value. Never rounds or clamps.

use crate::limits::{DAYS_MAX, MIB_MAX, SECONDS_MAX};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::manifest::Generation;
use hatchback::limits::BATCH_MAX;

fn number(text: &str) -> Result<f64> {
    text.parse().context("is not a number")
}

/// Parses a size in MiB.
///
/// # Errors
/// The text is not a number from 0 to 2^30.
pub fn mib(text: &str) -> Result<f64> {
    let mib = number(text)?;
    ensure!((0.0..=MIB_MAX).contains(&mib), "is not between 0 and {MIB_MAX} MiB");
    Ok(mib)
}

/// Parses a size in MiB that is not 0.
///
/// # Errors
/// The text is not a number above 0, at most 2^30.
pub fn mib_above_zero(text: &str) -> Result<f64> {
    let mib = mib(text)?;
    ensure!(mib > 0.0, "is not above 0");
    Ok(mib)
}

/// Parses a time in seconds.
///
/// # Errors
/// The text is not a number above 0, at most a million.
pub fn seconds(text: &str) -> Result<f64> {
    let seconds = number(text)?;
    ensure!(
        seconds > 0.0 && seconds <= SECONDS_MAX,
        "is not above 0 and at most {SECONDS_MAX} seconds"
    );
    Ok(seconds)
}

/// Parses a time in whole days.
///
/// # Errors
/// The text is not an integer from 1 to 36,500.
pub fn days(text: &str) -> Result<u64> {
    let days = text.parse().context("is not a whole number of days")?;
    ensure!((1..=DAYS_MAX).contains(&days), "is not between 1 and {DAYS_MAX} days");
    Ok(days)
}

/// Parses the number of samples in a request.
///
/// # Errors
/// The text is not an integer from 1 to the largest batch of any budget.
pub fn batch(text: &str) -> Result<usize> {
    let batch = text.parse().context("is not a whole number of samples")?;
    ensure!((1..=BATCH_MAX).contains(&batch), "is not between 1 and {BATCH_MAX} samples");
    Ok(batch)
}

/// Parses the largest number of samples in a request.
///
/// # Errors
/// As [`batch`].
pub fn batch_max(text: &str) -> Result<u32> {
    Ok(u32::try_from(batch(text)?)?)
}

/// Parses a name that becomes that of a file or a folder: one that a lineage may have too.
///
/// # Errors
/// The text is empty or too long, has another character, or begins with a dot.
pub fn file_name(text: &str) -> Result<String, String> {
    let generation = Generation { lineage: text.to_owned(), sequence: 0 };
    generation.check().map(|()| generation.lineage)
}

/// Parses a count of things of which there must be one.
///
/// # Errors
/// The text is not an integer of at least 1.
pub fn at_least_one(text: &str) -> Result<usize> {
    let count = text.parse().context("is not a whole number")?;
    ensure!(count >= 1, "is not at least 1");
    Ok(count)
}

/// Returns the bytes of `mib` MiB.
pub fn mib_to_bytes(mib: f64) -> u64 {
    (mib * 1_048_576.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused_not_clamped() {
        for text in ["-1", "nan", "inf", "1e12", "x", ""] {
            assert!(mib(text).is_err() && seconds(text).is_err(), "{text}");
        }
        assert_eq!((mib("0").unwrap(), mib("0.5").unwrap()), (0.0, 0.5));
        assert!(mib_above_zero("0").is_err() && mib_above_zero("0.01").is_ok());
        assert!(seconds("0").is_err() && seconds("0.1").is_ok());
        assert!(days("0").is_err() && days("36501").is_err() && days("36500").is_ok());
        assert!(batch("0").is_err() && batch("-1").is_err() && batch("1").is_ok());
        assert!(batch(&(BATCH_MAX + 1).to_string()).is_err());
        assert!(at_least_one("0").is_err() && at_least_one("7").is_ok());
    }

    #[test]
    fn a_name_of_a_file_is_no_path_and_prints() {
        for text in
            ["", ".", "..", "../x", "a/b", "a b", "a\nb", "a\"b", "a\u{e9}", &"x".repeat(121)]
        {
            assert!(file_name(text).is_err(), "{text}");
        }
        assert_eq!(file_name("coupon-v1.2_b"), Ok("coupon-v1.2_b".to_owned()));
    }
}
