//! Targets: what a machine is and may use, as TOML files that inherit from one another. Reads text,
//! never the machine.

use crate::flash::overlay::DELTAS_MAX;
use crate::maintenance::MaintenanceRules;
use crate::model::budget::Budget;
use crate::update::apply::Policy;
use crate::update::link::LinkRules;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{CudaError, Profile};
use hatchback_kernels::dense::TensorRtOptions;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::{Table, Value};

/// Files that inherit from each other in a chain longer than this are a mistake.
const INHERIT_MAX: usize = 8;

/// A real-time kernel serves interrupts at 50; above it a busy daemon would keep flash and network
/// waiting.
const REALTIME_PRIORITY_MAX: u8 = 49;

/// CPUs that an affinity mask of Linux holds.
const CPUS_MAX: u16 = 1024;

/// Where requests are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU backend.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// Where the facts about a machine are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineKind {
    /// An NVIDIA DRIVE AGX Orin.
    Orin,
    /// Any Linux machine that stands in for one.
    Sim,
}

/// How the daemon runs on it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Where its facts are read.
    pub kind: MachineKind,
    /// Whether the daemon's memory is to stay in memory.
    pub lock_memory: bool,
    /// The real-time priority of what serves; 0 is the ordinary scheduling class.
    pub realtime_priority: u8,
    /// The CPUs that serve; none named: all.
    pub cpus: Vec<u16>,
    /// The directory whose folders are models on flash.
    pub models: PathBuf,
    /// The directory whose folders are the sync directories of models, by the models' names.
    pub updates: PathBuf,
}

/// When the daemon sheds what, °C of the hottest zone and watts of all rails; without a limit,
/// never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shed {
    /// Above this upkeep waits.
    pub upkeep_celsius: u32,
    /// Above this requests are served one at a time.
    pub requests_celsius: u32,
    /// As `upkeep_celsius`, watts.
    pub upkeep_watts: Option<u32>,
    /// As `requests_celsius`, watts.
    pub requests_watts: Option<u32>,
}

/// The name of no device.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is neither `cpu` nor `cuda`")]
pub struct NoDeviceKind(String);

impl FromStr for DeviceKind {
    type Err = NoDeviceKind;

    fn from_str(name: &str) -> Result<Self, NoDeviceKind> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            other => Err(NoDeviceKind(other.to_owned())),
        }
    }
}

impl DeviceKind {
    /// Opens the machine's device of this kind; `tegra_profile` as in [`Target`].
    ///
    /// # Errors
    /// The machine has none that the kernels can run on.
    pub fn open(self, tegra_profile: bool) -> Result<Device, CudaError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => Device::cuda(Profile { tegra: tegra_profile }),
        }
    }
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The Rust target triple of its programs.
    pub triple: String,
    /// The CPU they are compiled for, as rustc names it; else any of that triple.
    pub target_cpu: Option<String>,
    /// The newest glibc that they may need.
    pub glibc: Option<String>,
    /// Where requests are computed.
    pub device: DeviceKind,
    /// Compute capability of its GPU, such as `87`.
    pub sm: Option<u32>,
    /// Whether its GPU may do no more than a Tegra's: the driver compiles nothing.
    #[serde(default)]
    pub tegra_profile: bool,
    /// How TensorRT runs the dense network, where it is to be tried.
    pub tensorrt_options: Option<TensorRtOptions>,
    /// What a model may use.
    pub budget: Budget,
    /// What upkeep of the flash tier may do, and when.
    pub upkeep: MaintenanceRules,
    /// When releases are looked for, and what that may cost.
    pub link: LinkRules,
    /// What a release must show before it counts as good.
    pub update: Policy,
    /// How the daemon runs on it.
    pub machine: Machine,
    /// What is shed when it is too hot.
    pub shed: Shed,
}

/// Why a target is refused.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The file could not be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A field has a value that makes no sense.
    #[error("{path}: {field} = {value}: {problem}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The file is not a target.
    #[error("{path}: {problem}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        problem: String,
    },
}

impl Target {
    /// Reads the target at `path` with everything it inherits (`inherits = "base"` names
    /// `base.toml` beside it; its own fields win).
    ///
    /// # Errors
    /// A file is missing, does not parse, or leaves a field out.
    pub fn load(path: &Path) -> Result<Self, TargetError> {
        let merged = read_inherited(path, 0)?;
        let parse = |e: toml::de::Error| TargetError::Parse {
            path: path.to_owned(),
            problem: e.to_string().trim().replace('\n', " "),
        };
        let target: Self = Value::Table(merged).try_into().map_err(parse)?;
        match target.wrong() {
            None => Ok(target),
            Some((field, value, problem)) => {
                Err(TargetError::Field { path: path.to_owned(), field, value, problem })
            }
        }
    }

