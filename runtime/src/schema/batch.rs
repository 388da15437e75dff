//! A batch: dense features and, for each sparse feature, a jagged array of keys with offsets (the
//! layout of TorchRec's `KeyedJaggedTensor`, feature by feature). It takes its memory once and
//! never grows.

use crate::schema::Schema;
use crate::schema::sample::{Sample, SampleError, check_bag, check_dense};
use hatchback_kernels::lookup::Bags;

/// Samples that are scored together. Holding one proves that every sample has the shape of the
/// schema that the batch was made with.
///
/// ```
/// use hatchback::schema::batch::{Batch, BatchError};
/// use hatchback::schema::sample::Sample;
/// use hatchback::schema::{Network, Schema};
/// use hatchback::Activation;
///
/// let network =
///     Network { inputs: vec![], output: "score".to_owned(), activation: Activation::Sigmoid };
/// let schema = Schema {
///     dense_features: vec!["speed".to_owned(), "hour".to_owned()],
///     tables: vec![],
///     features: vec![],
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
    dense_features: usize,
    dense: Vec<f32>,
    features: Vec<Jagged>,
}

#[derive(Clone, Debug)]
struct Jagged {
    keys: Vec<u64>,
    offsets: Vec<u32>,
    /// Keys in the longest bag.
    longest: usize,
}

/// Why a batch refuses a sample.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum BatchError {
    /// The batch holds as many samples as it has room for.
    #[error("the batch holds its maximum of {0} samples")]
    Full(usize),
    /// The sample fits another schema than the one that the batch was made with.
    #[error("the batch was made for {features} sparse and {dense} dense features")]
    Schema { features: usize, dense: usize },
    /// The sample does not fit the schema.
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl Batch {
    /// Makes an empty batch with room for `capacity` samples.
    pub fn new(schema: &Schema, capacity: usize) -> Self {
        let jagged = |hotness: u32| {
            let mut offsets = Vec::with_capacity(capacity + 1);
            offsets.push(0);
            Jagged { keys: Vec::with_capacity(capacity * hotness as usize), offsets, longest: 0 }
        };
        Self {
            capacity,
            size: 0,
            dense_features: schema.dense_features.len(),
            dense: Vec::with_capacity(capacity * schema.dense_features.len()),
            features: schema.features.iter().map(|f| jagged(f.hotness_max)).collect(),
        }
    }

    /// Returns the bytes that a batch of `capacity` samples takes.
    pub fn bytes(schema: &Schema, capacity: usize) -> usize {
        let keys: usize = schema.lookups_max() * 8 + schema.features.len() * 4;
        capacity * (4 * schema.dense_features.len() + keys) + 4 * schema.features.len()
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        self.size = 0;
        self.dense.clear();
        for feature in &mut self.features {
            feature.keys.clear();
            feature.offsets.truncate(1);
            feature.longest = 0;
        }
    }

    /// Adds a sample.
    ///
    /// # Errors
    /// [`BatchError`] if the batch is full or the sample does not fit the schema. The batch is then
    /// unchanged.
    pub fn push(&mut self, schema: &Schema, sample: &Sample) -> Result<(), BatchError> {
        if self.size == self.capacity {
            return Err(BatchError::Full(self.capacity));
        }
        sample.check(schema)?;
        if sample.sparse.len() != self.features.len() || sample.dense.len() != self.dense_features {
            return Err(BatchError::Schema {
                features: self.features.len(),
                dense: self.dense_features,
            });
        }

        self.dense.extend_from_slice(&sample.dense);
        for (feature, bag) in self.features.iter_mut().zip(&sample.sparse) {
            feature.keys.extend_from_slice(bag);
            feature.offsets.push(feature.keys.len() as u32);
            feature.longest = feature.longest.max(bag.len());
        }
        self.size += 1;
        Ok(())
    }

    /// Adds a sample without a [`Sample`]: `dense` has its dense features, and `bag` appends the
    /// keys of a sparse feature, given by its number.
    ///
    /// # Errors
    /// Those of [`Batch::push`], and the error of `bag`. The batch is then unchanged.
    pub fn push_with<E: From<BatchError>>(
        &mut self,
        schema: &Schema,
        dense: impl Iterator<Item = f32>,
        mut bag: impl FnMut(usize, &mut Vec<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let filled = self.append_sample(schema, dense, &mut bag);
        if filled.is_err() {
            self.dense.truncate(self.size * self.dense_features);
            for feature in &mut self.features {
                feature.offsets.truncate(self.size + 1);
                let end = feature.offsets.last().map_or(0, |end| *end as usize);
                feature.keys.truncate(end);
            }
        }
        filled
    }

    fn append_sample<E: From<BatchError>>(
        &mut self,
        schema: &Schema,
        dense: impl Iterator<Item = f32>,
        bag: &mut impl FnMut(usize, &mut Vec<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.size == self.capacity {
            return Err(BatchError::Full(self.capacity).into());
        }
        let (features, before) = (schema.features.len(), self.dense.len());
        if features != self.features.len() || schema.dense_features.len() != self.dense_features {
            let dense = self.dense_features;
            return Err(BatchError::Schema { features: self.features.len(), dense }.into());
        }

        self.dense.extend(dense.take(self.dense_features + 1));
        check_dense(schema, &self.dense[before..]).map_err(BatchError::from)?;
        for (f, feature) in self.features.iter_mut().enumerate() {
            let start = feature.keys.len();
            bag(f, &mut feature.keys)?;
            let keys = feature.keys.len() - start;
            check_bag(&schema.features[f], keys).map_err(BatchError::from)?;
            feature.offsets.push(feature.keys.len() as u32);
        }

        for feature in &mut self.features {
            let keys = feature.offsets[self.size + 1] - feature.offsets[self.size];
            feature.longest = feature.longest.max(keys as usize);
        }
        self.size += 1;
        Ok(())
    }

    /// Adds the samples of `other`, which was made with the same schema. Returns false, and adds
    /// none, if there is no room.
    pub(crate) fn append(&mut self, other: &Self) -> bool {
        if self.size + other.size > self.capacity || self.features.len() != other.features.len() {
            return false;
        }
        self.dense.extend_from_slice(&other.dense);
        for (feature, more) in self.features.iter_mut().zip(&other.features) {
            let before = feature.keys.len() as u32;
            feature.keys.extend_from_slice(&more.keys);
            feature.offsets.extend(more.offsets[1..].iter().map(|end| before + end));
            feature.longest = feature.longest.max(more.longest);
        }
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

    /// Returns the dense features, `[size, dense features]`.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// Returns the number of sparse features.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// Returns the keys in the longest bag of feature `f`.
    pub fn hotness(&self, f: usize) -> usize {
        self.features[f].longest
    }

    /// Returns the keys of feature `f`, one bag for each sample.
    pub fn bags(&self, f: usize) -> Bags<'_> {
        Bags { keys: &self.features[f].keys, offsets: &self.features[f].offsets }
    }
}
