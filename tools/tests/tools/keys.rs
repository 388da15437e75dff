//! The folders of keys: rotations, who may open them, and what a killed command leaves.

use crate::cli::{Desk, printed, refused, report_of};
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
    let new = |folder: &str| printed(&["keys", "new", folder, "--plain"]);
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
    for command in [&["keys", "new", &keys, "--plain"][..], &["keys", "rotate", &keys, "timestamp"]]
    {
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
    for command in [&["keys", "new", &keys, "--plain"][..], &["keys", "rotate", &keys, "targets"]] {
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
    printed(&["keys", "new", &keys, "--plain"]);
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

const PASSPHRASE: &str = "HATCHBACK_KEY_PASSPHRASE";

/// Runs the program without a terminal, and with these variables of the environment.
fn without_terminal(args: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = Command::new("setsid");
    command.args(["--wait", env!("CARGO_BIN_EXE_hatchback")]).args(args);
    command.env_remove(PASSPHRASE).env_remove("HATCHBACK_KEY_PASSPHRASE_FILE");
    command.envs(variables.iter().copied()).output().unwrap()
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn forms(keys: &str) -> BTreeMap<String, BTreeSet<String>> {
    let report: Value = report_of(&["keys", "list", keys]);
    let mut forms: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for key in report["keys"].as_array().unwrap() {
        let form = key["form"].as_str().unwrap_or("-").to_owned();
        forms.entry(key["role"].as_str().unwrap().to_owned()).or_default().insert(form);
    }
    forms
}

fn only(form: &str) -> BTreeSet<String> {
    BTreeSet::from([form.to_owned()])
}

#[test]
fn keys_are_encrypted_and_only_their_pass_phrase_opens_them() {
    let desk = Desk::new();
    let (bundle, keys, file) = (desk.pack(&[]), desk.path("keys"), desk.path("passphrase"));
    std::fs::write(&file, "open sesame\nnot this line\n").unwrap();
    let (right, wrong) = ([(PASSPHRASE, "open sesame")], [(PASSPHRASE, "open barley")]);
    let from_file = [("HATCHBACK_KEY_PASSPHRASE_FILE", file.as_str())];

    let refused = without_terminal(&["keys", "new", &keys], &[]);
    assert!(!refused.status.success());
    for word in ["--plain", "no terminal", PASSPHRASE] {
        assert!(said(&refused).contains(word), "{}", said(&refused));
    }
    assert!(names(&keys).is_empty(), "nothing was made");
    let made = without_terminal(&["keys", "new", &keys], &from_file);
    assert!(made.status.success(), "{}", said(&made));
    // No pass phrase is needed to see what there is.
    assert!(forms(&keys).values().all(|form| *form == only("encrypted")));

    let repository = desk.path("repository");
    let publish = ["publish", &bundle, "--keys", &keys, "--to", &repository];
    for (variables, why) in [(&wrong[..], "is not that of this key"), (&[], "no terminal")] {
        let refused = without_terminal(&publish, variables);
        let text = said(&refused);
        assert!(!refused.status.success() && text.contains(why), "{text}");
        assert!(text.contains("keys/") && text.contains(".pk8"), "it names the key: {text}");
        assert!(!text.contains("sesame") && !text.contains("barley"), "{text}");
    }
    for (command, variables) in [
        (&publish[..], &right[..]),
        (&publish[..], &from_file),
        (&["keys", "rotate", &keys, "timestamp"], &right),
        (&publish[..], &right),
    ] {
        let done = without_terminal(command, variables);
        assert!(done.status.success(), "{}", said(&done));
    }
    assert!(forms(&keys).values().all(|form| *form == only("encrypted")));
    assert_eq!(keys_of("timestamp-1-", &Path::new(&keys).join("retired")).len(), 1);
}

#[test]
fn a_release_needs_no_pass_phrase_of_the_root_and_openssl_reads_the_keys() {
    if Command::new("openssl").arg("version").output().is_err() {
        return println!("SKIPPED: openssl is not installed");
    }
    let desk = Desk::new();
    let (bundle, keys) = (desk.pack(&[]), desk.path("keys"));
    printed(&["keys", "new", &keys, "--plain"]);
    let openssl = |args: &[&str]| {
        let ran = Command::new("openssl").args(args).output().unwrap();
        assert!(ran.status.success(), "{args:?}: {}", said(&ran));
        ran.stdout
    };
    let encrypt = |name: &str, passphrase: &str| {
        let (path, out) = (format!("{keys}/{name}"), desk.path("key"));
        let pass = format!("pass:{passphrase}");
        let encrypt = ["pkcs8", "-topk8", "-v2", "aes-256-cbc", "-inform", "DER", "-outform"];
        let files = ["DER", "-in", &path, "-out", &out, "-passout", &pass];
        openssl(&[&encrypt[..], &files].concat());
        std::fs::rename(out, path).unwrap();
    };
    for name in names(&keys).iter().filter(|name| name.ends_with(".pk8")) {
        encrypt(name, if name.starts_with("root") { "of another person" } else { "x" });
    }
    assert!(forms(&keys).values().all(|form| *form == only("encrypted")));
    let repository = desk.path("repository");
    let publish = ["publish", &bundle, "--keys", &keys, "--to", &repository];
    let done = without_terminal(&publish, &[(PASSPHRASE, "x")]);
    assert!(done.status.success(), "{}", said(&done));

    // And the other way round.
    let own = desk.path("own");
    let made = without_terminal(&["keys", "new", &own], &[(PASSPHRASE, "y")]);
    assert!(made.status.success(), "{}", said(&made));
    let key = format!("{own}/{}", keys_of("targets-1-", Path::new(&own))[0]);
    let text = openssl(&["pkey", "-inform", "DER", "-in", &key, "-passin", "pass:y", "-text"]);
    assert!(String::from_utf8_lossy(&text).contains("ED25519"));
}

/// Answers each question of a program on a terminal with the next line, and prints what it shows.
const TERMINAL: &str = r"
import os, pty, sys
answers = sys.argv[1].split(',')
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
shown = b''
while True:
    try:
        read = os.read(terminal, 1000)
    except OSError:
        break
    if not read:
        break
    shown += read
    if shown.endswith(b': ') and answers:
        os.write(terminal, answers.pop(0).encode())
sys.stdout.write(shown.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

#[test]
fn a_terminal_is_asked_and_shows_no_pass_phrase() {
    let desk = Desk::new();
    let typed = |answers: &str, args: &[&str]| {
        let mut command = Command::new("python3");
        command.env_remove(PASSPHRASE).args(["-c", TERMINAL, answers]);
        command.arg(env!("CARGO_BIN_EXE_hatchback")).args(args).output()
    };
    if typed("", &["--version"]).is_err() {
        return println!("SKIPPED: python3, which makes a terminal, is not installed");
    }
    let (bundle, keys) = (desk.pack(&[]), desk.path("keys"));
    for (answers, why) in [
        ("kumquat\n,other\n", "the two pass phrases differ"),
        ("\n", "the pass phrase is empty"),
        ("kum\x03", "interrupted"),
    ] {
        let asked = typed(answers, &["keys", "new", &keys]).unwrap();
        let shown = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(asked.status.code() == Some(1) && shown.contains(why), "{shown}");
        assert!(!shown.contains("kum") && names(&keys).is_empty(), "{shown}");
    }
    // A typing error is mended, and the terminal asks only twice for all keys.
    let made = typed("kumm\x7fquat\n,kumquat\n", &["keys", "new", &keys]).unwrap();
    let shown = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success() && !shown.contains("kum"), "{shown}");
    assert_eq!(shown.matches("pass phrase of the new keys").count(), 1, "{shown}");

    let repository = desk.path("repository");
    let publish = ["publish", &bundle, "--keys", &keys, "--to", &repository];
    let done = typed("wrong\n,kumquat\n", &publish).unwrap();
    let shown = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && shown.contains("+ coupon-dlrm/"), "{shown}");
    assert_eq!(shown.matches("pass phrase of ").count(), 2, "the roles share one: {shown}");
}

/// A token of SoftHSM2 with a key of each kind that it can hold.
struct SoftToken<'a> {
    desk: &'a Desk,
    library: &'static str,
}

impl SoftToken<'_> {
    fn run(&self, program: &str, args: &[&str]) -> std::process::Output {
        let mut command = Command::new(program);
        command.env("SOFTHSM2_CONF", self.desk.path("softhsm2.conf")).args(args);
        command.env(PASSPHRASE, "4711").output().unwrap()
    }

    /// Makes a key and returns its URI; `None` if SoftHSM2 cannot hold one of this kind.
    fn import(&self, label: &str, kind: &[&str]) -> Option<String> {
        let pem = self.desk.path(&format!("{label}.pem"));
        let made = self.run("openssl", &[&["genpkey", "-out", &pem][..], kind].concat());
        assert!(made.status.success(), "{}", said(&made));
        let id: String = label.bytes().map(|b| format!("{b:02x}")).collect();
        let token = ["--token", "fleet", "--pin", "4711", "--label", label, "--id", &id];
        let imported = self.run("softhsm2-util", &[&["--import", &pem][..], &token].concat());
        let library = self.library;
        let uri = format!("pkcs11:token=fleet;object={label}?module-path={library}");
        imported.status.success().then_some(uri)
    }
}

