//! A batch: dense features and, for each sparse feature, a jagged array of keys with offsets (the
//! layout of TorchRec's `KeyedJaggedTensor`, feature by feature). A batch allocates its memory when
//! it is made and never grows.

use crate::schema::columns::{
    Jagged, append_rows, check_bags, check_dense_column, check_equal, check_equal_rows,
};
use crate::schema::sample::{Sample, check_bag, check_dense, check_weights};
use crate::schema::{Feature, Schema};

pub use crate::schema::columns::{BatchError, DenseColumns, check_offsets};
pub use hatchback_kernels::lookup::Bags;

/// Samples that are scored together. Holding one proves that every sample has the shape of the
/// schema that the batch was made with.
///
/// ```
/// use hatchback::schema::batch::{Batch, BatchError};
/// use hatchback::schema::sample::Sample;
/// use hatchback::schema::{DenseFeature, Network, NetworkOutput, Schema};
/// use hatchback::Activation;
///
/// let output = NetworkOutput { name: "score".to_owned(), activation: Activation::Sigmoid };
/// let network = Network { inputs: vec![], outputs: vec![output] };
/// let schema = Schema {
///     dense_features: vec![DenseFeature::plain("speed"), DenseFeature::plain("hour")],
///     tables: vec![],
///     features: vec![],
///     lookups: vec![],
///     network,
/// };
///
/// let mut batch = Batch::new(&schema, 1);
/// let sample = Sample { dense: vec![0.5, 9.0], ..Sample::default() };
/// batch.push(&schema, &sample)?;
/// assert_eq!((batch.size(), batch.dense()), (1, [0.5, 9.0].as_slice()));
/// assert!(matches!(batch.push(&schema, &sample), Err(BatchError::Full(1))));
/// # Ok::<(), BatchError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Batch {
    capacity: usize,
    size: usize,
    /// Values of a row of `dense`, and of `shared_dense`.
    dense_widths: [usize; 2],
    dense: Vec<f32>,
    /// A row for each request.
    shared_dense: Vec<f32>,
    features: Vec<Jagged>,
    /// The end of the samples of each request; empty if no feature is shared.
    ends: Vec<usize>,
}

impl Batch {
    /// Makes an empty batch with room for `capacity` samples.
    pub fn new(schema: &Schema, capacity: usize) -> Self {
        let jagged = |(f, feature): (usize, &Feature)| {
            let hotness = if feature.retired { 0 } else { feature.hotness_max };
            let keys = capacity * hotness as usize;
            let mut offsets = Vec::with_capacity(capacity + 1);
            offsets.push(0);
            Jagged {
                keys: Vec::with_capacity(keys),
                weights: Vec::with_capacity(if feature.weighted { keys } else { 0 }),
                offsets,
                longest: 0,
                shared: feature.shared,
                skipped: schema.skipped(f),
            }
        };
        Self {
            capacity,
            size: 0,
            dense_widths: [false, true].map(|shared| schema.dense_width(shared)),
            // Retired and shared columns are in it while a request is read.
            dense: Vec::with_capacity(capacity * schema.dense_features.len()),
            shared_dense: Vec::with_capacity(capacity * schema.dense_of(true).count()),
            features: schema.features.iter().enumerate().map(jagged).collect(),
            ends: Vec::with_capacity(if schema.has_shared() { capacity } else { 0 }),
        }
    }

    /// Returns the bytes that a batch of `capacity` samples takes.
    pub fn bytes(schema: &Schema, capacity: usize) -> usize {
        let weighted = schema.features.iter().filter(|f| f.weighted);
        let weights: usize = weighted.map(|f| 4 * f.hotness_max as usize).sum();
        let keys: usize = schema.keys_max() * 8 + weights + schema.features.len() * 4;
        let ends = if schema.has_shared() { size_of::<usize>() } else { 0 };
        let dense = schema.dense_features.len() + schema.dense_of(true).count();
        capacity * (4 * dense + keys + ends) + 4 * schema.features.len()
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        self.size = 0;
        self.dense.clear();
        self.shared_dense.clear();
        self.ends.clear();
        for feature in &mut self.features {
            feature.truncate(0);
            feature.longest = 0;
        }
    }

    /// Adds a sample. Its shared bags are its own: it is a request of one sample.
    ///
    /// # Errors
    /// Those of [`Batch::push_request`].
    pub fn push(&mut self, schema: &Schema, sample: &Sample) -> Result<(), BatchError> {
        self.push_request(schema, std::slice::from_ref(sample))
    }

