//! The rows that requests use most, by the counts of the windows. The backlog keeps the traffic of
//! each table's hottest keys. A refresh makes new hot lists from it, so that a car that starts
//! later fills its cache with today's hot rows. Never reads a row.

use crate::pack::hot::is_outdated;
use crate::window::{Window, WindowError};
use anyhow::Result;
use hatchback::flash::Flash;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// Share of a key's traffic that stays from window to window.
const HOT_TRAFFIC_KEPT: f32 = 0.9;
/// Keys whose traffic the backlog keeps, for each key of the fleet's hot list.
const KEPT_PER_KEY: usize = 2;
/// The hot lists take at most this part of a budget.
const BUDGET_SHARE: u64 = 4;

/// The traffic of the hottest keys of one table, hottest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HotTraffic {
    /// The keys.
    pub keys: Vec<u64>,
    /// The lookups of each in a window, on average.
    pub traffic: Vec<f32>,
}

impl HotTraffic {
    /// Adds the traffic that the backlog kept of the table `name` to what `windows` counted. Keeps
    /// twice as many keys as the fleet's hot list has, and none for a model without hot lists.
    ///
    /// # Errors
    /// A column cannot be read.
    pub fn of_table(
        name: &str,
        backlog: Option<&Window>,
        windows: &[Window],
        listed: usize,
    ) -> Result<Self, WindowError> {
        let mut all: HashMap<u64, f32> = HashMap::new();
        if listed == 0 {
            return Ok(Self::default());
        }
        if let Some(backlog) = backlog
            && let Some(table) = backlog.table(name)
            && let Some(traffic) = table.columns.hot_traffic
        {
            let keys = backlog.words(table.columns.hot)?;
            all.extend(keys.into_iter().zip(backlog.floats(traffic)?));
        }

        for window in windows {
            all.values_mut().for_each(|traffic| *traffic *= HOT_TRAFFIC_KEPT);
            let Some(table) = window.table(name) else { continue };
            let columns = &table.columns;
            let traffic = columns.traffic.map(|column| window.floats(column)).transpose()?;
            for (row, key) in window.words(columns.keys)?.into_iter().enumerate() {
                *all.entry(key).or_default() += traffic.as_ref().map_or(1.0, |of| of[row]);
            }
            for key in window.words(columns.deleted)? {
                all.remove(&key);
            }
        }

        let mut sorted: Vec<(u64, f32)> = all.into_iter().collect();
        sorted.sort_unstable_by_key(|(key, traffic)| (Reverse(traffic.to_bits()), *key));
        sorted.truncate(KEPT_PER_KEY * listed);
        let (keys, traffic) = sorted.into_iter().unzip();
        Ok(Self { keys, traffic })
    }

    /// Returns a hot list of the same length as `old`: the keys with the most traffic, then keys of
    /// `old` in their order.
    fn list(&self, old: &[u64]) -> Vec<u64> {
        let mut taken = HashSet::new();
        let keys = self.keys.iter().chain(old).copied();
        keys.filter(|key| taken.insert(*key)).take(old.len()).collect()
    }
}

/// Returns the new hot list of each table whose list has changed enough. Returns none if the lists
/// would take too much of the budget.
///
/// # Errors
/// A hot list of the fleet cannot be read.
pub fn new_lists(
    fleet: &Flash,
    tables: &[&HotTraffic],
    budget: Option<u64>,
) -> Result<Vec<Option<Vec<u64>>>> {
    let mut lists = Vec::new();
    for (number, hot) in tables.iter().enumerate() {
        let old = fleet.hot_keys(number)?;
        let new = hot.list(&old);
        lists.push(Some(new).filter(|new| is_outdated(&old, new)));
    }

    let bytes: u64 = lists.iter().flatten().map(|list| 8 * list.len() as u64).sum();
    if budget.is_some_and(|budget| bytes > budget / BUDGET_SHARE) {
        lists.iter_mut().for_each(|list| *list = None);
    }
    Ok(lists)
}

/// Returns the hot keys of a table, as orders; none if they are not needed.
///
/// # Errors
/// The hot list cannot be read.
pub fn hot_orders(fleet: &Flash, number: usize, is_needed: bool) -> Result<HashSet<u64>> {
    if !is_needed {
        return Ok(HashSet::new());
    }
    let keys = fleet.manifest().schema.tables[number].keys;
    Ok(fleet.hot_keys(number)?.into_iter().map(|key| keys.order(key)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_list_has_the_busy_keys_first_and_no_key_twice() {
        let hot = HotTraffic { keys: vec![9, 3], traffic: vec![5.0, 2.0] };
        assert_eq!(hot.list(&[1, 2, 3, 4]), [9, 3, 1, 2]);
        assert_eq!(HotTraffic::default().list(&[4, 2]), [4, 2]);
        assert_eq!(hot.list(&[]), [0; 0]);
    }
}
