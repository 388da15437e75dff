//! The eviction policy of a full set: S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache
//! Eviction", SOSP 2023) inside one set. A new row starts on probation. A row that is used on
//! probation moves to the main part, which is a CLOCK. The set keeps the fingerprint of a row that
//! left probation unused (a ghost). Such a row enters the main part when it is inserted again. A
//! scan therefore replaces only rows on probation. This file never reads or writes a row.

/// Slots of a set.
pub(crate) const WAYS: usize = if cfg!(loom) { 2 } else { 14 };

/// If a full set has at least so many rows on probation, one of them is evicted.
const PROBATION_WAYS: u32 = 2;
/// Number of fingerprints of rows that left probation, for each set. More of them, of fewer bits
/// each, would take new rows for rows that return.
pub(crate) const GHOSTS: usize = 8;
/// The largest use count of a way.
const USES_MAX: u32 = 3;
/// The smallest use count with which a row leaves probation for the main part.
const USES_TO_STAY: u32 = 1;

/// The state of the eviction policy in one set.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ways {
    /// The use counts, two bits a way.
    pub uses: u32,
    /// One bit a way: set while the row is on probation.
    pub probation: u16,
    /// The way at which the CLOCK of the main part continues.
    pub main_hand: u8,
    /// The way at which the FIFO of the probation part continues.
    pub probation_hand: u8,
    /// Fingerprints, 0 for none.
    pub ghosts: [u16; GHOSTS],
    /// The ghost to be replaced next.
    pub ghost_hand: u8,
}

/// Returns `uses` after one more use of `way`, or `uses` itself if the way's count is full.
#[inline(always)]
pub(crate) fn used(uses: u32, way: usize) -> u32 {
    let shift = 2 * way;
    if (uses >> shift) & 3 < USES_MAX { uses + (1 << shift) } else { uses }
}

impl Ways {
    fn uses_of(&self, way: usize) -> u32 {
        (self.uses >> (2 * way)) & 3
    }

    fn set_uses(&mut self, way: usize, uses: u32) {
        self.uses = self.uses & !(3 << (2 * way)) | uses << (2 * way);
    }

    /// Assigns `way` to the row with this fingerprint. The row enters the main part if it is a
    /// ghost; otherwise it starts on probation.
    pub fn assign(&mut self, way: usize, fingerprint: u16) {
        let ghost = self.ghosts.iter_mut().find(|g| **g == fingerprint);
        let returns = ghost.is_some();
        if let Some(ghost) = ghost {
            *ghost = 0;
        }
        self.set_uses(way, 0);
        self.probation = self.probation & !(1 << way) | u16::from(!returns) << way;
    }

    /// Chooses the way of a full set whose row is evicted. `fingerprint_of` returns the fingerprint
    /// of the row in a way.
    pub fn evict(&mut self, fingerprint_of: impl Fn(usize) -> u16) -> usize {
        // The loop ends: each turn takes a use from a row, or a row from probation.
        loop {
            let probation = self.probation.count_ones();
            let way = if probation >= PROBATION_WAYS || probation as usize == WAYS {
                let way = next(&mut self.probation_hand, self.probation);
                if self.uses_of(way) >= USES_TO_STAY {
                    self.probation &= !(1 << way);
                    // The uses on probation have earned the row its place. In the main part it must
                    // be used again to stay.
                    self.set_uses(way, 0);
                    continue;
                }

                self.ghosts[usize::from(self.ghost_hand)] = fingerprint_of(way);
                self.ghost_hand = (self.ghost_hand + 1) % GHOSTS as u8;
                way
            } else {
                let way = next(&mut self.main_hand, !self.probation);
                match self.uses_of(way) {
                    0 => way,
                    uses => {
                        self.set_uses(way, uses - 1);
                        continue;
                    }
                }
            };
            return way;
        }
    }
}

/// Returns the next way of `part` from `hand` on, and moves the hand past that way.
fn next(hand: &mut u8, part: u16) -> usize {
    let from = usize::from(*hand);
    // `part` has a way: `evict` chooses a part that is not empty.
    let way = (from..from + WAYS).map(|w| w % WAYS).find(|w| part >> w & 1 == 1).unwrap_or(from);
    *hand = ((way + 1) % WAYS) as u8;
    way
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// One full set; the fingerprint of a row is its number.
    struct Set {
        ways: Ways,
        rows: [u16; WAYS],
    }

    impl Set {
        /// A set with the rows 1 to `WAYS`, all on probation.
        fn full() -> Self {
            let rows = std::array::from_fn(|way| way as u16 + 1);
            let mut set = Self { ways: Ways::default(), rows };
            (0..WAYS).for_each(|way| set.ways.assign(way, rows[way]));
            set
        }

        /// Inserts `row` and returns the row that leaves.
        fn insert(&mut self, row: u16) -> u16 {
            let way = self.ways.evict(|way| self.rows[way]);
            self.ways.assign(way, row);
            std::mem::replace(&mut self.rows[way], row)
        }
    }

    #[test]
    fn a_scan_leaves_all_used_rows_but_two() {
        let mut set = Set::full();
        // One use of every row.
        set.ways.uses = 0x0555_5555;
        (100..200).for_each(|row| assert_ne!(set.insert(row), row));
        assert_eq!(set.rows.iter().filter(|row| **row < 100).count(), WAYS - 2);
    }

    #[test]
    fn rows_that_nobody_used_leave_in_the_order_of_their_arrival() {
        let mut set = Set::full();
        assert!((1..100).all(|row| set.insert(row + WAYS as u16) == row));
    }

    #[test]
    fn a_row_that_returns_outlives_a_scan() {
        let mut set = Set::full();
        assert_eq!((set.insert(100), set.insert(1)), (1, 2));
        assert!((101..200).all(|row| set.insert(row) != 1));
    }

    #[test]
    fn the_row_of_the_main_part_that_was_used_least_leaves() {
        let mut set = Set::full();
        set.ways.probation = 1;
        // Two uses of every row but the seventh.
        set.ways.uses = 0x0aaa_aaaa;
        set.ways.set_uses(6, 1);
        assert_eq!(set.insert(100), 7);
    }

    #[test]
    fn uses_on_probation_count_no_more_in_the_main_part() {
        let mut set = Set::full();
        // The first two rows are on probation, each with one use.
        (set.ways.probation, set.ways.uses) = (0b11, 0b0101);
        assert_eq!(set.insert(100), 1);
    }

    #[test]
    fn the_use_count_of_a_row_has_an_end() {
        assert_eq!((0..100).fold(0, |uses, _| used(uses, 0)), USES_MAX);
    }
}
