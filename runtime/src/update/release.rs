//! Releases as the repository names them, and the way from what is live to the newest. A release is
//! one target: the manifest of its bundle, whose chunks lie under their hashes. Never makes a path
//! of a name that it did not take apart first.

use crate::bundle::manifest::{Generation, Hash};
use crate::update::error::UpdateError;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sigstore_tuf::Targets;
use std::collections::{BTreeMap, BTreeSet};

/// The field of a target's `custom` that says how many bytes its chunks take.
pub const BYTES: &str = "bytes";

/// The field of a target's `custom` that says which share of the fleet may have it, per cent;
/// without it all may.
pub const SHARE: &str = "share";

/// One release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// What it leads to.
    pub generation: Generation,
    /// The sequence it starts from; `None` for a snapshot.
    pub parent: Option<u64>,
    /// Bytes of its chunks, as announced.
    pub bytes: u64,
    /// Cars with a cohort below this may have it.
    pub share: u8,
    /// Bytes of its manifest.
    pub manifest_bytes: u64,
    /// SHA-256 of its manifest.
    #[serde(serialize_with = "write_hex", deserialize_with = "read_hex")]
    pub manifest: Hash,
}

fn write_hex<S: Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&hex(hash))
}

fn read_hex<'de, D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
    let text = String::deserialize(from)?;
    unhex(&text).ok_or_else(|| D::Error::custom("a hash has 64 hexadecimal digits"))
}

