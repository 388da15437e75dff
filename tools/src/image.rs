//! `image`: makes an ext4 image of a board's partition of models and updates from a bundle. For
//! boards without such a partition it also writes the same files with a manifest for CopyTarget of
//! DRIVE OS. The same bundle gives the same bytes. It reads every file of the image back and
//! compares it; it never writes to a device.

use crate::report;
use crate::report::Json;
use crate::report::input;
use crate::report::temporary::{Claim, TemporaryFolder};
use crate::say;
use crate::serve::install;
use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::digest::{SHA256, digest};
use clap::Args;
use hatchback::bundle::manifest::hex;
use serde::Serialize;
use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Mount point on the board: the folder of `machine.models` and `machine.updates` of the targets.
const MOUNTED: &str = "/var/lib/hatchback";
/// Time of every file, in seconds since 1970. It is fixed, because the same bundle must give the
/// same bytes.
const FILE_TIME_S: u64 = 1_000_000_000;
/// Copies of the content for which the partition has room: the live generation, the one before, the
/// next release while it is fetched, the next release while it is installed, and a merge.
const COPIES: u64 = 5;
/// More room, for the journal and the file system's own tables: 32 MiB and a twentieth.
const SPARE_MIB: u64 = 32;
const SPARE_ONE_IN: u64 = 20;
/// Features of ext4 that Linux 5.4 and e2fsprogs 1.45 (Ubuntu 20.04) support, instead of the
/// defaults of this machine.
const FEATURES: &str = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,\
                        sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// Makes the flashable image of a packed bundle, and the manifest for DRIVE OS's build
#[derive(Args, Debug)]
pub struct ImageArgs {
    /// The bundle: a snapshot
    bundle: PathBuf,
    /// A new directory for hatchback.img, hatchback.yaml and the files that the YAML lists
    #[arg(short, long)]
    out: PathBuf,
    /// Folder of the model on the board [default: its lineage]
    #[arg(long, value_parser = report::args::file_name)]
    name: Option<String>,
    /// Size of the partition, MiB [default: room for five copies of the content: the live
    /// generation, the one before, the next release fetched and installed, and a merge]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=16 << 20))]
    mib: Option<u64>,
    #[command(flatten)]
    json: Json,
}

/// Runs the command.
///
/// # Errors
/// The bundle is refused, e2fsprogs is missing, the partition is too small, or the image differs
/// from the files when it is read back.
pub fn run(args: &ImageArgs) -> Result<()> {
    let create = || {
        fs::create_dir(&args.out).with_context(|| args.out.display().to_string())?;
        Ok(args.out.clone())
    };
    let claim = Claim::of(create)?;
    // A second try must find no half of an image.
    let report = make_in(args).inspect_err(|_| drop(fs::remove_dir_all(&args.out)))?;
    drop(claim);
    args.json.write(&report, || report.print())
}

/// The report of the command.
#[derive(Serialize)]
struct ImageReport {
    image: PathBuf,
    /// The manifest for CopyTarget.
    manifest: PathBuf,
    generation: String,
    /// The folder of the model on the board.
    name: String,
    files: usize,
    bytes: u64,
    /// Size of the partition, MiB.
    mib: u64,
    /// SHA-256 of the image.
    sha256: String,
}

impl ImageReport {
    fn print(&self) -> Result<()> {
        let Self { generation, name, mib, sha256, files, .. } = self;
        let bytes = report::bytes(self.bytes);
        say!("{}: {generation} as `{name}`, {bytes} in {mib} MiB of ext4", self.image.display())?;
        say!("sha256 {sha256}; read back, every file is the same")?;
        say!("{}: the same {files} files for CopyTarget", self.manifest.display())
    }
}

