//! The cases of the damage table, and facts about the files of the two directories.

use crate::damage::scenes::Scene;
use std::sync::Arc;

// Facts about the files of the two directories.

/// Returns whether damage of `file` may keep a new process from serving until a release arrives.
/// Only files of a generation may.
pub fn may_stop_serving(file: &str) -> bool {
    file.starts_with("flash/g")
}

/// Returns the file to which a link in place of `file` leads: a record or a manifest of the same
/// directory. Such a file is only ever replaced as a whole.
pub fn link_target(scene: &Scene, file: &str) -> String {
    let (directory, _) = file.split_once('/').unwrap();
    let target = ["/live", "/floor", "/g"].iter().find_map(|start| {
        let start = format!("{directory}{start}");
        scene.files.iter().find(|other| *other != file && other.starts_with(&start))
    });
    target.unwrap_or_else(|| panic!("no target for {file}")).clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Damage {
    Missing,
    Empty,
    Half,
    Zeroed,
    Flipped,
    Garbage,
    Dangling,
    LinkInside,
    LinkOutside,
    Fifo,
    Directory,
    FullDirectory,
    NoPermission,
}

pub const DAMAGES: [(Damage, &str); 13] = [
    (Damage::Missing, "missing"),
    (Damage::Empty, "empty"),
    (Damage::Half, "half"),
    (Damage::Zeroed, "zeroed"),
    (Damage::Flipped, "flipped"),
    (Damage::Garbage, "garbage"),
    (Damage::Dangling, "dangling"),
    (Damage::LinkInside, "link-in"),
    (Damage::LinkOutside, "link-out"),
    (Damage::Fifo, "fifo"),
    (Damage::Directory, "dir"),
    (Damage::FullDirectory, "full-dir"),
    (Damage::NoPermission, "mode-000"),
];

/// When the damage strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Running,
    Stopped,
}

/// How the next release is published: as a delta and a snapshot, or as a snapshot alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Both,
    Snapshot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Rest,
    Staged,
    Probation,
    Rotated,
    Merged,
    Interrupted,
}

pub const MOMENTS: [Moment; 6] = [
    Moment::Rest,
    Moment::Staged,
    Moment::Probation,
    Moment::Rotated,
    Moment::Merged,
    Moment::Interrupted,
];

#[derive(Clone)]
pub struct Case {
    pub scene: Arc<Scene>,
    pub file: String,
    pub damage: Damage,
    pub when: When,
    pub next: Next,
}

impl Case {
    pub fn line(&self) -> String {
        let name = DAMAGES.iter().find(|(damage, _)| *damage == self.damage).unwrap().1;
        let Self { scene, file, when, next, .. } = self;
        format!("{:?} {} {name} {when:?} {next:?}", scene.moment, short(file))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Skipped,
    Healed,
    /// It healed, but only after midnight.
    Late,
    Stuck(String),
    Hangs,
    /// It did not serve a model that is whole.
    Down(String),
    Wrong(String),
}

impl Outcome {
    pub fn cell(&self) -> &'static str {
        match self {
            Self::Skipped => "-",
            Self::Healed => ".",
            Self::Late => "late",
            Self::Stuck(_) => "STUCK",
            Self::Hangs => "HANGS",
            Self::Down(_) => "DOWN",
            Self::Wrong(_) => "WRONG",
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Stuck(reason) | Self::Down(reason) | Self::Wrong(reason) => Some(reason),
            Self::Hangs => Some("it does not end"),
            _ => None,
        }
    }
}

/// Returns `name` with every hash and every sequence of a folder name shortened.
pub fn short(name: &str) -> String {
    let is_hash = |part: &&str| part.len() >= 64 && part.chars().all(|c| c.is_ascii_hexdigit());
    let mut name = name.to_owned();
    let hashes: Vec<String> =
        name.split(['/', '.', '-', ' ']).filter(is_hash).map(str::to_owned).collect();
    hashes.iter().for_each(|hash| name = name.replace(hash.as_str(), "HASH"));
    name.replace("g00000000000", "g..")
}
