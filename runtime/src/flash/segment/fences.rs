//! The fence pointers of a base in memory, as in an LSM store. Each page has one fence: the top 32
//! bits of its first hash, or the whole hash if few rows fit in a page. The page of a hash is the
//! last one whose fence is not above the hash.
//!
//! In a large table neighbouring fences are close. They are stored as one 32-bit anchor for each 16
//! pages, and 16-bit gaps between the pages. This takes 18 bits a page instead of 32. Hashes are
//! evenly distributed, so a small directory over their top bits leads to a few anchors. A search
//! touches three cache lines in a table of any size. A batch of searches runs step by step, so that
//! their cache misses overlap. Never reads a file.

use hatchback_kernels::simd::prefetch;

/// Pages from one anchor to the next.
const STRIDE: usize = 16;
/// Average number of anchors for an entry of the directory.
const ANCHORS_AN_ENTRY: usize = 4;
/// Anchors compared for each search without a branch: nearly always all anchors of an entry.
const WINDOW: usize = 12;
/// Keys of one batch of searches.
pub const LOCATE_KEYS: usize = 32;

/// Strictly ascending fences.
pub struct Fences(Form);

enum Form {
    /// Whole hashes, one for each page.
    Whole(Box<[u64]>),
    /// One word for each page, if a gap does not fit in 16 bits.
    Wide(Box<[u32]>),
    Close {
        /// The fence of every 16th page.
        anchors: Box<[u32]>,
        /// The distance from each fence to the next, one for each page. The last one is 0.
        gaps: Box<[u16]>,
        /// For each value of the top bits the number of anchors below that value; then the number
        /// of all anchors.
        directory: Box<[u32]>,
        /// Shift that leaves the top bits.
        shift: u32,
    },
}

impl Default for Fences {
    fn default() -> Self {
        Self(Form::Wide([].into()))
    }
}

impl Fences {
    /// Compresses `fences`, hashes without their low `shift` bits: 0 or 32. Returns `None` if they
    /// do not ascend strictly.
    pub fn new(fences: Vec<u64>, shift: u32) -> Option<Self> {
        if !fences.is_sorted_by(|a, b| a < b) {
            return None;
        }
        if shift == 0 {
            return Some(Self(Form::Whole(fences.into())));
        }
        let fences: Vec<u32> = fences.into_iter().map(|fence| fence as u32).collect();
        let next = fences.iter().skip(1).chain(fences.last());
        let gaps: Option<Box<[u16]>> =
            fences.iter().zip(next).map(|(a, b)| u16::try_from(b - a).ok()).collect();
        let Some(gaps) = gaps else { return Some(Self(Form::Wide(fences.into()))) };

        let anchors: Box<[u32]> = fences.iter().step_by(STRIDE).copied().collect();
        let bits = (anchors.len() / ANCHORS_AN_ENTRY).max(1).ilog2();
        let shift = u32::BITS - bits;
        let below = |top: u64| anchors.partition_point(|&f| u64::from(f) < top << shift) as u32;
        let directory = (0..=1 << bits).map(below).collect();
        Some(Self(Form::Close { anchors, gaps, directory, shift }))
    }

    /// Finds the last page whose fence is not above the hash, for each of at most [`LOCATE_KEYS`]
    /// hashes. Writes the pages to `pages` `[hashes]`; `None` if all fences are above the hash.
    pub fn pages(&self, hashes: &[u64], pages: &mut [Option<u32>]) {
        let last = |below: usize| (below as u32).checked_sub(1);
        let prefix = |hash: u64| (hash >> 32) as u32;
        match &self.0 {
            Form::Whole(fences) => hashes.iter().zip(pages).for_each(|(hash, found)| {
                *found = last(fences.partition_point(|fence| fence <= hash));
            }),
            Form::Wide(fences) => hashes.iter().zip(pages).for_each(|(hash, found)| {
                *found = last(fences.partition_point(|fence| *fence <= prefix(*hash)));
            }),
            Form::Close { .. } => {
                let mut prefixes = [0; LOCATE_KEYS];
                for (found, hash) in prefixes.iter_mut().zip(hashes) {
                    *found = prefix(*hash);
                }
                self.close_pages(&prefixes[..hashes.len()], pages);
            }
        }
    }