    /// Adds the samples of one request, whose shared bags and values are equal.
    ///
    /// # Errors
    /// [`BatchError`] if there is no room, or a sample does not fit. The batch is then unchanged.
    pub fn push_request(&mut self, schema: &Schema, samples: &[Sample]) -> Result<(), BatchError> {
        if samples.len() > self.capacity - self.size {
            return Err(BatchError::Full(self.capacity));
        }
        samples.iter().try_for_each(|sample| sample.check(schema))?;
        let dense = |sample: usize| samples[sample].dense.iter().copied();
        let bag = |sample: usize, f: usize, keys: &mut Vec<u64>, weights: &mut Vec<f32>| {
            keys.extend_from_slice(&samples[sample].sparse[f]);
            weights.extend(samples[sample].weights.get(f).into_iter().flatten());
            Ok(())
        };
        self.push_with(schema, samples.len(), dense, |_| true, bag)
    }

    /// Ends a request of `samples` samples. Counts them, or removes them if one was not `appended`.
    fn end_request<E>(&mut self, samples: usize, appended: Result<(), E>) -> Result<(), E> {
        if appended.is_err() {
            self.cut();
            return appended;
        }
        for feature in &mut self.features {
            let before = if feature.shared { self.ends.len() } else { self.size };
            let added = feature.offsets[before..].windows(2).map(|o| o[1] - o[0]);
            feature.longest = feature.longest.max(added.max().unwrap_or(0) as usize);
        }
        self.size += samples;
        let is_shared = self.dense_widths[1] > 0 || self.features.iter().any(|f| f.shared);
        if samples > 0 && is_shared {
            self.ends.push(self.size);
        }
        Ok(())
    }

