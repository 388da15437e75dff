//! `hatchback-bench`: the benches without the peers that link other crates.

#![forbid(unsafe_code)]

use hatchback_bench::{Peers, main_with};
use std::process::ExitCode;

fn main() -> ExitCode {
    main_with(&Peers::default())
}
