//! Adds the readings of a DRIVE AGX Orin: the SoC's instructions, the memory of its GPU, GPU load
//! and clock, and whether NVIDIA's libraries are where DRIVE OS puts them. The paths come from
//! public documents and have not been tried on a board.

use crate::machine::linux;
use crate::machine::reading::{Reading, reading};
use crate::machine::root::Root;

/// The instructions that `target_cpu = "cortex-a78ae"` lets the compiler use, by Linux's names.
const INSTRUCTIONS: [&str; 10] =
    ["asimd", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp", "asimdhp", "asimddp"];

/// Libraries of DRIVE OS 6 that the GPU path opens at run time.
const LIBRARIES: [&str; 3] = ["libcuda.so.1", "libnvinfer.so.8", "libnvonnxparser.so.8"];

const FOLDERS: [&str; 5] = [
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/usr/lib",
    "/usr/local/cuda/lib64",
];

/// Returns these readings.
pub fn readings(root: &Root) -> Vec<Reading> {
    let mut all = vec![
        reading("cpu", "instructions lacking", linux::instructions_lacking(root, &INSTRUCTIONS)),
        reading("memory", "taken by the GPU bytes", linux::meminfo(root, "NvMapMemUsed")),
        reading("gpu", "node", root.first(&["/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu"])),
        reading("gpu", "load per mille", load(root)),
        reading("gpu", "frequency MHz", frequency(root)),
    ];
    all.extend(LIBRARIES.iter().map(|library| {
        let paths = FOLDERS.map(|folder| format!("{folder}/{library}"));
        reading("gpu", library, root.first(&paths.each_ref().map(String::as_str)))
    }));
    all
}

fn load(root: &Root) -> Result<i64, String> {
    root.number(root.first(&["/sys/devices/gpu.0/load", "/sys/devices/platform/gpu.0/load"])?)
}

fn frequency(root: &Root) -> Result<i64, String> {
    const DEVICES: &str = "/sys/class/devfreq";
    let names = root.names(DEVICES);
    let gpu = names.iter().find(|name| name.contains("gpu") || name.contains("ga10b"));
    let gpu = gpu.ok_or_else(|| format!("{DEVICES}: has no GPU"))?;
    root.number(&format!("{DEVICES}/{gpu}/cur_freq")).map(|hz| hz / 1_000_000)
}