    /// Adds the `samples` samples of a request from columns. `bags` returns the keys, offsets and
    /// weights of a sparse feature, given by its number, and is called at most once for each. A
    /// feature of which it returns `None` has empty bags. The offsets of a feature are `[samples +
    /// 1]`; the keys before the first offset are not read. A shared feature has one bag, or
    /// `samples` equal ones. `dense` may lack the last columns, as far as
    /// [`optional_columns`](crate::schema::optional_columns) says. A request without samples has no
    /// dense values.
    ///
    /// # Errors
    /// [`BatchError`] if there is no room or a column does not fit the schema, and the error of
    /// `bags`. The batch is then unchanged.
    pub fn push_columns<'a, E: From<BatchError>>(
        &mut self,
        schema: &Schema,
        samples: usize,
        dense: impl Into<DenseColumns<'a>>,
        mut bags: impl FnMut(usize) -> Result<Option<Bags<'a>>, E>,
    ) -> Result<(), E> {
        self.check_room(schema, samples)?;
        let DenseColumns { own, shared, shared_rows } = dense.into();
        check_dense_column(schema.dense_of(false), "dense", samples, own)?;
        check_dense_column(
            schema.dense_of(true),
            "shared dense",
            shared_rows.min(samples),
            shared,
        )?;
        let columns = shared.len() / shared_rows.max(1);
        check_equal_rows(schema, columns, shared)?;

        append_rows(&mut self.dense, schema.dense_of(false), samples, own);
        let first = &shared[..columns.min(shared.len())];
        append_rows(&mut self.shared_dense, schema.dense_of(true), samples.min(1), first);
        let appended = (0..schema.features.len()).try_for_each(|f| -> Result<(), E> {
            let (feature, own) = (&schema.features[f], &mut self.features[f]);
            let kept = if own.shared { samples.min(1) } else { samples };
            let column = if feature.retired { None } else { bags(f)? };
            let Some(column) = column else {
                let end = own.keys.len() as u32;
                own.offsets.extend(std::iter::repeat_n(end, kept));
                return Ok(());
            };
            // One bag of a request without samples is not kept: no sample reads it.
            let is_one = own.shared && column.offsets.len() == 2;
            let rows = if is_one { 1 } else { samples };
            check_bags(feature, rows, column)?;
            if own.shared && rows > 1 {
                check_equal(feature, rows, column)?;
            }
            own.append(column, kept);
            Ok(())
        });
        self.end_request(samples, appended)
    }

    /// Checks that `samples` more samples fit, and that the batch was made with a schema of the
    /// same shape.
    fn check_room(&self, schema: &Schema, samples: usize) -> Result<(), BatchError> {
        if samples > self.capacity - self.size {
            return Err(BatchError::Full(self.capacity));
        }
        let (features, widths) = (self.features.len(), self.dense_widths);
        let is_same = schema.features.len() == features
            && [false, true].map(|shared| schema.dense_width(shared)) == widths;
        let dense = widths.iter().sum();
        if is_same { Ok(()) } else { Err(BatchError::Schema { features, dense }) }
    }

    /// Removes the values that were appended after the last whole sample.
    fn cut(&mut self) {
        self.dense.truncate(self.size * self.dense_widths[0]);
        self.shared_dense.truncate(self.ends.len() * self.dense_widths[1]);
        for feature in &mut self.features {
            feature.truncate(if feature.shared { self.ends.len() } else { self.size });
        }
    }

    /// Adds the `samples` samples of a request from their parts, without a [`Sample`]. `dense`
    /// returns the dense features of a sample, given by its number. `bag` appends the keys that a
    /// sample has for a feature, both given by their numbers, and the weights of a weighted
    /// feature. A shared feature has the bag of the first sample. If it `repeats`, the bags of the
    /// others must be equal. Shared dense features must always be equal.
    ///
    /// # Errors
    /// Those of [`Batch::push_request`], and the error of `bag`. The batch is then unchanged.
    pub fn push_with<E: From<BatchError>, D: Iterator<Item = f32>>(
        &mut self,
        schema: &Schema,
        samples: usize,
        dense: impl Fn(usize) -> D,
        repeats: impl Fn(usize) -> bool,
        mut bag: impl FnMut(usize, usize, &mut Vec<u64>, &mut Vec<f32>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check_room(schema, samples)?;
        let appended = (0..samples).try_for_each(|sample| {
            self.append_sample(schema, sample, dense(sample), |f, own| {
                let is_repeated = own.shared && sample > 0;
                if is_repeated && !repeats(f) {
                    return Ok(false);
                }
                bag(sample, f, &mut own.keys, &mut own.weights)?;
                if is_repeated && !own.drop_repeated() {
                    let feature = schema.features[f].name.clone();
                    return Err(BatchError::Shared { feature, sample }.into());
                }
                Ok(!is_repeated)
            })
        });
        self.end_request(samples, appended)
    }

    /// Appends `sample` of a request, counted from 0. `append` returns whether it appended a bag.
    fn append_sample<E: From<BatchError>>(
        &mut self,
        schema: &Schema,
        sample: usize,
        dense: impl Iterator<Item = f32>,
        mut append: impl FnMut(usize, &mut Jagged) -> Result<bool, E>,
    ) -> Result<(), E> {
        let before = self.dense.len();
        self.dense.extend(dense.take(schema.dense_features.len() + 1));
        check_dense(schema, &self.dense[before..]).map_err(BatchError::from)?;
        self.settle_dense(schema, before, sample)?;
        for (f, feature) in self.features.iter_mut().enumerate() {
            if schema.features[f].retired {
                feature.offsets.push(0);
                continue;
            }
            let start = feature.keys.len();
            if !append(f, feature)? {
                continue;
            }
            let (keys, schema) = (feature.keys.len() - start, &schema.features[f]);
            check_bag(schema, keys).map_err(BatchError::from)?;
            let weights = feature.weights.get(start..).unwrap_or_default();
            check_weights(schema, keys, weights).map_err(BatchError::from)?;
            feature.skip(start);
            feature.offsets.push(feature.keys.len() as u32);
        }
        Ok(())
    }

    /// Brings the dense features of one sample, `dense[before..]`, into place: fills missing
    /// values, drops retired ones and moves shared ones to those of the request. They must equal
    /// those of the request's first sample.
    fn settle_dense(
        &mut self,
        schema: &Schema,
        before: usize,
        sample: usize,
    ) -> Result<(), BatchError> {
        let row = self.shared_dense.len() - if sample > 0 { self.dense_widths[1] } else { 0 };
        let (mut kept, mut shared) = (before, row..);
        for (at, feature) in (before..).zip(&schema.dense_features) {
            let value = feature.filled(self.dense[at]);
            if feature.retired {
                continue;
            }
            if !feature.shared {
                self.dense[kept] = value;
                kept += 1;
                continue;
            }
            match shared.next().and_then(|at| self.shared_dense.get(at)) {
                None => self.shared_dense.push(value),
                Some(first) if first.to_bits() != value.to_bits() => {
                    return Err(BatchError::Shared { feature: feature.name.clone(), sample });
                }
                Some(_) => {}
            }
        }
        self.dense.truncate(kept);
        Ok(())
    }

    /// Adds the samples of `other`, which was made with the same schema. Returns false, and adds
    /// none, if there is no room.
    pub(crate) fn append(&mut self, other: &Self) -> bool {
        if self.size + other.size > self.capacity || self.features.len() != other.features.len() {
            return false;
        }
        self.dense.extend_from_slice(&other.dense);
        self.shared_dense.extend_from_slice(&other.shared_dense);
        for (feature, more) in self.features.iter_mut().zip(&other.features) {
            let before = feature.keys.len() as u32;
            feature.keys.extend_from_slice(&more.keys);
            feature.weights.extend_from_slice(&more.weights);
            feature.offsets.extend(more.offsets[1..].iter().map(|end| before + end));
            feature.longest = feature.longest.max(more.longest);
        }
        self.ends.extend(other.ends.iter().map(|end| self.size + end));
        self.size += other.size;
        true
    }

    /// Returns the samples in the batch.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns whether the batch has no sample.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Returns the dense features of each sample, without retired ones, `[size, width]`.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// Returns the dense features that the samples of a request share, without retired ones,
    /// `[requests, width]`.
    pub fn shared_dense(&self) -> &[f32] {
        &self.shared_dense
    }

    /// Returns the dense features of each sample, or the shared ones of each request, `[rows,
    /// width]`, and the width.
    pub(crate) fn dense_rows(&self, shared: bool) -> (&[f32], usize) {
        let values = if shared { &self.shared_dense } else { &self.dense };
        (values, self.dense_widths[usize::from(shared)])
    }

    /// Returns the number of sparse features.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// Returns the keys in the longest bag of feature `f`.
    pub fn hotness(&self, f: usize) -> usize {
        self.features[f].longest
    }

    /// Returns the end of the samples of each request; empty if no feature is shared.
    pub fn ends(&self) -> &[usize] {
        &self.ends
    }

    /// Returns the keys of feature `f` and their weights: one bag for each sample, or for each
    /// request if the feature is shared.
    pub fn bags(&self, f: usize) -> Bags<'_> {
        let Jagged { keys, weights, offsets, .. } = &self.features[f];
        Bags { keys, offsets, weights }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{DenseFeature, Network};

    fn schema() -> Schema {
        Schema {
            dense_features: vec![
                DenseFeature { missing: Some(-1.5), ..DenseFeature::plain("a") },
                DenseFeature::plain("b"),
            ],
            tables: vec![],
            features: vec![
                Feature::plain("x", 1),
                Feature { weighted: true, ..Feature::plain("y", 3) },
            ],
            lookups: vec![],
            network: Network { inputs: vec![], outputs: vec![] },
        }
    }

    const DENSE: [f32; 4] = [0.5, 1.0, 2.0, 3.0];
    const X: Bags<'_> = Bags { keys: &[9, 7], offsets: &[1, 2, 2], weights: &[] };
    const Y: Bags<'_> =
        Bags { keys: &[1, 2, 3, 4], offsets: &[0, 3, 4], weights: &[0.5, 1.5, 2.5, 3.5] };

    fn both(f: usize) -> Result<Option<Bags<'static>>, BatchError> {
        Ok(Some([X, Y][f]))
    }

    #[test]
    fn columns_are_the_same_as_samples() {
        let (schema, mut by_sample) = (schema(), Batch::new(&schema(), 5));
        let sample = |dense: &[f32], x: &[u64], y: &[u64]| Sample {
            dense: dense.to_vec(),
            sparse: vec![x.to_vec(), y.to_vec()],
            weights: vec![vec![], y.iter().map(|key| *key as f32 - 0.5).collect()],
            ..Sample::default()
        };
        let mut by_column = by_sample.clone();
        for _ in 0..2 {
            by_sample.push(&schema, &sample(&DENSE[..2], &[7], &[1, 2, 3])).unwrap();
            by_sample.push(&schema, &sample(&DENSE[2..], &[], &[4])).unwrap();
            by_column.push_columns(&schema, 2, &DENSE, both).unwrap();
        }
        assert_eq!(format!("{by_column:?}"), format!("{by_sample:?}"));
        let full = by_column.push_columns(&schema, 2, &DENSE, both);
        assert_eq!(full, Err(BatchError::Full(5)));
    }

    #[test]
    fn a_pooled_bag_leaves_its_padding_out_in_each_form() {
        let mut schema = schema();
        schema.features[1].padding = Some(2);
        for shared in [false, true] {
            schema.features[1].shared = shared;
            let y = Bags { keys: &[1, 2, 3, 1, 2, 3], offsets: &[0, 3, 6], weights: &[0.5; 6] };
            let sample = Sample {
                dense: vec![0.5, 1.0],
                sparse: vec![vec![], vec![1, 2, 3]],
                weights: vec![vec![], vec![0.5; 3]],
                ..Sample::default()
            };
            let (mut by_sample, mut by_column) = (Batch::new(&schema, 2), Batch::new(&schema, 2));
            by_sample.push_request(&schema, &[sample.clone(), sample]).unwrap();
            let none = Bags { keys: &[], offsets: &[0, 0, 0], weights: &[] };
            let bags = |f: usize| Ok::<_, BatchError>(Some([none, y][f]));
            by_column.push_columns(&schema, 2, &[0.5, 1.0, 0.5, 1.0], bags).unwrap();
            assert_eq!(format!("{by_column:?}"), format!("{by_sample:?}"));
            let Bags { keys, offsets, weights } = by_sample.bags(1);
            let bags = if shared { 1 } else { 2 };
            assert_eq!((keys, offsets), ([1, 3].repeat(bags).as_slice(), &[0, 2, 4][..=bags]));
            assert_eq!((weights.len(), by_sample.hotness(1)), (keys.len(), 2));
        }
    }

    #[test]
    fn a_missing_value_becomes_that_of_its_feature_in_each_form() {
        let (schema, mut batch) = (schema(), Batch::new(&schema(), 3));
        let sample = Sample {
            dense: vec![f32::NAN, 2.0],
            sparse: vec![vec![], vec![]],
            ..Sample::default()
        };
        batch.push(&schema, &sample).unwrap();
        let none = Bags { keys: &[], offsets: &[0, 0], weights: &[] };
        batch.push_columns::<BatchError>(&schema, 1, &sample.dense, |_| Ok(Some(none))).unwrap();
        let dense = sample.dense.iter().copied();
        batch
            .push_with::<BatchError, _>(
                &schema,
                1,
                |_| dense.clone(),
                |_| true,
                |_, _, _, _| Ok(()),
            )
            .unwrap();
        assert_eq!(batch.dense(), [-1.5, 2.0].repeat(3));
        let infinite = Sample { dense: vec![f32::INFINITY, 2.0], ..sample };
        let error = Batch::new(&schema, 1).push(&schema, &infinite).unwrap_err();
        assert_eq!(error.to_string(), "dense[0]: `a` is inf");
    }

    #[test]
    fn a_column_that_does_not_fit_is_named_and_changes_nothing() {
        let (schema, mut batch) = (schema(), Batch::new(&schema(), 5));
        let empty = format!("{batch:?}");
        let mut refused = |dense: &[f32], y: Bags<'static>| {
            let bags = |f: usize| Ok::<_, BatchError>(Some([X, y][f]));
            let error = batch.push_columns(&schema, 2, dense, bags).unwrap_err();
            assert_eq!(format!("{batch:?}"), empty);
            error.to_string()
        };
        let with = |offsets: &'static [u32]| Bags { offsets, ..Y };
        for (said, expected) in [
            (refused(&DENSE[1..], Y), "dense: 3 values for 2 samples, the model takes 4"),
            (refused(&[0.0, 1.0, 2.0, f32::NAN], Y), "sample 1: dense feature `b` is NaN"),
            (refused(&DENSE, with(&[0, 3])), "offsets of feature `y`: 2 values for 2 samples"),
            (refused(&DENSE, with(&[0, 4, 4])), "feature `y`: offsets 0 to 4 of sample 0"),
            (refused(&DENSE, with(&[3, 1, 2])), "feature `y`: offsets 3 to 1 of sample 0"),
            (refused(&DENSE, with(&[3, 3, 5])), "keys of feature `y`: 4 values for 2 samples"),
            (refused(&DENSE, Bags { weights: &[1.0; 3], ..Y }), "weights of feature `y`: 3 values"),
            (
                refused(&DENSE, Bags { weights: &[1.0, 2.0, f32::NAN, 3.0], ..Y }),
                "the weight of key 2 of feature `y` is NaN",
            ),
        ] {
            assert!(said.contains(expected), "{said}");
        }
    }
}
