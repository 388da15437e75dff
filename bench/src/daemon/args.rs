//! The options of `bench daemon`. Plain data.

use super::languages::LanguageArgs;
use crate::synthetic_model::ModelArgs;
use clap::Args;
use hatchback_tools::report;
use hatchback_tools::report::Json;
use std::time::Duration;

/// Options of a model that the three other measurements do not take.
const OF_A_MODEL: [&str; 5] = ["model", "resident_mib", "target", "flash", "cache_mib"];

/// Measures gRPC on a Unix socket beside the call of the library
#[derive(Args, Debug)]
pub struct DaemonArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Callers at each step, a connection each
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub clients: Vec<u32>,
    /// Samples in a request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Embedding cache, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    pub cache_mib: Option<f64>,
    /// Measured time of a step, of each way with --deadline [default: 4, 60; quick: 1, 8]
    #[arg(long, value_parser = report::args::seconds)]
    pub seconds: Option<f64>,
    /// Runs load, swaps, loads, faults and hostile callers for so many minutes instead
    #[arg(long, value_name = "MINUTES", conflicts_with_all = OF_A_MODEL,
          conflicts_with = "deadline")]
    pub soak: Option<f64>,
    /// Runs load and so many swaps over gRPC, one right after the other, instead
    #[arg(long, value_name = "N", conflicts_with_all = OF_A_MODEL,
          conflicts_with_all = ["deadline", "soak"],
          value_parser = clap::value_parser!(u32).range(24..))]
    pub swaps: Option<u32>,
    /// Measures how late answers are while the flash device stalls instead
    #[arg(long, conflicts_with_all = OF_A_MODEL)]
    pub deadline: bool,
    #[command(flatten)]
    pub(super) languages: LanguageArgs,
    #[command(flatten)]
    pub(crate) json: Json,
}

impl DaemonArgs {
    /// Returns the time of a step, which is `whole` or `quick` seconds if the caller gave none.
    pub fn time(&self, whole: f64, quick: f64) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.model.quick {
            quick
        } else {
            whole
        }))
    }
}
