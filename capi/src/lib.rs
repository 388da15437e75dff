//! `libhatchback`: models for C and C++ programs, in their own process. `hatchback.h` documents
//! each call. This file has the calls: each converts its pointers to slices and its result to a
//! number. No panic crosses into C. Never computes a score.

mod handles;
mod logger;
pub mod outcome;
mod pointers;
pub mod process;

pub use logger::Logger;
pub use outcome::Outcome;

use handles::Handles;
use hatchback::model::Model;
use hatchback::request::pipeline::Answer;
use hatchback::request::worker::top_k;
use hatchback::schema::batch::{Bags as Columns, Batch, DenseColumns, check_offsets};
use hatchback::schema::raw_value::RawValue;
use hatchback::{Feature, limits::CROSS_COLUMNS_MAX};
use outcome::{Refusal, answer, closed, request};
use pointers::{copy_text, place, room, text, values, write, zeros};
use process::{CallerShape, Process, ServedModel};
use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A process's budget with its models, `hatchback_process` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessHandle(u64);

/// A served model, `hatchback_model` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelHandle(u64);

/// The shape of requests, `hatchback_shape` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    dense_features: u32,
    sparse_features: u32,
    outputs: u32,
    batch_max: u32,
    shared_dense_features: u32,
}

/// The keys of one sparse feature, `hatchback_bags` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Bags {
    keys: *const u64,
    offsets: *const u32,
    weights: *const f32,
}

/// A raw value, `hatchback_value` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Value {
    text: *const c_char,
    integer: i64,
    number: f64,
    kind: u32,
}

impl Value {
    fn raw(&self) -> Result<RawValue<'_>, Refusal> {
        match self.kind {
            0 => Ok(RawValue::Text(text("text", self.text)?.into())),
            1 => Ok(self.integer.into()),
            2 => Ok(RawValue::Float(self.number)),
            3 => Ok(RawValue::Null),
            kind => Err(request(format!("kind = {kind}: a raw value has the kind 0 to 3"))),
        }
    }
}

/// The status of one sample, `hatchback_status` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Status {
    fresh: u32,
    defaulted: u32,
    absent: u32,
    damaged: u32,
    late: u32,
}

/// Counters of a model, `hatchback_statistics` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Statistics {
    generation: u64,
    requests: u64,
    batches: u64,
    busy: u64,
    failed: u64,
    expired: u64,
    waiting: u64,
    lookups: u64,
    cached_lookups: u64,
    missed_lookups: u64,
    pages_read: u64,
    pages_damaged: u64,
    prefetch_waiting: u64,
    prefetch_dropped: u64,
}

/// A line of the memory plan, `hatchback_memory_line` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemoryLine {
    model: [c_char; 64],
    part: [c_char; 64],
    bytes: u64,
}

// The layouts and numbers of interface version 1; `hatchback.hpp` asserts the same of the header.
macro_rules! layout {
    ($type:ty: $size:expr; $($field:tt at $at:expr),*) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(std::mem::offset_of!($type, $field) == $at);)*
        };
    };
}
const POINTER: usize = size_of::<usize>();
layout!(ProcessHandle: 8; 0 at 0);
layout!(ModelHandle: 8; 0 at 0);
layout!(Shape: 20;
    dense_features at 0, sparse_features at 4, outputs at 8, batch_max at 12,
    shared_dense_features at 16
);
layout!(Bags: 3 * POINTER; keys at 0, offsets at POINTER, weights at 2 * POINTER);
layout!(Value: 32; text at 0, integer at 8, number at 16, kind at 24);
layout!(Status: 20; fresh at 0, defaulted at 4, absent at 8, damaged at 12, late at 16);
layout!(Statistics: 112;
    generation at 0, requests at 8, batches at 16, busy at 24, failed at 32, expired at 40,
    waiting at 48, lookups at 56, cached_lookups at 64, missed_lookups at 72, pages_read at 80,
    pages_damaged at 88, prefetch_waiting at 96, prefetch_dropped at 104
);
layout!(MemoryLine: 136; model at 0, part at 64, bytes at 128);

static PROCESSES: Handles<Process> = Handles::new(1);
static MODELS: Handles<ServedModel> = Handles::new(2);

fn process(handle: ProcessHandle) -> Result<Arc<Process>, Refusal> {
    let process = PROCESSES.get(handle.0).ok_or_else(|| closed("process"))?;
    process.shared().check_opener()?;
    Ok(process)
}

fn model(handle: ModelHandle) -> Result<Arc<ServedModel>, Refusal> {
    let model = MODELS.get(handle.0).ok_or_else(|| closed("model"))?;
    model.process.check_opener()?;
    Ok(model)
}

