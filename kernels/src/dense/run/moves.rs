//! Copies of values by index tables. Most tables have a pattern: runs of neighbours, or values that
//! are repeated. It is found once, when a network is loaded, so that a run copies and fills whole
//! slices. Nothing here computes.

/// The pattern of an index table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dense) enum Pattern {
    /// Runs of this many neighbours.
    Runs(usize),
    /// The first values, this many, again and again.
    Rows(usize),
    /// Value `(i / each) % of` at position `i`: each value `each` times.
    Repeats { each: usize, of: usize },
}

impl Pattern {
    /// Returns the pattern of `picks`, which is not empty.
    pub fn of(picks: &[u32]) -> Self {
        let each = picks.iter().take_while(|&&p| p == picks[0]).count();
        let blocks = picks.len() / each;
        let of = (1..blocks).find(|&b| picks[b * each] == picks[0]).unwrap_or(blocks);
        let expected = |i: usize| (i / each) % of;
        let whole = each > 1 && picks.len().is_multiple_of(each);
        if whole && picks.iter().enumerate().all(|(i, &p)| p as usize == expected(i)) {
            return Self::Repeats { each, of };
        }

        let breaks = (1..picks.len()).filter(|&i| picks[i] != picks[i - 1].wrapping_add(1));
        let run = breaks.fold(picks.len(), gcd);
        let is_row = run < picks.len() && picks.iter().step_by(run).all(|first| *first == 0);
        if is_row { Self::Rows(run) } else { Self::Runs(run) }
    }

    /// Copies value `picks[i]` of each sample of `from`, which has `from_width` values, to value
    /// `i` of the sample in `out`.
    pub fn copy(self, picks: &[u32], from: &[f32], from_width: usize, out: &mut [f32]) {
        let samples = from.chunks_exact(from_width).zip(out.chunks_exact_mut(picks.len()));
        match self {
            Self::Runs(1) => {
                for (from, to) in samples {
                    to.iter_mut().zip(picks).for_each(|(to, &pick)| *to = from[pick as usize]);
                }
            }
            // Of a short run, the call of a copy takes longer than the copy.
            Self::Runs(2) => samples.for_each(|(from, to)| copy_runs::<2>(picks, from, to)),
            Self::Runs(4) => samples.for_each(|(from, to)| copy_runs::<4>(picks, from, to)),
            Self::Runs(8) => samples.for_each(|(from, to)| copy_runs::<8>(picks, from, to)),
            Self::Runs(16) => samples.for_each(|(from, to)| copy_runs::<16>(picks, from, to)),
            Self::Runs(run) => {
                for (from, to) in samples {
                    for (to, first) in to.chunks_exact_mut(run).zip(picks.iter().step_by(run)) {
                        to.copy_from_slice(&from[*first as usize..][..run]);
                    }
                }
            }
            Self::Rows(row) => {
                for (from, to) in samples {
                    to.chunks_exact_mut(row).for_each(|to| to.copy_from_slice(&from[..row]));
                }
            }
            Self::Repeats { each, of } => {
                for (from, to) in samples {
                    let values = from[..of].iter().cycle();
                    to.chunks_exact_mut(each).zip(values).for_each(|(to, x)| to.fill(*x));
                }
            }
        }
    }
}

/// Copies runs of `N` neighbours.
fn copy_runs<const N: usize>(picks: &[u32], from: &[f32], to: &mut [f32]) {
    for (to, first) in to.chunks_exact_mut(N).zip(picks.iter().step_by(N)) {
        to.copy_from_slice(&from[*first as usize..][..N]);
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_are_found() {
        assert_eq!(Pattern::of(&[4, 5, 0, 1]), Pattern::Runs(2));
        assert_eq!(Pattern::of(&[0, 1, 2, 0, 1, 2]), Pattern::Rows(3));
        assert_eq!(Pattern::of(&[0, 0, 1, 1, 0, 0, 1, 1]), Pattern::Repeats { each: 2, of: 2 });
        assert_eq!(Pattern::of(&[0, 0, 0]), Pattern::Repeats { each: 3, of: 1 });
        assert_eq!(Pattern::of(&[3, 1, 2]), Pattern::Runs(1));
        assert_eq!(Pattern::of(&[7]), Pattern::Runs(1));
    }

    proptest! {
        #[test]
        fn every_pattern_copies_what_its_table_says(
            picks in prop_oneof![
                prop::collection::vec(0..12u32, 1..40),
                (0..4u32, 1..5usize, 1..5usize).prop_map(|(first, run, n)| {
                    let runs = (0..n as u32).map(|i| first + i);
                    runs.flat_map(|first| first..first + run as u32).collect()
                }),
                (1..4usize, 1..4u32, 1..4usize).prop_map(|(each, of, times)| {
                    let one = (0..of).flat_map(move |i| std::iter::repeat_n(i, each));
                    std::iter::repeat_n(one, times).flatten().collect::<Vec<u32>>()
                }),
            ],
            samples in 1..4usize,
        ) {
            let from: Vec<f32> = (0..12 * samples).map(|i| i as f32).collect();
            let mut out = vec![f32::NAN; picks.len() * samples];
            Pattern::of(&picks).copy(&picks, &from, 12, &mut out);
            let expected: Vec<f32> = (0..samples)
                .flat_map(|s| picks.iter().map(move |&p| (s * 12) as f32 + p as f32))
                .collect();
            prop_assert_eq!(out, expected);
        }
    }
}