fn make_in(args: &ImageArgs) -> Result<ImageReport> {
    let tree = args.out.join("hatchback");
    let (models, new) = (tree.join("models"), tree.join(".new"));
    for folder in [&tree, &models, &tree.join("updates")] {
        fs::create_dir(folder).with_context(of(folder))?;
    }

    let flash = install(&args.bundle, &new)?;
    let generation = flash.manifest().generation.clone();
    drop(flash);
    let name = args.name.as_ref().unwrap_or(&generation.lineage);
    let model = models.join(name);
    fs::rename(&new, &model).with_context(of(&model))?;

    let files = files(&tree)?;
    let content = files.iter().map(|f| f.bytes.next_multiple_of(4096)).sum::<u64>();
    let mib = args.mib.unwrap_or(partition_mib(content));
    let image = args.out.join("hatchback.img");
    make(&tree, &files, &image, mib)?;
    read_back(&tree, &files, &image)?;

    let manifest = args.out.join("hatchback.yaml");
    fs::write(&manifest, copy_target(&files)).with_context(of(&manifest))?;
    Ok(ImageReport {
        sha256: file_hash(&image)?,
        image,
        manifest,
        generation: generation.to_string(),
        name: name.clone(),
        files: files.iter().filter(|f| !f.folder).count(),
        bytes: content,
        mib,
    })
}

/// Returns the words that name the file or folder of an error.
fn of(path: &Path) -> impl FnOnce() -> String {
    let name = path.display().to_string();
    move || name
}

/// Returns the size of a partition with room for all copies of `content` bytes.
fn partition_mib(content: u64) -> u64 {
    let mib = COPIES * content.div_ceil(1 << 20);
    mib + mib / SPARE_ONE_IN + SPARE_MIB
}

/// A file or a folder of the tree.
struct Entry {
    /// Path in the tree, with a `/` first.
    path: String,
    folder: bool,
    bytes: u64,
}

/// Returns all files and folders in `tree`, a folder before its content. Sets their modes and times
/// to those of the image.
fn files(tree: &Path) -> Result<Vec<Entry>> {
    let (mut found, mut folders) = (Vec::new(), vec![String::new()]);
    while let Some(folder) = folders.pop() {
        let place = tree.join(folder.trim_start_matches('/'));
        for entry in fs::read_dir(&place).with_context(of(&place))? {
            let entry = entry.with_context(of(&place))?;
            let Ok(name) = entry.file_name().into_string() else {
                bail!("{}: the name is not UTF-8", entry.path().display())
            };
            let metadata = entry.metadata().with_context(of(&entry.path()))?;
            let path = format!("{folder}/{name}");
            let is_folder = metadata.is_dir();
            ensure!(is_folder || metadata.is_file(), "{path}: neither a file nor a folder");
            if is_folder {
                folders.push(path.clone());
            }
            let bytes = if is_folder { 0 } else { metadata.len() };
            found.push(Entry { path, folder: is_folder, bytes });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));

    // In reverse order: changing a file changes the time of its folder.
    for entry in found.iter().rev() {
        let path = tree.join(&entry.path[1..]);
        let mode = if entry.folder { 0o755 } else { 0o644 };
        let set = || {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            File::open(&path)?
                .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(FILE_TIME_S))
        };
        set().with_context(of(&path))?;
    }
    Ok(found)
}

/// Runs a program of e2fsprogs; returns its output.
fn e2fs(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    // Without these variables, mke2fs would store the current time and read the machine's defaults.
    let folder = TemporaryFolder::new()?;
    let config = folder.path().join("mke2fs.conf");
    fs::write(&config, "[fs_types]\next4 = {\ninode_size = 256\n}\n").with_context(of(&config))?;
    command
        .args(arguments)
        .env("MKE2FS_CONFIG", &config)
        .env("E2FSPROGS_FAKE_TIME", FILE_TIME_S.to_string());
    // Debian has these programs in folders that only root has in its PATH.
    let path = std::env::var("PATH").unwrap_or_default();
    let output =
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null()).output();
    let output = output
        .with_context(|| format!("{program}: is e2fsprogs installed? (apt install e2fsprogs)"))?;
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), printed.trim());
    Ok(printed)
}

