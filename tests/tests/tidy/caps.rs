//! What the tree may have at most.

use crate::imports::CRATES;
use crate::{assert_none, files_below, root, shown};
use std::fs;
use std::path::{Path, PathBuf};

/// What the tree may have at most. A feature pays with what it removes; only a record in
/// `docs/decisions.md` raises a cap. `tools/tests/tools/reference.rs` caps the options.
const LINES_MAX: [(&str, usize); 12] = [
    ("kernels/src", 21_020),
    ("kernels/cuda", 2_780),
    ("runtime/src", 20_920),
    ("link/src", 722),
    ("server/src", 5_010),
    ("board/src", 1_926),
    ("capi/src", 955),
    ("python/src", 518),
    ("tools/src", 16_630),
    ("tools/trainer/hatchback_trainer", 6_910),
    ("bench/src", 11_240),
    ("tests/src", 6_295),
];
const WORDS_MAX: usize = 45_000;
const TARGET_KEYS_MAX: usize = 42;
const TEST_PROGRAMS_MAX: usize = 14;
const CRATES_MAX: usize = 437;

/// Returns whether a line is a comment of Python. `#[` and `#define` are code.
fn is_note(line: &str) -> bool {
    line == "#" || line.starts_with("# ")
}

/// Returns the lines of code: without empty lines and comments, which no cap should make scarce.
fn lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap();
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//") && !is_note(line);
    text.lines().map(str::trim).filter(is_code).count()
}

/// Returns the test programs of the crates: files and folders of their `tests`.
fn test_programs() -> Vec<String> {
    let folders = CRATES.iter().map(|layers| layers.folder).chain(["tests"]);
    let entries = folders.filter_map(|folder| fs::read_dir(root().join(folder).join("tests")).ok());
    let paths = entries.flatten().map(|entry| entry.unwrap().path());
    let programs = paths.filter(|path| {
        path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").is_file()
    });
    programs.map(|path| shown(&path)).collect()
}

#[test]
fn the_tree_stays_within_its_caps() {
    let mut counts: Vec<(String, usize, usize)> = Vec::new();
    for (folder, most) in LINES_MAX {
        let files = files_below(&root().join(folder), &[".rs", ".cu", ".cuh", ".py"]);
        let count = files.iter().map(|path| lines(path)).sum();
        counts.push((format!("lines of code of {folder}"), count, most));
    }
    let pages = files_below(&root(), &[".md"]);
    let words = |page: &PathBuf| fs::read_to_string(page).unwrap().split_whitespace().count();
    counts.push(("words of the pages".into(), pages.iter().map(words).sum(), WORDS_MAX));
    let target = fs::read_to_string(root().join("targets/base.toml")).unwrap();
    let keys = target.lines().filter(|line| !line.starts_with('#') && line.contains(" = ")).count();
    counts.push(("keys of a target".into(), keys, TARGET_KEYS_MAX));
    let programs = test_programs();
    counts.push((format!("test programs {programs:?}"), programs.len(), TEST_PROGRAMS_MAX));
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let crates = lock.lines().filter(|line| *line == "[[package]]").count();
    counts.push(("crates in the lock".into(), crates, CRATES_MAX));

    for (what, count, most) in &counts {
        println!("{what}: {count}, at most {most}");
    }
    let over = counts.iter().filter(|(_, count, most)| count > most);
    let over: Vec<String> =
        over.map(|(what, count, most)| format!("{what}: {count}, over {most}")).collect();
    assert_none("counts over their caps", &over);
}
