//! Output to the user: lines on standard output, notes on standard error, JSON documents. Every
//! command writes through here. If the reader closes standard output, the program ends quietly, as
//! other Unix tools do. Never decides what is reported.

use crate::report::temporary::write_file;
use anyhow::{Result, ensure};
use clap::Args;
pub use hatchback_link::program::output_error;
use serde::Serialize;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Where `--json` writes if it names standard output.
const STANDARD_OUTPUT: &str = "-";

/// Writes one formatted line to standard output; takes the arguments of `format!`.
///
/// Expands to an expression of the type `anyhow::Result<()>`.
///
/// # Errors
/// As [`print_line`](crate::report::output::print_line).
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::report::output::print_line(format_args!($($argument)*))
    };
}

/// Writes `line` and a line feed to standard output.
///
/// # Errors
/// [`hatchback_link::program::OutputClosed`] if the reader closed the pipe, or the output cannot be
/// written.
pub fn print_line(line: impl Display) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(output_error)
}

/// Writes `value` to `path` as indented JSON. The path `-` is standard output.
///
/// # Errors
/// The file cannot be written, or as [`print_line`].
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    if is_standard_output(path) {
        return print_line(text);
    }
    write_file(path, (text + "\n").as_bytes())
}

/// The option `--json`, which every command has.
#[derive(Args, Clone, Debug, Default)]
pub struct Json {
    /// Writes the report as JSON to FILE; without FILE, to standard output
    #[arg(long = "json", value_name = "FILE", num_args = 0..=1, default_missing_value = "-",
          value_parser = json_file)]
    file: Option<PathBuf>,
}

impl Json {
    /// Reports a result: writes `value` to the file of `--json`, if there is one, and calls `print`
    /// for the text that people read. With `--json -` standard output gets the document alone.
    ///
    /// # Errors
    /// The file cannot be written, or as `print`.
    pub fn write(&self, value: &impl Serialize, print: impl FnOnce() -> Result<()>) -> Result<()> {
        if let Some(path) = &self.file {
            write_json(path, value)?;
        }
        if self.is_standard_output() { Ok(()) } else { print() }
    }

    /// Returns whether the option is given.
    pub fn is_given(&self) -> bool {
        self.file.is_some()
    }

    /// Returns whether the document goes to standard output, and nothing else may.
    pub fn is_standard_output(&self) -> bool {
        self.file.as_deref().is_some_and(is_standard_output)
    }
}

/// Returns whether `path`, the value of `--json`, is standard output. Nothing but the document goes
/// to standard output then.
fn is_standard_output(path: &Path) -> bool {
    path == Path::new(STANDARD_OUTPUT)
}

/// Parses the value of `--json`: a file that may be written, or `-`.
///
/// # Errors
/// The file exists and holds something other than JSON: most likely the user forgot the value and
/// the next argument, such as a bundle, took its place.
fn json_file(text: &str) -> Result<PathBuf> {
    let path = PathBuf::from(text);
    if !is_standard_output(&path) {
        let mut first = [0];
        let exists = File::open(&path).and_then(|mut file| file.read(&mut first));
        ensure!(
            !exists.is_ok_and(|read| read > 0) || b"{[".contains(&first[0]),
            "the file exists and is not JSON; --json would overwrite it"
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_json_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            path.display().to_string()
        };
        assert!(json_file("-").is_ok() && json_file("not/there.json").is_ok());
        assert!(json_file(&path("old.json", b"{}\n")).is_ok());
        assert!(json_file(&path("empty", b"")).is_ok());
        assert!(json_file(&path("model.hatch", b"HATCH")).is_err());
    }
}
