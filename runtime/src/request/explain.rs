//! The explanation of a score: the row, its release and the contribution of each feature.
//!
//! The contributions belong to a path: all features are absent at its start, and are added one by
//! one in the order of the schema. They sum to the score. An absent sparse feature has an empty
//! bag, and an absent dense feature its value for `missing`, or 0.

use crate::clock::SystemClock;
use crate::flash::row_version::{RowVersion, TableReader, norm};
use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError, read_settled};
use crate::io::disk;
use crate::limits::PROBE_CACHE_BYTES_MAX;
use crate::maintenance::background::Background;
use crate::maintenance::share::{BusyBounds, Urgency};
use crate::model::budget::Budget;
use crate::model::{Model, OpenError};
use crate::request::error::ScoreError;
use crate::request::serving::Serving;
use crate::request::worker::Worker;
use crate::schema::batch::BatchError;
use crate::schema::lookup::Lookup;
use crate::schema::sample::{Sample, SampleError};
use crate::schema::{Feature, Schema};
use hatchback_kernels::lookup::{LookupStatus, Pooling};
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The share of a CPU that an explanation beside requests gets: what they leave, and at least 5 %.
const BUSY: BusyBounds = BusyBounds { percent_min: 5, percent_max: 100 };

/// Why a score is not explained.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum ExplainError {
    /// No model of that name is served.
    #[error("no model `{0}` is served")]
    NotServed(String),
    /// Another generation is live than the one that is served.
    #[error("an update is live and not served yet; repeat the explanation after its swap")]
    Swap,
    /// The system gave no thread.
    #[error("threads: {0}")]
    Threads(io::Error),
    /// The line is not a sample of the model.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The sample does not fit the model.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The flash directory cannot be used.
    #[error(transparent)]
    Flash(#[from] FlashError),
    /// A row cannot be read.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The model cannot be opened in the memory that the served ones leave.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The model cannot score.
    #[error(transparent)]
    Score(#[from] ScoreError),
}

debug_as_display!(ExplainError);

/// The scores of all outputs; `None` if one is not a number.
type FiniteScores = Option<Vec<f32>>;

/// Why a sample has its score. Lists of scores have a value for each output.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The generation that gave the score.
    pub generation: String,
    /// The names of the outputs.
    pub outputs: Vec<String>,
    /// `None` if a score is not a number.
    pub score: Option<Vec<f32>>,
    /// The score without any feature: the start of the path. If it is not a number, the first of
    /// the path that is.
    pub base: Option<Vec<f32>>,
    /// The status of the sample's lookups.
    pub status: LookupStatus,
    /// The dense features, then the sparse ones, in the order of the schema.
    pub features: Vec<FeaturePart>,
}

/// The part of a feature.
#[derive(Debug, Serialize)]
pub struct FeaturePart {
    /// Its name.
    pub feature: String,
    /// As in the sample; null if the sample lacks it.
    pub value: Value,
    /// The value that a dense feature has for the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense: Option<f32>,
    /// Its lookups; none for a dense feature.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lookups: Vec<LookupPart>,
    /// What the feature adds on the path. `None` if a score there is not a number: the next feature
    /// with a contribution then has both.
    pub contribution: Option<Vec<f64>>,
    /// The score if this feature alone is absent; `None` if it is not a number.
    pub score_without: Option<Vec<f32>>,
}

/// The lookup of a bag in a table.
#[derive(Debug, Serialize)]
pub struct LookupPart {
    /// The name of the table.
    pub table: String,
    /// The Euclidean norm of the pooled vector.
    pub norm: f32,
    /// The keys of the bag.
    pub keys: Vec<KeyPart>,
}

/// A key of a bag, with the row that a request finds.
#[derive(Debug, Serialize)]
pub struct KeyPart {
    /// The key that the value became.
    pub key: u64,
    /// Its weight, if the feature has weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f32>,
    /// Its row.
    #[serde(flatten)]
    pub row: RowVersion,
}

/// Explains the score that the live generation of `flash` gives to the sample in `line`. It scores
/// the sample twice for each feature, on a model of its own, whose rows stay on flash.
///
/// # Errors
/// The model is refused, the line is not a sample of it, or a segment cannot be read.
pub fn explain(flash: &Flash, line: &str) -> Result<Explanation, ExplainError> {
    explain_beside(flash, None, line, &|| {})
}

