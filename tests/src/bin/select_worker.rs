//! Runs one `hatchback select`, for a test that kills it.

use clap::Parser;
use hatchback_tools::select::{SelectArgs, run};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    select: SelectArgs,
}

fn main() -> anyhow::Result<()> {
    run(&Arguments::parse().select)
}
