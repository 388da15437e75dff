//! Writes whole inputs for every parser into `corpus/`, for the fuzzers to start from.

use hatchback_tests::goldens::goldens;
use hatchback_tests::parsers::PARSERS;

fn main() {
    for (name, _) in PARSERS {
        let folder = format!("{}/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::create_dir_all(&folder).expect("corpus folder");
        for (i, golden) in goldens(name).iter().enumerate() {
            std::fs::write(format!("{folder}/golden{i}"), golden).expect("corpus file");
        }
    }
}
