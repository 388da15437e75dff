//! What a directory lies on, and whether that outlives a start and an update of the OS. Reads the
//! list of mounts; mounts nothing.

use super::Root;
use hatchback::target::MachineKind;
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
    /// What `directory` lies on or, where it is not there yet, will lie on.
    ///
    /// # Errors
    /// The machine does not tell.
    pub fn beneath(root: &Root, directory: &Path) -> Result<Self, String> {
        const MOUNTS: &str = "/proc/self/mountinfo";
        let there = directory.ancestors().find_map(|folder| folder.canonicalize().ok());
        let there = there.ok_or_else(|| format!("{}: is nowhere", directory.display()))?;
        let text = root.text(MOUNTS)?;
        let above =
            text.lines().filter_map(Self::parse).filter(|mount| there.starts_with(&mount.point));
        // Of two at one place the later one hides the other.
        let nearest = above.max_by_key(|mount| mount.point.len());
        nearest.ok_or_else(|| format!("{MOUNTS}: nothing is mounted above {}", there.display()))
    }

    /// `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw`; before the dash there may be
    /// more.
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

    /// Why what is written there may be gone one day, or cannot be written; `None` if nothing is
    /// known to be wrong.
    pub fn fault(&self, machine: MachineKind) -> Option<String> {
        let kind = &self.kind;
        match kind.as_str() {
            "tmpfs" | "ramfs" => Some(format!("lies on {kind}, which is empty after each start")),
            "overlay" => Some("lies on an overlay, whose changes a start may drop".to_owned()),
            _ if self.is_read_only => Some(format!("lies on {self}")),
            _ if self.point == "/" && machine == MachineKind::Orin => {
                Some("lies on the root file system, which an update of the OS replaces".to_owned())
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
