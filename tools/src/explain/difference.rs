//! What differs between two generations for one sample: the scores, the contributions and the rows.

use crate::explain::explanation::{scores_text, signed_text};
use crate::{report, say};
use anyhow::Result;
use hatchback::Schema;
use hatchback::flash::row_version::norm;
use hatchback::request::explain::{Explanation, FeaturePart, KeyPart};
use serde::Serialize;
use serde_json::Value;

/// What the other generation does with the sample.
#[derive(Debug, Serialize)]
pub struct Difference {
    generation: String,
    score: Option<Vec<f32>>,
    base: Option<Vec<f32>>,
    /// The features that differ: by name, of either generation.
    features: Vec<FeatureDifference>,
}

/// What differs for a feature.
#[derive(Debug, Serialize)]
struct FeatureDifference {
    feature: String,
    /// What it adds in each generation; `None` where the generation lacks it.
    contribution: [Option<Vec<f64>>; 2],
    /// The rows that differ.
    rows: Vec<RowDifference>,
}

/// Two rows that differ, or that have different keys.
#[derive(Debug, Serialize)]
struct RowDifference {
    table: String,
    keys: [u64; 2],
    /// The releases that the rows came from, in words.
    origins: [String; 2],
    /// The Euclidean distance of the rows; `None` if they have different dims.
    distance: Option<f32>,
}

impl Difference {
    /// Compares two explanations of one sample.
    pub fn between(here: &Explanation, there: Explanation) -> Self {
        let of = |all: &[FeaturePart], name: &str| all.iter().position(|f| f.feature == name);
        let mut features = Vec::new();
        for ours in &here.features {
            let theirs = of(&there.features, &ours.feature).map(|at| &there.features[at]);
            features.extend(FeatureDifference::between(Some(ours), theirs));
        }
        for theirs in &there.features {
            if of(&here.features, &theirs.feature).is_none() {
                features.extend(FeatureDifference::between(None, Some(theirs)));
            }
        }
        Self { generation: there.generation, score: there.score, base: there.base, features }
    }

    /// Prints what differs from `here`.
    pub fn print(&self, here: &Explanation) -> Result<()> {
        let (score, base) = (scores_text(self.score.as_deref()), scores_text(self.base.as_deref()));
        say!("{}: score {score}; {base} without any feature", self.generation)?;
        if self.features.is_empty() {
            return say!("no row and no contribution differs");
        }
        let (ours, theirs) = (here.generation.as_str(), self.generation.as_str());
        let mut table = report::table(&["feature", "rows that differ", "distance", ours, theirs]);
        for feature in &self.features {
            let [a, b] = feature.contribution.each_ref().map(|c| signed_text(c.as_deref()));
            let mut names = [report::printable(&feature.feature), a, b];
            if feature.rows.is_empty() {
                let [name, a, b] = &names;
                table.add_row([name.as_str(), "-", "-", a, b]);
            }
            for RowDifference { keys, origins, distance, .. } in &feature.rows {
                let key =
                    if keys[0] == keys[1] { keys[0].to_string() } else { format!("{keys:?}") };
                let row = format!("{key}: {} / {}", origins[0], origins[1]);
                let distance = report::or_dash(*distance, |d| format!("{d:.4}"));
                let [name, a, b] = std::mem::take(&mut names);
                table.add_row([name, row, distance, a, b]);
            }
        }
        say!("{table}")
    }
}

impl FeatureDifference {
    /// Compares the parts of a feature; `None` if nothing differs.
    fn between(ours: Option<&FeaturePart>, theirs: Option<&FeaturePart>) -> Option<Self> {
        let feature = ours.or(theirs)?.feature.clone();
        let contribution = [ours, theirs].map(|part| part?.contribution.clone());
        let mut rows = Vec::new();
        for (a, b) in
            ours.into_iter().zip(theirs).flat_map(|(a, b)| a.lookups.iter().zip(&b.lookups))
        {
            let both = a.keys.iter().zip(&b.keys);
            rows.extend(
                both.filter_map(|(a_key, b_key)| RowDifference::between(&a.table, a_key, b_key)),
            );
        }
        let is_same = contribution[0] == contribution[1] && rows.is_empty();
        (!is_same).then_some(Self { feature, contribution, rows })
    }
}

impl RowDifference {
    fn between(table: &str, ours: &KeyPart, theirs: &KeyPart) -> Option<Self> {
        let distance = distance(&ours.row.values, &theirs.row.values);
        let is_same =
            ours.key == theirs.key && ours.row.status == theirs.row.status && distance == Some(0.0);
        (!is_same).then(|| Self {
            table: table.to_owned(),
            keys: [ours.key, theirs.key],
            origins: [ours.row.origin(), theirs.row.origin()],
            distance,
        })
    }
}

/// Returns the Euclidean distance of two rows; `None` if they differ in width.
pub fn distance(row: &[f32], before: &[f32]) -> Option<f32> {
    let both = row.iter().zip(before).map(|(a, b)| a - b);
    (row.len() == before.len()).then(|| norm(&both.collect::<Vec<_>>()))
}

/// Returns the sample in `line`, of a model of `ours`, as a model of `theirs` takes it: without the
/// features that it lacks, and with names for the dense values.
pub fn line_for(line: &str, ours: &Schema, theirs: &Schema) -> Result<String> {
    let mut sample: Value = serde_json::from_str(line)?;
    let dense = sample.get("dense").and_then(Value::as_array).cloned();
    if let Some(values) = dense {
        let named = ours.dense_names().cloned().zip(values);
        sample["dense"] = Value::Object(named.collect());
    }
    for field in ["dense", "sparse", "weights"] {
        let is_known = |name: &str| match field {
            "dense" => theirs.dense_names().any(|known| known == name),
            "sparse" => theirs.features.iter().any(|feature| feature.name == name),
            _ => theirs.features.iter().any(|feature| feature.weighted && feature.name == name),
        };
        if let Some(values) = sample.get_mut(field).and_then(Value::as_object_mut) {
            values.retain(|name, _| is_known(name));
        }
    }
    // The outcome belongs to the outputs of one generation.
    if let Some(sample) = sample.as_object_mut() {
        sample.remove("label");
        sample.remove("score");
    }
    Ok(sample.to_string())
}
