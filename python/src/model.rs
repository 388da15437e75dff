//! `Model`: one model with a budget of its own. `Answer`: the result of a request. Input arrays are
//! read in place; the arrays of an answer are made when the program first reads them.

use crate::buffers::Array;
use crate::errors;
use hatchback::request::pipeline;
use hatchback::schema::batch::{Bags, DenseColumns};
use hatchback::schema::raw_value::RawValue;
use hatchback_capi::outcome::{Refusal, closed, request};
use hatchback_capi::process::{CallerShape, Process, ServedModel};
use pyo3::buffer::Element;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// Counts of a status.
const STATUS_COUNTS: usize = 5;

/// The answer to a request. Its arrays are made when the program first reads them.
#[pyclass(frozen)]
pub struct Answer {
    scores: Rows<f32>,
    statuses: Rows<u32>,
    /// The positions of the best samples, if the request asked for them.
    positions: Option<Rows<u32>>,
    /// The generation that scored the request.
    #[pyo3(get)]
    generation: u64,
}

impl Answer {
    /// Returns what the caller with `shape` gets of `answer`: all samples, or the `top_k` best.
    fn of(
        answer: &pipeline::Answer<'_>,
        shape: &CallerShape,
        top_k: Option<usize>,
    ) -> Result<Self, Refusal> {
        let (scores, width) = (answer.scores(), shape.outputs.len());
        let samples = scores.statuses.len();
        let known: Vec<f32> = shape.scores(scores.values, scores.values.len() / samples)?.collect();
        let best = top_k.map(|k| {
            let mut best = vec![0; k.min(samples)];
            scores.top_k(0, &mut best);
            best
        });
        let row = |at: &u32| &known[*at as usize * width..][..width];
        let values = best.as_ref().map(|best| best.iter().flat_map(row).copied().collect());

        let sum = best.as_ref().map(|_| [scores.status()]);
        let mut statuses = Vec::with_capacity(samples * STATUS_COUNTS);
        for status in sum.as_ref().map_or(scores.statuses, |sum| sum) {
            let hatchback::LookupStatus { fresh, defaulted, absent, damaged, late } = *status;
            statuses.extend([fresh, defaulted, absent, damaged, u32::from(late)]);
        }
        Ok(Self {
            scores: Rows::new(values.unwrap_or(known), width),
            positions: best.map(|best| Rows::new(best, 1)),
            statuses: Rows::new(statuses, STATUS_COUNTS),
            generation: answer.generation().sequence,
        })
    }
}

#[pymethods]
impl Answer {
    /// float32 `[samples, outputs]`.
    #[getter]
    fn scores(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.scores.array(py, "float32")
    }

    /// uint32 `[samples, 5]`: fresh, defaulted, absent, damaged, late.
    #[getter]
    fn statuses(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.statuses.array(py, "uint32")
    }

    /// uint32 `[top_k]`: the positions of the samples in the request. None without `top_k`.
    #[getter]
    fn positions(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let line = |rows: &Rows<u32>| rows.array(py, "uint32")?.call_method1(py, "ravel", ());
        self.positions.as_ref().map(line).transpose()
    }
}

/// A served model.
#[pyclass(frozen)]
pub struct Model {
    open: RwLock<Option<Arc<Open>>>,
    #[pyo3(get)]
    dense_features: Vec<String>,
    #[pyo3(get)]
    shared_dense_features: Vec<String>,
    #[pyo3(get)]
    features: Vec<String>,
    /// Whether a feature has weights.
    has_weights: bool,
    /// The number of shared features.
    shared: usize,
    #[pyo3(get)]
    outputs: usize,
    #[pyo3(get)]
    output_names: Vec<String>,
    #[pyo3(get)]
    batch_max: usize,
}

/// What a model holds until it is closed. The fields drop in order, so the model ends before its
/// process.
struct Open {
    model: ServedModel,
    process: Process,
}

/// Values in rows, and the numpy array of them once the program has read it.
struct Rows<T> {
    values: Vec<T>,
    columns: usize,
    array: PyOnceLock<Py<PyAny>>,
}

impl<T: Element> Rows<T> {
    fn new(values: Vec<T>, columns: usize) -> Self {
        Self { values, columns, array: PyOnceLock::new() }
    }

