//! What one way takes more than another in the same moment. Both take short turns, one right after
//! the other, and each pair of turns gives one difference of medians. What slows the machine for
//! longer than a pair of turns slows both ways. Never measures.

use crate::bench::bars::Bar;
use crate::bench::peer::percentile;

/// Half the width of the interval of the median, in ranks for each root of the number of pairs: 95
/// of 100 such intervals have the true median.
const HALF_RANKS: f64 = 0.98;

/// The differences of all pairs of turns, µs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    differences_us: Vec<f64>,
}

impl Pairs {
    /// Adds the medians of two turns, one right after the other.
    pub fn add(&mut self, slower_us: f64, faster_us: f64) {
        self.differences_us.push(slower_us - faster_us);
    }

    /// Returns the median of the differences, and the interval that has the true median with a
    /// probability of 95 %.
    pub fn median_us(&self) -> (f64, [f64; 2]) {
        let mut sorted = self.differences_us.clone();
        let count = sorted.len() as f64;
        let half = HALF_RANKS / count.sqrt().max(1.0);
        let mut at = |share: f64| percentile(&mut sorted, share.clamp(0.0, 1.0));
        (at(0.5), [at(0.5 - half), at(0.5 + half)])
    }

    /// Returns the bar that the median must not exceed.
    pub fn bar(&self, name: &str, most: f64) -> Bar {
        let (median, [low, high]) = self.median_us();
        let pairs = self.differences_us.len();
        let name = format!("{name} ({low:.2} to {high:.2} with 95 %, {pairs} pairs of turns)");
        Bar::at_most(name, median, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    #[test]
    fn the_interval_has_the_difference_in_spite_of_a_machine_that_slows_down() {
        let mut found = 0;
        for seed in 0..200 {
            let (mut rng, mut pairs) = (StdRng::seed_from_u64(seed), Pairs::default());
            for turn in 0..400 {
                let slow = 20.0 + f64::from(turn) / 4.0;
                let mut noise = || rng.random_range(-3.0..3.0);
                pairs.add(slow + 1.5 + noise(), slow + noise());
            }
            let (median, [low, high]) = pairs.median_us();
            assert!(low <= median && median <= high && high - low < 1.0, "{seed}");
            found += u32::from(low <= 1.5 && 1.5 <= high);
        }
        assert!((180..=200).contains(&found), "{found}");
    }
}
