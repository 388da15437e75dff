//! Serves two models within one memory budget, and prints where the memory of each goes.
//!
//! ```sh
//! cargo run --release -p hatchback --example two_models -- coupon.flash other.flash
//! ```

use hatchback::{Batch, Budget, Flash, Serving, SystemClock, system_disk};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

/// Memory of both models together, and page reads of both in flight.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
const READS_MAX: u32 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [left, right] = arguments.as_slice() else {
        return Err("usage: two_models FLASH-DIRECTORY FLASH-DIRECTORY".into());
    };

    // Each model may have this much cache; what both take is checked against MEMORY_BYTES_MAX.
    let budget = Budget {
        cache_bytes_max: 8 << 20,
        resident_bytes_max: 8 << 20,
        workers: 1,
        ..Budget::default()
    };
    let serving = Serving::new(MEMORY_BYTES_MAX, READS_MAX, Arc::new(SystemClock::default()));

    for (name, directory) in [("left", left), ("right", right)] {
        let flash = Flash::open(&system_disk(), Path::new(directory))?;
        // A model that does not fit beside the others is refused, and the others are served.
        let served = serving.load(name, &flash, budget)?;
        println!("serving {} as `{name}`", flash.manifest().generation);

        // The probe set is stored with the model: samples with the trainer's own scores.
        let schema = &flash.manifest().schema;
        if let Some(sample) = flash.probe()?.first() {
            let mut batch = Batch::new(schema, 1);
            batch.push(schema, sample)?;
            let ticket = served.submit(&batch, None)?;
            let answer = ticket.wait()?;
            println!("`{name}` scores {:?}; recorded {:?}", answer.scores().values, sample.scores);
        }
    }

    let plans = serving.memory();
    for (name, plan) in &plans {
        println!("memory of `{name}`, bytes:\n{plan}");
    }
    let total: u64 = plans.iter().map(|(_, plan)| plan.total()).sum();
    println!("both: {total} of {MEMORY_BYTES_MAX} bytes");
    Ok(())
}
