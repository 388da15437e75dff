//! The columns of a batch: what they hold, and why one is refused. Never fills half a column: the
//! checks come before the values are added.

use crate::schema::sample::SampleError;
use crate::schema::{DenseFeature, Feature, Schema, optional_columns};
use hatchback_kernels::lookup::Bags;

/// The dense features of the samples of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseColumns<'a> {
    /// `[samples, dense features that are not shared]`.
    pub own: &'a [f32],
    /// `[shared_rows, shared dense features]`.
    pub shared: &'a [f32],
    /// 1, or the number of samples. Their rows of `shared` must then be equal.
    pub shared_rows: usize,
}

impl<'a, T: AsRef<[f32]> + ?Sized> From<&'a T> for DenseColumns<'a> {
    /// Returns the columns of a request without shared dense features.
    fn from(own: &'a T) -> Self {
        Self { own: own.as_ref(), shared: &[], shared_rows: 1 }
    }
}

/// The bags of a feature, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Jagged {
    pub(super) keys: Vec<u64>,
    /// One weight for each key; empty for a feature without weights.
    pub(super) weights: Vec<f32>,
    pub(super) offsets: Vec<u32>,
    /// Keys in the longest bag.
    pub(super) longest: usize,
    /// Whether a request has one bag, and not each of its samples.
    pub(super) shared: bool,
    /// The key that its bags leave out.
    pub(super) skipped: Option<u64>,
}

impl Jagged {
    /// Removes all but the first `bags` bags.
    pub(super) fn truncate(&mut self, bags: usize) {
        self.offsets.truncate(bags + 1);
        let end = self.offsets.last().map_or(0, |end| *end as usize);
        self.keys.truncate(end);
        self.weights.truncate(end);
    }

    /// Removes the skipped key and its weights from the values from `start` on.
    pub(super) fn skip(&mut self, start: usize) {
        let Some(skipped) = self.skipped else { return };
        // A wrong number of weights stays as it is, for the error of the caller.
        let is_weighted = self.weights.len() == self.keys.len();
        let mut kept = start;
        for at in start..self.keys.len() {
            if self.keys[at] == skipped {
                continue;
            }
            self.keys[kept] = self.keys[at];
            if is_weighted {
                self.weights[kept] = self.weights[at];
            }
            kept += 1;
        }
        self.keys.truncate(kept);
        if is_weighted {
            self.weights.truncate(kept);
        }
    }

    /// Removes the values after the last bag, which repeat it. Returns false if they differ.
    pub(super) fn drop_repeated(&mut self) -> bool {
        let &[.., start, end] = self.offsets.as_slice() else { return false };
        let (start, end) = (start as usize, end as usize);
        self.skip(end);
        let bits = |weight: &f32| weight.to_bits();
        let (weights, more) = self.weights.split_at(end.min(self.weights.len()));
        let weights = weights.get(start..).unwrap_or_default();
        let is_same = self.keys[start..end] == self.keys[end..]
            && weights.iter().map(bits).eq(more.iter().map(bits));
        self.keys.truncate(end);
        self.weights.truncate(end);
        is_same
    }

    /// Adds the bags of `samples` samples. The caller has checked the bags.
    pub(super) fn append(&mut self, bags: Bags<'_>, samples: usize) {
        let Bags { keys, offsets, weights } = bags;
        if self.skipped.is_some() {
            for ends in offsets[..=samples].windows(2) {
                let (start, bag) = (self.keys.len(), ends[0] as usize..ends[1] as usize);
                self.keys.extend_from_slice(&keys[bag.clone()]);
                self.weights.extend_from_slice(weights.get(bag).unwrap_or_default());
                self.skip(start);
                self.offsets.push(self.keys.len() as u32);
            }
            return;
        }
        let (from, before) = (offsets[0], self.keys.len() as u32);
        let read = from as usize..offsets[samples] as usize;
        self.keys.extend_from_slice(&keys[read.clone()]);
        self.weights.extend_from_slice(weights.get(read).unwrap_or_default());
        self.offsets.extend(offsets[1..=samples].iter().map(|end| before + (end - from)));
    }
}

/// Why a batch refuses a sample.
#[derive(Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum BatchError {
    /// The batch is full.
    #[error("the batch holds its maximum of {0} samples")]
    Full(usize),
    /// The caller's schema is not the one that the batch was made with.
    #[error("the batch was made for {features} sparse and {dense} dense features")]
    Schema { features: usize, dense: usize },
    /// The sample does not fit the schema.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A bag of a column is longer than its feature allows, or ends before it starts.
    #[error(
        "feature `{feature}`: offsets {from} to {to} of sample {sample}: a bag has 0 to {max} keys"
    )]
    Bag { feature: String, sample: usize, from: u32, to: u32, max: u32 },
    /// A column has another length than its samples need.
    #[error("{field}: {found} values for {samples} samples, the model takes {needed}")]
    Column { field: String, found: usize, samples: usize, needed: usize },
    /// A shared feature has another bag than the request's first sample.
    #[error("feature `{feature}` is shared: sample {sample} differs from the request's first")]
    Shared { feature: String, sample: usize },
    /// A weight is not a number.
    #[error("the weight of key {key} of feature `{feature}` is {value}")]
    Weight { feature: String, key: usize, value: f32 },
    /// A dense feature is not a number.
    #[error("sample {sample}: dense feature `{feature}` is {value}")]
    Dense { feature: String, sample: usize, value: f32 },
}

debug_as_display!(BatchError);