/// Explains, as [`explain`] does, the score of the model that `serving` serves as `name` from the
/// flash directory `directory`. A background thread works, so that requests do not wait; this call
/// blocks until it ends, and changes of models wait. The served model's open files are shared, but
/// no cache.
///
/// # Errors
/// Those of [`explain`]. [`ExplainError::NotServed`] if there is no such model,
/// [`ExplainError::Swap`] while an update waits for its swap, and [`OpenError::Budget`] if the
/// budget has no room for a second network.
pub fn explain_served(
    serving: &Serving,
    name: &str,
    directory: &Path,
    line: &str,
) -> Result<Explanation, ExplainError> {
    // A swap takes the same memory.
    let _one = serving.hold_changes();
    let served = serving.model(name).ok_or_else(|| ExplainError::NotServed(name.to_owned()))?;
    let (max, taken, bytes) =
        (serving.memory_bytes_max(), serving.memory_taken(), served.explanation_bytes());
    if taken + bytes > max {
        let problem = format!("an explanation takes {bytes} bytes beside the {taken} taken now");
        return Err(OpenError::Budget { field: "memory_bytes_max", value: max, problem }.into());
    }

    let work = || {
        let background = Background::enter(BUSY);
        let yield_now = || background.yield_now(Urgency::Awaited, std::thread::sleep);
        let open = || Ok(Flash::open(&disk::system(), directory)?);
        let read = |flash: &Flash| match flash.record().id() == served.id() {
            true => explain_beside(flash, Some(&served), line, &yield_now),
            false => Err(ExplainError::Swap),
        };
        read_settled(open, read, |_| true)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("explain".to_owned());
        let thread = thread.spawn_scoped(scope, work).map_err(ExplainError::Threads)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn explain_beside(
    flash: &Flash,
    served: Option<&Model>,
    line: &str,
    yield_now: &dyn Fn(),
) -> Result<Explanation, ExplainError> {
    let schema = &flash.manifest().schema;
    let sample = Sample::from_json(line, schema)?;
    let raw: Value = serde_json::from_str(line).map_err(|e| SampleError::Json(e.to_string()))?;
    let (budget, cache_bytes) = (Budget::default(), PROBE_CACHE_BYTES_MAX);
    let mut model = Model::open_on_flash(flash, budget, cache_bytes, served, yield_now)?;
    // A request that took default rows in time would be explained with other ones.
    model.wait_for_rows();
    let model = Arc::new(model);
    let count = schema.dense_features.len() + schema.features.len();

    let path = (0..=count).map(|kept| without(&sample, schema, |feature| feature >= kept));
    let (path, status) = score_all(&model, path, yield_now)?;
    let each = (0..count).map(|absent| without(&sample, schema, |feature| feature == absent));
    let (each, _) = score_all(&model, each, yield_now)?;

    let mut parts = dense_parts(&sample, schema, &raw["dense"]);
    parts.extend(sparse_parts(flash, &model, &sample, &raw["sparse"])?);
    let base = path.iter().flatten().next().cloned();
    let mut before = path[0].as_ref();
    for ((part, after), score_without) in parts.iter_mut().zip(&path[1..]).zip(each) {
        let both = before.zip(after.as_ref());
        let added = |(before, after): (&f32, &f32)| f64::from(*after) - f64::from(*before);
        part.contribution = both.map(|(b, a)| b.iter().zip(a).map(added).collect());
        part.score_without = score_without;
        before = after.as_ref().or(before);
    }
    Ok(Explanation {
        generation: flash.manifest().generation.to_string(),
        outputs: schema.network.outputs.iter().map(|output| output.name.clone()).collect(),
        score: path.into_iter().next_back().flatten(),
        base,
        status,
        features: parts,
    })
}

/// Returns `sample` without the features that are `absent`: the dense ones count first.
fn without(sample: &Sample, schema: &Schema, absent: impl Fn(usize) -> bool) -> Sample {
    let mut sample = sample.clone();
    let dense = schema.dense_features.iter().zip(&mut sample.dense).enumerate();
    for (_, (feature, value)) in dense.filter(|(number, _)| absent(*number)) {
        *value = feature.missing.unwrap_or(0.0);
    }
    let first = schema.dense_features.len();
    for feature in (0..schema.features.len()).filter(|feature| absent(first + feature)) {
        sample.sparse[feature].clear();
        if let Some(weights) = sample.weights.get_mut(feature) {
            weights.clear();
        }
    }
    sample
}

/// Scores `samples`, one at a time. Returns the scores of each, `None` where one is not a number,
/// and the status of the last sample.
fn score_all(
    model: &Arc<Model>,
    samples: impl Iterator<Item = Sample>,
    yield_now: &dyn Fn(),
) -> Result<(Vec<FiniteScores>, LookupStatus), ExplainError> {
    let mut worker = Worker::new(Arc::clone(model), Arc::new(SystemClock::default()));
    let mut batch = model.batch();
    let (mut all, mut status) = (Vec::new(), LookupStatus::default());
    for sample in samples {
        batch.clear();
        batch.push(model.schema(), &sample)?;
        let scored = worker.score_requests(&batch, None)?.request(0..1).ok();
        status = scored.as_ref().map_or(status, |scores| scores.statuses[0]);
        all.push(scored.map(|scores| scores.values.to_vec()));
        yield_now();
    }
    Ok((all, status))
}

fn dense_parts(sample: &Sample, schema: &Schema, raw: &Value) -> Vec<FeaturePart> {
    let part = |(number, name): (usize, &String)| FeaturePart {
        feature: name.clone(),
        value: raw.get(number).or_else(|| raw.get(name)).cloned().unwrap_or_default(),
        dense: Some(sample.dense[number]),
        lookups: Vec::new(),
        contribution: None,
        score_without: None,
    };
    schema.dense_names().enumerate().map(part).collect()
}

fn sparse_parts(
    flash: &Flash,
    model: &Model,
    sample: &Sample,
    raw: &Value,
) -> Result<Vec<FeaturePart>, ExplainError> {
    let schema = &flash.manifest().schema;
    let part = |(number, feature): (usize, &Feature)| {
        let lookup = |lookup: &Lookup| {
            let table = usize::from(lookup.table);
            let reader = TableReader::new(flash, table, &model.tables()[table].rows);
            lookup_part(schema, lookup, &reader, sample)
        };
        let lookups = schema.lookups_of(number).map(lookup).collect::<Result<_, _>>()?;
        Ok(FeaturePart {
            feature: feature.name.clone(),
            value: raw.get(&feature.name).cloned().unwrap_or_default(),
            dense: None,
            lookups,
            contribution: None,
            score_without: None,
        })
    };
    schema.features.iter().enumerate().map(part).collect()
}

fn lookup_part(
    schema: &Schema,
    lookup: &Lookup,
    table: &TableReader<'_>,
    sample: &Sample,
) -> Result<LookupPart, SegmentError> {
    let feature = usize::from(lookup.feature);
    let weights = sample.weights.get(feature).filter(|weights| !weights.is_empty());
    let mut keys = Vec::new();
    for (place, key) in sample.sparse[feature].iter().enumerate() {
        let weight = weights.map(|weights| weights[place]);
        keys.push(KeyPart { key: *key, weight, row: table.newest(*key)? });
    }
    let name = schema.tables[usize::from(lookup.table)].name.clone();
    Ok(LookupPart { table: name, norm: norm(&pool(lookup.pooling, &keys)), keys })
}

/// Returns the vector that a lookup makes of the rows of `keys`.
fn pool(pooling: Pooling, keys: &[KeyPart]) -> Vec<f32> {
    let weight = |key: &KeyPart| key.weight.unwrap_or(1.0);
    let weighted = |key: &KeyPart| {
        // The largest value is that of a row, without its weight.
        let weight = if pooling == Pooling::Max { 1.0 } else { weight(key) };
        key.row.values.iter().map(move |v| v * weight).collect::<Vec<f32>>()
    };
    if pooling == Pooling::None {
        return keys.iter().flat_map(weighted).collect();
    }
    let join = |a: f32, b: f32| if pooling == Pooling::Max { a.max(b) } else { a + b };
    let rows = keys.iter().map(weighted);
    let sum = rows.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| join(a, b)).collect());
    let divisor = match pooling {
        Pooling::Mean => keys.iter().map(weight).sum(),
        Pooling::Sqrtn => keys.iter().map(|key| weight(key).powi(2)).sum::<f32>().sqrt(),
        Pooling::Sum | Pooling::None | Pooling::Max => 1.0,
    };
    let quotient = |v: f32| if divisor == 0.0 { 0.0 } else { v / divisor };
    sum.unwrap_or_default().into_iter().map(quotient).collect()
}
