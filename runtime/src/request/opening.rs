//! One generation on its way from flash to a served model in host memory. Its indexes and its
//! network are open; its caches and resident tables are not there yet. Their memory is planned
//! first, so a start beyond its budget never takes it.

use crate::flash::Flash;
use crate::io::reader::DeviceDepth;
use crate::model::backend::{CpuTables, ModelBackend};
use crate::model::budget::Budget;
use crate::model::memory_plan::MemoryPlan;
use crate::model::opened::ModelParts;
use crate::model::served_tables::{ServedTable, load_residents, open_indexes, resident_bytes};
use crate::model::{Model, OpenError, capacity, preload};
use crate::request::memory::{Backing, ModelSizes, plan_memory};
use crate::schema::Schema;
use hatchback_kernels::dense::DenseEngine;
use std::sync::Arc;

/// The placement of the tables of a model.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub is_resident: &'a [bool],
    /// The same tables in an earlier generation, or empty.
    pub before: &'a [ServedTable],
}

/// A model whose files are open.
pub(crate) struct Opening<'a> {
    flash: &'a Flash,
    schema: Arc<Schema>,
    budget: Budget,
    is_resident: &'a [bool],
    dense: DenseEngine,
    tables: Vec<ServedTable>,
}

impl<'a> Opening<'a> {
    /// Opens the network and the indexes of the live generation of `flash`. Calls `yield_now`
    /// between the tables.
    ///
    /// # Errors
    /// [`OpenError::Flash`] or [`OpenError::Segment`] if something on flash is missing or damaged.
    /// [`OpenError::Dense`] if the dense network cannot be used.
    pub fn begin(
        flash: &'a Flash,
        budget: Budget,
        placed: Placed<'a>,
        yield_now: &dyn Fn(),
    ) -> Result<Self, OpenError> {
        let schema = Arc::new(flash.manifest().schema.clone());
        let dense = schema.load_dense(flash.dense()?)?;
        let generation = &flash.manifest().generation;
        log::info!("dense network of {generation}: {}", dense.runs_on());
        let Placed { is_resident, before } = placed;
        let tables = open_indexes(flash, &schema, is_resident, before, yield_now)?;
        Ok(Self { flash, schema, budget, is_resident, dense, tables })
    }

    /// Returns the memory plan of the model at `backing`, whose network is in host memory.
    ///
    /// # Errors
    /// [`OpenError::Budget`] if the caches do not fit the budget, or if the whole model does not,
    /// with what opening takes for a while.
    pub fn plan(&self, backing: Backing<'_>) -> Result<MemoryPlan, OpenError> {
        let plan = plan_memory(&self.sizes()?, backing);
        capacity::check_total(&self.budget, &plan)?;
        // Before the workers and slots are there, lists may take their bytes.
        let loading = resident_bytes(&self.schema, &self.tables).loading;
        let lists = loading.max(preload::bytes_max(self.flash, &self.tables, &self.budget, &plan));
        let more = lists.saturating_sub(plan.later_bytes());
        capacity::check_more(&self.budget, &plan, more)?;
        Ok(plan.with_opening(more))
    }

    /// Returns the sizes of the model.
    ///
    /// # Errors
    /// [`OpenError::Budget`] if the caches do not fit the budget.
    pub fn sizes(&self) -> Result<ModelSizes<'_>, OpenError> {
        let indexes: usize = self.tables.iter().map(|table| table.rows.index_bytes()).sum();
        Ok(ModelSizes {
            schema: &self.schema,
            budget: &self.budget,
            caches: capacity::cache_bytes(&self.schema, self.is_resident, &self.budget)?,
            residents: resident_bytes(&self.schema, &self.tables).tables,
            indexes: indexes as u64,
            dense: Some(&self.dense),
            outputs: self.dense.outputs(),
            opening: 0,
        })
    }

    /// Takes the memory that `memory` plans, and reads the resident tables. Reads of the model
    /// share `read_depth`.
    ///
    /// # Errors
    /// [`OpenError::Segment`] if a resident table is damaged.
    pub fn build(
        self,
        memory: MemoryPlan,
        read_depth: Arc<DeviceDepth>,
        yield_now: &dyn Fn(),
    ) -> Result<Model, OpenError> {
        let Self { flash, schema, budget, is_resident, dense, tables } = self;
        let caches = capacity::make_caches(&schema, is_resident, &budget)?;
        let residents = load_residents(&schema, &tables, yield_now)?;
        let outputs = dense.outputs();
        let (host, dense) = (Arc::new(CpuTables { caches, residents }), Arc::new(dense));
        let model = Model::new(ModelParts {
            generation: flash.manifest().generation.clone(),
            id: flash.record().id(),
            previous: flash.record().previous.as_ref().map(|previous| previous.manifest),
            schema,
            budget,
            read_depth,
            read_method: flash.disk().read_method(),
            tables,
            backend: ModelBackend::Cpu { tables: host, dense },
            outputs,
        });
        Ok(model.with_memory(memory))
    }
}
