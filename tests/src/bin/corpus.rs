//! Writes whole inputs for every parser into `tests/fuzz/corpus/`, for the fuzzers to start from.

use anyhow::Result;
use hatchback_tests::goldens::goldens;
use hatchback_tests::parsers::PARSERS;
use std::fs;
use std::path::Path;

fn main() -> Result<()> {
    for (name, _) in PARSERS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        fs::create_dir_all(&folder)?;
        for (i, golden) in goldens(name).iter().enumerate() {
            fs::write(folder.join(format!("golden{i}")), golden)?;
        }
    }
    Ok(())
}
