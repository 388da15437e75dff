//! The lookup: probes, decodes, pools and concatenates in one pass, directly into the dense
//! network's input.
//!
//! * [`FeatureView::query`] pools every bag whose rows are all in memory and records the other bags
//!   on the [`miss_list::MissList`]. The caller fetches the missing rows from flash.
//! * [`FeatureView::finish`] pools a recorded bag from the fetched rows.
//!
//! A bag's rows are always added in key order, so caching never changes a score. A lookup reads no
//! flash and allocates nothing.

mod copies;
mod feature;
pub mod feature_prefetch;
pub mod miss_list;
pub(crate) mod pipeline;
pub(crate) mod pooling;
pub(crate) mod probe_ring;
mod query;
pub(crate) mod row_source;
mod status;
pub(crate) mod whole_rows;

pub use copies::{ColumnCopy, CopiedRows, InputColumn};
pub use feature::{Bags, FeatureView, Input, Pooling, RowStore};
pub use status::LookupStatus;
