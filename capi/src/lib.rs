//! `libhatchback`: a model for C and C++ programs, in their own process. `hatchback.h` documents
//! each call. This file turns pointers into slices, once per call, and results into numbers. No
//! panic crosses into C. This file computes no score.

use hatchback::clock::{Clock, SystemClock};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::request::pipeline::{Pipeline, RequestError};
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::targets::Target;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The result of a call, `hatchback_result` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call succeeded.
    Ok = 0,
    /// Every request slot is taken.
    Busy = 1,
    /// An argument or the batch does not fit the model.
    Request = 2,
    /// The target or the flash directory is refused.
    Open = 3,
    /// The request could not be computed.
    Failed = 4,
    /// A score is not a number.
    NotFinite = 5,
    /// The deadline passed before the request had scores.
    DeadlineExceeded = 6,
}

/// The shape of requests, `hatchback_shape` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    dense_features: u32,
    sparse_features: u32,
    outputs: u32,
    batch_max: u32,
}

/// The keys of one sparse feature, `hatchback_bags` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Bags {
    keys: *const u64,
    offsets: *const u32,
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

/// A model, open for scoring.
pub struct Handle {
    pipeline: Pipeline,
    clock: Arc<SystemClock>,
    /// The batches that no call is using; with those in use, one for each request slot.
    batches: Mutex<Vec<(Batch, Sample)>>,
}

/// Why a call failed: its result and its error text.
struct Refusal(Outcome, String);

fn request(problem: impl Into<String>) -> Refusal {
    Refusal(Outcome::Request, problem.into())
}

fn refused(e: impl std::fmt::Display) -> Refusal {
    Refusal(Outcome::Open, e.to_string())
}

impl From<RequestError> for Refusal {
    fn from(e: RequestError) -> Self {
        let outcome = match e {
            RequestError::Busy(_) => Outcome::Busy,
            RequestError::NotFinite(_) => Outcome::NotFinite,
            RequestError::DeadlineExceeded => Outcome::DeadlineExceeded,
            _ => Outcome::Failed,
        };
        Self(outcome, e.to_string())
    }
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `work` and keeps the text of its error for `hatchback_error`.
fn answer(work: impl FnOnce() -> Result<(), Refusal>) -> Outcome {
    let done = catch_unwind(AssertUnwindSafe(work));
    match done
        .unwrap_or_else(|_| Err(Refusal(Outcome::Failed, "a panic inside libhatchback".to_owned())))
    {
        Ok(()) => Outcome::Ok,
        Err(Refusal(outcome, text)) => {
            // A C string cannot contain a zero byte.
            ERROR.set(CString::new(text.replace('\0', " ")).unwrap_or_default());
            outcome
        }
    }
}

/// Returns the text at `text`. `name` is the argument's name, for the error.
fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, Refusal> {
    if text.is_null() {
        return Err(request(format!("{name} is NULL")));
    }
    // SAFETY: `text` is not null; by the header it is a zero-terminated string that lives through
    // the call.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|e| request(format!("{name}: {e}")))
}

/// Returns the `length` values at `start`. `name` is the argument's name, for the error.
fn values<'a, T>(name: &str, start: *const T, length: usize) -> Result<&'a [T], Refusal> {
    match length {
        0 => Ok(&[]),
        _ if start.is_null() || !start.is_aligned() => {
            Err(request(format!("{name} is NULL or not aligned")))
        }
        // SAFETY: `start` is not null and aligned; by the header it has `length` values, which live
        // through the call.
        _ => Ok(unsafe { std::slice::from_raw_parts(start, length) }),
    }
}

/// Returns the `length` values at `start`, to be written; otherwise as [`values`].
fn room<'a, T>(name: &str, start: *mut T, length: usize) -> Result<&'a mut [T], Refusal> {
    values(name, start.cast_const(), length)?;
    // SAFETY: as in `values`; by the header no other code reads or writes them during the call.
    Ok(if length == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(start, length) } })
}

fn handle<'a>(model: *const Handle) -> Result<&'a Handle, Refusal> {
    // SAFETY: by the header `model` is null, or comes from `hatchback_open` and was not passed to
    // `hatchback_close`.
    unsafe { model.as_ref() }.ok_or_else(|| request("model is NULL"))
}

