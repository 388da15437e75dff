//! Rebuilds a damaged page of a merged base from the segments of the previous generation, if those
//! still hold the same rows. If the live generation did not change the table, the rows are the
//! same. Otherwise the rebuilt page must match the checksum that the damaged page still has.

use crate::flash::live::LiveState;
use crate::flash::merge::Merge;
use crate::flash::segment::writer::{SegmentWriter, WrittenPages};
use crate::flash::segment::{Part, Segment};
use crate::flash::{Flash, FlashError};
use crate::io::page::{AlignedPage, PageBytes};
use crate::limits::PAGE_BYTES;
use crate::maintenance::scrub::Damage;
use crate::schema::KeySpace;

impl Flash {
    /// Rebuilds a damaged page from the previous generation and writes it in place. Returns false
    /// if that is not possible: the page then stays damaged until a snapshot replaces the table.
    ///
    /// # Errors
    /// [`FlashError::Segment`] if a segment of the previous generation is damaged too,
    /// [`FlashError::Io`] if the page cannot be written.
    pub fn repair_from_retained(&self, damage: &Damage) -> Result<bool, FlashError> {
        let Some(previous) = self.retained_for(damage) else { return Ok(false) };
        let segment = self.segment(damage.table, damage.segment, damage.part)?;
        let merge = Merge::new(self.table_of(previous, damage.table)?);
        let Some(page) = rebuild(&segment, merge, damage.page)? else { return Ok(false) };

        let mut found = AlignedPage::zeroed();
        let is_read = segment.read_page(damage.page, &mut found).is_ok();
        let has_its_checksum = is_read && found.0[..4] == page[..4];
        // If the live generation changed the table, the old rows may differ. Then only the damaged
        // page's own checksum proves the rebuilt one.
        if !has_its_checksum && !self.manifest().leaves_alone(damage.table) {
            return Ok(false);
        }
        self.repair(damage, &page)?;
        Ok(true)
    }

    /// Returns the previous state if it holds the rows of the damaged segment in other files.
    fn retained_for(&self, damage: &Damage) -> Option<&LiveState> {
        let previous = self.record().previous.as_ref()?;
        // Only the parent of the live generation has the same table.
        let is_parent = self.manifest().parent == Some(previous.generation.sequence)
            && self.manifest().is_delta(damage.table);

        let live = self.record().live.tables.get(damage.table)?;
        let is_merged = damage.part == Part::Base && damage.segment == live.base;
        let table = previous.tables.get(damage.table)?;
        (is_parent && is_merged && table.base != damage.segment).then_some(previous)
    }
}

/// Builds page `number` of `segment` from the rows of `merge`; returns `None` if those rows do not
/// fill exactly that page.
fn rebuild(
    segment: &Segment,
    mut merge: Merge,
    number: u32,
) -> Result<Option<PageBytes>, FlashError> {
    let (kind, Some((first, last))) = (segment.kind(), segment.orders_of(number)) else {
        return Ok(None);
    };
    if let Some(below) = first.checked_sub(1) {
        merge.seek_past(below)?;
    }

    let mut writer =
        SegmentWriter::resume(Vec::new(), kind.clone(), WrittenPages::before(kind, number));
    let (is_index, zeros) = (kind.keys() == KeySpace::Index, vec![0; kind.format().row_bytes()]);
    let (mut next, mut rows) = (Some(first), 0);
    while let Some(at) = next {
        let merged =
            merge.current()?.filter(|(order, _)| *order <= last && (!is_index || *order == at));
        let is_merged = merged.is_some();
        let (order, row) = match merged {
            Some(merged) => merged,
            // The row of a deleted key of an index table holds zeros.
            None if is_index => (at, &zeros[..]),
            None => break,
        };

        rows += 1;
        // More rows than a page has, or rows that a segment cannot have: the previous generation
        // has other rows.
        if rows > kind.rows_per_page() || writer.push(order, row).is_err() {
            return Ok(None);
        }
        if is_merged {
            merge.advance()?;
        }
        next = order.checked_add(1).filter(|next| *next <= last);
    }

    let Ok((bytes, _)) = writer.finish() else { return Ok(None) };
    Ok(bytes.first_chunk::<PAGE_BYTES>().filter(|_| rows > 0).copied())
}
