//! Which row of a full set gives way: S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache
//! Eviction", SOSP 2023) inside one set. A new row is on probation; used again, it moves to the
//! main part, which is a CLOCK; a row that left probation unused is remembered by its tag and goes
//! to the main part when it comes back. So a scan passes through the probation ways and leaves the
//! rest alone. Never touches a row.

/// Slots of a set.
pub(crate) const WAYS: usize = if cfg!(loom) { 2 } else { 14 };

/// Rows of a full set that are on probation, at most, before one of them gives way.
const PROBATION_WAYS: u32 = 2;
/// Tags of rows that left probation, for each set.
pub(crate) const GHOSTS: usize = 16;
/// Uses that a way can collect.
const USES_MAX: u32 = 3;
/// Uses on probation that let a row stay.
const USES_TO_STAY: u32 = 1;

/// What the policy knows of one set.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ways {
    /// Two bits a way.
    pub uses: u32,
    /// One bit a way.
    pub probation: u16,
    /// Where the CLOCK of the main part goes on.
    pub main_hand: u8,
    /// Where the FIFO of the probation part goes on.
    pub probation_hand: u8,
    /// Tags, 0 for none.
    pub ghosts: [u8; GHOSTS],
    /// The ghost to be replaced next.
    pub ghost_hand: u8,
}

/// `uses` after one more use of `way`; the same word if it has enough.
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

    /// Takes `way` for the row with this tag.
    pub fn place(&mut self, way: usize, tag: u8) {
        let known = self.ghosts.iter_mut().find(|g| **g == tag);
        let returns = known.is_some();
        if let Some(ghost) = known {
            *ghost = 0;
        }
        self.set_uses(way, 0);
        self.probation = self.probation & !(1 << way) | u16::from(!returns) << way;
    }

    /// Makes room in a full set; `tag_of` tells the tag of the row in a way.
    pub fn evict(&mut self, tag_of: impl Fn(usize) -> u8) -> usize {
        // Every step takes a use from a row or a row from probation, so this ends.
        loop {
            let probation = self.probation.count_ones();
            let way = if probation >= PROBATION_WAYS || probation as usize == WAYS {
                let way = next(&mut self.probation_hand, self.probation);
                if self.uses_of(way) >= USES_TO_STAY {
                    self.probation &= !(1 << way);
                    self.set_uses(way, 0);
                    continue;
                }
                self.ghosts[usize::from(self.ghost_hand)] = tag_of(way);
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

/// The next way from `hand` on that is of the part; leaves the hand behind it.
fn next(hand: &mut u8, part: u16) -> usize {
    let from = usize::from(*hand);
    let way = (from..from + WAYS).map(|w| w % WAYS).find(|w| part >> w & 1 == 1).unwrap_or(from);
    *hand = ((way + 1) % WAYS) as u8;
    way
}
