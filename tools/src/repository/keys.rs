//! `keys`: makes and rotates a fleet's signing keys and its root of trust. Each key is a file in a
//! folder: an encrypted or plain PKCS#8 file (Ed25519), or the URI of a key that a token holds. A
//! new root starts as a copy of the old root and also carries signatures by the old root's keys, so
//! that a car that trusts the old root accepts the new one. Never signs releases: `publish` does.

use crate::report;
use crate::report::Json;
use crate::report::temporary::Claim;
use crate::repository::clock::{DAY_S, now, signing_time, timestamp, unix_s};
use crate::repository::encrypted_key::encrypt;
use crate::repository::key_files::{
    Form, KeyId, file_stem, files, key_files, key_paths, public_of, sources,
};
use crate::repository::passphrase::Passphrases;
use crate::repository::store::create_folder;
use crate::repository::token::open_token;
use crate::say;
use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use clap::{Args, Subcommand};
use hatchback::bundle::manifest::hex;
use hatchback::clock::utc;
use serde::Serialize;
use sigstore_tuf::TrustedMetadataSet;
use std::collections::{HashMap, HashSet};
use std::fs::{File, Permissions, TryLockError};
use std::io::Write;
use std::num::NonZeroU64;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tough::editor::signed::SignedRole;
use tough::key_source::KeySource;
use tough::schema::key::Key;
use tough::schema::{KeyHolder, RoleKeys, RoleType, Root, Signed};
use tough::sign::parse_keypair;

/// Makes and rotates a fleet's signing keys
#[derive(Args, Debug)]
pub struct KeysArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Makes the keys and the first root of a new fleet
    New {
        /// An empty folder for the keys and roots
        keys: PathBuf,
        /// Keys of the root role; keep them offline
        #[arg(long, default_value_t = 3, value_parser = report::args::at_least_one)]
        root_keys: usize,
        /// Signatures that a new root needs
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
        root_threshold: u64,
        /// Keys of each of the other roles
        #[arg(long, default_value_t = 1, value_parser = report::args::at_least_one)]
        role_keys: usize,
        /// Signatures that each of the other roles needs
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        role_threshold: u64,
        /// A key that a token holds, in place of the keys that would be made for the role
        #[arg(long, value_name = "ROLE=pkcs11:URI", value_parser = role_key)]
        key: Vec<RoleKey>,
        /// Writes the keys as they are. Without this option they are encrypted under the pass
        /// phrase in HATCHBACK_KEY_PASSPHRASE, in the first line of the file
        /// HATCHBACK_KEY_PASSPHRASE_FILE, or that the terminal asks for
        #[arg(long)]
        plain: bool,
        /// Days until the root expires
        #[arg(long, default_value_t = 365, value_parser = report::args::days)]
        days: u64,
        #[command(flatten)]
        json: Json,
    },
    /// Replaces the keys of a role by as many new keys, which revokes the old keys
    Rotate {
        /// The folder of the keys and roots. It must hold as many root keys as a new root needs
        /// signatures; all other keys may be elsewhere
        keys: PathBuf,
        /// root, targets, snapshot or timestamp
        role: RoleType,
        /// A key that a token holds, in place of the keys that would be made
        #[arg(long, value_name = "pkcs11:URI")]
        key: Vec<String>,
        /// Days until the new root expires
        #[arg(long, default_value_t = 365, value_parser = report::args::days)]
        days: u64,
        #[command(flatten)]
        json: Json,
    },
    /// Lists the keys of the newest root by role, with their files and dates
    List {
        /// The folder of the keys and roots
        keys: PathBuf,
        #[command(flatten)]
        json: Json,
    },
}

/// The newest root, and its keys.
#[derive(Serialize)]
struct KeysReport {
    root: PathBuf,
    version: u64,
    expires: String,
    keys: Vec<ListedKey>,
}

/// A key of the root.
#[derive(Serialize)]
struct ListedKey {
    role: String,
    /// Start of the key's id.
    id: String,
    /// `ed25519`, `ecdsa` or `rsa`.
    kind: &'static str,
    /// Its file in the folder; `None` if the private key is elsewhere.
    file: Option<PathBuf>,
    /// Whether the file has the key `plain`, `encrypted`, or names a `token`.
    form: Option<&'static str>,
    /// When that file was written.
    written: Option<String>,
}

