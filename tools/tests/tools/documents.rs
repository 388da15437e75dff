//! Runs the commands of the documents, and compares what they print with what the documents show.
//!
//! A `sh` block is run, line by line, in the repository's root. A `text` block after it shows what
//! its last command prints. Times differ between machines and are not compared. `/tmp` in a command
//! is a folder of this test's own.

use crate::cli::root;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Guides whose commands are run, beside the README and the reference.
const PAGES: [&str; 3] = ["docs/targets.md", "docs/fleet.md", "docs/languages.md"];

/// Commands that are not run here, and why.
const NOT_RUN: [(&str, &str); 5] = [
    ("./test", "it runs this test"),
    ("cargo build", "cargo has built the programs before it runs this test"),
    ("export PATH", "this test sets the path"),
    ("hatchback demo", "the README's demo is the same"),
    ("hatchbackd", "board/tests run the daemon"),
];

/// How the pages run an example of the runtime.
const EXAMPLE: &str = "cargo run --release -p hatchback --example ";

struct Step {
    line: usize,
    command: String,
    printed: Option<String>,
}

/// The commands of a page with what the page says that they print.
fn steps_of(page: &str) -> Vec<Step> {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let mut steps: Vec<Step> = Vec::new();
    let mut language = None;
    let mut shown = String::new();
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), language) {
            (Some(""), Some("text")) => {
                // A block follows the commands that it shows, some of which are not run.
                if let Some(last) = steps.iter_mut().rfind(|step| why_not_run(step).is_none()) {
                    last.printed = Some(std::mem::take(&mut shown));
                }
                language = None;
            }
            (Some(_), Some(_)) => language = None,
            (Some(start), None) => language = Some(start),
            (None, Some("sh")) => {
                let command = line.split("  #").next().unwrap().trim();
                let continued = steps.last_mut().filter(|step| step.command.ends_with('\\'));
                if let Some(step) = continued {
                    step.command.pop();
                    step.command.push_str(command);
                } else if !command.is_empty() {
                    let command = command.to_string();
                    steps.push(Step { line: number + 1, command, printed: None });
                }
            }
            (None, Some("text")) => {
                shown.push_str(line);
                shown.push('\n');
            }
            _ => {}
        }
    }
    steps
}

fn run(command: &str, scratch: &Path) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_hatchback"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    // Examples that cargo has built beside this test.
    let examples = program.with_file_name("examples");
    // First, because the programs may be below /tmp themselves.
    let command = command.replace("/tmp/", &format!("{}/", scratch.display()));
    let command = match command.strip_prefix(EXAMPLE) {
        Some(rest) => format!("{}/{}", examples.display(), rest.replacen(" -- ", " ", 1)),
        None => command.replace("cargo run --release -- ", "hatchback "),
    };
    Command::new("sh")
        .args(["-ec", &command])
        .env("PATH", path)
        // The pages show `keys new` as people run it, and nobody types here.
        .env("HATCHBACK_KEY_PASSPHRASE", "of this test")
        .current_dir(root())
        .output()
        .unwrap()
}

/// The words of a text without rules of tables and their widths; times are replaced by one word.
fn comparable(text: &str) -> Vec<String> {
    let words: Vec<&str> =
        text.split_whitespace().filter(|word| word.chars().any(|c| c != '─')).collect();
    let after = |at: usize, by: usize| words.get(at + by).copied().unwrap_or_default();
    let all = words.iter().enumerate();
    all.map(|(at, word)| {
        let next = after(at, 1);
        // The memory of a network depends on the width of the CPU's vectors.
        if matches!(after(at, 2), "KiB" | "MiB") && next.parse::<f64>().is_ok() {
            return format!("{}.0", word.replace(',', ""));
        }
        let unit = next.trim_end_matches([',', '.', ';', ')']);
        let time = word.parse::<f64>().is_ok() && matches!(unit, "s" | "ms" | "µs");
        if time { "TIME".to_string() } else { word.to_string() }
    })
    .collect()
}

/// Whether a run printed what the page shows. Counts and words must be equal. A figure with one to
/// three decimals may differ by a twentieth: the order in which page reads end moves hit rates.
fn agrees(shown: &str, printed: &str) -> bool {
    let decimals = |word: &str| word.split_once('.').map_or(0, |(_, part)| part.len());
    let measured = |word: &str| (1..=3).contains(&decimals(word)) && !word.contains('e');
    match (shown.parse::<f64>(), printed.parse::<f64>()) {
        (Ok(a), Ok(b)) if measured(shown) && measured(printed) => (a - b).abs() <= 0.05 * a.abs(),
        _ => shown == printed,
    }
}

/// Returns why the command of `step` is not run, if it is not.
fn why_not_run(step: &Step) -> Option<&'static str> {
    let reason = NOT_RUN.iter().find(|(start, _)| step.command.starts_with(start));
    reason.map(|(_, why)| *why)
}

