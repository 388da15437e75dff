//! The program as its users run it: every command on the coupon model, checked by its exit status
//! and its output.

use hatchback::bundle::BundleReader;
use hatchback_tools::run::Sent;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Returns the root of the tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

pub fn coupon(file: &str) -> String {
    root().join("tools/demo/coupon").join(file).display().to_string()
}

/// Copies the files in the folder `from` into the folder `to`, which it makes.
pub fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// Runs the program with `input` on its standard input.
pub fn hatchback(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hatchback"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that stops early closes the pipe before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Returns the standard output of a command that must succeed.
pub fn printed(args: &[&str]) -> String {
    answered(args, "")
}

/// Returns the report of a command that must succeed.
pub fn report_of(args: &[&str]) -> Value {
    serde_json::from_str(&printed(&[args, &["--json"]].concat())).unwrap()
}

/// Returns the standard output of a command that must succeed with `input`.
pub fn answered(args: &[&str], input: &str) -> String {
    let output = hatchback(args, input);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the standard error of a command that must fail.
pub fn refused(args: &[&str]) -> String {
    let output = hatchback(args, "");
    assert!(!output.status.success(), "{args:?} succeeded");
    String::from_utf8(output.stderr).unwrap()
}

/// Returns the exit status and the errors of a command that writes to a closed pipe.
fn into_closed_pipe(args: &[&str]) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_hatchback"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A folder for the files of a test.
pub struct Desk {
    pub folder: tempfile::TempDir,
}

impl Desk {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Writes the coupon model of this `sequence`, and returns its model.toml.
    pub fn model(&self, sequence: u64) -> String {
        let folder = self.folder.path().join(format!("m{sequence}"));
        copy_files(Path::new(&coupon("")), &folder);
        let spec = folder.join("model.toml");
        let text = std::fs::read_to_string(&spec).unwrap();
        std::fs::write(&spec, text.replace("sequence = 1", &format!("sequence = {sequence}")))
            .unwrap();
        spec.display().to_string()
    }

    pub fn pack(&self, extra: &[&str]) -> String {
        let bundle = self.path("coupon.hatch");
        printed(&[&["pack", &coupon("model.toml"), "--out", &bundle], extra].concat());
        bundle
    }
}

/// The car replaces what stands where its own files belong. The tools write to paths of a user.
#[test]
fn what_a_user_has_is_not_replaced() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let (shares, notes) = (desk.path("shares"), desk.path("notes.txt"));
    let share = ["pack", &coupon("model.toml"), "--table", "weather", "--out", &shares];
    printed(&share);
    let packed = |path: &str| std::fs::read_dir(path).unwrap().count();
    let before = packed(&shares);
    let said = refused(&["pack", &coupon("model.toml"), "--out", &shares]);
    assert!(said.contains(&shares) && said.contains("directory"), "{said}");
    assert!(before > 0 && packed(&shares) == before);

    let plan = ["plan", &coupon("heldout.jsonl"), "--model", &bundle, "--resident-mib", "0"];
    let said = refused(&[&plan[..], &["--hit-percent", "75", "--write-target", &shares]].concat());
    assert!(said.contains("is a directory"), "{said}");
    assert_eq!(packed(&shares), before);

    std::fs::write(&notes, "notes").unwrap();
    let said = refused(&["eval", &bundle, "--flash", &notes]);
    assert!(said.contains("notes.txt: exists and is not a flash directory"), "{said}");
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "notes");
}

