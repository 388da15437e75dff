//! The inputs and output of a lookup. The inputs are a feature with its table and its columns, and
//! the keys of a batch. The output is the network input that receives the pooled bags. A feature
//! here has one table: a column that feeds several tables is as many features. The methods here
//! write one bag's columns. They never look a row up.

use crate::cache::Cache;
use crate::cache::codec::RowFormat;
use crate::cache::resident::Resident;
use crate::lookup::pooling::Combine;
use crate::simd::Simd;
use serde::{Deserialize, Serialize};

/// The function that makes one vector of the rows of a bag. An empty bag gives zeros. The order of
/// the variants is part of the bundle format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The sum of the rows, from zero, in key order.
    Sum,
    /// The sum divided by the number of keys, or by the sum of their weights.
    Mean,
    /// The rows side by side, `hotness_max` of them. The rest of a shorter bag is zeros.
    None,
    /// The sum divided by the square root of the number of keys, or of the sum of the squares of
    /// their weights.
    Sqrtn,
    /// The largest value of each column; of equal values the first.
    Max,
}

/// The memory that holds a feature's rows.
#[derive(Clone, Copy)]
pub enum RowStore<'a> {
    /// The embedding cache: a row that it does not hold is a miss.
    Cached(&'a Cache),
    /// A resident table: a key that it does not hold is absent.
    Resident(&'a Resident),
}

/// The view of one sparse feature for a lookup.
#[derive(Clone, Copy)]
pub struct FeatureView<'a> {
    /// Number of the feature. Every open bag holds it too.
    pub id: u16,
    /// Number of the table.
    pub table: u16,
    /// Encoding of the table's rows.
    pub format: RowFormat,
    /// End of an indexed table's keys: this key and the keys above are absent.
    pub keys_end: Option<u64>,
    /// The row that is used for a key that is absent, damaged or late, `[dim]`.
    pub default_row: &'a [f32],
    /// The function that makes a vector of a bag.
    pub pooling: Pooling,
    /// The memory that holds the rows.
    pub rows: RowStore<'a>,
    /// First column of the feature in its network input.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// A feature's keys in the jagged layout: sample `s` has `keys[offsets[s]..offsets[s + 1]]`.
#[derive(Clone, Copy)]
pub struct Bags<'a> {
    /// All keys, `[offsets[batch]]`.
    pub keys: &'a [u64],
    /// Bounds of each sample's keys, `[batch + 1]`.
    pub offsets: &'a [u32],
    /// The factor of each key's row, `[offsets[batch]]`; empty if the feature has no weights.
    pub weights: &'a [f32],
}

impl<'a> Bags<'a> {
    /// Returns bags whose keys have no weights.
    pub fn new(keys: &'a [u64], offsets: &'a [u32]) -> Self {
        Self { keys, offsets, weights: &[] }
    }

    /// Returns the weights of the keys of `sample`; empty if the feature has no weights.
    pub fn weights_of(&self, sample: usize) -> &'a [f32] {
        if self.weights.is_empty() {
            return &[];
        }
        &self.weights[self.offsets[sample] as usize..self.offsets[sample + 1] as usize]
    }
}

/// A row's position in its bag, with its weight.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub position: usize,
    /// The factor of the row, if the feature has weights.
    pub weight: Option<f32>,
}

impl Place {
    /// Returns the place of row `position` of a bag with these `weights`, none or one a key.
    #[inline(always)]
    pub fn of(position: usize, weights: &[f32]) -> Self {
        Self { position, weight: weights.get(position).copied() }
    }
}

/// A network input, `[batch, stride]`, in row order.
pub struct Input<'a> {
    /// The values.
    pub data: &'a mut [f32],
    /// Columns of the whole input.
    pub stride: usize,
}

