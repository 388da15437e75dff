//! Single rows of segments: their values, and the release that wrote each version. Reads as a
//! request does, and never writes.

use crate::flash::Flash;
use crate::flash::live::SegmentRef;
use crate::flash::overlay::Newest;
use crate::flash::segment::{Part, Segment, SegmentError};
use crate::flash::table::{RowLocation, TableRows};
use crate::io::page::AlignedPage;
use crate::schema::Table;
use half::f16;
use hatchback_kernels::cache::codec::Codec;
use serde::Serialize;

/// What a request finds for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RowStatus {
    /// Its row.
    Fresh,
    /// No row: no segment has the key.
    Absent,
    /// No row: a delta deleted the key.
    Deleted,
    /// No row: its page is damaged.
    Damaged,
}

/// A version of a row.
#[derive(Clone, Debug, Serialize)]
pub struct RowVersion {
    /// What a request finds.
    pub status: RowStatus,
    /// The sequence of the release that brought the file; `None` for an absent key.
    pub release: Option<u64>,
    /// `snapshot`, `delta`, or `merged`: a merge wrote the file from that release and earlier ones.
    pub file: Option<&'static str>,
    /// The row, or the default row that a request gets instead.
    pub values: Vec<f32>,
    /// The Euclidean norm of the values.
    pub norm: f32,
    /// The most by which a value differs from the trainer's; `None` without a row.
    pub codec_error_max: Option<f32>,
    /// The damage of the page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
}

impl RowVersion {
    /// Returns the status and the release, in words.
    pub fn origin(&self) -> String {
        let file = self.release.map(|n| format!("{} {n}", self.file.unwrap_or_default()));
        match (self.status, file) {
            (RowStatus::Fresh, Some(file)) => file,
            (RowStatus::Deleted, Some(file)) => format!("deleted by {file}"),
            (RowStatus::Damaged, Some(file)) => format!("damaged in {file}"),
            _ => "absent".to_owned(),
        }
    }

    /// Returns what a request finds for a key of `table` that no segment has.
    pub fn absent(table: &Table) -> Self {
        let (values, norm) = (table.default_row.clone(), norm(&table.default_row));
        let (release, file, codec_error_max, damage) = (None, None, None, None);
        let status = RowStatus::Absent;
        Self { status, release, file, values, norm, codec_error_max, damage }
    }
}

/// A segment of a table, and what brought it.
#[derive(Clone, Copy)]
pub struct RowSource<'a> {
    /// The table.
    pub table: &'a Table,
    /// Its segment.
    pub segment: &'a Segment,
    /// The release that brought the segment.
    pub file: SegmentRef,
}

impl RowSource<'_> {
    /// Returns what the segment says of `key`; `None` if it does not have the key.
    ///
    /// # Errors
    /// The device refused, or an index page is damaged.
    pub fn version(&self, key: u64) -> Result<Option<RowVersion>, SegmentError> {
        if self.segment.kind().part == Part::Base {
            let mut page = [None];
            self.segment.locate(&[key], &mut page);
            return page[0].map_or(Ok(None), |page| self.read(page, key));
        }
        let (wanted, mut change) = (self.table.keys.order(key), None);
        let is_it = |order| order == wanted;
        self.segment.each_key(|order, page| change = is_it(order).then_some(page).or(change))?;
        match change {
            None => Ok(None),
            Some(Some(page)) => self.read(page, key),
            Some(None) => Ok(Some(self.without_row(RowStatus::Deleted))),
        }
    }

    /// Reads the row of `key` from data page `number`, if the page has it.
    fn read(&self, number: u32, key: u64) -> Result<Option<RowVersion>, SegmentError> {
        let mut page = AlignedPage::zeroed();
        self.segment.read_page(number, &mut page)?;
        let checked = match self.segment.check(number, &page.0) {
            Ok(checked) => checked,
            Err(e @ SegmentError::Page { .. }) => {
                let lost = self.without_row(RowStatus::Damaged);
                return Ok(Some(RowVersion { damage: Some(e.to_string()), ..lost }));
            }
            Err(e) => return Err(e),
        };
        Ok(self.segment.row(&checked, key).map(|row| {
            let format = self.segment.kind().format();
            let mut values = vec![0.0; format.dim()];
            format.decode(row, &mut values);
            let codec_error_max = Some(error_max(self.table, row, &values));
            let place = self.without_row(RowStatus::Fresh);
            RowVersion { norm: norm(&values), values, codec_error_max, ..place }
        }))
    }

    /// Returns a version with the default row, for which the segment is responsible.
    fn without_row(&self, status: RowStatus) -> RowVersion {
        let kind = match (self.segment.kind().part, self.file.serial) {
            (Part::Base, 0) => "snapshot",
            (Part::Base, _) => "merged",
            _ => "delta",
        };
        let (release, file) = (Some(self.file.sequence), Some(kind));
        RowVersion { status, release, file, ..RowVersion::absent(self.table) }
    }
}

/// A table of the live generation.
pub struct TableReader<'a> {
    table: &'a Table,
    rows: &'a TableRows,
    /// The base, then the deltas from the oldest.
    files: Vec<SegmentRef>,
}

