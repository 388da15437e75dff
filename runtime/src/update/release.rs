//! Releases as a repository lists them, and the cheapest path from the live generation to the
//! newest one. A release is one signed target: the manifest of its bundle. The bundle's chunks are
//! stored under their hashes. Only a target name that `parse_name` accepts is used in a path.

use crate::bundle::BUNDLE_FORMAT;
use crate::bundle::manifest::{Generation, Hash, MANIFEST_FORMAT};
use crate::flash::segment::SEGMENT_FORMAT;
use crate::schema::probe_set::PROBE_FORMAT;
use crate::update::error::UpdateError;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sigstore_tuf::Targets;
use std::collections::{BTreeMap, BTreeSet};

/// The field of a target's `custom` with the bytes of its chunks.
pub const BYTES: &str = "bytes";

/// The field of a target's `custom` with the share of the fleet that may install it, per cent. A
/// target without the field is for all cars.
pub const SHARE: &str = "share";

/// The field of a target's `custom` with the formats that a car must read to install it.
pub const NEEDS: &str = "needs";

/// Returns the formats of the bundles that this version writes and reads.
pub fn formats() -> [String; 4] {
    [
        format!("bundle-{BUNDLE_FORMAT}"),
        format!("manifest-{MANIFEST_FORMAT}"),
        format!("segment-{SEGMENT_FORMAT}"),
        format!("probe-{PROBE_FORMAT}"),
    ]
}

/// A release: a signed target that leads to one generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The generation that it leads to.
    pub generation: Generation,
    /// The sequence of its parent; `None` for a snapshot.
    pub parent: Option<u64>,
    /// Bytes of its chunks, as its target announces them.
    pub bytes: u64,
    /// Cars with a cohort below this may install it.
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

/// Returns the hexadecimal digits of `hash`, or of a part of a hash.
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

/// Returns the repository path of the chunk with this hash.
pub fn chunk_path(hash: &Hash) -> String {
    let hex = hex(hash);
    format!("chunks/{}/{hex}", &hex[..2])
}

/// Returns the target name of the release that leads from `parent` to `generation`.
pub fn target_name(generation: &Generation, parent: Option<u64>) -> String {
    let (lineage, sequence) = (&generation.lineage, generation.sequence);
    match parent {
        None => format!("{lineage}/{sequence:012}-snapshot"),
        Some(parent) => format!("{lineage}/{sequence:012}-from-{parent:012}"),
    }
}

/// Returns the repository path of the manifest with this target name and hash.
pub fn manifest_path(name: &str, hash: &Hash) -> String {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    format!("targets/{folder}/{}.{file}", hex(hash))
}

/// Parses a target's name to its generation and parent. Returns `None` if it is not the name of a
/// release.
pub fn parse_name(name: &str) -> Option<(Generation, Option<u64>)> {
    let (lineage, file) = name.split_once('/')?;
    let (sequence, kind) = file.split_once('-')?;
    let parent = match kind.strip_prefix("from-") {
        Some(parent) => Some(parent.parse().ok()?),
        None => None,
    };
    let generation = Generation { lineage: lineage.to_owned(), sequence: sequence.parse().ok()? };

    let is_release = !lineage.is_empty()
        && !lineage.starts_with('.')
        && lineage.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && parent.is_none_or(|parent| parent < generation.sequence)
        // One spelling only: `7` and `000000000007` are the same number.
        && target_name(&generation, parent) == name;

    is_release.then_some((generation, parent))
}

/// Returns the releases among `targets` that this version can use. Targets with other names are
/// skipped. A release without a usable hash, or that needs a format of another version, is skipped
/// too: it must not hide the others.
pub fn releases(targets: &Targets) -> Vec<Release> {
    let (mut releases, formats) = (Vec::new(), formats());
    for (name, target) in &targets.targets {
        let Some((generation, parent)) = parse_name(name) else { continue };
        let Some(manifest) = target.hashes.get("sha256").and_then(|h| unhex(h)) else {
            log::warn!("release {name}: sha256: is missing or not 64 hexadecimal digits");
            continue;
        };

        let field = |field: &str| target.custom.as_ref().and_then(|c| c.get(field));
        let needs = field(NEEDS).and_then(serde_json::Value::as_array).into_iter().flatten();
        let mut needs =
            needs.filter(|need| !formats.iter().any(|f| Some(f.as_str()) == need.as_str()));
        if let Some(lacks) = needs.next() {
            log::warn!("release {name}: needs: this version does not read {lacks}");
            continue;
        }

        let number = |name: &str| field(name).and_then(serde_json::Value::as_u64);
        // A release of unknown size is the last choice.
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
    releases
}

/// Returns the model to follow: that of the live generation, else the `chosen` one, else the only
/// listed one. Returns `None` if no model is listed.
///
/// # Errors
/// `UpdateError::AmbiguousLineage` if several models are listed and none is chosen.
pub fn lineage_of(
    live: Option<&Generation>,
    chosen: Option<&str>,
    releases: &[Release],
) -> Result<Option<String>, UpdateError> {
    if let Some(lineage) = live.map(|g| g.lineage.as_str()).or(chosen) {
        return Ok(Some(lineage.to_owned()));
    }

    let found: BTreeSet<&str> = releases.iter().map(|r| r.generation.lineage.as_str()).collect();
    match found.len() {
        0 => Ok(None),
        1 => Ok(found.first().map(|l| (*l).to_owned())),
        _ => {
            let found = found.into_iter().collect::<Vec<_>>().join(", ");
            Err(UpdateError::AmbiguousLineage { found })
        }
    }
}

/// The cheapest known path to a sequence: its bytes, and its last release (`None` for the live
/// generation).
struct Reached<'a> {
    bytes: u64,
    last: Option<&'a Release>,
}

