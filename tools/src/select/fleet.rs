//! Compares candidates with what the fleet holds. A candidate that would bring the fleet no closer
//! to the trainer is dropped, because the fleet has the row within the codec's error. Candidates
//! are in the order of the pages, so each page of the fleet is read once.

use crate::limits::GROWTH_GAP_MAX;
use crate::select::candidates::{Candidate, Need, RowChange, Sources, grows, key_of};
use crate::window::WindowTable;
use crate::window::reader::RowBuffer;
use anyhow::{Context, Result, ensure};
use hatchback::flash::Flash;
use hatchback::flash::segment::Segment;
use hatchback::flash::table::TableRows;
use hatchback::io::page::AlignedPage;
use hatchback::schema::Table;
use hatchback::{RowFormat, flash::segment::SegmentError};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// The rows of one table of the fleet, for reads in the order of the keys.
pub struct FleetTable {
    rows: TableRows,
    /// The page that was last read of each segment.
    pages: Vec<LoadedPage>,
}

struct LoadedPage {
    number: Option<u32>,
    page: Box<AlignedPage>,
}

impl FleetTable {
    /// Opens table `number` of `fleet`.
    ///
    /// # Errors
    /// A segment cannot be opened.
    pub fn open(fleet: &Flash, number: usize) -> Result<Self> {
        let rows = fleet.table(number)?;
        rows.segments().iter().try_for_each(|segment| read_ahead(segment))?;
        let page = || LoadedPage { number: None, page: Box::new(AlignedPage::zeroed()) };
        let pages = (0..rows.segments().len()).map(|_| page()).collect();
        Ok(Self { rows, pages })
    }

    /// Returns the encoded row of `key`; `None` if the fleet has none.
    ///
    /// # Errors
    /// [`SegmentError`] if the page is damaged or cannot be read.
    pub fn find(&mut self, key: u64) -> Result<Option<&[u8]>, SegmentError> {
        let Some(location) = self.rows.locate(key) else { return Ok(None) };
        let segment = self.rows.segment(location);
        let loaded = &mut self.pages[usize::from(location.segment)];
        if loaded.number != Some(location.page) {
            loaded.number = None;
            segment.read_page(location.page, &mut loaded.page)?;
            loaded.number = Some(location.page);
        }
        let checked = segment.check(location.page, &loaded.page.0)?;
        Ok(segment.row(&checked, key))
    }
}

/// Allows read-ahead, which the flash tier turns off because it reads at random.
fn read_ahead(segment: &Segment) -> Result<()> {
    let Some(file) = segment.file().system_file() else { return Ok(()) };
    let flags = fcntl_getfl(file).with_context(|| segment.path().display().to_string())?;
    fcntl_setfl(file, flags - OFlags::DIRECT).with_context(|| segment.path().display().to_string())
}

/// Measures the candidates of one table against what the fleet holds.
pub struct Comparison<'a> {
    /// The table as the fleet has it.
    pub table: &'a Table,
    /// The encoding of its rows.
    pub format: RowFormat,
    /// Where the candidates come from.
    pub sources: &'a Sources<'a>,
    /// Least distance that counts, as a share of the length of the fleet's row.
    pub floor: f32,
    /// A delta may follow that was written before the newest windows. What the fleet holds is then
    /// kept, because that delta may take it away.
    pub keeps_held: bool,
}

/// Buffers of a comparison.
struct Buffers {
    row: RowBuffer,
    encoded: Vec<u8>,
    decoded: Vec<f32>,
    held: Vec<f32>,
}

