//! The overlay: a map from a key to the page with its newest row. It has each key that a delta
//! changes or deletes. The base has every other key. The map compares whole 64-bit orders, so it is
//! exact. It is built from key pages at open and never changes afterwards.

use crate::limits::{DELTA_PAGES_MAX, DELTAS_MAX};
use hatchback_kernels::simd::prefetch;

const EMPTY: u32 = u32::MAX;
const DELETED: u32 = u32::MAX - 1;

/// The location of the newest version of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Newest {
    /// On this page of a delta. Deltas count from the oldest.
    Delta(usize, u32),
    /// A delta deleted the key.
    Deleted,
}

/// An open-addressing map from key orders to locations. At most four fifths of the slots are in
/// use.
#[derive(Default)]
pub struct Overlay {
    orders: Box<[u64]>,
    locations: Box<[u32]>,
    count: usize,
}

impl Overlay {
    /// Returns an empty overlay with room for `keys` keys. A key counts once for each segment that
    /// has it.
    pub fn with_capacity(keys: u64) -> Self {
        if keys == 0 {
            return Self::default();
        }
        let slots = (keys as usize + keys as usize / 4 + 1).max(8);
        Self { orders: vec![0; slots].into(), locations: vec![EMPTY; slots].into(), count: 0 }
    }

    /// Returns the bytes of memory.
    pub fn bytes(&self) -> usize {
        12 * self.orders.len()
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the slot at which the search for `order` starts.
    #[inline]
    fn first_slot(&self, order: u64) -> usize {
        // Orders of index tables are small and dense; a multiplication spreads them.
        let hash = order.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.orders.len() as u128) >> 64) as usize
    }

    /// Prefetches the memory that `get` will read.
    #[inline]
    pub fn prefetch(&self, order: u64) {
        let slot = self.first_slot(order);
        self.orders.get(slot).inspect(|order| prefetch(*order));
        self.locations.get(slot).inspect(|location| prefetch(*location));
    }

    /// Returns the slot of `order`, or the empty slot where it belongs.
    #[inline]
    fn slot(&self, order: u64) -> usize {
        let mut slot = self.first_slot(order);
        // The loop ends, because a fifth of the slots is always empty.
        while self.locations[slot] != EMPTY && self.orders[slot] != order {
            slot = if slot + 1 == self.orders.len() { 0 } else { slot + 1 };
        }
        slot
    }

    /// Records the newest version of a key and returns the version recorded before. The caller adds
    /// the deltas from the oldest to the newest.
    pub fn set(&mut self, order: u64, newest: Newest) -> Option<Newest> {
        assert!(self.count < self.orders.len(), "`with_capacity` leaves free slots");
        let slot = self.slot(order);
        let before = unpack(self.locations[slot]);
        self.count += usize::from(self.locations[slot] == EMPTY);
        self.orders[slot] = order;
        self.locations[slot] = match newest {
            Newest::Delta(delta, page) => {
                assert!(delta < DELTAS_MAX && page < DELTA_PAGES_MAX, "the table checked both");
                (delta as u32) << 24 | page
            }
            Newest::Deleted => DELETED,
        };
        before
    }

    /// Returns an overlay with the keys of this one and of `newer`. For a key of both it has the
    /// location from `newer`.
    pub fn with(&self, newer: &Self) -> Self {
        let mut both = Self::with_capacity((self.count + newer.count) as u64);
        // The newer one comes second, so its locations win.
        for overlay in [self, newer] {
            for (order, location) in overlay.orders.iter().zip(&overlay.locations) {
                if let Some(newest) = unpack(*location) {
                    both.set(*order, newest);
                }
            }
        }
        both
    }

    /// Returns the location of the newest version of the key with this order; `None` if this
    /// overlay does not have the key.
    #[inline]
    pub fn get(&self, order: u64) -> Option<Newest> {
        if self.count == 0 { None } else { unpack(self.locations[self.slot(order)]) }
    }
}

#[inline]
fn unpack(location: u32) -> Option<Newest> {
    let (number, page) = (location >> 24, location & (DELTA_PAGES_MAX - 1));
    match location {
        EMPTY => None,
        DELETED => Some(Newest::Deleted),
        _ => Some(Newest::Delta(number as usize, page)),
    }
}

const _: () = assert!(
    DELTAS_MAX < (DELETED >> 24) as usize,
    "a delta's number fits beside the page and is below the marks"
);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn agrees_with_a_map(
            sets in prop::collection::vec(
                (0u64..200, 0usize..5, 0u32..1 << 24, any::<bool>()),
                0..300,
            ),
        ) {
            let mut overlay = Overlay::with_capacity(sets.len() as u64);
            let mut model = HashMap::new();
            for (order, delta, page, delete) in sets {
                let order = if delete { order << 50 } else { order };
                let newest = match delta {
                    _ if delete => Newest::Deleted,
                    _ => Newest::Delta(DELTAS_MAX - 1 - delta, page),
                };
                prop_assert_eq!(overlay.set(order, newest), model.insert(order, newest));
            }
            prop_assert_eq!(overlay.len(), model.len());
            for order in (0..200).chain((0..200).map(|o| o << 50)) {
                prop_assert_eq!(overlay.get(order), model.get(&order).copied());
            }
        }
    }

    #[test]
    fn a_joined_overlay_has_the_newer_change_of_each_key() {
        let [mut older, mut newer] = [2, 2].map(Overlay::with_capacity);
        older.set(1, Newest::Delta(0, 5));
        older.set(2, Newest::Delta(0, 6));
        newer.set(2, Newest::Deleted);
        newer.set(3, Newest::Delta(1, 7));
        let joined = older.with(&newer);
        let expected =
            [Some(Newest::Delta(0, 5)), Some(Newest::Deleted), Some(Newest::Delta(1, 7)), None];
        assert_eq!([1, 2, 3, 4].map(|order| joined.get(order)), expected);
    }
}
