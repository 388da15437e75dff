//! The calls of C and Python beside the call of the library: the same model, the same requests, in
//! turns of some milliseconds. A C program and a Python program (`bench/peers/caller.*`) make the
//! calls and time them. Their scores must be those of the library to the bit. All three and their
//! workers share one core: where a system wakes a worker would otherwise cost more than a language.
//! Never builds the library or the package.

use super::front_door::{DaemonStep, MODEL, Requests};
use super::paired::Pairs;
use crate::bars::Bar;
use crate::load::{CallTotals, serving};
use crate::peer::{LineProgram, percentile, stay_on_one_core};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hatchback::targets::Target;
use hatchback::{Flash, Schema, Served};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Calls of a turn, in some milliseconds.
const CALLS: usize = 100;
/// Turns of each language that warm up.
const WARM_UP: u32 = 3;
/// Least measured turns of each language.
const TURNS_MIN: u32 = 8;
/// The most that a call of C may take over the library's, p50, µs.
const C_US_MAX: f64 = 1.0;
/// The most that a call of Python may take over the library's, p50, µs.
const PYTHON_US_MAX: f64 = 5.0;
/// The target of all three, if the user names none.
const TARGET: &str = "targets/cpu.toml";
const C_SOURCE: &str = include_str!("../../peers/caller.c");
const PYTHON_SOURCE: &str = include_str!("../../peers/caller.py");

/// Where the C header and library and the Python package are
#[derive(Args, Debug)]
pub struct LanguageArgs {
    /// Folder of hatchback.h
    #[arg(long, default_value = "capi", value_name = "DIR")]
    capi: PathBuf,
    /// The shared library [default: libhatchback_capi.so beside this program]
    #[arg(long, value_name = "FILE")]
    libhatchback: Option<PathBuf>,
    /// A Python that has the package, as `python/test` installs it
    #[arg(long, default_value = "target/python-package/bin/python", value_name = "FILE")]
    python: PathBuf,
}

/// What is called.
pub struct LanguagePlan<'a> {
    /// The model.
    pub flash: &'a Flash,
    /// The target that the user named.
    pub target: Option<&'a Path>,
    /// The requests, of one number of samples.
    pub requests: &'a Requests,
    /// Measured time of each language.
    pub time: Duration,
}

/// The figures of each language that ran, and the bars of C and Python.
type LanguageFigures = (Vec<DaemonStep>, Vec<Bar>);

/// One language: who calls, and what was measured.
struct Way {
    name: &'static str,
    caller: Caller,
    totals: CallTotals,
    /// The median of the last turn, µs.
    median_us: f64,
    /// What calls took more than the library's in the turns beside.
    pairs: Pairs,
}

impl Way {
    fn new(name: &'static str, caller: Caller) -> Self {
        let (totals, pairs) = (CallTotals::default(), Pairs::default());
        Self { name, caller, totals, median_us: f64::NAN, pairs }
    }
}

enum Caller {
    Library(Arc<Served>),
    Program(LineProgram),
}

/// Measures the languages in turns.
///
/// # Errors
/// The target or the model is refused, a call fails, or the scores differ.
pub fn measure(args: &LanguageArgs, plan: &LanguagePlan<'_>) -> Result<LanguageFigures> {
    // The thread ends, and with it that it stays on one core. Its programs and threads inherit it.
    let measured = thread::scope(|scope| {
        let on_one_core = || stay_on_one_core().and_then(|()| measure_here(args, plan));
        scope.spawn(on_one_core).join()
    });
    measured.map_err(|_| anyhow!("the thread that measures languages panicked"))?
}

