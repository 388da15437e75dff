//! Targets: what a machine is and may use, as TOML files that inherit from one another. Reads text, never
//! the machine.

use crate::budget::Budget;
use crate::overlay::DELTAS_MAX;
use crate::sync::apply::Policy;
use crate::sync::link::LinkRules;
use crate::upkeep::Rules;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Files that inherit from each other in a chain longer than this are a mistake.
const INHERIT_MAX: usize = 8;

/// Where requests are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU backend.
    Cpu,
    /// A CUDA GPU.
    Cuda,
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
    /// CUDA version on it.
    pub cuda: Option<String>,
    /// TensorRT version on it.
    pub tensorrt: Option<String>,
    /// What a model may use.
    pub budget: Budget,
    /// What upkeep of the flash tier may do, and when.
    pub upkeep: Rules,
    /// When releases are looked for, and what that may cost.
    pub link: LinkRules,
    /// What a release must show before it counts as good.
    pub update: Policy,
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
    /// Reads the target at `path` with everything it inherits (`inherits = "base"` names `base.toml` beside
    /// it; its own fields win).
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
        target.check(path)?;
        Ok(target)
    }

    fn check(&self, path: &Path) -> Result<(), TargetError> {
        let Rules { deltas_max, busy_percent_max, .. } = self.upkeep;
        let refuse =
            |field, value, problem| Err(TargetError::Field { path: path.to_owned(), field, value, problem });
        if deltas_max >= DELTAS_MAX {
            let problem = format!("a table can have {DELTAS_MAX} deltas, so it must be below");
            return refuse("upkeep.deltas_max", deltas_max as u64, problem);
        }
        if !(1..=100).contains(&busy_percent_max) {
            return refuse("upkeep.busy_percent_max", busy_percent_max, "is not 1 to 100".to_owned());
        }
        if let Some(hour) = self.link.hours.iter().find(|hour| **hour > 24) {
            return refuse("link.hours", u64::from(*hour), "is beyond 24".to_owned());
        }
        Ok(())
    }
}

fn read_inherited(path: &Path, depth: usize) -> Result<Table, TargetError> {
    let refuse = |problem: String| TargetError::Parse { path: path.to_owned(), problem };
    if depth > INHERIT_MAX {
        return Err(refuse(format!("inherits: more than {INHERIT_MAX} files in a chain")));
    }
    let text =
        std::fs::read_to_string(path).map_err(|source| TargetError::Io { path: path.to_owned(), source })?;
    let mut own: Table = text.parse().map_err(|e: toml::de::Error| refuse(e.to_string()))?;
    match own.remove("inherits") {
        None => Ok(own),
        Some(Value::String(name)) if !name.contains(['/', '\\', '.']) => {
            let mut base = read_inherited(&path.with_file_name(format!("{name}.toml")), depth + 1)?;
            overlay(&mut base, own);
            Ok(base)
        }
        Some(other) => Err(refuse(format!("inherits: {other} is not the name of a file beside it"))),
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
        assert_eq!((orin.device, orin.sm), (DeviceKind::Cuda, Some(87)));
        assert_eq!((orin.target_cpu.as_deref(), orin.glibc.as_deref()), (Some("cortex-a78ae"), Some("2.31")));
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
        let upkeep = |fields: &str| {
            let base = std::fs::read_to_string(targets().join("base.toml")).unwrap();
            std::fs::write(directory.path().join("base.toml"), base).unwrap();
            error(&format!("inherits = \"base\"\ntriple = \"x\"\ndevice = \"cpu\"\n[upkeep]\n{fields}"))
        };
        let at = path.display().to_string();
        for (fields, texts) in [
            ("busy_percent_max = 0", ["upkeep.busy_percent_max = 0", "1 to 100"]),
            ("deltas_max = 64", ["upkeep.deltas_max = 64", "below"]),
            ("deltas_max = -1", ["upkeep", "deltas_max"]),
            ("scrub_every_hours = \"weekly\"", ["upkeep", "scrub_every_hours"]),
            ("scrub_hours = 1", ["upkeep", "scrub_hours"]),
        ] {
            let said = upkeep(fields);
            assert!(said.starts_with(&at) && texts.iter().all(|t| said.contains(t)), "{fields}: {said}");
        }
    }
}
