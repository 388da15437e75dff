//! The hot list of a table: its most used keys, with which a cache is filled at start. Decides
//! whether a delta needs a new list. Never reads values.

use crate::import::RowSource;
use anyhow::Result;
use hatchback::limits::HOT_KEYS_MAX;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A delta brings a new hot list if the hottest keys changed. Compared are the first 256 keys, 512
/// keys and so on to the whole list...
const HOT_COMPARED_MIN: usize = 256;
/// ...and more than one key in ten of one of these must be missing from as many of the parent's.
const HOT_CHANGED_ONE_IN: usize = 10;

/// Returns the most used keys, most used first; none if the source has no counts.
pub(crate) fn hot_keys(source: &dyn RowSource) -> Result<Vec<u64>> {
    let Some(counts) = source.counts()? else { return Ok(Vec::new()) };
    let (mut heap, mut at) = (BinaryHeap::new(), 0);
    source.each_block(&mut |keys, _| {
        for (&key, &count) in keys.iter().zip(&counts[at..]) {
            if count > 0 {
                heap.push(Reverse((count, Reverse(key))));
            }
            if heap.len() > HOT_KEYS_MAX {
                heap.pop();
            }
        }
        at += keys.len();
        Ok(())
    })?;

    // `Reverse` sorts the most used to the front.
    Ok(heap.into_sorted_vec().iter().map(|Reverse((_, Reverse(key)))| *key).collect())
}

/// Returns whether a cache of some size that is filled from the list `old` lacks too many of the
/// keys of `new`. A list is written whole and can be far larger than the rest of its delta.
pub(crate) fn is_news(old: &[u64], new: &[u64]) -> bool {
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
    fn a_hot_list_is_news_where_a_cache_of_some_size_would_miss_a_tenth_of_it() {
        let old: Vec<u64> = (0..10_000).collect();
        let with = |changed: std::ops::Range<usize>| {
            let mut new = old.clone();
            changed.for_each(|at| new[at] += 1_000_000);
            new
        };
        assert!(!is_news(&old, &old) && !is_news(&old, &[]) && !is_news(&[], &[]));
        assert!(is_news(&[], &old));
        assert!(is_news(&old, &with(0..26)) && !is_news(&old, &with(0..25)), "of the hottest 256");
        assert!(
            is_news(&old, &with(8_000..9_001)) && !is_news(&old, &with(9_000..10_000)),
            "of all"
        );
        let mut turned = old.clone();
        turned.rotate_left(20);
        assert!(!is_news(&old, &turned), "nearly the same order");
        turned.reverse();
        assert!(is_news(&old, &turned), "the coldest first");
    }
}
