//! Exact sums of columns of f32 values, for the mean row of a table. A sum of floats depends on
//! their order. These sums do not, so parts of a table can be summed on several machines.

use serde::{Deserialize, Serialize};

/// Exponents of an f32.
const EXPONENTS: usize = 256;
const MANTISSA_BITS: u32 = 23;
/// The exponent of an f32 with exponent field `e` is `e - BIAS` for its mantissa as an integer.
const BIAS: i32 = 150;

/// The sums of the columns of some rows. Each sum is kept as the sum of the integer mantissas of
/// each exponent, which is exact for up to 2^39 rows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ColumnSums {
    /// `[dim, EXPONENTS]`
    mantissas: Vec<i64>,
}

impl ColumnSums {
    /// Returns the sums of no rows of `dim` values.
    pub(super) fn new(dim: usize) -> Self {
        Self { mantissas: vec![0; dim * EXPONENTS] }
    }

    /// Adds a row of finite values.
    pub(super) fn add(&mut self, row: &[f32]) {
        for (value, column) in row.iter().zip(self.mantissas.as_chunks_mut::<EXPONENTS>().0) {
            let bits = value.to_bits();
            let exponent = (bits >> MANTISSA_BITS) as u8;
            let implicit = u32::from(exponent != 0) << MANTISSA_BITS;
            let mantissa = i64::from((bits & ((1 << MANTISSA_BITS) - 1)) | implicit);
            column[usize::from(exponent)] += if bits >> 31 == 0 { mantissa } else { -mantissa };
        }
    }

    /// Adds the sums of other rows.
    pub(super) fn join(&mut self, other: &Self) {
        self.mantissas.iter_mut().zip(&other.mantissas).for_each(|(sum, more)| *sum += more);
    }

    /// Returns the means of the columns of `rows` rows.
    pub(super) fn means(&self, rows: u64) -> Vec<f32> {
        let columns = self.mantissas.as_chunks::<EXPONENTS>().0.iter();
        columns.map(|column| (sum(column) / rows.max(1) as f64) as f32).collect()
    }
}

/// Returns the sum of mantissas, from the largest exponent to the smallest.
fn sum(column: &[i64; EXPONENTS]) -> f64 {
    let value = |(exponent, mantissa): (usize, &i64)| {
        *mantissa as f64 * f64::from((exponent as i32).max(1) - BIAS).exp2()
    };
    column.iter().enumerate().rev().map(value).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sums_are_exact_where_floats_lose_the_small_values() {
        let mut sums = ColumnSums::new(2);
        let rows = [[1e30, 1.0], [3.0, f32::MIN_POSITIVE / 4.0], [-1e30, -1.0], [5.0, 0.0]];
        rows.iter().for_each(|row| sums.add(row));
        assert_eq!(sums.means(4), [2.0, f32::MIN_POSITIVE / 16.0]);
        assert_eq!(ColumnSums::new(3).means(0), [0.0; 3]);
    }

    proptest! {
        #[test]
        fn the_means_of_parts_are_those_of_the_whole_in_any_order(
            values in prop::collection::vec(-1e9f32..1e9, 1..200),
            cut in any::<prop::sample::Index>(),
        ) {
            let rows = values.len() as u64;
            let sums_of = |values: &[f32]| {
                let mut sums = ColumnSums::new(1);
                values.chunks(1).for_each(|row| sums.add(row));
                sums
            };
            let whole = sums_of(&values).means(rows);
            let (left, right) = values.split_at(cut.index(values.len()));
            let mut joined = sums_of(right);
            joined.join(&sums_of(left));
            prop_assert_eq!(&joined.means(rows), &whole);

            let plain = values.iter().map(|v| f64::from(*v)).sum::<f64>() / rows as f64;
            prop_assert!((f64::from(whole[0]) - plain).abs() <= 1e-6 * plain.abs() + 1e-5);
        }
    }
}
