//! Orders the rows of a clustered segment so that rows of the same requests share pages. It fills
//! page after page. The first key of a page is the most used one left. Each further key is the one
//! that shares the most requests with the page. Never reads a row.

use std::cmp::Reverse;
use std::collections::HashMap;

/// Returns `keys` in the order of a clustered segment with `per_page` rows a page. `keys` are in
/// descending order of use, and `requests` has the keys of each recorded request. Without requests
/// the order is unchanged.
pub fn by_co_access<'a>(
    keys: &[u64],
    requests: impl Iterator<Item = &'a [u64]>,
    per_page: usize,
) -> Vec<u64> {
    let mut together = Together::new(keys, requests);
    let (mut order, mut first) = (Vec::with_capacity(keys.len()), 0);
    while order.len() < keys.len() {
        together.begin_page();
        for _ in 0..per_page.min(keys.len() - order.len()) {
            while together.is_taken[first] && first + 1 < keys.len() {
                first += 1;
            }
            let next = together.nearest().unwrap_or(first);
            together.take(next);
            order.push(keys[next]);
        }
    }
    order
}

/// The keys by rank (0 is the most used), and the requests in which they occur together.
struct Together {
    /// For each request its ranks, each once.
    requests: Vec<Vec<u32>>,
    /// For each rank its requests.
    requests_of: Vec<Vec<u32>>,
    is_taken: Vec<bool>,
    /// For each request, whether it contains a key of the page.
    on_page: Vec<bool>,
    on_page_list: Vec<u32>,
    /// For each rank, the number of requests of the page that contain it; and the ranks for which
    /// this number is not 0.
    shared: Vec<u32>,
    sharing: Vec<u32>,
}

impl Together {
    fn new<'a>(keys: &[u64], requests: impl Iterator<Item = &'a [u64]>) -> Self {
        let ranks: HashMap<u64, u32> =
            keys.iter().zip(0..).map(|(key, rank)| (*key, rank)).collect();

        let mut found = Vec::new();
        let mut requests_of = vec![Vec::new(); keys.len()];
        for request in requests {
            let mut wanted: Vec<u32> =
                request.iter().filter_map(|key| ranks.get(key).copied()).collect();
            wanted.sort_unstable();
            wanted.dedup();
            if wanted.len() > 1 {
                wanted.iter().for_each(|rank| requests_of[*rank as usize].push(found.len() as u32));
                found.push(wanted);
            }
        }

        Self {
            is_taken: vec![false; keys.len()],
            on_page: vec![false; found.len()],
            on_page_list: Vec::new(),
            shared: vec![0; keys.len()],
            sharing: Vec::new(),
            requests: found,
            requests_of,
        }
    }

    fn begin_page(&mut self) {
        self.on_page_list.drain(..).for_each(|request| self.on_page[request as usize] = false);
        self.sharing.drain(..).for_each(|rank| self.shared[rank as usize] = 0);
    }

    /// Returns the rank that shares the most requests with the page; of several, the most used one.
    fn nearest(&mut self) -> Option<usize> {
        let Self { sharing, is_taken, shared, .. } = self;
        sharing.retain(|rank| !is_taken[*rank as usize]);
        sharing.iter().map(|rank| *rank as usize).max_by_key(|rank| (shared[*rank], Reverse(*rank)))
    }

    fn take(&mut self, rank: usize) {
        self.is_taken[rank] = true;
        // `begin_page` resets these counts.
        for &request in &self.requests_of[rank] {
            if std::mem::replace(&mut self.on_page[request as usize], true) {
                continue;
            }
            self.on_page_list.push(request);
            for &other in &self.requests[request as usize] {
                if !self.is_taken[other as usize] {
                    if self.shared[other as usize] == 0 {
                        self.sharing.push(other);
                    }
                    self.shared[other as usize] += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_of_the_same_requests_share_pages() {
        // Two groups of four keys each, which alternate in popularity.
        let keys = [10, 20, 11, 21, 12, 22, 13, 23];
        let requests: Vec<Vec<u64>> = (0..6)
            .map(|i| if i % 2 == 0 { vec![10, 11, 12, 13, 999] } else { vec![20, 21, 22, 23] })
            .collect();
        let order = by_co_access(&keys, requests.iter().map(Vec::as_slice), 4);
        assert_eq!(order, [10, 11, 12, 13, 20, 21, 22, 23]);
        assert_eq!(by_co_access(&keys, std::iter::empty(), 4), keys);
    }

    #[test]
    fn what_shares_with_any_key_of_the_page_comes_before_what_is_popular() {
        let requests: [&[u64]; 3] = [&[1, 5], &[5, 9], &[5, 9]];
        assert_eq!(by_co_access(&[1, 2, 5, 9], requests.into_iter(), 3), [1, 5, 9, 2]);
    }

    proptest! {
        #[test]
        fn every_key_is_clustered_once(
            n in 0u64..60,
            per_page in 1usize..9,
            requests in prop::collection::vec(prop::collection::vec(0u64..80, 0..8), 0..30),
        ) {
            let keys: Vec<u64> = (0..n).map(|k| k * 7 % 61).collect();
            let mut order = by_co_access(&keys, requests.iter().map(Vec::as_slice), per_page);
            let mut sorted = keys.clone();
            sorted.sort_unstable();
            order.sort_unstable();
            prop_assert_eq!(order, sorted);
        }
    }
}
