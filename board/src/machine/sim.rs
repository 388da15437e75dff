//! Adds the readings of a desk that stands in for a board: its GPU and the driver, if present.

use crate::machine::reading::{Reading, reading};
use crate::machine::root::Root;

/// Returns these readings.
pub fn readings(root: &Root) -> Vec<Reading> {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    let driver = root.text("/proc/driver/nvidia/version");
    let driver = driver.map(|text| text.lines().next().unwrap_or_default().to_owned());
    let mut all = vec![reading("gpu", "driver", driver)];
    all.extend(root.names(GPUS).iter().map(|gpu| {
        let text = root.text(&format!("{GPUS}/{gpu}/information"));
        let model = text.and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("Model:"));
            line.map(|name| name.trim().to_owned()).ok_or_else(|| "it names no model".to_owned())
        });
        reading("gpu", gpu, model)
    }));
    all
}
