//! A C program scores the demo's samples through the header and the shared library, with the same
//! bits as the runtime, and makes every mistake that the header names. A C++ program follows live
//! updates.

use crate::changing::{DIM, releases, value};
use crate::programs::{
    changed_coupon, compile, here, library, library_sanitizer, pack_and_install, shared_coupon,
};
use clap::Parser;
use hatchback::LookupStatus;
use hatchback::clock::SystemClock;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Placement};
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, open_model};
use hatchback_tests::onnx;
use hatchback_tests::versions::{Kind, SNAPSHOT_EVERY, Versions};
use hatchback_tools::cli::{Cli, run};
use hatchback_tools::pack::key_spec::KeySpec;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::serve::install;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

/// Returns the demo's probe set in the form that the C program reads, and the runtime's scores and
/// statuses.
fn expected(flash: &Path) -> (String, Vec<(f32, LookupStatus)>) {
    let model = Arc::new(open_model(flash, Budget::default()).unwrap());
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

/// Copies the demo's model to `folder`, with every table in the cache and no hot list, so that the
/// first request for a key reads flash.
fn cold_coupon(folder: &Path) -> PathBuf {
    let without_counts = |line: &str| match line.split_once(", counts") {
        Some((line, _)) => format!("{line} }}\n"),
        None => format!("{line}\n"),
    };
    changed_coupon(folder, |spec| {
        let cold: String = spec.lines().map(without_counts).collect();
        cold.replace("keys = \"index\"", "keys = \"index\"\nplacement = \"cached\"")
    })
}

/// Compiles the C program `name` in `folder`, beside a link to the library.
fn program(folder: &Path, name: &str) -> PathBuf {
    let (program, source) = (folder.join(name), here(&format!("tests/{name}.c")));
    let link = library(folder);
    let rpath = format!("-Wl,-rpath,{}", folder.display());
    let [program_, source, link] = [&program, &source, &link].map(|path| path.to_str().unwrap());
    compile("cc", &["-std=c99", "-O1", source, link, &rpath, "-o", program_]);
    program
}

#[test]
fn a_c_program_scores_with_the_same_bits_as_the_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let model = cold_coupon(folder.path());
    let (flash, _) = pack_and_install(model.to_str().unwrap(), folder.path());
    let (lines, expected) = expected(&flash);
    let samples = folder.path().join("samples");
    std::fs::write(&samples, lines).unwrap();
    let output = Command::new(program(folder.path(), "score"))
        .args([here("../targets/cpu.toml"), flash, samples])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("panicked"), "{errors}");
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

/// `Sample` reads the same line as `hatchback run` and the front door, which have only the columns.
#[test]
fn a_c_program_makes_the_keys_of_a_cross_as_a_request_of_its_columns_does() {
    let table = TablePlan::cached(KeySpace::Index, 400, 6, CodecChoice::F32);
    let (name, tables, features) =
        ("crossed".to_owned(), vec![table], vec![FeaturePlan::one_hot(0); 3]);
    let plan = ModelPlan { name, sequence: 1, seed: 45, dense: 0, tables, features };
    let mut spec = plan.spec();
    spec.features[0].key = Some(KeySpec::Farmhash64 { buckets: 400, first: 0 });
    let columns = vec!["f0".to_owned(), "f1".to_owned()];
    spec.features[2].key = Some(KeySpec::Cross { columns, buckets: 390, first: 10 });
    let packed = plan.pack_spec(&spec, onnx::concat);
    let flash = packed.install();
    let model = Arc::new(open_model(&flash, Budget::default()).unwrap());
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));

    let values = [("Rome", 3), ("K\u{f6}ln", 399), ("", 0), ("two words", 17)];
    let given = values.iter().flat_map(|(text, integer)| [(*text).to_owned(), integer.to_string()]);
    let output = Command::new(program(packed.folder(), "cross"))
        .args([here("../targets/cpu.toml"), flash])
        .args(given)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said.lines().count(), values.len());
    for (line, (text, integer)) in said.lines().zip(values) {
        let sample = serde_json::json!({"sparse": {"f0": [text], "f1": [integer]}}).to_string();
        let sample = Sample::from_json(&sample, model.schema()).unwrap();
        let mut batch = model.batch();
        batch.push(model.schema(), &sample).unwrap();
        let score = worker.score(&batch, None).unwrap().values[2 * 6];
        let (key, found) = line.split_once(' ').unwrap();
        assert_eq!(key, sample.sparse[2][0].to_string(), "{text}");
        assert_eq!(found.parse::<f32>().unwrap().to_bits(), score.to_bits(), "{text}");
    }
}

