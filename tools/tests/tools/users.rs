//! The second week of a user: a third release, names with typing errors, keys that expire, an
//! interrupted command, reports for a script. Each test walks the user's way.

use crate::cli::{Desk, coupon, hatchback, printed, refused, report_of};
use clap::CommandFactory;
use hatchback_tools::cli::Cli;
use hatchback_tools::repository::publish::check_root;
use hatchback_tools::window::writer::{TableChanges, WindowContent, write_window};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

impl Desk {
    /// Packs releases 1 to 3: a snapshot, and two deltas.
    fn three_releases(&self) -> [String; 3] {
        let bundles = [1, 2, 3].map(|n| self.path(&format!("{n}.hatch")));
        printed(&["pack", &coupon("model.toml"), "--out", &bundles[0]]);
        let delta = ["pack", &self.model(2), "--parent", &bundles[0], "--out", &bundles[1]];
        printed(&delta);
        let chain = ["--parent", &bundles[1], "--parent", &bundles[0]];
        printed(&[&["pack", &self.model(3), "--out", &bundles[2]], &chain[..]].concat());
        bundles
    }

    fn repository(&self) -> (String, String) {
        let (keys, repository) = (self.path("keys"), self.path("repository"));
        printed(&["keys", "new", &keys, "--plain"]);
        (keys, repository)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }
}

#[test]
fn the_third_release_is_a_delta_of_a_delta() {
    let desk = Desk::new();
    let [first, second, third] = desk.three_releases();
    let (spec, out) = (desk.model(4), desk.path("4.hatch"));
    let said = refused(&["pack", &spec, "--parent", &third, "--out", &out]);
    let lines = format!(
        "error: --parent {third}: is a delta from sequence 2, and nothing is before it; pass \
         --parent for each bundle from a snapshot on, or one flash directory\n"
    );
    assert_eq!(said, lines);

    let car = desk.path("car");
    printed(&["install", &third, &first, &second, "--flash", &car]);
    assert_eq!(report_of(&["inspect", &car])["generation"], "coupon-dlrm@3");
    // The same command again, and behind the part that one installed which failed.
    printed(&["install", &third, &first, &second, "--flash", &car]);
    let part = desk.path("part");
    printed(&["install", &first, &second, "--flash", &part]);
    printed(&["install", &first, &second, &third, "--flash", &part]);
    assert_eq!(report_of(&["inspect", &part])["generation"], "coupon-dlrm@3");
    assert!(refused(&["install", &first, "--flash", &part]).contains("coupon-dlrm@3"));
    printed(&["pack", &spec, "--parent", &car, "--out", &out]);
    let said = refused(&["pack", &spec, "--parent", &car, "--parent", &third, "--out", &out]);
    assert!(said.contains("pass a flash directory alone"), "{said}");

    // A chain that does not lead from what is live is refused at its first bundle.
    printed(&["install", &out, "--flash", &car]);
    let aside = desk.path("5.hatch");
    let chain = ["--parent", &second, "--parent", &first];
    printed(&[&["pack", &desk.model(5), "--out", &aside], &chain[..]].concat());
    let said = refused(&["install", &first, &second, &aside, "--flash", &car]);
    assert!(said.contains(&format!("{first}: cannot be installed")), "{said}");

    let (policy, samples) = (coupon("gate.toml"), coupon("heldout.jsonl"));
    let gate = ["gate", &out, "--samples", &samples, "--policy", &policy];
    let said = refused(&[&gate[..], &["--fleet", &second]].concat());
    assert!(said.contains(&format!("--fleet {second}: is a delta from sequence 1")), "{said}");
    let chain = [&third, &second, &first].map(|bundle| ["--fleet", bundle]).concat();
    assert!(printed(&[&gate[..], &chain].concat()).contains("2,498"));
}