impl KeysReport {
    fn read(folder: &Path) -> Result<Self> {
        let (root, _) = newest_root(folder)?;
        let files = key_files(folder)?;
        let mut keys = Vec::new();
        for role in ROLES {
            let ids = root.signed.roles.get(&role).map_or(&[][..], |role| role.keyids.as_slice());
            for id in ids {
                let found = files.iter().find(|file| file.is_key(id));
                let file = found.map(|found| found.path.clone());
                let form = found.map(|found| found.form.word());
                let written = file.as_ref().and_then(|path| path.metadata().ok()?.modified().ok());
                let written = written.map(|time| utc(unix_s(time)));
                let kind = root.signed.keys.get(id).map_or("-", kind_of);
                let (role, id) = (role.to_string(), hex(&id[..4]));
                keys.push(ListedKey { role, id, kind, file, form, written });
            }
        }
        let version = root.signed.version.get();
        let (root, expires) = (folder.join(format!("{version}.root.json")), root.signed.expires);
        Ok(Self { root, version, expires: expires.to_string(), keys })
    }

    fn print(&self, is_list: bool) -> Result<()> {
        say!("{}", self.root.display())?;
        if is_list {
            let mut table = report::table(&["role", "key", "kind", "form", "written", "file"]);
            for key in &self.keys {
                let file = key.file.as_ref().and_then(|path| path.file_name());
                table.add_row([
                    key.role.clone(),
                    key.id.clone(),
                    key.kind.to_owned(),
                    report::or_dash(key.form, str::to_owned),
                    report::or_dash(key.written.clone(), |written| written),
                    report::or_dash(file, |name| name.to_string_lossy().into_owned()),
                ]);
            }
            say!("{table}")?;
        }
        say!("the root expires at {}", self.expires)
    }
}

fn kind_of(key: &Key) -> &'static str {
    match key {
        Key::Ed25519 { .. } => "ed25519",
        Key::Rsa { .. } => "rsa",
        _ => "ecdsa",
    }
}

/// Name of the folder, beside the keys, in which a command makes new ones.
const STAGING: &str = ".new";
/// Rights of a folder with keys: only this user may open it, whatever the umask.
const PRIVATE: u32 = 0o700;

/// The four roles of TUF.
pub const ROLES: [RoleType; 4] =
    [RoleType::Root, RoleType::Targets, RoleType::Snapshot, RoleType::Timestamp];

/// Runs the command.
///
/// # Errors
/// The folder cannot be written, or lacks a root or keys.
pub fn run(args: &KeysArgs) -> Result<()> {
    let now = now()?;
    let (folder, json, is_list) = match &args.action {
        Action::New {
            keys,
            root_keys,
            root_threshold,
            role_keys,
            role_threshold,
            key,
            plain,
            days,
            json,
        } => {
            let root = RoleCounts { keys: *root_keys, threshold: *root_threshold };
            let other = RoleCounts { keys: *role_keys, threshold: *role_threshold };
            let made = if *plain { Form::Plain } else { Form::Encrypted };
            let fleet = NewFleet { counts: [root, other, other, other], made, tokens: key };
            fleet.make(keys, now + days * DAY_S, &mut Passphrases::of_environment()?)?;
            (keys, json, false)
        }
        Action::Rotate { keys, role, key, days, json } => {
            // A root that is signed with a clock that is behind could have expired already.
            if let Some(RootFile { path, .. }) = roots(keys)?.pop() {
                signing_time(now, &path.to_string_lossy(), unix_s(path.metadata()?.modified()?))?;
            }
            rotate_to(keys, *role, now + days * DAY_S, key)?;
            (keys, json, false)
        }
        Action::List { keys, json } => (keys, json, true),
    };
    let report = KeysReport::read(folder)?;
    json.write(&report, || report.print(is_list))
}

/// Runs `work` to its end on this thread, for the crates that are asynchronous.
///
/// # Errors
/// The system has no resources for a runtime.
pub fn block_on<T>(work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    Ok(runtime.block_on(work))
}

/// How many keys a role has, and how many of them must sign.
#[derive(Clone, Copy, Debug)]
pub struct RoleCounts {
    /// Number of keys.
    pub keys: usize,
    /// Number of keys that must sign.
    pub threshold: u64,
}

/// A key of a role that a token holds.
#[derive(Clone, Debug)]
struct RoleKey {
    role: RoleType,
    uri: String,
}

/// Parses `ROLE=pkcs11:URI`.
fn role_key(text: &str) -> Result<RoleKey> {
    let (role, uri) = text.split_once('=').context("is not ROLE=pkcs11:URI")?;
    Ok(RoleKey { role: role.parse()?, uri: uri.to_owned() })
}

