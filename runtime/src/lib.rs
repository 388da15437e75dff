//! Hatchback: an inference runtime for recommendation models with huge embedding tables, in a car.
//!
//! **Request flow.** [`Flash::open`] opens a model's directory. [`Serving::load`] takes the model's
//! memory within a [`Budget`]. [`Served::submit`] queues a [`Batch`] of dense features and sparse
//! keys. A worker probes the embedding caches, reads missing rows from flash, pools the rows and
//! runs the dense network. [`Ticket::wait`] returns the scores, each with a [`LookupStatus`].
//!
//! **Update flow.** [`Updater::fetch`] downloads a signed release over a [`Link`] and stages it.
//! [`Updater::advance`] installs the release, compares its probe scores, makes it live and watches
//! it while it serves. A release that fails is rolled back. [`Flash::install`] installs a
//! [`BundleReader`] directly, and [`Serving::swap`] serves the new generation.
//!
//! ```no_run
//! use hatchback::{Batch, Budget, Flash, Sample, Serving, SystemClock, system_disk};
//! use std::{path::Path, sync::Arc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let flash = Flash::open(&system_disk(), Path::new("coupon.flash"))?;
//! let (budget, clock) = (Budget::default(), Arc::new(SystemClock::default()));
//! let serving = Serving::new(budget.memory_bytes_max, budget.reads_max, clock);
//! let model = serving.load("coupon", &flash, budget)?;
//!
//! let schema = &flash.manifest().schema;
//! let mut batch = Batch::new(schema, 1);
//! let line = r#"{"dense": [0.5], "sparse": {"user": [7]}}"#;
//! batch.push(schema, &Sample::from_json(line, schema)?)?;
//! let ticket = model.submit(&batch, None)?;
//! println!("{:?}", ticket.wait()?.scores().values);
//! # Ok(())
//! # }
//! ```
//!
//! The names at the root of the crate are its public interface; `runtime/examples` uses nothing
//! else. The crate knows no machine and opens no socket: directories, budgets, links and clocks are
//! arguments.

#![deny(unsafe_code)]

/// Lets an error print for people wherever it is printed: a program whose `main` returns it shows
/// `Debug`.
macro_rules! debug_as_display {
    ($error:ty) => {
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

// The repository's own crates (tests, tools, the daemon, the C library) use the modules directly.
// Their contents may change with any commit, so the documentation shows the root only.
#[doc(hidden)]
pub mod bundle;
#[doc(hidden)]
pub mod car;
#[doc(hidden)]
pub mod clock;
#[doc(hidden)]
pub mod flash;
#[doc(hidden)]
pub mod io;
#[doc(hidden)]
pub mod limits;
#[doc(hidden)]
pub mod locks;
#[doc(hidden)]
pub mod maintenance;
#[doc(hidden)]
pub mod model;
#[doc(hidden)]
pub mod request;
#[doc(hidden)]
pub mod schema;
#[doc(hidden)]
pub mod targets;
#[doc(hidden)]
pub mod update;

// Open: a flash directory becomes a model in memory, within a budget.
pub use clock::{Clock, SystemClock};
pub use flash::{Flash, FlashError};
pub use hatchback_kernels::cuda::Device;
pub use io::disk::{Disk, system as system_disk};
pub use model::budget::Budget;
pub use model::memory_plan::MemoryPlan;
pub use model::{CacheUse, Model, OpenError};

// Submit: requests to one model (`Pipeline`) or to several, each with a handle (`Serving`).
pub use hatchback_kernels::lookup::LookupStatus;
pub use request::error::NotFinite;
pub use request::pipeline::{Answer, Pipeline, Queued, RequestError, Stats, Ticket};
pub use request::serving::{Served, Serving, ServingError, Swapped};
pub use request::worker::{Scores, TableCounts};
pub use schema::batch::{Batch, BatchError};
pub use schema::raw_value::Shortened;
pub use schema::sample::{Sample, SampleError};

// Install: a bundle becomes the live generation of a flash directory.
pub use bundle::{BundleError, BundleReader};
pub use flash::Prepared;

// Update: signed releases come over a link, are probed, watched, and committed or rolled back.
pub use update::Updater;
pub use update::error::UpdateError;
pub use update::host::{Cause, Host, Policy, Unservable, Watched};
pub use update::link::{Fetcher, Link, LinkError, LinkLimits, LinkRules, Take};
pub use update::program::Program;
pub use update::status::{UpdateEvent, UpdateState, UpdateStatus};
pub use update::trust::Trust;

// Maintain: merges, scrubs and repairs of a flash directory, in small steps between requests.
pub use maintenance::{Maintenance, MaintenanceRules};

// Inspect: what a bundle and a flash directory say of their content.
pub use bundle::manifest::{Generation, Manifest};
pub use schema::{Feature, Schema, Table};

// Configure: target files, from which the daemon and the tools take budgets and rules.
pub use targets::{
    DeviceKind, Machine, MachineKind, ServerRules, Shed, Target, TargetError, TlsRules,
};

// For the repository's own crates: parts of `hatchback-kernels` that packing and tests need.
#[doc(hidden)]
pub use hatchback_kernels::cache::Cache;
#[doc(hidden)]
pub use hatchback_kernels::cache::address::{KeySpaces, RowKey, mix, unmix};
#[doc(hidden)]
pub use hatchback_kernels::cache::codec::{Codec, RowFault, RowFormat, choose_unit_exp};
#[doc(hidden)]
pub use hatchback_kernels::dense::{Activation, DenseEngine, DenseError, Weights};
#[doc(hidden)]
pub use hatchback_kernels::lookup::Pooling;