impl FeatureView<'_> {
    /// Returns the feature's columns of `sample`, `[width]`.
    #[inline(always)]
    pub(super) fn columns<'o>(&self, input: &'o mut Input<'_>, sample: usize) -> &'o mut [f32] {
        let start = sample * input.stride + self.column;
        &mut input.data[start..start + self.width]
    }

    /// Returns the columns of the row at `position` of its bag, and whether that row is the first
    /// in those columns.
    #[inline(always)]
    fn row_columns<'o>(&self, position: usize, out: &'o mut [f32]) -> (&'o mut [f32], bool) {
        let dim = self.format.dim();
        match self.pooling {
            Pooling::None => (&mut out[position * dim..(position + 1) * dim], true),
            _ => (out, position == 0),
        }
    }

    /// Adds the encoded row at `place` of a bag to the bag's columns `out` `[width]`.
    #[inline(always)]
    pub(super) fn add_row<S: Simd>(&self, bytes: &[u8], place: Place, out: &mut [f32]) {
        let (out, first) = self.row_columns(place.position, out);
        match (self.pooling, place.weight) {
            (Pooling::Max, _) => self.format.maximize::<S>(bytes, out, first),
            (_, Some(weight)) => self.format.accumulate_weighted::<S>(bytes, weight, out, first),
            (_, None) => self.format.accumulate::<S>(bytes, out, first),
        }
    }

    /// Adds the default row at `place` of a bag to the bag's columns `out` `[width]`.
    pub(super) fn add_default(&self, place: Place, out: &mut [f32]) {
        let (out, first) = self.row_columns(place.position, out);
        for (o, &value) in out.iter_mut().zip(self.default_row) {
            // From zero, as `accumulate` does: with a default of -0.0 the sum is 0.0.
            let before = if first { 0.0 } else { *o };
            *o = match (self.pooling, place.weight) {
                (Pooling::Max, _) if first || value > *o => value,
                (Pooling::Max, _) => *o,
                (_, Some(weight)) => before + value * weight,
                (_, None) => before + value,
            };
        }
    }

    /// Returns the combination of a bag's rows, with the weights of the keys from `start` to `end`.
    #[inline(always)]
    pub(super) fn combine<'w>(&self, weights: &'w [f32], start: usize, end: usize) -> Combine<'w> {
        match self.pooling {
            Pooling::Max => Combine::Max,
            _ if weights.is_empty() => Combine::Sum,
            _ => Combine::Weighted(&weights[start..end]),
        }
    }

    /// Completes the columns `out` `[width]` of a bag after the rows of its `keys` keys were added.
    /// `weights` has a weight for each key, or is empty.
    #[inline(always)]
    pub(super) fn close_bag(&self, keys: usize, weights: &[f32], out: &mut [f32]) {
        match self.pooling {
            _ if keys == 0 => out.fill(0.0),
            Pooling::Mean | Pooling::Sqrtn if !weights.is_empty() => {
                divide(out, self.pooling, weights);
            }
            Pooling::Mean if keys > 1 => out.iter_mut().for_each(|o| *o /= keys as f32),
            Pooling::Sqrtn if keys > 1 => {
                let root = (keys as f32).sqrt();
                out.iter_mut().for_each(|o| *o /= root);
            }
            Pooling::None => out[keys * self.format.dim()..].fill(0.0),
            _ => {}
        }
    }
}

/// Divides a weighted sum `[width]` by the divisor of `pooling`. If the divisor is zero, the result
/// is zeros. Sums the weights in key order, so that the result has the same bits on every CPU.
fn divide(out: &mut [f32], pooling: Pooling, weights: &[f32]) {
    let divisor = match pooling {
        Pooling::Sqrtn => weights.iter().fold(0.0, |sum, w| sum + w * w).sqrt(),
        _ => weights.iter().fold(0.0, |sum, w| sum + w),
    };
    match divisor {
        0.0 => out.fill(0.0),
        _ => out.iter_mut().for_each(|o| *o /= divisor),
    }
}