#[test]
fn pack_inspect_eval() {
    let desk = Desk::new();
    let bundle = desk.pack(&["--codec", "f32", "--placement", "cached"]);
    let report: Value = report_of(&["inspect", &bundle, "--verify"]);
    assert_eq!(
        (report["generation"].as_str(), report["tables"].as_array().unwrap().len()),
        (Some("coupon-dlrm@1"), 18)
    );
    assert_eq!(report["damage"].as_array().unwrap().len(), 0);
    let held_out = coupon("heldout.jsonl");
    let eval = [
        "eval",
        &bundle,
        "--samples",
        &held_out,
        "--cache-mib",
        "0.05",
        "--batch",
        "8",
        "--json",
        "-",
    ];
    let found: Value = serde_json::from_str(&printed(&eval)).unwrap();
    assert_eq!(found["samples"], 2498);
    assert!(found["score_difference_max"].as_f64().unwrap() < 1e-4);
    assert!(
        (found["auc"].as_f64().unwrap() - found["reference_auc"].as_f64().unwrap()).abs() < 1e-4
    );
    assert!(found["hit_rate"].as_f64().unwrap() < 1.0 && found["pages"].as_u64().unwrap() > 0);
    // The flash directory serves too, and its pages are sound.
    let flash = desk.path("coupon.flash");
    printed(&["inspect", &flash, "--verify"]);
    let folder = Path::new(&flash).join("g000000000001");
    // A segment describes itself in its last page.
    for name in ["dense.onnx", "t0000.hot", "probe", "t0003-0000.seg"] {
        let whole = std::fs::read(folder.join(name)).unwrap();
        let mut bad = whole.clone();
        bad[if name.ends_with(".seg") { whole.len() - 4096 } else { whole.len() / 2 }] ^= 1;
        std::fs::write(folder.join(name), bad).unwrap();
        let output = hatchback(&["inspect", &flash, "--verify"], "");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(
            !output.status.success() && said.contains("DAMAGED") && said.contains(name),
            "{name}: {said}"
        );
        std::fs::write(folder.join(name), whole).unwrap();
    }
    printed(&["inspect", &flash, "--verify"]);
    assert!(printed(&["eval", &flash]).contains("hit rate"));
}

#[test]
fn run_answers_every_line_in_order() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let text = std::fs::read_to_string(coupon("probe.jsonl")).unwrap();
    let mut lines: Vec<&str> = text.lines().take(10).collect();
    lines.insert(4, "{\"dense\": [1]}");
    lines.insert(7, "not json");
    let output = hatchback(&["run", &bundle, "--batch", "3"], &lines.join("\n"));
    assert!(!output.status.success(), "two lines are no samples");
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 lines were not samples"));
    let answers: Vec<Value> = output
        .stdout
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert_eq!(answers.len(), 12);
    assert_eq!((answers[4]["line"].as_u64(), answers[7]["line"].as_u64()), (Some(5), Some(8)));
    assert!(answers[4]["error"].as_str().unwrap().contains("dense: 1 values, the model takes 7"));
    for (line, answer) in lines.iter().zip(&answers).filter(|(_, a)| a["error"].is_null()) {
        let expected: Value = serde_json::from_str(line).unwrap();
        let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
        assert!(difference.abs() < 0.01 && answer["status"]["defaulted"] == 0, "{line}");
    }
}

/// Dense features near the largest f32 make NaN of the coupon model's score.
const WITHOUT_SCORE: &str =
    "{\"dense\": [3.4e38, 3.4e38, 3.4e38, 3.4e38, 3.4e38, 3.4e38, 3.4e38], \"label\": 1}";

#[test]
fn run_answers_a_score_that_is_not_a_number_with_an_error() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let text = std::fs::read_to_string(coupon("probe.jsonl")).unwrap();
    let mut lines: Vec<&str> = text.lines().take(5).collect();
    lines.insert(1, WITHOUT_SCORE);
    let output = hatchback(&["run", &bundle, "--batch", "3"], &lines.join("\n"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("1 sample has a score"), "{said}");

    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> =
        answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 6);
    for (number, answer) in answers.iter().enumerate() {
        assert_eq!(answer["score"][0].is_number(), number != 1, "{answer}");
    }
    assert_eq!(answers[1]["line"], 2);
    assert!(answers[1]["error"].as_str().unwrap().contains("score[0] is NaN"), "{}", answers[1]);
}