#[test]
fn the_releases_of_a_repository_are_listed_with_what_a_car_fetches() {
    let desk = Desk::new();
    let bundles = desk.three_releases();
    let (keys, repository) = desk.repository();
    let publish = ["publish", "--keys", &keys, "--to", &repository];
    bundles.iter().for_each(|bundle| drop(printed(&[&publish[..], &[bundle]].concat())));
    let list = || -> Value {
        let listed = printed(&["releases", "--from", &repository, "--json"]);
        serde_json::from_str(&listed).unwrap()
    };

    let listed = list();
    let releases = listed["releases"].as_array().unwrap();
    let parents: Vec<&Value> = releases.iter().map(|release| &release["parent"]).collect();
    assert_eq!(parents, [&Value::Null, &1.into(), &2.into()]);
    let ways = listed["ways"].as_array().unwrap();
    let from: Vec<&Value> = ways.iter().map(|way| &way["from"]).collect();
    assert_eq!(from, [&Value::from(2), &Value::Null]);
    let bytes = |way: usize| ways[way]["bytes"].as_u64().unwrap();
    let all: u64 = releases.iter().map(|release| release["bytes"].as_u64().unwrap()).sum();
    assert!(bytes(0) < bytes(1) && all < bytes(1), "{listed}");

    printed(&[&publish[..], &["--revoke", "3"]].concat());
    let listed = list();
    assert_eq!(listed["releases"][2]["is_listed"], false);
    assert_eq!(listed["ways"][0]["to"], "coupon-dlrm@2");
    let said = printed(&["releases", "--from", &repository]);
    assert!(said.contains("delta from 2") && said.contains("expires: timestamp 20"), "{said}");
}

