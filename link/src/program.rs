//! How each program ends: one line for an error, and an exit status that says who must act. The
//! status 2, for a wrong command line, is clap's. Never shows a backtrace or a type of the source.

use hatchback::{FlashError, OpenError, UpdateError};
use rustix::io::Errno;
use std::error::Error;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

/// The reader of standard output closed the pipe, as `head` does. The program ends quietly.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct OutputClosed;

/// Exit status after [`OutputClosed`]: what a shell reports of a tool that SIGPIPE killed (128 +
/// 13).
pub const CLOSED_PIPE_STATUS: u8 = 141;
/// Exit status after a fault of the machine, such as a full disk: another try, or another machine,
/// may succeed. After a refusal of the input the status is 1.
pub const MACHINE_FAULT_STATUS: u8 = 3;

/// Ends a program: prints the error, if there is one, and returns the exit status.
pub fn end(ended: anyhow::Result<()>) -> ExitCode {
    ExitCode::from(status_of(ended))
}

/// Prints the error, if there is one, and returns the exit status.
pub fn status_of(ended: anyhow::Result<()>) -> u8 {
    match ended {
        Ok(()) => 0,
        Err(error) if error.is::<OutputClosed>() => CLOSED_PIPE_STATUS,
        Err(error) => {
            // As clap prints its own errors.
            let is_plain = !io::stderr().is_terminal()
                || std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
            let head = if is_plain { "error:" } else { "\x1b[1m\x1b[31merror:\x1b[0m" };
            note(format_args!("{head} {}", explain(&error)));
            match is_machine_fault(&error) {
                true => MACHINE_FAULT_STATUS,
                false => 1,
            }
        }
    }
}

/// Writes `line` to standard error. Ignores a failure: no other output is left to report it.
pub fn note(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Formats an error and its causes as one line. The runtime's errors already contain their causes,
/// so a cause that the line already contains is left out. A cause may begin with the path that the
/// line ends with, which is said once.
pub fn explain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| {
        let place = cause.split(": ").next().unwrap_or_default();
        let is_again = said.strip_suffix(place).is_some_and(|s| s.is_empty() || s.ends_with(' '));
        match said.as_str() {
            "" => cause,
            _ if said.contains(&cause) => said,
            _ if is_again => said + &cause[place.len()..],
            _ => format!("{said}: {cause}"),
        }
    })
}

/// Turns an error of standard output into the program's error: a closed pipe becomes
/// [`OutputClosed`].
pub fn output_error(error: io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => anyhow::Error::from(error).context("standard output"),
    }
}

/// Returns whether the machine or its link is the cause of an error, and not the input.
pub fn is_machine_fault(error: &anyhow::Error) -> bool {
    error.chain().any(is_fault)
}

fn is_fault(cause: &(dyn Error + 'static)) -> bool {
    // These errors pass on the sources of what they wrap, so the chain lacks the wrapped error.
    if let Some(error) = cause.downcast_ref::<UpdateError>() {
        return error.is_fault_of_car();
    }
    if let Some(OpenError::Flash(error)) = cause.downcast_ref::<OpenError>() {
        return is_flash_fault(error);
    }
    if let Some(error) = cause.downcast_ref::<FlashError>() {
        return is_flash_fault(error);
    }

    let Some(error) = cause.downcast_ref::<io::Error>() else { return false };
    let by_number = [Errno::IO, Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|number| by_number.contains(&number))
        || matches!(
            error.kind(),
            ErrorKind::StorageFull
                | ErrorKind::QuotaExceeded
                | ErrorKind::OutOfMemory
                | ErrorKind::StaleNetworkFileHandle
                | ErrorKind::TimedOut
        )
}

fn is_flash_fault(error: &FlashError) -> bool {
    matches!(error, FlashError::Space { .. } | FlashError::Busy { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_a_fault_of_the_machine_and_a_missing_file_is_not() {
        let error = |errno: Errno| {
            let source = io::Error::from_raw_os_error(errno.raw_os_error());
            let path = "m.hatch".into();
            anyhow::Error::from(FlashError::Io { path, source }).context("table `a`")
        };
        assert!(is_machine_fault(&error(Errno::NOSPC)) && is_machine_fault(&error(Errno::IO)));
        assert!(!is_machine_fault(&error(Errno::NOENT)) && !is_machine_fault(&error(Errno::ISDIR)));
        assert!(!is_machine_fault(&anyhow::anyhow!("table `a`: key 3 occurs twice")));

        let full = || FlashError::Space { path: "car".into(), needed: 2, free: 1 };
        assert!(is_machine_fault(&UpdateError::from(full()).into()));
        assert!(is_machine_fault(&OpenError::from(full()).into()));
        let unknown = UpdateError::NotFound { path: "metadata".to_owned() };
        assert!(!is_machine_fault(&unknown.into()));
    }

    #[test]
    fn a_cause_is_said_once() {
        let io = || io::Error::other("no luck");
        let error = anyhow::Error::from(io()).context("t.toml: no luck").context("table `a`");
        assert_eq!(explain(&error), "table `a`: t.toml: no luck");
        assert_eq!(explain(&anyhow::Error::from(io()).context("line 3")), "line 3: no luck");
        let error = anyhow::Error::msg("a/b: is a file").context("a/b").context("--from a/b");
        assert_eq!(explain(&error), "--from a/b: is a file");
        let error = anyhow::Error::msg("b: is a file").context("a/b");
        assert_eq!(explain(&error), "a/b: b: is a file");
    }

    #[test]
    fn a_closed_pipe_is_its_own_error() {
        let closed = output_error(ErrorKind::BrokenPipe.into());
        assert!(closed.is::<OutputClosed>());
        let full = output_error(ErrorKind::StorageFull.into());
        assert!(!full.is::<OutputClosed>() && full.to_string() == "standard output");
    }
}