#[test]
fn eval_counts_scores_that_are_not_numbers_and_leaves_them_out() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let text = std::fs::read_to_string(coupon("probe.jsonl")).unwrap();
    let (whole, partly) = (desk.path("whole.jsonl"), desk.path("partly.jsonl"));
    std::fs::write(&whole, &text).unwrap();
    std::fs::write(&partly, format!("{WITHOUT_SCORE}\n{text}")).unwrap();
    let eval = |samples: &str| {
        hatchback(&["eval", &bundle, "--samples", samples, "--batch", "4", "--json"], "")
    };
    let report = |output: &Output| -> Value { serde_json::from_slice(&output.stdout).unwrap() };

    let (whole, partly) = (eval(&whole), eval(&partly));
    assert!(whole.status.success() && !partly.status.success());
    let said = String::from_utf8_lossy(&partly.stderr);
    assert!(said.contains("samples have no score; the first: sample 1 of the set"), "{said}");
    let (whole, partly) = (report(&whole), report(&partly));
    assert_eq!((&whole["not_finite"], &partly["not_finite"]), (&0.into(), &1.into()));
    for figure in ["auc", "logloss", "score_difference_max"] {
        assert!(whole[figure].is_number(), "{figure}");
        assert_eq!(whole[figure], partly[figure], "{figure}");
    }
}

#[test]
fn a_feature_that_a_line_names_twice_is_refused() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let line = "{\"dense\": [1,2,3,4,5,6,7], \"sparse\": {\"weather\": [1], \"weather\": [2]}}";
    let output = hatchback(&["run", &bundle], line);
    let answer = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && answer.contains("`weather` occurs twice"), "{answer}");
}

#[test]
fn a_delta_is_packed_and_installed_over_its_parent() {
    let desk = Desk::new();
    let first = desk.pack(&["--placement", "cached"]);
    let flash = desk.path("car");
    printed(&["eval", &first, "--flash", &flash]);
    // The next generation: the same rows, a later sequence.
    let source = PathBuf::from(coupon("model.toml"));
    for file in ["dense.onnx", "tables.safetensors", "probe.jsonl"] {
        std::fs::copy(source.with_file_name(file), desk.folder.path().join(file)).unwrap();
    }
    let spec = std::fs::read_to_string(&source).unwrap().replace("sequence = 1", "sequence = 2");
    std::fs::write(desk.path("model.toml"), spec).unwrap();
    let (delta, spec) = (desk.path("delta.hatch"), desk.path("model.toml"));
    let pack = ["pack", &spec, "--placement", "cached", "--parent", &first, "--out", &delta];
    let second = std::fs::read_to_string(&spec).unwrap();
    for (from, to, why) in [
        ("sequence = 2", "sequence = 1", "sequence: 1 is not above the parent's, 1"),
        ("coupon-dlrm", "other", "name: `other`, the parent's is `coupon-dlrm`"),
    ] {
        std::fs::write(&spec, second.replace(from, to)).unwrap();
        let text = refused(&pack);
        assert!(text.contains(why) && !Path::new(&delta).exists(), "{text}");
    }
    std::fs::write(&spec, second).unwrap();
    printed(&pack);
    assert!(std::fs::metadata(&delta).unwrap().len() < std::fs::metadata(&first).unwrap().len());
    let found: Value = report_of(&["eval", &delta, "--flash", &flash]);
    assert_eq!(found["generation"], "coupon-dlrm@2");
    // A delta needs its parent.
    let text = refused(&["eval", &delta, "--flash", &desk.path("elsewhere")]);
    assert!(text.contains("is a delta from sequence 1, nothing is live"), "{text}");
}

#[test]
fn the_demo_runs() {
    let desk = Desk::new();
    let out = desk.path("demo");
    let own = Path::new(&out).join("coupon/notes");
    std::fs::create_dir_all(own.parent().unwrap()).unwrap();
    std::fs::write(&own, "the user's").unwrap();
    // A second demo takes the place of the first.
    for _ in 0..2 {
        let text = printed(&["demo", "--out", &out, "--rows-max", "20000", "--requests", "500"]);
        assert!(text.contains("PyTorch f32") && text.contains(" 0 damaged"), "{text}");
    }
    assert!(Path::new(&out).join("criteo/criteo.svg").exists() && own.exists());
}

