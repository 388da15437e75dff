//! Chooses which candidates a delta brings within a budget of bytes. New rows of index tables come
//! first, without a gap, and at a refresh the hot rows. Then a share of the budget goes to the
//! changes that wait longest, so that none waits for ever. The rest goes to the changes with the
//! largest squared distance times traffic per byte. That value is the squared error that the
//! fleet's lookups sum up to. Never reads a row.

use crate::select::candidates::{Candidate, Need, RowChange, grows};
use crate::select::hot_lists::HotTraffic;
use hatchback::schema::{KeySpace, Table};
use std::cmp::Reverse;
use std::collections::HashSet;

/// Traffic of a row that no window counted.
const TRAFFIC_MIN: f32 = 1.0;

/// The measured candidates of one table.
pub struct TableCandidates {
    /// The candidates, by ascending order of their keys.
    pub candidates: Vec<Candidate>,
    /// Bytes that a row adds to a delta.
    pub row_cost: u64,
    /// Bytes that a deleted key adds to a delta.
    pub delete_cost: u64,
    /// The traffic of the hottest keys.
    pub hot: HotTraffic,
}

/// How `select` divides a budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceRules {
    /// Per cent of the budget for the changes that wait longest.
    pub ageing_percent: u64,
    /// Whether the hot rows come first this time.
    pub is_refresh: bool,
}

/// A candidate, as the number of its table and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pick {
    table: u32,
    at: u32,
}

/// A candidate with its ranking values. The sorts compare only these: comparing the candidates
/// would read memory at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ranked {
    since: u64,
    /// The bits of the value: values are not negative, so their bits have the same order.
    value: Reverse<u32>,
    pick: Pick,
    /// Whether the candidate ranks by value too, and not only by age.
    has_rank: bool,
}

/// All candidates in the three orders in which a budget goes to them.
pub struct Ranking<'a> {
    tables: &'a [TableCandidates],
    first: Vec<Pick>,
    oldest: Vec<Pick>,
    best: Vec<Pick>,
    ageing_percent: u64,
}

/// The choice for one delta: for each table, whether each candidate is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// `[table][candidate]`.
    pub of: Vec<Vec<bool>>,
    /// Number of chosen candidates.
    pub count: u64,
}

impl TableCandidates {
    /// Returns the candidates of `table` with the costs of its rows.
    pub fn new(table: &Table, candidates: Vec<Candidate>, hot: HotTraffic) -> Self {
        let row_bytes = table.codec.row_bytes(table.dim as usize) as u64;
        let key_bytes = if table.keys == KeySpace::Index { 4 } else { 8 };
        Self { candidates, row_cost: 8 + row_bytes + key_bytes, delete_cost: 8, hot }
    }

    /// Returns the candidates that the fleet lacks.
    pub fn lacking(&self) -> impl Iterator<Item = &Candidate> {
        self.candidates.iter().filter(|candidate| candidate.need != Need::Holds)
    }

    fn cost(&self, candidate: &Candidate) -> u64 {
        if candidate.change == RowChange::Delete { self.delete_cost } else { self.row_cost }
    }

    fn value(&self, candidate: &Candidate) -> f32 {
        let squared = candidate.distance * candidate.distance;
        squared * candidate.traffic.max(TRAFFIC_MIN) / self.cost(candidate) as f32
    }
}

impl<'a> Ranking<'a> {
    /// Ranks the candidates of all tables. `schema` has the fleet's tables, `hot` the orders of the
    /// hot rows of each.
    pub fn new(
        tables: &'a [TableCandidates],
        schema: &[Table],
        hot: &[HashSet<u64>],
        rules: ChoiceRules,
    ) -> Self {
        let (mut first, mut waiting) = (Vec::new(), Vec::new());
        for (number, table) in tables.iter().enumerate() {
            for (at, candidate) in table.candidates.iter().enumerate() {
                let pick = Pick { table: number as u32, at: at as u32 };
                if candidate.need == Need::Holds {
                    continue;
                }
                if grows(&schema[number], candidate.order) {
                    first.push(pick);
                    continue;
                }
                let is_hot = rules.is_refresh && hot[number].contains(&candidate.order);
                if is_hot {
                    first.push(pick);
                }
                let value = Reverse(table.value(candidate).to_bits());
                let has_rank = !is_hot && candidate.need == Need::Lacks;
                waiting.push(Ranked { since: candidate.since, value, pick, has_rank });
            }
        }

        waiting.sort_unstable();
        let oldest = waiting.iter().map(|ranked| ranked.pick).collect();
        waiting.retain(|ranked| ranked.has_rank);
        waiting.sort_unstable_by_key(|ranked| (ranked.value, ranked.pick));
        let best = waiting.iter().map(|ranked| ranked.pick).collect();
        Self { tables, first, oldest, best, ageing_percent: rules.ageing_percent }
    }

    /// Returns the candidates that a delta of about `bytes` bytes of rows brings.
    pub fn choose(&self, bytes: u64) -> Chosen {
        let none = |table: &TableCandidates| vec![false; table.candidates.len()];
        let mut chosen = Chosen { of: self.tables.iter().map(none).collect(), count: 0 };
        let mut left = bytes;
        self.take(&self.first, &mut left, &mut chosen);

        let aged = left.min(bytes / 100 * self.ageing_percent);
        let mut left_aged = aged;
        self.take(&self.oldest, &mut left_aged, &mut chosen);
        left -= aged - left_aged;
        self.take(&self.best, &mut left, &mut chosen);
        chosen
    }

    /// Chooses from `picks` until one does not fit into `left`.
    fn take(&self, picks: &[Pick], left: &mut u64, chosen: &mut Chosen) {
        for pick in picks {
            let (table, at) = (pick.table as usize, pick.at as usize);
            if chosen.of[table][at] {
                continue;
            }
            let cost = self.tables[table].cost(&self.tables[table].candidates[at]);
            let Some(rest) = left.checked_sub(cost) else { return };
            *left = rest;
            chosen.of[table][at] = true;
            chosen.count += 1;
        }
    }

    /// Returns the number of candidates that the fleet lacks.
    pub fn count(&self) -> u64 {
        self.tables.iter().map(|table| table.lacking().count() as u64).sum()
    }
}