    /// Finds the pages of `prefixes`, the top halves of hashes, in the close form.
    fn close_pages(&self, prefixes: &[u32], pages: &mut [Option<u32>]) {
        let Form::Close { anchors, gaps, directory, shift } = &self.0 else { return };

        // The state of each search: an entry of the directory, then an anchor. No step branches on
        // a value that it has just read: a mispredicted branch costs as much as a cache miss and
        // ends the overlap.
        let mut at = [0; LOCATE_KEYS];
        for (at, prefix) in at.iter_mut().zip(prefixes) {
            // In 64 bits: with one entry in the directory the shift is 32.
            *at = (u64::from(*prefix) >> shift) as usize;
            prefetch(&directory[*at]);
        }

        for at in &at[..prefixes.len()] {
            let below = directory[*at] as usize;
            anchors.get(below).inspect(|first| prefetch(*first));
            anchors.get(below + WINDOW - 1).inspect(|last| prefetch(*last));
        }

        for (at, prefix) in at.iter_mut().zip(prefixes) {
            let (below, until) = (directory[*at] as usize, directory[*at + 1] as usize);
            // Anchors of the next entries are above `prefix` and add nothing to the sum.
            *at = below
                + match anchors.get(below..below + WINDOW) {
                    Some(window) if until <= below + WINDOW => {
                        window.iter().map(|f| usize::from(f <= prefix)).sum()
                    }
                    _ => anchors[below..until].partition_point(|f| f <= prefix),
                };
            let stretch = &gaps[at.saturating_sub(1) * STRIDE..];
            stretch.first().inspect(|first| prefetch(*first));
            stretch.get(STRIDE - 1).inspect(|last| prefetch(*last));
        }

        for ((at, prefix), found) in at.iter().zip(prefixes).zip(pages) {
            *found = at.checked_sub(1).map(|anchor| {
                let (first, left) = (anchor * STRIDE, prefix - anchors[anchor]);
                // The last gap of a stretch leads to the next stretch or to no page. The loop adds
                // all others without a branch.
                let last = gaps.len().min(first + STRIDE) - 1;
                let (mut sum, mut page) = (0, 0);
                for gap in &gaps[first..last] {
                    sum += u32::from(*gap);
                    page += usize::from(sum <= left);
                }
                (first + page) as u32
            });
        }
    }

    /// Returns the fence of `page`; `None` after the last page.
    pub fn get(&self, page: usize) -> Option<u64> {
        match &self.0 {
            Form::Whole(fences) => fences.get(page).copied(),
            Form::Wide(fences) => fences.get(page).copied().map(u64::from),
            Form::Close { gaps, .. } if page >= gaps.len() => None,
            Form::Close { anchors, gaps, .. } => {
                let first = page / STRIDE * STRIDE;
                let gaps = gaps[first..page].iter().map(|gap| u64::from(*gap)).sum::<u64>();
                Some(u64::from(anchors[page / STRIDE]) + gaps)
            }
        }
    }

