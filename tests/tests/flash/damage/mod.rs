//! Damages every file of a car in every way, at several moments of an update. The car must serve on
//! if the served model is whole. It must reach the newest release without help as soon as one is
//! available. The test drives the steps that the daemon and the sync process call, on the real file
//! system, with a clock of its own. Never waits.
//!
//! Each file and damage has four cases: the damage strikes the running or the stopped car, and the
//! next release is a delta with a snapshot or a snapshot alone. One of the four runs by default.
//! `HATCHBACK_DAMAGE=all` runs all. `HATCHBACK_DAMAGE=WORD` runs the cases whose line contains
//! WORD, such as `Rest flash/live fifo Running Both`.

mod car;
mod cases;
mod scenes;
mod strike;

use self::cases::{Case, DAMAGES, Damage, MOMENTS, Next, Outcome, When, short};
use self::scenes::Scene;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time without a step after which other cases no longer wait for this one. A step takes
/// milliseconds.
const SLOW: Duration = Duration::from_millis(500);
/// Time after its last step after which a case counts as hanging.
const HANGS: Duration = Duration::from_secs(60);
/// Set in the child process, which runs without root's right to open every file.
const CHILD: &str = "HATCHBACK_DAMAGE_CHILD";

// Otherwise the short form would give each damage two of its four cases only.
const _: () = assert!(DAMAGES.len() % 2 == 1);

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for moment in MOMENTS {
        let scene = Arc::new(Scene::new(moment));
        for file in &scene.files {
            for (damage, _) in DAMAGES {
                for when in [When::Running, When::Stopped] {
                    for next in [Next::Both, Next::Snapshot] {
                        let (scene, file) = (Arc::clone(&scene), file.clone());
                        cases.push(Case { scene, file, damage, when, next });
                    }
                }
            }
        }
    }
    match std::env::var("HATCHBACK_DAMAGE") {
        Ok(word) if word == "all" => {}
        Ok(word) => cases.retain(|case| case.line().contains(&word)),
        // Every second damage, each time with the next of the four. The damages are odd in number,
        // so the next file meets the others.
        Err(_) => {
            let is_chosen = |n: usize| n / 4 % 2 == 0 && n % 4 == n / 8 % 4;
            let chosen = cases.into_iter().enumerate().filter(|(n, _)| is_chosen(*n));
            cases = chosen.map(|(_, case)| case).collect();
        }
    }
    cases
}

/// Returns whether this process may open a file without permission, as root may.
fn opens_every_file() -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::read(file.path()).is_ok()
}

/// Runs every case on a thread of its own. A case that hangs delays no other.
fn run_all(cases: &[Case], skips: bool) -> Vec<Outcome> {
    let outcomes: Vec<Mutex<Outcome>> =
        cases.iter().map(|_| Mutex::new(Outcome::Skipped)).collect();
    let suspects: Mutex<Vec<(usize, Instant, Receiver<Outcome>)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    let set = |at: usize, outcome: Outcome| *outcomes[at].lock().unwrap() = outcome;
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((at, case)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(at).map(|case| (at, case.clone()))
                } {
                    if skips && case.damage == Damage::NoPermission {
                        continue;
                    }
                    let (send, receive) = channel();
                    let steps = Arc::<AtomicU64>::default();
                    let counted = Arc::clone(&steps);
                    std::thread::spawn(move || send.send(strike::run(&case, counted)));
                    let mut seen = u64::MAX;
                    loop {
                        match receive.recv_timeout(SLOW) {
                            Ok(outcome) => break set(at, outcome),
                            Err(_) if steps.load(Ordering::Relaxed) == seen => {
                                break suspects.lock().unwrap().push((at, Instant::now(), receive));
                            }
                            Err(_) => seen = steps.load(Ordering::Relaxed),
                        }
                    }
                }
            });
        }
    });
    for (at, since, receive) in suspects.into_inner().unwrap() {
        let outcome = match receive.recv_timeout(HANGS.saturating_sub(since.elapsed())) {
            Err(RecvTimeoutError::Timeout) => Outcome::Hangs,
            received => received.unwrap_or(Outcome::Wrong("its thread ended".to_owned())),
        };
        set(at, outcome);
    }
    outcomes.into_iter().map(|outcome| outcome.into_inner().unwrap()).collect()
}

