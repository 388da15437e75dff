//! `keys`: a fleet's signing keys and its root of trust. Keys are PKCS#8 files (Ed25519) of a folder, one each;
//! another store of keys is another `KeySource`. A new root is signed by the keys of the old one too, so that a
//! car that trusts the old one can follow. Never signs releases: that is `publish`.

use anyhow::{Context, Result, ensure};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use clap::{Args, Subcommand};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use tough::editor::signed::SignedRole;
use tough::key_source::{KeySource, LocalKeySource};
use tough::schema::{KeyHolder, RoleKeys, RoleType, Root, Signed};

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
        #[arg(long, default_value_t = 3)]
        root_keys: usize,
        /// Signatures that a new root needs
        #[arg(long, default_value_t = 2)]
        root_threshold: u64,
        /// Keys of each of the other roles
        #[arg(long, default_value_t = 1)]
        role_keys: usize,
        /// Signatures that each of the other roles needs
        #[arg(long, default_value_t = 1)]
        role_threshold: u64,
        /// Days until the root expires
        #[arg(long, default_value_t = 365)]
        days: u64,
    },
    /// Replaces the keys of a role by as many new ones, which revokes the old ones
    Rotate {
        /// The folder of the keys and roots
        keys: PathBuf,
        /// root, targets, snapshot or timestamp
        role: RoleType,
        /// Days until the new root expires
        #[arg(long, default_value_t = 365)]
        days: u64,
    },
}

/// Seconds of a day.
pub const DAY_S: u64 = 24 * 3600;

/// The four roles with how many keys each has and how many must sign.
pub const ROLES: [RoleType; 4] = [RoleType::Root, RoleType::Targets, RoleType::Snapshot, RoleType::Timestamp];

/// Runs the command.
///
/// # Errors
/// The folder cannot be written, or holds no root or too few keys.
pub fn run(args: &KeysArgs) -> Result<()> {
    let now = crate::sync::now()?;
    let path = match &args.action {
        Action::New { keys, root_keys, root_threshold, role_keys, role_threshold, days } => {
            let other = (*role_keys, *role_threshold);
            let counts = [(*root_keys, *root_threshold), other, other, other];
            new_fleet(keys, counts, now + days * DAY_S)?
        }
        Action::Rotate { keys, role, days } => rotate(keys, *role, now + days * DAY_S)?,
    };
    println!("{}", path.display());
    Ok(())
}

/// A runtime for the asynchronous crates; what it runs is ours alone.
///
/// # Errors
/// The system refused.
pub fn block_on<T>(work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    Ok(runtime.block_on(work))
}

/// The time in the form that metadata have.
///
/// # Errors
/// It is beyond the calendar.
pub fn timestamp(seconds: u64) -> Result<jiff::Timestamp> {
    Ok(jiff::Timestamp::from_second(i64::try_from(seconds)?)?)
}

/// Makes the keys of a new fleet in `folder`, for each of `ROLES` how many and how many must sign, and its first
/// root, which expires at `expires` (seconds since 1970). Returns the root's path.
///
/// # Errors
/// The folder holds a root already or cannot be written.
pub fn new_fleet(folder: &Path, counts: [(usize, u64); 4], expires: u64) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    ensure!(roots(folder)?.is_empty(), "{}: holds a root already", folder.display());
    for (role, (keys, _)) in ROLES.iter().zip(counts) {
        (0..keys).try_for_each(|n| new_key(&folder.join(format!("{role}-1-{n}.pk8"))))?;
    }
    let thresholds = counts.map(|(_, threshold)| threshold);
    write_root(folder, None, thresholds, expires)
}

