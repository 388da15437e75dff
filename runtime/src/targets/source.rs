//! Target files as TOML: reads a file and those that it inherits from, merges them, and finds the
//! file and line that set a key. Of the keys of a target it knows only `inherits`.

use crate::limits::INHERIT_MAX;
use crate::targets::error::{Position, TargetError};
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

/// One file of a chain: its path, its text, and its own keys without `inherits`.
struct File {
    path: PathBuf,
    text: String,
    table: Table,
}

/// A target file and those that it inherits from.
pub(super) struct Chain {
    /// The target is first; the file that inherits from none is last.
    files: Vec<File>,
}

impl Chain {
    /// Reads the file at `path` and every file that it inherits from.
    ///
    /// # Errors
    /// [`TargetError::Io`] or [`TargetError::Parse`], with the file at fault.
    pub(super) fn read(path: &Path) -> Result<Self, TargetError> {
        let (mut files, mut next) = (Vec::new(), Some(path.to_owned()));
        while let Some(path) = next {
            if files.len() >= INHERIT_MAX {
                let problem = format!("inherits: more than {INHERIT_MAX} files in a chain");
                return Err(refuse(&path, None, problem));
            }

            let (file, base) = read_file(&path)?;
            files.push(file);
            next = base.map(|name| path.with_file_name(format!("{name}.toml")));
        }
        Ok(Self { files })
    }

    /// Returns the paths of all files.
    pub(super) fn paths(self) -> Vec<PathBuf> {
        self.files.into_iter().map(|file| file.path).collect()
    }

    /// Returns the keys of all files. A key of the file that inherits overrides the same key of its
    /// base.
    pub(super) fn merged(&self) -> Table {
        let mut merged = Table::new();
        for file in self.files.iter().rev() {
            overlay(&mut merged, &file.table);
        }
        merged
    }

    /// Returns the position of the dotted `key` in the first file of the chain that sets it.
    pub(super) fn position_of(&self, key: &str) -> Position {
        let found = self.files.iter().find_map(|file| {
            let line = line_of(&file.text, key)?;
            Some(Position { path: file.path.clone(), line: Some(line) })
        });
        found.unwrap_or_else(|| Position { path: self.files[0].path.clone(), line: None })
    }

    /// Turns serde's error about the merged keys into an error with the file and line of the key.
    pub(super) fn parse_error(&self, error: &toml::de::Error) -> TargetError {
        let problem = error.to_string().trim().replace('\n', " ");

        // serde names the section after "in `", and an unknown key first.
        let within = between(&problem, "in `", '`').unwrap_or_default();
        let key = match between(&problem, "unknown field `", '`') {
            Some(unknown) if within.is_empty() => unknown.to_owned(),
            Some(unknown) => format!("{within}.{unknown}"),
            None => within.to_owned(),
        };
        TargetError::Parse { position: self.position_of(&key), problem }
    }
}

/// Reads one file. Returns it and its value of `inherits`.
fn read_file(path: &Path) -> Result<(File, Option<String>), TargetError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| TargetError::Io { path: path.to_owned(), source })?;
    let mut table: Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map(|span| line_at(&text, span.start));
        refuse(path, line, e.message().to_owned())
    })?;

    let base = match table.remove("inherits") {
        None => None,
        Some(Value::String(name)) if !name.contains(['/', '\\', '.']) => Some(name),
        Some(other) => {
            let problem = format!("inherits: {other} is not the name of a file beside this one");
            return Err(refuse(path, line_of(&text, "inherits"), problem));
        }
    };
    Ok((File { path: path.to_owned(), text, table }, base))
}

fn refuse(path: &Path, line: Option<usize>, problem: String) -> TargetError {
    TargetError::Parse { position: Position { path: path.to_owned(), line }, problem }
}

fn overlay(base: &mut Table, own: &Table) {
    for (name, value) in own {
        match (base.get_mut(name), value) {
            (Some(Value::Table(below)), Value::Table(above)) => overlay(below, above),
            _ => {
                base.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Returns the line on which `text` sets the dotted `key`, from 1.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let (mut table, mut parts) = (document.get_ref(), key.split('.').peekable());
    loop {
        let part = parts.next()?;
        let (name, value) = table.iter().find(|(name, _)| name.get_ref() == part)?;
        if parts.peek().is_none() {
            return Some(line_at(text, name.span().start));
        }
        let DeValue::Table(inner) = value.get_ref() else { return None };
        table = inner;
    }
}

/// Returns the line of the byte at `offset`, from 1.
fn line_at(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
}

/// Returns the part of `text` after `start` and before the next `end`.
fn between<'a>(text: &'a str, start: &str, end: char) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(found, _)| found)
}
