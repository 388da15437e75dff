//! `publish --restore`: brings the content of an earlier release to the whole fleet again, under
//! the next sequence. A car never installs an older sequence, so a release that committed can only
//! be taken back by a newer one. The restored release has two forms for each variant: a snapshot of
//! the chunks that the repository has, and a delta without changes for the cars at the earlier
//! release. Neither needs the trainer's files, and no row is uploaded. Features that a release
//! between them added stay in the lists as retired, so that callers may go on sending them.

use crate::repository::content::{find_manifest, read_blob};
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
use hatchback::limits::{CHUNK_BYTES, DELTAS_MAX};
use hatchback::schema::sample::Sample;
use hatchback::schema::{DenseFeature, Feature, Schema};
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
    let again = restorations(store, &sources, newest, names)?;
    let is_again = again.iter().all(is_listed);
    if is_again {
        return Ok(again);
    }
    let next = newest.checked_add(1).context("no sequence is left above the newest release")?;
    restorations(store, &sources, next, names)
}

/// Returns the targets of release `sequence`, which restores `sources`.
fn restorations(
    store: &dyn Store,
    sources: &[Source],
    sequence: u64,
    names: &ReleaseNames,
) -> Result<Vec<Restoration>> {
    let mut made = Vec::new();
    for source in sources {
        let generation = Generation { sequence, ..source.last().generation.clone() };
        let later = names.before(store, &generation)?.manifests;
        let schema = later.iter().fold(source.last().schema.clone(), |schema, manifest| {
            with_retired(&schema, &manifest.schema)
        });
        let next = Next { store, generation, schema };
        made.extend([source.snapshot(&next)?, source.delta(&next)?]);
    }
    made.iter_mut()
        .try_for_each(|made| add_parents(std::slice::from_mut(&mut made.named), names))?;
    Ok(made)
}

/// Returns `schema` with the features that `later`, the schema of a release after it, added, as
/// retired ones. Whether callers then lose nothing is for the check of every publish to say.
pub fn with_retired(schema: &Schema, later: &Schema) -> Schema {
    let mut schema = schema.clone();
    for feature in &later.features {
        if !schema.features.iter().any(|own| own.name == feature.name) {
            let plain = Feature::plain(&feature.name, feature.hotness_max);
            schema.features.push(Feature { retired: true, ..plain });
        }
    }
    for feature in &later.dense_features {
        if !schema.dense_names().any(|own| *own == feature.name) {
            schema.dense_features.push(DenseFeature { retired: true, ..feature.clone() });
        }
    }
    schema
}

/// A restored release that is being made.
struct Next<'a> {
    store: &'a dyn Store,
    generation: Generation,
    /// The schema of the earlier release, with the features that are retired since.
    schema: Schema,
}

/// The blobs of a manifest, and the chunks that the repository may lack.
#[derive(Default)]
struct Blobs {
    blobs: Vec<Blob>,
    chunks: Vec<StoredChunk>,
}

impl Blobs {
    /// Adds a blob that the repository has, and returns its number.
    fn put(&mut self, blob: &Blob) -> u32 {
        self.blobs.push(blob.clone());
        self.blobs.len() as u32 - 1
    }

    /// Adds a blob with this content, and returns its number.
    fn put_new(&mut self, content: &[u8]) -> Result<u32> {
        let mut blob = Blob { sha256: sha256(content), chunks: Vec::new() };
        for raw in content.chunks(CHUNK_BYTES) {
            let stored = StoredChunk::new(raw.to_vec())?;
            blob.chunks.push(stored.chunk.clone());
            self.chunks.push(stored);
        }
        Ok(self.put(&blob))
    }
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

    /// Returns the snapshot of release `next`: every segment of the chain, as it is stored.
    fn snapshot(&self, next: &Next<'_>) -> Result<Restoration> {
        let (mut blobs, mut tables, mut layers) = (Blobs::default(), Vec::new(), Vec::new());
        for table in stacks(&self.chain)? {
            let placed = table.segments.iter();
            let placed: Vec<Layer> =
                placed.map(|(layer, blob)| Layer { segment: blobs.put(blob), ..*layer }).collect();
            let segment = placed.first().map_or(0, |base| base.segment);
            let hot = table.hot.map(|hot| blobs.put(hot));
            tables.push(TableBlobs { segment, hot, whole: false });
            layers.push(placed);
        }
        let sequence = self.last().generation.sequence;
        self.target(next, blobs, tables, Some(Restored { sequence, tables: layers }))
    }

    /// Returns the delta without changes that leads from the earlier release to `next`.
    fn delta(&self, next: &Next<'_>) -> Result<Restoration> {
        let (mut blobs, mut tables) = (Blobs::default(), Vec::new());
        for (number, table) in next.schema.tables.iter().enumerate() {
            let kind = SegmentKind::new(&next.generation, 0, number, table, Part::Delta);
            let kind = kind.with_context(|| format!("table {}: its unit", table.name))?;
            let (page, _) = SegmentWriter::new(Vec::new(), kind).finish()?;
            tables.push(TableBlobs { segment: blobs.put_new(&page)?, hot: None, whole: false });
        }
        self.target(next, blobs, tables, None)
    }

    /// Adds the network and the probe set to `blobs`, and returns the target: a snapshot if it is
    /// `restored`, else a delta. It needs what the earlier release needs: the network is the same,
    /// so its operators are too.
    fn target(
        &self,
        next: &Next<'_>,
        mut blobs: Blobs,
        tables: Vec<TableBlobs>,
        restored: Option<Restored>,
    ) -> Result<Restoration> {
        let last = self.last();
        let dense = blobs.put(&last.blobs[last.dense as usize]);
        let probe = last.probe.map(|probe| {
            let probe = &last.blobs[probe as usize];
            let is_same = next.schema == last.schema;
            if is_same { Ok(blobs.put(probe)) } else { blobs.put_new(&next.probe(probe)?) }
        });
        let manifest = Manifest {
            generation: next.generation.clone(),
            parent: restored.is_none().then_some(last.generation.sequence),
            packed_on: None,
            schema: next.schema.clone(),
            blobs: blobs.blobs,
            tables,
            dense,
            probe: probe.transpose()?,
            deferral: None,
            restored,
        };
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
        Ok(Restoration { named, manifest, bytes, chunks: blobs.chunks })
    }
}

impl Next<'_> {
    /// Returns the probe set in `blob`, encoded for the schema. A sample has a place for each
    /// retired feature, and nothing in it.
    fn probe(&self, blob: &Blob) -> Result<Vec<u8>> {
        let mut samples = Sample::decode_set(&read_blob(self.store, blob)?)?;
        for sample in &mut samples {
            sample.dense.resize(self.schema.dense_features.len(), 0.0);
            sample.sparse.resize(self.schema.features.len(), Vec::new());
            if !sample.weights.is_empty() {
                sample.weights.resize(self.schema.features.len(), Vec::new());
            }
        }
        Ok(Sample::encode_set(&samples)?)
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
    find_manifest(store, &release.name(), &release.manifest)?.with_context(|| {
        let path = manifest_path(&release.name(), &release.manifest);
        format!("{path}: is missing or damaged; publish the bundle of {} again", release.generation)
    })
}