    /// Returns the numpy array `[rows, columns]` of type `name`.
    fn array(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let made = self.array.get_or_try_init(py, || {
            let import = || Ok::<_, PyErr>(py.import("numpy")?.getattr("empty")?.unbind());
            let empty = EMPTY.get_or_try_init(py, import)?.bind(py);
            let shape = (self.values.len() / self.columns, self.columns);
            let array = empty.call1((shape, name))?;
            Array::open("array", &array)?.room::<T>()?.copy_from_slice(&self.values);
            Ok::<_, PyErr>(array.unbind())
        });
        made.map(|array| array.clone_ref(py))
    }
}

impl Model {
    fn opened(&self) -> PyResult<Arc<Open>> {
        let open = self.open.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let open = open.clone().ok_or_else(|| errors::of(closed("model")))?;
        open.process.shared().check_opener().map_err(errors::of)?;
        Ok(open)
    }

    /// Returns the number of samples of a request: `dense` is the shape of its dense features,
    /// `keys` and `weights` are numbers of values.
    fn samples(
        &self,
        dense: &[usize],
        keys: usize,
        offsets: &[u32],
        weights: Option<usize>,
    ) -> Result<usize, Refusal> {
        let (features, width) = (self.features.len(), self.dense_features.len());
        // Without features there are no bags, so both [] and [0] are their offsets.
        let offsets = if features == 0 && offsets.is_empty() { &[0] } else { offsets };
        let values = offsets.len();
        let [first, end] =
            [offsets.first(), offsets.last()].map(|at| at.map_or(0, |at| *at as usize));
        let samples = match (features, dense) {
            (0, [samples, _]) => *samples,
            (0, [values]) if width == 1 => *values,
            (0, _) => 1,
            // With shared features the number of bags does not give that of the samples.
            (_, [samples, _]) if self.shared > 0 && width > 0 => *samples,
            (own, _) if self.shared == own => 1,
            (own, _) => values.saturating_sub(1 + self.shared) / (own - self.shared),
        };
        let bags = [features * samples, (features - self.shared) * samples + self.shared];
        // With one sample or one dense feature there is only one way to read a single axis.
        let is_line = || *dense == [samples * width] && (samples == 1 || width <= 1);
        // Dense rows suit any number of samples. Offsets may suit none, and are then to blame.
        let rows = dense.first().filter(|_| dense.len() == 2 && width > 0).map_or(0, |rows| *rows);
        Err(request(if first != 0 {
            format!("offsets: start at {first}, must start at 0")
        } else if !bags.contains(&values.wrapping_sub(1)) || samples == 0 && rows > 0 {
            let (rule, needed) = ("a sample and 1", features * rows + 1);
            let beside = if rows > 0 { format!(": {needed} for dense") } else { String::new() };
            format!("offsets: {values} values, must be {features} {rule}{beside}")
        } else if samples == 0 || samples > self.batch_max {
            format!("{samples} samples: a request has 1 to {}", self.batch_max)
        } else if end != keys {
            format!("offsets: end at {end}, but there are {keys} keys")
        } else if *dense != [samples, width] && !is_line() {
            let taken = [samples, width];
            format!("dense: has shape {dense:?}, with {values} offsets the model takes {taken:?}")
        } else if weights.is_some() && !self.has_weights {
            "weights: the model has no feature with weights; pass None".to_owned()
        } else if let Some(weights) = weights.filter(|weights| *weights != keys) {
            format!("weights: {weights} values for {keys} keys")
        } else {
            return Ok(samples);
        }))
    }

    /// Returns the rows of shared dense features with the given `shape`.
    fn shared_rows(&self, samples: usize, shape: Option<&[usize]>) -> Result<usize, Refusal> {
        let width = self.shared_dense_features.len();
        match shape {
            None if width == 0 => Ok(1),
            Some([values]) if *values == width => Ok(1),
            Some([rows, values]) if *values == width && (*rows == 1 || *rows == samples) => {
                Ok(*rows)
            }
            shape => {
                let shape = shape.unwrap_or_default();
                Err(request(format!(
                    "shared_dense: has shape {shape:?}, the model takes [{width}]"
                )))
            }
        }
    }
}

