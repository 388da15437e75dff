//! Output to the user: lines on standard output, notes on standard error, JSON documents. Every
//! command writes through here. If the reader closes standard output, the program ends quietly, as
//! other Unix tools do. Never decides what is reported.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The reader of standard output closed the pipe, as `head` does.
///
/// The program ends quietly on this error, with [`CLOSED_PIPE_STATUS`].
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct OutputClosed;

/// Exit status after [`OutputClosed`]: what a shell reports of a tool that SIGPIPE killed (128 +
/// 13).
pub const CLOSED_PIPE_STATUS: u8 = 141;

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
/// [`OutputClosed`] if the reader closed the pipe, or the output cannot be written.
pub fn print_line(line: impl Display) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(output_error)
}

/// Writes `line` to standard error. Ignores a failure: no other output is left to report it.
pub fn note(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Turns an error of standard output into the program's error: a closed pipe becomes
/// [`OutputClosed`].
pub fn output_error(error: io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => anyhow::Error::from(error).context("standard output"),
    }
}

/// Writes `value` to `path` as indented JSON. The path `-` is standard output.
///
/// # Errors
/// The file cannot be written, or as [`print_line`].
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    if is_standard_output(path) {
        return print_line(text);
    }
    std::fs::write(path, text + "\n").with_context(|| path.display().to_string())
}

/// Reports a result: writes `value` to the file of `--json`, if there is one, and calls `print` for
/// the text that people read. With `--json -` standard output gets the document alone.
///
/// # Errors
/// As [`write_json`] and `print`.
pub fn write_report(
    json: Option<&Path>,
    value: &impl Serialize,
    print: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if let Some(path) = json {
        write_json(path, value)?;
        if is_standard_output(path) {
            return Ok(());
        }
    }
    print()
}

/// Returns whether `path`, the value of `--json`, is standard output. Nothing but the document goes
/// to standard output then.
pub fn is_standard_output(path: &Path) -> bool {
    path == Path::new(STANDARD_OUTPUT)
}

/// Parses the value of `--json`: a file that may be written, or `-`.
///
/// # Errors
/// The file exists and holds something other than JSON: most likely the user forgot the value and
/// the next argument, such as a bundle, took its place.
pub fn json_file(text: &str) -> Result<PathBuf> {
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

    #[test]
    fn a_closed_pipe_is_its_own_error() {
        let closed = output_error(ErrorKind::BrokenPipe.into());
        assert!(closed.is::<OutputClosed>());
        let full = output_error(ErrorKind::StorageFull.into());
        assert!(!full.is::<OutputClosed>() && full.to_string() == "standard output");
    }
}
