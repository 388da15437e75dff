//! `select`: turns a trainer's windows into the delta that brings the fleet closest to the trainer
//! within a budget of bytes. It goes in this order:
//!
//! 1. It installs the bundles that were published: the state folder holds what the fleet holds.
//! 2. It merges the backlog and the new windows: the newest change of each key is a candidate.
//! 3. It measures each candidate against the fleet's decoded row and drops those that the fleet
//!    holds, unless the delta of an earlier run may follow.
//! 4. It writes the remaining candidates, with their values, as the next backlog. Of many windows
//!    it takes some at a time, and repeats steps 2 to 4.
//! 5. It ranks them and writes the best that fit as a delta.
//!
//! A candidate leaves the backlog only in step 3, when the fleet holds it. So no row is lost if a
//! step is killed, or the delta is refused, published later or never. Memory holds the keys of the
//! candidates and no values. Never signs and never uploads.

pub mod candidates;
pub mod choose;
pub mod encode;
pub mod fleet;
pub mod hot_lists;
pub mod state;

use crate::eval::evaluate;
use crate::pack::read_samples;
use crate::pack::weights::as_parent;
use crate::report::Json;
use crate::report::args::mib_to_bytes;
use crate::report::temporary::Claim;
use crate::select::candidates::{Candidate, RowChange, Sources, key_of};
use crate::select::choose::{ChoiceRules, Ranking, TableCandidates};
use crate::select::encode::{Draft, Fitted};
use crate::select::fleet::{Comparison, FleetTable};
use crate::select::hot_lists::{HotTraffic, hot_orders, new_lists};
use crate::select::state::SelectState;
use crate::serve::claim_new;
use crate::window::folder::{closed_windows, windows_after};
use crate::window::head::{DENSE, PROBE};
use crate::window::reader::RowBuffer;
use crate::window::writer::{TableChanges, WindowContent, write_window};
use crate::window::{BacklogState, Window, WindowError};
use crate::{report, say};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::RowFormat;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Generation, sha256};
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::schema::Table;
use hatchback::schema::sample::Sample;
use serde::Serialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Windows that are open at once. Each is an open file.
const WINDOWS_MAX: usize = 256;

/// Makes a delta of the changes that matter most from a trainer's windows
#[derive(Args, Clone, Debug)]
pub struct SelectArgs {
    /// The folder of the trainer's windows
    #[arg(long)]
    pub windows: PathBuf,
    /// The folder that keeps what the fleet holds and the changes that wait
    #[arg(long)]
    pub state: PathBuf,
    /// The delta bundle to write
    #[arg(short, long)]
    pub out: PathBuf,
    /// The snapshot that the fleet holds; for a new state folder
    #[arg(long)]
    pub base: Option<PathBuf>,
    /// A delta that was published since the last `select`; the fleet holds it now
    #[arg(long)]
    pub published: Vec<PathBuf>,
    /// Size of the delta at most, MiB [default: no limit]
    #[arg(long, value_parser = report::args::mib_above_zero)]
    pub budget_mib: Option<f64>,
    /// Least distance to the fleet's row that ranks, as a share of the row's length. A change below
    /// it goes only with those that wait longest
    #[arg(long, default_value_t = 0.0, value_parser = floor)]
    pub floor: f32,
    /// Per cent of the budget for the changes that wait longest
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub ageing_percent: u64,
    /// Every so many selections the waiting rows of the hot lists go first; 0: never
    #[arg(long, default_value_t = 16)]
    pub refresh_every: u64,
    /// Where the report goes.
    #[command(flatten)]
    pub json: Json,
}

fn floor(text: &str) -> Result<f32> {
    let floor: f32 = text.parse().context("is not a number")?;
    ensure!((0.0..=1.0).contains(&floor), "is not between 0 and 1");
    Ok(floor)
}

