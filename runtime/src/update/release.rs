//! Releases as a repository lists them, and the cheapest path from the live generation to the
//! newest one. A release is one signed target: the manifest of its bundle. The bundle's chunks are
//! stored under their hashes. Only a target name that `parse_name` accepts is used in a path.
//!
//! A generation may have several bundles, its variants, each for programs of other versions. A
//! delta leads from a variant to the same variant.

use crate::bundle::manifest::{Generation, Hash, hex};
use crate::flash::live::LiveState;
use crate::limits::VARIANTS_MAX;
use crate::update::error::UpdateError;
use crate::update::program::Program;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use sigstore_tuf::Targets;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The field of a target's `custom` with the bytes of its chunks.
pub const BYTES: &str = "bytes";

/// The field of a target's `custom` with the share of the fleet that may install it, per cent. A
/// target without the field is for all cars.
pub const SHARE: &str = "share";

/// The field of a target's `custom` with what a program must read to install it.
pub const NEEDS: &str = "needs";

/// The field of a target's `custom` with its place in the publisher's order among the bundles for
/// its generation. A car takes the first that it can read and reach.
pub const ORDER: &str = "order";

/// The field of a delta's `custom` with the bundles of the generation that it starts from: the
/// first bytes of the SHA-256 of their manifests.
pub const PARENTS: &str = "parents";

/// Bytes of a hash in `PARENTS`: no publisher makes two manifests that agree in these.
const PARENT_BYTES: usize = 8;

/// Returns a manifest's hash as `PARENTS` has it.
pub fn parent_id(manifest: &[u8]) -> String {
    hex(&manifest[..PARENT_BYTES.min(manifest.len())])
}

/// A release: a signed target that leads to one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Its number among the bundles for its generation, which a delta shares with its parent. The
    /// records of a car leave out this field and those below.
    #[serde(skip)]
    pub variant: u8,
    /// Its place in the publisher's order of the bundles for its generation.
    #[serde(skip)]
    pub order: u8,
    /// The bundles that it can follow, as `PARENTS` lists them; empty if the publisher knew none.
    #[serde(skip)]
    pub parents: Vec<String>,
    /// What it needs and this version of the program lacks.
    #[serde(skip)]
    pub lacks: Option<String>,
}

impl Release {
    /// Returns the name of its target.
    pub fn name(&self) -> String {
        target_name(&self.generation, self.parent, self.variant)
    }
}

fn write_hex<S: Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&hex(hash))
}

fn read_hex<'de, D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
    let text = String::deserialize(from)?;
    unhex(&text).ok_or_else(|| D::Error::custom("a hash has 64 hexadecimal digits"))
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

/// Returns the target name of variant `variant` of the release that leads from `parent` to
/// `generation`.
pub fn target_name(generation: &Generation, parent: Option<u64>, variant: u8) -> String {
    let (lineage, sequence) = (&generation.lineage, generation.sequence);
    let variant = if variant == 0 { String::new() } else { format!(".{variant}") };
    match parent {
        None => format!("{lineage}/{sequence:012}-snapshot{variant}"),
        Some(parent) => format!("{lineage}/{sequence:012}-from-{parent:012}{variant}"),
    }
}

/// Returns the repository path of the manifest with this target name and hash.
pub fn manifest_path(name: &str, hash: &Hash) -> String {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    format!("targets/{folder}/{}.{file}", hex(hash))
}

/// Parses a target's name to its generation, parent and variant. Returns `None` if it is not the
/// name of a release.
pub fn parse_name(name: &str) -> Option<(Generation, Option<u64>, u8)> {
    let (lineage, file) = name.split_once('/')?;
    let (sequence, kind) = file.split_once('-')?;
    let (kind, variant) = kind.split_once('.').unwrap_or((kind, "0"));
    let variant = variant.parse().ok().filter(|variant| *variant < VARIANTS_MAX)?;
    let parent = match kind.strip_prefix("from-") {
        Some(parent) => Some(parent.parse().ok()?),
        None => None,
    };
    let generation = Generation { lineage: lineage.to_owned(), sequence: sequence.parse().ok()? };

    let is_release = generation.check().is_ok()
        && parent.is_none_or(|parent| parent < generation.sequence)
        // One spelling only: `7` and `000000000007` are the same number.
        && target_name(&generation, parent, variant) == name;

    is_release.then_some((generation, parent, variant))
}