fn measure_here(args: &LanguageArgs, plan: &LanguagePlan<'_>) -> Result<LanguageFigures> {
    let named = [("C", C_US_MAX), ("Python", PYTHON_US_MAX)];
    let target = plan.target.unwrap_or(Path::new(TARGET));
    if let Some(reason) = why_not(&plan.requests.schema, target) {
        let bars = named.map(|(name, bar)| Bar::not_run(bar_name(name), bar, reason.clone()));
        return Ok((Vec::new(), bars.to_vec()));
    }
    let folder = tempfile::tempdir().context("a temporary folder")?;
    std::fs::write(folder.path().join("requests"), requests_text(plan))?;

    let (library, hash, each) = library(plan, target)?;
    let mut ways = vec![Way::new("Rust", library)];
    let mut missing = Vec::new();
    let started = [c_program(args, folder.path())?, python_program(args, folder.path())?];
    for ((name, bar), command) in named.into_iter().zip(started) {
        match command {
            Ok(command) => {
                let program = start(command, folder.path(), target, plan, hash)
                    .with_context(|| format!("the program in {name}"))?;
                ways.push(Way::new(name, Caller::Program(program)));
            }
            Err(reason) => missing.push(Bar::not_run(bar_name(name), bar, reason)),
        }
    }

    let turn = each.as_secs_f64().max(1e-9) * CALLS as f64;
    let turns = ((plan.time.as_secs_f64() / turn) as u32).max(TURNS_MIN);
    take_turns(&mut ways, plan, turns)?;
    let steps: Vec<DaemonStep> =
        ways.iter().map(|way| DaemonStep::of(&way.totals, way.name, 1)).collect();
    let measured = ways.iter().filter_map(|way| {
        let (_, bar) = named.into_iter().find(|(name, _)| *name == way.name)?;
        Some(way.pairs.at_most(&bar_name(way.name), bar))
    });
    let bars = measured.chain(missing).collect();
    Ok((steps, bars))
}

/// Returns why the other languages cannot call a model of `schema` with `target`.
fn why_not(schema: &Schema, target: &Path) -> Option<String> {
    let is_plain = schema.features.iter().all(|feature| !feature.weighted && !feature.shared)
        && schema.dense_of(true).next().is_none();
    match target.exists() {
        _ if !is_plain => Some("the callers send no weights and no shared features".to_owned()),
        false => Some(format!("{}: no such file; give --target", target.display())),
        true => None,
    }
}

fn bar_name(language: &str) -> String {
    format!("{language} over the library call, p50, µs")
}

/// Each turn begins with another language.
fn take_turns(ways: &mut [Way], plan: &LanguagePlan<'_>, turns: u32) -> Result<()> {
    for turn in 0..WARM_UP + turns {
        let (first, count) = (turn as usize * CALLS, ways.len());
        for number in 0..count {
            let Way { caller, totals, median_us, .. } = &mut ways[(turn as usize + number) % count];
            let start = Instant::now();
            let times = match caller {
                Caller::Library(served) => call_library(served, plan, first, CALLS)?,
                Caller::Program(program) => call_program(program, CALLS)?,
            };
            let us = |time: &Duration| time.as_secs_f64() * 1e6;
            *median_us = percentile(&mut times.iter().map(us).collect::<Vec<f64>>(), 0.5);
            if turn >= WARM_UP {
                totals.time += start.elapsed();
                times.into_iter().for_each(|time| totals.latencies.record(time));
            }
        }
        let library_us = ways[0].median_us;
        if turn >= WARM_UP {
            ways[1..].iter_mut().for_each(|way| way.pairs.add(way.median_us - library_us));
        }
    }
    Ok(())
}

/// Opens the model in this process, in the budget of the other languages. Returns the hash of all
/// scores, and the mean time of a call.
fn library(plan: &LanguagePlan<'_>, target: &Path) -> Result<(Caller, u64, Duration)> {
    let budget = Target::load(target)?.budget;
    let served = serving(&budget).load(MODEL, plan.flash, budget)?;

    let (mut hash, start) = (14_695_981_039_346_656_037_u64, Instant::now());
    for batch in &plan.requests.batches {
        let ticket = served.submit(batch, None)?;
        for byte in ticket.wait()?.scores().values.iter().flat_map(|v| v.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        }
    }
    let each = start.elapsed() / u32::try_from(plan.requests.batches.len().max(1))?;
    Ok((Caller::Library(served), hash, each))
}

