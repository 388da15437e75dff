//! The lookup of a feature in a table. A request sends a bag once, and each lookup of its feature
//! finds the bag's rows in one table. Plain data; `vectors.rs` checks it.

use hatchback_kernels::lookup::Pooling;
use serde::{Deserialize, Serialize};

/// The lookup of a feature's bags in a table. It makes one vector of each bag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup {
    /// The number of the feature. Each of its lookups is in another table.
    pub feature: u16,
    /// The number of the table. Several features may share a table.
    pub table: u16,
    /// How the rows of a bag become a vector.
    pub pooling: Pooling,
}