/// Returns the kind of a listed key of the test below.
fn kind_of(key: &Value) -> &'static str {
    match key["role"].as_str().unwrap() {
        "targets" => "ecdsa",
        "snapshot" => "rsa",
        _ => "ed25519",
    }
}

#[test]
fn keys_that_a_token_holds_sign_releases_that_a_car_verifies() {
    let libraries = ["", "x86_64-linux-gnu/", "aarch64-linux-gnu/"];
    let libraries = libraries.map(|folder| format!("/usr/lib/{folder}softhsm/libsofthsm2.so"));
    let library = libraries.iter().find(|path| Path::new(path).exists());
    let has_openssl = Command::new("openssl").arg("version").output().is_ok();
    let Some(library) = library.filter(|_| has_openssl) else {
        return println!("SKIPPED: needs the packages softhsm2 and openssl");
    };
    let desk = Desk::new();
    let token = SoftToken { desk: &desk, library: Box::leak(library.clone().into_boxed_str()) };
    std::fs::create_dir(desk.path("tokens")).unwrap();
    let conf = format!("directories.tokendir = {}\n", desk.path("tokens"));
    std::fs::write(desk.path("softhsm2.conf"), conf).unwrap();
    let init = ["--init-token", "--free", "--label", "fleet", "--so-pin", "4711", "--pin", "4711"];
    let made = token.run("softhsm2-util", &init);
    assert!(made.status.success(), "{}", said(&made));

    let curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let rsa = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
    let targets = token.import("targets", &curve).unwrap();
    let snapshot = token.import("snap", &rsa).unwrap();
    let timestamp = token.import("time", &["-algorithm", "ED25519"]);
    if timestamp.is_none() {
        println!("SKIPPED: the key of Ed25519: this SoftHSM2 holds none");
    }

    let (bundle, keys) = (desk.pack(&[]), desk.path("keys"));
    let given = [
        Some(format!("targets={targets}")),
        Some(format!("snapshot={snapshot}")),
        timestamp.as_ref().map(|uri| format!("timestamp={uri}")),
    ];
    let given: Vec<String> = given.into_iter().flatten().collect();
    let options = given.iter().flat_map(|key| ["--key", key.as_str()]);
    let new: Vec<&str> = ["keys", "new", &keys, "--plain"].into_iter().chain(options).collect();
    let hatchback = |args: &[&str]| {
        let ran = token.run(env!("CARGO_BIN_EXE_hatchback"), args);
        assert!(ran.status.success(), "{args:?}: {}", said(&ran));
        String::from_utf8(ran.stdout).unwrap()
    };
    hatchback(&new);
    let forms = forms(&keys);
    assert_eq!([&forms["targets"], &forms["snapshot"]], [&only("token"), &only("token")]);
    assert_eq!(forms["root"], only("plain"));
    let listed: Value = report_of(&["keys", "list", &keys]);
    for key in listed["keys"].as_array().unwrap() {
        assert!(key["kind"] == kind_of(key) && key["written"].is_string(), "{key}");
    }
    let on_token = only(if timestamp.is_some() { "token" } else { "plain" });
    assert_eq!(forms["timestamp"], on_token);

    let (repository, car) = (desk.path("repository"), desk.path("car"));
    let publish = ["publish", "--keys", &keys, "--to", &repository];
    hatchback(&[&publish[..], &[&bundle]].concat());
    let (state, root) = (desk.path("car.sync"), desk.path("keys/1.root.json"));
    let sync = ["sync", "--from", &repository, "--root", &root, "--state", &state];
    let sync = [&sync[..], &["--flash", &car, "--json"]].concat();
    let status: Value = serde_json::from_str(&hatchback(&sync)).unwrap();
    assert_eq!(status["state"].as_str().map(str::to_lowercase).as_deref(), Some("committed"));

    // From the token to a file, and from a file to a token.
    let other = token.import("second", &curve).unwrap();
    hatchback(&["keys", "rotate", &keys, "targets", "--key", &other]);
    hatchback(&[&publish[..], &["--re-sign", "1"]].concat());
    hatchback(&sync);

    let wrong = targets.replace("object=targets", "object=nothing");
    let refused = token.run(
        env!("CARGO_BIN_EXE_hatchback"),
        &["keys", "rotate", &keys, "snapshot", "--key", &wrong],
    );
    let text = said(&refused);
    assert!(!refused.status.success() && text.contains("the token has 0 objects"), "{text}");
}
