//! One case: damages a file of a copy of the scene, and takes the car to the newest release.

use crate::damage::car::{Fault, TestCar};
use crate::damage::cases::{
    Case, Damage, Next, Outcome, When, link_target, may_stop_serving, short,
};
use crate::damage::scenes::files_in;
use hatchback_tests::fleet::T0;
use hatchback_tests::random::Random;
use hatchback_tests::versions::copy;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the rounds after the damage, before the next release is published. The short form's are
/// longer than the interval of polls, those of the full form are two.
fn rounds_before() -> usize {
    if std::env::var_os("HATCHBACK_DAMAGE").is_some() { 30 } else { 15 }
}

/// A file that a link leads to: its hard link beside the two directories, and its bytes.
pub struct Kept {
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Damages `case.file` in `folder`. If the damage is a link, returns its target.
pub fn strike(case: &Case, folder: &Path) -> Option<Kept> {
    let path = folder.join("car").join(&case.file);
    let old = std::fs::read(&path).unwrap_or_default();
    let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
    let remove = || {
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_dir_all(&path);
    };
    let linked = |target: &Path| {
        let (kept, bytes) = (folder.join("kept"), std::fs::read(target).unwrap());
        std::fs::hard_link(target, &kept).unwrap();
        remove();
        symlink(target, &path).unwrap();
        Some(Kept { path: kept, bytes })
    };
    let parent = path.parent().unwrap();
    std::fs::create_dir_all(parent).unwrap();
    match case.damage {
        Damage::Missing => remove(),
        Damage::Empty => write(&[]),
        Damage::Half => write(&old[..old.len() / 2]),
        Damage::Zeroed => write(&vec![0; old.len()]),
        Damage::Flipped => {
            let (mut bytes, at) = (old.clone(), old.len() / 2);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << 3;
            }
            write(&bytes);
        }
        Damage::Garbage => {
            let mut random = Random::new(3);
            write(&(0..old.len().max(100)).map(|_| random.bits() as u8).collect::<Vec<u8>>());
        }
        Damage::Dangling => {
            remove();
            symlink(parent.join("nothing"), &path).unwrap();
        }
        Damage::LinkInside => {
            return linked(&folder.join("car").join(link_target(&case.scene, &case.file)));
        }
        Damage::LinkOutside => return linked(&folder.join("outside/file")),
        Damage::Fifo => {
            remove();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        }
        Damage::Directory | Damage::FullDirectory => {
            remove();
            std::fs::create_dir(&path).unwrap();
            if case.damage == Damage::FullDirectory {
                std::fs::write(path.join("file"), b"in the way").unwrap();
            }
        }
        Damage::NoPermission => {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
        }
    }
    None
}

/// Runs a case on a copy of its scene.
pub fn run(case: &Case, steps: Arc<AtomicU64>) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    copy(case.scene.folder.path(), folder.path());
    std::fs::create_dir(folder.path().join("outside")).unwrap();
    std::fs::write(folder.path().join("outside/file"), b"not the car's").unwrap();
    let ran = catch_unwind(AssertUnwindSafe(|| strike_and_heal(case, folder.path(), steps)));
    ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Outcome::Wrong(format!("panicked: {}", text.unwrap_or_default()))
    })
}

pub fn strike_and_heal(case: &Case, folder: &Path, steps: Arc<AtomicU64>) -> Outcome {
    let scene = &case.scene;
    let mut car = TestCar::new(&folder.join("car"), &scene.fleet);
    (car.now, car.rules) = (scene.now, scene.rules);
    car.clock.0.store(scene.now - T0, Ordering::Relaxed);
    car.may_be_damaged = may_stop_serving(&case.file);
    car.steps = steps;

    let healed = heal(case, &mut car, folder);
    let (outcome, kept) = match healed {
        (Ok(outcome), kept) | (Err(outcome), kept) => (outcome, kept),
    };
    if let Some(note) = car.marked() {
        let place = folder.display().to_string();
        return Outcome::Wrong(format!(
            "a good release is marked: {}",
            short(&note.replace(&place, ""))
        ));
    }
    let is_kept = kept.is_none_or(|kept| std::fs::read(kept.path).unwrap() == kept.bytes);
    let outside = files_in(folder).into_iter().filter(|file| !file.starts_with("car/"));
    let outside: Vec<String> = outside.filter(|file| file != "kept").collect();
    let is_same = std::fs::read(folder.join("outside/file")).unwrap() == b"not the car's";
    if !is_kept || !is_same || outside != ["outside/file"] {
        return Outcome::Wrong(format!("a write went through the link; outside: {outside:?}"));
    }
    outcome
}

/// Strikes, and takes the car to the newest release and through one more start.
pub fn heal(
    case: &Case,
    car: &mut TestCar,
    folder: &Path,
) -> (Result<Outcome, Fault>, Option<Kept>) {
    let scene = &case.scene;
    let mut kept = None;
    if case.when == When::Stopped {
        kept = strike(case, folder);
    }
    car.start();
    if case.when == When::Running {
        kept = strike(case, folder);
    }
    let next = match case.next {
        Next::Both => &scene.both,
        Next::Snapshot => &scene.snapshot,
    };
    let mut go = || {
        let must_serve = case.when == When::Running || !may_stop_serving(&case.file);
        for _ in 0..rounds_before() {
            if !car.round(&scene.fleet.repository())? && must_serve {
                return Err(Outcome::Down(car.reason()));
            }
        }
        let healed = car.go_to(&next.repository(), scene.newest)?;
        // If no request read the page before the next release, that release was a delta. Rows of
        // the page count as damaged until the scrub finds it.
        car.may_be_damaged = case.damage == Damage::Flipped && case.file.ends_with(".seg");
        car.stop();
        car.start();
        if car.served() != Some(scene.newest as u64) || !car.ask()? {
            return Err(Outcome::Down(format!("after a start: {}", car.reason())));
        }
        Ok(healed)
    };
    (go(), kept)
}
