//! Installs bundles into a flash directory, one after the other, and swaps each new generation into
//! a running server. A snapshot replaces the model; a delta carries only the rows that changed.
//!
//! ```sh
//! cargo run --release -p hatchback --example install_delta -- new.flash coupon.hatch delta.hatch
//! ```

use hatchback::{Budget, BundleReader, Flash, Serving, SystemClock, system_disk};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, bundles @ ..] = arguments.as_slice() else {
        return Err("usage: install_delta FLASH-DIRECTORY BUNDLE...".into());
    };

    let budget = Budget::default();
    let clock = Arc::new(SystemClock::default());
    let serving = Serving::new(budget.memory_bytes_max, budget.reads_max, clock);

    for path in bundles {
        // The bundle's chunks are verified while they are written; the live record is replaced
        // last. An install that stops anywhere leaves the old generation live.
        let mut bundle = BundleReader::open(Path::new(path))?;
        let mut bytes = 0;
        let disk = system_disk();
        let flash = Flash::install(&disk, Path::new(directory), &mut bundle, |n| bytes += n)?;
        let generation = &flash.manifest().generation;
        println!("installed {generation} from {path}: {bytes} bytes written");

        // The first generation is loaded; each later one is swapped in with its caches warm.
        if serving.get("model").is_none() {
            serving.load("model", &flash, budget)?;
        } else {
            let swapped = serving.swap("model", &flash, budget, &|_| {})?;
            println!("swapped; requests were held for {:?}", swapped.pause);
        }
    }

    if let Some(model) = serving.model("model") {
        println!("serving {}", model.generation());
    }
    Ok(())
}