/// The result of a selection.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Selection {
    /// The generation of the delta; none if the fleet lacks nothing.
    pub generation: Option<String>,
    /// The sequence that the fleet holds.
    pub parent: u64,
    /// New windows that were read.
    pub windows: usize,
    /// The newest window in the delta or the backlog.
    pub window: u64,
    /// The trainer's step of that window.
    pub step: u64,
    /// The latest time of a window in the backlog, milliseconds since 1970.
    pub closed_ms: u64,
    /// Changes that the fleet lacked.
    pub candidates: u64,
    /// Rows in the delta that replace the fleet's.
    pub updated: u64,
    /// Rows in the delta with new keys.
    pub inserted: u64,
    /// Keys that the delta deletes.
    pub deleted: u64,
    /// Changes that wait for a later delta.
    pub deferred: u64,
    /// The window since which the oldest of these waits.
    pub deferred_since: Option<u64>,
    /// The largest distance of a deferred row to the fleet's.
    pub deferred_distance_max: f32,
    /// Whether the hot rows came first.
    pub is_refresh: bool,
    /// Tables with a new hot list in the delta.
    pub hot_lists: u64,
    /// Bytes of the delta.
    pub bytes: u64,
    /// The budget.
    pub budget_bytes: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// A window, a bundle or the state folder is refused, or a file cannot be written. No change is
/// lost: the next run repeats the step.
pub fn run(args: &SelectArgs) -> Result<()> {
    let done = select(args)?;
    args.json.write(&done, || done.print(&args.out))
}

impl Selection {
    fn print(&self, out: &Path) -> Result<()> {
        let Some(generation) = &self.generation else {
            return say!("the fleet holds everything up to window {}", self.window);
        };
        let (updated, inserted) = (report::count(self.updated), report::count(self.inserted));
        let (deleted, deferred) = (report::count(self.deleted), report::count(self.deferred));
        let (path, size) = (out.display(), report::bytes(self.bytes));
        say!(
            "{path}: {generation} from {parent} with {updated} updated, {inserted} new and \
             {deleted} deleted rows, {size}; {deferred} changes wait",
            parent = self.parent
        )
    }
}

/// Selects and writes a delta as the head of this file describes.
///
/// # Errors
/// As [`run`].
pub fn select(args: &SelectArgs) -> Result<Selection> {
    let _new = claim_new(&args.state)?;
    let mut state = SelectState::open(&args.state, args.base.as_deref(), &args.published)?;
    // Until the fleet holds another generation, the delta of the last selection may still follow.
    let keeps_held = state.recorded().is_some_and(|recorded| recorded.held == state.held());
    let before = state.recorded().map_or(0, |recorded| recorded.selections);
    let mut taken = 0;
    let (tables, selections) = loop {
        let last = state.recorded().and_then(|recorded| recorded.consumed);
        if let Some(backlog) = &state.backlog {
            check_numbering(&args.windows, last, backlog)?;
        }
        let windows = open_windows(&args.windows, last, &state.fleet)?;
        if windows.is_empty() && state.backlog.is_none() {
            return Ok(Selection { parent: state.held().sequence, ..Selection::default() });
        }

        let tables = measure(&state, &windows, args.floor, keeps_held)?;
        taken += windows.len();
        let selections = before + u64::from(taken > 0);
        write_backlog(&mut state, &windows, &tables, selections)?;
        if windows.len() < WINDOWS_MAX {
            break (tables, selections);
        }
    };

    let is_refresh = args.refresh_every > 0 && selections.is_multiple_of(args.refresh_every);
    let rules = ChoiceRules { ageing_percent: args.ageing_percent, is_refresh };
    let mut done = write_delta(args, &state, &tables, rules)?;
    done.windows = taken;
    Ok(done)
}

/// Checks that no window up to `last` was closed after the newest one in the backlog. Otherwise the
/// windows of a trainer that numbers them anew would be ignored.
fn check_numbering(folder: &Path, last: Option<u64>, backlog: &Window) -> Result<(), WindowError> {
    for closed in closed_windows(folder)? {
        if last.is_none_or(|last| closed.number > last) {
            continue;
        }
        let head = Window::read_head(&closed.folder)?;
        if head.closed_ms > backlog.head.closed_ms {
            let why = "later than that of the newest window in the backlog: the trainer numbers \
                       its windows anew; continue after the last number";
            return Err(WindowError::field(&closed.folder, "closed_ms", head.closed_ms, why));
        }
    }
    Ok(())
}