/// Returns the releases among `targets`, with what `program` lacks to read each. Targets with other
/// names are skipped. A release without a usable hash is skipped too: it must not hide the others.
pub fn releases(targets: &Targets, program: &Program) -> Vec<Release> {
    let mut releases = Vec::new();
    for (name, target) in &targets.targets {
        let Some((generation, parent, variant)) = parse_name(name) else { continue };
        let Some(manifest) = target.hashes.get("sha256").and_then(|h| unhex(h)) else {
            log::warn!("release {name}: sha256: is missing or not 64 hexadecimal digits");
            continue;
        };

        let field = |field: &str| target.custom.as_ref().and_then(|c| c.get(field));
        let number = |name: &str| field(name).and_then(Value::as_u64);
        let parents = field(PARENTS).and_then(Value::as_array).into_iter().flatten();
        releases.push(Release {
            generation,
            parent,
            // A release of unknown size is the last choice.
            bytes: number(BYTES).unwrap_or(u64::MAX),
            share: number(SHARE).map_or(100, |share| share.min(100) as u8),
            manifest_bytes: target.length,
            manifest,
            variant,
            order: number(ORDER).map_or(0, |order| order.min(u64::from(VARIANTS_MAX)) as u8),
            parents: parents.filter_map(|parent| parent.as_str().map(str::to_owned)).collect(),
            lacks: field(NEEDS).and_then(|needs| program.lacks(needs)),
        });
    }
    releases
}

/// The live generation, from which a path of deltas starts.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    sequence: u64,
    manifest: Hash,
    /// Its variant, if the repository lists it.
    variant: Option<u8>,
}

impl Base {
    /// Returns the generation of the live record `live`, of which the repository lists `listed`.
    pub fn new(live: &LiveState, listed: &[Release]) -> Self {
        let (sequence, manifest) = (live.generation.sequence, live.manifest);
        let variant = listed.iter().find(|r| r.manifest == manifest).map(|r| r.variant);
        Self { sequence, manifest, variant }
    }

    /// Returns whether the delta `release` can follow this generation: it starts from its sequence
    /// and is of its variant. The delta itself names its parent by the sequence only.
    pub fn is_parent_of(&self, release: &Release) -> bool {
        let is_variant = match self.variant {
            Some(variant) => variant == release.variant,
            None if release.parents.is_empty() => release.variant == 0,
            None => release.parents.contains(&parent_id(&self.manifest)),
        };
        release.parent == Some(self.sequence) && is_variant
    }
}

/// Returns the model to follow: that of the live generation, else the `chosen` one, else the only
/// listed one. Returns `None` if no model is listed.
///
/// # Errors
/// `UpdateError::AmbiguousLineage` if several models are listed and none is chosen, and
/// `UpdateError::UnknownLineage` if the chosen one is not among them.
pub fn lineage_of(
    live: Option<&Generation>,
    chosen: Option<&str>,
    releases: &[Release],
) -> Result<Option<String>, UpdateError> {
    if let Some(live) = live {
        return Ok(Some(live.lineage.clone()));
    }
    let found: BTreeSet<&str> = releases.iter().map(|r| r.generation.lineage.as_str()).collect();
    let names = || found.iter().copied().collect::<Vec<_>>().join(", ");
    match chosen.map(str::to_owned) {
        Some(chosen) if !found.is_empty() && !found.contains(chosen.as_str()) => {
            Err(UpdateError::UnknownLineage { chosen, found: names() })
        }
        Some(chosen) => Ok(Some(chosen)),
        None if found.len() > 1 => Err(UpdateError::AmbiguousLineage { found: names() }),
        None => Ok(found.first().map(|l| (*l).to_owned())),
    }
}

/// The cheapest known path to a bundle: its bytes, and its last release.
struct Reached<'a> {
    bytes: u64,
    last: &'a Release,
}

/// The known paths by sequence and variant.
type Paths<'a> = BTreeMap<(u64, u8), Reached<'a>>;

/// Returns the releases to install in order: the path of fewest bytes to the highest reachable
/// sequence above `live`, and there to the variant that is first in the publisher's order. The path
/// starts with a snapshot, or with a delta that follows `base`. The path is empty if nothing is
/// newer than `live`.
///
/// # Errors
/// `UpdateError::NoPath` if a newer release is listed and none can be reached.
pub fn cheapest_path(
    live: Option<u64>,
    base: Option<Base>,
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
    let mut paths = Paths::new();
    for step in steps {
        let is_first = step.parent.is_none() || base.is_some_and(|base| base.is_parent_of(step));
        let before = if is_first { Some(0) } else { path_before(step, &paths).map(|p| p.bytes) };
        let Some(before) = before else { continue };

        let bytes = before.saturating_add(step.bytes).saturating_add(step.manifest_bytes);
        let key = (step.generation.sequence, step.variant);
        // On a tie the first one stays: a snapshot, which is sorted before the deltas.
        if paths.get(&key).is_none_or(|known| bytes < known.bytes) {
            paths.insert(key, Reached { bytes, last: step });
        }
    }

    let last = paths.values().max_by_key(|path| {
        let Release { generation, order, variant, .. } = path.last;
        (generation.sequence, Reverse((*order, *variant)))
    });
    let Some(last) = last else {
        let live = live.map_or("nothing".to_owned(), |l| format!("sequence {l}"));
        return Err(UpdateError::NoPath { live, newest, lineage: lineage.to_owned() });
    };
    let path = std::iter::successors(Some(last), |at| path_before(at.last, &paths));
    let mut path: Vec<Release> = path.map(|at| at.last.clone()).collect();
    path.reverse();
    Ok(path)
}

