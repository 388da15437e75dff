//! Reads what any Linux machine has: system, CPUs, memory, temperatures, power, watchdogs, and the
//! block device beneath a directory. Knows no board.

use crate::limits::RAILS_MAX;
use crate::machine::reading::{Reading, reading};
use crate::machine::root::Root;
use hatchback::io::reader::{PageReader, ReadMethod};
use hatchback::maintenance::catalog::Catalog;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns every reading that needs no directory.
pub fn readings(root: &Root) -> Vec<Reading> {
    let mut all = system(root);
    all.extend(cpu(root));
    all.extend(memory(root));
    all.extend(thermal(root));
    all.extend(power(root));
    all.extend(watchdogs(root));
    all
}

fn system(root: &Root) -> Vec<Reading> {
    let pretty_name = |text: String| {
        let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        name.map(|name| name.trim_matches('"').to_owned())
            .ok_or_else(|| "/etc/os-release: has no PRETTY_NAME".to_owned())
    };
    vec![
        reading("system", "model", root.text("/proc/device-tree/model")),
        reading("system", "os", root.text("/etc/os-release").and_then(pretty_name)),
        reading("system", "kernel", root.text("/proc/sys/kernel/osrelease")),
        reading("system", "real-time kernel", Ok(root.number("/sys/kernel/realtime") == Ok(1))),
    ]
}

fn cpu(root: &Root) -> Vec<Reading> {
    const FREQUENCY: &str = "/sys/devices/system/cpu/cpu0/cpufreq";
    let mhz = |file: &str| root.number(&format!("{FREQUENCY}/{file}")).map(|khz| khz / 1000);
    vec![
        reading("cpu", "online", root.text("/sys/devices/system/cpu/online")),
        reading("cpu", "isolated", root.text("/sys/devices/system/cpu/isolated")),
        reading("cpu", "governor of cpu0", root.text(&format!("{FREQUENCY}/scaling_governor"))),
        reading("cpu", "frequency of cpu0 MHz", mhz("scaling_cur_freq")),
        reading("cpu", "frequency of cpu0 at most MHz", mhz("cpuinfo_max_freq")),
    ]
}

/// Returns those of the instructions `needed` that the CPUs lack, or `none`.
pub fn instructions_lacking(root: &Root, needed: &[&str]) -> Result<String, String> {
    let text = root.text("/proc/cpuinfo")?;
    let line = text.lines().find(|line| line.starts_with("Features"));
    let (_, has) =
        line.and_then(|l| l.split_once(':')).ok_or("/proc/cpuinfo: is not that of an ARM CPU")?;
    let has: Vec<&str> = has.split_whitespace().collect();
    let lacks: Vec<&str> = needed.iter().copied().filter(|n| !has.contains(n)).collect();
    Ok(if lacks.is_empty() { "none".to_owned() } else { lacks.join(" ") })
}

