//! Opens the next generation of a served model. It takes over the caches and the resident tables of
//! the previous generation. Only its indexes and its dense network are new memory. Nothing that
//! requests use is changed here, but in `transition.rs`.

use crate::flash::Flash;
use crate::flash::live::LiveState;
use crate::model::backend::{CpuTables, ModelBackend};
use crate::model::budget::Budget;
use crate::model::generation_change::{GenerationChange, TableChange};
use crate::model::preload::Preloader;
use crate::model::row_writer::{ResidentPatch, RowWriter, copies_of, resident_slots};
use crate::model::served_tables::{ResidentBytes, ServedTable, Storage, load_resident};
use crate::model::{Model, OpenError, capacity};
use crate::request::changed_rows::{KEYS_PER_READ, list_bytes, read_bytes};
use crate::request::memory::{Backing, ModelSizes, own_bytes, own_index_bytes, plan_memory};
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::gpu::GpuDense;
use std::sync::Arc;

/// The next generation of a model, ready for its transition.
pub(crate) struct Opened {
    pub model: Model,
    /// The rows that may differ.
    pub change: GenerationChange,
    /// The changed rows of resident tables.
    pub patches: Vec<ResidentPatch>,
}

/// A resident table whose rows differ.
struct ChangedResident<'a> {
    /// Its number in the schema, and among the resident tables.
    table: usize,
    number: usize,
    work: ResidentWork<'a>,
}

/// The work on a resident table.
enum ResidentWork<'a> {
    /// The rows of `keys` are replaced, in these slots, if all of them still exist.
    Patch { keys: &'a [u64], slots: Vec<Option<u32>> },
    /// Its keys changed, so it is read whole. It is in memory twice until the transition has ended.
    Replace,
}

/// What was read of resident tables.
#[derive(Default)]
struct ResidentChanges {
    patches: Vec<ResidentPatch>,
    /// Whole tables, by their numbers.
    replaced: Vec<(usize, Resident)>,
    /// Bytes of those tables that were to be patched.
    unplanned: u64,
}

/// Returns whether a segment that both generations list is the same file: the live generation is
/// the served one, follows it, or is the one that a rollback of it leads to. This is false if a
/// damaged generation was replaced or rebuilt, or if the directory was made anew.
fn is_next(old: &Model, flash: &Flash) -> bool {
    let (served, record) = (old.id(), flash.record());
    let is_served = |state: &LiveState| state.manifest == served.manifest;
    record.rebuilds == served.rebuilds
        && (is_served(&record.live)
            || record.previous.as_ref().is_some_and(is_served)
            || old.previous() == Some(record.live.manifest))
}

/// Returns whether the live generation of `flash` can take over the tables and workers of `old`.
pub(crate) fn can_follow(old: &Model, flash: &Flash, budget: &Budget) -> bool {
    let (before, after) = (old.schema(), &flash.manifest().schema);
    let b = old.budget();
    let same_budget =
        Budget { memory_bytes_max: b.memory_bytes_max, reads_max: b.reads_max, ..*budget } == *b;
    same_budget
        && is_next(old, flash)
        && before.has_lookups_of(after)
        && [false, true].iter().all(|&s| before.dense_columns(s).eq(after.dense_columns(s)))
        && capacity::fit_caches(before, after, old.backend(), |table| old.is_cached(table))
}