#[test]
fn a_name_with_a_typing_error_is_an_error_and_makes_nothing() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let (keys, repository) = desk.repository();
    printed(&["publish", &bundle, "--keys", &keys, "--to", &repository]);
    let [state, flash, typo, root] =
        ["car.sync", "car", "typo", "keys/1.root.json"].map(|name| desk.path(name));
    let sync = ["sync", "--from", &repository, "--state", &state, "--flash", &flash];
    let new = [&sync[..], &["--root", &root, "--lineage", "nosuch"]].concat();
    let models = "error: --lineage nosuch: the repository has the models coupon-dlrm\n";
    assert_eq!(refused(&new), models);
    printed(&[&sync[..], &["--lineage", "coupon-dlrm"]].concat());

    let before = desk.names();
    for (args, why) in [
        (["sync", "--status", "--state", &typo, "--flash", &typo], "no such sync directory"),
        (["sync", "--consent", "--state", &typo, "--flash", &flash], "no such sync directory"),
        (["prune", "--dry-run", "--to", &typo, "--keys", &keys], "no such repository"),
        (["publish", "--dry-run", "--to", &typo, "--keys", &keys], "no such repository"),
        (["run", &typo, "--samples", "-", "--batch", "1"], "No such file"),
        (["eval", &repository, "--batch", "1", "--cache-mib", "1"], "a repository of releases"),
        (["eval", &state, "--batch", "1", "--cache-mib", "1"], "is a sync directory"),
    ] {
        let said = refused(&args);
        assert!(said.starts_with("error: ") && said.contains(why), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(desk.names(), before);
}

#[test]
fn a_publish_says_when_its_metadata_expire_and_refuses_an_expired_root() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let (keys, repository) = (desk.path("keys"), desk.path("repository"));
    printed(&["keys", "new", &keys, "--plain", "--days", "30"]);
    let listed = printed(&["keys", "list", &keys, "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 6);

    let published = hatchback(&["publish", &bundle, "--keys", &keys, "--to", &repository], "");
    let said = String::from_utf8(published.stdout).unwrap();
    let root = format!("root {}\n", listed["expires"].as_str().unwrap());
    assert!(said.contains("expires: timestamp ") && said.ends_with(&root), "{said}");
    let note = String::from_utf8(published.stderr).unwrap();
    let rotate = format!(" days; rotate it with `hatchback keys rotate {keys} root`\n");
    assert!(published.status.success() && note.ends_with(&rotate), "{note}");

    let later = hatchback_tools::repository::now().unwrap() + 31 * 86_400;
    let refused = check_root(Path::new(&keys), later).unwrap_err();
    assert!(refused.to_string().contains("nothing was signed"), "{refused}");
    printed(&["keys", "rotate", &keys, "root"]);
    let note = hatchback(&["publish", "--keys", &keys, "--to", &repository], "").stderr;
    assert!(note.is_empty(), "{}", String::from_utf8_lossy(&note));
}

/// A new feature, a removed one or another order: the cars would fetch the release and reject it.
#[test]
fn a_release_that_callers_cannot_use_is_refused_before_it_is_signed() {
    let desk = Desk::new();
    let first = desk.pack(&[]);
    let (keys, repository) = desk.repository();
    printed(&["publish", &first, "--keys", &keys, "--to", &repository]);
    let (spec, second) = (desk.model(2), desk.path("2.hatch"));
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, text.replace("\"temperature\"", "\"celsius\"")).unwrap();
    printed(&["pack", &spec, "--out", &second]);
    let said = refused(&["publish", &second, "--keys", &keys, "--to", &repository]);
    let why = format!(
        "error: {second}: callers of coupon-dlrm@1 cannot use it: dense feature `temperature`: is \
         gone"
    );
    assert!(said.starts_with(&why) && said.contains("another `name`"), "{said}");
    assert!(!printed(&["publish", "--keys", &keys, "--to", &repository]).contains("000000000002"));

    // Without the manifest of the first release there is nothing to compare, which is said.
    let manifests = std::fs::read_dir(Path::new(&repository).join("targets/coupon-dlrm")).unwrap();
    let manifests: Vec<_> = manifests.map(|entry| entry.unwrap().path()).collect();
    manifests.iter().for_each(|path| std::fs::write(path, b"<html>").unwrap());
    let said = printed(&["publish", &second, "--keys", &keys, "--to", &repository, "--dry-run"]);
    assert!(manifests.len() == 1 && said.contains("not compared with what callers send"), "{said}");
}

#[test]
fn every_command_has_json() {
    fn check(command: &clap::Command, path: &str) {
        let path = format!("{path} {}", command.get_name());
        let mut leaves = command.get_subcommands().peekable();
        if leaves.peek().is_none() {
            let has_json = command.get_opts().any(|option| option.get_long() == Some("json"));
            assert!(has_json, "{path} has no --json");
        }
        leaves.for_each(|command| check(command, &path));
    }
    check(&Cli::command(), "");

    let desk = Desk::new();
    let document = |args: &[&str]| -> Value { serde_json::from_str(&printed(args)).unwrap() };
    let [bundle, shares, keys, flash] =
        ["m.hatch", "shares", "keys", "car"].map(|name| desk.path(name));
    let pack = ["pack", &coupon("model.toml"), "--out"];
    assert_eq!(document(&[&pack[..], &[&bundle, "--json"]].concat())["rows"], 3820);
    let share = [&pack[..], &[&shares, "--table", "weather", "--json"]].concat();
    assert_eq!(document(&share)["tables"][0], "weather");
    assert_eq!(document(&["keys", "new", &keys, "--plain", "--json"])["version"], 1);
    assert_eq!(document(&["keys", "rotate", &keys, "root", "--json"])["version"], 2);
    let installed = document(&["install", &bundle, "--flash", &flash, "--json"]);
    assert_eq!(installed["generation"], "coupon-dlrm@1");

    let ran = document(&["run", &flash, "--samples", &coupon("probe.jsonl"), "--json"]);
    assert_eq!((&ran["generation"], &ran["samples"]), (&"coupon-dlrm@1".into(), &64.into()));
    let score = ran["answers"][63]["score"][0].to_string();
    let lines = printed(&["run", &flash, "--samples", &coupon("probe.jsonl")]);
    assert!(lines.lines().last().unwrap().contains(&score), "{score}");

    let out = desk.path("demo");
    let small = ["--rows-max", "20000", "--requests", "100"];
    let demo = document(&[&["demo", "--out", &out, "--json"], &small[..]].concat());
    assert_eq!(
        (&demo["coupon"][0]["samples"], &demo["criteo"]["latency"]["requests"]),
        (&2498.into(), &100.into())
    );
    let resident = document(&["eval", &bundle, "--resident-mib", "10", "--json"]);
    assert_eq!(resident["hit_rate"], Value::Null);
    let said = printed(&["eval", &bundle, "--resident-mib", "10"]);
    let hits = said.lines().find(|line| line.contains("hit rate")).unwrap();
    assert!(hits.contains(" - "), "{hits}");
}

/// Writes a model of one table of 128 MB, which takes a while to pack.
fn large_model(desk: &Desk) -> String {
    let spec = desk.model(2);
    let (folder, rows) = (Path::new(&spec).parent().unwrap(), 2_000_000usize);
    let head = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 16), }}");
    let length = (10 + head.len() + 1).next_multiple_of(64);
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(length - 10).unwrap().to_le_bytes());
    file.extend(format!("{head:width$}\n", width = length - 11).bytes());
    file.resize(length + rows * 64, 0);
    std::fs::write(folder.join("large.npy"), file).unwrap();
    let text = std::fs::read_to_string(&spec).unwrap();
    let own = "source = { format = \"npy\", path = \"large.npy\" }";
    let line = text.lines().find(|line| line.contains("tensor = \"driver\"")).unwrap();
    std::fs::write(&spec, text.replace(line, own)).unwrap();
    spec
}

