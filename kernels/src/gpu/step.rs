//! A whole request as one launch: query, pooling and dense network in one CUDA graph, without the
//! host in between. If rows are missing, the caller reads them, and a second graph finishes the
//! bags. It gathers the inputs of the samples with missing rows and runs the network again for
//! these samples only. Both graphs are recorded for every power of two up to the largest batch and,
//! if requests share features, for powers of eight of requests in it. A batch between two sizes
//! runs the next larger graph, padded with samples without keys. If the driver or a library refuses
//! to record, every kernel is a separate launch. Never reads flash.

use crate::cuda::driver::{CudaError, Stream};
use crate::cuda::graph::{GraphShape, Graphs};
use crate::cuda::memory::{Buffer, Mapped, View};
use crate::dense::InputPart;
use crate::gpu::dense_engine::{DeviceEngine, DeviceScratch};
use crate::gpu::dense_error::GpuDenseError;
use crate::gpu::dense_kernels::{ResultShape, RowColumns};
use crate::gpu::dense_plan::RunShape;
use crate::gpu::input_type::InputType;
use crate::gpu::lookup::{FeatureOnDevice, GpuLookup, LookupLimits, RequestSize, Samples};
use crate::gpu::tables::DeviceTables;
use crate::lookup::miss_list::MissList;
use crate::lookup::{Bags, ColumnCopy, LookupStatus};
use std::sync::Arc;

/// Returns the batch sizes that are recorded, ascending.
fn recorded_batches(batch_max: usize) -> impl Iterator<Item = usize> {
    (0..).map(|n| 1usize << n).take_while(move |&batch| batch < batch_max).chain([batch_max])
}

/// Returns the batch size of each scratch: of one, or of that of each graph.
fn scratch_batches(engine: &DeviceEngine, batch_max: usize) -> impl Iterator<Item = usize> {
    let each = engine.graphs_own_scratch();
    let batches = recorded_batches(batch_max).filter(move |&batch| batch == batch_max || each);
    batches.flat_map(move |batch| std::iter::repeat_n(batch, if each { 2 } else { 1 }))
}

/// Returns the sizes that are recorded: those of each batch size together, ascending.
fn recorded_sizes(batch_max: usize, has_requests: bool) -> Vec<RequestSize> {
    let sizes = recorded_batches(batch_max).flat_map(|samples| {
        let powers = (0..).map(|n| 1usize << (3 * n));
        let requests = powers.take_while(move |&requests| has_requests && requests < samples);
        requests.chain([samples]).map(move |requests| RequestSize { samples, requests })
    });
    sizes.collect()
}

/// Returns the graphs of size `number`: a request, and the completion of its misses.
fn graphs_of(number: usize) -> [usize; 2] {
    [2 * number, 2 * number + 1]
}

/// Returns the number of the smallest of `sizes` that holds as much as `size`.
fn number_of(sizes: &[RequestSize], size: RequestSize) -> usize {
    let holds = |s: &RequestSize| s.samples >= size.samples && s.requests >= size.requests;
    sizes.iter().position(holds).unwrap_or(sizes.len() - 1)
}

/// The inputs of a network as a step fills them. The engine knows which parts the host fills.
#[derive(Clone, Copy)]
pub struct StepInputs<'a> {
    /// The parts of the inputs.
    pub parts: &'a [InputPart],
    /// The copies after the lookups.
    pub copies: &'a [ColumnCopy],
}

/// One worker's requests on the device. All memory is allocated at the start.
pub struct Step {
    /// Two for each recorded size, numbered as [`graphs_of`] says.
    graphs: Graphs<Resources>,
    /// The reason why there are no graphs; `None` if there are.
    refused: Option<GpuDenseError>,
    /// The recorded sizes, ascending.
    sizes: Vec<RequestSize>,
}

/// The memory and handles that the graphs use.
struct Resources {
    lookup: GpuLookup,
    network: Network,
    /// One for each part of a network input, `[batch_max, words of a row]`.
    inputs: Vec<Buffer<f32>>,
    fed: Vec<FedInput>,
    /// `[batch_max, outputs]`; the host reads them.
    scores: Mapped<f32>,
    misses_max: usize,
    late: LateSamples,
}