/// Opens the live generation of `flash`, for which [`can_follow`] is true. The `memory_bytes_max`
/// of `budget` limits the memory that is not shared. Calls `yield_now` between pieces of work.
///
/// # Errors
/// [`OpenError::Flash`] or [`OpenError::Segment`] if something on flash is missing or damaged.
/// [`OpenError::Dense`] or [`OpenError::Weights`] if the dense network cannot be used.
/// [`OpenError::Cuda`] if the GPU has too little memory or its driver refuses.
/// [`OpenError::Budget`] if the budget has too little.
pub(crate) fn open(
    old: &Model,
    flash: &Flash,
    budget: Budget,
    dense: &GpuDense,
    yield_now: &dyn Fn(),
) -> Result<Opened, OpenError> {
    let model = Model::open_on_flash(flash, budget, 0, Some(old), yield_now)?;
    let change = GenerationChange::between(old, &model)?;
    let changed = changed_residents(old, &model, &change)?;
    let residents = resident_bytes(old, &model, &changed);
    let lists = list_bytes(old, &change) + RowWriter::bytes(old);
    let taken = residents.tables + residents.loading.max(lists) + change.bytes();
    let device = old.lookup_device();
    let backing = Backing::of_tables(&device);
    let ModelSizes { caches, residents, .. } = ModelSizes::of(old);
    let sizes = ModelSizes { budget: old.budget(), caches, residents, ..ModelSizes::of(&model) };
    let memory = plan_memory(&sizes, backing);
    let model = model.with_memory(memory);
    // The rows are read only if they fit. A GPU has no bytes of its network to tell yet.
    let own = match backing {
        Backing::Host => own_bytes(&model, old),
        _ => own_index_bytes(&model, old),
    };
    check_room(&budget, &model, own + taken)?;

    let check = |more| check_room(&budget, &model, own + taken + more);
    let ResidentChanges { patches, replaced, unplanned } =
        read_residents(old, &model, changed, check, yield_now)?;
    let taken = taken + unplanned;
    let storage: Vec<Storage> = old.tables().iter().map(|table| table.storage).collect();
    let backend = share_tables(old.backend(), &model, replaced)?;
    let model = model.with_storage(&storage, backend, *old.budget());
    let memory = plan_memory(&ModelSizes::of(&model), backing);
    let model = model.with_memory(memory).load_dense_to_gpu(flash, dense)?;

    let own = own_bytes(&model, old) + taken;
    check_room(&budget, &model, own)?;
    let memory = model.memory().clone().with_opening(own);
    Ok(Opened { model: model.with_memory(memory), change, patches })
}

/// Checks that `budget` has the `own` bytes of the next generation.
fn check_room(budget: &Budget, model: &Model, own: u64) -> Result<(), OpenError> {
    let (field, value) = ("memory_bytes_max", budget.memory_bytes_max);
    if own <= value {
        return Ok(());
    }
    let problem = format!(
        "the next generation takes {own} bytes beside the one that is served; lower \
         cache_bytes_max or resident_bytes_max:\n{}",
        model.memory()
    );
    Err(OpenError::Budget { field, value, problem })
}

/// Returns the resident tables whose rows differ in `new`, and reads no row.
fn changed_residents<'a>(
    old: &Model,
    new: &Model,
    change: &'a GenerationChange,
) -> Result<Vec<ChangedResident<'a>>, OpenError> {
    let mut changed = Vec::new();
    for (table, served) in old.tables().iter().enumerate() {
        let Storage::Resident(number) = served.storage else { continue };
        let work = match change.of(table as u16) {
            TableChange::Keys(keys) if keys.is_empty() => continue,
            TableChange::Keys(keys) => {
                let slots = resident_slots(old.backend(), number, keys)?;
                // A sparse base only says on which page a key would be. `read_residents` finds the
                // keys that are not there.
                let exists = |&key: &u64| new.tables()[table].rows.locate(key).is_some();
                let mut both = keys.iter().zip(&slots);
                match both.all(|(key, slot)| slot.is_some() == exists(key)) {
                    true => ResidentWork::Patch { keys, slots },
                    false => ResidentWork::Replace,
                }
            }
            TableChange::All => ResidentWork::Replace,
        };
        changed.push(ChangedResident { table, number, work });
    }
    Ok(changed)
}

