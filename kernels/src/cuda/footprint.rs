//! Measures what the driver and NVIDIA's libraries take: no call of theirs tells. What a context
//! takes of a GPU's own memory is unknown, because a driver tells the free memory only inside one.

use crate::cuda::driver::Gpu;
use std::fs::read_to_string;

impl Gpu {
    /// Returns the result of `load` and the bytes that it took. Others' use of a GPU with memory of
    /// its own changes the count.
    pub(crate) fn footprint_of<T>(&self, load: impl FnOnce() -> T) -> (T, u64) {
        let free = || self.free_memory().unwrap_or(0) as u64;
        let (host, device) = (host_bytes(), free());
        let loaded = load();
        let on_host = host_bytes().saturating_sub(host);
        // Free memory that the GPU shares with the host changes with every file that is read.
        let on_device = if self.integrated() { 0 } else { device.saturating_sub(free()) };
        (loaded, on_host + on_device)
    }
}

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
