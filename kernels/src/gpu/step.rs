//! A request whose rows are all cached, as one launch: query, pooling and dense network in one
//! graph, with no host in between. What missed is the caller's to fetch; then a second graph
//! finishes the bags and runs the network anew. There are recordings of both for every power of two
//! up to the largest batch; a batch in between takes the next ones, with samples that have no keys
//! behind its own.

use crate::cuda::driver::{CudaError, Stream};
use crate::cuda::graph::Graphs;
use crate::cuda::memory::{Buffer, Mapped};
use crate::dense::{DenseError, DeviceEngine, DeviceLane};
use crate::gpu::lookup::{FeatureOnDevice, GpuLookup, LookupLimits};
use crate::gpu::tables::DeviceTables;
use crate::lookup::miss_list::MissList;
use crate::lookup::{Bags, LookupStatus};
use std::sync::Arc;

/// The batches of the recordings, ascending.
fn rungs(batch_max: usize) -> impl Iterator<Item = usize> {
    (0..).map(|n| 1usize << n).take_while(move |&rung| rung < batch_max).chain([batch_max])
}

/// The batch of each lane.
fn lane_batches(engine: &DeviceEngine, batch_max: usize) -> impl Iterator<Item = usize> {
    rungs(batch_max).filter(move |&rung| rung == batch_max || engine.records_keep_lanes())
}

/// One worker's requests on the device. Takes all its memory when it is made.
pub struct Step {
    /// Two for each rung: a request, and what follows on its misses.
    graphs: Graphs<Parts>,
    /// The batches of the recordings, ascending.
    rungs: Vec<usize>,
}

/// What the recordings name.
struct Parts {
    lookup: GpuLookup,
    engine: Arc<DeviceEngine>,
    /// One for all batch sizes, or one for each where a recording keeps a lane to itself.
    lanes: Vec<DeviceLane>,
    /// One for each network input, `[batch_max, width]`.
    inputs: Vec<Buffer<f32>>,
    widths: Vec<usize>,
    /// The dense features as the host wrote them, and which input takes them.
    dense: Option<(usize, Mapped<f32>)>,
    /// `[batch_max, outputs]`, read by the host.
    scores: Mapped<f32>,
}

impl Parts {
    /// A request of rung `number`, which has `samples`.
    fn request(&mut self, number: usize, samples: usize) -> Result<(), DenseError> {
        let Self { lookup, engine, inputs, widths, dense, .. } = self;
        lookup.bring(samples)?;
        lookup.launch(samples)?;
        if let Some((input, values)) = dense {
            let all = samples * widths[*input];
            engine.copy(lookup.stream(), values.view().first(all), inputs[*input].view())?;
        }
        self.network(number, samples)
    }

    /// What follows once its misses were read.
    fn settle(
        &mut self,
        number: usize,
        samples: usize,
        misses_max: usize,
    ) -> Result<(), DenseError> {
        self.lookup.finish(misses_max)?;
        self.network(number, samples)
    }

    fn network(&mut self, number: usize, samples: usize) -> Result<(), DenseError> {
        let Self { lookup, engine, lanes, inputs, scores, .. } = self;
        let last = lanes.len() - 1;
        engine.enqueue(
            lookup.stream(),
            samples,
            inputs,
            scores.view(),
            &mut lanes[number.min(last)],
        )
    }
}

