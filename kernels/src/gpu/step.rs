//! A whole request as one launch: query, pooling and dense network in one CUDA graph, without the
//! host in between. If rows are missing, the caller reads them; then a second graph finishes the
//! bags and runs the network again. Both are recorded for every power of two up to the largest
//! batch. A batch between two powers runs the next larger graph, padded with samples without keys.
//! Never reads flash.

use crate::cuda::driver::{CudaError, Stream};
use crate::cuda::graph::Graphs;
use crate::cuda::memory::{Buffer, Mapped};
use crate::gpu::dense_engine::{DeviceEngine, DeviceScratch};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::lookup::{FeatureOnDevice, GpuLookup, LookupLimits};
use crate::gpu::tables::DeviceTables;
use crate::lookup::miss_list::MissList;
use crate::lookup::{Bags, LookupStatus};
use std::sync::Arc;

/// Returns the batch sizes that are recorded, ascending.
fn recorded_batches(batch_max: usize) -> impl Iterator<Item = usize> {
    (0..).map(|n| 1usize << n).take_while(move |&batch| batch < batch_max).chain([batch_max])
}

/// Returns the batch size of each scratch.
fn scratch_batches(engine: &DeviceEngine, batch_max: usize) -> impl Iterator<Item = usize> {
    let each = engine.graphs_own_scratch();
    recorded_batches(batch_max).filter(move |&batch| batch == batch_max || each)
}

/// One worker's requests on the device. All memory is allocated at the start.
pub struct Step {
    /// Two for each recorded batch size: a request, and the completion of its misses.
    graphs: Graphs<Resources>,
    /// The recorded batch sizes, ascending.
    batches: Vec<usize>,
}

/// What the graphs use.
struct Resources {
    lookup: GpuLookup,
    engine: Arc<DeviceEngine>,
    /// One for all batch sizes, or one for each where every graph needs its own.
    scratches: Vec<DeviceScratch>,
    /// One for each network input, `[batch_max, width]`.
    inputs: Vec<Buffer<f32>>,
    widths: Vec<usize>,
    dense: Option<DenseFeatures>,
    /// `[batch_max, outputs]`; the host reads them.
    scores: Mapped<f32>,
}

/// The dense features of a request.
struct DenseFeatures {
    /// The network input that takes the features.
    input: usize,
    /// `[batch_max, width]`; the host writes them.
    values: Mapped<f32>,
}

impl Resources {
    /// Puts a request onto the stream: batch size `number`, which is `samples`.
    fn request(&mut self, number: usize, samples: usize) -> Result<(), GpuDenseError> {
        let Self { lookup, engine, inputs, widths, dense, .. } = self;
        lookup.copy_keys(samples)?;
        lookup.launch(samples)?;
        if let Some(DenseFeatures { input, values }) = dense {
            let all = samples * widths[*input];
            engine.copy(lookup.stream(), values.view().first(all), inputs[*input].view())?;
        }
        self.network(number, samples)
    }

    /// Puts the completion of a request onto the stream, for after its misses were read.
    fn complete(
        &mut self,
        number: usize,
        samples: usize,
        misses_max: usize,
    ) -> Result<(), GpuDenseError> {
        self.lookup.finish(misses_max)?;
        self.network(number, samples)
    }

    fn network(&mut self, number: usize, samples: usize) -> Result<(), GpuDenseError> {
        let Self { lookup, engine, scratches, inputs, scores, .. } = self;
        let number = number.min(scratches.len() - 1);
        engine.enqueue(lookup.stream(), samples, inputs, scores.view(), &mut scratches[number])
    }
}