    /// Returns the bytes of memory.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Form::Whole(fences) => 8 * fences.len(),
            Form::Wide(fences) => 4 * fences.len(),
            Form::Close { anchors, gaps, directory, .. } => {
                4 * (anchors.len() + directory.len()) + 2 * gaps.len()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn halves(fences: &[u32]) -> Option<Fences> {
        Fences::new(fences.iter().copied().map(u64::from).collect(), 32)
    }

    /// Every fence, its neighbours and the extremes lead to the page of a plain binary search.
    fn agrees(fences: &[u32], close: bool, more: &[u32]) {
        let compact = halves(fences).unwrap();
        assert_eq!(matches!(compact.0, Form::Close { .. }), close, "{fences:?}");
        let fences: Vec<u64> = fences.iter().copied().map(u64::from).collect();
        search(&compact, &fences, 32, more.iter().copied().map(u64::from));
        let whole = Fences::new(fences.clone(), 0).unwrap();
        search(&whole, &fences, 0, [u64::MAX].into_iter());
    }

    fn search(compact: &Fences, fences: &[u64], shift: u32, more: impl Iterator<Item = u64>) {
        let all: Vec<u64> = (0..=fences.len()).map_while(|page| compact.get(page)).collect();
        assert_eq!(all, fences);
        let near = fences.iter().flat_map(|f| [f.saturating_sub(1), *f, *f + 1]);
        let most = u64::MAX >> shift;
        let searched: Vec<u64> = near.chain([0, most]).chain(more).map(|f| f.min(most)).collect();
        for batch in searched.chunks(LOCATE_KEYS) {
            let hashes: Vec<u64> = batch.iter().map(|prefix| prefix << shift).collect();
            let mut found = [None; LOCATE_KEYS];
            compact.pages(&hashes, &mut found);
            for (prefix, page) in batch.iter().zip(found) {
                let plain = (fences.partition_point(|f| f <= prefix) as u32).checked_sub(1);
                assert_eq!(page, plain, "{prefix:#x} in {fences:?}");
            }
        }
    }

    fn ascending(first: u32, gaps: &[u32]) -> Vec<u32> {
        let mut last = first;
        let step = |gap: &u32| {
            last = last.checked_add(*gap)?;
            Some(last)
        };
        std::iter::once(first).chain(gaps.iter().map_while(step)).collect()
    }

    proptest! {
        #[test]
        fn close_fences_are_found(
            first in any::<u32>(),
            gaps in prop::collection::vec(1u32..=0xffff, 0..3000),
            more in prop::collection::vec(any::<u32>(), 50),
        ) {
            agrees(&ascending(first, &gaps), true, &more);
        }

        #[test]
        fn fences_with_one_wide_gap_are_found(
            first in 0u32..1 << 30,
            gaps in prop::collection::vec(1u32..=0xffff, 1..200),
            at in any::<prop::sample::Index>(),
            more in prop::collection::vec(any::<u32>(), 50),
        ) {
            let mut gaps = gaps;
            let at = at.index(gaps.len());
            gaps[at] = 0x1_0000;
            agrees(&ascending(first, &gaps), false, &more);
        }

        #[test]
        fn any_fences_are_found(
            mut fences in prop::collection::vec(any::<u32>(), 0..100),
            more in prop::collection::vec(any::<u32>(), 50),
        ) {
            fences.sort_unstable();
            fences.dedup();
            let close = fences.windows(2).all(|w| w[1] - w[0] <= 0xffff);
            agrees(&fences, close, &more);
        }
    }

    #[test]
    fn extreme_fences_are_found() {
        for n in [1, 2, 15, 16, 17, 31, 32, 33] {
            for first in [0, 1, u32::MAX - (n - 1)] {
                agrees(&ascending(first, &vec![1; n as usize - 1]), true, &[]);
            }
            let spread: Vec<u32> = ascending(0, &vec![0xffff; n as usize - 1]);
            agrees(&spread, true, &[]);
        }
        agrees(&[], true, &[]);
        agrees(&[0, u32::MAX], false, &[1 << 31]);
        assert!(halves(&[1, 1]).is_none() && halves(&[2, 1]).is_none());
    }

    #[test]
    fn a_page_takes_18_bits_where_gaps_are_narrow() {
        let fences: Vec<u32> = (0..16_000).map(|i| i * 3000).collect();
        assert_eq!(
            halves(&fences).unwrap().bytes(),
            16_000 * 18 / 8 + 4 * 129,
            "and a directory of 128 entries"
        );
        let fences: Vec<u32> = (0..16_000).map(|i| i * 70_000).collect();
        assert_eq!(halves(&fences).unwrap().bytes(), 16_000 * 4);
    }
}