impl Comparison<'_> {
    /// Measures `candidates` and removes those that the fleet holds, unless it keeps them.
    ///
    /// # Errors
    /// A row cannot be read or encoded.
    pub fn measure(&self, candidates: &mut Vec<Candidate>, fleet: &mut FleetTable) -> Result<()> {
        let dim = self.table.dim as usize;
        let mut buffers = Buffers {
            row: RowBuffer::default(),
            encoded: vec![0; self.format.row_bytes()],
            decoded: vec![0.0; dim],
            held: vec![0.0; dim],
        };
        let name = &self.table.name;
        let windows = 0..self.sources.windows.len();
        let tables: Vec<Option<&WindowTable>> =
            windows.map(|source| self.sources.table(source, name)).collect();

        let mut kept = 0;
        for at in 0..candidates.len() {
            let mut candidate = candidates[at];
            let key = key_of(self.table.keys, candidate.order);
            let place = || format!("table `{name}`, key {key}");
            let is_held = match fleet.find(key)? {
                Some(row) => {
                    self.format.decode(row, &mut buffers.held);
                    true
                }
                None => false,
            };
            if !is_held {
                buffers.held.copy_from_slice(&self.table.default_row);
            }
            let is_due = match candidate.change {
                RowChange::Delete if is_held => {
                    candidate.distance = distance(&buffers.held, &self.table.default_row);
                    true
                }
                // New rows after this position need a row here too; a delta fills it with the
                // default row.
                RowChange::Delete => grows(self.table, candidate.order),
                _ => {
                    let source = usize::from(candidate.source);
                    let table = tables[source].with_context(place)?;
                    let row = u64::from(candidate.row);
                    self.sources.windows[source].read_row(table, row, &mut buffers.row)?;
                    self.compare_row(&mut candidate, is_held, &mut buffers).with_context(place)?
                }
            };
            if !is_due {
                candidate.need = Need::Holds;
            }
            if is_due || self.keeps_held {
                candidates[kept] = candidate;
                kept += 1;
            }
        }
        candidates.truncate(kept);
        let idle = fill_gaps(self.table, candidates)?;
        if self.keeps_held {
            candidates.extend(idle.map(|candidate| Candidate { need: Need::Holds, ..candidate }));
        }
        Ok(())
    }

    /// Compares the row in `buffers` with the fleet's row. Returns whether sending it helps.
    fn compare_row(
        &self,
        candidate: &mut Candidate,
        is_held: bool,
        buffers: &mut Buffers,
    ) -> Result<bool> {
        let Buffers { row, encoded, decoded, held } = buffers;
        self.format.encode(&row.values, encoded).context(
            "the row left the range that its table was packed for; publish a new snapshot",
        )?;
        self.format.decode(encoded, decoded);
        let before = distance(&row.values, held);
        let after = distance(&row.values, decoded);
        candidate.change = if is_held { RowChange::Update } else { RowChange::Insert };
        candidate.distance = before;
        if is_held && before < self.floor * length(held) {
            candidate.need = Need::BelowFloor;
        }
        Ok(!is_held || before > after)
    }
}

/// Closes the gaps between new rows at the end of an index table. Each missing key becomes a
/// deleted key: the delta fills its place, and the next delta deletes it. Takes out the deleted
/// keys after the last new row, and returns them.
fn fill_gaps(
    table: &Table,
    candidates: &mut Vec<Candidate>,
) -> Result<impl Iterator<Item = Candidate> + use<>> {
    let is_idle = |c: &Candidate| c.change == RowChange::Delete && grows(table, c.order);
    let idle = candidates.iter().rev().take_while(|candidate| is_idle(candidate)).count();
    let idle = candidates.split_off(candidates.len() - idle).into_iter();
    let first = candidates.partition_point(|candidate| !grows(table, candidate.order));
    let Some(last) = candidates.last().copied().filter(|last| grows(table, last.order)) else {
        return Ok(idle);
    };
    let missing = last.order - table.rows - (candidates.len() - first - 1) as u64;
    ensure!(
        missing <= GROWTH_GAP_MAX,
        "table `{}`: key {} leaves {missing} keys without a row above the fleet's {} rows; give \
         the table sparse keys",
        table.name,
        last.order,
        table.rows
    );

    let new = candidates.split_off(first);
    let mut next = table.rows;
    for candidate in new {
        let gap = Candidate { change: RowChange::Delete, traffic: 0.0, distance: 0.0, ..candidate };
        candidates.extend((next..candidate.order).map(|order| Candidate { order, ..gap }));
        next = candidate.order + 1;
        candidates.push(candidate);
    }
    Ok(idle)
}

/// Returns the Euclidean distance of two rows.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt()
}

fn length(row: &[f32]) -> f32 {
    row.iter().map(|value| value * value).sum::<f32>().sqrt()
}
