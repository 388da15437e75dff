//! The boundary between the two processes of a car, tested with two users. The daemon runs as one,
//! and an attacker who took over the sync process as the other. The attacker owns the sync
//! directory, and the daemon may only read it. Whatever the attacker does, the daemon starts,
//! serves right answers and keeps its memory, and nothing of the attacker's reaches flash. When the
//! attacker is gone, the car reaches the newest release. Needs root to start other users'
//! processes.

use crate::car::{Car, EVIL, Fleet, GENERATIONS, Process, RELEASES, User};
use hatchback_tests::versions::copy;
use hatchback_tools::repository::keys::{ROLES, rotate};
use hatchback_tools::repository::publish::Change;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The user of the daemon, and its group, which may read the sync directory.
const DAEMON: User = User { uid: 10_001, gid: 10_001 };
/// The user of the sync process, whom the attacker took over.
const ATTACKER: User = User { uid: 10_002, gid: 10_001 };
/// Mode of the sync directory, as `debian/hatchback.hatchback-sync@.service` sets it.
const SYNC_MODE: u32 = 0o2750;
/// Mode of the flash directory.
const FLASH_MODE: u32 = 0o750;
/// Most memory of the daemon. The model's budget is 64 MiB; an attacker's file has 2 GiB.
const MEMORY_BYTES_MAX: u64 = 160 << 20;
/// Requests that no release reaches, so that it stays on probation.
const NEVER: u64 = 1_000_000_000;
/// Time within which the daemon looks at the sync directory at least once.
const LOOK: Duration = Duration::from_millis(1_300);
/// Time after which a car that is not at the newest release counts as stuck. Normally it takes
/// seconds.
const STUCK: Duration = Duration::from_secs(180);

/// Names of files that the daemon or the sync process has or had in a sync directory. The test adds
/// those that exist.
const NAMES: [&str; 14] = [
    "status",
    "status.a",
    "status.b",
    "status.part",
    "status.a.part",
    "status.b.part",
    "root.2",
    "root.3",
    "lock",
    "fetching",
    "wake",
    "floor.a.part",
    "targets.json.part",
    "staged",
];

/// What the attacker plants in place of a file, as a shell command. `$p` is the file, `$L` the live
/// record on flash, `$C` another file of the daemon's user.
const PLANTS: [(&str, &str); 9] = [
    ("a link to the live record", "ln -s \"$L\" \"$p\""),
    ("a link to a file of the daemon", "ln -s \"$C\" \"$p\""),
    ("a link to /dev/zero", "ln -s /dev/zero \"$p\""),
    ("a link to itself", "ln -s \"$p\" \"$p\""),
    ("a pipe", "mkfifo \"$p\""),
    ("a directory", "mkdir \"$p\""),
    ("a directory with a file", "mkdir \"$p\" && touch \"$p/file\""),
    ("2 GiB", "truncate -s 2G \"$p\""),
    ("garbage", "head -c 70000 /dev/urandom > \"$p\""),
];

/// A fleet, and a car with two users.
struct Scene {
    folder: tempfile::TempDir,
    fleet: Fleet,
    car: Car,
}

/// Returns whether this process may start processes of other users; prints why not.
fn is_root() -> bool {
    let is_root = tempfile::NamedTempFile::new().unwrap().as_file().metadata().unwrap().uid() == 0;
    if !is_root {
        println!("SKIPPED: the test needs root, to start processes of two users");
    }
    is_root
}

