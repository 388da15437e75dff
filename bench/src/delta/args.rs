//! The options of `bench delta`.

use clap::Args;
use hatchback_tools::report;
use hatchback_tools::report::Json;
use std::path::PathBuf;

/// Measures updates applied while requests are served
#[derive(Args, Debug)]
pub struct DeltaArgs {
    /// Rows of the largest tables of the synthetic model [default: 1900000, 10 million in all;
    /// quick: 100000]
    #[arg(long)]
    pub rows_max: Option<u64>,
    /// Deltas to apply one after the other [default: 20; quick: 4]
    #[arg(long)]
    pub deltas: Option<u64>,
    /// Swaps back and forth between the last two generations, after the deltas
    #[arg(long, default_value_t = 0)]
    pub swaps: u64,
    /// Samples in a request
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Callers that send requests; at least one for each CPU leaves no CPU idle at full load
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub callers: u32,
    /// Rate of the callers at every other update, per cent of the rate without pauses
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub load_percent: u32,
    /// Embedding cache, per cent of the bytes of all rows
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub cache_percent: u64,
    /// Least time of a window without an update
    #[arg(long, default_value_t = 2.0, value_parser = report::args::seconds)]
    pub seconds: f64,
    /// Share of the time that applying gets, as `busy_percent_min` of a target
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub busy_percent_min: u64,
    /// Share of the time that applying may take, as `busy_percent_max` of a target
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub busy_percent: u64,
    /// A smaller model, fewer deltas
    #[arg(long)]
    pub quick: bool,
    /// Directory that the model is installed into [default: a temporary folder]
    #[arg(long)]
    pub flash: Option<PathBuf>,
    /// Folder that keeps the packed generations for the next run, which must have the same
    /// --rows-max [default: a temporary folder]
    #[arg(long)]
    pub bundles: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: Json,
}
