//! A batch: dense features and, for each sparse feature, a jagged array of keys with offsets (the
//! layout of TorchRec's `KeyedJaggedTensor`, feature by feature). Memory is taken once and reused.

use crate::schema::Schema;
use crate::schema::sample::{Sample, SampleError};
use hatchback_kernels::lookup::Bags;

/// Samples to score together. Holding one proves that all samples have the shape of the schema it
/// was made with.
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

/// Why a sample does not go into a batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The batch holds as many samples as it has room for.
    #[error("the batch holds its maximum of {0} samples")]
    Full(usize),
    /// The sample fits a schema that is not the one that the batch was made with.
    #[error("the batch was made for {features} sparse and {dense} dense features")]
    Schema {
        /// Sparse features of the batch.
        features: usize,
        /// Dense features of the batch.
        dense: usize,
    },
    /// The sample does not fit the schema.
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl Batch {
    /// An empty batch for up to `capacity` samples.
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

    /// Bytes that a batch of `capacity` samples takes.
    pub fn bytes(schema: &Schema, capacity: usize) -> usize {
        let keys: usize = schema.lookups_max() * 8 + schema.features.len() * 4;
        capacity * (4 * schema.dense_features.len() + keys) + 4 * schema.features.len()
    }

    /// Forgets the samples; keeps the memory.
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
    /// The batch is full, or the sample does not fit the schema; the batch is then as it was.
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

    /// Adds the samples of `other`, which was made with the same schema; returns whether they fit.
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

    /// Samples in the batch.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// The dense features, `[size, dense features]`.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// Sparse features that the batch was made for.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// Keys in the longest bag of feature `f`.
    pub fn hotness(&self, f: usize) -> usize {
        self.features[f].longest
    }

    /// The keys of feature `f`.
    pub fn bags(&self, f: usize) -> Bags<'_> {
        Bags { keys: &self.features[f].keys, offsets: &self.features[f].offsets }
    }
}
