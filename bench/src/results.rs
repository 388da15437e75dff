//! What every measurement reports: the machine, the figures, the bars, and the peers that did not
//! run. Never measures times.

use super::bars::Bar;
use anyhow::{Context, Result};
use comfy_table::Table;
use hatchback_tools::report::Json;
use hatchback_tools::{report, say};
use serde::Serialize;
use std::fmt;

/// The JSON document of one measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport<P> {
    /// Name of the measurement.
    pub bench: &'static str,
    /// Machine that ran the measurement.
    pub machine: HostMachine,
    /// Model or data that the run measured.
    pub model: String,
    /// Demanded figures.
    pub bars: Vec<Bar>,
    /// All figures.
    pub points: Vec<P>,
}

impl<P: Serialize> BenchReport<P> {
    /// Writes the report to `json`. Prints `about`, a table with a row of `cells` for each point,
    /// and the bars. `heads` are separated by commas.
    ///
    /// # Errors
    /// The file cannot be written, or standard output is closed.
    pub fn publish<const N: usize>(
        &self,
        about: &str,
        heads: &str,
        cells: impl Fn(&P) -> [String; N],
        json: &Json,
    ) -> Result<()> {
        json.write(self, || {
            say!("{about}\n{}", table(heads, self.points.iter().map(cells)))?;
            self.bars.iter().try_for_each(|bar| say!("{bar}"))
        })
    }
}

/// Returns a table of `rows`. `heads` are separated by commas.
pub fn table<const N: usize>(heads: &str, rows: impl Iterator<Item = [String; N]>) -> Table {
    let mut table = report::table(&heads.split(", ").collect::<Vec<_>>());
    table.add_rows(rows);
    table
}

/// The machine that ran a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostMachine {
    /// Version of this program.
    pub version: &'static str,
    /// Instruction set and operating system of the build.
    pub platform: String,
    /// Name of the processor.
    pub cpu: String,
    /// Hardware threads that this process may use.
    pub cores: usize,
}

impl HostMachine {
    /// Returns the machine of this process.
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

impl fmt::Display for HostMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, platform, cpu, cores } = self;
        write!(f, "{cpu}, {cores} cores, {platform}, version {version}")
    }
}

/// Returns the first `model name` (x86) or `Model` (Arm boards).
fn cpu_name(cpuinfo: &str) -> Option<&str> {
    let field = |wanted: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == wanted).map(|(_, value)| value.trim())
    };
    field("model name").or_else(|| field("Model"))
}

/// A figure, or the peer that did not give it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Measurement<F> {
    /// The engine ran.
    Measured(F),
    /// The peer did not run.
    NotRun(PeerNotRun),
}

impl<F> Measurement<F> {
    /// Returns the figures, or `None` for a peer that did not run.
    pub fn figures(&self) -> Option<&F> {
        match self {
            Self::Measured(figures) => Some(figures),
            Self::NotRun(_) => None,
        }
    }

    /// Returns the peer that did not run, or `None` for figures.
    pub fn not_run(&self) -> Option<&PeerNotRun> {
        match self {
            Self::Measured(_) => None,
            Self::NotRun(peer) => Some(peer),
        }
    }
}

/// A peer that did not run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerNotRun {
    /// Name of the peer.
    pub engine: &'static str,
    /// Reason.
    #[serde(rename = "not run")]
    pub reason: String,
    /// Command that makes the peer ready.
    pub command: &'static str,
}

impl PeerNotRun {
    /// Returns the entry of the peer `engine`; `command` makes it ready.
    pub fn new(engine: &'static str, reason: String, command: &'static str) -> Self {
        Self { engine, reason, command }
    }

    /// Returns the peer's row of a table.
    pub fn cells(&self) -> [String; 2] {
        [self.engine.to_owned(), format!("not run: {}; `{}`", self.reason, self.command)]
    }
}

/// Returns the distinct names in `engines`, in the order of their first occurrence.
pub fn distinct<'a>(engines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for engine in engines {
        if !names.contains(&engine) {
            names.push(engine);
        }
    }
    names
}

/// Returns the bytes that this process has caused the system to write, from `/proc/self/io`.
///
/// # Errors
/// The system does not count them.
pub fn written_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    bytes.and_then(|b| b.trim().parse().ok()).context("/proc/self/io: no write_bytes")
}

/// Returns the memory of this process in bytes: what it has now, and the most since
/// [`restart_peak`].
///
/// # Errors
/// The system does not tell.
pub fn resident_memory() -> Result<ResidentMemory> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10).with_context(|| format!("/proc/self/status: no {name}"))
    };
    Ok(ResidentMemory { now: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
}

/// Memory of a process that is resident, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct ResidentMemory {
    /// Now.
    pub now: u64,
    /// At most since the peak was restarted.
    pub peak: u64,
}

/// Lets the peak of [`resident_memory`] start from what is resident now.
///
/// # Errors
/// The system refuses.
pub fn restart_peak() -> Result<()> {
    std::fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")
}

/// Returns how many files this process has open.
///
/// # Errors
/// The system does not tell.
pub fn open_files() -> Result<u64> {
    Ok(std::fs::read_dir("/proc/self/fd").context("/proc/self/fd")?.count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_have_names() {
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: A: B\nmodel name\t: C\n"), Some("A: B"));
        assert_eq!(cpu_name("processor : 0\nModel : Board\n"), Some("Board"));
        assert_eq!(cpu_name(""), None);
    }

    #[test]
    fn names_occur_once() {
        assert_eq!(distinct(["b", "a", "b"].into_iter()), ["b", "a"]);
    }
}