/// Gives `role` new keys and makes the root that says so. The old keys sign no more.
///
/// # Errors
/// There is no root, or the folder cannot be written.
pub fn rotate(folder: &Path, role: RoleType, expires: u64) -> Result<PathBuf> {
    let old = newest_root(folder)?;
    let generation = old.signed.version.get() + 1;
    let thresholds = ROLES.map(|r| old.signed.roles.get(&r).map_or(1, |keys| keys.threshold.get()));
    let retired = folder.join("retired");
    std::fs::create_dir_all(&retired).with_context(|| retired.display().to_string())?;
    for (n, key) in keys_of(folder, role)?.iter().enumerate() {
        new_key(&folder.join(format!("{role}-{generation}-{n}.pk8")))?;
        std::fs::rename(key, retired.join(key.file_name().unwrap_or_default()))?;
    }
    write_root(folder, Some(old), thresholds, expires)
}

fn new_key(path: &Path) -> Result<()> {
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).context("no randomness")?;
    std::fs::write(path, key.as_ref()).with_context(|| path.display().to_string())?;
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?)
}

fn files(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| wanted(&name.to_string_lossy())) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn keys_of(folder: &Path, role: RoleType) -> Result<Vec<PathBuf>> {
    files(folder, |name| name.starts_with(&format!("{role}-")) && name.ends_with(".pk8"))
}

/// Every key of the folder that is in use.
///
/// # Errors
/// The folder cannot be read.
pub fn sources(folder: &Path) -> Result<Vec<Box<dyn KeySource>>> {
    let paths = files(folder, |name| name.ends_with(".pk8"))?;
    Ok(paths.into_iter().map(|path| Box::new(LocalKeySource { path }) as Box<dyn KeySource>).collect())
}

/// The roots of the folder, oldest first, with their versions.
///
/// # Errors
/// The folder cannot be read.
pub fn roots(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let version = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".root.json")?.parse().ok();
    let paths = files(folder, |name| name.ends_with(".root.json"))?;
    let mut roots: Vec<(u64, PathBuf)> = paths.into_iter().filter_map(|p| Some((version(&p)?, p))).collect();
    roots.sort();
    Ok(roots)
}

fn newest_root(folder: &Path) -> Result<Signed<Root>> {
    let roots = roots(folder)?;
    let (_, path) = roots.last().with_context(|| format!("{}: holds no root", folder.display()))?;
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

fn write_root(
    folder: &Path,
    old: Option<Signed<Root>>,
    thresholds: [u64; 4],
    expires: u64,
) -> Result<PathBuf> {
    let version = old.as_ref().map_or(1, |old| old.signed.version.get() + 1);
    let (mut keys, mut roles) = (HashMap::new(), HashMap::new());
    for (role, threshold) in ROLES.into_iter().zip(thresholds) {
        let mut keyids = Vec::new();
        for path in keys_of(folder, role)? {
            let key = block_on(LocalKeySource { path: path.clone() }.as_sign())?;
            let key = key.map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?.tuf_key();
            keyids.push(key.key_id()?);
            keys.insert(key.key_id()?, key);
        }
        let threshold = NonZeroU64::new(threshold).context("a threshold of 0 proves nothing")?;
        ensure!(threshold.get() <= keyids.len() as u64, "{role}: {} keys for {threshold}", keyids.len());
        roles.insert(role, RoleKeys { keyids, threshold, _extra: HashMap::new() });
    }
    let root = Root {
        spec_version: "1.0.0".to_owned(),
        consistent_snapshot: true,
        version: NonZeroU64::new(version).context("version")?,
        expires: timestamp(expires)?,
        keys,
        roles,
        _extra: HashMap::new(),
    };
    let mut signers = sources(folder)?;
    if folder.join("retired").is_dir() {
        signers.extend(sources(&folder.join("retired"))?);
    }
    let rng = SystemRandom::new();
    let holder = KeyHolder::Root(root.clone());
    let mut signed = block_on(SignedRole::new(root.clone(), &holder, &signers, &rng))??;
    if let Some(old) = old {
        let holder = KeyHolder::Root(old.signed);
        let by_old = block_on(SignedRole::new(root, &holder, &signers, &rng))??;
        signed = signed.add_old_signatures(by_old.signed().signatures.clone())?;
    }
    let path = folder.join(format!("{version}.root.json"));
    std::fs::write(&path, signed.buffer()).with_context(|| path.display().to_string())?;
    Ok(path)
}
