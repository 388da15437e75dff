//! The command line of `hatchback`: its commands, each of which has a module, and `pack`, which
//! only calls the library. `docs/commands.md` is its reference.

use crate::pack::spec::CodecChoice;
use crate::pack::{Overrides, pack_file_onto};
use crate::repository::{keys, prune, publish};
use crate::{bench, demo, eval, gate, image, inspect, report, run, say, select, serve, sync, tuf};
use anyhow::Result;
use clap::{Parser, Subcommand};
use hatchback::schema::Placement;
use std::path::PathBuf;

/// Recommendation models with huge embedding tables, from the trainer into the car
///
/// Packs a trainer's embedding tables and dense network into a bundle, publishes and fetches signed
/// releases, makes images of models for a board, and inspects, runs, evaluates and measures models.
#[derive(Parser, Debug)]
#[command(
    name = "hatchback",
    version,
    after_long_help = "See also: hatchbackd(8), \
    hatchback-sync(8), and docs/commands.md in the source for an example of each command."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Demo(demo::DemoArgs),
    Pack(PackArgs),
    Inspect(inspect::InspectArgs),
    Image(image::ImageArgs),
    Select(select::SelectArgs),
    Gate(gate::GateArgs),
    Keys(keys::KeysArgs),
    Publish(publish::PublishArgs),
    Prune(prune::PruneArgs),
    Sync(sync::SyncArgs),
    #[command(hide = true)]
    Tuf(tuf::TufArgs),
    Run(run::RunArgs),
    Eval(eval::EvalArgs),
    Bench(bench::BenchArgs),
}

/// Packs a trainer's files into a bundle
#[derive(clap::Args, Debug)]
struct PackArgs {
    /// The model.toml that describes the files
    model: PathBuf,
    /// The bundle to write
    #[arg(short, long)]
    out: PathBuf,
    /// Replaces the codec of every table
    #[arg(long)]
    codec: Option<CodecChoice>,
    /// Packs only the changes since this bundle or flash directory (a delta)
    #[arg(long)]
    parent: Option<PathBuf>,
    /// Replaces the placement of every table: resident, cached or auto
    #[arg(long, value_parser = placement)]
    placement: Option<Placement>,
}

fn placement(name: &str) -> Result<Placement, String> {
    match name {
        "resident" => Ok(Placement::Resident),
        "cached" => Ok(Placement::Cached),
        "auto" => Ok(Placement::Auto),
        _ => Err("is none of resident, cached, auto".to_owned()),
    }
}

/// Runs the command of a command line.
///
/// # Errors
/// The error of the command. [`report::OutputClosed`] means that the reader of standard output
/// closed the pipe: the program then ends without a message.
pub fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Pack(args) => pack(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Select(args) => select::run(&args),
        Command::Gate(args) => gate::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Publish(args) => publish::run(&args),
        Command::Prune(args) => prune::run(&args),
        Command::Sync(args) => sync::run(&args),
        Command::Tuf(args) => tuf::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Bench(args) => bench::run(&args),
    }
}

fn pack(args: &PackArgs) -> Result<()> {
    let overrides = Overrides { codec: args.codec, placement: args.placement };
    let scratch = tempfile::tempdir()?;
    let open = |path: &PathBuf| serve::open_flash(path, scratch.path());
    let parent = args.parent.as_ref().map(open).transpose()?;

    let bar = serve::progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let progress = &mut |rows, total| {
        bar.set_length(total);
        bar.inc(rows);
    };
    let packed = pack_file_onto(&args.model, parent.as_ref(), &args.out, overrides, progress);
    bar.finish_and_clear();

    let packed = packed?;
    let rows = packed.schema.tables.iter().map(|t| t.rows).sum();
    let (tables, rows) = (packed.schema.tables.len(), report::count(rows));
    let (path, size) = (args.out.display(), report::bytes(packed.bytes));
    say!("{path}: {} with {tables} tables, {rows} rows, {size}", packed.generation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_names_the_product() {
        let command = Cli::command();
        command.clone().debug_assert();
        assert!(command.render_version().starts_with("hatchback 0."));
    }
}
