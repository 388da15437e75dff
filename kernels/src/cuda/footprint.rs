//! Measures the host's memory that the driver and NVIDIA's libraries take: no call of theirs tells.

use std::fs::read_to_string;

/// Returns the bytes of this process in memory, and those that GPU work has of a Tegra's memory,
/// which belong to no process.
pub(crate) fn host_bytes() -> u64 {
    let kib = |file, name| {
        let text = read_to_string(file).unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value.and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    1024 * (kib("/proc/self/status", "VmRSS:") + kib("/proc/meminfo", "NvMapMemUsed:"))
}