/// The table is in the cache and has the miss policy `default`: a request would answer with default
/// rows.
#[test]
fn a_c_program_explains_as_the_command_does_and_the_served_model_does_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = cold_coupon(folder.path());
    let spec = model.join("model.toml");
    let cold = std::fs::read_to_string(&spec).unwrap();
    let cached = "placement = \"cached\"";
    std::fs::write(&spec, cold.replace(cached, &format!("{cached}\nmiss = \"default\""))).unwrap();
    let (flash, _) = pack_and_install(model.to_str().unwrap(), folder.path());
    let samples = here("../tools/demo/coupon/heldout.jsonl");
    let all = std::fs::read_to_string(samples).unwrap();
    let lines: Vec<&str> = all.lines().take(20).collect();
    let few = folder.path().join("few.jsonl");
    std::fs::write(&few, lines.join("\n")).unwrap();

    let output = Command::new(program(folder.path(), "explain"))
        .args([here("../targets/cpu.toml"), flash.clone(), few])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(said.lines().count(), lines.len());
    for (report, line) in said.lines().zip(lines) {
        let report = json(report);
        assert!(report["status"]["defaulted"] == 0 && report["status"]["fresh"] != 0, "{report}");
        let (flash, file) = (flash.to_str().unwrap(), folder.path().join("report.json"));
        let file = file.to_str().unwrap();
        let command = ["hatchback", "explain", flash, line, "--json", file];
        run(Cli::try_parse_from(command).unwrap()).unwrap();
        assert_eq!(report, json(&std::fs::read_to_string(file).unwrap()));
    }
}

/// A C++ program follows live updates, built plainly and with sanitizers. Every answer is one
/// generation's, with its rows' bits. HATCHBACK_UPDATES is the number of updates.
#[test]
fn a_cpp_program_follows_live_updates() {
    let updates = std::env::var("HATCHBACK_UPDATES").map_or(2, |n| n.parse().unwrap());
    let kind = Kind { placement: Placement::Cached, changes_keys: false };
    let versions = Versions::of(kind, &vec![2; updates], 300, 3);
    // A sanitized library requires programs with the same sanitizer.
    let all = [None, Some("address,undefined"), Some("thread")];
    let sanitizers = if library_sanitizer().is_some() { &all[..1] } else { &all[..] };
    for &sanitizer in sanitizers {
        let folder = tempfile::tempdir().unwrap();
        match cpp_program(folder.path(), "follow", sanitizer) {
            Some(program) => follow(folder.path(), &program, &versions),
            None => println!("SKIPPED: the compiler has no sanitizer {sanitizer:?}"),
        }
    }
}

/// Compiles `NAME.cpp` in `folder`. Returns `None` if the compiler does not have the sanitizer.
fn cpp_program(folder: &Path, name: &str, sanitizer: Option<&str>) -> Option<PathBuf> {
    let (program, empty) = (folder.join(name), folder.join("empty.cpp"));
    let sanitize = sanitizer.map(|sanitizer| format!("-fsanitize={sanitizer}"));
    std::fs::write(&empty, "int main() {}").unwrap();
    let probe =
        Command::new("c++").args(&sanitize).args([&empty, Path::new("-o"), &program]).output();
    if !probe.unwrap().status.success() {
        return None;
    }

    let (source, link) = (here(&format!("tests/{name}.cpp")), library(folder));
    let rpath = format!("-Wl,-rpath,{}", folder.display());
    let [source, link, out] = [&source, &link, &program].map(|path| path.to_str().unwrap());
    let mut arguments =
        vec!["-std=c++17", "-O1", "-g", "-pthread", source, link, &rpath, "-o", out];
    arguments.extend(sanitize.as_deref());
    compile("c++", &arguments);
    Some(program)
}

