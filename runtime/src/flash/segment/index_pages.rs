//! Reads the entries of index pages: fences, and the orders of keys. The caller has checked the
//! pages.

use crate::flash::segment::key_steps;
use crate::flash::segment::kind::{FENCES_PER_PAGE, KEYS_PER_PAGE};
use crate::io::page::{Page, PageBytes, PageKind};

/// Returns the fences in a page of fences.
pub(super) fn fences_in(page: &Page<'_>) -> impl Iterator<Item = u32> {
    page.payload()
        .chunks_exact(4)
        .take(page.count())
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// Returns the most entries of an index page that claims `kind`.
pub(super) fn index_entries_max(kind: PageKind, page: &PageBytes) -> usize {
    match kind {
        PageKind::Fences => FENCES_PER_PAGE,
        PageKind::KeySteps => key_steps::entries_max(page),
        _ => KEYS_PER_PAGE,
    }
}

/// Passes the orders in a checked page of keys, key steps or deletes to `take`.
pub(super) fn each_order<E>(
    kind: PageKind,
    page: &Page<'_>,
    take: impl FnMut(u64) -> Result<(), E>,
) -> Result<(), E> {
    if kind == PageKind::KeySteps {
        key_steps::unpack(page.payload(), page.count()).try_for_each(take)
    } else {
        (0..page.count()).map(|i| page.order(i)).try_for_each(take)
    }
}
