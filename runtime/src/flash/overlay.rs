//! The overlay: which keys of a table are not to be looked for in its base: those that deltas hold
//! or delete, and those that the placed segment repeats. Exact, by whole 64-bit orders. Built at
//! open from key pages; never changes afterwards.

use hatchback_kernels::simd::prefetch;

/// Deltas over one base at most; compaction merges them long before.
pub const DELTAS_MAX: usize = 64;
/// Pages of one delta or placed segment at most.
pub const DELTA_PAGES_MAX: u32 = 1 << 24;

/// In the place of a delta's number.
const PLACED: u32 = 254;
const EMPTY: u32 = u32::MAX;
const DELETED: u32 = u32::MAX - 1;

/// Where the newest version of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Newest {
    /// In a delta, counted from the oldest, on this page.
    Delta(usize, u32),
    /// In the base, and on this page of the placed segment.
    Placed(u32),
    /// Nowhere: it was deleted.
    Deleted,
}

/// An open-addressing map from key orders to places, filled to four fifths at most.
#[derive(Default)]
pub struct Overlay {
    orders: Box<[u64]>,
    places: Box<[u32]>,
    count: usize,
}

impl Overlay {
    /// Room for `keys` entries, counting a key once for each delta that has it.
    pub fn with_capacity(keys: u64) -> Self {
        if keys == 0 {
            return Self::default();
        }
        let slots = (keys as usize + keys as usize / 4 + 1).max(8);
        Self { orders: vec![0; slots].into(), places: vec![EMPTY; slots].into(), count: 0 }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        12 * self.orders.len()
    }

    /// Keys in it.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Where `order` is looked for first.
    #[inline]
    fn first_slot(&self, order: u64) -> usize {
        // Orders of index tables are small and dense; a multiplication spreads them.
        let hash = order.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.orders.len() as u128) >> 64) as usize
    }

    /// Asks for the memory that `get` will read.
    #[inline]
    pub fn prefetch(&self, order: u64) {
        let slot = self.first_slot(order);
        self.orders.get(slot).inspect(|order| prefetch(*order));
        self.places.get(slot).inspect(|place| prefetch(*place));
    }

    /// The slot that holds `order`, or the empty one where it belongs.
    #[inline]
    fn slot(&self, order: u64) -> usize {
        let mut slot = self.first_slot(order);
        while self.places[slot] != EMPTY && self.orders[slot] != order {
            slot = if slot + 1 == self.orders.len() { 0 } else { slot + 1 };
        }
        slot
    }

    /// Records the newest version so far of a key; call for the placed segment, then from the
    /// oldest delta to the newest. Returns what was known before.
    pub fn set(&mut self, order: u64, newest: Newest) -> Option<Newest> {
        let slot = self.slot(order);
        let before = unpack(self.places[slot]);
        self.count += usize::from(self.places[slot] == EMPTY);
        self.orders[slot] = order;
        self.places[slot] = match newest {
            Newest::Delta(delta, page) => (delta as u32) << 24 | page,
            Newest::Placed(page) => PLACED << 24 | page,
            Newest::Deleted => DELETED,
        };
        before
    }

    /// Where the newest version of the key with this order is; `None` if only the base has it.
    #[inline]
    pub fn get(&self, order: u64) -> Option<Newest> {
        if self.count == 0 { None } else { unpack(self.places[self.slot(order)]) }
    }
}

#[inline]
fn unpack(place: u32) -> Option<Newest> {
    let (number, page) = (place >> 24, place & (DELTA_PAGES_MAX - 1));
    match place {
        EMPTY => None,
        DELETED => Some(Newest::Deleted),
        _ if number == PLACED => Some(Newest::Placed(page)),
        _ => Some(Newest::Delta(number as usize, page)),
    }
}

const _: () = assert!(
    DELTAS_MAX < PLACED as usize,
    "a delta's number fits beside the page and below the marks"
);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn agrees_with_a_map(sets in prop::collection::vec((0u64..200, 0usize..5, 0u32..1 << 24, any::<bool>()), 0..300)) {
            let mut overlay = Overlay::with_capacity(sets.len() as u64);
            let mut model = HashMap::new();
            for (order, delta, page, delete) in sets {
                let order = if delete { order << 50 } else { order };
                let newest = match delta {
                    _ if delete => Newest::Deleted,
                    0 => Newest::Placed(page),
                    _ => Newest::Delta(DELTAS_MAX - delta, page),
                };
                prop_assert_eq!(overlay.set(order, newest), model.insert(order, newest));
            }
            prop_assert_eq!(overlay.len(), model.len());
            for order in (0..200).chain((0..200).map(|o| o << 50)) {
                prop_assert_eq!(overlay.get(order), model.get(&order).copied());
            }
        }
    }
}
