//! The programs of docs/languages.md compile as they are printed, and score the demo's model.

use crate::programs::{compile, here, library, pack_and_install, shared_coupon};
use std::process::Command;

/// Compiles the page's program in `language` with `compiler`, runs it, and returns what it prints.
fn run_program(language: &str, compiler: &str, standard: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(here("../docs/languages.md")).unwrap();
    let (_, rest) = text.split_once(&format!("```{language}\n")).unwrap();
    let (program, _) = rest.split_once("```").unwrap();
    // A busy machine may miss the page's deadline.
    let program =
        program.replace("us = 1000000", "us = 3600000000").replace("seconds(1)", "hours(1)");
    let source = folder.path().join(format!("program.{language}"));
    std::fs::write(&source, program).unwrap();

    let (out, link) = (folder.path().join("program"), library(folder.path()));
    let rpath = format!("-Wl,-rpath,{}", folder.path().display());
    let [source, link, out] = [&source, &link, &out].map(|path| path.to_str().unwrap());
    compile(compiler, &[standard, source, link, &rpath, "-o", out]);

    let model = shared_coupon(folder.path());
    let (flash, _) = pack_and_install(model.to_str().unwrap(), folder.path());
    let run = |flash| {
        let mut command = Command::new(out);
        command.args([here("../targets/cpu.toml"), flash]).output().unwrap()
    };
    let refused = run(folder.path().join("nothing"));
    assert!(!refused.status.success() && !refused.stderr.is_empty(), "{refused:?}");
    let output = run(flash);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_programs_of_the_page_in_c_and_cpp_print_the_same_score() {
    let c = run_program("c", "cc", "-std=c99");
    let cpp = run_program("cpp", "c++", "-std=c++17");
    assert!(c.starts_with("score 0.") && c.ends_with(", generation 1\n"), "{c}");
    assert_eq!(c, cpp);
}