/// The dense network, and the copies to its inputs.
struct Network {
    engine: Arc<DeviceEngine>,
    /// One scratch for all graphs, or one for each if every graph needs its own.
    scratches: Vec<DeviceScratch>,
    /// Words of a row of each part.
    words: Vec<usize>,
    /// Of each part, whether it has a row for each request.
    shared: Vec<bool>,
    copies: Vec<ColumnCopy>,
}

/// The samples of a request that had missing rows.
struct LateSamples {
    /// Their numbers, ascending, `[batch_max]`; the host writes them.
    numbers: Mapped<u32>,
    count: usize,
    /// The numbers of their requests, `[batch_max]`.
    requests: Mapped<u32>,
    /// For each late sample the position of its request in `requests`, `[batch_max]`.
    request_of: Mapped<u32>,
    /// Their inputs, as those of [`Resources`].
    inputs: Vec<Buffer<f32>>,
    /// Their scores, `[batch_max, outputs]`; the host reads them.
    scores: Mapped<f32>,
}

/// An input that the host fills.
struct FedInput {
    input: usize,
    /// `[batch_max, width]`; the host writes them.
    values: Mapped<f32>,
}

impl Network {
    /// Returns the rows of part `i` in a run of `size`.
    fn rows(&self, i: usize, size: RequestSize) -> usize {
        if self.shared[i] { size.requests } else { size.samples }
    }

    /// Returns whether kernels read the values of part `i` where the host wrote them.
    fn is_in_place(&self, i: usize, size: RequestSize) -> bool {
        self.engine.reads_in_place(i, self.rows(i, size))
    }

    /// Puts a copy of rows `numbers` of part `i`, or of all in order, onto `stream`.
    fn copy(
        &self,
        stream: &Stream,
        i: usize,
        size: RequestSize,
        numbers: View<u32>,
        [from, to]: [View<f32>; 2],
    ) -> Result<(), CudaError> {
        let shape = ResultShape { samples: self.rows(i, size), width: self.words[i] };
        let [from, to] =
            [from, to].map(|values| RowColumns { values, first: 0, stride: shape.width });
        self.engine.kernels.gather(stream, from, numbers, shape, to)
    }

    /// Puts the part of graph `graph` onto `stream` that needs nothing looked up.
    fn run_early(
        &mut self,
        stream: &Stream,
        graph: usize,
        shape: RunShape<'_>,
        inputs: &[View<f32>],
    ) -> Result<(), GpuDenseError> {
        let scratch = graph.min(self.scratches.len() - 1);
        self.engine.enqueue_early(stream, shape, inputs, &mut self.scratches[scratch])
    }

    /// Copies vectors to the inputs that they feed too, and puts the rest of the run of graph
    /// `graph` onto `stream`.
    fn run_rest(
        &mut self,
        stream: &Stream,
        graph: usize,
        shape: RunShape<'_>,
        inputs: &[View<f32>],
        scores: View<f32>,
    ) -> Result<(), GpuDenseError> {
        let Self { engine, scratches, words, copies, .. } = self;
        for &ColumnCopy { from, to, width, shared } in copies.iter() {
            let samples = if shared { shape.size.requests } else { shape.size.samples };
            let [from, to] = [from, to].map(|at| RowColumns {
                values: inputs[at.part],
                first: at.column,
                stride: words[at.part],
            });
            let shape = ResultShape { samples, width };
            engine.kernels.gather(stream, from, View::none(), shape, to)?;
        }
        let scratch = graph.min(scratches.len() - 1);
        engine.enqueue_rest(stream, shape, inputs, scores, &mut scratches[scratch])
    }
}

