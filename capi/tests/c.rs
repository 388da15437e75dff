//! A C program scores the demo's samples through the header and the shared library, with the same
//! bits as the runtime, and makes every mistake that the header names. For C++ the header is only
//! compiled.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::LookupStatus;
use hatchback::clock::SystemClock;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::targets::Target;
use hatchback_tools::pack::{Overrides, pack_file};
use hatchback_tools::serve::install;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Returns the demo's probe set in the form that the C program reads, and the runtime's scores and
/// statuses.
fn expected(flash: &Path) -> (String, Vec<(f32, LookupStatus)>) {
    let model = Arc::new(Model::open(&disk::system(), flash, Budget::default()).unwrap());
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let (mut lines, mut scores, mut batch) = (String::new(), Vec::new(), model.batch());
    let probe = std::fs::read_to_string(here("../tools/demo/coupon/probe.jsonl")).unwrap();
    for line in probe.lines() {
        let sample = Sample::from_json(line, model.schema()).unwrap();
        let dense = sample.dense.iter().map(ToString::to_string);
        let sparse = sample.sparse.iter().flat_map(|bag| {
            std::iter::once(bag.len() as u64).chain(bag.iter().copied()).map(|n| n.to_string())
        });
        lines += &(dense.chain(sparse).collect::<Vec<_>>().join(" ") + "\n");
        batch.clear();
        batch.push(model.schema(), &sample).unwrap();
        let answer = worker.score(&batch, None).unwrap();
        scores.push((answer.values[0], answer.statuses[0]));
    }
    (lines, scores)
}

/// Runs `cc` or `c++`.
fn compile(compiler: &str, arguments: &[&str]) {
    let mut command = Command::new(compiler);
    command
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(here("."))
        .args(arguments);
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Compiles the C program in `folder`, beside a link to the library with the library's own name.
fn program(folder: &Path) -> PathBuf {
    let (built, link) = (std::env::current_exe().unwrap(), folder.join("libhatchback.so.0"));
    std::os::unix::fs::symlink(built.with_file_name("libhatchback_capi.so"), &link).unwrap();
    let (program, source) = (folder.join("score"), here("tests/score.c"));
    let rpath = format!("-Wl,-rpath,{}", folder.display());
    let [program_, source, link] = [&program, &source, &link].map(|path| path.to_str().unwrap());
    compile("cc", &["-std=c99", "-O1", source, link, &rpath, "-o", program_]);
    program
}

#[test]
fn a_c_program_scores_with_the_same_bits_as_the_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, flash) = (folder.path().join("bundle"), folder.path().join("flash"));
    pack_file(
        &here("../tools/demo/coupon/model.toml"),
        &bundle,
        Overrides::default(),
        &mut |_, _| {},
    )
    .unwrap();
    install(&bundle, &flash).unwrap();
    let (lines, expected) = expected(&flash);
    let samples = folder.path().join("samples");
    std::fs::write(&samples, lines).unwrap();
    let output = Command::new(program(folder.path()))
        .args([here("../targets/cpu.toml"), flash, samples])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().count(), expected.len());
    for (line, (score, status)) in said.lines().zip(&expected) {
        let mut fields = line.split(' ');
        assert_eq!(
            fields.next().unwrap().parse::<f32>().unwrap().to_bits(),
            score.to_bits(),
            "{line}"
        );
        let counts: Vec<u32> = fields.map(|f| f.parse().unwrap()).collect();
        let LookupStatus { fresh, defaulted, absent, damaged, late } = *status;
        assert_eq!(counts, [fresh, defaulted, absent, damaged, u32::from(late)], "{line}");
    }
}

/// `hatchback_open` takes the memory of all calls, within the budget.
#[test]
fn a_budget_that_holds_the_model_and_not_its_calls_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, flash, target) =
        (folder.path().join("bundle"), folder.path().join("flash"), folder.path().join("own.toml"));
    pack_file(
        &here("../tools/demo/coupon/model.toml"),
        &bundle,
        Overrides::default(),
        &mut |_, _| {},
    )
    .unwrap();
    install(&bundle, &flash).unwrap();
    for name in ["base.toml", "cpu.toml"] {
        std::fs::copy(here("../targets").join(name), folder.path().join(name)).unwrap();
    }
    let cpu = Target::load(&folder.path().join("cpu.toml")).unwrap();
    let taken = Model::open(&disk::system(), &flash, cpu.budget).unwrap().memory().total();
    std::fs::write(folder.path().join("samples"), "").unwrap();
    let (program, samples) = (program(folder.path()), folder.path().join("samples"));
    let said = |memory_bytes_max: u64| {
        let text = format!("inherits = \"cpu\"\n[budget]\nmemory_bytes_max = {memory_bytes_max}\n");
        std::fs::write(&target, text).unwrap();
        let output = Command::new(&program).args([&target, &flash, &samples]).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let refused = said(taken);
    assert!(
        refused.contains(&format!("the model takes {taken} bytes and the batches of calls")),
        "{refused}"
    );
    assert!(!said(2 * taken).contains("memory_bytes_max"));
}

#[test]
fn the_header_compiles_as_cpp() {
    let header = here("hatchback.h");
    compile(
        "c++",
        &[
            "-std=c++17",
            "-fsyntax-only",
            "-include",
            header.to_str().unwrap(),
            "-x",
            "c++",
            "/dev/null",
        ],
    );
}