/// Returns the number that `work` finds, or -1.
fn number(work: impl FnOnce() -> Result<i32, Refusal>) -> i32 {
    let mut number = -1;
    answer(|| work().map(|found| number = found));
    number
}

/// Returns the version of the library. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Takes the function for messages. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_set_logger(logger: Option<Logger>, context: *mut c_void) -> Outcome {
    answer(|| match logger::set(logger, context) {
        true => Ok(()),
        false => Err(request("the program has a logger of Rust's `log` already")),
    })
}

/// Opens a process. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_open(target: *const c_char, to: *mut ProcessHandle) -> Outcome {
    answer(|| {
        write("process", to, ProcessHandle(0))?;
        let opened = Process::open(Path::new(text("target", target)?))?;
        write("process", to, ProcessHandle(PROCESSES.open(Arc::new(opened))))
    })
}

/// Closes a process and its models. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_close(handle: ProcessHandle) -> Outcome {
    answer(|| {
        let process = process(handle)?;
        PROCESSES.close(handle.0);
        MODELS.close_if(|model| process.has(model));
        Ok(())
    })
}

/// Loads a model. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_load(
    handle: ProcessHandle,
    flash: *const c_char,
    name: *const c_char,
    to: *mut ModelHandle,
) -> Outcome {
    answer(|| {
        write("model", to, ModelHandle(0))?;
        let process = process(handle)?;
        let name = if name.is_null() { None } else { Some(text("name", name)?) };
        let loaded = process.load(Path::new(text("flash", flash)?), name)?;
        let model = MODELS.open(Arc::new(loaded));
        // A close during the load has not seen this handle.
        if PROCESSES.get(handle.0).is_none() {
            MODELS.close(model);
            return Err(closed("process"));
        }
        write("model", to, ModelHandle(model))
    })
}

/// Ends serving a model. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_unload(handle: ModelHandle) -> Outcome {
    answer(|| {
        model(handle)?;
        // Only one of two callers takes the handle: the name may be another model's by the second.
        MODELS.close(handle.0).ok_or_else(|| closed("model"))?.unload()
    })
}

/// Writes the shape of requests. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_describe(handle: ModelHandle, shape: *mut Shape) -> Outcome {
    answer(|| {
        let model = model(handle)?;
        let described = Shape {
            dense_features: model.shape.dense as u32,
            sparse_features: model.shape.features.len() as u32,
            outputs: model.shape.outputs.len() as u32,
            batch_max: model.model()?.budget().batch_max,
            shared_dense_features: model.shape.shared_dense as u32,
        };
        write("shape", shape, described)
    })
}

/// Returns the number of a feature. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_feature(handle: ModelHandle, name: *const c_char) -> i32 {
    number(|| model(handle)?.feature(text("name", name)?))
}

/// Returns the first column of an output. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_output(handle: ModelHandle, name: *const c_char) -> i32 {
    number(|| model(handle)?.output(text("name", name)?))
}

/// Writes the name of an output. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_output_name(
    handle: ModelHandle,
    column: u32,
    name: *mut c_char,
    name_bytes: u32,
) -> Outcome {
    answer(|| {
        let model = model(handle)?;
        let names = &model.shape.outputs;
        let missing = || request(format!("column = {column}: the model has {}", names.len()));
        let found = names.get(column as usize).ok_or_else(missing)?;
        let room = room("name", name, name_bytes as usize)?;
        let needed = found.len() + 1;
        if needed > room.len() {
            let problem = format!("name_bytes = {name_bytes}: `{found}` needs {needed}");
            return Err(request(problem));
        }
        let mut text = vec![0; needed];
        copy_text(found, &mut text);
        room[..needed].write_copy_of_slice(&text);
        Ok(())
    })
}

/// The arguments of `hatchback_score`.
#[derive(Clone, Copy)]
struct Request<'a> {
    shape: &'a CallerShape,
    samples: usize,
    dense: *const f32,
    sparse: *const Bags,
}

