//! The files that describe a machine, read beneath `/` or beneath a copy of another machine's. Only
//! reads.

use std::path::{Path, PathBuf};

/// The folder that has `/proc`, `/sys`, `/dev` and the libraries: `/`, or a copy of a board's.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Reads beneath `folder`.
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Returns the absolute `path` beneath this root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Returns the text of a file without surrounding blanks, or why it cannot be read.
    pub fn text(&self, path: &str) -> Result<String, String> {
        let bytes = std::fs::read(self.path(path)).map_err(|e| format!("{path}: {e}"))?;
        Ok(String::from_utf8_lossy(&bytes).trim_matches(['\0', '\n', ' ']).to_owned())
    }

    /// Returns the number that a file holds, or why it cannot be read.
    pub fn number(&self, path: &str) -> Result<i64, String> {
        let text = self.text(path)?;
        text.parse().map_err(|_| format!("{path}: `{}` is not a number", text.escape_debug()))
    }

    /// Returns the sorted names in a folder; none if the folder does not exist.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Returns the first of `paths` that exists.
    pub fn first<'a>(&self, paths: &[&'a str]) -> Result<&'a str, String> {
        let found = paths.iter().find(|path| self.path(path).exists());
        found.copied().ok_or_else(|| format!("none of {}", paths.join(", ")))
    }
}
