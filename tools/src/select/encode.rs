//! Writes chosen changes as an ordinary delta bundle, and finds the choice that fills a budget. The
//! budget counts the bytes of the file. Rows come from the backlog, one at a time. Never changes
//! the backlog.

use crate::pack::ending::Ending;
use crate::pack::table::write_blob;
use crate::report::temporary::Claim;
use crate::select::candidates::{Candidate, Need, RowChange, grows};
use crate::select::choose::{Chosen, Ranking, TableCandidates};
use crate::window::Window;
use crate::window::reader::RowBuffer;
use anyhow::{Context, Result, ensure};
use hatchback::bundle::manifest::{Deferral, Generation, TableBlobs};
use hatchback::bundle::{BlobWriter, BundleWriter};
use hatchback::flash::Flash;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Schema};
use std::path::Path;

/// Drafts that the search for the best choice writes at most.
const DRAFTS_MAX: usize = 4;
/// A draft of at least this share of the budget is good enough, per cent.
const FULL_PERCENT: u64 = 95;

/// A delta in the making.
pub struct Draft<'a> {
    /// What the fleet holds.
    pub fleet: &'a Flash,
    /// The rows of the candidates, in their order.
    pub backlog: &'a Window,
    /// The measured candidates of each table.
    pub tables: &'a [TableCandidates],
    /// The generation that the delta brings.
    pub generation: Generation,
    /// The newest window among the candidates.
    pub window: u64,
    /// The dense network.
    pub dense: &'a [u8],
    /// The probe set.
    pub probe: Vec<Sample>,
    /// The new hot list of each table, if it gets one.
    pub hot: Vec<Option<Vec<u64>>>,
}

/// A choice that fits a budget.
pub struct Fitted {
    /// The choice.
    pub chosen: Chosen,
    /// Bytes of the bundle.
    pub bytes: u64,
}

