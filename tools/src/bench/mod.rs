//! `bench NAME`: measurements that print their bars. Each name has a file here; this one holds what
//! their reports share. Never judges a run by another machine's figures.

mod concurrency;
mod delta;
mod dlrm;
mod flash;
mod gpu;
mod hits;
mod load;
mod lookup;
mod peer;
mod request;
mod request_peers;

use crate::report::digits;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde::Serialize;
use std::fmt;

pub use concurrency::LadderArgs;
pub use delta::DeltaArgs;
pub use flash::FlashArgs;
pub use gpu::GpuArgs;
pub use hits::HitsArgs;
pub use load::{Load, Measured};
pub use lookup::LookupArgs;
pub use request::{Point, RequestArgs};

/// Measures on this machine
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measures updates applied while requests are served
    Delta(DeltaArgs),
    /// Measures cold rows from flash beside the raw device and other row stores
    Flash(FlashArgs),
    /// Measures lookups and whole requests on a GPU
    Gpu(GpuArgs),
    /// Measures hit rates of the cache beside other policies, and its rows a MiB
    Hits(HitsArgs),
    /// Measures one pipeline under a rising number of callers
    Ladder(LadderArgs),
    /// Measures pooled lookups on one core beside the machine's limit
    Lookup(LookupArgs),
    /// Measures whole requests over key distributions, cache sizes and batch sizes
    Request(RequestArgs),
}

/// Runs the command.
///
/// # Errors
/// A model is refused or a file cannot be read or written.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.command {
        BenchCommand::Delta(args) => delta::run(args),
        BenchCommand::Flash(args) => flash::run(args),
        BenchCommand::Gpu(args) => gpu::run(args),
        BenchCommand::Hits(args) => hits::run(args),
        BenchCommand::Ladder(args) => concurrency::run(args),
        BenchCommand::Lookup(args) => lookup::run(args),
        BenchCommand::Request(args) => request::run(args),
    }
}

/// A figure that the design demands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// What is measured, with its unit.
    pub name: String,
    /// What is demanded.
    pub bar: f64,
    /// What was found.
    #[serde(flatten)]
    pub found: Found,
}

/// What became of a demanded figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Found {
    /// It was measured.
    Measured {
        /// The figure.
        value: f64,
        /// Whether it is what is demanded.
        holds: bool,
    },
    /// It was not.
    NotRun {
        /// Why.
        #[serde(rename = "not run")]
        reason: String,
    },
}

impl Bar {
    /// A figure that must be `bar` at least.
    pub fn at_least(name: impl Into<String>, value: f64, bar: f64) -> Self {
        Self { name: name.into(), bar, found: Found::Measured { value, holds: value >= bar } }
    }

    /// A figure that must be `bar` at most.
    pub fn at_most(name: impl Into<String>, value: f64, bar: f64) -> Self {
        Self { name: name.into(), bar, found: Found::Measured { value, holds: value <= bar } }
    }

    /// The same of a figure that is only there if its peer ran.
    pub fn at_least_if(name: impl Into<String>, value: Option<f64>, bar: f64) -> Self {
        let reason = "a peer did not run".to_owned();
        match value {
            Some(value) => Self::at_least(name, value, bar),
            None => Self { name: name.into(), bar, found: Found::NotRun { reason } },
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.found {
            Found::Measured { value, holds } => {
                let holds = if *holds { "holds" } else { "MISSED" };
                write!(f, "{}: {value:.3}, demanded {}: {holds}", self.name, self.bar)
            }
            Found::NotRun { reason } => write!(f, "{}: not run: {reason}", self.name),
        }
    }
}

/// The bars for people.
pub fn bars_table(bars: &[Bar]) -> comfy_table::Table {
    let mut table = crate::report::table(&["bar", "found", "demanded", ""]);
    for bar in bars {
        let (found, holds) = match &bar.found {
            Found::Measured { value, holds: true } => (digits(*value), "holds"),
            Found::Measured { value, holds: false } => (digits(*value), "MISSED"),
            Found::NotRun { reason } => ("not run".to_owned(), reason.as_str()),
        };
        table.add_row([bar.name.clone(), found, digits(bar.bar), holds.to_owned()]);
    }
    table
}

/// Bytes that this process made the system write, as the system counts them.
///
/// # Errors
/// The system does not tell.
pub fn written_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    bytes.and_then(|b| b.trim().parse().ok()).context("/proc/self/io: no write_bytes")
}

/// A peer that did not run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotRun {
    /// Which.
    pub engine: &'static str,
    /// Why.
    #[serde(rename = "not run")]
    pub reason: String,
    /// What would make it ready.
    pub command: &'static str,
}

impl NotRun {
    /// The peer `engine`; `command` would make it ready.
    pub fn new(engine: &'static str, reason: String, command: &'static str) -> Self {
        Self { engine, reason, command }
    }

    /// Its row in a table.
    pub fn cells(&self) -> [String; 2] {
        [self.engine.to_owned(), format!("not run: {}; `{}`", self.reason, self.command)]
    }
}

/// Where a measurement was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Version of this program.
    pub version: &'static str,
    /// Instruction set and system that it was built for.
    pub platform: String,
    /// What the processor calls itself.
    pub cpu: String,
    /// Hardware threads that this program may use.
    pub cores: usize,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            platform: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            cpu: cpu_name(&cpuinfo).unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The first `model name` of x86 or `Model` of Arm boards.
fn cpu_name(cpuinfo: &str) -> Option<&str> {
    let field = |wanted: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == wanted).map(|(_, value)| value.trim())
    };
    field("model name").or_else(|| field("Model"))
}

/// What `--json` writes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report<P> {
    /// The name of the measurement.
    pub bench: &'static str,
    /// Where it was made.
    pub machine: Machine,
    /// The model.
    pub model: String,
    /// The demanded figures.
    pub bars: Vec<Bar>,
    /// All figures.
    pub points: Vec<P>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_named() {
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: A: B\nmodel name\t: C\n"), Some("A: B"));
        assert_eq!(cpu_name("processor : 0\nModel : Board\n"), Some("Board"));
        assert_eq!(cpu_name(""), None);
    }
}