fn open(target: &str, flash: &str) -> Result<Handle, Refusal> {
    let target = Target::load(Path::new(target)).map_err(refused)?;

    let lookups =
        target.device.open(target.tegra_profile).map_err(|e| refused(format!("device: {e}")))?;
    let flash = Flash::open(&disk::system(), Path::new(flash)).map_err(refused)?;
    let model = Model::from_flash(&flash, target.budget).map_err(refused)?.move_to_device(&lookups);
    let model = model
        .and_then(|m| m.move_dense_to_gpu(&flash, target.tensorrt_options.as_ref()))
        .map_err(refused)?;

    let batches = batches(&model)?;
    let clock = Arc::new(SystemClock::default());
    let pipeline =
        Pipeline::new(Arc::new(model), Arc::clone(&clock) as Arc<dyn Clock>).map_err(refused)?;
    Ok(Handle { pipeline, clock, batches: Mutex::new(batches) })
}

/// Returns a batch, and a sample to fill the batch from, for each request slot of `model`.
///
/// # Errors
/// The budget of the model does not hold them too.
fn batches(model: &Model) -> Result<Vec<(Batch, Sample)>, Refusal> {
    let (schema, budget) = (model.schema(), model.budget());
    let each = Batch::bytes(schema, budget.batch_max as usize) + Batch::bytes(schema, 1);
    let (taken, ours) = (model.memory().total(), u64::from(budget.slots) * each as u64);
    if taken + ours > budget.memory_bytes_max {
        let max = budget.memory_bytes_max;
        return Err(refused(format!(
            "memory_bytes_max = {max}: the model takes {taken} bytes and the batches of calls \
             {ours}; lower slots or batch_max"
        )));
    }
    let sample = || Sample {
        dense: Vec::with_capacity(schema.dense_features.len()),
        sparse: schema
            .features
            .iter()
            .map(|f| Vec::with_capacity(f.hotness_max as usize))
            .collect(),
        ..Sample::default()
    };
    Ok((0..budget.slots).map(|_| (model.batch(), sample())).collect())
}

/// Opens a model. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_open(
    target: *const c_char,
    flash: *const c_char,
    model: *mut *mut Handle,
) -> Outcome {
    answer(|| {
        let place = room("model", model, 1)?;
        place[0] = std::ptr::null_mut();
        place[0] = Box::into_raw(Box::new(open(text("target", target)?, text("flash", flash)?)?));
        Ok(())
    })
}

/// Writes the shape of requests. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_describe(model: *const Handle, shape: *mut Shape) -> Outcome {
    answer(|| {
        let model = handle(model)?.pipeline.model();
        room("shape", shape, 1)?[0] = Shape {
            dense_features: model.schema().dense_features.len() as u32,
            sparse_features: model.schema().features.len() as u32,
            outputs: model.outputs() as u32,
            batch_max: model.budget().batch_max,
        };
        Ok(())
    })
}

/// Returns the number of a feature. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_feature(model: *const Handle, name: *const c_char) -> i32 {
    let mut number = -1;
    answer(|| {
        let (name, model) = (text("name", name)?, handle(model)?.pipeline.model());
        let at = model.schema().features.iter().position(|f| f.name == name);
        number = at.ok_or_else(|| request(format!("the model has no feature `{name}`")))? as i32;
        Ok(())
    });
    number
}

/// The arguments of `hatchback_score` as slices.
struct Input<'a> {
    samples: usize,
    dense: &'a [f32],
    sparse: &'a [Bags],
}

