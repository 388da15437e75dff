//! Repair from what is retained: a bad page of a merged base is built again from the segments of
//! the generation before, where those still say the same. Never guesses: a page counts as the lost
//! one only if its checksum is the one that the damaged page still carries, or if the live
//! generation is known to have left the table alone.

use crate::flash::live::LiveState;
use crate::flash::merge::Merge;
use crate::flash::segment::writer::{SegmentWriter, Written};
use crate::flash::segment::{Part, Segment};
use crate::flash::{Flash, FlashError};
use crate::io::page::{AlignedPage, PageBytes};
use crate::limits::PAGE_BYTES;
use crate::maintenance::scrub::Damage;
use crate::schema::KeySpace;

impl Flash {
    /// Rebuilds a damaged page from the retained generation and puts it in place. Returns whether
    /// that was possible; if not, it stays bad until a snapshot brings the table anew.
    ///
    /// # Errors
    /// A retained segment is damaged too, or the page cannot be written.
    pub fn repair_from_retained(&self, damage: &Damage) -> Result<bool, FlashError> {
        let Some(before) = self.retained_for(damage) else { return Ok(false) };
        let segment = self.segment(damage.table, damage.segment, damage.part)?;
        let merge = Merge::new(self.table_of(before, damage.table)?);
        let Some(page) = rebuilt(&segment, merge, damage.page)? else { return Ok(false) };
        let mut found = AlignedPage::zeroed();
        let is_read = segment.read_page(damage.page, &mut found).is_ok();
        let has_its_checksum = is_read && found.0[..4] == page[..4];
        if !has_its_checksum && !self.manifest().leaves_alone(damage.table) {
            return Ok(false);
        }
        self.repair(damage, &page)?;
        Ok(true)
    }

    /// The retained state, where it holds the rows of the damaged segment in other files.
    fn retained_for(&self, damage: &Damage) -> Option<&LiveState> {
        let before = self.record().previous.as_ref()?;
        // Only the live generation's parent has the same tables.
        let is_parent = self.manifest().parent == Some(before.generation.sequence);
        let live = self.record().live.tables.get(damage.table)?;
        let is_merged = damage.part == Part::Base && damage.segment == live.base;
        let table = before.tables.get(damage.table)?;
        (is_parent && is_merged && table.base != damage.segment).then_some(before)
    }
}

/// What the page must be if the rows that `merge` passes over are those of `segment`; `None` if
/// they cannot be.
fn rebuilt(
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
    let mut writer = SegmentWriter::resume(Vec::new(), kind.clone(), Written::before(kind, number));
    let (is_index, zeros) = (kind.keys() == KeySpace::Index, vec![0; kind.format().row_bytes()]);
    let (mut next, mut rows) = (Some(first), 0);
    while let Some(at) = next {
        let there =
            merge.current()?.filter(|(order, _)| *order <= last && (!is_index || *order == at));
        let is_there = there.is_some();
        let (order, row) = match there {
            Some(there) => there,
            // A hole of an index table holds zeros.
            None if is_index => (at, &zeros[..]),
            None => break,
        };
        rows += 1;
        if rows > kind.rows_per_page() || writer.push(order, row).is_err() {
            return Ok(None);
        }
        if is_there {
            merge.advance()?;
        }
        next = order.checked_add(1).filter(|next| *next <= last);
    }
    let Ok((bytes, _)) = writer.finish() else { return Ok(None) };
    Ok(bytes.first_chunk::<PAGE_BYTES>().filter(|_| rows > 0).copied())
}
