//! Scores one request: opens a flash directory, submits one sample, and prints its score with the
//! status of its lookups.
//!
//! ```sh
//! hatchback run coupon.hatch --samples tools/demo/coupon/probe.jsonl   # makes coupon.flash
//! cargo run --release -p hatchback --example score -- coupon.flash tools/demo/coupon/probe.jsonl
//! ```

use hatchback::{Budget, Flash, Model, Pipeline, Sample, SystemClock, system_disk};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, samples] = arguments.as_slice() else {
        return Err("usage: score FLASH-DIRECTORY SAMPLES.jsonl".into());
    };

    // Opening takes all memory that the model will ever use, within the budget.
    let flash = Flash::open(&system_disk(), Path::new(directory))?;
    let model = Arc::new(Model::from_flash(&flash, Budget::default())?);
    println!("{}: {} bytes of memory", model.generation(), model.memory().total());

    // The pipeline starts the worker threads of the budget.
    let pipeline = Pipeline::new(Arc::clone(&model), Arc::new(SystemClock::default()))?;

    // A batch is made once and reused; here it holds the first sample of the file.
    let lines = std::fs::read_to_string(samples)?;
    let line = lines.lines().next().ok_or("the file has no sample")?;
    let mut batch = model.batch();
    batch.push(model.schema(), &Sample::from_json(line, model.schema())?)?;

    // `submit` never waits: without a free slot it returns `RequestError::Busy`.
    let ticket = pipeline.submit(&batch, None)?;
    let answer = ticket.wait()?;
    let (scores, status) = (answer.scores(), answer.scores().status());
    println!("score {:?}", scores.values);
    println!(
        "lookups: {} fresh, {} defaulted, {} absent, {} damaged",
        status.fresh, status.defaulted, status.absent, status.damaged
    );

    // The same sample again: its rows are cached now, and its score is the same to the bit.
    let first = scores.values[0];
    drop(answer);
    let again = pipeline.submit(&batch, None)?;
    assert_eq!(again.wait()?.scores().values[0].to_bits(), first.to_bits());
    println!("the second request has the same score; {} rounds served", pipeline.stats().requests);
    Ok(())
}
