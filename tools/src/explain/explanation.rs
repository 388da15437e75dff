//! The explanation of a score: the row, its release and the contribution of each feature.
//!
//! The contributions belong to a path: all features are absent at its start, and are added one by
//! one in the order of the schema. They sum to the score. An absent sparse feature has an empty
//! bag, and an absent dense feature its value for `missing`, or 0.

use crate::explain::rows::{RowVersion, TableReader, norm};
use crate::{report, say, serve};
use anyhow::Result;
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{Feature, Schema};
use hatchback::{Budget, Flash, LookupStatus, Model, Pooling, Sample};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// Keys of a bag that the table for people lists.
const KEYS_LISTED: usize = 8;

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
/// the sample twice for each feature.
///
/// # Errors
/// The model is refused, the line is not a sample of it, or a segment cannot be read.
pub fn explain(flash: &Flash, budget: Budget, line: &str) -> Result<Explanation> {
    let schema = &flash.manifest().schema;
    let sample = Sample::from_json(line, schema)?;
    let raw: Value = serde_json::from_str(line)?;
    let model = Arc::new(Model::from_flash(flash, budget)?);
    let count = schema.dense_features.len() + schema.features.len();

    let path = (0..=count).map(|kept| without(&sample, schema, |feature| feature >= kept));
    let (path, status) = score_all(&model, path)?;
    let each = (0..count).map(|absent| without(&sample, schema, |feature| feature == absent));
    let (each, _) = score_all(&model, each)?;

    let mut parts = dense_parts(&sample, schema, &raw["dense"]);
    parts.extend(sparse_parts(flash, &sample, &raw["sparse"])?);
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

/// Scores `samples`. Returns the scores of each, `None` where one is not a number, and the status
/// of the last sample.
fn score_all(
    model: &Arc<Model>,
    mut samples: impl Iterator<Item = Sample>,
) -> Result<(Vec<Option<Vec<f32>>>, LookupStatus)> {
    let (mut worker, mut batch) = (serve::worker(model), model.batch());
    let batch_max = model.budget().batch_max as usize;
    let (mut all, mut status) = (Vec::new(), LookupStatus::default());
    loop {
        batch.clear();
        for sample in samples.by_ref().take(batch_max) {
            batch.push(model.schema(), &sample)?;
        }
        if batch.is_empty() {
            return Ok((all, status));
        }
        let scores = worker.score_requests(&batch, None)?;
        for sample in 0..batch.size() {
            let scored = scores.request(sample..sample + 1).ok();
            status = scored.as_ref().map_or(status, |scores| scores.statuses[0]);
            all.push(scored.map(|scores| scores.values.to_vec()));
        }
    }
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

fn sparse_parts(flash: &Flash, sample: &Sample, raw: &Value) -> Result<Vec<FeaturePart>> {
    let schema = &flash.manifest().schema;
    let mut tables: Vec<Option<TableReader<'_>>> = schema.tables.iter().map(|_| None).collect();
    let mut part = |(number, feature): (usize, &Feature)| {
        let mut lookups = Vec::new();
        for lookup in schema.lookups_of(number) {
            let table = usize::from(lookup.table);
            // Opened once: several features may share a table.
            let reader = match tables[table].take() {
                Some(reader) => reader,
                None => TableReader::open(flash, table)?,
            };
            lookups.push(lookup_part(schema, lookup, tables[table].insert(reader), sample)?);
        }
        Ok(FeaturePart {
            feature: feature.name.clone(),
            value: raw.get(&feature.name).cloned().unwrap_or_default(),
            dense: None,
            lookups,
            contribution: None,
            score_without: None,
        })
    };
    schema.features.iter().enumerate().map(&mut part).collect()
}

fn lookup_part(
    schema: &Schema,
    lookup: &Lookup,
    table: &TableReader<'_>,
    sample: &Sample,
) -> Result<LookupPart> {
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

/// Formats the scores of all outputs.
pub fn scores_text(scores: Option<&[f32]>) -> String {
    let text = |scores: &[f32]| scores.iter().map(f32::to_string).collect::<Vec<_>>().join(" ");
    report::or_dash(scores, text)
}

/// Formats contributions to all outputs.
pub fn signed_text(values: Option<&[f64]>) -> String {
    let text = |all: &[f64]| all.iter().map(|v| format!("{v:+.6}")).collect::<Vec<_>>().join(" ");
    report::or_dash(values, text)
}

impl Explanation {
    /// Prints it for people.
    ///
    /// # Errors
    /// As [`say`].
    pub fn print(&self) -> Result<()> {
        let (score, base) = (self.score.as_deref(), self.base.as_deref());
        let (score, base) = (scores_text(score), scores_text(base));
        say!("{}: score {score}; {base} without any feature", self.generation)?;
        if self.outputs.len() > 1 {
            say!("outputs: {}", self.outputs.join(" "))?;
        }
        let heads = ["feature", "value", "key", "row from", "norm", "contribution", "without it"];
        let mut table = report::table(&heads);
        for feature in &self.features {
            feature.add_lines(&mut table);
        }
        say!("{table}")
    }
}

impl FeaturePart {
    /// Adds a line for the feature, or one for each key of each lookup.
    fn add_lines(&self, table: &mut comfy_table::Table) {
        let name = report::printable(&self.feature);
        let contribution = signed_text(self.contribution.as_deref());
        let without = scores_text(self.score_without.as_deref());
        let text = |value: &Value| report::printable(&value.to_string());
        let Some(first) = self.lookups.first().filter(|lookup| !lookup.keys.is_empty()) else {
            let value = report::or_dash(self.dense, |value| value.to_string());
            table.add_row([&name, &value, "-", "-", "-", &contribution, &without]);
            return;
        };
        let keys = first.keys.len();
        for (place, key) in first.keys.iter().take(KEYS_LISTED).enumerate() {
            let value = self.value.get(place).map_or_else(|| "-".to_owned(), text);
            let (key_text, norm) = (key.key.to_string(), format!("{:.4}", key.row.norm));
            let (name, contribution, without) = match place {
                0 => (name.as_str(), contribution.as_str(), without.as_str()),
                _ => ("", "", ""),
            };
            let origins = self.lookups.iter().map(|lookup| lookup.keys[place].row.origin());
            let origins = origins.collect::<Vec<_>>().join(", ");
            table.add_row([name, &value, &key_text, &origins, &norm, contribution, without]);
        }
        if keys > KEYS_LISTED {
            let more = format!("{} more keys", keys - KEYS_LISTED);
            table.add_row(["", "", &more, "", "", "", ""]);
        }
        if keys > 1 {
            table.add_row(["", "", "pooled", "", &format!("{:.4}", first.norm), "", ""]);
        }
    }
}