impl Request<'_> {
    /// Fills `batch` with the samples.
    fn fill(&self, model: &Model, batch: &mut Batch) -> Result<(), Refusal> {
        let (schema, most) = (model.schema(), model.budget().batch_max as usize);
        let samples = self.samples;
        if samples == 0 || samples > most {
            return Err(request(format!("samples = {samples}: a request has 1 to {most}")));
        }
        // The pointers have what the model took when the caller loaded it.
        let rows = samples * self.shape.dense;
        let dense = values("dense", self.dense, rows + self.shape.shared_dense)?;
        let (own, shared) = dense.split_at(rows);
        let (own, shared) =
            (self.shape.cut(own, false, schema), self.shape.cut(shared, true, schema));
        let dense = DenseColumns { own: &own, shared: &shared, shared_rows: 1 };
        let sparse = values("sparse", self.sparse, self.shape.features.len())?;

        // The offsets give the number of keys, so they are checked before a key is read.
        let columns = |f: usize| -> Result<Option<Columns<'_>>, Refusal> {
            let Feature { name, weighted, retired, .. } = &schema.features[f];
            let Some(bags) = sparse.get(f).filter(|_| !retired) else { return Ok(None) };
            let count = if self.shape.shared[f] { 1 } else { samples };
            let offsets = values("offsets", bags.offsets, count + 1)?;
            check_offsets(&schema.features[f], offsets)?;
            let keys = values("keys", bags.keys, offsets[count] as usize)?;
            // A pointer that the caller left from another call may point to nothing, so it is
            // refused without a read.
            if !weighted && !bags.weights.is_null() {
                let problem = "must be NULL, because the feature has no weights";
                return Err(request(format!("weights of feature `{name}`: {problem}")));
            }
            let needed = if *weighted { keys.len() } else { 0 };
            let weights = values("weights", bags.weights, needed)?;
            Ok(Some(Columns { keys, offsets, weights }))
        };
        batch.push_columns(schema, samples, dense, columns)
    }
}

/// Where `hatchback_score` writes its answer.
struct Destination<'a> {
    shape: &'a CallerShape,
    scores: *mut f32,
    statuses: *mut Status,
    generation: *mut u64,
}

impl Destination<'_> {
    /// Checks that the pointers have room for an answer to `samples` samples.
    fn check(&self, samples: usize) -> Result<(), Refusal> {
        room("scores", self.scores, samples * self.shape.outputs.len())?;
        place("generation", self.generation)?;
        self.statuses(samples).map(drop)
    }

    /// Returns the room for `samples` statuses; none if the caller wants none.
    fn statuses<'a>(&self, samples: usize) -> Result<&'a mut [MaybeUninit<Status>], Refusal> {
        room("statuses", self.statuses, if self.statuses.is_null() { 0 } else { samples })
    }

    fn write(&self, answer: &Answer<'_>) -> Result<(), Refusal> {
        let scores = answer.scores();
        let samples = scores.statuses.len();
        let known = self.shape.scores(scores.values, scores.values.len() / samples.max(1))?;
        let room = room("scores", self.scores, samples * self.shape.outputs.len())?;
        for (to, score) in room.iter_mut().zip(known) {
            to.write(score);
        }
        if let Some(generation) = place("generation", self.generation)? {
            generation.write(answer.generation().sequence);
        }
        for (to, from) in self.statuses(scores.statuses.len())?.iter_mut().zip(scores.statuses) {
            let hatchback::LookupStatus { fresh, defaulted, absent, damaged, late } = *from;
            to.write(Status { fresh, defaulted, absent, damaged, late: u32::from(late) });
        }
        Ok(())
    }
}

/// Scores samples. `hatchback.h` documents it.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The arguments are those of the C call.
extern "C" fn hatchback_score(
    handle: ModelHandle,
    samples: u32,
    dense: *const f32,
    sparse: *const Bags,
    timeout_us: u64,
    scores: *mut f32,
    statuses: *mut Status,
    generation: *mut u64,
) -> Outcome {
    answer(|| {
        let model = model(handle)?;
        let (serving, served) = (&model.process.serving, &model.served);
        let deadline = (timeout_us > 0).then(|| serving.now() + Duration::from_micros(timeout_us));
        let shape = &model.shape;
        let request = Request { shape, samples: samples as usize, dense, sparse };
        let to = Destination { shape, scores, statuses, generation };

        let ticket = served.submit_with(deadline, |model, batch| {
            request.fill(model, batch)?;
            to.check(request.samples)
        })?;
        to.write(&ticket.wait()?)
    })
}

/// Writes the positions of the best samples. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_top_k(
    scores: *const f32,
    samples: u32,
    outputs: u32,
    column: u32,
    k: u32,
    positions: *mut u32,
) -> Outcome {
    answer(|| {
        if column >= outputs || k == 0 {
            let problem = format!("column = {column} of {outputs}, k = {k}; k is 1 or more");
            return Err(request(problem));
        }
        let scores = values("scores", scores, samples as usize * outputs as usize)?;
        let best = zeros("positions", positions, k.min(samples) as usize)?;
        top_k(scores, outputs as usize, column as usize, best);
        Ok(())
    })
}