impl<'a> TableReader<'a> {
    /// Returns a reader of table `number` of `flash`, which has `rows`.
    pub fn new(flash: &'a Flash, number: usize, rows: &'a TableRows) -> Self {
        let files = flash.record().live.tables[number].segments().map(|(file, _)| file).collect();
        Self { table: &flash.manifest().schema.tables[number], files, rows }
    }

    /// Returns what a request finds for `key`.
    ///
    /// # Errors
    /// The device refused, or an index page is damaged.
    pub fn newest(&self, key: u64) -> Result<RowVersion, SegmentError> {
        let found = match self.rows.locate(key) {
            Some(RowLocation { segment, page }) => {
                self.source(usize::from(segment)).read(page, key)?
            }
            // Only the segments know which of them deleted the key.
            None => match self.rows.newest(self.table.keys.order(key)) {
                Some(Newest::Deleted) => self.history(key)?.pop(),
                _ => None,
            },
        };
        Ok(found.unwrap_or_else(|| RowVersion::absent(self.table)))
    }

    /// Returns the versions of the row of `key` that the live generation's segments hold, from the
    /// oldest.
    ///
    /// # Errors
    /// As [`TableReader::newest`].
    pub fn history(&self, key: u64) -> Result<Vec<RowVersion>, SegmentError> {
        let versions = (0..self.files.len()).map(|n| self.source(n).version(key));
        versions.filter_map(Result::transpose).collect()
    }

    fn source(&self, n: usize) -> RowSource<'_> {
        let (segment, file) = (&self.rows.segments()[n], self.files[n]);
        RowSource { table: self.table, segment, file }
    }
}

/// Returns the Euclidean norm of `values`.
pub fn norm(values: &[f32]) -> f32 {
    // The sum of no values is -0.0.
    (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() + 0.0).sqrt() as f32
}

/// Returns the most by which the decoded `values` of the encoded `row` differ from the values that
/// `pack` encoded.
fn error_max(table: &Table, row: &[u8], values: &[f32]) -> f32 {
    let half_step = |magnitude: f32| (magnitude * 2f32.powi(-11)).max(2f32.powi(-25));
    let magnitude = values.iter().fold(0f32, |max, v| max.max(v.abs()));
    let Some(code_max) = table.codec.code_max() else {
        return if table.codec == Codec::F16 { half_step(magnitude) } else { 0.0 };
    };
    let parameter = |at: usize| f16::from_le_bytes([row[at], row[at + 1]]).to_f32();
    let [scale, bias] = [parameter(row.len() - 4), parameter(row.len() - 2)];
    // All codes of a constant row are 0: its scale stands for no step.
    let is_constant = values.iter().all(|v| v.to_bits() == values[0].to_bits());
    let scale = if is_constant { 0.0 } else { scale };
    // Scale and bias were rounded to f16, so the ends of the row may lie beyond the codes.
    let ends = half_step(bias.abs()).max(code_max * half_step(scale));
    let bound = (scale / 2.0).max(ends) * 2f32.powi(i32::from(table.unit_exp));
    // `pack` and the decoder each round in f32.
    bound + 2.0 * magnitude * f32::EPSILON
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{KeySpace, MissPolicy, Placement};
    use hatchback_kernels::cache::address::mix;

    #[test]
    fn the_norm_of_no_values_is_a_positive_zero() {
        assert!(norm(&[]).is_sign_positive());
    }

    #[test]
    fn the_error_of_a_codec_is_within_its_bound_and_near_it() {
        let mut drawn = 7u64;
        let mut random = |low: f32, high: f32| {
            drawn = mix(drawn.wrapping_add(1));
            low + (high - low) * (drawn >> 40) as f32 / (1u64 << 24) as f32
        };
        for codec in [Codec::F32, Codec::F16, Codec::U8, Codec::U4] {
            let mut nearest = 0f32;
            for round in 0..2_000 {
                let unit_exp = if codec.is_quantized() { round % 9 - 4 } else { 0 };
                let table = Table {
                    name: "t".to_owned(),
                    dim: 8,
                    keys: KeySpace::Index,
                    rows: 1,
                    codec,
                    unit_exp: unit_exp as i8,
                    placement: Placement::Auto,
                    miss: MissPolicy::Wait,
                    default_row: vec![0.0; 8],
                };
                let center = random(-2.0, 2.0);
                let width: f32 = [0.0, 1e-4, 0.1, 3.0][round as usize % 4];
                let value = |_| center + width * random(-1.0, 1.0);
                let source: Vec<f32> = (0..8).map(value).collect();
                let format = table.format().unwrap();
                let (mut row, mut values) = (vec![0; format.row_bytes()], vec![0.0; 8]);
                format.encode(&source, &mut row).unwrap();
                format.decode(&row, &mut values);
                let bound = error_max(&table, &row, &values);
                let worst = source.iter().zip(&values).map(|(a, b)| (a - b).abs());
                let worst = worst.fold(0f32, f32::max);
                assert!(worst <= bound, "{codec:?}: {worst} over {bound}, {source:?}");
                nearest = nearest.max(if bound > 0.0 { worst / bound } else { 1.0 });
            }
            assert!(nearest > 0.9, "{codec:?}: no error is over {nearest} of its bound");
        }
    }
}
