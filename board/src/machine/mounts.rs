//! The file system beneath a directory, and whether it survives a restart and an update of the OS.
//! Reads the list of mounts; mounts nothing.

use crate::machine::root::Root;
use hatchback::targets::MachineKind;
use std::fmt;
use std::path::Path;

/// The mounted file system beneath a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    point: String,
    kind: String,
    source: String,
    is_read_only: bool,
}

impl Mount {
    /// Returns the file system of `directory`; where the directory does not exist, that of its
    /// nearest existing parent.
    ///
    /// # Errors
    /// No parent exists, or the list of mounts cannot be read.
    pub fn beneath(root: &Root, directory: &Path) -> Result<Self, String> {
        const MOUNTS: &str = "/proc/self/mountinfo";
        let existing = directory.ancestors().find_map(|folder| folder.canonicalize().ok());
        let existing =
            existing.ok_or_else(|| format!("{}: no parent folder exists", directory.display()))?;
        let text = root.text(MOUNTS)?;
        let above =
            text.lines().filter_map(Self::parse).filter(|mount| existing.starts_with(&mount.point));
        // Of two mounts at one point, the later one hides the earlier one.
        let nearest = above.max_by_key(|mount| mount.point.len());
        nearest.ok_or_else(|| format!("{MOUNTS}: nothing is mounted above {}", existing.display()))
    }

    /// Parses a line such as `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw`. The
    /// number of fields before the dash varies.
    fn parse(line: &str) -> Option<Self> {
        let (place, system) = line.split_once(" - ")?;
        let (mut place, mut system) = (place.split(' ').skip(4), system.split(' '));
        let (point, here) = (place.next()?, place.next()?);
        let (kind, source, all) = (system.next()?, system.next()?, system.next()?);
        let is_read_only =
            [here, all].iter().any(|options| options.split(',').any(|option| option == "ro"));
        let point = point.replace("\\040", " ").replace("\\134", "\\");
        Some(Self { point, kind: kind.to_owned(), source: source.to_owned(), is_read_only })
    }

    /// Returns why files in this file system may be lost or cannot be written; `None` if no reason
    /// is known.
    pub fn fault(&self, machine: MachineKind) -> Option<String> {
        let kind = &self.kind;
        match kind.as_str() {
            "tmpfs" | "ramfs" => Some(format!("is on {kind}, which is empty after each start")),
            "overlay" => Some("is on an overlay, whose changes a start may drop".to_owned()),
            _ if self.is_read_only => Some(format!("is on {self}")),
            _ if self.point == "/" && machine == MachineKind::Orin => {
                Some("is on the root file system, which an update of the OS replaces".to_owned())
            }
            _ => None,
        }
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { point, kind, source, is_read_only } = self;
        write!(f, "{kind} of {source} at {point}{}", if *is_read_only { ", read-only" } else { "" })
    }
}
