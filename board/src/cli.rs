//! The command line of `hatchbackd`. Its man page and shell completions are generated from here.

use clap::{Args, Parser, Subcommand};
use hatchback::targets::DeviceKind;
use hatchback_link::daemon::SyncArgs;
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Serves recommendation models from flash
///
/// The daemon takes all memory at start, within the budget of the target. It serves scores over the
/// Open Inference Protocol v2 (gRPC and HTTP) on a Unix socket, with metrics and a status page.
///
/// Without --flash, the daemon serves every folder in the directory `machine.models` of the target,
/// by default /var/lib/hatchback/models.
///
/// --report prints what the machine is, what it lacks of the target, and what could not be read. It
/// changes nothing. Run it first on a new board.
///
/// When the machine is too hot or draws too much power (section `shed` of the target), maintenance
/// of the flash waits first. Then one request at a time is served, and the others receive `busy`.
///
/// Under systemd, the daemon feeds the watchdog only while each model's workers look for work.
#[derive(Debug, Parser)]
#[command(
    name = "hatchbackd",
    version,
    after_long_help = "\
Files:
  /etc/hatchback/car.toml
          What this machine is and may use. It inherits from the files beside it.
  /var/lib/hatchback/models/MODEL
          A model on flash.
  /var/lib/hatchback/updates/MODEL
          The sync directory in which hatchback-sync(8) stages releases for that model.

See also: hatchback(1), hatchback-sync(8)"
)]
pub struct Cli {
    /// The target file: what this machine is and may use, such as targets/cpu.toml
    #[arg(long, value_name = "FILE")]
    pub target: PathBuf,
    /// The flash directory of a model; repeat it for several models, as NAME=DIR [default name: the
    /// model's lineage] [default: every folder in the target's `machine.models`]
    #[arg(long, value_name = "[NAME=]DIR")]
    pub flash: Vec<NamedDirectory>,
    /// Prints what this machine is, what it lacks of the target, and what could not be read;
    /// changes nothing
    #[arg(long)]
    pub report: bool,
    /// Prints the report as JSON
    #[arg(long, requires = "report")]
    pub json: bool,
    /// The root of /proc, /sys and /dev, for example a copy of a board's
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub system: PathBuf,
    /// The processor that computes requests, `cpu` or `cuda` [default: the target's]
    #[arg(long)]
    pub device: Option<DeviceKind>,
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Scores the probe sets and compares them with the scores that the trainer recorded
    Check {
        /// Largest difference allowed [default: the target's update.probe_difference_max]
        #[arg(long)]
        tolerance: Option<f32>,
        /// Prints the memory and the result of each model as JSON
        #[arg(long)]
        json: bool,
    },
    /// Serves scores over gRPC and HTTP on a Unix socket
    Serve(ServeArgs),
    /// Fetches releases for `serve`
    Sync(SyncArgs),
}

#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The socket; created at start, removed at the end, with the owner's token beside it
    #[arg(long, value_name = "FILE")]
    pub socket: PathBuf,
    /// The sync directory in which `hatchback-sync` stages releases for a model [default name: that
    /// of the only model] [default without --flash: every folder in `machine.updates`]
    #[arg(long, value_name = "[NAME=]DIR")]
    pub sync: Vec<NamedDirectory>,
    /// The fleet's first root metadata, in a folder that `hatchback-sync` cannot write; needed with
    /// a sync directory
    #[arg(long, value_name = "FILE")]
    pub root: Option<PathBuf>,
}

/// A directory with the name of a model: `NAME=DIR` on the command line, or `DIR` alone.
#[derive(Clone, Debug)]
pub struct NamedDirectory {
    /// The name, if one is given.
    pub name: Option<String>,
    /// The directory.
    pub directory: PathBuf,
}

impl FromStr for NamedDirectory {
    type Err = Infallible;

    /// A `=` after a `/` is part of the directory.
    fn from_str(given: &str) -> Result<Self, Infallible> {
        Ok(match given.split_once('=') {
            Some((name, directory)) if !name.contains('/') => {
                Self { name: Some(name.to_owned()), directory: directory.into() }
            }
            _ => Self { name: None, directory: given.into() },
        })
    }
}

impl fmt::Display for NamedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        write!(f, "{}", self.directory.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_equals_sign_in_a_path_is_no_name() {
        for (given, name, directory) in [
            ("flash", None, "flash"),
            ("a=flash", Some("a"), "flash"),
            ("/var/a=b", None, "/var/a=b"),
        ] {
            let parsed: NamedDirectory = given.parse().unwrap();
            assert_eq!(parsed.name.as_deref(), name);
            assert_eq!(parsed.directory, PathBuf::from(directory));
            assert_eq!(parsed.to_string(), given);
        }
    }
}