/// Makes the generations of `versions` live one by one, each after `program` has answered with the
/// one before it. Checks the answers.
fn follow(folder: &Path, program: &Path, versions: &Versions) {
    let (flash, file) = (folder.join("flash"), folder.join("sample"));
    install(&versions.deltas[0], &flash).unwrap();

    // The keys whose rows change most often.
    let changes = |t: usize, order: &u64| {
        versions.rows.windows(2).filter(|two| two[0][t][order] != two[1][t][order]).count()
    };
    let [index, hashed] =
        [0, 1].map(|t| *versions.rows[0][t].keys().max_by_key(|o| changes(t, o)).unwrap());
    std::fs::write(&file, format!("1 {index} 1 {}\n", hatchback::unmix(hashed))).unwrap();

    let (mut child, mut said) = start(program, &flash, &file);
    for (g, rows) in versions.rows.iter().enumerate() {
        if g > 0 {
            let is_snapshot = (g as u64).is_multiple_of(SNAPSHOT_EVERY);
            let bundles = if is_snapshot { &versions.snapshots } else { &versions.deltas };
            install_beside(&bundles[g], &flash);
        }
        let values =
            [&rows[0][&index], &rows[1][&hashed]].into_iter().flat_map(|row| row.chunks(4));
        let bits = values.map(|value| u32::from_le_bytes(value.try_into().unwrap()).to_string());
        let expected = format!("{} {}", g + 1, bits.collect::<Vec<_>>().join(" "));
        assert_eq!(said.next().unwrap().unwrap(), expected);
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success() && said.next().is_none(), "{}", program.display());
}

/// Starts the program `follow`. Returns it with the lines that it prints.
fn start(program: &Path, flash: &Path, sample: &Path) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(program)
        .args([&here("../targets/cpu.toml"), flash, sample])
        .env("TSAN_OPTIONS", format!("suppressions={}", here("tests/tsan.supp").display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, said)
}

/// Installs `bundle` in a directory that a program follows.
fn install_beside(bundle: &Path, flash: &Path) {
    // The program may hold the lock of the directory until its swap has ended.
    while let Err(e) = install(bundle, flash) {
        assert!(format!("{e:#}").contains("another process is changing"), "{e:#}");
        std::thread::yield_now();
    }
}

/// The program sends the features of release 1 on, whatever release is live.
#[test]
fn a_handle_keeps_its_shape_while_releases_change_the_schema() {
    let folder = tempfile::tempdir().unwrap();
    let (flash, file) = (folder.path().join("flash"), folder.path().join("sample"));
    let bundles = releases(folder.path());
    install(&bundles[0], &flash).unwrap();
    let [a, b] = [7, 11];
    std::fs::write(&file, format!("1 {a} 1 {b}\n")).unwrap();
    // Release 2 retires `b`, and takes 0.5 for the dense feature that is not sent.
    let changed = value(0, a) + 0.5;
    let expected = [value(0, a) + value(0, b), changed, changed];

    let program = cpp_program(folder.path(), "follow", None).unwrap();
    let (mut child, mut said) = start(&program, &flash, &file);
    for (g, (bundle, expected)) in bundles.iter().zip(expected).enumerate() {
        if g > 0 {
            install_beside(bundle, &flash);
        }
        let bits = format!(" {}", expected.to_bits()).repeat(DIM);
        assert_eq!(said.next().unwrap().unwrap(), format!("{}{bits}", g + 1));
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success() && said.next().is_none());
}

