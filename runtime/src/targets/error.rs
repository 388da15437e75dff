//! Why a target is refused: the file, the line where one is known, the key and the problem. Reads
//! no file.

use std::fmt;
use std::path::PathBuf;

/// A place in a target file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1; `None` if the problem has no line, such as a missing key.
    pub line: Option<usize>,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

/// Why a target is refused.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum TargetError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A key has a value out of its range. `key` is dotted, such as `budget.slots`.
    #[error("{position}: {key} = {value}: {problem}")]
    Field { position: Position, key: &'static str, value: String, problem: String },
    /// The file is not TOML, or has a key that is unknown, missing or of another type.
    #[error("{position}: {problem}")]
    Parse { position: Position, problem: String },
}

debug_as_display!(TargetError);
