//! `publish --restore`: brings the content of an earlier release to the whole fleet again, under
//! the next sequence. A car never installs an older sequence, so a release that committed can only
//! be taken back by a newer one. The restored release has two forms for each variant: a snapshot of
//! the chunks that the repository has, and a delta without changes for the cars at the earlier
//! release. Neither needs the trainer's files, and no row is uploaded.

use crate::repository::releases::releases_of;
use crate::repository::state::{ReleaseNames, RepositoryState};
use crate::repository::store::Store;
use crate::repository::variants::{Named, add_parents};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::StoredChunk;
use hatchback::bundle::manifest::{
    Blob, Generation, Layer, Manifest, Restored, TableBlobs, sha256,
};
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::limits::DELTAS_MAX;
use hatchback::update::program::needs_of_manifest;
use hatchback::update::release::{
    NEEDS, ORDER, Release, cheapest_path, manifest_path, parse_name, target_name,
};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use tough::TargetName;
use tough::schema::Target;

/// A target of the restored release.
pub struct Restoration {
    pub named: Named,
    pub manifest: Manifest,
    /// The encoded manifest.
    pub bytes: Vec<u8>,
    /// The chunks that the repository may lack: pages without rows.
    pub chunks: Vec<StoredChunk>,
}

/// One variant of the earlier release.
struct Source {
    variant: u8,
    /// The manifests of a snapshot and of the deltas that lead from it to the earlier release.
    chain: Vec<Manifest>,
    /// The signed needs and the order of the earlier release.
    custom: HashMap<String, Value>,
}

/// Returns the targets that restore the release of the listed targets `earlier`, with every one of
/// its variants. Returns the targets of the newest release if that is the restored one already, so
/// that a repeated publish raises its share. Releases in `revoked` are not used.
///
/// # Errors
/// The release is revoked, is the newest one, or does not follow a listed snapshot by few deltas.
/// Or the store fails.
pub fn restore(
    store: &dyn Store,
    state: &RepositoryState,
    names: &ReleaseNames,
    earlier: &[TargetName],
    revoked: &[TargetName],
) -> Result<Vec<Restoration>> {
    let listed = earlier.iter().filter(|name| !revoked.contains(name));
    let parsed: Vec<_> = listed.filter_map(|name| parse_name(name.raw())).collect();
    let (Generation { lineage, sequence }, ..) =
        parsed.first().context("a release that is revoked is not restored")?;
    let newest = names.newest(lineage).unwrap_or(*sequence);
    ensure!(*sequence < newest, "{lineage}/{sequence} is the newest release already");

    let variants: BTreeSet<u8> = parsed.iter().map(|(_, _, variant)| *variant).collect();
    let source = |variant| Source::read(store, state, &parsed[0].0, variant, revoked);
    let sources = variants.into_iter().map(source).collect::<Result<Vec<_>>>()?;

    // A car that has refused a revoked release would refuse it again under its name.
    let is_listed = |restoration: &Restoration| {
        let (own, hash) = (&restoration.named.name, sha256(&restoration.bytes));
        let is_own =
            |name: &TargetName, target: &Target| name == own && *target.hashes.sha256 == hash[..];
        !revoked.contains(own) && state.listed().any(|(name, target)| is_own(name, target))
    };
    let again = restorations(&sources, newest, names)?;
    if again.iter().all(is_listed) { Ok(again) } else { restorations(&sources, newest + 1, names) }
}

/// Returns the targets of release `sequence`, which restores `sources`.
fn restorations(
    sources: &[Source],
    sequence: u64,
    names: &ReleaseNames,
) -> Result<Vec<Restoration>> {
    let both = |source: &Source| [source.snapshot(sequence), source.delta(sequence)];
    let mut made = sources.iter().flat_map(both).collect::<Result<Vec<_>>>()?;
    made.iter_mut()
        .try_for_each(|made| add_parents(std::slice::from_mut(&mut made.named), names))?;
    Ok(made)
}

impl Source {
    /// Reads variant `variant` of the release `earlier`.
    fn read(
        store: &dyn Store,
        state: &RepositoryState,
        earlier: &Generation,
        variant: u8,
        revoked: &[TargetName],
    ) -> Result<Self> {
        let Generation { lineage, sequence } = earlier;
        let targets = &state.signed.as_ref().context("nothing is published")?.signed;
        let mut listed = releases_of(targets)?;
        listed.retain(|release| {
            let is_revoked = revoked.iter().any(|name| name.raw() == release.name());
            release.variant == variant && release.generation.sequence <= *sequence && !is_revoked
        });
        let path = cheapest_path(None, None, lineage, &listed).unwrap_or_default();
        let last = path.last().filter(|last| last.generation.sequence == *sequence);
        let last = last.with_context(|| {
            format!(
                "{lineage}/{sequence} is a delta, and the snapshot or the deltas before it are \
                 listed no more; restore a release that has a snapshot"
            )
        })?;
        let deltas = path.len() - 1;
        ensure!(
            deltas <= DELTAS_MAX,
            "{lineage}/{sequence} follows the snapshot {} by {deltas} deltas, over {DELTAS_MAX}; \
             restore an earlier release, or publish a snapshot",
            path[0].generation
        );

        let chain = path.iter().map(|r| read_manifest(store, r)).collect::<Result<_>>()?;
        let target = state.listed().find(|(name, _)| name.raw() == last.name());
        let custom = target.map(|(_, target)| target.custom.clone()).unwrap_or_default();
        Ok(Self { variant, chain, custom })
    }

    fn last(&self) -> &Manifest {
        &self.chain[self.chain.len() - 1]
    }

