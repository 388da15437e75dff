//! The command line of `hatchback`: its commands, each of which has a module, and `pack`, which
//! only calls the library. `docs/commands.md` is its reference.

#[cfg(feature = "kafka")]
use crate::consume;
use crate::limits::PROBE_DIFFERENCE_MAX;
use crate::pack::codec_error::CodecError;
use crate::pack::spec::CodecChoice;
use crate::pack::{Overrides, PackJob, Packed, Proof};
use crate::report::Json;
use crate::report::temporary::TemporaryFolder;
use crate::repository::{keys, prune, publish, releases};
use crate::{
    demo, eval, explain, gate, image, inspect, install, plan, report, run, say, select, serve, sync,
};
use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use hatchback::schema::{Placement, Table};
use hatchback::update::probe::Probed;
use serde::Serialize;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

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
    Install(install::InstallArgs),
    Image(image::ImageArgs),
    #[cfg(feature = "kafka")]
    Consume(consume::ConsumeArgs),
    Select(select::SelectArgs),
    Gate(gate::GateArgs),
    Keys(keys::KeysArgs),
    Publish(publish::PublishArgs),
    Prune(prune::PruneArgs),
    Releases(releases::ReleasesArgs),
    Sync(sync::SyncArgs),
    Run(run::RunArgs),
    Explain(explain::ExplainArgs),
    Row(explain::row::RowArgs),
    Eval(eval::EvalArgs),
    Plan(plan::PlanArgs),
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
    /// Packs only the changes since this bundle or flash directory (a delta). If the bundle is a
    /// delta too, pass its chain: once for each bundle from a snapshot on
    #[arg(long)]
    parent: Vec<PathBuf>,
    /// Replaces the placement of every table: resident, cached or auto
    #[arg(long, value_parser = placement)]
    placement: Option<Placement>,
    /// Leaves out the rows of sparse tables that training used less often, by the counts of their
    /// sources
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    min_count: Option<u64>,
    /// Threads that encode and compress [default: one for each core]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Largest difference of a probe score from the recorded one, as a target's
    /// `update.probe_difference_max`
    #[arg(long, value_name = "DIFFERENCE", default_value_t = PROBE_DIFFERENCE_MAX)]
    probe_difference_max: f32,
    /// Packs only this table into the folder --out, and opens the source of no other; once for each
    /// table
    #[arg(long, value_name = "NAME", conflicts_with = "parent")]
    table: Vec<String>,
    /// Makes the bundle of the shares in this folder; once for each folder
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["parent", "table"])]
    merge: Vec<PathBuf>,
    #[command(flatten)]
    json: Json,
}

/// The report of `pack`.
#[derive(Serialize)]
struct PackReport {
    generation: String,
    bytes: u64,
    rows: u64,
    rows_left_out: u64,
    tables: Vec<PackedTable>,
    dense_engine: String,
    /// Probe samples with a recorded score, and the largest difference; `None` if not scored.
    probed: Option<(u32, f32)>,
}

/// The report of `pack --table`.
#[derive(Serialize)]
struct ShareReport<'a> {
    share: &'a Path,
    tables: &'a [String],
}

/// A table with the error that its codec makes.
#[derive(Serialize)]
struct PackedTable {
    name: String,
    codec: &'static str,
    rows: u64,
    error_max: f32,
    error_rms: f64,
}

impl PackReport {
    fn new(packed: &Packed) -> Self {
        let both = packed.schema.tables.iter().zip(&packed.codec_errors);
        let table = |(table, error): (&Table, &CodecError)| PackedTable {
            name: table.name.clone(),
            codec: table.codec.name(),
            rows: table.rows,
            error_max: error.largest,
            error_rms: error.rms(),
        };
        Self {
            generation: packed.generation.to_string(),
            bytes: packed.bytes,
            rows: packed.schema.tables.iter().map(|t| t.rows).sum(),
            rows_left_out: packed.rows_left_out,
            tables: both.map(table).collect(),
            dense_engine: packed.dense_engine.clone(),
            probed: match packed.proof {
                Proof::Scored(Probed { samples, difference, .. }) => Some((samples, difference)),
                _ => None,
            },
        }
    }