impl Resources {
    /// Returns the inputs of a request of `size`.
    fn inputs_of<'a>(
        network: &Network,
        inputs: &'a [Buffer<f32>],
        fed: &'a [FedInput],
        size: RequestSize,
    ) -> Vec<View<'a, f32>> {
        let mut inputs: Vec<View<f32>> = inputs.iter().map(Buffer::view).collect();
        for FedInput { input, values } in fed.iter().filter(|f| network.is_in_place(f.input, size))
        {
            inputs[*input] = values.view();
        }
        inputs
    }

    /// Puts the part of graph `graph`, of `size`, onto the branch that needs nothing looked up.
    fn begin(&mut self, graph: usize, size: RequestSize) -> Result<(), GpuDenseError> {
        let Self { lookup, network, inputs, fed, .. } = self;
        let branch = lookup.branch();
        branch.fork(lookup.stream())?;
        for FedInput { input, values } in fed.iter().filter(|f| !network.is_in_place(f.input, size))
        {
            let both = [values.view(), inputs[*input].view()];
            network.copy(branch.stream(), *input, size, View::none(), both)?;
        }
        let shape = RunShape { size, request_of: lookup.request_of(size.samples) };
        let inputs = Self::inputs_of(network, inputs, fed, size);
        network.run_early(branch.stream(), graph, shape, &inputs)
    }

    /// Puts the query of a request of `size` onto the stream.
    fn query(&self, size: RequestSize) -> Result<(), CudaError> {
        self.lookup.copy_keys(size.samples)?;
        self.lookup.launch_beside(size)
    }

    /// Puts the rest of graph `graph`, of `size`, onto the stream.
    fn score(&mut self, graph: usize, size: RequestSize) -> Result<(), GpuDenseError> {
        let Self { lookup, network, inputs, fed, scores, .. } = self;
        let shape = RunShape { size, request_of: lookup.request_of(size.samples) };
        let inputs = Self::inputs_of(network, inputs, fed, size);
        network.run_rest(lookup.stream(), graph, shape, &inputs, scores.view())?;
        Ok(lookup.branch().join(lookup.stream())?)
    }

    /// Puts graph `graph`, the completion of a request with late samples and requests of `size`,
    /// onto the stream. Their rows must have been read when the stream runs it.
    fn complete(&mut self, graph: usize, size: RequestSize) -> Result<(), GpuDenseError> {
        let Self { lookup, network, inputs, fed, misses_max, late, .. } = self;
        let (stream, branch) = (lookup.stream(), lookup.branch());
        let is_shared = !lookup.request_of(size.samples).is_empty();
        let request_of = late.request_of.view().first(if is_shared { size.samples } else { 0 });
        let shape = RunShape { size, request_of };
        let late_inputs: Vec<View<f32>> = late.inputs.iter().map(Buffer::view).collect();
        let copy = |network: &Network, stream: &Stream, i: usize, from: View<f32>| {
            let numbers = if network.shared[i] { &late.requests } else { &late.numbers };
            network.copy(stream, i, size, numbers.view(), [from, late_inputs[i]])
        };

        branch.fork(stream)?;
        for FedInput { input, values } in fed.iter() {
            copy(network, branch.stream(), *input, values.view())?;
        }
        network.run_early(branch.stream(), graph, shape, &late_inputs)?;

        lookup.finish(*misses_max)?;
        for (i, from) in inputs.iter().enumerate() {
            if !fed.iter().any(|fed| fed.input == i) {
                copy(network, stream, i, from.view())?;
            }
        }
        branch.join(stream)?;
        network.run_rest(stream, graph, shape, &late_inputs, late.scores.view())
    }
}

impl LateSamples {
    /// Lists the samples that `is_late` marks, and their requests, which end at `ends`. Pads the
    /// lists to one of `sizes` with their last numbers. Returns that size's number.
    fn list(&mut self, is_late: &[bool], ends: &[usize], sizes: &[RequestSize]) -> usize {
        let Self { numbers, count, requests, request_of, .. } = self;
        let (mut request, mut listed) = (0, 0);
        *count = 0;
        for (sample, _) in is_late.iter().enumerate().filter(|(_, is_late)| **is_late) {
            numbers[*count] = sample as u32;
            if !ends.is_empty() {
                while ends[request] <= sample {
                    request += 1;
                }
                if listed == 0 || requests[listed - 1] != request as u32 {
                    requests[listed] = request as u32;
                    listed += 1;
                }
                request_of[*count] = listed as u32 - 1;
            }
            *count += 1;
        }
        let number = number_of(sizes, RequestSize { samples: *count, requests: listed });
        let size = sizes[number];
        for (list, count, end) in [
            (&mut *numbers, *count, size.samples),
            (&mut *requests, listed, size.requests),
            (&mut *request_of, *count, size.samples),
        ] {
            let last = count.checked_sub(1).map_or(0, |last| list[last]);
            list[count..end].fill(last);
        }
        number
    }
}

