//! One way beside another. Both take short turns, one right after the other, and each pair of turns
//! gives one value: a difference or a ratio. A machine that slows down for longer than a pair of
//! turns slows both ways. Never measures.

use crate::bars::Bar;
use crate::peer::percentile;

/// Half the width of the interval of the median, in ranks for each root of the number of pairs: 95
/// of 100 such intervals have the true median.
const HALF_RANKS: f64 = 0.98;

/// The values of all pairs of turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs(Vec<f64>);

impl Pairs {
    /// Adds the value of two turns, one right after the other.
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Returns the median of the values, and the interval that has the true median with a
    /// probability of 95 %.
    pub fn median(&self) -> (f64, [f64; 2]) {
        let mut sorted = self.0.clone();
        let count = sorted.len() as f64;
        let half = HALF_RANKS / count.sqrt().max(1.0);
        let mut at = |share: f64| percentile(&mut sorted, share.clamp(0.0, 1.0));
        (at(0.5), [at(0.5 - half), at(0.5 + half)])
    }

    /// Returns the bar that the median must not exceed.
    pub fn at_most(&self, name: &str, most: f64) -> Bar {
        Bar::at_most(self.name(name), self.median().0, most)
    }

    /// Returns the bar that the median must reach.
    pub fn at_least(&self, name: &str, least: f64) -> Bar {
        Bar::at_least(self.name(name), self.median().0, least)
    }

    fn name(&self, name: &str) -> String {
        let (_, [low, high]) = self.median();
        format!("{name} ({low:.2} to {high:.2} with 95 %, {} pairs of turns)", self.0.len())
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
                pairs.add((slow + 1.5 + noise()) - (slow + noise()));
            }
            let (median, [low, high]) = pairs.median();
            assert!(low <= median && median <= high && high - low < 1.0, "{seed}");
            found += u32::from(low <= 1.5 && 1.5 <= high);
        }
        assert!((180..=200).contains(&found), "{found}");
    }
}