fn call_library(
    served: &Served,
    plan: &LanguagePlan<'_>,
    first: usize,
    calls: usize,
) -> Result<Vec<Duration>> {
    let (mut times, batches) = (Vec::with_capacity(calls), &plan.requests.batches);
    for number in first..first + calls {
        let start = Instant::now();
        served.submit(&batches[number % batches.len()], None)?.wait()?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// The requests as text; `caller.c` says in which form.
fn requests_text(plan: &LanguagePlan<'_>) -> String {
    let Requests { schema, samples: requests, .. } = plan.requests;
    let samples = requests.first().map_or(0, Vec::len);
    let mut text = format!("{} {samples}\n", requests.len());
    for sample in requests.iter().flatten() {
        for (value, _) in sample.dense.iter().zip(&schema.dense_features).filter(|(_, d)| !d.shared)
        {
            // Writing to a text cannot fail.
            let _ = write!(text, "{value} ");
        }
        for bag in &sample.sparse {
            let _ = write!(text, "{} ", bag.len());
            for key in bag {
                let _ = write!(text, "{key} ");
            }
        }
        text.push('\n');
    }
    text
}

/// Compiles the C program in `folder`. Returns its command, or why it does not run.
fn c_program(args: &LanguageArgs, folder: &Path) -> Result<Result<Command, String>> {
    let beside = || Ok::<_, std::io::Error>(std::env::current_exe()?.with_file_name(LIBRARY));
    let library = args.libhatchback.clone().map_or_else(beside, Ok)?;
    for file in [&library, &args.capi.join("hatchback.h")] {
        if !file.exists() {
            return Ok(Err(format!("{}: no such file", file.display())));
        }
    }
    let [source, program, link] =
        ["caller.c", "caller", "libhatchback.so.1"].map(|name| folder.join(name));
    std::fs::write(&source, C_SOURCE)?;
    std::os::unix::fs::symlink(library.canonicalize()?, &link)?;
    let compiled = Command::new("cc")
        .args(["-O2", "-o"])
        .args([&program, &source, &link])
        .arg(format!("-I{}", args.capi.display()))
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .output();
    let Ok(compiled) = compiled else { return Ok(Err("cc: no such program".to_owned())) };
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(Ok(Command::new(program)))
}

/// The file name of the library that cargo builds.
const LIBRARY: &str = "libhatchback_capi.so";

/// Returns the command of the Python program, or why it does not run.
fn python_program(args: &LanguageArgs, folder: &Path) -> Result<Result<Command, String>> {
    let shown = args.python.display();
    let import = Command::new(&args.python).args(["-c", "import hatchback"]).output();
    let Ok(import) = import else {
        return Ok(Err(format!("{shown}: no such program; python/test makes it")));
    };
    if !import.status.success() {
        return Ok(Err(format!("{shown}: the package hatchback is not installed")));
    }
    let script = folder.join("caller.py");
    std::fs::write(&script, PYTHON_SOURCE)?;
    let mut command = Command::new(&args.python);
    command.arg(script);
    Ok(Ok(command))
}

/// Starts the program, and checks that its scores have the hash `expected`.
fn start(
    mut command: Command,
    folder: &Path,
    target: &Path,
    plan: &LanguagePlan<'_>,
    expected: u64,
) -> Result<LineProgram> {
    command.args([target, plan.flash.directory(), &folder.join("requests")]);
    let mut program = LineProgram::start(command)?;
    let hash: u64 = program.line()?.trim().parse().context("the hash of the scores")?;
    ensure!(hash == expected, "its scores differ from those of the library");
    Ok(program)
}

/// Lets the program make `calls` calls and returns their times.
fn call_program(program: &mut LineProgram, calls: usize) -> Result<Vec<Duration>> {
    program.send(&calls.to_string())?;
    let line = program.line()?;
    let times = line.split_ascii_whitespace().map(|time| Ok(time.parse()?));
    let times: Result<Vec<u64>> = times.collect();
    Ok(times?.into_iter().map(Duration::from_nanos).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::schema::{DenseFeature, Feature, Network};

    #[test]
    fn a_model_that_the_callers_cannot_call_is_not_called() {
        let (features, dense_features) = (vec![Feature::plain("x", 3)], vec![]);
        let network = Network { inputs: vec![], outputs: vec![] };
        let (tables, lookups, here) = (vec![], vec![], std::env::current_exe().unwrap());
        let mut schema = Schema { dense_features, tables, features, lookups, network };
        assert_eq!(why_not(&schema, &here), None);
        assert!(why_not(&schema, Path::new("none")).unwrap().contains("none: no such file"));
        schema.dense_features = vec![DenseFeature { shared: true, ..DenseFeature::plain("a") }];
        assert!(why_not(&schema, &here).unwrap().contains("no weights and no shared"));
        schema.dense_features.clear();
        for weighted in [true, false] {
            let feature = Feature { weighted, shared: !weighted, ..Feature::plain("x", 3) };
            schema.features = vec![feature];
            assert!(why_not(&schema, &here).unwrap().contains("no weights and no shared"));
        }
    }
}