#[test]
fn a_closed_pipe_ends_every_command_quietly() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let [keys, repository, car] = ["keys", "repository", "car"].map(|name| desk.path(name));
    let [flash, root] = [desk.path("flash"), desk.path("keys/1.root.json")];
    printed(&["keys", "new", &keys, "--plain"]);
    printed(&["publish", &bundle, "--keys", &keys, "--to", &repository]);
    let sync = ["sync", "--from", &repository, "--root", &root, "--state", &car, "--flash", &flash];
    printed(&sync);

    let (model, samples) = (coupon("model.toml"), coupon("probe.jsonl"));
    let [out, other_keys] = [desk.path("out.hatch"), desk.path("keys2")];
    for args in [
        &["pack", &model, "--out", &out][..],
        &["inspect", &bundle],
        &["inspect", &flash, "--verify"],
        &["inspect", &bundle, "--json"],
        &["run", &bundle, "--samples", &samples],
        &["eval", &bundle],
        &["eval", &bundle, "--json", "-"],
        &["keys", "new", &other_keys, "--plain"],
        &["publish", "--keys", &keys, "--to", &repository],
        &["prune", "--keys", &keys, "--to", &repository],
        &["prune", "--keys", &keys, "--to", &repository, "--json"],
        &sync,
        &["sync", "--state", &car, "--flash", &flash, "--status"],
        &["sync", "--state", &car, "--flash", &flash, "--status", "--json"],
        &["demo", "--out", &desk.path("demo"), "--rows-max", "1000", "--requests", "50"],
    ] {
        assert_eq!(into_closed_pipe(args), (Some(141), String::new()), "{args:?}");
    }
    // The argument parser writes these texts and ignores the closed pipe.
    for args in [&["--help"][..], &["--version"], &["help", "pack"]] {
        assert_eq!(into_closed_pipe(args).1, "", "{args:?}");
    }
}

#[test]
fn values_out_of_range_are_refused_by_flag_and_value() {
    for args in [
        &["eval", "m", "--batch", "0"][..],
        &["eval", "m", "--cache-mib", "-1"],
        &["eval", "m", "--cache-mib", "nan"],
        &["eval", "m", "--batch-max", "65537"],
        &["run", "m", "--repeat", "0"],
        &["publish", "--keys", "k", "--to", "r", "--days", "0"],
        &["publish", "--keys", "k", "--to", "r", "--share", "101"],
        &["prune", "--keys", "k", "--to", "r", "--releases", "0"],
        &["sync", "--status", "--state", "s", "--flash", "f", "--mib-per-s", "0"],
        &["keys", "new", "k", "--root-threshold", "0"],
        &["demo", "--requests", "0"],
        &["image", "m", "--out", "o", "--mib", "0"],
    ] {
        let (flag, value) = (args[args.len() - 2], args[args.len() - 1]);
        let args: Vec<&str> = match value.starts_with('-') {
            true => args[..args.len() - 2].to_vec(),
            false => args.to_vec(),
        };
        let joined = format!("{flag}={value}");
        let args = if value.starts_with('-') { [&args[..], &[&joined]].concat() } else { args };
        let text = refused(&args);
        assert!(text.contains(flag) && text.contains(&format!("'{value}'")), "{args:?}: {text}");
    }
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let text = refused(&["eval", &bundle, "--batch", "500"]);
    assert!(text.contains("--batch 500: a request takes at most 256 samples"), "{text}");
    let folder = desk.path("image");
    let text = refused(&["image", &bundle, "--out", &folder, "--name", ""]);
    assert!(text.contains("--name"), "{text}");
}

#[test]
fn json_goes_where_it_is_sent_and_overwrites_no_model() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let json = desk.path("report.json");
    let text = printed(&["inspect", &bundle, "--json", &json]);
    assert!(text.contains("coupon-dlrm@1"), "people get their tables too: {text}");
    let written = std::fs::read_to_string(&json).unwrap();
    assert_eq!(written, printed(&["inspect", &bundle, "--json"]));
    assert_eq!(written, printed(&["inspect", &bundle, "--json", "-"]));
    let before = std::fs::read(&bundle).unwrap();
    let text = refused(&["publish", "--keys", "k", "--to", "r", "--json", &bundle]);
    assert!(text.contains("is not JSON") && std::fs::read(&bundle).unwrap() == before, "{text}");
}

