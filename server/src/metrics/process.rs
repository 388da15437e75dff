//! What every program of Prometheus says of itself: its version and its process. Read from `/proc`
//! once a second, when what is shown is made; a value that cannot be read is left out.

use crate::metrics::scrape::Families;
use hatchback::Program;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType::{Counter, Gauge};
use std::collections::BTreeSet;
use std::fmt::Error;
use std::fs;

/// Ticks a second in `/proc/self/stat`: the same on every Linux (`USER_HZ`).
const TICKS_A_SECOND: f64 = 100.0;
/// Bytes of a page of memory.
const PAGE_BYTES: f64 = 4096.0;

/// The process.
#[derive(Debug)]
pub struct Process;

impl Collector for Process {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut to = Families(encoder);
        let version = vec![(vec![("version", Program::this().version.clone())], 1)];
        let help = "The version of the program";
        to.each(&version, &[(Gauge, "hatchback_build_info", help, |one| *one)])?;

        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The second field is the program's name, which may contain spaces; the third is number 0
        // here.
        let fields: Vec<&str> =
            stat.rsplit_once(") ").map_or(Vec::new(), |(_, rest)| rest.split(' ').collect());
        let field = |number: usize| fields.get(number)?.parse::<f64>().ok();
        let cpu = field(11).zip(field(12)).map(|(user, system)| (user + system) / TICKS_A_SECOND);
        let started = field(19).zip(boot_s()).map(|(ticks, boot)| boot + ticks / TICKS_A_SECOND);
        let resident = field(21).map(|pages| pages * PAGE_BYTES);
        let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);

        let help = "User and system time of the process";
        to.one(Counter, "process_cpu_seconds", help, cpu)?;
        let help = "Start of the process, seconds since 1970";
        to.one(Gauge, "process_start_time_seconds", help, started)?;
        to.one(Gauge, "process_resident_memory_bytes", "Resident memory", resident)?;
        to.one(Gauge, "process_virtual_memory_bytes", "Virtual memory", field(20))?;
        to.one(Gauge, "process_open_fds", "Open files and sockets", open)?;
        to.one(Gauge, "process_max_fds", "Limit of open files and sockets", files_max())
    }
}

/// Returns the start of the machine, in seconds since 1970.
fn boot_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.parse().ok())
}

fn files_max() -> Option<f64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Converts the text of OpenMetrics into that of Prometheus, version 0.0.4. There a counter has the
/// name of its sample, and nothing marks the end or a unit.
pub fn prometheus(openmetrics: &str) -> String {
    let lines = || openmetrics.lines().filter(|l| *l != "# EOF" && !l.starts_with("# UNIT "));
    let counters: BTreeSet<&str> =
        lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let older = |line: &str| match line.strip_prefix("# ").and_then(|l| l.split(' ').nth(1)) {
        Some(name) if counters.contains(name) => line.replacen(name, &format!("{name}_total"), 1),
        _ => line.to_owned(),
    };
    lines().map(|line| older(line) + "\n").collect()
}
