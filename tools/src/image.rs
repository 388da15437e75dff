//! `image`: what a board is flashed with, of a bundle: an ext4 image of the partition that holds
//! models and updates, and for who has no such partition the same files with the manifest that
//! DRIVE OS's CopyTarget takes. The same bundle gives the same bytes. Reads back what it wrote;
//! never touches a device.

use crate::report;
use crate::serve::lay_on_flash;
use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::digest::{Context as Digest, SHA256, digest};
use clap::Args;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Where a board mounts it: the folder of `machine.models` and `machine.updates` of the targets.
const MOUNTED: &str = "/var/lib/hatchback";
/// The time of every file, in seconds: that of the bundle is not known, and the time now would
/// differ at each call.
const MADE: u64 = 1_000_000_000;
/// How often the content must find room: as it is live, as it was before, as the next release is
/// fetched, as that is laid on flash, and in a merge.
const TIMES: u64 = 5;
/// Room beside that for the journal and the file system's own tables: this, and one part in so
/// many.
const SPARE_MIB: u64 = 32;
const SPARE_ONE_IN: u64 = 20;
/// What Linux 5.4 and e2fsprogs 1.45 (Ubuntu 20.04) know, whatever this machine's defaults are.
const FEATURES: &str = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                        huge_file,dir_nlink,extra_isize,metadata_csum";

