//! Fits a model into its budget: decides which tables are resident and how large each cache is. If
//! the model does not fit, the error has the field of the budget to change. Never allocates beyond
//! the caches.

use crate::limits::{BATCH_MAX, SLOTS_MAX};
use crate::model::backend::ModelBackend;
use crate::model::budget::Budget;
use crate::model::error::OpenError;
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::schema::{KeySpace, Placement, Schema, Table};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey};
use std::sync::Arc;

/// A table with placement `auto` becomes resident only if it takes at most one part in this many of
/// the bytes for resident tables. The rarely used rows of a larger table would waste them.
const AUTOMATIC_SHARE: u64 = 4;
/// An index table may grow by one row in this many, and by the number below at least, before its
/// cache must be made anew.
const GROWTH_ONE_IN: u64 = 8;
const GROWTH_ROWS_MIN: u64 = 4096;

/// Checks the fields of `budget` against each other, the limits and `schema`.
///
/// # Errors
/// [`OpenError::Budget`] names the first field that no model of `schema` works with.
pub(crate) fn check_budget(schema: &Schema, budget: &Budget) -> Result<(), OpenError> {
    let refuse = |field, value: u32, problem: String| {
        Err(OpenError::Budget { field, value: value.into(), problem })
    };
    let Budget { batch_max, misses_max, workers, slots, reads_max, .. } = *budget;
    let hotness = schema.features.iter().map(|f| f.hotness_max).max().unwrap_or(0);

    if batch_max == 0 || batch_max as usize > BATCH_MAX {
        refuse("batch_max", batch_max, format!("must be 1 to {BATCH_MAX}"))
    } else if misses_max < hotness {
        let problem = format!("must be at least {hotness}, the keys of the model's longest bag");
        refuse("misses_max", misses_max, problem)
    } else if workers == 0 {
        refuse("workers", workers, "must be at least 1".to_owned())
    } else if slots == 0 || slots as usize > SLOTS_MAX {
        refuse("slots", slots, format!("must be 1 to {SLOTS_MAX}"))
    } else if reads_max < workers {
        let problem = format!("must be at least {workers}, one read for each worker");
        refuse("reads_max", reads_max, problem)
    } else {
        Ok(())
    }
}

/// Checks the sum of `plan` against the budget.
///
/// # Errors
/// [`OpenError::Budget`] with the field to lower and the whole plan.
pub(crate) fn check_total(budget: &Budget, plan: &MemoryPlan) -> Result<(), OpenError> {
    let (total, max) = (plan.total(), budget.memory_bytes_max);
    if total <= max {
        return Ok(());
    }
    let excess = total - max;
    let lower = match plan.bytes_of(&[Part::Caches]).checked_sub(excess) {
        Some(fits) if fits > 0 => format!("lower cache_bytes_max to {fits}"),
        // Even a model without a cache would be too large.
        _ => {
            let all =
                "cache_bytes_max, resident_bytes_max, slots, workers, batch_max or misses_max";
            format!("lower {all}")
        }
    };
    let problem = format!("the model takes {total} bytes, {excess} too many; {lower}:\n{plan}");
    Err(OpenError::Budget { field: "memory_bytes_max", value: max, problem })
}

/// Checks that the budget has room for `more` bytes beside `plan` for a while.
///
/// # Errors
/// [`OpenError::Budget`] with the bytes to add.
pub(crate) fn check_more(budget: &Budget, plan: &MemoryPlan, more: u64) -> Result<(), OpenError> {
    let (total, max) = (plan.total(), budget.memory_bytes_max);
    let needed = total.saturating_add(more);
    if needed <= max {
        return Ok(());
    }
    let problem = format!(
        "the model takes {total} bytes, and {more} more while its rows are read; raise it to \
         {needed}, or lower cache_bytes_max or resident_bytes_max"
    );
    Err(OpenError::Budget { field: "memory_bytes_max", value: max, problem })
}

