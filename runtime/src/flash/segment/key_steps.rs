//! Pages of key steps: the ascending orders of a delta's rows, stored as differences. All
//! differences of a page have the same number of bits. Random 64-bit keys take some 6.4 bytes each,
//! and neighbouring keys of an index table one byte or less. FORMAT.md draws the bytes.

use crate::flash::segment::kind::PAYLOAD_BYTES;
use crate::io::page::{PageBytes, u64_at};
use crate::limits::PAGE_HEADER_BYTES;

/// Bytes of the payload before the steps: the first order, the bits of a step, and zeros.
const HEAD_BYTES: usize = 16;
/// Bits of the steps of a page.
const STEPS_BITS: usize = 8 * (PAYLOAD_BYTES - HEAD_BYTES);
/// Entries that fit in a page with steps of any size.
pub(super) const STEPS_PER_PAGE_MIN: usize = 1 + STEPS_BITS / 64;

/// Fills `payload` with the first of `orders`, which ascend strictly, as many as fit. Returns their
/// number.
pub(super) fn pack(orders: &[u64], payload: &mut [u8]) -> usize {
    // A page with one key has no step, but a reader accepts 1 to 64 bits only.
    let mut bits = 1;
    let count = 1 + orders
        .windows(2)
        .zip(1..)
        .take_while(|(pair, steps)| {
            let wider = bits.max(bits_of(pair[1] - pair[0]));
            let fits = steps * wider <= STEPS_BITS;
            bits = if fits { wider } else { bits };
            fits
        })
        .count();

    payload[..8].copy_from_slice(&orders[0].to_le_bytes());
    payload[8] = bits as u8;
    let words = payload[HEAD_BYTES..].chunks_exact_mut(8);
    let mut steps = orders[..count].windows(2).map(|pair| pair[1] - pair[0]);
    // 128 bits, because a step may begin in one word and end in the next.
    let (mut word, mut used) = (0u128, 0);
    for bytes in words {
        while used < 64 {
            let Some(step) = steps.next() else { break };
            word |= u128::from(step) << used;
            used += bits;
        }
        bytes.copy_from_slice(&(word as u64).to_le_bytes());
        (word, used) = (word >> 64, used.saturating_sub(64));
    }
    count
}

fn bits_of(step: u64) -> usize {
    (u64::BITS - step.leading_zeros()) as usize
}

/// Returns the most entries that `page` can hold with its stated number of bits a step; 0 if that
/// number is not 1 to 64.
pub(super) fn entries_max(page: &PageBytes) -> usize {
    match page[PAGE_HEADER_BYTES + 8] {
        bits @ 1..=64 => 1 + STEPS_BITS / usize::from(bits),
        _ => 0,
    }
}

/// Returns the orders in a page of key steps with at most [`entries_max`] entries.
pub(super) fn unpack(payload: &[u8], count: usize) -> impl Iterator<Item = u64> {
    let bits = usize::from(payload[8]);
    let mask = u64::MAX >> (64 - bits);
    let steps = &payload[HEAD_BYTES..];
    let step = move |number: usize| {
        let at = number * bits;
        let (word, shift) = (at / 64, at % 64);
        let low = u64_at(steps, 8 * word) >> shift;
        let is_split = shift + bits > 64;
        let high = if is_split { u64_at(steps, 8 * word + 8) << (64 - shift) } else { 0 };
        (low | high) & mask
    };

    let first = u64_at(payload, 0);
    (0..count).scan(first, move |order, number| {
        // Wrapping, because a page may hold any steps. The install compares each order with that of
        // its row.
        *order = if number == 0 { first } else { order.wrapping_add(step(number - 1)) };
        Some(*order)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Packs `orders` into pages and unpacks them. Returns the orders and the number of pages.
    fn through_pages(orders: &[u64]) -> (Vec<u64>, usize) {
        let (mut rest, mut unpacked, mut pages) = (orders, Vec::new(), 0);
        while !rest.is_empty() {
            let mut page = [0; crate::limits::PAGE_BYTES];
            let payload = &mut page[PAGE_HEADER_BYTES..];
            let count = pack(rest, payload);
            assert!(count >= rest.len().min(STEPS_PER_PAGE_MIN) && count <= entries_max(&page));
            unpacked.extend(unpack(&page[PAGE_HEADER_BYTES..], count));
            rest = &rest[count..];
            pages += 1;
        }
        (unpacked, pages)
    }

    proptest! {
        #[test]
        fn pages_return_the_orders(
            steps in prop::collection::vec((0u32..64, any::<u64>()), 1..3000),
            first in any::<u64>(),
        ) {
            let mut orders = vec![first];
            for (shift, step) in steps {
                let last = orders[orders.len() - 1];
                orders.extend(last.checked_add((step >> shift).max(1)));
            }
            prop_assert_eq!(through_pages(&orders).0, orders);
        }
    }

    #[test]
    fn neighbouring_keys_and_the_widest_steps_fit_as_stated() {
        let neighbours: Vec<u64> = (7..7 + 40_000).collect();
        assert_eq!(through_pages(&neighbours), (neighbours, 2));
        assert_eq!(through_pages(&[0, u64::MAX]), (vec![0, u64::MAX], 1));
        assert_eq!(through_pages(&[u64::MAX]), (vec![u64::MAX], 1));
    }

    #[test]
    fn a_page_with_impossible_bits_holds_nothing() {
        let mut page = [0; crate::limits::PAGE_BYTES];
        for bits in [0, 65, 255] {
            page[PAGE_HEADER_BYTES + 8] = bits;
            assert_eq!(entries_max(&page), 0);
        }
    }
}
