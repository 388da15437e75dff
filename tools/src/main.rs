//! `hatchback`: the program for the datacenter and the desk. Only reads the command line; the work
//! is in the library's modules, one a command.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::{Parser, Subcommand};
use hatchback::schema::Placement;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::pack::{Overrides, pack_file_onto};
use hatchback_tools::repository::{keys, prune, publish};
use hatchback_tools::{bench, demo, eval, image, inspect, report, run, serve, sync, tuf};
use std::path::PathBuf;
use std::process::ExitCode;

/// Recommendation models with huge embedding tables, from the trainer into the car
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Pack(PackArgs),
    Inspect(inspect::InspectArgs),
    Image(image::ImageArgs),
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
#[derive(clap::Args)]
struct PackArgs {
    /// The model.toml that describes them
    model: PathBuf,
    /// The bundle
    #[arg(short, long)]
    out: PathBuf,
    /// In place of every table's codec
    #[arg(long)]
    codec: Option<CodecChoice>,
    /// Packs only what changed since this bundle or flash directory (a delta)
    #[arg(long)]
    parent: Option<PathBuf>,
    /// In place of every table's placement
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

fn pack(args: &PackArgs) -> Result<()> {
    let bar = serve::progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let overrides = Overrides { codec: args.codec, placement: args.placement };
    let scratch = tempfile::tempdir()?;
    let parent =
        args.parent.as_deref().map(|path| serve::open_flash(path, scratch.path())).transpose()?;
    let packed =
        pack_file_onto(&args.model, parent.as_ref(), &args.out, overrides, &mut |rows, total| {
            bar.set_length(total);
            bar.inc(rows);
        });
    bar.finish_and_clear();
    let packed = packed?;
    let rows = packed.schema.tables.iter().map(|t| t.rows).sum();
    let (tables, rows) = (packed.schema.tables.len(), report::count(rows));
    let size = report::bytes(packed.bytes);
    println!(
        "{}: {} with {tables} tables, {rows} rows, {size}",
        args.out.display(),
        packed.generation
    );
    Ok(())
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let done = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Pack(args) => pack(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Publish(args) => publish::run(&args),
        Command::Prune(args) => prune::run(&args),
        Command::Sync(args) => sync::run(&args),
        Command::Tuf(args) => tuf::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", report::explain(&error));
            ExitCode::FAILURE
        }
    }
}