/// Decides for each table whether it is resident: those that the schema declares resident, then the
/// smallest automatic ones that fit.
///
/// # Errors
/// [`OpenError::Budget`] if the declared ones alone do not fit.
pub(crate) fn choose_resident(schema: &Schema, budget: &Budget) -> Result<Vec<bool>, OpenError> {
    let max = budget.resident_bytes_max;
    let bytes = |i: usize| {
        let table = &schema.tables[i];
        let hashes = if table.keys == KeySpace::Sparse { table.rows.saturating_mul(8) } else { 0 };
        table.row_bytes_total().saturating_add(hashes)
    };
    let mut resident: Vec<bool> =
        schema.tables.iter().map(|t| t.placement == Placement::Resident).collect();
    let declared = (0..resident.len()).filter(|&i| resident[i]);
    // The sizes come from a manifest. A sum that overflows must not look small.
    let mut used = declared.map(bytes).fold(0, u64::saturating_add);
    if used > max {
        let problem = format!("the tables with placement `resident` take {used} bytes");
        return Err(OpenError::Budget { field: "resident_bytes_max", value: max, problem });
    }

    let mut automatic: Vec<usize> = (0..schema.tables.len())
        .filter(|&i| schema.tables[i].placement == Placement::Auto)
        .collect();
    // The number decides between tables of one size, so every car with this budget makes the same
    // choice.
    automatic.sort_by_key(|&i| (bytes(i), i));
    for i in automatic {
        let fits = used.checked_add(bytes(i)).is_some_and(|sum| sum <= max);
        // No later table fits either, since they are in ascending order.
        if !fits || bytes(i) > max / AUTOMATIC_SHARE {
            break;
        }
        used += bytes(i);
        resident[i] = true;
    }
    Ok(resident)
}

/// The cached tables of one row width, which share a cache.
struct WidthGroup {
    row_bytes: usize,
    table_bytes: u64,
    keys: KeySpaces,
}

/// Returns the rows that an index table may grow to while its cache is in use.
fn rows_with_growth(table: &Table) -> u64 {
    table.rows.saturating_add(table.rows / GROWTH_ONE_IN).saturating_add(GROWTH_ROWS_MIN)
}

/// Returns whether the caches in `backend`, made for the tables of `before`, work for those of
/// `after`. The tables must be the same, and the caches must be able to hold the last key of each
/// that `is_cached`.
pub(crate) fn fit_caches(
    before: &Schema,
    after: &Schema,
    backend: &ModelBackend,
    is_cached: impl Fn(u16) -> bool,
) -> bool {
    let fits = |(number, (a, b)): (usize, (&Table, &Table))| {
        let (table, width) = (number as u16, b.row_bytes());
        let has_last = b.keys == KeySpace::Index && is_cached(table);
        let last = b.rows.checked_sub(1).filter(|_| has_last);
        let holds = |key| backend.can_hold(width, RowKey { table, key });
        let same = (&a.name, a.dim, a.codec, a.unit_exp, a.keys, a.placement, a.miss)
            == (&b.name, b.dim, b.codec, b.unit_exp, b.keys, b.placement, b.miss);
        same && last.is_none_or(holds)
    };
    before.tables.len() == after.tables.len()
        && before.tables.iter().zip(&after.tables).enumerate().all(fits)
}

/// Groups the tables that are not resident by row width.
fn width_groups(schema: &Schema, resident: &[bool]) -> Vec<WidthGroup> {
    let row_bytes = |t: &Table| t.row_bytes();
    let mut widths: Vec<(usize, u64)> = Vec::new();
    for (table, _) in schema.tables.iter().zip(resident).filter(|(_, resident)| !**resident) {
        match widths.iter_mut().find(|(width, _)| *width == row_bytes(table)) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(table.row_bytes_total()),
            None => widths.push((row_bytes(table), table.row_bytes_total())),
        }
    }

    let keys = |width| {
        let ends = |rows: fn(&Table) -> u64| {
            let end = |(table, resident): (&Table, &bool)| match table.keys {
                _ if *resident || row_bytes(table) != width => Some(0),
                KeySpace::Index => Some(rows(table)),
                KeySpace::Sparse => None,
            };
            KeySpaces::new(schema.tables.iter().zip(resident).map(end).collect())
        };
        // With room for growth, later generations with more rows can use the same cache.
        let (roomy, tight) = (ends(rows_with_growth), ends(|table| table.rows));
        // Room for growth is not worth wider tags, which take 4.6 more bytes a slot.
        if tight.is_narrow() && !roomy.is_narrow() { tight } else { roomy }
    };
    widths
        .into_iter()
        .map(|(row_bytes, table_bytes)| WidthGroup {
            row_bytes,
            table_bytes,
            keys: keys(row_bytes),
        })
        .collect()
}

/// Returns the row width of each cache of [`make_caches`].
pub(crate) fn cache_widths(schema: &Schema, resident: &[bool]) -> Vec<usize> {
    width_groups(schema, resident).iter().map(|group| group.row_bytes).collect()
}

/// Returns the bytes of the smallest possible caches for the tables that are not resident.
pub(crate) fn cache_bytes_min(schema: &Schema, resident: &[bool]) -> u64 {
    let least = |group: &WidthGroup| Cache::bytes_min(group.row_bytes, &group.keys) as u64;
    width_groups(schema, resident).iter().map(least).sum()
}