/// Returns the random number of this boot of the machine; 0 if it cannot be read.
pub fn boot_number(root: &Root) -> u64 {
    let id = root.text("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

/// Returns a field of `/proc/meminfo`, in bytes.
pub fn meminfo(root: &Root, field: &str) -> Result<u64, String> {
    let text = root.text("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| format!("/proc/meminfo: has no {field}"))
}

fn memory(root: &Root) -> Vec<Reading> {
    vec![
        reading("memory", "total bytes", meminfo(root, "MemTotal")),
        reading("memory", "available bytes", meminfo(root, "MemAvailable")),
        reading("memory", "huge pages", root.text("/sys/kernel/mm/transparent_hugepage/enabled")),
    ]
}

/// Returns the thermal zones that have a temperature, °C.
fn celsius(root: &Root) -> Vec<(String, f64)> {
    const ZONES: &str = "/sys/class/thermal";
    let zone = |name: String| {
        let number = name.strip_prefix("thermal_zone")?;
        let degrees = root.number(&format!("{ZONES}/{name}/temp")).ok()?;
        let label =
            root.text(&format!("{ZONES}/{name}/type")).unwrap_or_else(|_| number.to_owned());
        // A zone that is switched off reads far below zero on Tegra.
        (degrees > -100_000).then_some((label, degrees as f64 / 1000.0))
    };
    root.names(ZONES).into_iter().filter_map(zone).collect()
}

/// Returns the hottest thermal zone, °C.
pub fn hottest(root: &Root) -> Option<(String, f64)> {
    celsius(root).into_iter().max_by(|a, b| a.1.total_cmp(&b.1))
}

fn thermal(root: &Root) -> Vec<Reading> {
    match celsius(root).as_slice() {
        [] => {
            vec![reading::<f64>(
                "thermal",
                "zones °C",
                Err("/sys/class/thermal: no zone has a temperature".to_owned()),
            )]
        }
        zones => {
            zones.iter().map(|(name, degrees)| reading("thermal", name, Ok(*degrees))).collect()
        }
    }
}

/// Returns the measured rails, W.
fn rails(root: &Root) -> Vec<(String, f64)> {
    const MONITORS: &str = "/sys/class/hwmon";
    let mut rails = Vec::new();
    for monitor in root.names(MONITORS) {
        let folder = format!("{MONITORS}/{monitor}");
        let chip = root.text(&format!("{folder}/name")).unwrap_or(monitor);
        let files = root.names(&folder);
        rails.extend(files.iter().filter_map(|file| rail(root, &folder, &chip, file)));
    }
    rails
}

/// Returns the rail that `file` of a monitor measures, W: the chip's own power reading, or else
/// voltage times current. Returns `None` for every other file.
fn rail(root: &Root, folder: &str, chip: &str, file: &str) -> Option<(String, f64)> {
    let value = |kind: &str, n: &str| root.number(&format!("{folder}/{kind}{n}_input")).ok();
    let label = |kind: &str, n: &str| {
        root.text(&format!("{folder}/{kind}{n}_label")).unwrap_or_else(|_| format!("{chip} {n}"))
    };

    let input = file.strip_suffix("_input")?;
    if let Some(n) = input.strip_prefix("power") {
        return Some((label("power", n), value("power", n)? as f64 / 1e6));
    }

    let n = input.strip_prefix("curr")?;
    let is_rail = n.parse().is_ok_and(|n: u32| n <= RAILS_MAX);
    if !is_rail || value("power", n).is_some() {
        return None;
    }
    let (milliamps, millivolts) = value("curr", n).zip(value("in", n))?;
    Some((label("in", n), (milliamps * millivolts) as f64 / 1e6))
}

/// Returns the sum of all measured rails, W.
pub fn watts(root: &Root) -> Option<f64> {
    let rails = rails(root);
    (!rails.is_empty()).then(|| rails.iter().map(|(_, watts)| watts).sum())
}

fn power(root: &Root) -> Vec<Reading> {
    match rails(root).as_slice() {
        [] => {
            vec![reading::<f64>(
                "power",
                "rails W",
                Err("/sys/class/hwmon: no rail is measured".to_owned()),
            )]
        }
        rails => rails.iter().map(|(name, watts)| reading("power", name, Ok(*watts))).collect(),
    }
}

fn watchdogs(root: &Root) -> Vec<Reading> {
    const WATCHDOGS: &str = "/sys/class/watchdog";
    let watchdog = |name: &String| {
        let fact = |file: &str| root.text(&format!("{WATCHDOGS}/{name}/{file}"));
        let text = fact("identity").map(|identity| {
            let seconds = fact("timeout").unwrap_or_else(|_| "?".to_owned());
            format!(
                "{identity}, {seconds} s, {}",
                fact("state").unwrap_or_else(|_| "state not known".to_owned())
            )
        });
        reading("watchdog", name, text)
    };
    match root.names(WATCHDOGS).as_slice() {
        [] => vec![reading::<bool>(
            "watchdog",
            "hardware",
            Err(format!("{WATCHDOGS}: is empty or does not exist")),
        )],
        names => names.iter().map(watchdog).collect(),
    }
}

/// Returns the readings of the block device beneath the first of `models`, or beneath `directory`
/// if there is no model, and the bytes that maintenance wrote to each model.
pub fn flash(root: &Root, directory: &Path, models: &[PathBuf]) -> Vec<Reading> {
    let at = models.first().map_or(directory, PathBuf::as_path);
    let fault = |e: &dyn std::fmt::Display| format!("{}: {e}", at.display());
    let space = rustix::fs::statvfs(at).map_err(|e| fault(&e));
    let block = std::fs::metadata(at).map_err(|e| fault(&e)).map(|m| device(root, m.dev()));
    let fact = |file: &str| block.clone().and_then(|folder| root.text(&format!("{folder}/{file}")));

    // Field 7 of `stat` counts sectors of 512 bytes.
    let written = fact("stat").and_then(|text| {
        let sectors = text.split_whitespace().nth(6).and_then(|n| n.parse::<u64>().ok());
        sectors.map(|n| n * 512).ok_or_else(|| "stat: has no seventh number".to_owned())
    });

    let mut all = vec![
        reading("flash", "directory", Ok(at.display().to_string())),
        reading(
            "flash",
            "free bytes",
            space.as_ref().map(|s| s.f_bavail * s.f_frsize).map_err(Clone::clone),
        ),
        reading("flash", "size bytes", space.map(|s| s.f_blocks * s.f_frsize)),
        reading("flash", "device", block.clone()),
        reading("flash", "block bytes", fact("queue/logical_block_size")),
        reading("flash", "queue depth", fact("queue/nr_requests")),
        reading("flash", "scheduler", fact("queue/scheduler")),
        reading("flash", "written since boot bytes", written),
        reading("flash", "life used, by the device", life(root, block)),
        reading("flash", "pages are read by", Ok(PageReader::new(1, ReadMethod::Auto).method())),
    ];
    all.extend(models.iter().map(|model| {
        let name = format!(
            "written by maintenance, {}",
            model.file_name().unwrap_or_default().to_string_lossy()
        );
        reading("flash", &name, maintenance_bytes(model))
    }));
    all
}

/// Returns the folder in `/sys` of the whole device with the number `number`.
fn device(root: &Root, number: u64) -> String {
    let folder =
        format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    // A partition has no facts of its own: those of its device are one folder up.
    if root.path(&format!("{folder}/partition")).exists() { format!("{folder}/..") } else { folder }
}

/// Returns the device's own estimate of its used life. eMMC and UFS count in tenths.
fn life(root: &Root, block: Result<String, String>) -> Result<String, String> {
    let block = block?;
    let emmc = format!("{block}/device/life_time");
    let ufs = format!("{block}/device/../../../health_descriptor/life_time_estimation_a");
    let path = root.first(&[&emmc, &ufs]).map_err(|_| "the device has no estimate".to_owned())?;
    root.text(path)
}

fn maintenance_bytes(model: &Path) -> Result<u64, String> {
    let place = Catalog::path_in(model);
    if !place.exists() {
        return Err("maintenance has not run yet".to_owned());
    }
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let entries = Catalog::peek(&place, scratch.path()).map_err(|e| e.to_string())?;
    Ok(entries.wear.bytes_total)
}
