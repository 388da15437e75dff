//! `window.json`: the last file of a window. It names the model, the trainer's step and the other
//! files with their hashes. Never reads rows.

use crate::window::error::WindowError;
use hatchback::bundle::manifest::Generation;
use hatchback::schema::object::Object;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The format of windows that this version reads and writes.
pub const WINDOW_FORMAT: u32 = 1;
/// The file that closes a window.
pub const HEAD: &str = "window.json";
/// The file of the rows.
pub const ROWS: &str = "rows.safetensors";
/// The file of the dense network.
pub const DENSE: &str = "dense.onnx";
/// The file of the probe lines.
pub const PROBE: &str = "probe.jsonl";

/// The content of `window.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowHead {
    /// The format of the window: 1.
    pub format: u32,
    /// The name of the model.
    pub lineage: String,
    /// The number of the window. Windows of a trainer count up by one.
    pub window: u64,
    /// The trainer's step at which rows and network were read.
    pub step: u64,
    /// The time of that step, milliseconds since 1970.
    pub closed_ms: u64,
    /// The other files of the window.
    pub files: Vec<WindowFile>,
    /// The state of `select`, if this is its backlog.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backlog: Option<BacklogState>,
    /// Where the next window begins, if the rows came through Kafka.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kafka: Option<KafkaOffsets>,
}

/// The offset of the next message of each partition, by topic.
pub type KafkaOffsets = BTreeMap<String, BTreeMap<i32, i64>>;

/// A file of a window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowFile {
    /// Its name in the window's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The SHA-256 of its content, 64 hexadecimal digits.
    pub sha256: String,
}

/// Fields of a backlog beside its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BacklogState {
    /// The number of the newest window in the backlog; none before the first.
    pub consumed: Option<u64>,
    /// Selections since the last refresh of the hot rows.
    pub selections: u64,
    /// The generation that the fleet held when the backlog was written.
    pub held: HeldGeneration,
}

/// A generation that the fleet holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldGeneration {
    /// Its sequence.
    pub sequence: u64,
    /// SHA-256 of its manifest, hexadecimal.
    pub manifest: String,
}

impl WindowHead {
    /// Parses and checks `text`, the content of the file at `path`.
    ///
    /// # Errors
    /// [`WindowError::Field`] with the first field that is not allowed.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self, WindowError> {
        let Object(head) = serde_json::from_slice::<Object<Self>>(text).map_err(|e| {
            WindowError::field(path, "content", format!("{} bytes", text.len()), e.to_string())
        })?;

        if head.format != WINDOW_FORMAT {
            let why = format!("only {WINDOW_FORMAT} is supported");
            return Err(WindowError::field(path, "format", head.format, why));
        }
        let generation = Generation { lineage: head.lineage.clone(), sequence: 0 };
        let refused = |why| WindowError::field(path, "lineage", &head.lineage, why);
        generation.check().map_err(refused)?;
        head.check_files(path)?;
        Ok(head)
    }

    fn check_files(&self, path: &Path) -> Result<(), WindowError> {
        for (number, file) in self.files.iter().enumerate() {
            let field = |name: &str| format!("files[{number}].{name}");
            if ![ROWS, DENSE, PROBE].contains(&file.name.as_str()) {
                let why = format!("none of {ROWS}, {DENSE}, {PROBE}");
                return Err(WindowError::field(path, field("name"), &file.name, why));
            }
            if self.files[..number].iter().any(|other| other.name == file.name) {
                return Err(WindowError::field(path, field("name"), &file.name, "listed twice"));
            }
            let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
            if file.sha256.len() != 64 || !file.sha256.chars().all(is_digit) {
                let why = "not 64 lower-case hexadecimal digits";
                return Err(WindowError::field(path, field("sha256"), &file.sha256, why));
            }
        }
        match self.file(ROWS) {
            Some(_) => Ok(()),
            None => Err(WindowError::field(path, "files", "without rows", format!("add {ROWS}"))),
        }
    }

    /// Returns the file with this name, if the window has it.
    pub fn file(&self, name: &str) -> Option<&WindowFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Returns the bytes of `window.json`: one line of JSON without blanks.
    ///
    /// # Errors
    /// Never fails for this type; serde's signature requires the `Result`.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec(self)?;
        text.push(b'\n');
        Ok(text)
    }
}
