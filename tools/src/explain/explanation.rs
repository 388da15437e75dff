//! Prints the explanation of a score for people.

use crate::{report, say};
use anyhow::Result;
use hatchback::request::explain::{Explanation, FeaturePart};
use serde_json::Value;

/// Keys of a bag that the table for people lists.
const KEYS_LISTED: usize = 8;

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

/// Prints `explanation` for people.
///
/// # Errors
/// As [`say`].
pub fn print(explanation: &Explanation) -> Result<()> {
    let Explanation { generation, outputs, features, .. } = explanation;
    let score = scores_text(explanation.score.as_deref());
    let base = scores_text(explanation.base.as_deref());
    say!("{generation}: score {score}; {base} without any feature")?;
    if outputs.len() > 1 {
        say!("outputs: {}", outputs.join(" "))?;
    }
    let heads = ["feature", "value", "key", "row from", "norm", "contribution", "without it"];
    let mut table = report::table(&heads);
    features.iter().for_each(|feature| add_lines(feature, &mut table));
    say!("{table}")
}

/// Adds a line for the feature, or one for each key of each lookup.
fn add_lines(feature: &FeaturePart, table: &mut comfy_table::Table) {
    let name = report::printable(&feature.feature);
    let contribution = signed_text(feature.contribution.as_deref());
    let without = scores_text(feature.score_without.as_deref());
    let text = |value: &Value| report::printable(&value.to_string());
    let Some(first) = feature.lookups.first().filter(|lookup| !lookup.keys.is_empty()) else {
        let value = report::or_dash(feature.dense, |value| value.to_string());
        table.add_row([&name, &value, "-", "-", "-", &contribution, &without]);
        return;
    };
    let keys = first.keys.len();
    for (place, key) in first.keys.iter().take(KEYS_LISTED).enumerate() {
        let value = feature.value.get(place).map_or_else(|| "-".to_owned(), text);
        let (key_text, norm) = (key.key.to_string(), format!("{:.4}", key.row.norm));
        let (name, contribution, without) = match place {
            0 => (name.as_str(), contribution.as_str(), without.as_str()),
            _ => ("", "", ""),
        };
        let origins = feature.lookups.iter().map(|lookup| lookup.keys[place].row.origin());
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