/// Returns the releases to install in order: the path of fewest bytes from `live` to the highest
/// reachable sequence. If `takes_deltas` is false, the path starts with a snapshot. The path is
/// empty if nothing is newer than `live`.
///
/// # Errors
/// `UpdateError::NoPath` if a newer release is listed and none can be reached.
pub fn cheapest_path(
    live: Option<u64>,
    takes_deltas: bool,
    lineage: &str,
    releases: &[Release],
) -> Result<Vec<Release>, UpdateError> {
    let is_newer = |r: &&Release| {
        r.generation.lineage == lineage && live.is_none_or(|live| r.generation.sequence > live)
    };
    let mut steps: Vec<&Release> = releases.iter().filter(is_newer).collect();
    steps.sort_by_key(|r| (r.generation.sequence, r.parent));
    let Some(newest) = steps.last().map(|r| r.generation.sequence) else { return Ok(Vec::new()) };

    // A parent has a lower sequence than its release. In this order the cheapest path to each
    // parent is therefore final before any release uses it.
    let mut reached: BTreeMap<u64, Reached<'_>> = BTreeMap::new();
    if let Some(live) = live.filter(|_| takes_deltas) {
        reached.insert(live, Reached { bytes: 0, last: None });
    }
    for step in steps {
        let before = match step.parent {
            None => Some(0),
            Some(parent) => reached.get(&parent).map(|r| r.bytes),
        };
        let Some(before) = before else { continue };

        let bytes = before.saturating_add(step.bytes).saturating_add(step.manifest_bytes);
        let sequence = step.generation.sequence;
        // On a tie the first one stays: a snapshot, which is sorted before the deltas.
        if reached.get(&sequence).is_none_or(|r| bytes < r.bytes) {
            reached.insert(sequence, Reached { bytes, last: Some(step) });
        }
    }

    let path = path_to_last(&reached);
    if path.is_empty() {
        let live = live.map_or("nothing".to_owned(), |l| format!("sequence {l}"));
        return Err(UpdateError::NoPath { live, newest, lineage: lineage.to_owned() });
    }
    Ok(path)
}

/// Returns the releases on the path to the highest reached sequence, in order.
fn path_to_last(reached: &BTreeMap<u64, Reached<'_>>) -> Vec<Release> {
    let mut path = Vec::new();
    let mut at = reached.last_key_value().and_then(|(_, r)| r.last);
    while let Some(step) = at {
        path.push(step.clone());
        at = step.parent.and_then(|parent| reached.get(&parent)).and_then(|r| r.last);
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(sequence: u64, parent: Option<u64>, bytes: u64) -> Release {
        let generation = Generation { lineage: "m".to_owned(), sequence };
        Release { generation, parent, bytes, share: 100, manifest_bytes: 0, manifest: [0; 32] }
    }

    fn path(live: Option<u64>, releases: &[Release]) -> Vec<(u64, Option<u64>)> {
        cheapest_path(live, true, "m", releases)
            .unwrap()
            .iter()
            .map(|r| (r.generation.sequence, r.parent))
            .collect()
    }

    #[test]
    fn the_path_of_fewest_bytes_is_taken() {
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
            cheapest_path(Some(0), true, "m", &all[1..3]),
            Err(UpdateError::NoPath { newest: 3, .. })
        ));
        let by_snapshot = cheapest_path(Some(2), false, "m", &all).unwrap();
        assert_eq!(by_snapshot, [all[4].clone()], "a car that takes no delta");
    }

    #[test]
    fn a_release_that_needs_an_unknown_format_is_passed_over() {
        let listed = |needs: &[&str]| {
            let hash = "00".repeat(32);
            let custom = serde_json::json!({ NEEDS: needs, SHARE: 7 });
            let target = serde_json::json!({
                "length": 1, "hashes": { "sha256": hash }, "custom": custom
            });
            let targets = serde_json::json!({
                "_type": "targets", "spec_version": "1.0.0", "version": 1,
                "expires": "2030-01-01T00:00:00Z",
                "targets": { "m/000000000001-snapshot": target }
            });
            let shares = releases(&serde_json::from_value(targets).unwrap());
            shares.iter().map(|release| release.share).collect::<Vec<_>>()
        };
        assert_eq!(listed(&formats().each_ref().map(|format| &**format)), [7]);
        assert_eq!(listed(&[]), [7]);
        assert_eq!(listed(&["bundle-99"]), [0u8; 0]);
    }

    #[test]
    fn only_names_of_releases_are_parsed() {
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