/// Makes `image` of `mib` MiB with the content of `tree`. Its UUID is a hash of the file names.
fn make(tree: &Path, files: &[Entry], image: &Path, mib: u64) -> Result<()> {
    let (tree, size, image) = (text(tree)?, format!("{mib}M"), text(image)?);
    let paths: String = files.iter().map(|f| f.path.as_str()).collect();
    let sum = hex(&digest(&SHA256, paths.as_bytes()).as_ref()[..16]);
    let uuid = [&sum[..8], &sum[8..12], &sum[12..16], &sum[16..20], &sum[20..]].join("-");
    let extra = format!("hash_seed={uuid},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0");
    let layout = ["-q", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-L", "hatchback"];
    let content = ["-O", FEATURES, "-U", &uuid, "-E", &extra, "-d", tree, image, &size];
    e2fs("mke2fs", &[&layout[..], &content[..]].concat())?;

    // mke2fs copied times and owners of this machine.
    let mut script = String::new();
    for path in std::iter::once("/").chain(files.iter().map(|f| f.path.as_str())) {
        for field in ["atime", "mtime", "ctime", "crtime"] {
            writeln!(script, "sif \"{path}\" {field} @{FILE_TIME_S}")?;
            // The fraction of a second.
            writeln!(script, "sif \"{path}\" {field}_extra 0")?;
        }
        for field in ["uid", "gid", "generation"] {
            writeln!(script, "sif \"{path}\" {field} 0")?;
        }
    }

    let folder = TemporaryFolder::new()?;
    let commands = folder.path().join("commands");
    fs::write(&commands, script).with_context(of(&commands))?;
    let printed = e2fs("debugfs", &["-w", "-f", text(&commands)?, image])?;
    let refused = printed.lines().find(|l| !l.starts_with("debugfs"));
    ensure!(refused.is_none(), "debugfs: {}", refused.unwrap_or_default());
    Ok(())
}

/// Reads every file of `image` and compares it with the file in `tree`.
fn read_back(tree: &Path, files: &[Entry], image: &Path) -> Result<()> {
    e2fs("e2fsck", &["-f", "-n", text(image)?])?;
    let scratch = TemporaryFolder::new()?;
    e2fs("debugfs", &["-R", &format!("rdump / \"{}\"", text(scratch.path())?), text(image)?])?;
    for entry in files.iter().filter(|f| !f.folder) {
        let path = &entry.path[1..];
        let same = file_hash(&scratch.path().join(path))? == file_hash(&tree.join(path))?;
        ensure!(same, "{}: {path} differs from what was written", image.display());
    }
    Ok(())
}

/// Returns CopyTarget's manifest, version 1.4. Its sources are relative to the manifest's folder,
/// the workspace of CopyTarget.
fn copy_target(files: &[Entry]) -> String {
    let mut text = "version: '1.4'\nfileList:\n".to_owned();
    let mut put = |path: &str, folder: bool| {
        let (slash, mode) = if folder { ("/", "0755") } else { ("", "0644") };
        text += &format!("  - destination: '{MOUNTED}{path}{slash}'\n");
        if !folder {
            text += &format!("    source:\n      pdk_sdk_installed_path: 'hatchback{path}'\n");
        }
        text += &format!("    perm: {mode}\n    owner: root\n    group: root\n");
    };
    put("", true);
    files.iter().for_each(|f| put(&f.path, f.folder));
    text
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{}: the path is not UTF-8", path.display()))
}

fn file_hash(path: &Path) -> Result<String> {
    input::sha256(path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_has_room_for_a_release_beside_two_others() {
        if e2fs("mke2fs", &["-V"]).is_err() {
            println!("SKIPPED: the room of a partition: e2fsprogs is not installed");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (tree, image) = (folder.path().join("tree"), folder.path().join("image"));
        fs::create_dir(&tree).unwrap();
        for mib in [1, 12, 75, 220, 850] {
            make(&tree, &[], &image, partition_mib(mib << 20)).unwrap();
            let header = e2fs("dumpe2fs", &["-h", text(&image).unwrap()]).unwrap();
            let free = header.lines().find_map(|l| l.strip_prefix("Free blocks:")).unwrap();
            let free: u64 = free.trim().parse().unwrap();
            assert!(
                free * 4096 >= COPIES * (mib << 20),
                "{mib} MiB five times, {free} blocks are free"
            );
            fs::remove_file(&image).unwrap();
        }
    }
}