/// Hexadecimal digits of a hash or of a part of one.
pub fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Hash> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let mut hash = Hash::default();
    if pairs.len() != hash.len() {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(pairs) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// Where the chunk of this hash lies in the repository.
pub fn chunk_path(hash: &Hash) -> String {
    let hex = hex(hash);
    format!("chunks/{}/{hex}", &hex[..2])
}

/// The target name of a release.
pub fn target_name(generation: &Generation, parent: Option<u64>) -> String {
    let (lineage, sequence) = (&generation.lineage, generation.sequence);
    match parent {
        None => format!("{lineage}/{sequence:012}-snapshot"),
        Some(parent) => format!("{lineage}/{sequence:012}-from-{parent:012}"),
    }
}

/// Where the manifest with this hash and target name lies in the repository.
pub fn manifest_path(name: &str, hash: &Hash) -> String {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    format!("targets/{folder}/{}.{file}", hex(hash))
}

/// Takes a target's name apart; `None` if it is not a release's.
pub fn parse_name(name: &str) -> Option<(Generation, Option<u64>)> {
    let (lineage, file) = name.split_once('/')?;
    let (sequence, kind) = file.split_once('-')?;
    let parent = match kind.strip_prefix("from-") {
        Some(parent) => Some(parent.parse().ok()?),
        None => None,
    };
    let generation = Generation { lineage: lineage.to_owned(), sequence: sequence.parse().ok()? };
    let ours = !lineage.is_empty()
        && !lineage.starts_with('.')
        && lineage.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && parent.is_none_or(|parent| parent < generation.sequence)
        && target_name(&generation, parent) == name;
    ours.then_some((generation, parent))
}

/// The releases among `targets`. Targets with other names are not ours.
///
/// # Errors
/// A release has no SHA-256.
pub fn releases(targets: &Targets) -> Result<Vec<Release>, UpdateError> {
    let mut releases = Vec::new();
    for (name, target) in &targets.targets {
        let Some((generation, parent)) = parse_name(name) else { continue };
        let Some(manifest) = target.hashes.get("sha256").and_then(|h| unhex(h)) else {
            let problem = "is missing or not 64 hexadecimal digits".to_owned();
            return Err(UpdateError::Release { name: name.clone(), field: "sha256", problem });
        };
        let number = |field: &str| {
            target.custom.as_ref().and_then(|c| c.get(field)).and_then(serde_json::Value::as_u64)
        };
        let bytes = number(BYTES).unwrap_or(u64::MAX);
        let share = number(SHARE).map_or(100, |share| share.min(100) as u8);
        releases.push(Release {
            generation,
            parent,
            bytes,
            share,
            manifest_bytes: target.length,
            manifest,
        });
    }
    Ok(releases)
}

/// The model to follow: the live one's, the named one, or the only one.
///
/// # Errors
/// There are several and none is named.
pub fn lineage_of(
    live: Option<&Generation>,
    named: Option<&str>,
    releases: &[Release],
) -> Result<Option<String>, UpdateError> {
    if let Some(lineage) = live.map(|g| g.lineage.as_str()).or(named) {
        return Ok(Some(lineage.to_owned()));
    }
    let found: BTreeSet<&str> = releases.iter().map(|r| r.generation.lineage.as_str()).collect();
    match found.len() {
        0 => Ok(None),
        1 => Ok(found.first().map(|l| (*l).to_owned())),
        _ => {
            let found = found.into_iter().collect::<Vec<_>>().join(", ");
            Err(UpdateError::Lineage { found })
        }
    }
}

/// The releases to install one after the other: those of fewest bytes that lead from `live` to the
/// highest sequence that can be reached, by a snapshot first where what is live does not take
/// deltas. Empty where nothing is newer than `live`.
///
/// # Errors
/// There is something newer, and no way to it.
pub fn way(
    live: Option<u64>,
    takes_deltas: bool,
    lineage: &str,
    releases: &[Release],
) -> Result<Vec<Release>, UpdateError> {
    let mut steps: Vec<&Release> = releases
        .iter()
        .filter(|r| {
            r.generation.lineage == lineage && live.is_none_or(|live| r.generation.sequence > live)
        })
        .collect();
    steps.sort_by_key(|r| (r.generation.sequence, r.parent));
    let Some(newest) = steps.last().map(|r| r.generation.sequence) else { return Ok(Vec::new()) };
    // Every step leads to a higher sequence: in their order each way is known before it is gone on
    // from.
    let mut best: BTreeMap<u64, (u64, Option<&Release>)> = BTreeMap::new();
    if let Some(live) = live.filter(|_| takes_deltas) {
        best.insert(live, (0, None));
    }
    for step in steps {
        let before = match step.parent {
            None => Some(0),
            Some(parent) => best.get(&parent).map(|(bytes, _)| *bytes),
        };
        let Some(bytes) =
            before.map(|b| b.saturating_add(step.bytes).saturating_add(step.manifest_bytes))
        else {
            continue;
        };
        let entry = best.entry(step.generation.sequence).or_insert((u64::MAX, None));
        if entry.1.is_none() || bytes < entry.0 {
            *entry = (bytes, Some(step));
        }
    }
    let mut way = Vec::new();
    let mut at = best.last_key_value().and_then(|(_, (_, step))| *step);
    while let Some(step) = at {
        way.push(step.clone());
        at = step.parent.and_then(|parent| best.get(&parent)).and_then(|(_, step)| *step);
    }
    way.reverse();
    if way.is_empty() {
        let live = live.map_or("nothing".to_owned(), |l| format!("sequence {l}"));
        return Err(UpdateError::NoWay { live, newest, lineage: lineage.to_owned() });
    }
    Ok(way)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(sequence: u64, parent: Option<u64>, bytes: u64) -> Release {
        let generation = Generation { lineage: "m".to_owned(), sequence };
        Release { generation, parent, bytes, share: 100, manifest_bytes: 0, manifest: [0; 32] }
    }

    fn path(live: Option<u64>, releases: &[Release]) -> Vec<(u64, Option<u64>)> {
        way(live, true, "m", releases)
            .unwrap()
            .iter()
            .map(|r| (r.generation.sequence, r.parent))
            .collect()
    }

    #[test]
    fn the_way_of_fewest_bytes() {
        let all = [
            release(1, None, 100),
            release(2, Some(1), 10),
            release(3, Some(2), 10),
            release(3, Some(1), 15),
            release(3, None, 100),
        ];
        assert_eq!(path(Some(1), &all), [(3, Some(1))], "a merged delta saves bytes");
        assert_eq!(path(Some(2), &all), [(3, Some(2))]);
        assert_eq!(path(Some(3), &all), []);
        assert_eq!(path(None, &all), [(3, None)]);
        assert_eq!(path(None, &all[..4]), [(1, None), (3, Some(1))]);
        assert!(matches!(
            way(Some(0), true, "m", &all[1..3]),
            Err(UpdateError::NoWay { newest: 3, .. })
        ));
        let by_snapshot = way(Some(2), false, "m", &all).unwrap();
        assert_eq!(by_snapshot, [all[4].clone()], "where no delta is taken");
    }

    #[test]
    fn only_our_own_names_are_taken() {
        let generation = Generation { lineage: "ads.v2".to_owned(), sequence: 7 };
        for parent in [None, Some(6)] {
            let name = target_name(&generation, parent);
            assert_eq!(parse_name(&name), Some((generation.clone(), parent)));
        }
        for name in [
            "../000000000007-snapshot",
            "a/../000000000007-snapshot",
            "a/7-snapshot",
            "/000000000007-snapshot",
            "a/000000000007-from-000000000007",
            "a/000000000007-from-000000000009",
            "a/000000000007-snapshot/..",
            "a%2f/000000000007-snapshot",
            "a/+00000000007-snapshot",
        ] {
            let parsed = parse_name(name);
            assert!(parsed.is_none(), "{name}: {parsed:?}");
        }
    }
}