#[test]
fn errors_in_files_of_the_user_name_the_line() {
    let desk = Desk::new();
    for file in ["dense.onnx", "tables.safetensors", "probe.jsonl"] {
        std::fs::copy(coupon(file), desk.path(file)).unwrap();
    }
    let spec = std::fs::read_to_string(coupon("model.toml")).unwrap();
    let path = desk.path("model.toml");
    let pack = ["pack", &path, "--out", &desk.path("x")];
    for (from, to, line, why) in [
        ("sequence = 1", "sequence = \"one\"", 5, "invalid type"),
        ("table = \"weather\"", "table = \"wether\"", 0, "there is no table `wether`"),
        ("table = \"weather\"", "table = [\"weather\", \"wether\"]", 0, "no table `wether`"),
        ("table = \"weather\"", "table = [\"age\", \"age\"]", 0, "`age` occurs twice"),
        ("table = \"weather\"", "table = []", 0, "is empty"),
        ("table = \"weather\"", "table = 3", 0, "table is the name of a table, or a list of names"),
        (
            "table = \"weather\"",
            "table = [\"weather\", \"age\"]",
            19,
            "weather@weather` or `weather@age",
        ),
        ("\"weather\", \"time\"", "\"weather@age\", \"time\"", 19, "no feature `weather@age`"),
        ("tensor = \"weather\"", "tensor = \"wether\"", 0, "the file holds"),
        ("activation = \"sigmoid\"", "activation = \"tanh\"", 11, "unknown variant `tanh`"),
    ] {
        let changed = spec.replacen(from, to, 1);
        let line = match line {
            0 => 1 + changed[..changed.find(to).unwrap()].matches('\n').count(),
            line => line,
        };
        std::fs::write(&path, changed).unwrap();
        let text = refused(&pack);
        assert!(text.contains(&format!("model.toml:{line}: ")) && text.contains(why), "{text}");
    }

    std::fs::write(&path, &spec).unwrap();
    let bundle = desk.pack(&[]);
    let samples = desk.path("samples.jsonl");
    let good = std::fs::read_to_string(coupon("probe.jsonl")).unwrap();
    let lines: Vec<&str> = good.lines().take(2).chain(["{\"dense\": 1}"]).collect();
    std::fs::write(&samples, lines.join("\n")).unwrap();
    let text = refused(&["eval", &bundle, "--samples", &samples]);
    assert!(text.contains("samples.jsonl:3: "), "{text}");
}

#[test]
fn the_proxy_of_the_environment_is_used_and_its_password_is_in_no_message() {
    let desk = Desk::new();
    let said = |variable: &str, options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchback"));
        command.args(["sync", "--from", "http://host.invalid", "--state", &desk.path("state")]);
        command.args(["--flash", &desk.path("flash")]).args(options);
        let output = command.env("HATCHBACK_PROXY", variable).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };

    let (of_variable, of_option) = ("ftp://user:SECRET@variable:1", "ftp://user:SECRET@option:1");
    let refused = said(of_variable, &[]);
    assert!(
        refused.contains("proxy ftp://variable:1: ") && !refused.contains("SECRET"),
        "{refused}"
    );
    let refused = said(of_variable, &["--proxy", of_option]);
    assert!(refused.contains("proxy ftp://option:1: ") && !refused.contains("SECRET"), "{refused}");
    let empty = said("", &[]);
    assert!(!empty.contains("proxy"), "{empty}");
}

#[test]
fn the_version_names_the_product() {
    let text = printed(&["--version"]);
    assert!(text.starts_with("hatchback ") && text.contains(env!("CARGO_PKG_VERSION")), "{text}");
}