    fn print(&self, args: &PackArgs) -> Result<()> {
        let (tables, rows) = (self.tables.len(), report::count(self.rows));
        let (path, size) = (args.out.display(), report::bytes(self.bytes));
        say!("{path}: {} with {tables} tables, {rows} rows, {size}", self.generation)?;
        if let Some(least) = args.min_count {
            let rows = report::count(self.rows_left_out);
            say!("{rows} rows were used less than {least} times in training and are left out")?;
        }
        let mut errors = report::table(&["table", "codec", "rows", "largest error", "rms error"]);
        for table in &self.tables {
            let [max, rms] = [f64::from(table.error_max), table.error_rms];
            errors.add_row([
                &table.name,
                table.codec,
                &report::count(table.rows),
                &format!("{max:.1e}"),
                &format!("{rms:.1e}"),
            ]);
        }
        say!("{errors}")?;
        say!("dense network: {}", self.dense_engine)
    }
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
        Command::Pack(args) => pack_model(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Install(args) => install::run(&args),
        Command::Image(args) => image::run(&args),
        #[cfg(feature = "kafka")]
        Command::Consume(args) => consume::run(&args),
        Command::Select(args) => select::run(&args),
        Command::Gate(args) => gate::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Publish(args) => publish::run(&args),
        Command::Prune(args) => prune::run(&args),
        Command::Releases(args) => releases::run(&args),
        Command::Sync(args) => sync::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Row(args) => explain::row::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Plan(args) => plan::run(&args),
    }
}

/// Returns whether both paths lead to one file that exists.
fn same_file(a: &Path, b: &Path) -> bool {
    a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
}

fn pack_model(args: &PackArgs) -> Result<()> {
    let &PackArgs { codec, placement, min_count, threads, probe_difference_max, .. } = args;
    let probe_difference_max = Some(probe_difference_max);
    let overrides = Overrides { codec, placement, min_count, probe_difference_max, threads };
    let job = PackJob::read(&args.model, overrides)?;
    let is_out = |path: &&PathBuf| same_file(path, &args.out);
    if let Some(parent) = args.parent.iter().find(is_out) {
        bail!("--out {}: is the parent, which the delta needs", parent.display());
    }
    let scratch = TemporaryFolder::new()?;
    let parent = serve::open_chain("--parent", &args.parent, &scratch.path().join("parent"))?;

    let bar = serve::progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let mut read = 0;
    let progress = &mut |rows, total: u64| {
        // Every row is read twice.
        bar.set_length(total / 2);
        read += rows;
        bar.set_position(read / 2);
    };
    if !args.table.is_empty() {
        job.pack_tables(&args.table, &args.out, progress)?;
        bar.finish_and_clear();
        let report = ShareReport { share: &args.out, tables: &args.table };
        return args.json.write(&report, || {
            say!("{}: {} tables of the model", args.out.display(), args.table.len())
        });
    }
    let packed = match args.merge.is_empty() {
        true => job.pack(parent.as_ref(), &args.out, progress),
        false => job.merge(&args.merge, &args.out),
    };
    bar.finish_and_clear();

    let packed = packed?;
    let report = PackReport::new(&packed);
    args.json.write(&report, || report.print(args))?;
    match packed.proof {
        Proof::Fault(error) => {
            let path = args.out.display();
            Err(error.context(format!("{path}: is packed, but its probe set was not scored")))
        }
        _ if args.json.is_standard_output() => Ok(()),
        Proof::NotScored(problem) => say!("the probe set was not scored: {problem}"),
        Proof::Scored(Probed { samples: 0, .. }) => say!("no probe sample has a recorded score"),
        Proof::Scored(Probed { samples, difference, .. }) => {
            say!("{samples} probe scores differ from the recorded ones by at most {difference:.1e}")
        }
    }
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
