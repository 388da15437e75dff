//! The hot list of a table: its most used keys, with which a cache is filled at start. Decides
//! whether a delta needs a new list. Never reads values.

use crate::import::RowSource;
use anyhow::Result;
use hatchback::limits::HOT_KEYS_MAX;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A delta brings a new hot list if the hottest keys changed. The first 256 keys of both lists are
/// compared, then the first 512, and so on up to the whole list.
const HOT_COMPARED_MIN: usize = 256;
/// The list is new if in one comparison more than one key in ten is missing from the parent's list.
const HOT_CHANGED_ONE_IN: usize = 10;

/// The most used of the keys that were offered, with their counts.
#[derive(Default)]
pub(crate) struct HotKeys {
    /// The least used of these keys is on top: its count, then the key. Of equal counts the lower
    /// key counts as more used.
    heap: BinaryHeap<Reverse<(u64, Reverse<u64>)>>,
}

impl HotKeys {
    /// Returns the most used keys of a source; none if the source has no counts.
    ///
    /// # Errors
    /// The source cannot be read.
    pub(crate) fn of(source: &dyn RowSource) -> Result<Self> {
        let mut hot = Self::default();
        let Some(counts) = source.counts()? else { return Ok(hot) };
        let mut at = 0;
        source.each_block(&mut |keys, _| {
            keys.iter().zip(&counts[at..]).for_each(|(key, count)| hot.offer(*key, *count));
            at += keys.len();
            Ok(())
        })?;
        Ok(hot)
    }

    fn offer(&mut self, key: u64, count: u64) {
        if count > 0 {
            self.heap.push(Reverse((count, Reverse(key))));
        }
        if self.heap.len() > HOT_KEYS_MAX {
            self.heap.pop();
        }
    }

    /// Returns the keys, most used first.
    pub(crate) fn into_keys(self) -> Vec<u64> {
        // `Reverse` sorts the most used to the front.
        self.heap.into_sorted_vec().iter().map(|Reverse((_, Reverse(key)))| *key).collect()
    }
}

/// Returns whether the hot list `old` is outdated: a cache of some size that is filled from it
/// lacks too many of the hottest keys of `new`. Otherwise a delta brings no list, which can be far
/// larger than the rest of the delta.
pub(crate) fn is_outdated(old: &[u64], new: &[u64]) -> bool {
    let rank: HashMap<u64, usize> =
        old.iter().enumerate().map(|(rank, key)| (*key, rank)).collect();
    let sizes = (HOT_COMPARED_MIN.ilog2()..usize::BITS).map(|bits| 1 << bits);
    sizes.take_while(|size| *size < new.len()).chain([new.len()]).any(|size| {
        let missing = |key: &&u64| rank.get(key).is_none_or(|rank| *rank >= size);
        new[..size].iter().filter(missing).count() > size / HOT_CHANGED_ONE_IN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hot_list_is_outdated_where_a_cache_of_some_size_would_miss_a_tenth_of_it() {
        let old: Vec<u64> = (0..10_000).collect();
        let with = |changed: std::ops::Range<usize>| {
            let mut new = old.clone();
            changed.for_each(|at| new[at] += 1_000_000);
            new
        };
        assert!(!is_outdated(&old, &old) && !is_outdated(&old, &[]) && !is_outdated(&[], &[]));
        assert!(is_outdated(&[], &old));
        assert!(
            is_outdated(&old, &with(0..26)) && !is_outdated(&old, &with(0..25)),
            "of the hottest 256"
        );
        assert!(
            is_outdated(&old, &with(8_000..9_001)) && !is_outdated(&old, &with(9_000..10_000)),
            "of all"
        );
        let mut turned = old.clone();
        turned.rotate_left(20);
        assert!(!is_outdated(&old, &turned), "nearly the same order");
        turned.reverse();
        assert!(is_outdated(&old, &turned), "the coldest first");
    }
}