/// Opens and verifies the windows of `folder` after window `last`, `WINDOWS_MAX` at most.
fn open_windows(folder: &Path, last: Option<u64>, fleet: &Flash) -> Result<Vec<Window>> {
    let schema = &fleet.manifest().schema;
    let mut windows = Vec::new();
    for closed in windows_after(folder, last)?.into_iter().take(WINDOWS_MAX) {
        let window = Window::open(&closed.folder)?;
        let refused = |field: &str, value: &dyn std::fmt::Display, why: String| {
            Err(WindowError::field(window.folder(), field, value, why))
        };
        let lineage = &fleet.manifest().generation.lineage;
        if &window.head.lineage != lineage {
            refused("lineage", &window.head.lineage, format!("the fleet's is {lineage}"))?;
        }
        if window.head.window != closed.number {
            refused("window", &window.head.window, format!("its folder is {}", closed.number))?;
        }
        if let Some(table) =
            window.tables.iter().find(|t| schema.tables.iter().all(|s| s.name != t.name))
        {
            refused("table", &table.name, "the model has no table of this name".to_owned())?;
        }

        window.verify()?;
        if let Some(onnx) = window.dense()? {
            let path = window.folder().join(DENSE);
            schema.load_dense(onnx).with_context(|| path.display().to_string())?;
        }
        windows.push(window);
    }
    Ok(windows)
}

/// Returns the candidates of each table; with `keeps_held` also those that the fleet holds.
fn measure(
    state: &SelectState,
    windows: &[Window],
    floor: f32,
    keeps_held: bool,
) -> Result<Vec<TableCandidates>> {
    let sources = sources_of(state, windows);
    let mut tables = Vec::new();
    for (number, table) in state.fleet.manifest().schema.tables.iter().enumerate() {
        let mut candidates = sources.candidates(table)?;
        if !candidates.is_empty() {
            let format = format_of(table)?;
            let comparison = Comparison { table, format, sources: &sources, floor, keeps_held };
            comparison.measure(&mut candidates, &mut FleetTable::open(&state.fleet, number)?)?;
            candidates.shrink_to_fit();
        }
        let listed = state.fleet.hot_keys(number)?.len();
        let hot = HotTraffic::of_table(&table.name, state.backlog.as_ref(), windows, listed)?;
        tables.push(TableCandidates::new(table, candidates, hot));
    }
    Ok(tables)
}

fn sources_of<'a>(state: &'a SelectState, windows: &'a [Window]) -> Sources<'a> {
    let has_backlog = state.backlog.is_some();
    Sources { windows: state.backlog.iter().chain(windows).collect(), has_backlog }
}

fn format_of(table: &Table) -> Result<RowFormat> {
    table.format().with_context(|| format!("table `{}`: unit does not fit the codec", table.name))
}