impl Step {
    /// Allocates and records a worker's requests on `tables` and `engine`. The network's inputs are
    /// `widths` wide; input number `dense`, if any, takes the dense features. `features(addresses)`
    /// returns the sparse features, given the device address of each input.
    ///
    /// # Errors
    /// [`GpuDenseError`]: the device has not enough memory, or work cannot be recorded.
    pub fn new<'a>(
        tables: &Arc<DeviceTables>,
        engine: &Arc<DeviceEngine>,
        widths: &[usize],
        dense: Option<usize>,
        features: impl FnOnce(&[u64]) -> Vec<FeatureOnDevice<'a>>,
        limits: LookupLimits,
    ) -> Result<Self, GpuDenseError> {
        let (batch_max, misses_max) = (limits.batch_max, limits.misses_max.max(1));
        let gpu = tables.gpu();

        let inputs = widths
            .iter()
            .map(|w| gpu.buffer(batch_max * w))
            .collect::<Result<Vec<Buffer<f32>>, _>>()?;
        let addresses: Vec<u64> = inputs.iter().map(Buffer::address).collect();
        let dense = match dense {
            None => None,
            Some(input) => {
                let values = gpu.mapped(batch_max * widths[input])?;
                Some(DenseFeatures { input, values })
            }
        };
        let resources = Resources {
            lookup: GpuLookup::new(tables, &features(&addresses), limits)?,
            scratches: scratch_batches(engine, batch_max)
                .map(|batch| engine.scratch(batch))
                .collect::<Result<_, _>>()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
            engine: Arc::clone(engine),
            widths: widths.to_vec(),
            inputs,
            dense,
        };

        let batches: Vec<usize> = recorded_batches(batch_max).collect();
        let mut graphs = Graphs::new(resources);
        for (number, &batch) in batches.iter().enumerate() {
            // Once without recording, for samples without keys: driver and libraries allocate
            // memory at the first run.
            graphs.resources_mut().request(number, batch)?;
            graphs.resources_mut().complete(number, batch, misses_max)?;
            Self::stream_of(graphs.resources()).wait()?;

            graphs.record(Self::stream_of, |r| r.request(number, batch))?;
            graphs.record(Self::stream_of, |r| r.complete(number, batch, misses_max))?;
        }
        Ok(Self { graphs, batches })
    }

    /// Returns the bytes of device memory of one worker's step. `width` is the sum of the widths of
    /// the network's inputs.
    pub fn bytes(engine: &DeviceEngine, width: usize, batch_max: usize) -> u64 {
        let scratches: u64 =
            scratch_batches(engine, batch_max).map(|batch| engine.scratch_bytes(batch)).sum();
        scratches + 4 * (batch_max * width) as u64
    }

    fn stream_of(resources: &Resources) -> &Stream {
        resources.lookup.stream()
    }

    /// Returns the stream of every launch except changes to the caches.
    pub fn stream(&self) -> &Stream {
        Self::stream_of(self.graphs.resources())
    }

    /// Returns the lookup, to collect the misses.
    pub fn lookup(&mut self) -> &mut GpuLookup {
        &mut self.graphs.resources_mut().lookup
    }

    /// Begins a request of `batch` samples: `bags(f)` for feature `f`, and the dense features
    /// `[batch, width]`. It is one launch, which copies the keys first where they are copied, and
    /// does not wait. The caller has waited for the request before.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn begin<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> Result<(), CudaError> {
        let number = self.write_request(batch, bags, dense);
        self.graphs.launch(2 * number, Self::stream_of)
    }

    /// Writes a request where the device reads it; returns the number of its batch size.
    fn write_request<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> usize {
        let number = self.number(batch);
        let resources = self.graphs.resources_mut();
        resources.lookup.write_request(batch, self.batches[number], bags);
        if let Some(DenseFeatures { values, .. }) = &mut resources.dense {
            values[..dense.len()].copy_from_slice(dense);
        }
        number
    }

    /// Returns the number of the smallest recorded batch size that holds `batch` samples.
    fn number(&self, batch: usize) -> usize {
        self.batches.partition_point(|&recorded| recorded < batch)
    }

    /// Begins a request without a graph: every kernel is a launch of its own. Arguments are those
    /// of [`Step::begin`].
    ///
    /// # Errors
    /// [`GpuDenseError`].
    pub fn begin_unrecorded<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> Result<(), GpuDenseError> {
        let number = self.write_request(batch, bags, dense);
        self.graphs.resources_mut().request(number, self.batches[number])
    }

    /// Finishes the bags of the last misses of a request, as [`GpuLookup::finish_bags`], and
    /// computes the scores. The request's samples are those of `statuses`. It is one launch after
    /// the changes to the caches.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn complete(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<(), CudaError> {
        let number = self.number(statuses.len());
        self.lookup().begin_finish(misses, statuses)?;
        self.graphs.launch(2 * number + 1, Self::stream_of)?;
        self.lookup().wait_finished()
    }

    /// Returns the scores of the last request, `[batch, outputs]`. The caller has waited for the
    /// request.
    pub fn scores(&self, batch: usize) -> &[f32] {
        let resources = self.graphs.resources();
        &resources.scores[..batch * resources.engine.outputs()]
    }
}