    /// Returns the snapshot of release `sequence`: every segment of the chain, as it is stored.
    fn snapshot(&self, sequence: u64) -> Result<Restoration> {
        let last = self.last();
        let mut blobs = Vec::new();
        let mut put = |blob: &Blob| {
            blobs.push(blob.clone());
            blobs.len() as u32 - 1
        };
        let (mut tables, mut layers) = (Vec::new(), Vec::new());
        for table in stacks(&self.chain)? {
            let placed = table.segments.iter();
            let placed: Vec<Layer> =
                placed.map(|(layer, blob)| Layer { segment: put(blob), ..*layer }).collect();
            let segment = placed.first().map_or(0, |base| base.segment);
            tables.push(TableBlobs { segment, hot: table.hot.map(&mut put), whole: false });
            layers.push(placed);
        }

        let blob = |number: u32| &last.blobs[number as usize];
        let (dense, probe) = (put(blob(last.dense)), last.probe.map(|probe| put(blob(probe))));
        let restored = Restored { sequence: last.generation.sequence, tables: layers };
        let manifest = Manifest {
            generation: Generation { sequence, ..last.generation.clone() },
            parent: None,
            schema: last.schema.clone(),
            blobs,
            tables,
            dense,
            probe,
            deferral: None,
            restored: Some(restored),
        };
        self.target(manifest, Vec::new())
    }

    /// Returns the delta without changes that leads from the earlier release to `sequence`.
    fn delta(&self, sequence: u64) -> Result<Restoration> {
        let last = self.last();
        let generation = Generation { sequence, ..last.generation.clone() };
        let (mut blobs, mut chunks, mut tables) = (Vec::new(), Vec::new(), Vec::new());
        for (number, table) in last.schema.tables.iter().enumerate() {
            let kind = SegmentKind::new(&generation, 0, number, table, Part::Delta);
            let kind = kind.with_context(|| format!("table {}: its unit", table.name))?;
            let (page, _) = SegmentWriter::new(Vec::new(), kind).finish()?;
            let hash = sha256(&page);
            let stored = StoredChunk::new(page)?;
            blobs.push(Blob { sha256: hash, chunks: vec![stored.chunk.clone()] });
            chunks.push(stored);
            tables.push(TableBlobs { segment: number as u32, hot: None, whole: false });
        }

        let mut put = |number: u32| {
            blobs.push(last.blobs[number as usize].clone());
            blobs.len() as u32 - 1
        };
        let (dense, probe) = (put(last.dense), last.probe.map(&mut put));
        let manifest = Manifest {
            generation,
            parent: Some(last.generation.sequence),
            schema: last.schema.clone(),
            blobs,
            tables,
            dense,
            probe,
            deferral: None,
            restored: None,
        };
        self.target(manifest, chunks)
    }

    /// Returns the target of `manifest`. It needs what the earlier release needs: the network is
    /// the same, so its operators are too.
    fn target(&self, manifest: Manifest, chunks: Vec<StoredChunk>) -> Result<Restoration> {
        let bytes = manifest.encode()?;
        Manifest::decode(&bytes)
            .with_context(|| format!("the manifest of {}", manifest.generation))?;

        let before = self.custom.get(NEEDS).and_then(Value::as_array).into_iter().flatten();
        let operators = before.filter_map(Value::as_str).filter(|n| n.starts_with("operator-"));
        let needs = needs_of_manifest(&manifest, bytes.len());
        let needs: BTreeSet<&str> = needs.iter().map(String::as_str).chain(operators).collect();
        let order = self.custom.get(ORDER).cloned().unwrap_or_else(|| Value::from(0));
        let custom = [(NEEDS.to_owned(), needs.into_iter().collect()), (ORDER.to_owned(), order)];

        let name = target_name(&manifest.generation, manifest.parent, self.variant);
        let named = Named { name: TargetName::new(name)?, custom: custom.into() };
        Ok(Restoration { named, manifest, bytes, chunks })
    }
}

/// The segments of a table after a chain of releases, and its newest hot list.
#[derive(Clone, Default)]
struct Stack<'a> {
    segments: Vec<(Layer, &'a Blob)>,
    hot: Option<&'a Blob>,
}

/// Returns the segments of each table of the last manifest of `chain`.
fn stacks(chain: &[Manifest]) -> Result<Vec<Stack<'_>>> {
    let mut stacks: Vec<Stack<'_>> = Vec::new();
    for manifest in chain {
        let blob = |number: u32| &manifest.blobs[number as usize];
        let before = std::mem::take(&mut stacks);
        for (number, table) in manifest.tables.iter().enumerate() {
            let mut stack = Stack::default();
            if manifest.is_delta(number) {
                let known = before.get(number);
                let name = &manifest.schema.tables[number].name;
                let generation = &manifest.generation;
                let no_base = || format!("{generation}: table {name} is a delta without a base");
                stack = known.with_context(no_base)?.clone();
            }
            if !manifest.leaves_alone(number) {
                let own = manifest.layers(number).into_iter();
                stack.segments.extend(own.map(|layer| (layer, blob(layer.segment))));
            }
            stack.hot = table.hot.map(blob).or(stack.hot);
            stacks.push(stack);
        }
    }
    Ok(stacks)
}

/// Reads the manifest of a listed release.
fn read_manifest(store: &dyn Store, release: &Release) -> Result<Manifest> {
    let path = manifest_path(&release.name(), &release.manifest);
    let bytes = store.get(&path)?.filter(|bytes| sha256(bytes) == release.manifest);
    let bytes = bytes.with_context(|| {
        format!("{path}: is missing or damaged; publish the bundle of {} again", release.generation)
    })?;
    Manifest::decode(&bytes).with_context(|| path.clone())
}