/// Returns the program as a terminal starts it: a shell lets what runs in its background, such as
/// this test, ignore SIGINT.
fn interruptible() -> Command {
    let mut program = Command::new("env");
    program.args(["--default-signal", env!("CARGO_BIN_EXE_hatchback")]);
    program
}

#[test]
fn an_interrupt_leaves_nothing() {
    let desk = Desk::new();
    let [parent, out, temporary] = ["1.hatch", "2.hatch", "tmp"].map(|name| desk.path(name));
    printed(&["pack", &coupon("model.toml"), "--out", &parent]);
    std::fs::create_dir(&temporary).unwrap();
    let spec = large_model(&desk);
    let before = desk.names();
    for signal in [Signal::INT, Signal::TERM] {
        let send = |pack: &Child, signal| kill_process(Pid::from_child(pack), signal).unwrap();
        let interrupt = || {
            let mut pack = interruptible()
                .args(["pack", &spec, "--out", &out])
                .env("TMPDIR", &temporary)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            while !Path::new(&format!("{out}.part")).exists() {
                assert!(pack.try_wait().unwrap().is_none(), "the model was packed too fast");
                std::thread::sleep(Duration::from_millis(1));
            }
            // A stopped pack cannot end while the machine does other work before the signal.
            send(&pack, Signal::STOP);
            send(&pack, signal);
            send(&pack, Signal::CONT);
            pack.wait().unwrap()
        };
        // Beside other work this test may see the file late, when the pack is at its end: its rows
        // do not give the recorded scores, so it is refused.
        let mut ended = (0..50).map(|_| interrupt()).skip_while(|status| status.code() == Some(1));
        let ended_by = ended.next().and_then(|status| status.signal());
        assert_eq!(ended_by, Some(signal.as_raw()));
        assert_eq!(desk.names(), before);
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
    }
}

/// The moments of each command's run at which it is interrupted.
const MOMENTS: u32 = 10;

/// Returns the paths of all files below `folder`.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { [path].into() }).collect()
}

/// Returns the paths of all files below `folder`, from there.
fn files_in(folder: &str) -> BTreeSet<PathBuf> {
    let all = files(Path::new(folder)).into_iter();
    all.map(|path| path.strip_prefix(folder).unwrap().to_owned()).collect()
}