/// Writes the key of a text. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_key_of_text(
    handle: ModelHandle,
    feature: u32,
    value: *const c_char,
    key: *mut u64,
) -> Outcome {
    answer(|| {
        let value = RawValue::Text(text("value", value)?.into());
        write("key", key, model(handle)?.key(feature as usize, &value)?)
    })
}

/// Writes the key of an integer. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_key_of_integer(
    handle: ModelHandle,
    feature: u32,
    value: i64,
    key: *mut u64,
) -> Outcome {
    answer(|| write("key", key, model(handle)?.key(feature as usize, &value.into())?))
}

/// Writes the key of a number. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_key_of_number(
    handle: ModelHandle,
    feature: u32,
    value: f64,
    key: *mut u64,
) -> Outcome {
    answer(|| write("key", key, model(handle)?.key(feature as usize, &RawValue::Float(value))?))
}

/// Writes the key of a cross. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_key_of_cross(
    handle: ModelHandle,
    feature: u32,
    given: *const Value,
    count: u32,
    key: *mut u64,
) -> Outcome {
    answer(|| {
        // Before they are read: a wrong count would read past the caller's values.
        let fits = (count as usize <= CROSS_COLUMNS_MAX).then_some(count as usize);
        let many = || request(format!("count = {count}, over the {CROSS_COLUMNS_MAX} of a cross"));
        let raw = values("values", given, fits.ok_or_else(many)?)?.iter().map(Value::raw);
        let raw = raw.collect::<Result<Vec<_>, _>>()?;
        write("key", key, model(handle)?.cross_key(feature as usize, &raw)?)
    })
}

/// Explains a score. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_explain(
    handle: ModelHandle,
    sample: *const c_char,
    report: *mut *const c_char,
) -> Outcome {
    answer(|| {
        place("report", report)?.ok_or_else(|| request("report is NULL"))?;
        let explained = model(handle)?.explain(text("sample", sample)?)?;
        write("report", report, outcome::keep_explanation(explained))
    })
}

/// Queues keys to prefetch. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_prefetch(
    handle: ModelHandle,
    feature: u32,
    keys: *const u64,
    count: u32,
    queued: *mut u32,
) -> Outcome {
    answer(|| {
        let model = model(handle)?;
        model.check_feature(feature as usize)?;
        let keys = values("keys", keys, count as usize)?;
        let taken = model.served.prefetch(feature as usize, keys);
        if let Some(queued) = place("queued", queued)? {
            queued.write(taken as u32);
        }
        Ok(())
    })
}

/// Writes what a model did. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_get_statistics(
    handle: ModelHandle,
    statistics: *mut Statistics,
) -> Outcome {
    answer(|| {
        let model = model(handle)?;
        let stats = model.served.stats().ok_or_else(|| closed("model"))?;
        let counters = stats.counters;
        let found = Statistics {
            generation: model.model()?.generation().sequence,
            requests: stats.requests,
            batches: stats.batches,
            busy: stats.busy,
            failed: stats.failed,
            expired: stats.expired,
            waiting: stats.waiting as u64,
            lookups: counters.lookups,
            cached_lookups: counters.cached_lookups,
            missed_lookups: counters.missed_lookups,
            pages_read: counters.pages,
            pages_damaged: counters.pages_damaged,
            prefetch_waiting: stats.prefetch_waiting as u64,
            prefetch_dropped: stats.prefetch_dropped,
        };
        write("statistics", statistics, found)
    })
}

/// Writes the memory of a process, line by line. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_get_memory(
    handle: ProcessHandle,
    lines: *mut MemoryLine,
    lines_max: u32,
    count: *mut u32,
) -> Outcome {
    answer(|| {
        let plans = process(handle)?.shared().serving.memory();
        let all = plans.iter().flat_map(|(name, plan)| {
            plan.lines().into_iter().map(move |(part, bytes)| (name, part, bytes))
        });
        let found = all.clone().count();
        // A call that fails writes nothing.
        let lines = room("lines", lines, found.min(lines_max as usize))?;
        write("count", count, found as u32)?;
        for (to, (model, part, bytes)) in lines.iter_mut().zip(all) {
            let mut line = MemoryLine { model: [0; 64], part: [0; 64], bytes };
            copy_text(model, &mut line.model);
            copy_text(part, &mut line.part);
            to.write(line);
        }
        Ok(())
    })
}

/// Returns the text of this thread's last error. `hatchback.h` documents it.
#[unsafe(no_mangle)]
extern "C" fn hatchback_error() -> *const c_char {
    outcome::last_error()
}
