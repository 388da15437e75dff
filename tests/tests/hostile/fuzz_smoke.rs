//! Every parser reads valid inputs with seeded damage: none panics and none hangs. The long run is
//! in `fuzz/`.

use hatchback_tests::goldens::goldens;
use hatchback_tests::mutate::mutated;
use hatchback_tests::parsers::{PARSERS, Parser};
use hatchback_tests::random::Random;
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::Duration;

/// The number of cases for each parser.
const CASES: u64 = 10_000;
/// Most processor time of one case: a small input that costs much time is an attack.
const CASE_TIME_MAX: Duration = Duration::from_secs(2);

/// Returns the processor time of the calling thread, which other processes do not lengthen.
fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

fn one(name: &str, parser: Parser, seed: u64, goldens: &[Vec<u8>]) {
    let mut random = Random::of(seed, 0xf022);
    let golden = random.pick(goldens).clone();
    let bytes = mutated(&golden, goldens, &mut random);
    let begin = thread_time();
    if catch_unwind(|| parser(&bytes)).is_err() {
        panic!("parser `{name}` panicked: replay with HATCHBACK_FUZZ_SEED={seed}");
    }
    let time = thread_time() - begin;
    assert!(time < CASE_TIME_MAX, "parser `{name}`, HATCHBACK_FUZZ_SEED={seed}: {time:?}");
}

/// Set `HATCHBACK_FUZZ_SEED` to replay one case of every parser.
#[test]
fn no_parser_panics() {
    let replay = std::env::var("HATCHBACK_FUZZ_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    for (name, parser) in PARSERS {
        let goldens = goldens(name);
        // Undamaged inputs and the empty input.
        goldens.iter().for_each(|golden| parser(golden));
        parser(&[]);
        if let Some(seed) = replay {
            one(name, *parser, seed, &goldens);
            continue;
        }
        (0..CASES).for_each(|seed| one(name, *parser, seed, &goldens));
    }
}

/// The targets differ only in the name, so this test compares their text. To compile them, cargo
/// would compile every dependency again, because their crate is outside the workspace.
#[test]
fn every_parser_has_a_fuzz_target_that_calls_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let names = |path: std::path::PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    let targets: BTreeSet<String> =
        std::fs::read_dir(&folder).unwrap().map(|entry| names(entry.unwrap().path())).collect();
    let parsers: BTreeSet<String> = PARSERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(targets, parsers);
    let manifest = std::fs::read_to_string(folder.join("../Cargo.toml")).unwrap();
    for name in parsers {
        let target = std::fs::read_to_string(folder.join(format!("{name}.rs"))).unwrap();
        assert_eq!(
            target,
            format!(
                "//! Fuzzes `parsers::{name}`.\n#![no_main]\n\n\
                 libfuzzer_sys::fuzz_target!(\
                 |bytes: &[u8]| hatchback_tests::parsers::{name}(bytes));\n"
            )
        );
        let path = format!("name = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\n");
        assert!(manifest.contains(&path), "{name}");
    }
}
