//! A whole request as one launch: query, pooling and dense network in one CUDA graph, without the
//! host in between. If rows are missing, the caller reads them, and a second graph finishes the
//! bags. It gathers the inputs of the samples with missing rows and runs the network again for
//! these samples only. Both graphs are recorded for every power of two up to the largest batch. A
//! batch between two powers runs the next larger graph, padded with samples without keys. If the
//! driver or a library refuses to record, every kernel is a separate launch. Never reads flash.

use crate::cuda::driver::{CudaError, Stream};
use crate::cuda::graph::Graphs;
use crate::cuda::memory::{Buffer, Mapped};
use crate::gpu::dense_engine::{DeviceEngine, DeviceScratch};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::ResultShape;
use crate::gpu::input_type::InputType;
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
    /// The reason why there are no graphs; `None` if there are.
    refused: Option<GpuDenseError>,
    /// The recorded batch sizes, ascending.
    batches: Vec<usize>,
}

/// The memory and handles that the graphs use.
struct Resources {
    lookup: GpuLookup,
    engine: Arc<DeviceEngine>,
    /// One scratch for all batch sizes, or one for each size if every graph needs its own.
    scratches: Vec<DeviceScratch>,
    /// One for each network input, `[batch_max, words of a sample]`.
    inputs: Vec<Buffer<f32>>,
    /// Words of a sample of each input.
    words: Vec<usize>,
    dense: Option<DenseFeatures>,
    /// `[batch_max, outputs]`; the host reads them.
    scores: Mapped<f32>,
    misses_max: usize,
    late: LateSamples,
}

/// The samples of a request that had missing rows.
struct LateSamples {
    /// Their numbers, ascending, `[batch_max]`; the host writes them.
    numbers: Mapped<u32>,
    count: usize,
    /// Their inputs, one for each network input, `[batch_max, words of a sample]`.
    inputs: Vec<Buffer<f32>>,
    /// Their scores, `[batch_max, outputs]`; the host reads them.
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
    /// Puts the query of a request of `samples` samples onto the stream.
    fn query(&self, samples: usize) -> Result<(), CudaError> {
        self.lookup.copy_keys(samples)?;
        self.lookup.launch(samples)
    }

    /// Puts the network of batch size `number`, which is `samples`, onto the stream.
    fn score(&mut self, number: usize, samples: usize) -> Result<(), GpuDenseError> {
        let Self { lookup, engine, scratches, inputs, words, dense, scores, .. } = self;
        if let Some(DenseFeatures { input, values }) = dense {
            let all = samples * words[*input];
            engine.copy(lookup.stream(), values.view().first(all), inputs[*input].view())?;
        }
        let number = number.min(scratches.len() - 1);
        engine.enqueue(lookup.stream(), samples, inputs, scores.view(), &mut scratches[number])
    }

    /// Puts the completion of a request with `samples` late samples onto the stream. Their rows
    /// must have been read when the stream runs it.
    fn complete(&mut self, number: usize, samples: usize) -> Result<(), GpuDenseError> {
        let Self { lookup, engine, scratches, inputs, words, misses_max, late, .. } = self;
        let LateSamples { numbers, inputs: late_inputs, scores, .. } = late;
        lookup.finish(*misses_max)?;
        for ((from, to), &width) in inputs.iter().zip(&*late_inputs).zip(&*words) {
            let shape = ResultShape { samples, width };
            engine.gather(lookup.stream(), from.view(), numbers.view(), shape, to.view())?;
        }
        let number = number.min(scratches.len() - 1);
        engine.enqueue(lookup.stream(), samples, late_inputs, scores.view(), &mut scratches[number])
    }
}

impl LateSamples {
    /// Lists the samples that `is_late` marks. Fills the rest of the first `size_of(count)` numbers
    /// with the last one.
    fn list(&mut self, is_late: &[bool], size_of: impl Fn(usize) -> usize) {
        self.count = 0;
        for (sample, _) in is_late.iter().enumerate().filter(|(_, is_late)| **is_late) {
            self.numbers[self.count] = sample as u32;
            self.count += 1;
        }
        let last = self.count.checked_sub(1).map_or(0, |last| self.numbers[last]);
        self.numbers[self.count..size_of(self.count)].fill(last);
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

        let words: Vec<usize> = (0..widths.len()).map(|i| engine.input_words(i)).collect();
        let buffers = || words.iter().map(|words| gpu.buffer(batch_max * words));
        let inputs = buffers().collect::<Result<Vec<Buffer<f32>>, _>>()?;
        let addresses: Vec<u64> = inputs.iter().map(Buffer::address).collect();
        let dense = match dense {
            None => None,
            Some(input) => {
                // The host writes them as f32.
                assert_eq!(engine.input_types()[input], InputType::F32);
                let values = gpu.mapped(batch_max * widths[input])?;
                Some(DenseFeatures { input, values })
            }
        };
        let late = LateSamples {
            numbers: gpu.mapped(batch_max)?,
            count: 0,
            inputs: buffers().collect::<Result<_, _>>()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
        };
        let resources = Resources {
            lookup: GpuLookup::new(tables, &features(&addresses), limits)?,
            scratches: scratch_batches(engine, batch_max)
                .map(|batch| engine.scratch(batch))
                .collect::<Result<_, _>>()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
            engine: Arc::clone(engine),
            words,
            inputs,
            dense,
            misses_max,
            late,
        };

        let batches: Vec<usize> = recorded_batches(batch_max).collect();
        let mut step = Self { graphs: Graphs::new(resources), refused: None, batches };
        step.record()?;
        Ok(step)
    }