/// A cache that a model would have in a budget.
pub struct PlannedCache {
    /// Bytes of an encoded row.
    pub row_bytes: usize,
    /// Sets of the cache.
    pub sets: usize,
    /// The keys that it may hold.
    pub keys: KeySpaces,
}

/// The caches that a model would have in a budget.
pub struct CachePlan {
    /// One cache for each row width.
    pub caches: Vec<PlannedCache>,
    /// The number of the cache of each table; `None` if the table would be resident.
    pub cache_of: Vec<Option<usize>>,
}

/// Returns the caches that a model of `schema` would have in `budget`. Allocates none of them.
///
/// # Errors
/// [`OpenError::Budget`] with the field that is too small.
pub fn plan_caches(schema: &Schema, budget: &Budget) -> Result<CachePlan, OpenError> {
    let is_resident = choose_resident(schema, budget)?;
    let groups = width_groups(schema, &is_resident);
    let bytes = share_cache_bytes(&groups, budget)?;
    let cache_of = schema
        .tables
        .iter()
        .zip(&is_resident)
        .map(|(table, is_resident)| match is_resident {
            true => None,
            false => groups.iter().position(|group| group.row_bytes == table.row_bytes()),
        })
        .collect();
    let caches = groups
        .into_iter()
        .zip(bytes)
        .map(|(WidthGroup { row_bytes, keys, .. }, bytes)| {
            let sets = Cache::sets_in(row_bytes, bytes, &keys).unwrap_or_default();
            PlannedCache { row_bytes, sets, keys }
        })
        .collect();
    Ok(CachePlan { caches, cache_of })
}

/// Returns the bytes of the smallest caches that a model of `schema` works with in `budget`; 0 if
/// every table is resident.
///
/// # Errors
/// [`OpenError::Budget`] if the tables that are declared resident do not fit.
pub fn least_cache_bytes(schema: &Schema, budget: &Budget) -> Result<u64, OpenError> {
    Ok(cache_bytes_min(schema, &choose_resident(schema, budget)?))
}

/// Returns the bytes of each cache: its smallest possible size, and a share of the rest of the
/// budget. The share is in proportion to the bytes of its tables.
fn share_cache_bytes(groups: &[WidthGroup], budget: &Budget) -> Result<Vec<usize>, OpenError> {
    let bytes_min = |group: &WidthGroup| Cache::bytes_min(group.row_bytes, &group.keys);
    let least: u64 = groups.iter().map(|group| bytes_min(group) as u64).sum();
    let too_small = || OpenError::Budget {
        field: "cache_bytes_max",
        value: budget.cache_bytes_max,
        problem: format!("the smallest caches for {} row widths take {least} bytes", groups.len()),
    };

    let spare = budget.cache_bytes_max.checked_sub(least).ok_or_else(too_small)?;
    let all: u128 = groups.iter().map(|group| u128::from(group.table_bytes)).sum();
    let share = |bytes: u64| (u128::from(spare) * u128::from(bytes) / all.max(1)) as usize;
    Ok(groups.iter().map(|group| bytes_min(group) + share(group.table_bytes)).collect())
}

/// Makes one cache for each row width, as [`share_cache_bytes`] divides the budget. A cache
/// whose share has room for every row is whole.
///
/// # Errors
/// [`OpenError::Budget`] if the budget is below the sum of the least sizes.
pub(crate) fn make_caches(
    schema: &Schema,
    resident: &[bool],
    budget: &Budget,
) -> Result<Vec<Arc<Cache>>, OpenError> {
    let groups = width_groups(schema, resident);
    let caches = groups.iter().zip(share_cache_bytes(&groups, budget)?).map(|(group, bytes)| {
        let cache = Cache::fitting(group.row_bytes, bytes, &group.keys);
        Arc::new(cache.unwrap_or_else(|| unreachable!("no share is below the least size")))
    });
    Ok(caches.collect())
}

/// Returns the bytes of the caches of [`make_caches`], and allocates nothing.
///
/// # Errors
/// Those of [`make_caches`].
pub(crate) fn cache_bytes(
    schema: &Schema,
    resident: &[bool],
    budget: &Budget,
) -> Result<u64, OpenError> {
    let groups = width_groups(schema, resident);
    let bytes = groups.iter().zip(share_cache_bytes(&groups, budget)?).map(|(group, bytes)| {
        Cache::fitting_bytes(group.row_bytes, bytes, &group.keys).unwrap_or_default() as u64
    });
    Ok(bytes.sum())
}