/// Writes the candidates as the next backlog. The network and the probe lines are those of the
/// newest window that has them.
fn write_backlog(
    state: &mut SelectState,
    windows: &[Window],
    tables: &[TableCandidates],
    selections: u64,
) -> Result<()> {
    let (number, folder) = state.next_backlog()?;
    let sources = sources_of(state, windows);
    let schema = &state.fleet.manifest().schema.tables;
    let changes: Vec<TableChanges> =
        schema.iter().zip(tables).map(|(table, t)| changes_of(table, t)).collect();
    let newest = sources.windows.last().context("a backlog or a window")?;
    let (mut dense, mut probe) = (None, None);
    for window in &sources.windows {
        (dense, probe) = (window.dense()?.or(dense), window.probe()?.or(probe));
    }

    // The clocks of several writers differ, so the newest window may not be the latest.
    let closed_ms = sources.windows.iter().map(|window| window.head.closed_ms);
    let closed_ms = closed_ms.max().unwrap_or_default();
    let new = sources.new_windows().last().map(|window| window.head.window);
    let consumed = new.or(state.recorded().and_then(|recorded| recorded.consumed));
    let content = WindowContent {
        lineage: newest.head.lineage.clone(),
        window: number,
        step: newest.head.step,
        closed_ms,
        dense,
        probe,
        backlog: Some(BacklogState { consumed, selections, held: state.held() }),
        kafka: None,
    };

    let places: Vec<Vec<&Candidate>> = tables.iter().map(|t| rows_of(&t.candidates)).collect();
    let mut buffer = RowBuffer::default();
    let part = Claim::new(&folder);
    write_window(&folder, &content, &changes, &mut |table, row, values| {
        let candidate = places[table][row];
        let source = usize::from(candidate.source);
        let rows = sources.table(source, &schema[table].name).context("the row's window")?;
        sources.windows[source].read_row(rows, u64::from(candidate.row), &mut buffer)?;
        values.extend_from_slice(&buffer.values);
        Ok(())
    })?;
    part.complete(|| Ok(state.replace_backlog(&folder)?))
}

/// Returns the candidates that have a row.
fn rows_of(candidates: &[Candidate]) -> Vec<&Candidate> {
    candidates.iter().filter(|candidate| candidate.change != RowChange::Delete).collect()
}

/// Returns the columns of the backlog of one table.
fn changes_of(table: &Table, changes: &TableCandidates) -> TableChanges {
    let candidates = &changes.candidates;
    let key = |candidate: &Candidate| key_of(table.keys, candidate.order);
    let rows = || candidates.iter().filter(|candidate| candidate.change != RowChange::Delete);
    let deleted = || candidates.iter().filter(|candidate| candidate.change == RowChange::Delete);
    TableChanges {
        name: table.name.clone(),
        dim: table.dim as usize,
        keys: rows().map(key).collect(),
        traffic: Some(rows().map(|candidate| candidate.traffic).collect()),
        since: Some(rows().map(|candidate| candidate.since).collect()),
        deleted: deleted().map(key).collect(),
        deleted_since: Some(deleted().map(|candidate| candidate.since).collect()),
        hot: changes.hot.keys.clone(),
        hot_traffic: changes.hot.traffic.clone(),
    }
}

/// Writes the delta that the budget allows. Its probe set has the scores of this runtime on the
/// delta itself, because a car lacks the deferred rows.
fn write_delta(
    args: &SelectArgs,
    state: &SelectState,
    tables: &[TableCandidates],
    rules: ChoiceRules,
) -> Result<Selection> {
    let backlog = state.backlog.as_ref().context("the backlog was just written")?;
    let fleet = &state.fleet;
    let schema = &fleet.manifest().schema;
    let held_dense = fleet.dense()?;
    let dense = match backlog.dense()? {
        Some(trained) => as_parent(&trained, schema, fleet, &probe_of(backlog, fleet)?)?,
        None => held_dense.clone(),
    };
    let budget = args.budget_mib.map(mib_to_bytes);
    let mut done = describe(state, tables, rules, budget);
    let has_network = sha256(&dense) != sha256(&held_dense);
    if done.candidates == 0 && !has_network {
        return Ok(done);
    }

    let hot_rows: Vec<HashSet<u64>> = (0..schema.tables.len())
        .map(|number| hot_orders(fleet, number, rules.is_refresh))
        .collect::<Result<_>>()?;
    let ranking = Ranking::new(tables, &schema.tables, &hot_rows, rules);
    let live = &fleet.manifest().generation;
    let generation = Generation { lineage: live.lineage.clone(), sequence: live.sequence + 1 };
    let mut probe = probe_of(backlog, fleet)?;
    // An encoded score takes five bytes, whatever its value.
    let outputs = schema.network.outputs.len();
    probe.iter_mut().for_each(|sample| sample.scores = vec![Some(0.5); outputs]);
    let traffic: Vec<&HotTraffic> = tables.iter().map(|table| &table.hot).collect();
    let hot = match rules.is_refresh {
        true => new_lists(fleet, &traffic, budget)?,
        false => vec![None; tables.len()],
    };
    done.hot_lists = hot.iter().flatten().count() as u64;
    let window = done.window;
    let mut draft = Draft { fleet, backlog, tables, generation, window, dense: &dense, probe, hot };

    let has_probe = !draft.probe.is_empty();
    let spare = if has_probe { Sample::encode_set(&draft.probe)?.len() as u64 } else { 0 };
    let room = budget.map(|budget| budget.saturating_sub(spare));
    let draft_path = Claim::new(state.draft());
    let path: &Path = if has_probe { draft_path.path() } else { &args.out };
    let mut fitted = draft.fit(&ranking, room, path)?;
    if fitted.chosen.count == 0 && !has_network {
        let _ = state.disk().remove_file(path);
        bail!("the budget has room for no change; raise --budget-mib");
    }
    if has_probe {
        draft.probe = score_probe(state, path, draft.probe)?;
        // A draft that is left does no harm: the next one replaces it.
        let _ = state.disk().remove_file(path);
        fitted.bytes = draft.write(&fitted.chosen, &args.out)?;
    }
    done.count(&draft, &fitted);
    Ok(done)
}