/// Appends `rows` rows of `values` to `dense`. Fills missing values and columns that were left out,
/// and drops those of retired features.
pub(super) fn append_rows<'a>(
    dense: &mut Vec<f32>,
    features: impl Iterator<Item = &'a DenseFeature> + Clone,
    rows: usize,
    values: &[f32],
) {
    let (before, columns, width) =
        (dense.len(), values.len() / rows.max(1), features.clone().count());
    // Most requests have all columns, and all of their values.
    if columns == width && features.clone().all(|feature| !feature.retired) {
        dense.extend_from_slice(values);
        for (at, value) in dense[before..].iter_mut().enumerate().filter(|(_, v)| v.is_nan()) {
            *value = features.clone().nth(at % width).map_or(*value, |f| f.filled(*value));
        }
        return;
    }
    for row in 0..rows {
        let sent = values[row * columns..][..columns].iter().copied();
        let row = features.clone().zip(sent.chain(std::iter::repeat(f32::NAN)));
        dense.extend(row.filter(|(f, _)| !f.retired).map(|(f, value)| f.filled(value)));
    }
}

/// Checks the columns of dense features, `[rows, columns]`.
pub(super) fn check_dense_column<'a>(
    features: impl DoubleEndedIterator<Item = &'a DenseFeature> + Clone,
    field: &str,
    rows: usize,
    dense: &[f32],
) -> Result<(), BatchError> {
    let (most, width) = (features.clone().count(), dense.len() / rows.max(1));
    // A request without samples has no columns either.
    let fits = rows == 0 || (most - optional_columns(features.clone())..=most).contains(&width);
    if dense.len() != rows * width || !fits {
        let (field, needed) = (field.to_owned(), rows * most);
        return Err(BatchError::Column { field, found: dense.len(), samples: rows, needed });
    }
    for (at, &value) in dense.iter().enumerate().filter(|(_, value)| !value.is_finite()) {
        if let Some(feature) = features.clone().nth(at % width).filter(|f| f.refuses(value)) {
            let (feature, sample) = (feature.name.clone(), at / width);
            return Err(BatchError::Dense { feature, sample, value });
        }
    }
    Ok(())
}

/// Checks that the rows of shared dense features, `[rows, columns]`, are equal.
pub(super) fn check_equal_rows(
    schema: &Schema,
    columns: usize,
    shared: &[f32],
) -> Result<(), BatchError> {
    for (at, value) in shared.iter().enumerate().skip(columns) {
        let feature = schema.dense_of(true).nth(at % columns);
        let bits = |feature: &DenseFeature, value: f32| feature.filled(value).to_bits();
        let differs = |f: &&DenseFeature| bits(f, *value) != bits(f, shared[at % columns]);
        if let Some(feature) = feature.filter(|f| !f.retired).filter(differs) {
            let (feature, sample) = (feature.name.clone(), at / columns);
            return Err(BatchError::Shared { feature, sample });
        }
    }
    Ok(())
}

/// Checks that each bag between two of `offsets` has at most as many keys as `feature` allows.
///
/// # Errors
/// [`BatchError::Bag`] with the first bag that has more, or that ends before it starts.
pub fn check_offsets(feature: &Feature, offsets: &[u32]) -> Result<(), BatchError> {
    let max = feature.hotness_max;
    let fits = |o: &[u32]| o[0] <= o[1] && o[1] - o[0] <= max;
    match offsets.windows(2).position(|o| !fits(o)) {
        Some(sample) => {
            let (feature, from, to) = (feature.name.clone(), offsets[sample], offsets[sample + 1]);
            Err(BatchError::Bag { feature, sample, from, to, max })
        }
        None => Ok(()),
    }
}

/// Checks the bags of `feature` for `samples` samples.
pub(super) fn check_bags(
    feature: &Feature,
    samples: usize,
    bags: Bags<'_>,
) -> Result<(), BatchError> {
    let Bags { keys, offsets, weights } = bags;
    let column = |part: &str, found, needed| {
        let field = format!("{part} of feature `{}`", feature.name);
        Err(BatchError::Column { field, found, samples, needed })
    };
    if offsets.len() != samples + 1 {
        return column("offsets", offsets.len(), samples + 1);
    }

    check_offsets(feature, offsets)?;
    let end = offsets[samples] as usize;
    if end > keys.len() {
        return column("keys", keys.len(), end);
    }
    let needed = if feature.weighted { end } else { 0 };
    if weights.len() < needed || (needed == 0 && !weights.is_empty()) {
        return column("weights", weights.len(), needed);
    }
    match weights[..needed].iter().position(|weight| !weight.is_finite()) {
        Some(key) => {
            let feature = feature.name.clone();
            Err(BatchError::Weight { feature, key, value: weights[key] })
        }
        None => Ok(()),
    }
}

/// Checks that the bags of a shared feature are equal in all samples of a request.
pub(super) fn check_equal(
    feature: &Feature,
    samples: usize,
    bags: Bags<'_>,
) -> Result<(), BatchError> {
    let Bags { keys, offsets, weights } = bags;
    let range = |sample: usize| offsets[sample] as usize..offsets[sample + 1] as usize;
    let bits = |sample: usize| {
        weights.get(range(sample)).unwrap_or_default().iter().map(|weight| weight.to_bits())
    };
    let same = |s: &usize| keys[range(*s)] == keys[range(0)] && bits(*s).eq(bits(0));
    match (1..samples).find(|sample| !same(sample)) {
        Some(sample) => Err(BatchError::Shared { feature: feature.name.clone(), sample }),
        None => Ok(()),
    }
}