impl Handle {
    /// Fills `batch` with the samples of `input`.
    fn fill(
        &self,
        input: &Input<'_>,
        batch: &mut Batch,
        sample: &mut Sample,
    ) -> Result<(), Refusal> {
        let model = self.pipeline.model();
        let schema = model.schema();
        let width = schema.dense_features.len();

        batch.clear();
        for i in 0..input.samples {
            sample.dense.clear();
            sample.dense.extend_from_slice(&input.dense[i * width..][..width]);
            for (bag, (given, feature)) in
                sample.sparse.iter_mut().zip(input.sparse.iter().zip(&schema.features))
            {
                let offsets = values("offsets", given.offsets, input.samples + 1)?;
                let (from, to) = (offsets[i] as usize, offsets[i + 1] as usize);
                let longest = feature.hotness_max as usize;
                if (i == 0 && from != 0) || from > to || to - from > longest {
                    return Err(request(format!(
                        "feature `{}`: offsets {from} to {to} of sample {i}: a bag has 0 to \
                         {longest} keys",
                        feature.name
                    )));
                }

                bag.clear();
                bag.extend_from_slice(&values("keys", given.keys, to)?[from..]);
            }
            batch.push(schema, sample).map_err(|e| request(format!("sample {i}: {e}")))?;
        }
        Ok(())
    }

    fn score(
        &self,
        input: &Input<'_>,
        timeout_us: u64,
        scores: &mut [f32],
        statuses: Option<&mut [Status]>,
    ) -> Result<(), Refusal> {
        let pool = || self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = self.pipeline.model().budget().slots as usize;
        let (mut batch, mut sample) = pool().pop().ok_or(RequestError::Busy(slots))?;

        let submitted = self.fill(input, &mut batch, &mut sample).and_then(|()| {
            let deadline =
                (timeout_us > 0).then(|| self.clock.now() + Duration::from_micros(timeout_us));
            Ok(self.pipeline.submit(&batch, deadline)?)
        });
        pool().push((batch, sample));

        let ticket = submitted?;
        let answer = ticket.wait()?;
        scores.copy_from_slice(answer.scores().values);
        for (to, from) in statuses.into_iter().flatten().zip(answer.scores().statuses) {
            let hatchback::LookupStatus { fresh, defaulted, absent, damaged, late } = *from;
            *to = Status { fresh, defaulted, absent, damaged, late: u32::from(late) };
        }
        Ok(())
    }
}

/// Scores samples. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_score(
    model: *const Handle,
    samples: u32,
    dense: *const f32,
    sparse: *const Bags,
    timeout_us: u64,
    scores: *mut f32,
    statuses: *mut Status,
) -> Outcome {
    answer(|| {
        let handle = handle(model)?;
        let model = handle.pipeline.model();
        let (schema, most) = (model.schema(), model.budget().batch_max);
        if samples == 0 || samples > most {
            return Err(request(format!("samples = {samples}: a request has 1 to {most}")));
        }

        let samples = samples as usize;
        let dense = values("dense", dense, samples * schema.dense_features.len())?;
        let sparse = values("sparse", sparse, schema.features.len())?;
        let scores = room("scores", scores, samples * model.outputs())?;
        let statuses =
            if statuses.is_null() { None } else { Some(room("statuses", statuses, samples)?) };

        handle.score(&Input { samples, dense, sparse }, timeout_us, scores, statuses)
    })
}

/// Queues keys to prefetch. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_prefetch(
    model: *const Handle,
    feature: u32,
    keys: *const u64,
    count: u32,
    queued: *mut u32,
) -> Outcome {
    answer(|| {
        let pipeline = &handle(model)?.pipeline;
        let features = pipeline.model().schema().features.len();
        if feature as usize >= features {
            return Err(request(format!("feature = {feature}: the model has {features}")));
        }
        let keys = values("keys", keys, count as usize)?;
        let taken = pipeline.prefetch(feature as usize, keys);
        if !queued.is_null() {
            room("queued", queued, 1)?[0] = taken as u32;
        }
        Ok(())
    })
}

/// Returns the text of this thread's last error. `hatchback.h` documents it.
#[unsafe(no_mangle)]
pub extern "C" fn hatchback_error() -> *const c_char {
    ERROR.with_borrow(|text| text.as_ptr())
}

/// Frees a model. `hatchback.h` documents it.
///
/// # Safety
/// `model` is null, or comes from `hatchback_open`, was not freed before, and no other call uses
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hatchback_close(model: *mut Handle) {
    answer(|| {
        if !model.is_null() {
            // SAFETY: `hatchback_open` made `model` from a box, and by the caller's promise this
            // call alone has it.
            drop(unsafe { Box::from_raw(model) });
        }
        Ok(())
    });
}