fn run_page(page: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let steps = steps_of(page);
    assert!(!steps.is_empty(), "{page} has no commands");
    for step in steps {
        let place = format!("{page}:{}: {}", step.line, step.command);
        if let Some(why) = why_not_run(&step) {
            println!("SKIPPED: {place}: {why}");
            continue;
        }

        if let Some(rest) = step.command.strip_prefix(EXAMPLE) {
            let name = rest.split(' ').next().unwrap();
            let example = Path::new(env!("CARGO_BIN_EXE_hatchback")).with_file_name("examples");
            if !example.join(name).exists() {
                println!("SKIPPED: {place}: `cargo test --workspace` builds the example");
                continue;
            }
        }

        let output = run(&step.command, scratch.path());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{place}: {}\n{errors}", output.status);

        if let Some(shown) = step.printed {
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            let [shown, found] = [comparable(&shown), comparable(&printed)];
            let pairs = shown.iter().zip(&found);
            let differs = pairs.enumerate().find(|(_, (a, b))| !agrees(a, b));
            if let Some((_, (a, b))) = differs {
                panic!("{place}\n--- the page shows `{a}`, the run printed `{b}`:\n{printed}");
            }
            assert_eq!(shown.len(), found.len(), "{place}: the run printed\n{printed}");
        }
    }
}

#[test]
fn the_commands_of_the_readme_print_what_it_shows() {
    run_page("README.md");
}

#[test]
fn the_commands_of_the_reference_run() {
    run_page("docs/commands.md");
}

#[test]
fn the_commands_of_the_guides_run() {
    PAGES.into_iter().for_each(run_page);
}

/// The Rust of docs/languages.md is in the example, line for line.
#[test]
fn the_rust_page_shows_the_example() {
    let page = std::fs::read_to_string(root().join("docs/languages.md")).unwrap();
    let example = std::fs::read_to_string(root().join("runtime/examples/score.rs")).unwrap();
    let (_, rest) = page.split_once("```rust\n").unwrap();
    let (shown, _) = rest.split_once("```").unwrap();
    let plain = |text: &str| {
        let lines = text.lines().map(str::trim);
        lines.filter(|line| !line.starts_with("// Opening")).collect::<Vec<_>>().join("\n")
    };
    assert!(plain(&example).contains(&plain(shown)), "docs/languages.md differs from score.rs");
}

/// Returns the folder of each package of the workspace by name.
fn packages() -> BTreeMap<String, PathBuf> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = ")).unwrap();
    let named = |member: &str| {
        let folder = root().join(member);
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = ")).unwrap();
        (name.trim_matches('"').to_string(), folder)
    };
    members.split('"').skip(1).step_by(2).map(named).collect()
}

/// Checks that cargo finds what the options of `command` name; returns the number of names. Without
/// `-p` or `--workspace`, cargo looks only into the package of the tool.
fn check_names(page: &Path, command: &str, packages: &BTreeMap<String, PathBuf>) -> usize {
    let page = page.display();
    let words: Vec<&str> = command.split_whitespace().collect();
    let after = |option: &str| {
        let at = words.iter().position(|word| *word == option)?;
        words.get(at + 1).copied()
    };
    let package = after("-p").unwrap_or("hatchback-tools");
    assert!(packages.contains_key(package), "{page}: {command}: no package {package}");

    let folders = [("--test", "tests"), ("--bin", "src/bin"), ("--example", "examples")];
    let mut names = 0;
    for (option, folder) in folders {
        let Some(name) = after(option) else { continue };
        let has = |package: &PathBuf| {
            let path = package.join(folder).join(name);
            path.with_extension("rs").exists() || path.join("main.rs").exists()
        };
        let found = if words.contains(&"--workspace") {
            packages.values().any(has)
        } else {
            has(&packages[package])
        };
        assert!(found, "{page}: {command}: cargo does not find {name}");
        names += 1;
    }
    names
}

#[test]
fn cargo_finds_every_test_and_program_that_a_page_names() {
    let packages = packages();
    let mut names = 0;
    for folder in [root(), root().join("docs")] {
        for entry in std::fs::read_dir(folder).unwrap() {
            let page = entry.unwrap().path();
            if page.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&page).unwrap();
            let commands = text.split(['`', '\n']).filter(|part| part.contains("cargo "));
            let check = |command| check_names(&page, command, &packages);
            names += commands.map(check).sum::<usize>();
        }
    }
    assert!(names > 10, "the pages name only {names} tests and programs");
}

#[test]
fn the_fleet_page_explains_every_alert() {
    let rules = std::fs::read_to_string(root().join("server/monitoring/alerts.yml")).unwrap();
    let page = std::fs::read_to_string(root().join("docs/fleet.md")).unwrap();
    let alerts: Vec<&str> =
        rules.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `Hatchback")?.split_once('`'));
    let rows: Vec<String> = rows.map(|(name, _)| format!("Hatchback{name}")).collect();
    assert!(alerts.len() > 5);
    assert_eq!(rows, alerts, "docs/fleet.md and alerts.yml differ");
}

#[test]
fn a_changed_figure_is_seen_and_a_changed_time_is_not() {
    let shown = comparable("─────\n hit rate  96.27 %  took 4.8 s, 10 rows\n");
    let same = comparable(" hit rate 96.31 % took 12 s, 10 rows");
    let other = comparable(" hit rate 96.31 % took 12 s, 11 rows");
    assert!(shown.iter().zip(&same).all(|(a, b)| agrees(a, b)));
    assert!(!shown.iter().zip(&other).all(|(a, b)| agrees(a, b)));
    assert!(!agrees("96.27", "88.0") && !agrees("0.83731", "0.83732"));
}