/// A C++ program names the outputs of a model with two, with the scores of the runtime.
#[test]
fn outputs_have_names() {
    let folder = tempfile::tempdir().unwrap();
    let (flash, _) = pack_and_install("../tests/data/families/mmoe", folder.path());
    let model = Arc::new(open_model(&flash, Budget::default()).unwrap());
    let mut batch = model.batch();
    let sample = Sample::from_json(r#"{"dense":[0,0,0]}"#, model.schema()).unwrap();
    batch.push(model.schema(), &sample).unwrap();
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    let expected = worker.score(&batch, None).unwrap().values.to_vec();

    let program = cpp_program(folder.path(), "outputs", None).unwrap();
    let run = |output: &str| {
        let mut command = Command::new(&program);
        command.args([&here("../targets/cpu.toml"), &flash]).arg(output).output().unwrap()
    };
    let said = String::from_utf8(run("cvr").stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    let [ctr, cvr, "1"] = lines[..] else { panic!("{said}") };
    for ((name, line), score) in ["ctr", "cvr"].into_iter().zip([ctr, cvr]).zip(expected) {
        let (found, value) = line.split_once(' ').unwrap();
        assert_eq!((found, value.parse::<f32>().unwrap().to_bits()), (name, score.to_bits()));
    }
    let refused = run("nothing");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("no output `nothing`"), "{said}");
}

/// A usual flag in cars.
#[test]
fn the_header_for_cpp_compiles_without_exceptions() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("score.cpp");
    let text = "#include \"hatchback.hpp\"\nint main(int, char **argv) {\n\
                hatchback::process process(argv[1]);\n\
                hatchback::model model = process.load(argv[2]);\n\
                hatchback::request from;\n hatchback::answer to;\n\
                return model.try_score(from, to) == HATCHBACK_OK;\n}\n";
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-fno-exceptions", "-Wall", "-Wextra", "-Werror", "-c", "-I"])
        .args([here(""), source, "-o".into(), folder.path().join("score.o")])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// The example builds with CMake against an installed library, and ranks.
#[test]
fn the_example_builds_with_cmake_and_ranks() {
    if Command::new("cmake").arg("--version").output().is_err() {
        return println!("SKIPPED: cmake is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("usr");
    let config = prefix.join("lib/cmake/hatchback");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::create_dir_all(prefix.join("include")).unwrap();
    for header in ["hatchback.h", "hatchback.hpp"] {
        std::fs::copy(here(header), prefix.join("include").join(header)).unwrap();
    }
    for name in ["hatchback-config.cmake", "hatchback-config-version.cmake"] {
        std::fs::copy(here(name), config.join(name)).unwrap();
    }
    let version = std::fs::read_to_string(here("hatchback-config-version.cmake")).unwrap();
    assert!(version.contains(concat!("PACKAGE_VERSION ", env!("CARGO_PKG_VERSION"), ")")));
    let link = library(&prefix.join("lib"));
    std::os::unix::fs::symlink(&link, link.with_file_name("libhatchback.so")).unwrap();

    // A busy machine may miss the example's deadline.
    let (build, example) = (folder.path().join("build"), folder.path().join("example"));
    std::fs::create_dir(&example).unwrap();
    for name in ["CMakeLists.txt", "rank.cpp"] {
        let text = std::fs::read_to_string(here("example").join(name)).unwrap();
        let text = text.replace("milliseconds(50)", "hours(1)");
        std::fs::write(example.join(name), text).unwrap();
    }
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {said}{errors}");
        said
    };
    run(Command::new("cmake")
        .args([Path::new("-S"), &example, Path::new("-B"), &build])
        .arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()))
        .args(library_sanitizer().map(|name| format!("-DCMAKE_CXX_FLAGS=-fsanitize={name}"))));
    run(Command::new("cmake").arg("--build").arg(&build));

    let model = shared_coupon(folder.path());
    let (flash, feature) = pack_and_install(model.to_str().unwrap(), folder.path());
    let said = run(Command::new(build.join("rank"))
        .args([&here("../targets/cpu.toml"), &flash])
        .arg(feature)
        .args(["0", "1", "2"]));
    let scores: Vec<f32> =
        said.lines().skip(1).map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(said.starts_with("generation 1\n") && scores.len() == 3, "{said}");
    assert!(scores.is_sorted_by(|a, b| a >= b), "{said}");
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
