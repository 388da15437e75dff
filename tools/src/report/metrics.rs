//! Measures of quality and latency: AUC, logloss, latency percentiles, counts of lookup statuses.
//! Never scores anything.

use hatchback::LookupStatus;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::Duration;

/// Returns whether all `labels` are probabilities; a label may also be a rating or a time.
fn are_probabilities(labels: &[f32]) -> bool {
    labels.iter().all(|label| (0.0..=1.0).contains(label))
}

/// Returns the area under the ROC curve by ranks (Mann-Whitney); a tie counts half. Returns `None`
/// unless both labels occur, and all are from 0 to 1.
pub fn auc(scores: &[f32], labels: &[f32]) -> Option<f64> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    let positives = labels.iter().filter(|l| **l > 0.5).count() as f64;
    let negatives = labels.len() as f64 - positives;
    if positives == 0.0 || negatives == 0.0 || !are_probabilities(labels) {
        return None;
    }
    let (mut rank, mut sum) = (0.0, 0.0);
    for tied in order.chunk_by(|&a, &b| scores[a] == scores[b]) {
        let n = tied.len() as f64;
        let middle = rank + (n + 1.0) / 2.0;
        sum += middle * tied.iter().filter(|&&i| labels[i] > 0.5).count() as f64;
        rank += n;
    }
    Some((sum - positives * (positives + 1.0) / 2.0) / (positives * negatives))
}

/// Returns the mean negative log likelihood, with scores clamped to `1e-7..=1 - 1e-7`. Returns
/// `None` without samples, and unless all labels are from 0 to 1.
pub fn logloss(scores: &[f32], labels: &[f32]) -> Option<f64> {
    let loss = |(&score, &label): (&f32, &f32)| {
        let p = f64::from(score).clamp(1e-7, 1.0 - 1e-7);
        -(f64::from(label) * p.ln() + (1.0 - f64::from(label)) * (1.0 - p).ln())
    };
    (!scores.is_empty() && are_probabilities(labels))
        .then(|| scores.iter().zip(labels).map(loss).sum::<f64>() / scores.len() as f64)
}

/// Returns the largest difference of two scores at the same position, 0 without scores. Returns NaN
/// if a score is NaN, which `f64::max` would skip.
pub fn largest_difference(a: &[f32], b: &[f32]) -> f64 {
    let differences = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs()));
    differences.fold(0.0, |most, d| if most.is_nan() || most > d { most } else { d })
}

/// Lookups of many requests by status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lookups {
    /// Lookups that found the live generation's row.
    pub fresh: u64,
    /// Lookups that got the default row because the row did not arrive before the deadline.
    pub defaulted: u64,
    /// Lookups that got the default row because the model has no such key.
    pub absent: u64,
    /// Lookups that got the default row because the stored row is damaged.
    pub damaged: u64,
    /// Samples that the deadline cut short.
    pub late_samples: u64,
}

impl Lookups {
    /// Adds the statuses of a request, one a sample.
    pub fn count(&mut self, statuses: &[LookupStatus]) {
        for status in statuses {
            self.fresh += u64::from(status.fresh);
            self.defaulted += u64::from(status.defaulted);
            self.absent += u64::from(status.absent);
            self.damaged += u64::from(status.damaged);
            self.late_samples += u64::from(status.late);
        }
    }

    /// Adds the lookups of another thread.
    pub fn add(&mut self, other: &Self) {
        self.fresh += other.fresh;
        self.defaulted += other.defaulted;
        self.absent += other.absent;
        self.damaged += other.damaged;
        self.late_samples += other.late_samples;
    }
}

/// Latencies of requests, with three significant digits.
pub struct Latencies {
    nanos: Histogram<u64>,
}

/// Latency percentiles of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Number of requests.
    pub requests: u64,
    /// Median, µs.
    pub p50_us: f64,
    /// 90th percentile, µs.
    pub p90_us: f64,
    /// 99th percentile, µs.
    pub p99_us: f64,
    /// 99.9th percentile, µs.
    pub p999_us: f64,
    /// Maximum, µs.
    pub max_us: f64,
}

impl Default for Latencies {
    fn default() -> Self {
        let nanos = Histogram::new_with_bounds(1, 1 << 40, 3);
        // The bounds are constants that the library accepts.
        Self { nanos: nanos.unwrap_or_else(|e| unreachable!("{e}")) }
    }
}

impl Latencies {
    /// Adds the latency of one request.
    pub fn record(&mut self, time: Duration) {
        self.nanos.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
    }

    /// Adds the requests of another thread.
    pub fn add(&mut self, other: &Self) {
        // Both histograms have the same bounds, so no value is out of range.
        let _ = self.nanos.add(&other.nanos);
    }

    /// Returns the percentiles so far.
    pub fn percentiles(&self) -> Percentiles {
        let at = |q| self.nanos.value_at_quantile(q) as f64 / 1e3;
        Percentiles {
            requests: self.nanos.len(),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: self.nanos.max() as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_score_that_is_no_number_is_not_passed_over() {
        assert_eq!(largest_difference(&[1.0, 5.0, 2.0], &[1.5, 2.0, 2.0]), 3.0);
        for at in 0..3 {
            let mut scores = [1.0, 9.0, 2.0];
            scores[at] = f32::NAN;
            assert!(
                largest_difference(&scores, &[0.0; 3]).is_nan()
                    && largest_difference(&[0.0; 3], &scores).is_nan()
            );
        }
    }

    proptest! {
        #[test]
        fn auc_is_the_share_of_ordered_pairs(
            samples in prop::collection::vec((0u8..20, prop::bool::ANY), 2..60),
        ) {
            let scores: Vec<f32> = samples.iter().map(|s| f32::from(s.0)).collect();
            let labels: Vec<f32> = samples.iter().map(|s| f32::from(u8::from(s.1))).collect();
            let (mut won, mut pairs) = (0.0, 0.0);
            for (i, p) in samples.iter().enumerate().filter(|(_, s)| s.1) {
                for (j, n) in samples.iter().enumerate().filter(|(_, s)| !s.1) {
                    let _ = (i, j);
                    pairs += 1.0;
                    won += match p.0.cmp(&n.0) {
                        std::cmp::Ordering::Greater => 1.0,
                        std::cmp::Ordering::Equal => 0.5,
                        std::cmp::Ordering::Less => 0.0,
                    };
                }
            }
            match auc(&scores, &labels) {
                None => prop_assert_eq!(pairs, 0.0),
                Some(a) => prop_assert!((a - won / pairs).abs() < 1e-9),
            }
        }
    }

    #[test]
    fn logloss_of_certainty_is_bounded() {
        assert!((logloss(&[0.5, 0.5], &[0.0, 1.0]).unwrap() - 2f64.ln()).abs() < 1e-9);
        assert!(logloss(&[1.0], &[0.0]).unwrap() < 17.0);
        assert_eq!(logloss(&[], &[]), None);
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut latencies = Latencies::default();
        (1..=1000).for_each(|us| latencies.record(Duration::from_micros(us)));
        let p = latencies.percentiles();
        assert!(
            (p.p50_us - 500.0).abs() < 2.0 && (p.p99_us - 990.0).abs() < 2.0 && p.requests == 1000
        );
    }
}