fn give(path: &Path, user: User, mode: u32) {
    let chown = Command::new("chown")
        .arg("-R")
        .arg(format!("{}:{}", user.uid, user.gid))
        .arg(path)
        .status();
    assert!(chown.unwrap().success());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

impl Scene {
    /// Returns a car without a generation, whose fleet has published the first.
    fn new(requests_min: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let fleet = Fleet::new(&folder.path().join("fleet"));
        fleet.publish(vec![RELEASES.snapshot(1)]);
        let car = Self::car(&folder.path().join("car"), &fleet, requests_min);
        Self { folder, fleet, car }
    }

    fn car(folder: &Path, fleet: &Fleet, requests_min: u64) -> Car {
        let mut car = Car::new(folder, requests_min);
        car.trust(fleet);
        (car.daemon_user, car.sync_user) = (Some(DAEMON), Some(ATTACKER));
        give(&car.flash(), DAEMON, FLASH_MODE);
        give(&car.sync_directory(), ATTACKER, SYNC_MODE);
        give(&folder.join("run"), DAEMON, 0o755);
        std::fs::write(folder.join("run/canary"), CANARY).unwrap();
        chown(folder.join("run/canary"), Some(DAEMON.uid), Some(DAEMON.gid)).unwrap();
        car
    }

    /// Returns a car that has committed `generation`.
    fn at(generation: usize) -> Self {
        let mut scene = Self::new(1);
        (2..=generation).for_each(|n| scene.fleet.publish(vec![RELEASES.delta(n)]));
        let mut daemon = scene.car.serve();
        go(&mut scene.car, &mut daemon, &scene.fleet, generation).unwrap();
        assert!(daemon.stop(), "{}", scene.car.logs());
        scene
    }
}

/// The bytes of a file of the daemon's user that must not change.
const CANARY: &[u8] = b"the daemon's own file";

/// Runs `script` as the attacker, in a shell with a process group of its own.
fn attack(car: &Car, script: &str) -> Process {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("umask 027\n{script}")).uid(ATTACKER.uid).gid(ATTACKER.gid);
    command.env("S", car.sync_directory()).env("F", car.flash()).current_dir("/");
    command.env("L", live_record(car)).env("C", canary(car)).process_group(0);
    Process(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// Ends the attacker's shell and every process that it started.
fn end(mut attacker: Process) {
    let group = format!("-{}", attacker.0.id());
    assert!(Command::new("kill").args(["-KILL", "--", &group]).status().unwrap().success());
    attacker.kill();
}

/// Runs `script` as the attacker to its end. Returns whether it succeeded.
fn attacked(car: &Car, script: &str) -> bool {
    attack(car, script).0.wait().unwrap().success()
}

/// Returns the path of the live record, or of its first copy.
fn live_record(car: &Car) -> PathBuf {
    let copies = ["live.a", "live"].map(|name| car.flash().join(name));
    copies.iter().find(|path| path.exists()).unwrap_or(&copies[0]).clone()
}

fn canary(car: &Car) -> PathBuf {
    car.flash().parent().unwrap().parent().unwrap().join("run/canary")
}

/// Takes the car to `generation` with an honest sync process.
fn go(car: &mut Car, daemon: &mut Process, fleet: &Fleet, generation: usize) -> Result<(), String> {
    let start = Instant::now();
    while !(car.is_at(generation) && car.ask() == Some(generation as u64)) {
        let status = car.status();
        let said = || {
            let (live, state) = (&status.live, status.state);
            format!("live {live:?}, {state}, {:?}\n{}", status.error, car.logs())
        };
        if start.elapsed() > STUCK {
            return Err(format!("stuck: {}", said()));
        }
        if !daemon.is_running() {
            return Err(format!("the daemon ended: {}", said()));
        }
        let mut sync = car.sync_from(&fleet.repository());
        while sync.is_running() && start.elapsed() < STUCK {
            car.ask_for(Duration::from_millis(5));
        }
        car.ask_for(Duration::from_millis(200));
    }
    Ok(())
}

/// Empties the sync directory, as its service does after a break-in, and takes the car to
/// `generation`.
fn recover(scene: &mut Scene, daemon: &mut Process, generation: usize) -> Result<(), String> {
    let directory = scene.car.sync_directory();
    // A killed process of the attacker's can finish its system call, and so create a last file.
    while let Err(error) = std::fs::remove_dir_all(&directory) {
        assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty, "{error}");
    }
    std::fs::create_dir(&directory).unwrap();
    give(&directory, ATTACKER, SYNC_MODE);
    go(&mut scene.car, daemon, &scene.fleet, generation)
}

/// Checks that the daemon runs within its memory, and that nothing was written through a link.
fn check(car: &Car, daemon: &mut Process) -> Result<(), String> {
    if !daemon.is_running() {
        return Err(format!("the daemon ended\n{}", car.logs()));
    }
    let bytes = daemon.memory_bytes_max();
    if bytes > MEMORY_BYTES_MAX {
        return Err(format!("the daemon had {} MiB of memory", bytes >> 20));
    }
    if std::fs::read(canary(car)).unwrap() != CANARY {
        return Err("the daemon wrote through a link".to_owned());
    }
    Ok(())
}

/// Starts the daemon and waits for its first answer.
fn start(car: &mut Car) -> Result<Process, String> {
    let mut daemon = car.serve();
    if car.first_answer(&mut daemon).is_none() {
        let end = if daemon.is_running() { "hangs" } else { "ended" };
        return Err(format!("the daemon {end} at its start\n{}", car.logs()));
    }
    Ok(daemon)
}

// What the attacker plants.

/// A car with a staged release, in folders to copy.
struct Template {
    folder: tempfile::TempDir,
    names: BTreeSet<String>,
}

impl Template {
    fn new() -> Self {
        let mut scene = Scene::at(2);
        scene.fleet.publish(vec![RELEASES.delta(3)]);
        assert!(scene.car.sync_from(&scene.fleet.repository()).0.wait().unwrap().success());
        let mut names: BTreeSet<String> = NAMES.iter().map(|name| (*name).to_owned()).collect();
        let directory = scene.car.sync_directory();
        for folder in ["", "staged"] {
            for entry in std::fs::read_dir(directory.join(folder)).unwrap().flatten() {
                let path = entry.path();
                names.insert(path.strip_prefix(&directory).unwrap().display().to_string());
            }
        }
        let _ = scene.car.ask();
        Self { folder: scene.folder, names }
    }

    /// Replaces the two directories of `car` by those of the template.
    fn restore(&self, car: &Car) {
        for (own, to, user, mode) in [
            ("car/models/coupon", car.flash(), DAEMON, FLASH_MODE),
            ("car/updates/coupon", car.sync_directory(), ATTACKER, SYNC_MODE),
        ] {
            let _ = std::fs::remove_dir_all(&to);
            copy(&self.folder.path().join(own), &to);
            give(&to, user, mode);
        }
        std::fs::write(canary(car), CANARY).unwrap();
    }
}

/// Plants `command` in place of `name` while the daemon runs, and starts the daemon again with it.
fn plant(template: &Template, car: &mut Car, name: &str, command: &str) -> Result<(), String> {
    template.restore(car);
    let mut daemon = start(car)?;
    // The daemon may put the file back between the two commands.
    let script = format!(
        "p=\"$S/{name}\"; mkdir -p \"$(dirname \"$p\")\"; \
         for n in 1 2 3 4 5 6 7 8 9; do rm -rf \"$p\"; {command} && exit 0; done; exit 1"
    );
    if !attacked(car, &script) {
        return Err("the attacker could not plant".to_owned());
    }
    if car.ask_for(LOOK).is_none() {
        return Err("the daemon stopped serving".to_owned());
    }
    check(car, &mut daemon)?;
    daemon.kill();

    let mut daemon = start(car)?;
    car.ask_for(LOOK / 4);
    check(car, &mut daemon)?;
    let foreign = Command::new("find").arg(car.sync_directory()).args(["-uid", "10001"]).output();
    let foreign = foreign.unwrap().stdout;
    if !foreign.is_empty() {
        let files = String::from_utf8_lossy(&foreign).into_owned();
        return Err(format!("the daemon wrote in the sync directory: {files}"));
    }
    if daemon.stop() { Ok(()) } else { Err(format!("no normal end\n{}", car.logs())) }
}

#[test]
fn the_daemon_serves_whatever_is_planted_in_the_sync_directory() {
    if !is_root() {
        return;
    }
    let (template, failures) = (Template::new(), Mutex::new(Vec::new()));
    let fleet = Fleet(template.folder.path().join("fleet"));
    std::thread::scope(|scope| {
        for (what, command) in PLANTS {
            let (template, failures, fleet) = (&template, &failures, &fleet);
            scope.spawn(move || {
                let folder = tempfile::tempdir().unwrap();
                std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))
                    .unwrap();
                let mut car = Scene::car(&folder.path().join("car"), fleet, NEVER);
                for name in &template.names {
                    if let Err(problem) = plant(template, &mut car, name, command) {
                        failures.lock().unwrap().push((what, name.clone(), problem));
                    }
                }
            });
        }
    });

    let failures = failures.into_inner().unwrap();
    for (what, _) in PLANTS {
        let of: Vec<_> = failures.iter().filter(|failure| failure.0 == what).collect();
        println!("{what:32} {} names, {} failures", template.names.len(), of.len());
        for (_, name, problem) in of {
            println!("    {name}: {problem}");
        }
    }
    assert!(failures.is_empty(), "{} plants did harm", failures.len());
}