/// Makes the flashable image of a packed bundle, and the manifest for DRIVE OS's build
#[derive(Args, Debug)]
pub struct ImageArgs {
    /// The bundle
    bundle: PathBuf,
    /// A new directory for hatchback.img, hatchback.yaml and the files that it lists
    #[arg(short, long)]
    out: PathBuf,
    /// The model's name on the board [default: its lineage]
    #[arg(long)]
    name: Option<String>,
    /// The partition's size, MiB [default: room for five times the content: what is live and what
    /// was before, the next release as it is fetched and as it is laid on flash, and a merge]
    #[arg(long)]
    mib: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// The bundle is refused, e2fsprogs is missing, there is no room, or the image does not read back
/// as it was written.
pub fn run(args: &ImageArgs) -> Result<()> {
    fs::create_dir(&args.out).with_context(|| args.out.display().to_string())?;
    let tree = args.out.join("hatchback");
    let (models, laid) = (tree.join("models"), tree.join(".new"));
    for folder in [&tree, &models, &tree.join("updates")] {
        fs::create_dir(folder)?;
    }
    let flash = lay_on_flash(&args.bundle, &laid)?;
    let generation = flash.manifest().generation.clone();
    drop(flash);
    let name = args.name.as_ref().unwrap_or(&generation.lineage);
    ensure!(
        !name.is_empty() && !name.contains(['/', '.']),
        "--name {name}: is not the name of a folder"
    );
    fs::rename(&laid, models.join(name))?;

    let files = files(&tree)?;
    let content = files.iter().map(|f| f.bytes.next_multiple_of(4096)).sum::<u64>();
    let mib = args.mib.unwrap_or(partition_mib(content));
    let image = args.out.join("hatchback.img");
    make(&tree, &files, &image, mib)?;
    read_back(&tree, &files, &image)?;
    let manifest = args.out.join("hatchback.yaml");
    fs::write(&manifest, copy_target(&files))?;
    let (bytes, sum) = (report::bytes(content), sum(&image)?);
    println!("{}: {generation} as `{name}`, {bytes} in {mib} MiB of ext4", image.display());
    println!("sha256 {sum}; read back, every file is the same");
    let count = files.iter().filter(|f| !f.folder).count();
    println!("{}: the same {count} files for CopyTarget", manifest.display());
    Ok(())
}

/// The size of a partition with room for all that becomes of `content` bytes.
fn partition_mib(content: u64) -> u64 {
    let mib = TIMES * content.div_ceil(1 << 20);
    mib + mib / SPARE_ONE_IN + SPARE_MIB
}

/// A file or a folder of the tree, by its path in it.
struct Entry {
    path: String,
    folder: bool,
    bytes: u64,
}

/// What is in `tree`, folders before what is in them, each with the mode and the time that it has
/// in the image.
fn files(tree: &Path) -> Result<Vec<Entry>> {
    let (mut found, mut folders) = (Vec::new(), vec![String::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(tree.join(folder.trim_start_matches('/')))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                bail!("{:?}: is no text", entry.path())
            };
            let (path, metadata) = (format!("{folder}/{name}"), entry.metadata()?);
            let is_folder = metadata.is_dir();
            ensure!(is_folder || metadata.is_file(), "{path}: is neither a file nor a folder");
            if is_folder {
                folders.push(path.clone());
            }
            let bytes = if is_folder { 0 } else { metadata.len() };
            found.push(Entry { path, folder: is_folder, bytes });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    // Files first: what is made in a folder changes its time.
    for entry in found.iter().rev() {
        let path = tree.join(&entry.path[1..]);
        let mode = if entry.folder { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        File::open(&path)?.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(MADE))?;
    }
    Ok(found)
}

/// Runs a program of e2fsprogs; returns what it printed.
fn e2fs(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    // It would note the time, and take defaults that depend on the machine.
    let config = tempfile::NamedTempFile::new()?;
    fs::write(config.path(), "[fs_types]\next4 = {\ninode_size = 256\n}\n")?;
    command
        .args(arguments)
        .env("MKE2FS_CONFIG", config.path())
        .env("E2FSPROGS_FAKE_TIME", MADE.to_string());
    // Debian keeps these where only root looks.
    let path = std::env::var("PATH").unwrap_or_default();
    let output =
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null()).output();
    let output = output
        .with_context(|| format!("{program}: is e2fsprogs installed? (apt install e2fsprogs)"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(said)
}

/// Makes `image` of `mib` MiB with the content of `tree`.
fn make(tree: &Path, files: &[Entry], image: &Path, mib: u64) -> Result<()> {
    let (tree, size, image) = (text(tree)?, format!("{mib}M"), text(image)?);
    let mut named = String::new();
    files.iter().for_each(|f| named += &f.path);
    let sum = hex(&digest(&SHA256, named.as_bytes()).as_ref()[..16]);
    let number = [&sum[..8], &sum[8..12], &sum[12..16], &sum[16..20], &sum[20..]].join("-");
    let extra = format!("hash_seed={number},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0");
    e2fs(
        "mke2fs",
        &[
            "-q",
            "-t",
            "ext4",
            "-b",
            "4096",
            "-I",
            "256",
            "-m",
            "0",
            "-L",
            "hatchback",
            "-O",
            FEATURES,
            "-U",
            &number,
            "-E",
            &extra,
            "-d",
            tree,
            image,
            &size,
        ],
    )?;
    // The times and the owner that mke2fs took from here.
    let mut script = String::new();
    for path in std::iter::once("/").chain(files.iter().map(|f| f.path.as_str())) {
        for field in ["atime", "mtime", "ctime", "crtime"] {
            writeln!(script, "sif \"{path}\" {field} @{MADE}")?;
            // What is below the second.
            writeln!(script, "sif \"{path}\" {field}_extra 0")?;
        }
        for field in ["uid", "gid", "generation"] {
            writeln!(script, "sif \"{path}\" {field} 0")?;
        }
    }
    let commands = tempfile::NamedTempFile::new()?;
    fs::write(commands.path(), script)?;
    let said = e2fs("debugfs", &["-w", "-f", text(commands.path())?, image])?;
    let refused = said.lines().find(|l| !l.starts_with("debugfs"));
    ensure!(refused.is_none(), "debugfs: {}", refused.unwrap_or_default());
    Ok(())
}

/// Reads every file of `image` and compares it with that in `tree`.
fn read_back(tree: &Path, files: &[Entry], image: &Path) -> Result<()> {
    e2fs("e2fsck", &["-f", "-n", text(image)?])?;
    let scratch = tempfile::tempdir()?;
    e2fs("debugfs", &["-R", &format!("rdump / {}", text(scratch.path())?), text(image)?])?;
    for entry in files.iter().filter(|f| !f.folder) {
        let path = &entry.path[1..];
        let same = sum(&scratch.path().join(path))? == sum(&tree.join(path))?;
        ensure!(same, "{}: {path} differs from what was written", image.display());
    }
    Ok(())
}

/// The manifest of version 1.4; its sources are relative to the folder that it lies in,
/// CopyTarget's workspace.
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
    path.to_str().with_context(|| format!("{}: is no text", path.display()))
}

/// The SHA-256 of a file.
fn sum(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let (mut sum, mut chunk) = (Digest::new(&SHA256), vec![0; 1 << 20]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(sum.finish().as_ref())),
            n => sum.update(&chunk[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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
            let told = e2fs("dumpe2fs", &["-h", text(&image).unwrap()]).unwrap();
            let free = told.lines().find_map(|l| l.strip_prefix("Free blocks:")).unwrap();
            let free: u64 = free.trim().parse().unwrap();
            assert!(
                free * 4096 >= TIMES * (mib << 20),
                "{mib} MiB five times, {free} blocks are free"
            );
            fs::remove_file(&image).unwrap();
        }
    }
}
