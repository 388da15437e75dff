//! The benches: measurements that compare their figures with bars, beside peers in the same run. No
//! package ships them. Each name of the command line has a file or folder here. A bench never
//! judges a run by the figures of another machine.

#![forbid(unsafe_code)]
// Output goes through `report::output`, which handles a closed pipe.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bars;
mod concurrency;
pub mod daemon;
mod deadline;
mod delta;
mod dlrm;
mod filled_cache;
pub mod flash;
mod gpu;
pub mod hits;
mod load;
mod lookup;
pub mod page;
mod peer;
mod peer_figures;
mod publish;
mod punctuality;
mod request;
mod request_families;
mod request_peers;
mod request_shared;
pub mod results;
mod stalling_disk;
mod synthetic_model;

use anyhow::Result;
use clap::{Parser, Subcommand};
use flash::peers::Store;
use hatchback_link::program;
use hits::policies::PeerCache;
use std::process::ExitCode;

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

/// Peers in Rust, which a program of its own links: `bench/stores`.
#[derive(Default)]
pub struct Peers {
    /// Row stores of `flash`.
    pub stores: Vec<Store>,
    /// Caches of `hits`.
    pub caches: Vec<PeerCache>,
}

/// Hatchback's benches
#[derive(Debug, Parser)]
#[command(name = "hatchback-bench", version)]
pub struct Cli {
    #[command(subcommand)]
    command: BenchCommand,
}

/// One measurement.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measures one pipeline under a rising number of callers
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
    /// Writes the page of measured figures from stored reports
    Page(page::PageArgs),
}

/// Runs the measurement of the command line beside `peers`.
pub fn main_with(peers: &Peers) -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program::end(run(&Cli::parse(), peers))
}

fn run(cli: &Cli, peers: &Peers) -> Result<()> {
    match &cli.command {
        BenchCommand::Concurrency(args) => concurrency::run(args),
        BenchCommand::Daemon(args) => daemon::run(args),
        BenchCommand::Deadline(args) => deadline::run(args),
        BenchCommand::Delta(args) => delta::run(args),
        BenchCommand::Flash(args) => flash::run(args, &peers.stores),
        BenchCommand::Gpu(args) => gpu::run(args),
        BenchCommand::Hits(args) => hits::run(args, &peers.caches),
        BenchCommand::Lookup(args) => lookup::run(args),
        BenchCommand::Publish(args) => publish::run(args),
        BenchCommand::Request(args) => request::run(args),
        BenchCommand::Page(args) => page::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args;
    use hatchback_tools::report::Json;
    use serde_json::Value;

    #[derive(Parser)]
    struct Line<A: Args> {
        #[command(flatten)]
        args: A,
    }

    /// Parses the arguments of a bench. The first word is its name.
    pub fn parse<A: Args>(line: &str) -> Result<A, clap::Error> {
        Ok(Line::try_parse_from(line.split_whitespace())?.args)
    }

    /// Returns the report that `work` writes to its file.
    pub fn reported(work: impl FnOnce(&Json) -> Result<()>) -> Value {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let json: Json = parse(&format!("bench --json {}", path.display())).unwrap();
        work(&json).unwrap();
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
    }

    /// Returns the report of the bench that `line` names.
    pub fn report_of(line: &str) -> Value {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let json = ["--json", path.to_str().unwrap()];
        let words = ["hatchback-bench"].into_iter().chain(line.split_whitespace());
        run(&Cli::parse_from(words.chain(json)), &Peers::default()).unwrap();
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
    }
}
