//! `row --from`: the history of a row over the releases that a repository lists. Reads manifests,
//! and of each segment only the chunks with its index and with the row.

use crate::explain::difference::distance;
use crate::explain::table_number;
use crate::repository::content::{StoredPages, find_manifest};
use crate::repository::releases::{listed, releases_of};
use crate::repository::store::Objects;
use crate::{report, say};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::manifest::{Generation, Manifest};
use hatchback::flash::live::SegmentRef;
use hatchback::flash::row_version::{RowSource, RowVersion};
use hatchback::flash::segment::{Part, Segment, SegmentKind};
use hatchback::update::release::Release;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The row in each release.
#[derive(Serialize)]
pub struct ListedRow {
    model: String,
    table: String,
    key: u64,
    releases: Vec<ReleaseRow>,
}

/// The row in one release.
#[derive(Serialize)]
struct ReleaseRow {
    /// The name of its target, which says whether it is a snapshot or a delta.
    release: String,
    /// `snapshot 1`, `delta 2`, `deleted by delta 3`, `absent`, `unchanged` or `no such table`.
    origin: String,
    codec: Option<&'static str>,
    /// `None` if the release does not carry the key.
    row: Option<RowVersion>,
    /// The Euclidean distance to the row in its parent, or in the release before a snapshot.
    distance: Option<f32>,
}

impl ListedRow {
    /// Reads the row of `key` in every listed release of `model`.
    ///
    /// # Errors
    /// The repository lists no such model, no release has the table, or an object is damaged.
    pub fn read(from: &str, model: &str, table: &str, key: u64) -> Result<Self> {
        let store = Arc::new(Objects::existing(from)?);
        let mut all = releases_of(&listed(&*store)?.1.targets)?;
        let models: BTreeSet<String> = all.iter().map(|r| r.generation.lineage.clone()).collect();
        all.retain(|release| release.generation.lineage == model);
        ensure!(
            !all.is_empty(),
            "MODEL {model}: the repository has the models {}",
            models.into_iter().collect::<Vec<_>>().join(", ")
        );
        all.sort_by_key(|r| (r.generation.sequence, r.parent, r.variant));

        let (mut releases, mut known) = (Vec::new(), BTreeMap::<u64, Vec<f32>>::new());
        let mut unknown = None;
        for release in &all {
            let manifest = find_manifest(&*store, &release.name(), &release.manifest)?;
            let manifest = manifest.with_context(|| {
                format!("{}: its manifest is missing or damaged; publish it again", release.name())
            })?;
            let sequence = release.generation.sequence;
            let before = match release.parent {
                Some(parent) => known.get(&parent),
                None => known.range(..sequence).next_back().map(|(_, values)| values),
            };
            let mut one = ReleaseRow::absent(release);
            match table_number(&manifest.schema, table) {
                Err(e) => unknown = Some(e),
                Ok(number) => one.fill(&manifest, number, &store, key)?,
            }
            let values = one.row.as_ref().map(|row| &row.values);
            one.distance = values.zip(before).and_then(|(row, before)| distance(row, before));
            let holds = values.or(before.filter(|_| one.codec.is_some())).cloned();
            if let Some(values) = holds {
                known.entry(sequence).or_insert(values);
            }
            releases.push(one);
        }
        match unknown.filter(|_| releases.iter().all(|one| one.codec.is_none())) {
            Some(unknown) => Err(unknown),
            None => Ok(Self { model: model.to_owned(), table: table.to_owned(), key, releases }),
        }
    }

    /// Prints the rows of the releases.
    ///
    /// # Errors
    /// Standard output is closed.
    pub fn print(&self) -> Result<()> {
        say!("{}: {} {}", self.model, report::printable(&self.table), self.key)?;
        let heads = ["release", "row", "codec", "error", "norm", "distance", "values"];
        let mut table = report::table(&heads);
        for ReleaseRow { release, origin, codec, row, distance } in &self.releases {
            let row = row.as_ref();
            let error = row.and_then(|row| row.codec_error_max);
            table.add_row([
                release.clone(),
                origin.clone(),
                report::or_dash(*codec, str::to_owned),
                report::or_dash(error, |error| format!("{error:.1e}")),
                report::or_dash(row, |row| format!("{:.6}", row.norm)),
                report::or_dash(*distance, |distance| format!("{distance:.6}")),
                report::or_dash(row, |row| first_values(&row.values)),
            ]);
        }
        say!("{table}")
    }
}

/// Returns the first values, as a cell of a table has room for; `--json` has all.
fn first_values(values: &[f32]) -> String {
    let first: Vec<String> = values.iter().take(3).map(|value| format!("{value:.4}")).collect();
    first.join(" ") + if values.len() > 3 { " .." } else { "" }
}

impl ReleaseRow {
    fn absent(release: &Release) -> Self {
        let origin = "no such table".to_owned();
        Self { release: release.name(), origin, codec: None, row: None, distance: None }
    }

    /// Reads the row from the segments of table `number`.
    fn fill(
        &mut self,
        manifest: &Manifest,
        number: usize,
        store: &Arc<Objects>,
        key: u64,
    ) -> Result<()> {
        let table = &manifest.schema.tables[number];
        self.codec = Some(table.codec.name());
        let mut layers = manifest.layers(number);
        if manifest.leaves_alone(number) {
            layers.clear();
        }
        // The newest segment that has the key decides, as in a car.
        for (place, layer) in layers.iter().enumerate().rev() {
            let part =
                if place > 0 || manifest.is_delta(number) { Part::Delta } else { Part::Base };
            let sequence = layer.sequence;
            let brought = Generation { sequence, ..manifest.generation.clone() };
            let kind = SegmentKind::new(&brought, 0, number, table, part);
            let kind = kind.with_context(|| format!("table {}: its unit", table.name))?;
            let pages =
                StoredPages::new(store.clone(), manifest.blobs[layer.segment as usize].clone());
            let path = format!("{}: table {}", self.release, table.name);
            let segment = Segment::open(Path::new(&path), pages, kind)?;
            let file = SegmentRef { sequence, serial: 0 };
            self.row = RowSource { table, segment: &segment, file }.version(key)?;
            if self.row.is_some() {
                break;
            }
        }
        if self.row.is_none() && !manifest.is_delta(number) {
            self.row = Some(RowVersion::absent(table));
        }
        let unchanged = || "unchanged".to_owned();
        self.origin = self.row.as_ref().map_or_else(unchanged, RowVersion::origin);
        Ok(())
    }
}