// A missing sync directory.

#[test]
fn the_daemon_starts_and_serves_without_a_sync_directory() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::at(2);
    let (directory, aside) = (scene.car.sync_directory(), scene.folder.path().join("aside"));
    let mut failures = Vec::new();
    for (what, command) in [
        ("missing", "true"),
        ("no permission", "mkdir \"$D\"; chmod 0 \"$D\""),
        ("another user's", "mkdir \"$D\"; chmod 700 \"$D\""),
        ("a file", "touch \"$D\""),
        ("a pipe", "mkfifo \"$D\""),
        ("a dangling link", "ln -s \"$D/nowhere\" \"$D\""),
        ("a link to the root", "ln -s / \"$D\""),
        ("full of names", "mkdir -p \"$D/staged\"; cd \"$D/staged\"; seq 20000 | xargs touch"),
    ] {
        std::fs::rename(&directory, &aside).unwrap();
        let made = Command::new("sh").args(["-c", command]).env("D", &directory).status();
        assert!(made.unwrap().success(), "{what}");
        let served = start(&mut scene.car).and_then(|mut daemon| {
            scene.car.ask_for(LOOK);
            check(&scene.car, &mut daemon)?;
            if daemon.stop() { Ok(()) } else { Err("no normal end".to_owned()) }
        });
        failures.extend(served.err().map(|problem| format!("{what}: {problem}")));
        let _ = std::fs::remove_file(&directory);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::rename(&aside, &directory).unwrap();
    }
    scene.fleet.publish(vec![RELEASES.delta(3)]);
    let gone = start(&mut scene.car)
        .and_then(|mut daemon| go(&mut scene.car, &mut daemon, &scene.fleet, 3));
    failures.extend(gone.err());
    failures.iter().for_each(|failure| println!("{failure}"));
    assert!(failures.is_empty(), "{} of 9 failed", failures.len());
}