#[test]
fn errors_name_the_file_once() {
    let desk = Desk::new();
    let missing = desk.path("missing.toml");
    let text = refused(&["pack", &missing, "--out", &desk.path("x")]);
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
    assert!(text.starts_with("error: ") && text.contains("missing.toml"));
    let text = refused(&["inspect", &coupon("dense.onnx")]);
    assert!(text.contains("dense.onnx") && text.contains("magic"), "{text}");
    let bundle = desk.pack(&[]);
    let target = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../targets/x86-cuda.toml")
        .display()
        .to_string();
    let on_gpu = hatchback(&["eval", &bundle, "--target", &target], "");
    // A machine with a GPU uses it.
    let said = String::from_utf8(on_gpu.stderr).unwrap();
    assert!(on_gpu.status.success() || said.contains("`--device cpu` needs none"), "{said}");
    printed(&["eval", &bundle, "--target", &target, "--device", "cpu"]);
    assert!(
        refused(&["eval", &bundle, "--resident-mib", "0", "--cache-mib", "0"])
            .contains("cache_bytes_max")
    );
    assert!(!desk.folder.path().join("x").exists());
}

#[test]
fn a_bundle_is_signed_under_a_policy_only_after_it_passed_the_gate() {
    let desk = Desk::new();
    let (bundle, samples) = (desk.pack(&[]), coupon("heldout.jsonl"));
    let (keys, repository) = (desk.path("keys"), desk.path("repository"));
    printed(&["keys", "new", &keys, "--plain"]);
    let policy = |auc_min: &str| {
        let path = desk.path("gate.toml");
        std::fs::write(&path, format!("format = 1\nauc_min = {auc_min}\n")).unwrap();
        path
    };
    let gate = |policy: &str| {
        let args = ["gate", &bundle, "--samples", &samples, "--policy", policy, "--json"];
        hatchback(&args, "")
    };
    let publish = |policy: &str| {
        let to = ["--keys", &keys, "--to", &repository, "--policy", policy];
        hatchback(&[&["publish", &bundle], &to[..]].concat(), "")
    };
    let errors = |output: Output| {
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };

    let strict = policy("0.99");
    assert!(errors(publish(&strict)).contains("has not passed the gate"));
    let refused = errors(gate(&strict));
    assert!(refused.contains("auc_min is 0.99, the candidate has 0.83"), "{refused}");
    assert!(refused.contains("missed by 0.15"), "{refused}");
    assert!(errors(publish(&strict)).contains("has not passed the gate"));

    let fair = policy("0.8");
    let passed = gate(&fair);
    assert!(passed.status.success());
    let report: Value = serde_json::from_slice(&passed.stdout).unwrap();
    assert_eq!((report["passed"].as_bool(), report["samples"].as_u64()), (Some(true), Some(2498)));
    assert!(publish(&fair).status.success());

    // A policy that changed after the gate, or another bundle, needs another gate.
    let changed = policy("0.7");
    assert!(errors(publish(&changed)).contains("policy is"));
    desk.pack(&["--codec", "f32"]);
    assert!(errors(publish(&policy("0.8"))).contains("manifest is"));
}

/// The candidate looks the keys of a retired feature up under a new name, so both scores are equal.
#[test]
fn the_gate_scores_the_fleet_with_the_schema_of_its_own_release() {
    let desk = Desk::new();
    let fleet = desk.pack(&[]);
    let spec = PathBuf::from(desk.model(2));
    let text = std::fs::read_to_string(&spec).unwrap();
    let text = text
        .replace("\"weather\", \"time\"", "\"moon\", \"time\"")
        .replace("name = \"weather\"\ntable", "name = \"weather\"\nretired = true\ntable");
    let moon = "[[feature]]\nname = \"moon\"\ntable = \"weather\"\npooling = \"sum\"\n\
                hotness_max = 1\n";
    std::fs::write(&spec, format!("{text}\n{moon}")).unwrap();
    let with_moon = |line: &str| {
        let (before, rest) = line.split_once("\"weather\":").unwrap();
        let (bag, after) = rest.split_once(']').unwrap();
        format!("{before}\"weather\":{bag}],\"moon\":{bag}]{after}\n")
    };
    for file in ["probe.jsonl", "heldout.jsonl"] {
        let path = spec.with_file_name(file);
        let lines: String =
            std::fs::read_to_string(&path).unwrap().lines().map(with_moon).collect();
        std::fs::write(path, lines).unwrap();
    }

    let (candidate, policy) = (desk.path("candidate.hatch"), desk.path("gate.toml"));
    printed(&["pack", spec.to_str().unwrap(), "--out", &candidate]);
    std::fs::write(&policy, "format = 1\nauc_drop_max = 0.0\nlogloss_rise_max = 0.0\n").unwrap();
    let samples = spec.with_file_name("heldout.jsonl").display().to_string();
    let args = ["gate", &candidate, "--fleet", &fleet, "--samples", &samples, "--policy", &policy];
    let report = report_of(&args);
    assert_eq!(report["auc"][0], report["auc"][1], "{report}");
    assert_eq!(report["logloss"][0], report["logloss"][1], "{report}");
}