impl Step {
    /// Allocates and records a worker's requests on `tables` and `engine`, whose inputs are
    /// `inputs`. `features(addresses)` returns the sparse features, given the device address of
    /// each input.
    ///
    /// # Errors
    /// [`GpuDenseError`]: the device has not enough memory, or work cannot be recorded.
    pub fn new<'a>(
        tables: &Arc<DeviceTables>,
        engine: &Arc<DeviceEngine>,
        inputs: StepInputs<'_>,
        features: impl FnOnce(&[u64]) -> Vec<FeatureOnDevice<'a>>,
        limits: LookupLimits,
    ) -> Result<Self, GpuDenseError> {
        let (batch_max, misses_max) = (limits.batch_max, limits.misses_max.max(1));
        let (gpu, StepInputs { parts, copies }) = (tables.gpu(), inputs);
        let words: Vec<usize> = (0..parts.len()).map(|part| engine.input_words(part)).collect();
        let buffers = || -> Result<Vec<Buffer<f32>>, CudaError> {
            words.iter().map(|words| gpu.buffer(batch_max * words)).collect()
        };
        let inputs = buffers()?;
        let addresses: Vec<u64> = inputs.iter().map(Buffer::address).collect();
        let fed = engine.fed().iter().map(|&input| -> Result<_, CudaError> {
            // The host writes them as f32.
            assert_eq!(engine.input_types()[input], InputType::F32);
            Ok(FedInput { input, values: gpu.mapped(batch_max * parts[input].width)? })
        });
        let fed = fed.collect::<Result<_, _>>()?;
        let late = LateSamples {
            numbers: gpu.mapped(batch_max)?,
            count: 0,
            requests: gpu.mapped(batch_max)?,
            request_of: gpu.mapped(batch_max)?,
            inputs: buffers()?,
            scores: gpu.mapped(batch_max * engine.outputs())?,
        };
        let features = features(&addresses);
        // TensorRT computes each sample, however many requests there are.
        let has_requests = limits.is_shared && !engine.graphs_own_scratch();
        let resources = Resources {
            lookup: GpuLookup::new(tables, &features, limits)?,
            network: Network {
                engine: Arc::clone(engine),
                scratches: engine.scratches(scratch_batches(engine, batch_max))?,
                words,
                shared: parts.iter().map(|part| part.shared).collect(),
                copies: copies.to_vec(),
            },
            inputs,
            fed,
            scores: gpu.mapped(batch_max * engine.outputs())?,
            misses_max,
            late,
        };

        let sizes = recorded_sizes(batch_max, has_requests);
        let mut step = Self { graphs: Graphs::new(resources), refused: None, sizes };
        step.record()?;
        Ok(step)
    }

    /// Records the graphs of all sizes.
    fn record(&mut self) -> Result<(), GpuDenseError> {
        let Self { graphs, refused, sizes } = self;
        for (number, &size) in sizes.iter().enumerate() {
            // The first run, for samples without keys, is not recorded, because driver and
            // libraries allocate memory in it, and a context of TensorRT gets its shapes.
            let [first, second] = graphs_of(number);
            let resources = graphs.resources_mut();
            resources.begin(first, size)?;
            resources.query(size)?;
            resources.score(first, size)?;
            resources.complete(second, size)?;
            Self::stream_of(resources).wait()?;

            let request = |r: &mut Resources| {
                r.begin(first, size)?;
                r.query(size)?;
                r.score(first, size)
            };
            let complete = |r: &mut Resources| r.complete(second, size);
            let recorded = graphs
                .record(Self::stream_of, request)
                .and_then(|_| graphs.record(Self::stream_of, complete));
            if let Err(e) = recorded {
                // Not tried again before the next swap or load, which makes a new step. An idle
                // worker would delay the request that ends its pause by the whole recording.
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

    /// Returns the shape of the graph of a request of `batch` samples, if there is one and the
    /// driver tells its shape.
    pub fn shape(&self, batch: usize) -> Option<GraphShape> {
        let [graph, _] = graphs_of(number_of(&self.sizes, batch.into()));
        self.refused.is_none().then(|| self.graphs.shape(graph)).flatten()
    }

    /// Returns the bytes of device memory of one worker's step. `width` is the sum of the widths of
    /// the network's inputs.
    pub fn bytes(engine: &DeviceEngine, width: usize, batch_max: usize) -> u64 {
        let scratches = engine.scratch_bytes(scratch_batches(engine, batch_max));
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

    /// Begins a request of `batch`, with `bags(f)` for feature `f`. `fill(i, values)` writes the
    /// values of part `i` that the host fills, `[rows, width]`. It is one launch, including the
    /// copy of the keys if there is one, and does not wait. The caller has waited for the previous
    /// request.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn begin<'a, 's>(
        &mut self,
        batch: impl Into<Samples<'s>>,
        bags: impl Fn(usize) -> Bags<'a>,
        fill: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), CudaError> {
        if self.refused.is_some() {
            let begun = self.begin_unrecorded(batch, bags, fill);
            return begun.map_err(|e| e.into_cuda(self.stream().gpu()));
        }
        let number = self.write_request(batch.into(), bags, fill);
        let [graph, _] = graphs_of(number);
        self.graphs.launch(graph, Self::stream_of, |r, launch| r.lookup.in_turn(launch))
    }

    /// Writes a request to the memory that the device reads; returns the number of its size.
    fn write_request<'a>(
        &mut self,
        batch: Samples<'_>,
        bags: impl Fn(usize) -> Bags<'a>,
        mut fill: impl FnMut(usize, &mut [f32]),
    ) -> usize {
        // Without ends each sample is a request.
        let requests = if batch.ends.is_empty() { batch.count } else { batch.ends.len() };
        let own = RequestSize { samples: batch.count, requests };
        let number = number_of(&self.sizes, own);
        let (resources, size) = (self.graphs.resources_mut(), self.sizes[number]);
        resources.lookup.write_request(batch, size, bags);
        for FedInput { input, values } in &mut resources.fed {
            let width = resources.network.words[*input];
            let rows = [own, size].map(|size| width * resources.network.rows(*input, size));
            fill(*input, &mut values[..rows[0]]);
            // These rows pad the batch.
            values[rows[0]..rows[1]].fill(0.0);
        }
        number
    }

    /// Begins a request without a graph: every kernel is a separate launch. For the arguments see
    /// [`Step::begin`].
    ///
    /// # Errors
    /// [`GpuDenseError`].
    pub fn begin_unrecorded<'a, 's>(
        &mut self,
        batch: impl Into<Samples<'s>>,
        bags: impl Fn(usize) -> Bags<'a>,
        fill: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), GpuDenseError> {
        let number = self.write_request(batch.into(), bags, fill);
        let (resources, size) = (self.graphs.resources_mut(), self.sizes[number]);
        let [graph, _] = graphs_of(number);
        resources.begin(graph, size)?;
        resources.lookup.in_turn(|| resources.query(size))?;
        resources.score(graph, size)
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

        let Self { graphs, sizes, .. } = self;
        let Resources { lookup, late, .. } = graphs.resources_mut();
        let number = late.list(lookup.open_samples(), lookup.ends(), sizes);
        let [_, graph] = graphs_of(number);
        match &self.refused {
            None => graphs.launch(graph, Self::stream_of, |_, launch| launch())?,
            Some(_) => {
                let resources = graphs.resources_mut();
                let completed = resources.complete(graph, sizes[number]);
                completed.map_err(|e| e.into_cuda(resources.lookup.stream().gpu()))?;
            }
        }

        let Resources { lookup, late, scores, network, .. } = graphs.resources_mut();
        let engine = &network.engine;
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
        &resources.scores[..batch * resources.network.engine.outputs()]
    }
}