/// Makes the keys of a new fleet in `folder`, `counts` for each of [`ROLES`], as plain files, and
/// its first root, which expires at `expires` (seconds since 1970). Returns the root's path.
///
/// # Errors
/// The folder already has a root or cannot be written, another command changes it, or a threshold
/// is not possible.
pub fn new_fleet(folder: &Path, counts: [RoleCounts; 4], expires: u64) -> Result<PathBuf> {
    let fleet = NewFleet { counts, made: Form::Plain, tokens: &[] };
    fleet.make(folder, expires, &mut Passphrases::of_environment()?)
}

/// The keys of a new fleet.
struct NewFleet<'a> {
    /// How many keys each of [`ROLES`] has, unless a token holds them.
    counts: [RoleCounts; 4],
    /// The form of the keys that are made.
    made: Form,
    /// The keys that tokens hold.
    tokens: &'a [RoleKey],
}

impl NewFleet<'_> {
    fn make(&self, folder: &Path, expires: u64, secrets: &mut Passphrases) -> Result<PathBuf> {
        let fresh: Vec<NewKeys> = ROLES
            .into_iter()
            .zip(self.counts)
            .map(|(role, counts)| {
                let tokens = self.tokens.iter().filter(|token| token.role == role);
                let tokens = tokens.map(|token| token.uri.clone()).collect();
                NewKeys::new(role, counts.keys, self.made, tokens)
            })
            .collect();
        new_root(folder, &fresh, self.counts.map(|counts| counts.threshold), expires, secrets)
    }
}

/// Makes the `fresh` keys and the first root in `folder`. Returns the root's path.
fn new_root(
    folder: &Path,
    fresh: &[NewKeys],
    thresholds: [u64; 4],
    expires: u64,
    secrets: &mut Passphrases,
) -> Result<PathBuf> {
    let _claim = (!folder.exists()).then(|| Claim::new(folder));
    create_folder(folder, PRIVATE)?;
    let _lock = FolderLock::take(folder)?;
    ensure!(
        roots(folder)?.is_empty(),
        "{}: the folder already has a root; rotate its keys with `hatchback keys rotate`",
        folder.display()
    );
    let mut root = Root {
        spec_version: "1.0.0".to_owned(),
        consistent_snapshot: true,
        version: NonZeroU64::MIN,
        expires: timestamp(expires)?,
        keys: HashMap::new(),
        roles: HashMap::new(),
        _extra: HashMap::new(),
    };

    for (new, threshold) in fresh.iter().zip(thresholds) {
        let (role, keys) = (new.role, new.count());
        let threshold = NonZeroU64::new(threshold)
            .with_context(|| format!("{role}: the threshold is 0, at least 1 key must sign"))?;
        ensure!(
            threshold.get() <= keys as u64,
            "{role}: {threshold} keys must sign, but the role has only {keys}"
        );
        root.roles.insert(role, RoleKeys { keyids: Vec::new(), threshold, _extra: HashMap::new() });
    }
    write_root(folder, None, root, fresh, secrets)
}

/// Gives `role` as many new keys as it had, in a new root that expires at `expires`. Moves the old
/// keys, and those that a killed command left, to the folder `retired`. Nothing in the folder
/// changes before the new root is signed. A new key is plain if one that it replaces is.
/// Returns the root's path.
///
/// # Errors
/// The folder has no root or too few of the root role's keys, another command changes it, or it
/// cannot be written.
pub fn rotate(folder: &Path, role: RoleType, expires: u64) -> Result<PathBuf> {
    rotate_to(folder, role, expires, &[])
}

/// Rotates as [`rotate`] does, to the keys of `tokens` if there are any.
fn rotate_to(folder: &Path, role: RoleType, expires: u64, tokens: &[String]) -> Result<PathBuf> {
    let mut secrets = Passphrases::of_environment()?;
    let _lock = FolderLock::take(folder)?;
    let (old, bytes) = newest_root(folder)?;
    let revoked = &old
        .signed
        .roles
        .get(&role)
        .with_context(|| format!("the root has no role {role}"))?
        .keyids;
    let version = old.signed.version.checked_add(1).context("version")?;
    let root = Root { version, expires: timestamp(expires)?, ..old.signed.clone() };

    let old_root = OldRoot { root: &old.signed, bytes: &bytes };
    let replaced = key_files(folder)?.into_iter();
    let mut replaced = replaced.filter(|file| revoked.iter().any(|id| file.is_key(id)));
    let made = match replaced.any(|file| file.form == Form::Plain) {
        true => Form::Plain,
        false => Form::Encrypted,
    };
    let fresh = [NewKeys::new(role, revoked.len(), made, tokens.to_vec())];
    write_root(folder, Some(old_root), root, &fresh, &mut secrets)
}

