//! The machine, as far as it shows itself: every reading is optional, and one that is missing says
//! why. `linux` reads what any Linux has, `orin` what a DRIVE AGX Orin has besides, `sim` a desk
//! that stands in for it. Only reads; `settings` changes.

mod linux;
mod mounts;
mod orin;
mod sim;

pub use linux::{hottest, watts};

use crate::settings;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::target::{DeviceKind, MachineKind, Target};
use mounts::Mount;
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where `/proc`, `/sys`, `/dev` and the libraries are read: `/`, or a copy of a board's.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Reads beneath `folder`.
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The text of a file without what is around it, or why there is none.
    pub fn text(&self, path: &str) -> Result<String, String> {
        let bytes = std::fs::read(self.path(path)).map_err(|e| format!("{path}: {e}"))?;
        Ok(String::from_utf8_lossy(&bytes).trim_matches(['\0', '\n', ' ']).to_owned())
    }

    /// The number that a file consists of.
    pub fn number(&self, path: &str) -> Result<i64, String> {
        let text = self.text(path)?;
        text.parse().map_err(|_| format!("{path}: `{}` is no number", text.escape_debug()))
    }

    /// The names in a folder, in order; none where there is no such folder.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// The first of `paths` that is there.
    pub fn first<'a>(&self, paths: &[&'a str]) -> Result<&'a str, String> {
        let found = paths.iter().find(|path| self.path(path).exists());
        found.copied().ok_or_else(|| format!("none of {}", paths.join(", ")))
    }
}

/// One fact about the machine, or why it is not known.
#[derive(Clone, Debug, Serialize)]
pub struct Reading {
    /// What it belongs to.
    pub section: &'static str,
    /// What it is, with its unit last.
    pub name: String,
    /// What it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Value>,
    /// Why it says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// A reading of `section`.
pub fn reading<T: Into<Value>>(
    section: &'static str,
    name: &str,
    found: Result<T, String>,
) -> Reading {
    let (value, missing) = match found {
        Ok(value) => (Some(value.into()), None),
        Err(why) => (None, Some(why)),
    };
    Reading { section, name: name.to_owned(), value, missing }
}

/// Everything that a machine tells, and what of it does not fit its target.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The target that it was asked about.
    pub triple: String,
    /// What was read.
    pub readings: Vec<Reading>,
    /// What keeps it from being what the target says.
    pub problems: Vec<String>,
}

impl Report {
    /// Reads the machine that `target` describes, and its models on flash; opens them and `device`
    /// as a start would.
    pub fn new(root: &Root, target: &Target, device: DeviceKind, flash: &[PathBuf]) -> Self {
        let mut readings = linux::readings(root);
        readings.extend(match target.machine.kind {
            MachineKind::Orin => orin::readings(root),
            MachineKind::Sim => sim::readings(root),
        });
        readings.extend(linux::flash(root, &target.machine.models, flash));
        let places = [("models", &target.machine.models), ("updates", &target.machine.updates)];
        let places = places.map(|(name, place)| (name, place, Mount::beneath(root, place)));
        readings.extend(places.iter().map(|(name, _, mount)| {
            reading(
                "flash",
                &format!("{name} lie on"),
                mount.as_ref().map(Mount::to_string).map_err(Clone::clone),
            )
        }));
        let lookups = device.open(target.tegra_profile);
        let lookups = lookups.as_ref().map_err(|e| format!("{e} (`--device cpu` needs none)"));
        let name = lookups.as_ref().map(|device| device.name().to_owned());
        readings.push(reading("settings", "lookups on", name.map_err(Clone::clone)));
        readings.extend(settings::apply(target));
        // Sections in the order in which they began, so that what was read in several places stands
        // together.
        let mut sections = Vec::new();
        readings.iter().for_each(|r| {
            if !sections.contains(&r.section) {
                sections.push(r.section)
            }
        });
        readings.sort_by_key(|r| sections.iter().position(|section| *section == r.section));
        let mut problems = problems(&readings, target);
        problems.extend(places.iter().filter_map(|(name, place, mount)| {
            let fault = mount.as_ref().ok()?.fault(target.machine.kind)?;
            Some(format!("machine.{name} = {}: {fault}", place.display()))
        }));
        let sm = lookups
            .ok()
            .and_then(|device| device.sm())
            .zip(target.sm)
            .filter(|(has, wanted)| has != wanted);
        problems.extend(sm.map(|(has, wanted)| format!("sm = {wanted}: the GPU's is {has}")));
        problems.extend(flash.iter().filter_map(|model| {
            let fault = Flash::open(&disk::system(), model).err()?;
            Some(format!("model {}: {fault}", model.display()))
        }));
        Self { triple: target.triple.clone(), readings, problems }
    }
}

/// What does not fit the target, of what is known.
fn problems(readings: &[Reading], target: &Target) -> Vec<String> {
    let value = |section, name| {
        readings
            .iter()
            .find(|r| r.section == section && r.name == name)
            .and_then(|r| r.value.as_ref())
    };
    let mut problems = Vec::new();
    let cpu = std::env::consts::ARCH;
    if !target.triple.starts_with(cpu) {
        problems.push(format!("the target is for {}, this program for {cpu}", target.triple));
    }
    if let Some(lacks) =
        value("cpu", "instructions lacking").and_then(Value::as_str).filter(|l| *l != "none")
    {
        problems.push(format!("the CPU lacks instructions that the programs use: {lacks}"));
    }
    let (max, total) =
        (target.budget.memory_bytes_max, value("memory", "total bytes").and_then(Value::as_u64));
    if let Some(total) = total.filter(|&total| total < max) {
        problems.push(format!("budget.memory_bytes_max = {max}: the machine has {total} bytes"));
    }
    problems
        .extend(readings.iter().filter(|r| r.section == "settings").filter_map(settings::refused));
    problems
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "this machine, as {}", self.triple)?;
        let mut section = "";
        for reading in &self.readings {
            if reading.section != section {
                section = reading.section;
                writeln!(f, "\n{section}")?;
            }
            match (&reading.value, &reading.missing) {
                (Some(Value::String(text)), _) => writeln!(f, "  {:<32} {text}", reading.name)?,
                (Some(value), _) => writeln!(f, "  {:<32} {value}", reading.name)?,
                (None, why) => {
                    writeln!(
                        f,
                        "  {:<32} - ({})",
                        reading.name,
                        why.as_deref().unwrap_or("not known")
                    )?;
                }
            }
        }
        match self.problems.as_slice() {
            [] => writeln!(f, "\nnothing speaks against this target"),
            problems => {
                writeln!(f, "\nagainst this target")?;
                problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
            }
        }
    }
}