// Locks, races and permissions.

#[test]
fn locks_that_are_held_for_ever_stop_neither_the_daemon_nor_its_updates() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::at(2);
    scene.fleet.publish(vec![RELEASES.delta(3)]);
    assert!(scene.car.sync_from(&scene.fleet.repository()).0.wait().unwrap().success());
    let hold = "cd \"$S\"; for f in lock fetching * \"$F/lock\" \"$F/updating\"; do \
                [ -d \"$f\" ] || flock -o \"$f\" sleep 600 & done; wait";
    let attacker = attack(&scene.car, hold);
    let (lock, since) = (scene.car.sync_directory().join("lock"), Instant::now());
    while Command::new("flock").arg("-n").arg(&lock).arg("true").status().unwrap().success() {
        assert!(since.elapsed() < STUCK, "the attacker could not take the lock");
        std::thread::sleep(Duration::from_millis(10));
    }

    let served = start(&mut scene.car).and_then(|mut daemon| {
        let start = Instant::now();
        while scene.car.ask() != Some(3) {
            if start.elapsed() > STUCK {
                return Err(format!("the staged release waits for a lock\n{}", scene.car.logs()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        check(&scene.car, &mut daemon)
    });
    end(attacker);
    served.unwrap();
}

#[test]
fn a_staged_bundle_that_changes_while_it_is_read_does_no_harm() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::at(2);
    let mut daemon = start(&mut scene.car).unwrap();
    let evil = scene.folder.path().join("evil");
    std::fs::copy(RELEASES.delta(EVIL), &evil).unwrap();
    std::fs::set_permissions(&evil, std::fs::Permissions::from_mode(0o644)).unwrap();
    // Replaces the bundle, and flips bytes in place and back, as fast as the shell can.
    let race = format!(
        "cd \"$S/staged\"; while :; do for f in *.hatch; do [ -f \"$f\" ] || continue; \
         cp \"$f\" good; n=$(stat -c %s \"$f\"); \
         for at in 100 $((n / 3)) $((n / 2)) $((n - 60)); do \
         printf xxxx | dd of=\"$f\" bs=1 seek=$at conv=notrunc; \
         dd if=good of=\"$f\" bs=64k conv=notrunc; done; \
         cp {} new; mv -f new \"$f\"; mv -f good \"$f\"; done; done",
        evil.display()
    );
    let attacker = attack(&scene.car, &race);
    let mut problems = Vec::new();
    for n in 3..=GENERATIONS {
        scene.fleet.publish(vec![RELEASES.delta(n)]);
        for _ in 0..3 {
            let _ = scene.car.sync_from(&scene.fleet.repository()).0.wait();
            scene.car.ask_for(LOOK);
        }
        problems.extend(check(&scene.car, &mut daemon).err());
    }
    end(attacker);
    problems.extend(recover(&mut scene, &mut daemon, GENERATIONS).err());
    let marks = scene.car.marks();
    assert!(problems.is_empty() && marks.is_empty(), "{problems:#?}, marks {marks:?}");
}

#[test]
fn neither_user_can_write_what_is_the_others() {
    if !is_root() {
        return;
    }
    let scene = Scene::at(2);
    let open = Command::new("find").arg(scene.car.flash()).args(["-perm", "/022"]).output();
    let open = String::from_utf8(open.unwrap().stdout).unwrap();
    assert_eq!(open, "", "files on flash that others may write");
    let tries = "cd \"$F\" || exit 0; for f in $(find .); do [ -w \"$f\" ] && exit 1; \
                 touch \"$f/new\" && exit 1; rm -rf \"$f\" 2>/dev/null; [ -e \"$f\" ] || exit 1; \
                 done; exit 0";
    assert!(attacked(&scene.car, tries), "the attacker changed flash");

    let mut daemon = Command::new("sh");
    daemon.args(["-c", "touch \"$S/new\" || touch \"$S/staged/new\""]);
    daemon.env("S", scene.car.sync_directory()).uid(DAEMON.uid).gid(DAEMON.gid);
    let wrote = daemon.stderr(Stdio::null()).status().unwrap().success();
    assert!(!wrote, "the daemon's user can write in the sync directory");
}

// A stolen key.

/// The thief has the old targets key and the sync process. The daemon has accepted the root that
/// revoked the key.
#[test]
fn a_revoked_key_signs_nothing_that_is_served_although_root_and_floors_are_put_back() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::at(1);
    let thief = Fleet(scene.folder.path().join("thief"));
    copy(&scene.fleet.0, &thief.0);
    let [_, targets, ..] = ROLES;
    rotate(&scene.fleet.keys(), targets, crate::car::now() + 1_000_000).unwrap();
    let re_sign = vec!["1".to_owned()];
    scene.fleet.change(Change { re_sign, bundles: vec![RELEASES.delta(2)], ..Change::default() });
    let mut daemon = start(&mut scene.car).unwrap();
    go(&mut scene.car, &mut daemon, &scene.fleet, 2).unwrap();
    assert!(scene.car.sync_directory().join("root.2").exists());

    thief.publish(vec![RELEASES.snapshot(EVIL)]);
    let wipe = "cd \"$S\" && rm -rf ./* && [ -z \"$(ls)\" ]";
    assert!(attacked(&scene.car, wipe));
    let staged = scene.car.sync_from(&thief.repository()).0.wait().unwrap().success();
    assert!(staged, "{}", scene.car.logs());
    for _ in 0..3 {
        // The daemon may be working on the release already.
        let _ = scene.car.sync_from(&thief.repository()).0.wait();
        // `ask` panics if the thief's generation answers.
        assert_eq!(scene.car.ask_for(5 * LOOK), Some(2));
        check(&scene.car, &mut daemon).unwrap();
        daemon.kill();
        daemon = start(&mut scene.car).unwrap();
    }
    let theirs = format!("g{EVIL:012}");
    assert!(!scene.car.flash().join(theirs).exists(), "the thief's rows are on flash");

    scene.fleet.publish(vec![RELEASES.delta(3)]);
    recover(&mut scene, &mut daemon, 3).unwrap();
    assert_eq!(scene.car.marks(), Vec::<String>::new());
}