impl Step {
    /// A worker's requests on `tables` and `engine`. `features(inputs)` are the sparse features,
    /// told where the network's inputs begin, which are `widths` wide; input `dense`, if any, takes
    /// the dense features.
    ///
    /// # Errors
    /// The device has no memory for it, or something cannot be recorded.
    pub fn new<'a>(
        tables: &Arc<DeviceTables>,
        engine: &Arc<DeviceEngine>,
        widths: &[usize],
        dense: Option<usize>,
        features: impl FnOnce(&[u64]) -> Vec<FeatureOnDevice<'a>>,
        limits: LookupLimits,
    ) -> Result<Self, DenseError> {
        let (batch_max, misses_max) = (limits.batch_max, limits.misses_max.max(1));
        let gpu = tables.gpu();
        let inputs = widths
            .iter()
            .map(|w| gpu.buffer(batch_max * w))
            .collect::<Result<Vec<Buffer<f32>>, _>>()?;
        let at: Vec<u64> = inputs.iter().map(Buffer::address).collect();
        let dense = dense
            .map(|i| Ok::<_, CudaError>((i, gpu.mapped(batch_max * widths[i])?)))
            .transpose()?;
        let parts = Parts {
            lookup: GpuLookup::new(tables, &features(&at), limits)?,
            lanes: lane_batches(engine, batch_max)
                .map(|b| engine.lane(b))
                .collect::<Result<_, _>>()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
            engine: Arc::clone(engine),
            widths: widths.to_vec(),
            inputs,
            dense,
        };
        let mut step = Self { graphs: Graphs::new(parts), rungs: rungs(batch_max).collect() };
        for (number, &rung) in step.rungs.iter().enumerate() {
            // Once without recording, for samples without keys: driver and libraries take what they
            // need at the first run.
            step.graphs.named_mut().request(number, rung)?;
            step.graphs.named_mut().settle(number, rung, misses_max)?;
            step.stream().wait()?;
            step.graphs.record(Self::stream_of, |parts| parts.request(number, rung))?;
            step.graphs.record(Self::stream_of, |parts| parts.settle(number, rung, misses_max))?;
        }
        Ok(step)
    }

    /// Device memory of one worker's step for a network whose inputs are `width` wide together.
    pub fn bytes(engine: &DeviceEngine, width: usize, batch_max: usize) -> u64 {
        let lanes = lane_batches(engine, batch_max).map(|b| engine.lane_bytes(b)).sum::<u64>();
        lanes + 4 * (batch_max * width) as u64
    }

    fn stream_of(parts: &Parts) -> &Stream {
        parts.lookup.stream()
    }

    /// The stream that everything is on.
    pub fn stream(&self) -> &Stream {
        Self::stream_of(self.graphs.named())
    }

    /// The lookup, for what missed.
    pub fn lookup(&mut self) -> &mut GpuLookup {
        &mut self.graphs.named_mut().lookup
    }

    /// Begins a request of `batch` samples: `bags(f)` for feature `f`, `dense` its dense features.
    /// One launch, no wait, and where keys are brought one copy in it; the request before must have
    /// been waited for.
    ///
    /// # Errors
    /// The GPU refuses.
    pub fn begin<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> Result<(), CudaError> {
        let number = self.take(batch, bags, dense);
        self.graphs.launch(2 * number, Self::stream_of)
    }

    /// Lays a request where the device reads it; returns the recording for it.
    fn take<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>, dense: &[f32]) -> usize {
        let number = self.number(batch);
        let parts = self.graphs.named_mut();
        parts.lookup.take((batch, self.rungs[number]), bags);
        if let Some((_, values)) = &mut parts.dense {
            values[..dense.len()].copy_from_slice(dense);
        }
        number
    }

    /// The recording for `batch` samples.
    fn number(&self, batch: usize) -> usize {
        self.rungs.partition_point(|&rung| rung < batch)
    }

    /// The same without a recording: every kernel is a launch of its own.
    ///
    /// # Errors
    /// As `begin`.
    pub fn begin_unrecorded<'a>(
        &mut self,
        batch: usize,
        bags: impl Fn(usize) -> Bags<'a>,
        dense: &[f32],
    ) -> Result<(), DenseError> {
        let number = self.take(batch, bags, dense);
        self.graphs.named_mut().request(number, self.rungs[number])
    }

    /// As [`GpuLookup::settle`] for the last misses of a request, whose samples are `statuses`, and
    /// then the scores: one launch behind what changes the caches.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn settle(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<(), CudaError> {
        let number = self.number(statuses.len());
        self.lookup().ready(misses, statuses)?;
        self.graphs.launch(2 * number + 1, Self::stream_of)?;
        self.lookup().settled()
    }

    /// The scores of the last request, `[batch, outputs]`, once it was waited for.
    pub fn scores(&self, batch: usize) -> &[f32] {
        let parts = self.graphs.named();
        &parts.scores[..batch * parts.engine.outputs()]
    }
}
