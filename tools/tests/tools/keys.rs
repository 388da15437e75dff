//! The folders of keys: rotations, who may open them, and what a killed command leaves.

use crate::cli::{Desk, printed, refused};
use hatchback_tools::repository::keys::{ROLES, RoleCounts, new_fleet, roots, rotate};
use serde_json::Value;
use sigstore_tuf::TrustedMetadataSet;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};
use tough::schema::RoleType;

/// Returns the names of what is in `folder`.
fn names(folder: impl AsRef<Path>) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A kill while the keys are made, and after they have moved.
#[test]
fn the_next_command_clears_what_a_killed_one_left() {
    let desk = Desk::new();
    let (keys, other) = (desk.path("keys"), desk.path("other"));
    let new = |folder: &str| printed(&["keys", "new", folder]);
    let left = |folder: &str| {
        let staging = Path::new(folder).join(".new");
        std::fs::create_dir_all(&staging).unwrap();
        for name in names(&other).iter().filter(|name| name.ends_with(".pk8")) {
            std::fs::copy(Path::new(&other).join(name), staging.join(name)).unwrap();
            std::fs::copy(Path::new(&other).join(name), Path::new(folder).join(name)).unwrap();
        }
    };
    new(&other);
    let unlisted: BTreeSet<_> =
        names(&other).into_iter().filter(|name| name.ends_with(".pk8")).collect();
    for command in [&["keys", "new", &keys][..], &["keys", "rotate", &keys, "timestamp"]] {
        left(&keys);
        printed(command);
        assert!(!names(&keys).contains(".new") && names(&keys).is_disjoint(&unlisted));
        assert!(names(desk.path("keys/retired")).is_superset(&unlisted));
        assert_eq!(names(&keys).iter().filter(|name| name.ends_with(".pk8")).count(), 6);
    }
}

#[test]
fn only_the_user_may_open_the_folders_of_keys() {
    let desk = Desk::new();
    let keys = desk.path("fleet/keys");
    for command in [&["keys", "new", &keys][..], &["keys", "rotate", &keys, "targets"]] {
        let ran = Command::new("sh")
            .args(["-c", "umask 000; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_hatchback")])
            .args(command)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }
    let mode = |path: &str| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for folder in [keys.clone(), desk.path("fleet/keys/retired")] {
        assert_eq!(mode(&folder), 0o700, "{folder}");
    }
    // A repository is often beside the keys, and its server is another user.
    assert_eq!(mode(&desk.path("fleet")), 0o755);
    for key in names(&keys).iter().filter(|name| name.ends_with(".pk8")) {
        assert_eq!(mode(&format!("{keys}/{key}")), 0o600, "{key}");
    }
}

#[test]
fn a_clock_behind_the_newest_root_rotates_nothing() {
    let desk = Desk::new();
    let keys = desk.path("keys");
    printed(&["keys", "new", &keys]);
    let root = std::fs::File::options().write(true).open(desk.path("keys/1.root.json")).unwrap();
    root.set_modified(UNIX_EPOCH + Duration::from_secs(4_000_000_000)).unwrap();
    let before = names(&keys);
    let said = refused(&["keys", "rotate", &keys, "timestamp"]);
    for part in ["keys/1.root.json", "2096-10-02T07:06:40Z", "this clock (2"] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(names(&keys), before);
}

/// A fleet as in the documentation: three root keys of which two sign, and two keys of each
/// other role.
fn fleet() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (here, away) = (folder.path().join("here"), folder.path().join("away"));
    let (root, other) =
        (RoleCounts { keys: 3, threshold: 2 }, RoleCounts { keys: 2, threshold: 2 });
    new_fleet(&here, [root, other, other, other], 2_000_000_000).unwrap();
    std::fs::create_dir(&away).unwrap();
    (folder, here, away)
}

/// Moves `n` keys of a role from one folder to another.
fn move_keys(role: &str, n: usize, from: &Path, to: &Path) {
    let keys = keys_of(role, from);
    assert!(keys.len() >= n);
    keys.iter().take(n).for_each(|k| std::fs::rename(from.join(k), to.join(k)).unwrap());
}

/// Returns the names of the keys of a role in `folder`.
fn keys_of(role: &str, folder: &Path) -> Vec<String> {
    let is_key = |name: &String| name.starts_with(role) && name.ends_with(".pk8");
    names(folder).into_iter().filter(is_key).collect()
}

fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| (name.clone(), std::fs::read(folder.join(name)).unwrap());
    names(folder).into_iter().map(read).collect()
}

/// Returns the ids of the keys that the newest root lists for each role.
fn listed(folder: &Path) -> [HashSet<String>; 4] {
    let root = std::fs::read(&roots(folder).unwrap().last().unwrap().path).unwrap();
    let root: Value = serde_json::from_slice(&root).unwrap();
    ROLES.map(|role| {
        let ids = root["signed"]["roles"][role.to_string()]["keyids"].as_array().unwrap();
        ids.iter().map(|id| id.as_str().unwrap().to_owned()).collect()
    })
}

#[test]
fn keys_that_are_elsewhere_stay_in_force() {
    let (_folder, here, away) = fleet();
    let before = listed(&here);
    move_keys("root", 1, &here, &away);
    move_keys("targets", 2, &here, &away);
    move_keys("timestamp", 1, &here, &away);
    rotate(&here, RoleType::Timestamp, 2_000_000_001).unwrap();
    let after = listed(&here);
    assert_eq!(after.each_ref().map(HashSet::len), [3, 2, 2, 2]);
    assert!(after[..3] == before[..3] && after[3].is_disjoint(&before[3]));
    assert_eq!(keys_of("timestamp-1-", &here.join("retired")).len(), 1);

    // The key that was elsewhere signs together with one of the others; then all three are
    // replaced.
    move_keys("root", 1, &away, &here);
    let held = keys_of("root-1-", &here);
    assert_eq!(held.len(), 3);
    std::fs::rename(here.join(&held[1]), away.join(&held[1])).unwrap();
    rotate(&here, RoleType::Root, 2_000_000_002).unwrap();
    assert!(listed(&here)[0].len() == 3 && listed(&here)[0].is_disjoint(&before[0]));
    let first = std::fs::read(here.join("1.root.json")).unwrap();
    let mut car = TrustedMetadataSet::from_root(&first).unwrap();
    for version in 2..=3 {
        car.update_root(&std::fs::read(here.join(format!("{version}.root.json"))).unwrap())
            .unwrap();
    }
}

/// Without the lock the second command removes the first one's staged keys.
#[test]
fn while_one_command_changes_the_keys_another_is_refused() {
    let (folder, here, _) = fleet();
    let held = content(&here);
    let new = folder.path().join("new");
    std::fs::create_dir(&new).unwrap();
    let one = RoleCounts { keys: 1, threshold: 1 };
    let locks = [&here, &new].map(|folder| {
        let lock = File::open(folder).unwrap();
        lock.try_lock().unwrap();
        lock
    });
    let refusals = ROLES
        .map(|role| rotate(&here, role, 2_000_000_001))
        .into_iter()
        .chain([new_fleet(&new, [one; 4], 2_000_000_001)]);
    for refused in refusals {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("another `hatchback keys` command"), "{refused}");
    }
    assert_eq!(content(&here), held);
    assert!(names(&new).is_empty());

    // Closing alone does not release a lock while a child of another test has a copy of the file.
    locks.iter().for_each(|lock| lock.unlock().unwrap());
    rotate(&here, RoleType::Root, 2_000_000_001).unwrap();
    new_fleet(&new, [one; 4], 2_000_000_001).unwrap();
}

#[test]
fn a_rotation_without_enough_root_keys_changes_nothing() {
    let (_folder, here, away) = fleet();
    let before = listed(&here);
    move_keys("root", 2, &here, &away);
    let held = content(&here);
    for role in ROLES {
        let refused = rotate(&here, role, 2_000_000_001).unwrap_err().to_string();
        assert!(refused.contains("Nothing was changed"), "{refused}");
        assert_eq!(content(&here), held);
    }
    move_keys("root", 2, &away, &here);
    rotate(&here, RoleType::Snapshot, 2_000_000_001).unwrap();
    assert!(listed(&here)[2].is_disjoint(&before[2]) && listed(&here)[0] == before[0]);
}

#[test]
fn no_more_keys_must_sign_than_there_are() {
    let desk = Desk::new();
    let [enough, few] = [(2, 2), (2, 3)].map(|(keys, threshold)| RoleCounts { keys, threshold });
    let folder = desk.folder.path().join("keys");
    let refused = new_fleet(&folder, [enough, enough, few, enough], 2_000_000_000).unwrap_err();
    assert!(refused.to_string().contains("3 keys must sign, but the role has only 2"), "{refused}");
}
