//! kill -9 on the real file system. The test kills a process that installs, compacts and rolls back
//! at random moments, many times in one directory. The live generation is whole afterwards. It is
//! the one that the process acknowledged, or the one that it was about to make live. Failures name
//! the seed.

use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk;
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::random::Random;
use hatchback_tests::versions::Versions;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const GENERATIONS: usize = 8;

/// The number of processes to kill; the long run sets a thousand.
fn kills() -> u64 {
    std::env::var("HATCHBACK_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// What a killed process printed.
#[derive(Default)]
struct Said {
    /// The last generation it acknowledged.
    at: Option<usize>,
    /// The generation that it was about to make live.
    to: Option<usize>,
    steps: u64,
    catalog: String,
}

fn parse(text: &str) -> Said {
    let mut said = Said::default();
    // The kill cut a line without its end; its change may or may not have happened.
    for line in text.split_inclusive('\n').filter(|l| l.ends_with('\n')) {
        let (word, rest) = line.trim_end().split_once(' ').unwrap();
        match word {
            "at" => {
                (said.at, said.to, said.steps) = (Some(rest.parse().unwrap()), None, said.steps + 1)
            }
            "to" => said.to = Some(rest.parse().unwrap()),
            "catalog" => rest.clone_into(&mut said.catalog),
            _ => panic!("{line}"),
        }
    }
    said
}

/// Runs a worker until it has printed some lines, and kills it at a random moment after them. How
/// far a worker comes in some time depends on what else the machine does.
fn killed(directory: &Path, versions: &Versions, random: &mut Random, seed: u64) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash_worker"));
    command.arg(directory).arg(seed.to_string());
    for (delta, snapshot) in versions.deltas.iter().zip(&versions.snapshots) {
        command.arg(delta).arg(snapshot);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut text, mut errors) = (String::new(), String::new());
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    // Most runs are short: such a process has just opened the directory that a killed one left.
    let most = *random.pick(&[2, 9, 30]);
    for _ in 0..random.below(most) {
        lines.read_line(&mut text).unwrap();
    }
    std::thread::sleep(Duration::from_micros(random.below(5_000)));
    let exited = child.try_wait().unwrap();
    child.kill().unwrap();
    lines.read_to_string(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let status = child.wait().unwrap();
    let said = parse(&text);
    assert!(
        exited.is_none() || status.success(),
        "seed {seed}: the worker failed: {errors}\n{text}"
    );
    said
}

/// Checks that the live generation is one that the process printed.
fn check(directory: &Path, versions: &Versions, before: usize, said: &Said, what: &str) -> usize {
    let allowed = [Some(said.at.unwrap_or(before)), said.to];
    let live = match Flash::open(&disk::system(), directory) {
        Ok(flash) => whole_generation(&flash, versions, what),
        Err(FlashError::Io { .. }) => 0,
        // Beside other work a process may be killed before it made the directory.
        Err(_) if !directory.exists() => 0,
        Err(FlashError::Field(e)) if e.field == "live" => 0,
        Err(e) => panic!("{what}: {e}"),
    };
    assert!(allowed.contains(&Some(live)), "{what}: {live} is live, not one of {allowed:?}");
    live
}

#[test]
fn a_killed_process_leaves_one_whole_generation() {
    let versions = Versions::new(GENERATIONS, 3000, 21);
    let folder = tempfile::tempdir().unwrap();
    let (start, mut directory) = (Instant::now(), folder.path().join("flash0"));
    let (mut live, mut steps, mut amid, mut catalogs) = (0, 0, 0, BTreeMap::new());

    for seed in 0..kills() {
        let mut random = Random::new(seed);
        let said = killed(&directory, &versions, &mut random, seed);
        let what = format!("seed {seed}, HATCHBACK_KILLS={}", kills());
        live = check(&directory, &versions, live, &said, &what);
        (steps, amid) = (steps + said.steps, amid + u64::from(said.to.is_some()));
        let found = said.catalog.split([' ', '{']).next().unwrap_or_default().to_owned();
        *catalogs.entry(found).or_insert(0) += 1;
        if random.one_in(20) {
            let _ = std::fs::remove_dir_all(&directory);
            (directory, live) = (folder.path().join(format!("flash{seed}")), 0);
        }
    }

    println!(
        "{} kills, {amid} of them amid a step, {steps} acknowledged steps, catalogs {catalogs:?}, \
         {:.1} s: all whole",
        kills(),
        start.elapsed().as_secs_f64()
    );

    // The test must fail if workers only start and never work.
    assert!(steps >= kills() && amid * 10 >= kills(), "{steps} steps, {amid} kills amid one");
}