    /// Records the graphs of all batch sizes.
    fn record(&mut self) -> Result<(), GpuDenseError> {
        let Self { graphs, refused, batches } = self;
        for (number, &batch) in batches.iter().enumerate() {
            // The first run, for samples without keys, is not recorded, because driver and
            // libraries allocate memory in it.
            let resources = graphs.resources_mut();
            resources.query(batch)?;
            resources.score(number, batch)?;
            resources.complete(number, batch)?;
            Self::stream_of(resources).wait()?;

            let request = |r: &mut Resources| {
                r.query(batch)?;
                r.score(number, batch)
            };
            let complete = |r: &mut Resources| r.complete(number, batch);
            let recorded = graphs
                .record(Self::stream_of, request)
                .and_then(|_| graphs.record(Self::stream_of, complete));
            if let Err(e) = recorded {
                log::warn!("requests run without graphs, which the GPU refuses: {e}");
                *refused = Some(e);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns why requests run without graphs.
    pub fn refused(&self) -> Option<&GpuDenseError> {
        self.refused.as_ref()
    }

    /// Returns the bytes of device memory of one worker's step. `width` is the sum of the widths of
    /// the network's inputs.
    pub fn bytes(engine: &DeviceEngine, width: usize, batch_max: usize) -> u64 {
        let scratches: u64 =
            scratch_batches(engine, batch_max).map(|batch| engine.scratch_bytes(batch)).sum();
        scratches + 2 * 4 * (batch_max * width) as u64
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

    /// Begins a request of `batch` samples, with `bags(f)` for feature `f` and the dense features
    /// `[batch, width]`. It is one launch, including the copy of the keys if there is one, and does
    /// not wait. The caller has waited for the previous request.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn begin<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> Result<(), CudaError> {
        if self.refused.is_some() {
            let begun = self.begin_unrecorded(batch, bags, dense);
            return begun.map_err(|e| e.into_cuda(self.stream().gpu()));
        }
        let number = self.write_request(batch, bags, dense);
        self.graphs.launch(2 * number, Self::stream_of, |r, launch| r.lookup.in_turn(launch))
    }

    /// Writes a request to the memory that the device reads; returns the number of its batch size.
    fn write_request<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> usize {
        let number = self.number(batch);
        let resources = self.graphs.resources_mut();
        resources.lookup.write_request(batch, self.batches[number], bags);
        if let Some(DenseFeatures { input, values }) = &mut resources.dense {
            let all = self.batches[number] * resources.words[*input];
            values[..dense.len()].copy_from_slice(dense);
            // These samples pad the batch.
            values[dense.len()..all].fill(0.0);
        }
        number
    }

    /// Returns the number of the smallest recorded batch size that holds `batch` samples.
    fn number(&self, batch: usize) -> usize {
        self.batches.partition_point(|&recorded| recorded < batch)
    }

    /// Begins a request without a graph: every kernel is a separate launch. For the arguments see
    /// [`Step::begin`].
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
        let (resources, samples) = (self.graphs.resources_mut(), self.batches[number]);
        resources.lookup.in_turn(|| resources.query(samples))?;
        resources.score(number, samples)
    }

    /// Finishes the bags of the last misses of a request, as [`GpuLookup::finish_bags`] does, and
    /// computes the scores of the samples that had misses. `statuses` has the status of each sample
    /// of the request. It is one launch after the changes to the caches.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn complete(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<(), CudaError> {
        self.lookup().begin_finish(misses, statuses)?;

        let Self { graphs, batches, .. } = self;
        let number_of = |count| batches.partition_point(|&recorded| recorded < count);
        let Resources { lookup, late, .. } = graphs.resources_mut();
        late.list(lookup.open_samples(), |count| batches[number_of(count)]);
        let number = number_of(late.count);
        match &self.refused {
            None => graphs.launch(2 * number + 1, Self::stream_of, |_, launch| launch())?,
            Some(_) => {
                let resources = graphs.resources_mut();
                let completed = resources.complete(number, batches[number]);
                completed.map_err(|e| e.into_cuda(resources.lookup.stream().gpu()))?;
            }
        }

        let Resources { lookup, late, scores, engine, .. } = graphs.resources_mut();
        lookup.wait_finished()?;
        for (late_scores, &sample) in
            late.scores.chunks(engine.outputs()).zip(&late.numbers[..late.count])
        {
            let at = sample as usize * engine.outputs();
            scores[at..at + engine.outputs()].copy_from_slice(late_scores);
        }
        Ok(())
    }

    /// Returns the scores of the last request, `[batch, outputs]`. The caller has waited for the
    /// request.
    pub fn scores(&self, batch: usize) -> &[f32] {
        let resources = self.graphs.resources();
        &resources.scores[..batch * resources.engine.outputs()]
    }
}
