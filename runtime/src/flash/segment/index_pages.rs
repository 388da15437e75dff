//! Reads the entries of index pages: fences, and the orders of keys. The caller has checked the
//! pages.

use crate::flash::segment::key_steps;
use crate::flash::segment::kind::{KEYS_PER_PAGE, SegmentKind};
use crate::io::page::{Page, PageBytes, PageKind, u32_at};

/// Returns the fences in a page of fences of a segment of kind `of`.
pub(super) fn fences_in(of: &SegmentKind, page: &Page<'_>) -> impl Iterator<Item = u64> {
    let is_whole = of.fence_shift() == 0;
    (0..page.count()).map(move |i| {
        if is_whole { page.order(i) } else { u64::from(u32_at(page.payload(), 4 * i)) }
    })
}

/// Returns the most entries of an index page that claims `kind`, in a segment of kind `of`.
pub(super) fn index_entries_max(of: &SegmentKind, kind: PageKind, page: &PageBytes) -> usize {
    match kind {
        PageKind::Fences => of.fences_per_page(),
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
