//! The memory of one request's keys, offsets and weights: the host writes them, and the query reads
//! them there or in a copy on the device. Never launches.

use crate::cuda::driver::{Gpu, Result};
use crate::cuda::memory::{Buffer, Mapped, View};
use crate::gpu::launch::RequestAddresses;
use std::sync::Arc;

/// The memory from which the query reads a request's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The mapped host memory to which the host wrote them.
    InPlace,
    /// Device memory, to which one copy on the stream brings them.
    Copied,
}

impl Keys {
    /// Returns the choice for `gpu`. If there is a bus between host and GPU, keys should cross it
    /// once, in one piece.
    pub fn on(gpu: &Gpu) -> Self {
        if gpu.integrated() { Self::InPlace } else { Self::Copied }
    }
}

/// The size of a request, for one sample.
#[derive(Clone, Copy, Debug)]
pub struct RequestRoom {
    /// Sparse features.
    pub features: usize,
    /// The sum of the longest bags of all features.
    pub lookups: usize,
    /// The same sum for the features with weights only.
    pub weights: usize,
    /// Whether any feature is shared.
    pub is_shared: bool,
}

impl RequestRoom {
    /// Returns the words of a request of `samples` samples.
    pub(crate) fn words(&self, samples: usize) -> usize {
        let of_sample = 2 * self.lookups + self.weights + usize::from(self.is_shared);
        of_sample * samples + self.features * (samples + 1)
    }
}

/// A request's keys, offsets and weights in one piece of words. First come the keys of each
/// feature, with room for the longest bags. Then come the offsets of each feature, the weights of
/// those that have some and, if a feature is shared, the request of each sample. The layout depends
/// on the number of samples.
pub(crate) struct RequestMemory {
    pub words: Mapped<u32>,
    /// The copy in device memory, with [`Keys::Copied`].
    pub copy: Option<Buffer<u32>>,
    pub room: RequestRoom,
    /// Number of samples for which the current request is laid out.
    pub samples: usize,
}

impl RequestMemory {
    /// Allocates memory for requests of at most `samples_max` samples.
    ///
    /// # Errors
    /// `CudaError::Driver` if there is not enough memory.
    pub fn new(gpu: &Arc<Gpu>, room: RequestRoom, samples_max: usize, keys: Keys) -> Result<Self> {
        let words = room.words(samples_max);
        let copy = (keys == Keys::Copied).then(|| gpu.buffer(words)).transpose()?;
        Ok(Self { words: gpu.mapped(words)?, copy, room, samples: 0 })
    }

    /// Returns the device addresses of the parts of a request of `samples` samples.
    pub fn addresses(&self, samples: usize) -> RequestAddresses {
        // The query reads this much.
        assert!(self.room.words(samples) <= self.words.len());
        let keys = self.copy.as_ref().map_or(self.words.address(), Buffer::address);
        let offsets = keys + 8 * (self.room.lookups * samples) as u64;
        let weights = offsets + 4 * (self.room.features * (samples + 1)) as u64;
        RequestAddresses { keys, offsets, weights }
    }

    /// Writes the keys of a feature; `keys_before` is the sum of the longest bags before it.
    pub fn put_keys(&mut self, keys_before: usize, keys: &[u64]) {
        let words = &mut self.words[2 * keys_before * self.samples..][..2 * keys.len()];
        for (words, key) in words.chunks_exact_mut(2).zip(keys) {
            words.copy_from_slice(&[*key as u32, (*key >> 32) as u32]);
        }
    }

    /// Writes the weights of a feature; `weights_before` is the sum of the longest bags with
    /// weights before it.
    pub fn put_weights(&mut self, weights_before: usize, weights: &[f32]) {
        let Self { room, samples, .. } = *self;
        let first = 2 * room.lookups * samples + room.features * (samples + 1);
        let words = &mut self.words[first + weights_before * samples..][..weights.len()];
        words.iter_mut().zip(weights).for_each(|(word, weight)| *word = weight.to_bits());
    }

    /// Returns the request of each sample, `[samples]`; empty if no feature is shared.
    pub fn request_of(&self, samples: usize) -> View<'_, u32> {
        let of_samples = if self.room.is_shared { samples } else { 0 };
        let words = self.copy.as_ref().map_or(self.words.view(), Buffer::view);
        words.skip(self.room.words(samples) - of_samples).first(of_samples)
    }

    /// Writes the request of each sample. The samples after the batch are of the last request.
    pub fn put_requests(&mut self, ends: &[usize]) {
        let (end, samples) = (self.room.words(self.samples), self.samples);
        let words = &mut self.words[end - samples..end];
        let last = ends.len().saturating_sub(1) as u32;
        let mut start = 0;
        for (request, &end) in ends.iter().enumerate() {
            words[start..end].fill(request as u32);
            start = end;
        }
        words[start..].fill(last);
    }

    /// Returns the offsets of a feature, `[samples + 1]`.
    pub fn offsets(&self, feature: usize) -> &[u32] {
        &self.words[2 * self.room.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }

    /// Returns the offsets of a feature, `[samples + 1]`, for the caller to write.
    pub fn offsets_mut(&mut self, feature: usize) -> &mut [u32] {
        &mut self.words[2 * self.room.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }
}
