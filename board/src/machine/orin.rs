//! Adds the readings of a DRIVE AGX Orin: the SoC's instructions, the memory of its GPU, GPU load
//! and clock, and whether NVIDIA's libraries are where DRIVE OS puts them. The paths come from
//! public documents and have not been tried on a board.

use crate::machine::linux;
use crate::machine::reading::{Reading, reading};
use crate::machine::root::Root;

/// The instructions that `target_cpu = "cortex-a78ae"` lets the compiler use, by Linux's names.
const INSTRUCTIONS: [&str; 10] =
    ["asimd", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp", "asimdhp", "asimddp"];

/// Libraries that the GPU path opens at run time, and their major versions: TensorRT is 8 in DRIVE
/// OS 6, and 10 or 11 in 7.
const LIBRARIES: [(&str, &[&str]); 3] = [
    ("libcuda.so", &["1"]),
    ("libnvinfer.so", &["8", "10", "11"]),
    ("libnvonnxparser.so", &["8", "10", "11"]),
];

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
    all.extend(LIBRARIES.iter().map(|(library, majors)| {
        let of_major = |major| FOLDERS.map(|folder| format!("{folder}/{library}.{major}"));
        let paths: Vec<String> = majors.iter().flat_map(of_major).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        reading("gpu", library, root.first(&paths))
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