/// Returns the path to the bundle that the delta `step` follows, unless that is the live one.
fn path_before<'a, 'p>(step: &Release, paths: &'p Paths<'a>) -> Option<&'p Reached<'a>> {
    paths.get(&(step.parent?, step.variant))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(sequence: u64, parent: Option<u64>, bytes: u64) -> Release {
        let generation = Generation { lineage: "m".to_owned(), sequence };
        Release { generation, parent, bytes, share: 100, ..Release::default() }
    }

    fn variant(variant: u8, release: Release) -> Release {
        let manifest = [16 * variant + release.generation.sequence as u8; 32];
        Release { variant, order: variant, manifest, ..release }
    }

    fn base(sequence: u64, manifest: Hash, listed: &[Release]) -> Option<Base> {
        let generation = Generation { lineage: "m".to_owned(), sequence };
        Some(Base::new(&LiveState { generation, manifest, tables: Vec::new() }, listed))
    }

    fn path(live: Option<u64>, releases: &[Release]) -> Vec<(u64, Option<u64>)> {
        let base = live.and_then(|live| base(live, [0; 32], &[]));
        let path = cheapest_path(live, base, "m", releases).unwrap();
        path.iter().map(|r| (r.generation.sequence, r.parent)).collect()
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
            cheapest_path(Some(0), base(0, [0; 32], &[]), "m", &all[1..3]),
            Err(UpdateError::NoPath { newest: 3, .. })
        ));
        let by_snapshot = cheapest_path(Some(2), None, "m", &all).unwrap();
        assert_eq!(by_snapshot, [all[4].clone()], "a car that takes no delta");
    }

    #[test]
    fn a_path_keeps_to_its_variant_and_ends_at_the_first_one() {
        let all = [
            variant(0, release(7, None, 100)),
            variant(1, release(7, None, 90)),
            variant(0, release(8, Some(7), 10)),
            variant(1, release(8, Some(7), 9)),
            variant(1, release(8, None, 90)),
        ];
        let path = |manifest: &Hash, releases: &[Release]| {
            let path = cheapest_path(Some(7), base(7, *manifest, &all), "m", releases);
            path.map(|path| path.iter().map(|r| (r.variant, r.parent)).collect::<Vec<_>>())
        };
        let [first, second] = [all[0].manifest, all[1].manifest];
        assert_eq!(path(&first, &all).unwrap(), [(0, Some(7))]);
        assert_eq!(path(&second, &all).unwrap(), [(1, Some(7))], "no snapshot of the first");
        assert_eq!(path(&first, &all[3..]).unwrap(), [(1, None)], "to another variant");
        assert!(matches!(path(&first, &all[3..4]), Err(UpdateError::NoPath { .. })));

        let snapshot = variant(0, release(8, None, 100));
        let with_snapshot = [&all[..], &[snapshot]].concat();
        assert_eq!(path(&second, &with_snapshot).unwrap(), [(0, None)], "the first that leads on");

        // The live generation is no longer listed: only a delta that names it may follow.
        let unlisted = [9; 32];
        assert_eq!(path(&unlisted, &all).unwrap(), [(0, Some(7))], "a delta without parents");
        assert_eq!(path(&unlisted, &all[3..]).unwrap(), [(1, None)]);
        let mut named = all.clone();
        named[2].parents = vec![parent_id(&first)];
        named[3].parents = vec![parent_id(&second), parent_id(&unlisted)];
        assert_eq!(path(&unlisted, &named).unwrap(), [(1, Some(7))]);
    }

    #[test]
    fn only_names_of_releases_are_parsed() {
        let generation = Generation { lineage: "ads.v2".to_owned(), sequence: 7 };
        for (parent, variant) in [(None, 0), (Some(6), 0), (None, 1), (Some(6), VARIANTS_MAX - 1)] {
            let name = target_name(&generation, parent, variant);
            assert_eq!(parse_name(&name), Some((generation.clone(), parent, variant)));
        }
        for name in [
            "../000000000007-snapshot",
            "a/../000000000007-snapshot",
            "a/7-snapshot",
            "/000000000007-snapshot",
            "a/000000000007-from-000000000007",
            "a/000000000007-from-000000000009",
            "a/000000000007-snapshot/..",
            "a/000000000007-snapshot.0",
            "a/000000000007-snapshot.01",
            "a/000000000007-snapshot.8",
            "a/000000000007-snapshot.1.1",
            "a%2f/000000000007-snapshot",
            "a/+00000000007-snapshot",
        ] {
            let parsed = parse_name(name);
            assert!(parsed.is_none(), "{name}: {parsed:?}");
        }
    }
}