/// Runs `command` in a copy of the folder `base`, with an interrupt at `moment`. Returns how it
/// ended and the files that it left.
fn interrupted(
    base: &str,
    command: &[&str],
    moment: Option<Duration>,
) -> (ExitStatus, BTreeSet<PathBuf>) {
    let folder = format!("{base}-copy");
    assert!(Command::new("cp").args(["-r", base, &folder]).status().unwrap().success());
    let mut child = interruptible()
        .args(command)
        .current_dir(&folder)
        .env("TMPDIR", "tmp")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    if let Some(moment) = moment {
        std::thread::sleep(moment);
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    }
    let status = child.wait().unwrap();
    let left = files_in(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    (status, left)
}

/// Fills the folder `base` with two bundles, their repository with its keys, a window of
/// changes, and target files.
fn fill(base: &str, model: &str) {
    std::fs::create_dir_all(format!("{base}/tmp")).unwrap();
    let [first, second] = ["1.hatch", "2.hatch"].map(|name| format!("{base}/{name}"));
    printed(&["pack", &coupon("model.toml"), "--out", &first]);
    printed(&["pack", model, "--parent", &first, "--out", &second]);
    let [keys, repository] = ["keys", "repository"].map(|name| format!("{base}/{name}"));
    printed(&["keys", "new", &keys, "--plain"]);
    printed(&["publish", &first, "--keys", &keys, "--to", &repository]);
    printed(&["publish", &second, "--keys", &keys, "--to", &repository]);

    let name = "weather".to_owned();
    let changes = TableChanges { name, dim: 16, keys: vec![2], ..TableChanges::default() };
    let windows = Path::new(base).join("windows");
    std::fs::create_dir(&windows).unwrap();
    let lineage = "coupon-dlrm".to_owned();
    let content = WindowContent { lineage, window: 1, step: 1, ..WindowContent::default() };
    let fill = &mut |_, _, row: &mut Vec<f32>| {
        row.extend([0.5; 16]);
        Ok(())
    };
    write_window(&windows.join(format!("{:012}", 1)), &content, &[changes], fill).unwrap();
    for target in ["base.toml", "cpu.toml"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets").join(target);
        std::fs::copy(from, Path::new(base).join(target)).unwrap();
    }
}

/// The kill table. A command leaves what was there, or files and folders as it leaves them when it
/// ends by itself. A repository may have more objects, each of them whole: no car sees them before
/// the timestamp.
#[test]
fn no_command_leaves_a_file_behind_at_any_moment() {
    let desk = Desk::new();
    let (model, base) = (desk.model(2), desk.path("base"));
    fill(&base, &model);
    let line = std::fs::read_to_string(coupon("heldout.jsonl")).unwrap();
    let line = line.lines().next().unwrap();
    let (samples, policy) = (coupon("heldout.jsonl"), coupon("gate.toml"));
    let restore = ["publish", "--keys", "keys", "--to", "repository", "--restore", "1"];
    let from = ["row", "coupon-dlrm", "weather", "2", "--from", "repository"];
    let plan = ["plan", &samples, "--model", "1.hatch", "--plot", "new.svg"];
    let select = ["select", "--windows", "windows", "--state", "new", "--base", "1.hatch"];
    let commands: [&[&str]; 17] = [
        &["pack", &model, "--out", "new.hatch"],
        &["install", "1.hatch", "2.hatch", "--flash", "new"],
        &["row", "1.hatch", "weather", "2"],
        &from,
        &["explain", "1.hatch", line],
        &["inspect", "1.hatch", "--json", "new.json"],
        &["run", "1.hatch", "--flash", "new"],
        &["eval", "1.hatch", "--json", "new.json"],
        &["gate", "1.hatch", "--samples", &samples, "--policy", &policy],
        &[&plan[..], &["--resident-mib", "0", "--write-target", "new.toml"]].concat(),
        &[&select[..], &["--out", "new.hatch"]].concat(),
        &["keys", "new", "new", "--plain"],
        &["keys", "rotate", "keys", "timestamp"],
        &["publish", "1.hatch", "--keys", "keys", "--to", "new"],
        &restore,
        &["prune", "--keys", "keys", "--to", "repository", "--releases", "1"],
        &["releases", "--from", "repository"],
    ];
    commands.iter().for_each(|command| leaves_nothing(&base, command));
    match Path::new("/usr/sbin/mke2fs").exists() {
        true => leaves_nothing(&base, &["image", "1.hatch", "--out", "new"]),
        false => println!("SKIPPED: the image: e2fsprogs is not installed"),
    }
}

/// Interrupts `command` at each of its moments, in a copy of `base`.
fn leaves_nothing(base: &str, command: &[&str]) {
    let started = Instant::now();
    let (status, complete) = interrupted(base, command, None);
    assert!(status.success(), "{command:?}");
    let before = files_in(base);
    let step = started.elapsed() / MOMENTS;
    for moment in (0..=MOMENTS).map(|n| n * step) {
        let (status, left) = interrupted(base, command, Some(moment));
        let is_of_store = |path: &PathBuf| {
            let to = command.iter().skip_while(|word| **word != "--to").nth(1);
            to.is_some_and(|to| path.starts_with(to))
        };
        let mut lost = before.difference(&left).filter(|path| complete.contains(*path));
        assert_eq!(lost.next(), None, "{command:?} at {moment:?}");
        let new: Vec<_> = left.difference(&before).filter(|path| !is_of_store(path)).collect();
        let is_part = |path: &&PathBuf| {
            let name = path.to_string_lossy();
            [".part", "#", ".hatchback-", ".new"].iter().any(|part| name.contains(part))
        };
        assert!(!left.iter().any(|path| is_part(&path)), "{command:?} at {moment:?}: {left:?}");
        // The names of keys are random, so the files of a folder are counted.
        let is_whole = |path: &&PathBuf| {
            let is_beside = |other: &&PathBuf| other.iter().next() == path.iter().next();
            left.iter().filter(is_beside).count() == complete.iter().filter(is_beside).count()
        };
        let is_complete = status.success() || new.iter().all(is_whole);
        assert!(is_complete, "{command:?} at {moment:?}: {new:?}");
    }
}

#[test]
fn a_fault_of_a_store_has_a_path_and_the_systems_words() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let (keys, repository) = desk.repository();
    std::fs::create_dir(&repository).unwrap();
    std::fs::write(Path::new(&repository).join("chunks"), "in the way").unwrap();
    let said = refused(&["publish", &bundle, "--keys", &keys, "--to", &repository]);
    assert!(said.starts_with(&format!("error: {repository}/chunks/")), "{said}");
    assert!(said.contains("Not a directory") && !said.contains("Generic"), "{said}");
}
