//! How a matrix product is cut: columns into panels, rows into tiles. Computes nothing.

use crate::dense::matrix::microkernel::WIDTH_MAX;

/// Tiles that load the next panel into the second level of the cache, a part each.
const AHEAD_TILES: usize = 4;

/// The sizes of a product `[m, k] x [k, n]`.
#[derive(Clone, Copy)]
pub(crate) struct ProductShape {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

/// Returns the first column and the width of every panel of `n` columns.
pub(crate) fn panels(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).step_by(WIDTH_MAX).map(move |first| (first, width_for(n - first)))
}

/// Returns the width of a panel of `columns` columns, of which it takes as many as it can.
pub(in crate::dense) fn width_for(columns: usize) -> usize {
    match columns {
        ..=16 => 16,
        17..=32 => 32,
        _ => WIDTH_MAX,
    }
}

/// Returns `n` columns with the padding of the last panel.
pub(crate) fn padded(n: usize) -> usize {
    panels(n).last().map_or(0, |(first, width)| first + width)
}

/// Returns the tiles of up to `rows_max` rows for `m` rows: the first row and the number of rows,
/// which differs by at most 1.
pub(in crate::dense) fn tiles(m: usize, rows_max: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = m.div_ceil(rows_max);
    (0..count).map(move |i| (i * m / count, (i + 1) * m / count - i * m / count))
}

/// Returns the part of the panel after `panel` that tile `number` prefetches. The pointer is never
/// read.
pub(in crate::dense) fn next_panel<W>(panel: &[W], number: usize) -> *const W {
    let part = if number < AHEAD_TILES { number * panel.len() / AHEAD_TILES } else { 0 };
    let from = if number < AHEAD_TILES { panel.len() } else { 0 };
    panel.as_ptr().wrapping_add(from + part)
}