impl Draft<'_> {
    /// Returns the schema of the delta: the fleet's, with the new numbers of rows.
    pub fn schema(&self, chosen: &Chosen) -> Schema {
        let mut schema = self.fleet.manifest().schema.clone();
        for (number, table) in schema.tables.iter_mut().enumerate() {
            let picked = self.chosen_of(chosen, number);
            let (mut added, mut removed) = (0, 0);
            for candidate in picked {
                let is_sparse = table.keys == KeySpace::Sparse;
                let is_insert = is_sparse && candidate.change == RowChange::Insert;
                added += u64::from(is_insert || grows(table, candidate.order));
                removed += u64::from(is_sparse && candidate.change == RowChange::Delete);
            }
            table.rows = (table.rows + added).saturating_sub(removed);
        }
        schema
    }

    /// Iterates over the chosen candidates of table `number`.
    pub fn chosen_of<'c>(
        &'c self,
        chosen: &'c Chosen,
        number: usize,
    ) -> impl Iterator<Item = &'c Candidate> {
        let candidates = self.tables[number].candidates.iter();
        candidates.zip(&chosen.of[number]).filter_map(|(c, is_chosen)| is_chosen.then_some(c))
    }

    /// Writes the bundle with the `chosen` candidates. Returns its bytes.
    ///
    /// # Errors
    /// A row cannot be read or encoded, or the file cannot be written.
    pub fn write(&self, chosen: &Chosen, out: &Path) -> Result<u64> {
        let schema = self.schema(chosen);
        let _part = Claim::part_of(out);
        let mut bundle = BundleWriter::create(out)?;
        let mut tables = Vec::new();
        for number in 0..schema.tables.len() {
            let (segment, blob) = bundle.blob();
            self.write_table(&schema, chosen, number, blob)
                .with_context(|| format!("table `{}`", schema.tables[number].name))?;
            let hot = match &self.hot[number] {
                None => None,
                Some(keys) => {
                    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
                    Some(write_blob(&mut bundle, &bytes)?)
                }
            };
            tables.push(TableBlobs { segment, hot, whole: false });
        }

        let probe = match self.probe.is_empty() {
            true => None,
            false => Some(Sample::encode_set(&self.probe)?),
        };
        let ending = Ending {
            generation: &self.generation,
            parent: Some(self.fleet),
            schema: &schema,
            tables,
            probe,
            deferral: Some(self.deferral(chosen)),
        };
        ending.finish(bundle, self.dense)
    }

    /// Returns what the delta leaves for later.
    pub fn deferral(&self, chosen: &Chosen) -> Deferral {
        let mut left = Deferral {
            window: self.window,
            step: self.backlog.head.step,
            rows: 0,
            since: None,
            distance_max: 0.0,
        };
        for (table, chosen) in self.tables.iter().zip(&chosen.of) {
            let picks = table.candidates.iter().zip(chosen);
            let is_left = |candidate: &Candidate| candidate.need != Need::Holds;
            for (candidate, _) in picks.filter(|(c, is_chosen)| !**is_chosen && is_left(c)) {
                left.rows += 1;
                left.since = Some(left.since.unwrap_or(u64::MAX).min(candidate.since));
                left.distance_max = left.distance_max.max(candidate.distance);
            }
        }
        left
    }

    fn write_table(
        &self,
        schema: &Schema,
        chosen: &Chosen,
        number: usize,
        blob: BlobWriter<'_>,
    ) -> Result<()> {
        let table = &schema.tables[number];
        let held = &self.fleet.manifest().schema.tables[number];
        let kind = SegmentKind::new(&self.generation, 0, number, table, Part::Delta)
            .context("the unit does not fit the codec")?;
        let format = kind.format();
        let mut writer = SegmentWriter::new(blob, kind);
        let (mut row, mut encoded) = (RowBuffer::default(), vec![0; format.row_bytes()]);
        let (mut at, rows) = (0, self.backlog.table(&table.name));

        for (candidate, is_chosen) in self.tables[number].candidates.iter().zip(&chosen.of[number])
        {
            if candidate.change == RowChange::Delete {
                if *is_chosen && grows(held, candidate.order) {
                    // The codec may not be able to encode the default row; zeros always fit. The
                    // next delta deletes the key.
                    let zeros = vec![0.0; table.dim as usize];
                    let filled = format.encode(&table.default_row, &mut encoded);
                    filled.or_else(|_| format.encode(&zeros, &mut encoded))?;
                    writer.push(candidate.order, &encoded)?;
                } else if *is_chosen {
                    writer.delete(candidate.order)?;
                }
                continue;
            }
            if *is_chosen {
                let rows = rows.context("the backlog has no rows of the table")?;
                self.backlog.read_row(rows, at, &mut row)?;
                format.encode(&row.values, &mut encoded)?;
                writer.push(candidate.order, &encoded)?;
            }
            at += 1;
        }
        Ok(writer.finish()?.0.end()?)
    }

    /// Writes the bundle with the best choice of `ranking` that fits `budget` bytes; with all
    /// candidates if there is no budget.
    ///
    /// # Errors
    /// The bundle is over the budget without any row, or as [`Draft::write`].
    pub fn fit(&self, ranking: &Ranking<'_>, budget: Option<u64>, out: &Path) -> Result<Fitted> {
        let Some(budget) = budget else {
            let chosen = ranking.choose(u64::MAX);
            let bytes = self.write(&chosen, out)?;
            return Ok(Fitted { chosen, bytes });
        };

        let none = ranking.choose(0);
        let fixed = self.write(&none, out)?;
        ensure!(
            fixed <= budget,
            "the budget of {budget} bytes is below the {fixed} bytes of the network, the probe set \
             and the manifest; raise --budget-mib"
        );
        let (mut best, mut limit) = (Fitted { chosen: none, bytes: fixed }, budget - fixed);
        let mut is_last = true;
        for _ in 0..DRAFTS_MAX {
            let chosen = ranking.choose(limit);
            if chosen.count == 0 {
                break;
            }
            let bytes = self.write(&chosen, out)?;
            let (room, taken) = (budget - fixed, bytes.saturating_sub(fixed).max(1));
            is_last = bytes <= budget && chosen.count >= best.chosen.count;
            if is_last {
                let is_full = bytes - fixed >= room / 100 * FULL_PERCENT;
                let is_all = chosen.count == ranking.count();
                best = Fitted { chosen, bytes };
                if is_full || is_all {
                    break;
                }
            }
            limit = (limit as f64 * room as f64 / taken as f64 * 0.99) as u64;
        }

        if !is_last {
            best.bytes = self.write(&best.chosen, out)?;
        }
        Ok(best)
    }
}
