//! How a model is fitted into its budget: which tables are resident, how large each cache is, and
//! what to change where it does not fit.

use crate::limits::{BATCH_MAX, SLOTS_MAX};
use crate::model::OpenError;
use crate::model::budget::{Budget, MemoryPlan};
use crate::schema::{KeySpace, Placement, Schema, Table};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;

/// Refuses a budget with which no model of `schema` works.
pub(crate) fn check(schema: &Schema, budget: &Budget) -> Result<(), OpenError> {
    let refuse = |field, value: u32, problem: String| {
        Err(OpenError::Budget { field, value: value.into(), problem })
    };
    let hotness = schema.features.iter().map(|f| f.hotness_max).max().unwrap_or(0);
    if budget.batch_max == 0 || budget.batch_max as usize > BATCH_MAX {
        refuse("batch_max", budget.batch_max, format!("is not in 1..={BATCH_MAX}"))
    } else if budget.misses_max < hotness {
        refuse(
            "misses_max",
            budget.misses_max,
            format!("a bag of this model has up to {hotness} keys"),
        )
    } else if budget.workers == 0 {
        refuse("workers", budget.workers, "there is at least 1".to_owned())
    } else if budget.slots == 0 || budget.slots as usize > SLOTS_MAX {
        refuse("slots", budget.slots, format!("is not in 1..={SLOTS_MAX}"))
    } else if budget.reads_max < budget.workers {
        refuse(
            "reads_max",
            budget.reads_max,
            format!("{} workers need a read each", budget.workers),
        )
    } else {
        Ok(())
    }
}

/// Refuses a model that takes more than the budget in all, and says what to lower.
pub(crate) fn check_total(
    budget: &Budget,
    plan: &MemoryPlan,
    caches: &[Cache],
) -> Result<(), OpenError> {
    let total = plan.total();
    let Some(over) = total.checked_sub(budget.memory_bytes_max).filter(|over| *over > 0) else {
        return Ok(());
    };
    let held: u64 = caches.iter().map(|c| c.bytes() as u64).sum();
    let lower = match held.checked_sub(over) {
        Some(fits) if fits > 0 => format!("lower cache_bytes_max to {fits}"),
        _ => "lower resident_bytes_max, slots, workers, batch_max or misses_max".to_owned(),
    };
    let problem = format!("the model takes {total} bytes, {over} too many; {lower}:\n{plan}");
    Err(OpenError::Budget { field: "memory_bytes_max", value: budget.memory_bytes_max, problem })
}

/// Decides which tables are resident: those that must be, then the smallest automatic ones that
/// fit.
pub(crate) fn choose_resident(schema: &Schema, budget: &Budget) -> Result<Vec<bool>, OpenError> {
    let bytes = |i: usize| {
        let table = &schema.tables[i];
        let hashes = if table.keys == KeySpace::Sparse { 8 * table.rows } else { 0 };
        table.row_bytes_total().saturating_add(hashes)
    };
    let must = |i: &usize| schema.tables[*i].placement == Placement::Resident;
    let mut used: u64 = (0..schema.tables.len()).filter(must).map(bytes).sum();
    if used > budget.resident_bytes_max {
        let problem = format!("the tables placed `resident` take {used} bytes");
        return Err(OpenError::Budget {
            field: "resident_bytes_max",
            value: budget.resident_bytes_max,
            problem,
        });
    }
    let mut resident: Vec<bool> = (0..schema.tables.len()).map(|i| must(&i)).collect();
    let mut automatic: Vec<usize> = (0..schema.tables.len())
        .filter(|&i| schema.tables[i].placement == Placement::Auto)
        .collect();
    automatic.sort_by_key(|&i| (bytes(i), i));
    for i in automatic {
        // One table may take a quarter of the budget at most: beyond that its cold rows waste it.
        if used + bytes(i) > budget.resident_bytes_max || bytes(i) > budget.resident_bytes_max / 4 {
            break;
        }
        used += bytes(i);
        resident[i] = true;
    }
    Ok(resident)
}

/// One cache for each row width, the budget split by the bytes of the rows behind each.
pub(crate) fn make_caches(
    schema: &Schema,
    resident: &[bool],
    budget: &Budget,
) -> Result<Vec<Cache>, OpenError> {
    let row_bytes = |t: &Table| t.codec.row_bytes(t.dim as usize);
    let mut widths: Vec<(usize, u64)> = Vec::new();
    for (table, _) in schema.tables.iter().zip(resident).filter(|(_, r)| !**r) {
        match widths.iter_mut().find(|(w, _)| *w == row_bytes(table)) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(table.row_bytes_total()),
            None => widths.push((row_bytes(table), table.row_bytes_total())),
        }
    }
    let names = |width| {
        let end = |(t, resident): (&Table, &bool)| match t.keys {
            _ if *resident || row_bytes(t) != width => Some(0),
            KeySpace::Index => Some(t.rows),
            KeySpace::Sparse => None,
        };
        KeySpaces::new(schema.tables.iter().zip(resident).map(end).collect())
    };
    // The least that each can work with, however few its rows are beside the others'; the rest in
    // proportion.
    let least: u64 =
        widths.iter().map(|&(width, _)| Cache::bytes_min(width, &names(width)) as u64).sum();
    let too_small = || OpenError::Budget {
        field: "cache_bytes_max",
        value: budget.cache_bytes_max,
        problem: format!("the smallest caches for {} row widths take {least} bytes", widths.len()),
    };
    let spare = budget.cache_bytes_max.checked_sub(least).ok_or_else(too_small)?;
    let all: u128 = widths.iter().map(|(_, bytes)| u128::from(*bytes)).sum();
    let share = |bytes: u64| (u128::from(spare) * u128::from(bytes) / all.max(1)) as usize;
    widths
        .iter()
        .map(|&(width, bytes)| {
            let names = names(width);
            Cache::new(width, Cache::bytes_min(width, &names) + share(bytes), &names)
        })
        .collect::<Option<_>>()
        .ok_or_else(too_small)
}
