//! `bench NAME`: measurements that compare their figures with bars. Each name has a file or folder
//! here. `bench` never judges a run by the figures of another machine.

mod bars;
mod concurrency;
pub mod daemon;
mod deadline;
mod delta;
mod dlrm;
mod filled_cache;
mod flash;
mod gpu;
mod hits;
mod load;
mod lookup;
mod peer;
mod peer_figures;
mod publish;
mod punctuality;
mod request;
mod request_families;
mod request_peers;
mod results;
mod stalling_disk;
mod synthetic_model;

use anyhow::Result;
use clap::{Args, Subcommand};

pub use concurrency::ConcurrencyArgs;
pub use daemon::DaemonArgs;
pub use deadline::DeadlineArgs;
pub use delta::DeltaArgs;
pub use flash::FlashArgs;
pub use gpu::GpuArgs;
pub use hits::HitsArgs;
pub use lookup::LookupArgs;
pub use publish::PublishBenchArgs;
pub use request::RequestArgs;

/// Measures on this machine
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

/// One measurement.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measures one pipeline under a rising number of callers
    #[command(alias = "ladder")]
    Concurrency(ConcurrencyArgs),
    /// Measures gRPC on a Unix socket beside the call of the library
    Daemon(DaemonArgs),
    /// Measures answers later than their deadline, while the flash device stalls
    Deadline(DeadlineArgs),
    /// Measures updates that are applied while requests are served
    Delta(DeltaArgs),
    /// Measures cold rows from flash beside the raw device and other row stores
    Flash(FlashArgs),
    /// Measures lookups and whole requests on a GPU
    Gpu(GpuArgs),
    /// Measures hit rates of the cache beside other policies, and its rows per MiB
    Hits(HitsArgs),
    /// Measures pooled lookups on one core beside PyTorch and FBGEMM
    Lookup(LookupArgs),
    /// Measures the way of changed rows from the trainer to the car's score
    Publish(PublishBenchArgs),
    /// Measures whole requests over key distributions, cache sizes and batch sizes
    Request(RequestArgs),
}

/// Runs the measurement.
///
/// # Errors
/// The measurement refuses its arguments or its model, or a file cannot be read or written.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.command {
        BenchCommand::Concurrency(args) => concurrency::run(args),
        BenchCommand::Daemon(args) => daemon::run(args),
        BenchCommand::Deadline(args) => deadline::run(args),
        BenchCommand::Delta(args) => delta::run(args),
        BenchCommand::Flash(args) => flash::run(args),
        BenchCommand::Gpu(args) => gpu::run(args),
        BenchCommand::Hits(args) => hits::run(args),
        BenchCommand::Lookup(args) => lookup::run(args),
        BenchCommand::Publish(args) => publish::run(args),
        BenchCommand::Request(args) => request::run(args),
    }
}