/// Returns the report of a selection before anything is chosen.
fn describe(
    state: &SelectState,
    tables: &[TableCandidates],
    rules: ChoiceRules,
    budget_bytes: Option<u64>,
) -> Selection {
    let head = state.backlog.as_ref().map(|backlog| &backlog.head);
    Selection {
        parent: state.held().sequence,
        window: state.recorded().and_then(|recorded| recorded.consumed).unwrap_or_default(),
        step: head.map(|head| head.step).unwrap_or_default(),
        closed_ms: head.map(|head| head.closed_ms).unwrap_or_default(),
        candidates: tables.iter().map(|t| t.lacking().count() as u64).sum(),
        is_refresh: rules.is_refresh,
        budget_bytes,
        ..Selection::default()
    }
}

impl Selection {
    /// Adds what `fitted` brings and what it leaves.
    fn count(&mut self, draft: &Draft<'_>, fitted: &Fitted) {
        self.generation = Some(draft.generation.to_string());
        self.bytes = fitted.bytes;
        let left = draft.deferral(&fitted.chosen);
        (self.deferred, self.deferred_since) = (left.rows, left.since);
        self.deferred_distance_max = left.distance_max;
        for number in 0..draft.tables.len() {
            for candidate in draft.chosen_of(&fitted.chosen, number) {
                match candidate.change {
                    RowChange::Update => self.updated += 1,
                    RowChange::Insert => self.inserted += 1,
                    RowChange::Delete => self.deleted += 1,
                }
            }
        }
    }
}

/// Returns the samples of the newest probe lines, or of the fleet's probe set.
fn probe_of(backlog: &Window, fleet: &Flash) -> Result<Vec<Sample>> {
    match backlog.head.file(PROBE) {
        Some(_) => read_samples(&backlog.folder().join(PROBE), &fleet.manifest().schema),
        None => Ok(fleet.probe()?),
    }
}

/// Scores `samples` with this runtime on the delta at `path`. Returns them with these scores.
fn score_probe(state: &SelectState, path: &Path, mut samples: Vec<Sample>) -> Result<Vec<Sample>> {
    let mut bundle = BundleReader::open(path)?;
    let directory = state.fleet.directory();
    let prepared = Flash::prepare(state.disk(), directory, &mut bundle, |_| ())?;
    let model = Arc::new(Model::from_flash(prepared.flash(), Budget::default())?);
    let found = evaluate(&model, &samples, 1)?;
    found.check_scores().context("the probe set of the delta")?;
    for (sample, scores) in samples.iter_mut().zip(found.scores) {
        sample.scores = scores.into_iter().flatten().map(Some).collect();
    }
    Ok(samples)
}
