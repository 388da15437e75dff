//! Writes the man pages and the shell completions of a program from its command line, for the
//! packages. Only with the feature `generate`, which no program on a board has.
//!
//! `PROGRAM --generate DIR` is the whole command line. The help texts do not list it, and without
//! the feature the program refuses it as unknown.

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// Writes the pages and completions of `P` if this process was started as `PROGRAM --generate DIR`.
/// Returns whether it did; the program then ends.
///
/// `DIR` receives one man page of `section` for the program and for each of its subcommands
/// (`hatchback.1`, `hatchback-pack.1`), and the completions `PROGRAM.bash`, `_PROGRAM` and
/// `PROGRAM.fish`.
///
/// # Errors
/// `DIR` or a file in it cannot be written.
pub fn generate_if_asked<P: CommandFactory>(section: &str) -> io::Result<bool> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [flag, directory] = arguments.as_slice() else { return Ok(false) };
    if flag != OsStr::new("--generate") {
        return Ok(false);
    }

    generate(P::command(), section, &PathBuf::from(directory))?;
    Ok(true)
}

fn generate(command: Command, section: &str, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // clap changes the command that it generates from (it adds a subcommand `help`), so it gets
        // a copy.
        generate_to(shell, &mut command.clone(), &name, directory)?;
    }

    // The header of each page has the version and no date, so that the same commit gives the same
    // bytes.
    let command = command.disable_help_subcommand(true);
    write_pages(command, &name, section, directory)
}

/// Writes the page `name` of `command`, and the pages of its subcommands.
fn write_pages(command: Command, name: &str, section: &str, directory: &Path) -> io::Result<()> {
    let subcommands: Vec<Command> = command.get_subcommands().cloned().collect();
    for subcommand in subcommands.into_iter().filter(|subcommand| !subcommand.is_hide_set()) {
        let name = format!("{name}-{}", subcommand.get_name());
        write_pages(subcommand, &name, section, directory)?;
    }

    // clap requires a `'static` name. The program leaks a few dozen and ends.
    let page_name: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let page = Man::new(command.name(page_name)).section(section);
    let mut text = Vec::new();
    page.render(&mut text)?;
    std::fs::write(directory.join(format!("{name}.{section}")), text)
}