/// Returns the bytes that the rows of `changed` take at most, and those that reading them takes.
fn resident_bytes(old: &Model, new: &Model, changed: &[ChangedResident<'_>]) -> ResidentBytes {
    let copies = copies_of(old.backend()) as u64;
    let (mut tables, mut slot_bytes, mut loading) = (0, 0, 0);
    for changed in changed {
        let served = &new.tables()[changed.table];
        let (bytes, reading) = match &changed.work {
            ResidentWork::Patch { keys, slots } => {
                slot_bytes += size_of_val(slots.as_slice()) as u64;
                let rows = slots.iter().flatten().count();
                let bytes = ResidentPatch::bytes(rows, served.format.row_bytes(), old.backend());
                (bytes, read_bytes(keys.len() as u64))
            }
            ResidentWork::Replace => {
                let (bytes, reading) = served.resident_bytes(&new.schema().tables[changed.table]);
                (bytes * copies, reading)
            }
        };
        tables += bytes;
        // One table is read at a time.
        loading = loading.max(reading);
    }
    ResidentBytes { tables, loading: slot_bytes + loading }
}

/// Reads the rows of `changed`. Calls `check` with the bytes that it takes beyond
/// [`resident_bytes`], before it takes them.
fn read_residents(
    old: &Model,
    new: &Model,
    changed: Vec<ChangedResident<'_>>,
    check: impl Fn(u64) -> Result<(), OpenError>,
    yield_now: &dyn Fn(),
) -> Result<ResidentChanges, OpenError> {
    let mut changes = ResidentChanges::default();
    let mut preloader = Preloader::new(new, Some(yield_now));
    for ChangedResident { table, number, work } in changed {
        let (served, schema) = (&new.tables()[table], &new.schema().tables[table]);
        if let ResidentWork::Patch { keys, slots } = work {
            let rows = read_patch(&mut preloader, served, keys, &slots)?;
            if rows.len() == slots.iter().flatten().count() {
                changes.patches.push(ResidentPatch { number, rows });
                continue;
            }
            // After a rollback a key of the newer generation may exist in no other. A patch cannot
            // remove its row.
            let (bytes, loading) = served.resident_bytes(schema);
            changes.unplanned += bytes * copies_of(old.backend()) as u64;
            check(changes.unplanned + loading)?;
        }
        changes.replaced.push((number, load_resident(served, schema)?));
    }
    Ok(changes)
}

/// Reads the rows of `keys` that exist, each with its slot in `slots`, in ascending order of slots.
fn read_patch(
    preloader: &mut Preloader<'_>,
    served: &ServedTable,
    keys: &[u64],
    slots: &[Option<u32>],
) -> Result<Vec<(u32, Vec<u8>)>, OpenError> {
    let mut rows = Vec::with_capacity(keys.len());
    for (keys, slots) in keys.chunks(KEYS_PER_READ).zip(slots.chunks(KEYS_PER_READ)) {
        preloader.read_rows(&served.rows, keys, |key, bytes| {
            let slot = keys.binary_search(&key).ok().and_then(|at| slots[at]);
            rows.extend(slot.map(|slot| (slot, bytes.to_vec())));
        })?;
    }
    rows.sort_unstable_by_key(|(slot, _)| *slot);
    Ok(rows)
}

/// Returns a backend with the caches of `old` and the dense network of `new`, which is in host
/// memory. The resident tables are those in `replaced`, and the others of `old`.
fn share_tables(
    old: &ModelBackend,
    new: &Model,
    replaced: Vec<(usize, Resident)>,
) -> Result<ModelBackend, OpenError> {
    let ModelBackend::Cpu { dense, .. } = new.backend() else {
        unreachable!("`open_on_flash` opens in host memory")
    };
    let dense = Arc::clone(dense);
    Ok(match old {
        ModelBackend::Cpu { tables, .. } => {
            let (caches, mut residents) = (tables.caches.clone(), tables.residents.clone());
            for (number, table) in replaced {
                residents[number] = Arc::new(table);
            }
            ModelBackend::Cpu { tables: Arc::new(CpuTables { caches, residents }), dense }
        }
        ModelBackend::GpuTables { tables, .. } | ModelBackend::Gpu { tables, .. } => {
            let tables = Arc::new(tables.with_residents(&replaced)?);
            ModelBackend::GpuTables { tables, dense }
        }
    })
}
