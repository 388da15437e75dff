//! A request whose rows are all cached, as one launch: query, pooling and dense network in one graph, with no host in
//! between. There is a recording for every power of two up to the largest batch; a batch in between takes the next one,
//! with samples that have no keys behind its own. What missed is the caller's to fetch: then the bags are finished and
//! `dense` runs anew.

use crate::cuda::dense::View;
use crate::cuda::driver::{Buffer, CudaError, Mapped, Stream};
use crate::cuda::graph::Graphs;
use crate::cuda::lookup::{FeatureOnDevice, Lookup};
use crate::cuda::tables::Tables;
use crate::dense::{DenseError, DeviceEngine, DeviceLane};
use crate::query::Bags;
use std::sync::Arc;

/// Sizes of a worker's requests.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Samples of a request at most.
    pub batch_max: usize,
    /// Lookups that may wait for rows at once.
    pub misses_max: usize,
    /// Bytes of the longest row.
    pub row_bytes_max: usize,
}

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
    graphs: Graphs<Parts>,
    /// The batch of each recording, ascending.
    rungs: Vec<usize>,
}

/// What the recordings name.
struct Parts {
    lookup: Lookup,
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
    /// Everything, for the `samples` of recording `number`.
    fn enqueue(&mut self, number: usize, samples: usize) -> Result<(), DenseError> {
        self.lookup.launch(samples)?;
        self.run_dense(number, samples)
    }

    fn run_dense(&mut self, number: usize, samples: usize) -> Result<(), DenseError> {
        let Self { lookup, engine, lanes, inputs, widths, dense, scores } = self;
        let (stream, last) = (lookup.stream(), lanes.len() - 1);
        let lane = &mut lanes[number.min(last)];
        if let Some((input, values)) = dense {
            let all = samples * widths[*input];
            engine.copy(stream, View::mapped(values).first(all), View::of(&inputs[*input]))?;
        }
        engine.enqueue(stream, samples, inputs, View::mapped(scores), lane)
    }
}

impl Step {
    /// A worker's requests on `tables` and `engine`. `features(inputs)` are the sparse features, told where the network's
    /// inputs begin, which are `widths` wide; input `dense`, if any, takes the dense features.
    ///
    /// # Errors
    /// The device has no memory for it, or something cannot be recorded.
    pub fn new<'a>(
        tables: &Arc<Tables>,
        engine: &Arc<DeviceEngine>,
        widths: &[usize],
        dense: Option<usize>,
        features: impl FnOnce(&[u64]) -> Vec<FeatureOnDevice<'a>>,
        limits: StepLimits,
    ) -> Result<Self, DenseError> {
        let StepLimits { batch_max, misses_max, row_bytes_max } = limits;
        let gpu = tables.gpu();
        let inputs =
            widths.iter().map(|w| gpu.buffer(batch_max * w)).collect::<Result<Vec<Buffer<f32>>, _>>()?;
        let at: Vec<u64> = inputs.iter().map(Buffer::address).collect();
        let dense = dense.map(|i| Ok::<_, CudaError>((i, gpu.mapped(batch_max * widths[i])?))).transpose()?;
        let parts = Parts {
            lookup: Lookup::new(tables, &features(&at), batch_max, misses_max, row_bytes_max)?,
            lanes: lane_batches(engine, batch_max).map(|b| engine.lane(b)).collect::<Result<_, _>>()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
            engine: Arc::clone(engine),
            widths: widths.to_vec(),
            inputs,
            dense,
        };
        let mut step = Self { graphs: Graphs::new(parts), rungs: rungs(batch_max).collect() };
        for (number, &rung) in step.rungs.iter().enumerate() {
            // Once without recording: a library takes what it needs at the first run of a size.
            step.graphs.named_mut().run_dense(number, rung)?;
            Self::stream_of(step.graphs.named()).wait()?;
            step.graphs.record(Self::stream_of, |parts| parts.enqueue(number, rung))?;
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
    pub fn lookup(&mut self) -> &mut Lookup {
        &mut self.graphs.named_mut().lookup
    }

    /// Begins a request of `batch` samples: `bags(f)` for feature `f`, `dense` its dense features. One launch, no wait;
    /// the request before must have been waited for.
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
        self.graphs.launch(number, Self::stream_of)
    }

    /// Lays a request where the device reads it; returns the recording for it.
    fn take<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>, dense: &[f32]) -> usize {
        let number = self.number(batch);
        let parts = self.graphs.named_mut();
        parts.lookup.take(batch, bags);
        parts.lookup.pad(self.rungs[number]);
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
        self.graphs.named_mut().enqueue(number, self.rungs[number])
    }

    /// Runs the dense network anew over inputs that have been finished, and waits.
    ///
    /// # Errors
    /// The GPU refuses.
    pub fn run_dense(&mut self, batch: usize) -> Result<(), DenseError> {
        let number = self.number(batch);
        self.graphs.named_mut().run_dense(number, self.rungs[number])?;
        Ok(self.stream().wait()?)
    }

    /// The scores of the last request, `[batch, outputs]`, once it was waited for.
    pub fn scores(&self, batch: usize) -> &[f32] {
        let parts = self.graphs.named();
        &parts.scores[..batch * parts.engine.outputs()]
    }
}