/// A lock on a folder of keys, held by the one command that may change it. A second command would
/// remove the first one's staged keys, and could leave a root whose private keys are gone.
struct FolderLock(File);

impl FolderLock {
    fn take(folder: &Path) -> Result<Self> {
        let held = File::open(folder).with_context(|| folder.display().to_string())?;
        match held.try_lock() {
            Err(TryLockError::WouldBlock) => bail!(
                "{}: another `hatchback keys` command is changing the folder. Nothing was changed",
                folder.display()
            ),
            locked => locked.with_context(|| folder.display().to_string())?,
        }
        Ok(Self(held))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // A child process between `fork` and `exec` has a copy of the file, which would hold the
        // lock after this process closed its own.
        let _ = self.0.unlock();
    }
}

/// Moves the keys that `root` does not list to the folder `retired`.
fn retire_unlisted(folder: &Path, root: &Root) -> Result<()> {
    let retired = folder.join("retired");
    for file in key_files(folder)? {
        if file.is_known() && !root.keys.keys().any(|id| file.is_key(id)) {
            let name = file.path.file_name().unwrap_or_default();
            create_folder(&retired, PRIVATE)?;
            std::fs::rename(&file.path, retired.join(name))?;
        }
    }
    Ok(())
}

/// Writes a new file durably.
fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let write = || {
        let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().with_context(|| path.display().to_string())
}

/// Returns the ids of the keys that `roles` have in `root`.
fn ids_of(root: &Root, roles: &[RoleType]) -> HashSet<KeyId> {
    let listed = roles.iter().filter_map(|role| root.roles.get(role));
    listed.flat_map(|role| role.keyids.iter().cloned()).collect()
}

/// Opens the keys of the folder that sign releases: those of all roles but the root.
///
/// # Errors
/// The folder has no root, or a key of a role is missing or cannot be opened.
pub fn release_keys(folder: &Path) -> Result<Vec<Box<dyn KeySource>>> {
    let wanted = ids_of(&newest_root(folder)?.0.signed, &ROLES[1..]);
    sources(folder, &wanted, &mut Passphrases::of_environment()?)
}

/// A root of the folder of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RootFile {
    /// Version of the root.
    pub version: u64,
    /// Path of the file.
    pub path: PathBuf,
}

/// Returns the roots of the folder, oldest first.
///
/// # Errors
/// The folder cannot be read.
pub fn roots(folder: &Path) -> Result<Vec<RootFile>> {
    let version =
        |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".root.json")?.parse().ok();
    let paths = files(folder, |name| name.ends_with(".root.json"))?;
    let root = |path| Some(RootFile { version: version(&path)?, path });
    let mut roots: Vec<RootFile> = paths.into_iter().filter_map(root).collect();
    roots.sort();
    Ok(roots)
}

/// Returns the newest root of the folder, and its bytes.
fn newest_root(folder: &Path) -> Result<(Signed<Root>, Vec<u8>)> {
    let roots = roots(folder)?;
    let no_root = || format!("{}: no root; make one with `hatchback keys new`", folder.display());
    let path = &roots.last().with_context(no_root)?.path;
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    Ok((serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?, bytes))
}

/// Returns when the newest root of the folder expires, in seconds since 1970.
///
/// # Errors
/// The folder has no root that can be read.
pub fn root_expiry(folder: &Path) -> Result<u64> {
    let expires = newest_root(folder)?.0.signed.expires;
    Ok(u64::try_from(expires.as_second()).unwrap_or(0))
}

/// The root before a rotation.
struct OldRoot<'a> {
    root: &'a Root,
    bytes: &'a [u8],
}

/// New keys that a role gets.
struct NewKeys {
    role: RoleType,
    /// Keys to make.
    made: usize,
    /// Their form.
    form: Form,
    /// The keys that a token holds, by their URIs.
    tokens: Vec<String>,
}

impl NewKeys {
    /// Returns the keys of `tokens`, or else `count` keys to be made in this form.
    fn new(role: RoleType, count: usize, form: Form, tokens: Vec<String>) -> Self {
        Self { role, made: if tokens.is_empty() { count } else { 0 }, form, tokens }
    }

    fn count(&self) -> usize {
        self.made + self.tokens.len()
    }
}

