//! The house rules that a program can check. Reads the sources as text; builds and runs nothing of
//! the product. `CONTRIBUTING.md` has the rules.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod caps;
mod graph;
mod imports;
mod pages;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use graph::Facts;
use imports::{CRATES, Layers};
use pages::references;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// All files below `folder` with one of these endings, sorted; build outputs, virtual environments
/// of Python and hidden folders are left out.
fn files_below(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_left_out = name.starts_with('.') || name == "target" || name == "venv";
            if path.is_dir() && !is_left_out {
                folders.push(path);
            } else if endings.iter().any(|e| name.ends_with(e)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// One source file of a crate.
struct Source {
    path: PathBuf,
    /// Its module path below the crate's root; `["main"]` for a program beside the library.
    module: Vec<String>,
    syntax: syn::File,
}

fn sources_of(layers: &Layers) -> Vec<Source> {
    let folder = root().join(layers.folder).join("src");
    let parse = |path: PathBuf| {
        let inner = path.strip_prefix(&folder).unwrap().with_extension("");
        let mut module: Vec<String> =
            inner.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if module.last().is_some_and(|last| last == "mod" || last == "lib") {
            module.pop();
        }
        let syntax = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap();
        Source { path, module, syntax }
    };
    files_below(&folder, &[".rs"]).into_iter().map(parse).collect()
}

fn assert_none(what: &str, found: &[String]) {
    println!("{what}: {}", found.len());
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

#[test]
fn every_limit_is_in_limits_rs() {
    let mut found = Vec::new();
    for layers in
        CRATES.iter().filter(|c| ["runtime", "link", "server", "board"].contains(&c.folder))
    {
        for source in sources_of(layers).iter().filter(|s| !s.path.ends_with("limits.rs")) {
            let limits = Facts::of(source).limits;
            found.extend(limits.iter().map(|name| format!("{}: {name}", shown(&source.path))));
        }
    }
    assert_none("limits outside limits.rs", &found);
}

#[test]
fn no_function_takes_a_tuple_or_two_bools() {
    let mut found = Vec::new();
    for source in CRATES.iter().flat_map(sources_of) {
        let parameters = Facts::of(&source).parameters;
        found.extend(parameters.iter().map(|p| format!("{}: {p}", shown(&source.path))));
    }
    assert_none("tuple and second bool parameters", &found);
}

#[test]
fn a_public_type_has_a_name_of_its_own_in_its_crate() {
    let mut found = Vec::new();
    for layers in &CRATES {
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for source in sources_of(layers) {
            for name in Facts::of(&source).types {
                files.entry(name).or_default().push(shown(&source.path));
            }
        }
        let twice = files.into_iter().filter(|(_, files)| files.len() > 1);
        found.extend(twice.map(|(name, files)| format!("{name}: {}", files.join(", "))));
    }
    assert_none("public types of one name", &found);
}

#[test]
fn unsafe_code_is_only_in_the_files_that_contributing_lists() {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let listed: BTreeSet<String> =
        references(&page).into_iter().filter(|path| path.ends_with(".rs")).collect();
    let starts = ["{", "fn", "impl", "trait", "extern"].map(|next| format!("unsafe {next}"));

    let mut found = BTreeSet::new();
    for path in
        CRATES.iter().flat_map(|c| files_below(&root().join(c.folder).join("src"), &[".rs"]))
    {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        if code.into_iter().any(|line| starts.iter().any(|start| line.contains(start.as_str()))) {
            found.insert(shown(&path));
        }
    }
    println!("files with unsafe code: {}", found.len());
    let listed: BTreeSet<String> =
        listed.into_iter().filter(|path| path.contains("/src/")).collect();
    assert_eq!(found, listed);
}

/// `python/test` and a newcomer's `cargo run` build one package. A crate that has other features
/// there than in the tests is built a second time, with all that depend on it.
#[test]
fn the_tool_and_the_python_package_share_the_builds_of_the_tests() {
    let features_of = |arguments: &[&str]| -> BTreeSet<String> {
        let mut tree = Command::new(env!("CARGO"));
        tree.args(["tree", "--locked", "--prefix=none", "--format={p} {f}"]).args(arguments);
        let tree = tree.current_dir(root()).output().unwrap();
        let text = String::from_utf8(tree.stdout).unwrap();
        text.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    };
    let shared = features_of(&["--workspace", "--edges=normal,build,dev"]);
    for package in ["hatchback-tools", "hatchback-python", "hatchback-bench", "hatchback-tests"] {
        let alone = features_of(&["--edges=normal,build", "--package", package]);
        assert!(!alone.is_empty(), "cargo tree knows no {package}");
        let others: Vec<String> = alone.difference(&shared).cloned().collect();
        assert_none(&format!("features of {package} alone, which the tests lack"), &others);
    }
}

#[test]
fn every_mutant_has_its_place_and_every_promise_its_line() {
    let checked = Command::new(root().join("tests/mutants")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
