//! A batch: dense features and, for each sparse feature, a jagged array of keys with offsets (the
//! layout of TorchRec's `KeyedJaggedTensor`, feature by feature). It takes its memory once and
//! never grows.

use crate::schema::sample::{Sample, SampleError};
use crate::schema::{Feature, Schema};
use hatchback_kernels::lookup::Bags;

/// Samples that are scored together. Holding one proves that every sample has the shape of the
/// schema that the batch was made with.
///
/// ```
/// use hatchback::schema::batch::{Batch, BatchError};
/// use hatchback::schema::sample::Sample;
/// use hatchback::schema::{Network, NetworkOutput, Schema};
/// use hatchback::Activation;
///
/// let output = NetworkOutput { name: "score".to_owned(), activation: Activation::Sigmoid };
/// let network = Network { inputs: vec![], outputs: vec![output] };
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
    /// One for each key, or none.
    weights: Vec<f32>,
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
        let jagged = |feature: &Feature| {
            let keys = capacity * feature.hotness_max as usize;
            let mut offsets = Vec::with_capacity(capacity + 1);
            offsets.push(0);
            Jagged {
                keys: Vec::with_capacity(keys),
                weights: Vec::with_capacity(if feature.weighted { keys } else { 0 }),
                offsets,
                longest: 0,
            }
        };
        Self {
            capacity,
            size: 0,
            dense_features: schema.dense_features.len(),
            dense: Vec::with_capacity(capacity * schema.dense_features.len()),
            features: schema.features.iter().map(jagged).collect(),
        }
    }

    /// Returns the bytes that a batch of `capacity` samples takes.
    pub fn bytes(schema: &Schema, capacity: usize) -> usize {
        let weighted = schema.features.iter().filter(|f| f.weighted);
        let weights: usize = weighted.map(|f| 4 * f.hotness_max as usize).sum();
        let keys: usize = schema.lookups_max() * 8 + weights + schema.features.len() * 4;
        capacity * (4 * schema.dense_features.len() + keys) + 4 * schema.features.len()
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        self.size = 0;
        self.dense.clear();
        for feature in &mut self.features {
            feature.keys.clear();
            feature.weights.clear();
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
        for (f, (feature, bag)) in self.features.iter_mut().zip(&sample.sparse).enumerate() {
            feature.keys.extend_from_slice(bag);
            feature.weights.extend(sample.weights.get(f).into_iter().flatten());
            feature.offsets.push(feature.keys.len() as u32);
            feature.longest = feature.longest.max(bag.len());
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
            feature.weights.extend_from_slice(&more.weights);
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

    /// Returns the keys of feature `f`, one bag for each sample, and their weights.
    pub fn bags(&self, f: usize) -> Bags<'_> {
        let Jagged { keys, weights, offsets, .. } = &self.features[f];
        Bags { keys, offsets, weights }
    }
}