/// Makes the new keys of `fresh` in the folder `staged`, and lists them in `root`, which then lists
/// no key that is not of a role.
fn make_keys(
    staged: &Path,
    root: &mut Root,
    fresh: &[NewKeys],
    secrets: &mut Passphrases,
) -> Result<()> {
    for NewKeys { role, made, form, tokens } in fresh {
        let mut keyids = Vec::new();
        for _ in 0..*made {
            // Version 1, without the public half: OpenSSL 3.0 reads no other one.
            let private = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new())
                .context("the system has no random numbers")?;
            let (id, key) = public_of(&parse_keypair(private.as_ref())?)?;
            let file = match form {
                Form::Encrypted => encrypt(private.as_ref(), &secrets.of_new_keys()?)?,
                Form::Plain | Form::Token => private.as_ref().to_vec(),
            };
            let name = format!("{}.pk8", file_stem(*role, root.version, &id));
            write_new(&staged.join(name), &file, 0o600)?;
            keyids.push(id.clone());
            root.keys.insert(id, key);
        }
        for uri in tokens {
            let (id, key) = public_of(open_token(uri, secrets)?.as_ref())?;
            let name = format!("{}.uri", file_stem(*role, root.version, &id));
            write_new(&staged.join(name), uri.as_bytes(), 0o600)?;
            keyids.push(id.clone());
            root.keys.insert(id, key);
        }
        root.roles.get_mut(role).with_context(|| format!("the root has no role {role}"))?.keyids =
            keyids;
    }

    let listed: HashSet<KeyId> =
        root.roles.values().flat_map(|keys| &keys.keyids).cloned().collect();
    root.keys.retain(|id, _| listed.contains(id));
    Ok(())
}

/// Gives `root` the new keys of `fresh`, signs it with its own keys and with those of the `old`
/// root, and writes the keys and then the root. Retires the keys that it does not list. Returns the
/// root's path. The caller holds the folder's lock.
fn write_root(
    folder: &Path,
    old: Option<OldRoot<'_>>,
    mut root: Root,
    fresh: &[NewKeys],
    secrets: &mut Passphrases,
) -> Result<PathBuf> {
    // The folder has the same name each time, so a command removes what a killed one left.
    let _ = std::fs::remove_dir_all(folder.join(STAGING));
    let claim = Claim::new(folder.join(STAGING));
    let mut staging = tempfile::Builder::new();
    staging.prefix(STAGING).rand_bytes(0).permissions(Permissions::from_mode(PRIVATE));
    let staged = staging.tempdir_in(folder).with_context(|| folder.display().to_string())?;
    make_keys(staged.path(), &mut root, fresh, secrets)?;

    let mut wanted = ids_of(&root, &ROLES[..1]);
    wanted.extend(old.iter().flat_map(|old| ids_of(old.root, &ROLES[..1])));
    let mut signers = sources(folder, &wanted, secrets)?;
    signers.extend(sources(staged.path(), &wanted, secrets)?);
    let rng = SystemRandom::new();
    let sign_as = |holder: &Root| {
        let holder = KeyHolder::Root(holder.clone());
        block_on(SignedRole::new(root.clone(), &holder, &signers, &rng))
    };
    let mut signed = sign_as(&root)??;
    if let Some(old) = &old {
        signed = signed.add_old_signatures(sign_as(old.root)??.signed().signatures.clone())?;
    }

    // A car verifies the new root in the same way.
    let followed = match old {
        Some(old) => TrustedMetadataSet::from_root(old.bytes)?.update_root(signed.buffer()),
        None => TrustedMetadataSet::from_root(signed.buffer()).map(drop),
    };
    let too_few = || {
        format!(
            "{}: the folder lacks root keys that must sign. Nothing was changed",
            folder.display()
        )
    };
    followed.with_context(too_few)?;

    let name = format!("{}.root.json", root.version);
    write_new(&staged.path().join(&name), signed.buffer(), 0o644)?;
    let path = folder.join(&name);
    ensure!(!path.exists(), "{}: another command has written it meanwhile", path.display());
    // The root comes last. A kill before it leaves keys that no root lists: the next rotation
    // retires them. A kill after it leaves nothing to do.
    let moved = [key_paths(staged.path())?, vec![staged.path().join(&name)]].concat();
    // The folder's lock keeps other commands out, but not other programs: a root without its new
    // private keys would lock the fleet out.
    let needed = 1 + fresh.iter().map(NewKeys::count).sum::<usize>();
    ensure!(moved.len() == needed, "{}: the staged keys have changed", folder.display());
    claim.complete(|| {
        for file in moved {
            std::fs::rename(&file, folder.join(file.file_name().unwrap_or_default()))?;
            File::open(folder)?.sync_all()?;
        }
        let listed = || {
            let path = path.display();
            format!("{path} is written and valid; only keys that it does not list are left to move")
        };
        retire_unlisted(folder, &root).with_context(listed)?;
        Ok(path)
    })
}