/// A batch of several lines is answered in their order, and a line of candidates as such, however
/// many it has.
#[test]
fn run_answers_in_the_order_of_the_lines() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let dense = r#""dense":[55,21,24,1,0,0,0]"#;
    let line = |candidates: &str| format!(r#"{{{dense}{candidates}}}"#);
    let [none, one] = ["[]", r#"[{"sparse":{"driver":[1]}}]"#];
    let with = |of: &str| line(&format!(r#","candidates":{of}"#));
    let lines = [line(""), with(none), "{".to_owned(), with(one), line("")].join("\n");
    let ran = hatchback(&["run", &bundle, "--batch", "8"], &lines);
    let shape = |line: &str| {
        let answer: Value = serde_json::from_str(line).unwrap();
        let candidates = answer.get("candidates").map(|all| all.as_array().unwrap().len());
        (candidates, answer.get("score").is_some(), answer.get("error").is_some())
    };
    let shapes: Vec<_> = String::from_utf8(ran.stdout).unwrap().lines().map(shape).collect();
    let score = (None, true, false);
    let expected =
        [score, (Some(0), false, false), (None, false, true), (Some(1), false, false), score];
    assert_eq!(shapes, expected);
}

#[test]
fn an_answer_of_run_names_the_inputs_that_were_ignored_or_absent() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let mut schema = BundleReader::open(Path::new(&bundle)).unwrap().manifest().schema.clone();
    let names = schema.features.iter().map(|feature| feature.name.clone());
    let others: Vec<String> = names.filter(|name| name != "weather" && name != "driver").collect();
    let others = others.join(",");

    let one = r#"{"dense":[55,21,24,1,0,0,0],"sparse":{"weather":[2],"driver":[1]}}"#;
    let two = r#"{"dense":[55,21,24,1,0,0,0],"sparse":{"weather":[2]},
        "candidates":[{"sparse":{"driver":[1]}},{"sparse":{"driver":[2]}}]}"#;
    let answer = |line: &str| -> Value {
        let ran = hatchback(&["run", &bundle], &line.replace('\n', " "));
        serde_json::from_slice(&ran.stdout).unwrap()
    };
    let single = answer(one);
    assert_eq!(single["absent_inputs"], *others, "{single}");
    assert!(single.get("ignored_inputs").is_none(), "{single}");
    for candidate in answer(two)["candidates"].as_array().unwrap() {
        assert_eq!(candidate["absent_inputs"], *others, "{candidate}");
    }

    let at = schema.features.iter().position(|feature| feature.name == "weather").unwrap();
    schema.features[at].retired = true;
    schema.dense_features[0].retired = true;
    let (own, rest) = schema.dense_features.split_first().unwrap();
    let line =
        format!(r#"{{"dense":{{"{}":1}},"sparse":{{"weather":[2],"driver":[1]}}}}"#, own.name);
    let rest: Vec<&str> = rest.iter().map(|feature| feature.name.as_str()).collect();
    let found = Sent::read(&line, &schema).differences;
    assert_eq!(found[0].ignored_inputs, format!("weather,{}", own.name));
    assert_eq!(found[0].absent_inputs, format!("{others},{}", rest.join(",")));
}
