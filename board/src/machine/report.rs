//! The report of `hatchbackd --report`: every reading of the machine, and every difference from its
//! target. Only reads: it opens the models and the device as a start would, and changes no setting.

use crate::machine::linux;
use crate::machine::mounts::Mount;
use crate::machine::orin;
use crate::machine::reading::{Reading, reading};
use crate::machine::root::Root;
use crate::machine::sim;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::targets::{DeviceKind, MachineKind, Target};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};

/// Everything that was read of a machine, and how it differs from its target.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The triple of the target.
    pub triple: String,
    /// The readings, section by section.
    pub readings: Vec<Reading>,
    /// How the machine differs from its target, a line each.
    pub problems: Vec<String>,
}

/// A directory of `[machine]`, and the file system beneath it.
struct Place<'a> {
    name: &'static str,
    directory: &'a Path,
    mount: Result<Mount, String>,
}

impl Report {
    /// Reads the machine that `target` describes and its `models` on flash, and opens the models
    /// and `device`. `settings` are the readings of the settings that the system would grant the
    /// daemon.
    pub fn new(
        root: &Root,
        target: &Target,
        device: DeviceKind,
        models: &[PathBuf],
        settings: Vec<Reading>,
    ) -> Self {
        let mut readings = linux::readings(root);
        readings.extend(match target.machine.kind {
            MachineKind::Orin => orin::readings(root),
            MachineKind::Sim => sim::readings(root),
        });
        readings.extend(linux::flash(root, &target.machine.models, models));

        let places = places(root, target);
        readings.extend(places.iter().map(|place| {
            let name = format!("file system of {}", place.name);
            reading(
                "flash",
                &name,
                place.mount.as_ref().map(Mount::to_string).map_err(Clone::clone),
            )
        }));

        let lookups = device.open(target.tegra_profile);
        let lookups = lookups.as_ref().map_err(|e| format!("{e} (`--device cpu` needs none)"));
        let device_name = lookups.as_ref().map(|device| device.name().to_owned());
        readings.push(reading("settings", "lookups on", device_name.map_err(Clone::clone)));
        let dense = target.gpu_dense();
        let taken = lookups.as_ref().map_or(0, |on| dense.driver_bytes(on));
        let taken = (taken > 0).then(|| reading("gpu", "taken by its driver bytes", Ok(taken)));
        readings.extend(taken);
        let used = lookups.as_ref().map_or(0, |on| on.used_bytes());
        let used = (used > 0).then(|| reading("gpu", "used before the models bytes", Ok(used)));
        readings.extend(used);
        let release = lookups.as_ref().ok().and_then(|on| dense.release_on(on));
        let release = release.map(|found| found.map_err(|e| e.to_string()));
        readings.extend(release.map(|found| reading("settings", "release of TensorRT", found)));
        readings.extend(settings);
        sort_by_section(&mut readings);

        let mut problems = problems(&readings, target);
        problems.extend(places.iter().filter_map(|place| {
            let fault = place.mount.as_ref().ok()?.fault(target.machine.kind)?;
            Some(format!("machine.{} = {}: {fault}", place.name, place.directory.display()))
        }));
        let sm = lookups.ok().and_then(|device| device.sm()).zip(target.sm);
        let sm = sm.filter(|(found, wanted)| found != wanted);
        problems.extend(sm.map(|(found, wanted)| format!("sm = {wanted}: the GPU's is {found}")));
        problems.extend(models.iter().filter_map(|model| {
            let fault = Flash::open(&disk::system(), model).err()?;
            Some(format!("model {}: {fault}", model.display()))
        }));
        Self { triple: target.triple.clone(), readings, problems }
    }
}

fn places<'a>(root: &Root, target: &'a Target) -> [Place<'a>; 2] {
    let place = |name, directory: &'a Path| Place {
        name,
        directory,
        mount: Mount::beneath(root, directory),
    };
    [place("models", &target.machine.models), place("updates", &target.machine.updates)]
}

/// Sorts the readings by section; sections keep the order of their first reading.
fn sort_by_section(readings: &mut [Reading]) {
    let mut sections = Vec::new();
    for reading in readings.iter() {
        if !sections.contains(&reading.section) {
            sections.push(reading.section);
        }
    }
    readings.sort_by_key(|r| sections.iter().position(|section| *section == r.section));
}

/// Returns the differences of the readings from the target; unknown readings make none.
fn problems(readings: &[Reading], target: &Target) -> Vec<String> {
    let value = |section, name| {
        let found = readings.iter().find(|r| r.section == section && r.name == name);
        found.and_then(|reading| reading.value.as_ref())
    };
    let mut problems = Vec::new();

    let cpu = std::env::consts::ARCH;
    if !target.triple.starts_with(cpu) {
        problems.push(format!("the target is for {}, this program for {cpu}", target.triple));
    }
    let lacking = value("cpu", "instructions lacking").and_then(Value::as_str);
    if let Some(lacking) = lacking.filter(|lacking| *lacking != "none") {
        problems.push(format!("the CPU lacks instructions that the programs use: {lacking}"));
    }

    let max = target.budget.memory_bytes_max;
    let total = value("memory", "total bytes").and_then(Value::as_u64);
    if let Some(total) = total.filter(|&total| total < max) {
        problems.push(format!("budget.memory_bytes_max = {max}: the machine has {total} bytes"));
    }

    let settings = readings.iter().filter(|r| r.section == "settings");
    problems.extend(settings.filter_map(Reading::refusal));
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
            let name = &reading.name;
            match (&reading.value, &reading.missing) {
                (Some(Value::String(text)), _) => writeln!(f, "  {name:<32} {text}")?,
                (Some(value), _) => writeln!(f, "  {name:<32} {value}")?,
                (None, why) => {
                    writeln!(f, "  {name:<32} - ({})", why.as_deref().unwrap_or("not known"))?;
                }
            }
        }

        if self.problems.is_empty() {
            return writeln!(f, "\nthe machine fits this target");
        }
        writeln!(f, "\nproblems with this target")?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
    }
}
