//! The variants of a release: several bundles for one generation, for cars of different versions.
//! Decides which variant each bundle of a publish is. A delta leads from a variant to the same
//! variant, so a variant keeps its number from release to release. Reads and writes no object.

use crate::repository::state::{ReleaseNames, RepositoryState};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::manifest::{Generation, Hash};
use hatchback::limits::VARIANTS_MAX;
use hatchback::update::release::{NEEDS, ORDER, PARENTS, parent_id, parse_name, target_name};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use tough::TargetName;

/// A bundle to publish, as far as its variant depends on it.
pub struct Bundle {
    pub generation: Generation,
    pub parent: Option<u64>,
    /// SHA-256 of its manifest.
    pub manifest: Hash,
    /// What a car needs to read it.
    pub needs: BTreeSet<String>,
}

/// A bundle's name, and its fields of `custom`.
pub struct Named {
    pub name: TargetName,
    pub custom: HashMap<String, Value>,
}

/// Returns the needs that tell variants apart. The others differ from release to release.
fn kinds<'a>(needs: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let varies = |need: &&str| {
        let size = need.rsplit_once('-').map_or("", |(size, _)| size);
        ["-bytes", "-pages", "-keys"].iter().any(|unit| size.ends_with(unit))
    };
    needs.filter(|need| !varies(need)).map(str::to_owned).collect()
}

/// Returns `kinds` without the sizes of the schema, which a release may change, and without the
/// format of the manifest, which a restored release has for itself.
fn without_sizes(mut kinds: BTreeSet<String>) -> BTreeSet<String> {
    const SIZES: [&str; 10] = [
        "manifest",
        "tables",
        "features",
        "lookups",
        "dense-features",
        "dim",
        "hotness",
        "input-width",
        "input-features",
        "outputs",
    ];
    kinds.retain(|kind| kind.rsplit_once('-').is_none_or(|(size, _)| !SIZES.contains(&size)));
    kinds
}

/// Names the bundles of one publish. A bundle whose content was published before keeps its name.
/// Another one is of the variant of the newest listed release with the same needs, or with others
/// of the schema's sizes only, else of the first variant that no other bundle for its generation
/// is of.
///
/// # Errors
/// Two bundles for one generation have the same needs, or there are too many of them. A variant
/// begins with a delta whose parent was never published.
pub fn name(
    bundles: &[Bundle],
    names: &ReleaseNames,
    state: &RepositoryState,
) -> Result<Vec<Named>> {
    let wanted: Vec<BTreeSet<String>> =
        bundles.iter().map(|b| kinds(b.needs.iter().map(String::as_str))).collect();
    let mut variants: Vec<Option<u8>> = vec![None; bundles.len()];
    let is_mate = |i: usize, n: usize| bundles[i].generation == bundles[n].generation;

    // The newest match first: the needs of a variant may have changed since an older one.
    let mut matched: Vec<(u64, usize, u8)> = (0..bundles.len())
        .filter_map(|n| matching(&bundles[n], &wanted[n], names, state).map(|(s, v)| (s, n, v)))
        .collect();
    matched.sort_by_key(|(sequence, n, _)| (std::cmp::Reverse(*sequence), *n));
    let unmatched = (0..bundles.len()).map(|n| (n, None));
    for (n, matched) in matched.into_iter().map(|(_, n, v)| (n, Some(v))).chain(unmatched) {
        if variants[n].is_some() {
            continue;
        }
        let mates = || (0..bundles.len()).filter(|i| is_mate(*i, n) && variants[*i].is_some());
        let same = mates().find(|i| wanted[*i] == wanted[n]).and_then(|i| variants[i]);
        let is_free = |variant: &u8| mates().all(|i| variants[i] != Some(*variant));
        let is_last = matched.is_none();
        let free = || (0..VARIANTS_MAX).find(is_free).filter(|_| is_last);
        variants[n] = same.or(matched.filter(is_free)).or_else(free);
    }

    let mut named: Vec<Named> = Vec::new();
    for (n, bundle) in bundles.iter().enumerate() {
        let Bundle { generation, parent, .. } = bundle;
        let variant = variants[n].with_context(|| {
            format!("{generation}: over {VARIANTS_MAX} bundles for one generation")
        })?;
        let name = target_name(generation, *parent, variant);
        ensure!(
            parse_name(&name).is_some(),
            "cars accept no release named {name:?}; change `name` in model.toml and pack again"
        );
        ensure!(
            named.iter().all(|other| other.name.raw() != name),
            "{name}: two bundles of one form with the same needs, so no car would take the second"
        );
        let before = (0..n).filter(|i| is_mate(*i, n)).map(|i| &wanted[i]);
        let order = before.take_while(|kinds| **kinds != wanted[n]).collect::<BTreeSet<_>>().len();
        let needs: Value = bundle.needs.iter().cloned().collect();
        let custom = HashMap::from([(NEEDS.to_owned(), needs), (ORDER.to_owned(), order.into())]);
        named.push(Named { name: TargetName::new(name)?, custom });
    }
    Ok(named)
}

/// Returns the sequence and the variant of the release that has the content of `bundle`, or that
/// was listed last with its needs.
fn matching(
    bundle: &Bundle,
    wanted: &BTreeSet<String>,
    names: &ReleaseNames,
    state: &RepositoryState,
) -> Option<(u64, u8)> {
    let Bundle { generation, parent, manifest, .. } = bundle;
    let is_known =
        |variant: &u8| names.is_of(&target_name(generation, *parent, *variant), manifest);
    if let Some(variant) = (0..VARIANTS_MAX).find(is_known) {
        return Some((u64::MAX, variant));
    }
    let listed = |form: fn(BTreeSet<String>) -> BTreeSet<String>| {
        let listed = state.listed().filter_map(|(name, target)| {
            let (of, _, variant) = parse_name(name.raw())?;
            let needs = target.custom.get(NEEDS)?.as_array()?;
            let needs = kinds(needs.iter().filter_map(Value::as_str));
            let is_it = of.lineage == generation.lineage
                && of.sequence <= generation.sequence
                && form(needs) == form(wanted.clone());
            is_it.then_some((of.sequence, variant))
        });
        listed.max()
    };
    listed(|kinds| kinds).or_else(|| listed(without_sizes))
}

/// Adds the bundles that each delta of `named` can follow to its `custom`: those of its parent's
/// sequence and of its variant.
///
/// # Errors
/// A variant begins with a delta.
pub fn add_parents(named: &mut [Named], names: &ReleaseNames) -> Result<()> {
    for Named { name, custom } in named {
        let Some((generation, Some(parent), variant)) = parse_name(name.raw()) else { continue };
        let wanted = (generation.lineage, parent, variant);
        let parents = names.hashes(|name| {
            parse_name(name.raw()).is_some_and(|(g, _, v)| (g.lineage, g.sequence, v) == wanted)
        });
        let parents: BTreeSet<String> = parents.map(parent_id).collect();
        ensure!(
            variant == 0 || !parents.is_empty(),
            "{}: this variant of sequence {parent} was never published; publish it, or a snapshot",
            name.raw()
        );
        if !parents.is_empty() {
            custom.insert(PARENTS.to_owned(), parents.into_iter().collect());
        }
    }
    Ok(())
}