    /// The first field whose value makes no sense, its value and why.
    fn wrong(&self) -> Option<(&'static str, u64, String)> {
        let MaintenanceRules { deltas_max, busy_percent_max, .. } = self.upkeep;
        let refuse = |field, value, problem: String| Some((field, value, problem));
        if deltas_max >= DELTAS_MAX {
            let problem = format!("a table can have {DELTAS_MAX} deltas, so it must be below");
            return refuse("upkeep.deltas_max", deltas_max as u64, problem);
        }
        if !(1..=100).contains(&busy_percent_max) {
            return refuse(
                "upkeep.busy_percent_max",
                busy_percent_max,
                "is not 1 to 100".to_owned(),
            );
        }
        let busy_percent_max = self.update.busy_percent_max;
        if !(1..=100).contains(&busy_percent_max) {
            return refuse(
                "update.busy_percent_max",
                busy_percent_max,
                "is not 1 to 100".to_owned(),
            );
        }
        if let Some(&hour) = self.link.hours.iter().find(|&&hour| hour > 24) {
            return refuse("link.hours", hour.into(), "is beyond 24".to_owned());
        }
        let Machine { realtime_priority, ref cpus, .. } = self.machine;
        if realtime_priority > REALTIME_PRIORITY_MAX {
            let problem =
                format!("is above {REALTIME_PRIORITY_MAX}: interrupts are served at the next");
            return refuse("machine.realtime_priority", realtime_priority.into(), problem);
        }
        if let Some(&cpu) = cpus.iter().find(|&&cpu| cpu >= CPUS_MAX) {
            return refuse(
                "machine.cpus",
                cpu.into(),
                format!("Linux numbers at most {CPUS_MAX} from 0"),
            );
        }
        let Shed { upkeep_celsius, requests_celsius, upkeep_watts, requests_watts } = self.shed;
        if upkeep_celsius > requests_celsius {
            let problem =
                format!("is above requests_celsius = {requests_celsius}: upkeep is shed first");
            return refuse("shed.upkeep_celsius", upkeep_celsius.into(), problem);
        }
        match upkeep_watts.zip(requests_watts) {
            Some((upkeep, requests)) if upkeep > requests => {
                let problem = format!("is above requests_watts = {requests}: upkeep is shed first");
                refuse("shed.upkeep_watts", upkeep.into(), problem)
            }
            _ => None,
        }
    }
}

fn read_inherited(path: &Path, depth: usize) -> Result<Table, TargetError> {
    let refuse = |problem: String| TargetError::Parse { path: path.to_owned(), problem };
    if depth > INHERIT_MAX {
        return Err(refuse(format!("inherits: more than {INHERIT_MAX} files in a chain")));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|source| TargetError::Io { path: path.to_owned(), source })?;
    let mut own: Table = text.parse().map_err(|e: toml::de::Error| refuse(e.to_string()))?;
    match own.remove("inherits") {
        None => Ok(own),
        Some(Value::String(name)) if !name.contains(['/', '\\', '.']) => {
            let mut base = read_inherited(&path.with_file_name(format!("{name}.toml")), depth + 1)?;
            overlay(&mut base, own);
            Ok(base)
        }
        Some(other) => {
            Err(refuse(format!("inherits: {other} is not the name of a file beside it")))
        }
    }
}

fn overlay(base: &mut Table, own: Table) {
    for (name, value) in own {
        match (base.get_mut(&name), value) {
            (Some(Value::Table(below)), Value::Table(above)) => overlay(below, above),
            (_, value) => {
                base.insert(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets")
    }

    #[test]
    fn every_target_of_the_tree_loads() {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(targets()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "toml") && !path.ends_with("base.toml") {
                Target::load(&path).unwrap();
                names.push(path.file_stem().unwrap().to_string_lossy().into_owned());
            }
        }
        names.sort();
        assert_eq!(names, ["cpu", "drive-orin", "x86-cuda"]);
        let orin = Target::load(&targets().join("drive-orin.toml")).unwrap();
        assert_eq!((orin.device, orin.sm, orin.tegra_profile), (DeviceKind::Cuda, Some(87), true));
        assert_eq!(
            (orin.target_cpu.as_deref(), orin.glibc.as_deref()),
            (Some("cortex-a78ae"), Some("2.31"))
        );
    }

    #[test]
    fn mistakes_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Target::load(&path).unwrap_err().to_string()
        };
        assert!(error("inherits = \"a\"").contains("chain"));
        assert!(error("inherits = \"../a\"").contains("inherits"));
        assert!(error("triple = \"x\"\ndevice = \"tpu\"").contains("tpu"));
        assert!(error("triple = \"x\"\ndevice = \"cpu\"").contains("budget"));
        std::fs::copy(targets().join("base.toml"), directory.path().join("base.toml")).unwrap();
        let with = |fields: &str| {
            error(&format!("inherits = \"base\"\ntriple = \"x\"\ndevice = \"cpu\"\n{fields}"))
        };
        let at = path.display().to_string();
        for (fields, texts) in [
            ("[upkeep]\nbusy_percent_max = 0", ["upkeep.busy_percent_max = 0", "1 to 100"]),
            ("[update]\nbusy_percent_max = 101", ["update.busy_percent_max = 101", "1 to 100"]),
            ("[upkeep]\ndeltas_max = 64", ["upkeep.deltas_max = 64", "below"]),
            ("[upkeep]\ndeltas_max = -1", ["upkeep", "deltas_max"]),
            ("[upkeep]\nscrub_every_hours = \"weekly\"", ["upkeep", "scrub_every_hours"]),
            ("[upkeep]\nscrub_hours = 1", ["upkeep", "scrub_hours"]),
            ("[machine]\nkind = \"qnx\"", ["machine", "qnx"]),
            ("[machine]\nrealtime_priority = 50", ["machine.realtime_priority = 50", "above 49"]),
            ("[machine]\nrealtime_priority = 300", ["machine", "realtime_priority"]),
            ("[machine]\ncpus = [3, 1024]", ["machine.cpus = 1024", "1024"]),
            ("[shed]\nupkeep_celsius = 200", ["shed.upkeep_celsius = 200", "requests_celsius"]),
            (
                "[shed]\nupkeep_watts = 9\nrequests_watts = 8",
                ["shed.upkeep_watts = 9", "requests_watts = 8"],
            ),
            ("[shed]\nupkeep_kelvin = 9", ["shed", "upkeep_kelvin"]),
        ] {
            let said = with(fields);
            assert!(
                said.starts_with(&at) && texts.iter().all(|t| said.contains(t)),
                "{fields}: {said}"
            );
        }
    }
}