#[pymethods]
impl Model {
    /// Opens the flash directory or the bundle at `path`. A bundle is installed into `flash` first,
    /// by default the bundle's name with the extension `.flash`.
    #[staticmethod]
    #[pyo3(signature = (path, target=None, *, flash=None, name=None))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        target: Option<PathBuf>,
        flash: Option<PathBuf>,
        name: Option<String>,
    ) -> PyResult<Self> {
        let opened = py.detach(move || -> Result<Open, Refusal> {
            let flash = flash.unwrap_or_else(|| path.with_extension("flash"));
            let directory = hatchback_tools::serve::open_flash(&path, &flash).map_err(|e| {
                hatchback_capi::outcome::refused(hatchback_tools::report::explain(&e))
            })?;
            let directory = directory.directory().to_owned();
            let process = match target {
                Some(target) => Process::open(&target)?,
                None => Process::on_desk()?,
            };
            Ok(Open { model: process.load(&directory, name.as_deref())?, process })
        });
        let open = opened.map_err(errors::of)?;

        let Open { model, .. } = &open;
        let served = model.model().map_err(errors::of)?;
        let schema = served.schema();
        let names = |shared, taken| {
            schema.dense_of(shared).map(|feature| feature.name.clone()).take(taken).collect()
        };
        Ok(Self {
            dense_features: names(false, model.shape.dense),
            shared_dense_features: names(true, model.shape.shared_dense),
            features: model.shape.features.clone(),
            has_weights: schema.features.iter().any(|f| f.weighted),
            shared: model.shape.shared.iter().filter(|shared| **shared).count(),
            outputs: model.shape.outputs.len(),
            output_names: model.shape.outputs.clone(),
            batch_max: served.budget().batch_max as usize,
            open: RwLock::new(Some(Arc::new(open))),
        })
    }

    /// Scores samples. `dense` is float32 `[samples, dense features]`; with one sample or one dense
    /// feature it may have a single axis. `keys` has the keys of all bags: those of the first
    /// feature for each sample, then those of the second, and so on, as in TorchRec's
    /// `KeyedJaggedTensor`. `offsets` is `[features * samples + 1]`, from 0 to the number of keys.
    /// A shared feature may have one bag for all samples. It must if `dense` has no row a sample.
    /// `weights` is float32, one for each key; those of features without weights are not read. A
    /// model whose features all have no weights takes none. `shared_dense` is float32 `[shared
    /// dense features]`, or such a row for each sample. With `top_k` the answer has the best
    /// samples by the first output, best first, and the sum of all statuses.
    #[pyo3(signature = (
        dense, keys, offsets, *, shared_dense=None, weights=None, timeout=None, top_k=None
    ))]
    #[allow(clippy::too_many_arguments)] // The arguments are those of the Python call.
    fn score<'py>(
        &self,
        py: Python<'py>,
        dense: &Bound<'py, PyAny>,
        keys: &Bound<'py, PyAny>,
        offsets: &Bound<'py, PyAny>,
        shared_dense: Option<&Bound<'py, PyAny>>,
        weights: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
        // Wide: pyo3 refuses a number beyond the type without the argument's name.
        top_k: Option<i128>,
    ) -> PyResult<Answer> {
        let open = self.opened()?;
        if let Some(k) = top_k.filter(|k| *k < 1) {
            return Err(errors::of(request(format!("top_k is {k}, must be 1 or more"))));
        }
        let top_k = top_k.map(|k| usize::try_from(k).unwrap_or(usize::MAX));
        let (dense, keys) = (Array::open("dense", dense)?, Array::open_line("keys", keys)?);
        let (offsets, mut wide) = (Array::open_line("offsets", offsets)?, Vec::new());
        let weights = weights.map(|weights| Array::open_line("weights", weights)).transpose()?;
        let offsets = offsets.offsets(&mut wide)?;
        let weights = weights.as_ref().map(Array::f32).transpose()?;
        let (count, weighed) = (keys.shape()[0], weights.map(<[f32]>::len));
        let samples = self.samples(dense.shape(), count, offsets, weighed).map_err(errors::of)?;
        let keys = keys.keys()?;
        let (dense, weights) = (dense.f32()?, weights.unwrap_or_default());
        let shared = shared_dense.map(|shared| Array::open("shared_dense", shared)).transpose()?;
        let shared_shape = shared.as_ref().map(Array::shape);
        let shared_rows = self.shared_rows(samples, shared_shape).map_err(errors::of)?;
        let shared = shared.as_ref().map(Array::f32).transpose()?.unwrap_or_default();

        let serving = &open.model.process.serving;
        let deadline = timeout
            .map(Duration::try_from_secs_f64)
            .transpose()
            .map_err(|e| errors::of(request(format!("timeout: {e}"))))?
            .map(|timeout| serving.now().saturating_add(timeout));
        let ticket = open.model.served.submit_with(deadline, |model, batch| {
            let schema = model.schema();
            let shape = &open.model.shape;
            let is_once = offsets.len() != shape.shared.len() * samples + 1;
            let count = |shared: &bool| if is_once && *shared { 1 } else { samples };
            // A feature that the model has learnt since the program opened it has empty bags.
            let bags = |f: usize| -> Result<Option<Bags<'_>>, Refusal> {
                let Some(shared) = shape.shared.get(f) else { return Ok(None) };
                let first = shape.shared[..f].iter().map(count).sum::<usize>();
                Ok(Some(Bags {
                    keys,
                    offsets: &offsets[first..][..=count(shared)],
                    weights: if schema.features[f].weighted { weights } else { &[] },
                }))
            };
            let [own, shared] =
                [(dense, false), (shared, true)].map(|(d, shared)| shape.cut(d, shared, schema));
            let dense = DenseColumns { own: &own, shared: &shared, shared_rows };
            batch.push_columns(schema, samples, dense, bags)
        });
        let ticket = ticket.map_err(errors::of)?;

        let shape = &open.model.shape;
        py.detach(|| Answer::of(&ticket.wait()?, shape, top_k)).map_err(errors::of)
    }

    /// Returns the key of a raw value of a feature: text, an integer, a number or None. A cross has
    /// a list of them, one for each of its columns.
    fn key(&self, feature: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
        let open = self.opened()?;
        let number = open.model.feature(feature).map_err(errors::of)? as usize;
        let key = if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            let values = value.try_iter()?.map(|value| raw(&value?));
            open.model.cross_key(number, &values.collect::<PyResult<Vec<_>>>()?)
        } else {
            open.model.key(number, &raw(value)?)
        };
        key.map_err(errors::of)
    }

    /// Queues keys that a later request will look up. Returns how many fit into the queue.
    fn prefetch(&self, feature: &str, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (open, keys) = (self.opened()?, Array::open_line("keys", keys)?);
        let number = open.model.feature(feature).map_err(errors::of)?;
        let keys = keys.keys()?;
        Ok(open.model.served.prefetch(number as usize, keys))
    }

    /// The generation that is served.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        let open = self.opened()?;
        Ok(open.model.model().map_err(errors::of)?.generation().sequence)
    }

    /// Counters of the model since its generation was loaded or swapped in.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.opened()?;
        let stats = open.model.served.stats().ok_or_else(|| errors::of(closed("model")))?;
        let (found, counters) = (PyDict::new(py), stats.counters);
        found.set_item("requests", stats.requests)?;
        found.set_item("batches", stats.batches)?;
        found.set_item("busy", stats.busy)?;
        found.set_item("failed", stats.failed)?;
        found.set_item("expired", stats.expired)?;
        found.set_item("waiting", stats.waiting)?;
        found.set_item("lookups", counters.lookups)?;
        found.set_item("cached_lookups", counters.cached_lookups)?;
        found.set_item("missed_lookups", counters.missed_lookups)?;
        found.set_item("pages_read", counters.pages)?;
        found.set_item("pages_damaged", counters.pages_damaged)?;
        found.set_item("prefetch_waiting", stats.prefetch_waiting)?;
        found.set_item("prefetch_dropped", stats.prefetch_dropped)?;
        Ok(found)
    }

    /// The memory of the model, line by line.
    fn memory(&self) -> PyResult<Vec<(String, u64)>> {
        let open = self.opened()?;
        let plans = open.process.shared().serving.memory();
        let lines = plans.iter().flat_map(|(_, plan)| plan.lines());
        Ok(lines.map(|(part, bytes)| (part.to_owned(), bytes)).collect())
    }

    /// Closes the model, after the requests in progress have ended.
    fn close(&self, py: Python<'_>) {
        let closed = {
            let mut open = self.open.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            open.take()
        };
        py.detach(|| drop(closed));
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

fn raw(value: &Bound<'_, PyAny>) -> PyResult<RawValue<'static>> {
    if let Ok(value) = value.extract::<String>() {
        return Ok(RawValue::Text(value.into()));
    }
    Ok(if value.is_none() {
        RawValue::Null
    } else if let Ok(value) = value.extract::<i64>() {
        RawValue::from(value)
    } else if let Ok(value) = value.extract::<u64>() {
        RawValue::from(value)
    } else if value.get_type().name()? == "float32" {
        RawValue::Float32(value.extract::<f32>()?)
    } else {
        RawValue::from(value.extract::<f64>()?)
    })
}