/// Prints a line for each file of each moment with its worst outcome for each damage, then the
/// reasons, then the counts.
fn print(cases: &[Case], outcomes: &[Outcome]) {
    let mut cells: BTreeMap<(usize, String), BTreeMap<Damage, &Outcome>> = BTreeMap::new();
    let mut reasons: BTreeMap<(String, Damage, String), Vec<String>> = BTreeMap::new();
    let mut counts: BTreeMap<(Damage, &str), usize> = BTreeMap::new();
    for (case, outcome) in cases.iter().zip(outcomes) {
        let moment = MOMENTS.iter().position(|m| *m == case.scene.moment).unwrap();
        let row = cells.entry((moment, short(&case.file))).or_default();
        let worst = row.entry(case.damage).or_insert(outcome);
        *worst = (*worst).max(outcome);
        *counts.entry((case.damage, outcome.cell())).or_default() += 1;
        if let Some(reason) = outcome.reason() {
            let key = (short(&case.file), case.damage, reason.chars().take(300).collect());
            reasons.entry(key).or_default().push(case.line());
        }
    }
    println!("{:48} {}", "", DAMAGES.map(|(_, name)| format!("{name:9}")).concat());
    for ((moment, file), row) in &cells {
        let name = format!("{:?} {file}", MOMENTS[*moment]);
        let row = DAMAGES.map(|(damage, _)| row.get(&damage).map_or(" ", |o| o.cell()));
        println!("{name:48} {}", row.map(|cell| format!("{cell:9}")).concat());
    }
    for ((file, damage, reason), lines) in &reasons {
        println!("{} x {file} {damage:?}: {reason}\n      such as: {}", lines.len(), lines[0]);
    }
    println!("{:10} {}", "", DAMAGES.map(|(_, name)| format!("{name:9}")).concat());
    for kind in [".", "late", "STUCK", "HANGS", "DOWN", "WRONG", "-"] {
        let row = DAMAGES.map(|(damage, _)| counts.get(&(damage, kind)).copied().unwrap_or(0));
        let name = if kind == "." { "healed" } else { kind };
        println!(
            "{name:10} {} {}",
            row.map(|n| format!("{n:<9}")).concat(),
            row.iter().sum::<usize>()
        );
    }
}

/// Runs this test in a child process and returns whether it passed. Its folders are in memory if
/// possible, because the cases sync hundreds of thousands of times. All folders are removed at the
/// end, including those of hanging cases.
fn run_in_child() -> bool {
    let folders = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let run = |mut command: Command| {
        command.args(["--exact", "damage::every_file_heals_from_every_damage", "--nocapture"]);
        command.env(CHILD, "1").env("TMPDIR", folders.path()).status()
    };
    let own = std::env::current_exe().unwrap();
    if opens_every_file() {
        // Without these two capabilities, even root cannot open a file without permission.
        let mut limited = Command::new("setpriv");
        limited.args(["--bounding-set", "-dac_override,-dac_read_search"]).arg(&own);
        if let Ok(status) = run(limited) {
            return status.success();
        }
    }
    run(Command::new(own)).unwrap().success()
}

#[test]
fn every_file_heals_from_every_damage() {
    if std::env::var_os(CHILD).is_none() {
        assert!(run_in_child(), "see the table above");
        return;
    }
    let is_root = opens_every_file();
    if is_root {
        println!("SKIPPED: mode-000, because this process is root and setpriv is missing");
    }
    car::keep_warnings();
    let cases = cases();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    println!("{} cases", cases.len());
    let outcomes = run_all(&cases, is_root);
    std::panic::set_hook(hook);

    print(&cases, &outcomes);
    let bad = outcomes.iter().filter(|outcome| outcome.reason().is_some()).count();
    println!("{} cases, {bad} not healed, {:.0} s", cases.len(), start.elapsed().as_secs_f64());
    assert!(!cases.is_empty() && bad == 0, "{bad} of {} cases are not healed", cases.len());
}
