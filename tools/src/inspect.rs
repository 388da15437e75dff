//! `inspect`: shows the content of a bundle or a flash directory and the bad pages that the
//! daemon's scrubs found. With `--verify` it reads and checks every byte. Never writes.

use crate::report;
use crate::report::Json;
use crate::report::temporary::TemporaryFolder;
use crate::say;
use anyhow::{Context, Result};
use clap::Args;
use hatchback::bundle::manifest::{Blob, Deferral, Manifest};
use hatchback::bundle::{BundleError, BundleReader};
use hatchback::flash::{Flash, read_settled};
use hatchback::io::disk;
use hatchback::maintenance::catalog::Catalog;
use hatchback::maintenance::scrub::Damage;
use hatchback::schema::key_function::{KeyFunction, KeyHash};
use hatchback::schema::{InputSource, NetworkOutput, Schema};
use serde::Serialize;
use std::path::PathBuf;

/// Shows the content of a bundle or a flash directory
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// A bundle or a flash directory
    path: PathBuf,
    /// Reads and checks every chunk or page
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    json: Json,
}

/// The content of a bundle or a flash directory.
#[derive(Debug, Serialize)]
struct Report {
    kind: &'static str,
    generation: String,
    parent: Option<u64>,
    /// The release whose content a restored one has.
    restored: Option<u64>,
    /// The changes that a delta of `select` left for later.
    #[serde(skip_serializing_if = "Option::is_none")]
    deferral: Option<Deferral>,
    bytes: u64,
    dense_features: usize,
    tables: Vec<TableReport>,
    lookups: Vec<LookupReport>,
    inputs: Vec<InputReport>,
    outputs: Vec<OutputReport>,
    onnx_bytes: u64,
    /// The engine of the dense network on this machine's CPU, or why none runs it.
    dense_engine: String,
    probe_bytes: u64,
    /// Damage that `--verify` found; `None` without `--verify`.
    damage: Option<Vec<String>>,
    /// Result of the daemon's scrubs; `None` without a catalog.
    scrub: Option<ScrubReport>,
}

/// The catalog's record of the last scrub or of the running one.
#[derive(Debug, Serialize)]
struct ScrubReport {
    /// End of the scrub, in seconds since 1970; `None` while it runs.
    ended_unix_s: Option<u64>,
    pages: u64,
    bad_pages: Vec<BadPage>,
}

#[derive(Debug, Serialize)]
struct BadPage {
    table: String,
    /// Sequence and serial of the segment.
    segment: String,
    page: u32,
    /// Upper bound of the keys on the page.
    keys_max: u64,
    fault: String,
}

impl ScrubReport {
    /// Reads the catalog beside `flash`, if there is one.
    fn read(flash: &Flash) -> Option<Self> {
        let place = Catalog::path_in(flash.directory());
        if !place.exists() {
            return None;
        }
        let scratch = TemporaryFolder::new().ok()?;
        let notes = Catalog::peek(&place, scratch.path())
            .inspect_err(|e| report::note(format_args!("the catalog of scrubs is unreadable: {e}")))
            .ok()?;
        let tables = &flash.manifest().schema.tables;
        let bad = |d: &Damage| BadPage {
            table: tables.get(d.table).map_or_else(|| d.table.to_string(), |t| t.name.clone()),
            segment: format!("{}-{}", d.segment.sequence, d.segment.serial),
            page: d.page,
            keys_max: d.keys,
            fault: d.fault.clone(),
        };
        Some(Self {
            ended_unix_s: notes.scrubbed.map(|at| at.as_secs()),
            pages: notes.scrub.pages,
            bad_pages: notes.scrub.damage.iter().map(bad).collect(),
        })
    }

    fn print(&self) -> Result<()> {
        let now = hatchback_link::daemon::now();
        let (pages, bad) = (report::count(self.pages), self.bad_pages.len());
        match self.ended_unix_s {
            Some(at) => {
                let hours = now.saturating_sub(at) / 3600;
                say!("the last scrub ended {hours} h ago: {pages} pages read, {bad} bad")?;
            }
            None => say!("a scrub is running: {pages} pages read so far, {bad} bad")?,
        }
        if self.bad_pages.is_empty() {
            return Ok(());
        }

        let mut bad = report::table_with_texts(&[
            "bad page of table",
            "segment",
            "page",
            "keys, at most",
            "fault",
        ]);
        for p in &self.bad_pages {
            bad.add_row([
                &p.table,
                &p.segment,
                &p.page.to_string(),
                &p.keys_max.to_string(),
                &p.fault,
            ]);
        }

        say!("{bad}")
    }
}

#[derive(Debug, Serialize)]
struct TableReport {
    name: String,
    keys: String,
    rows: u64,
    dim: u32,
    codec: &'static str,
    unit_exp: i8,
    placement: String,
    miss: String,
    hot_keys: u64,
    segment_bytes: u64,
    stored_bytes: u64,
}

#[derive(Debug, Serialize)]
struct LookupReport {
    feature: String,
    table: String,
    pooling: String,
    hotness_max: u32,
    weights: bool,
    key: String,
}

#[derive(Debug, Serialize)]
struct OutputReport {
    name: String,
    activation: String,
}

#[derive(Debug, Serialize)]
struct InputReport {
    name: String,
    width: usize,
    fed_by: String,
}

fn lower(value: impl std::fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}

impl Report {
    fn new(kind: &'static str, manifest: &Manifest, bytes: u64, onnx: Result<Vec<u8>>) -> Self {
        let schema = &manifest.schema;
        let engine = onnx.and_then(|onnx| Ok(schema.load_dense(onnx)?));
        let size = |blob: Option<u32>| blob.map_or(0, |b| manifest.blobs[b as usize].raw_bytes());
        Self {
            kind,
            generation: manifest.generation.to_string(),
            parent: manifest.parent,
            restored: manifest.restored.as_ref().map(|restored| restored.sequence),
            deferral: manifest.deferral,
            bytes,
            dense_features: schema.dense_features.len(),
            tables: (0..schema.tables.len()).map(|i| TableReport::new(manifest, i)).collect(),
            lookups: (0..schema.lookups.len()).map(|l| LookupReport::new(schema, l)).collect(),
            inputs: (0..schema.network.inputs.len()).map(|i| InputReport::new(schema, i)).collect(),
            outputs: schema.network.outputs.iter().map(OutputReport::new).collect(),
            onnx_bytes: size(Some(manifest.dense)),
            dense_engine: engine.map_or_else(|e| format!("none: {e}"), |e| e.runs_on()),
            probe_bytes: size(manifest.probe),
            damage: None,
            scrub: None,
        }
    }

    fn print(&self) -> Result<()> {
        let delta = self.parent.map(|parent| format!(", delta from {parent}"));
        let restored = || self.restored.map(|earlier| format!(", restores {earlier}"));
        let parent = delta.or_else(restored).unwrap_or_default();
        say!("{} {}{parent}, {}", self.kind, self.generation, report::bytes(self.bytes))?;
        if let Some(left) = &self.deferral {
            let (window, step, rows) = (left.window, left.step, report::count(left.rows));
            let since = left.since.map_or(String::new(), |since| format!(" since window {since}"));
            say!("up to window {window}, step {step}; {rows} changes wait{since}")?;
        }
        say!("{}", self.tables_table())?;

        let mut lookups = report::table(&["feature", "table", "pooling", "hotness max", "key"]);
        for l in &self.lookups {
            let pooling = format!("{}{}", l.pooling, if l.weights { ", weighted" } else { "" });
            lookups.add_row([&l.feature, &l.table, &pooling, &l.hotness_max.to_string(), &l.key]);
        }
        say!("{lookups}")?;

        let mut inputs = report::table_with_texts(&["network input", "width", "fed by"]);
        for i in &self.inputs {
            inputs.add_row([i.name.clone(), i.width.to_string(), i.fed_by.clone()]);
        }
        say!("{inputs}")?;

        let mut outputs = report::table(&["network output", "activation"]);
        for o in &self.outputs {
            outputs.add_row([&o.name, &o.activation]);
        }
        say!("{outputs}")?;

        let (onnx, probe) = (report::bytes(self.onnx_bytes), report::bytes(self.probe_bytes));
        say!("ONNX {onnx}, probe set {probe}")?;
        say!("dense network: {}", self.dense_engine)?;
        self.scrub.iter().try_for_each(ScrubReport::print)?;
        match self.damage.as_deref() {
            None => Ok(()),
            Some([]) => say!("every byte was read, no damage was found"),
            Some(damage) => damage.iter().try_for_each(|d| say!("DAMAGED  {d}")),
        }
    }

    fn tables_table(&self) -> comfy_table::Table {
        let mut table = report::table(&[
            "table",
            "keys",
            "rows",
            "dim",
            "codec",
            "placement",
            "miss",
            "hot",
            "segment",
            "stored",
        ]);

        for t in &self.tables {
            let codec = match t.unit_exp {
                0 => t.codec.to_owned(),
                exponent => format!("{} x 2^{exponent}", t.codec),
            };
            table.add_row([
                t.name.clone(),
                t.keys.clone(),
                report::count(t.rows),
                t.dim.to_string(),
                codec,
                t.placement.clone(),
                t.miss.clone(),
                report::count(t.hot_keys),
                report::bytes(t.segment_bytes),
                report::bytes(t.stored_bytes),
            ]);
        }

        table
    }
}

impl TableReport {
    fn new(manifest: &Manifest, i: usize) -> Self {
        let (table, blobs) = (&manifest.schema.tables[i], &manifest.tables[i]);
        let segments = manifest.layers(i).into_iter();
        let stored = segments.map(|layer| manifest.blobs[layer.segment as usize].stored_bytes());
        Self {
            name: table.name.clone(),
            keys: lower(table.keys),
            rows: table.rows,
            dim: table.dim,
            codec: table.codec.name(),
            unit_exp: table.unit_exp,
            placement: lower(table.placement),
            miss: lower(table.miss),
            hot_keys: blobs.hot.map_or(0, |h| manifest.blobs[h as usize].raw_bytes() / 8),
            segment_bytes: manifest.segment_bytes(i),
            stored_bytes: stored.sum(),
        }
    }
}

impl LookupReport {
    fn new(schema: &Schema, l: usize) -> Self {
        let feature = schema.feature_of(l);
        Self {
            feature: feature.name.clone(),
            table: schema.table_of(l).name.clone(),
            pooling: lower(schema.lookups[l].pooling),
            hotness_max: feature.hotness_max,
            weights: feature.weighted,
            key: describe_key(&feature.key),
        }
    }
}

/// Returns how raw values become keys, in words.
fn describe_key(key: &KeyFunction) -> String {
    match key {
        KeyFunction::Key => "as it is".to_owned(),
        KeyFunction::Hash { hash, buckets, first } => {
            let name = match hash {
                KeyHash::Farmhash64 => "farmhash64",
                KeyHash::Siphash { .. } => "siphash",
                KeyHash::Murmur3 { .. } => "murmur3",
                KeyHash::CudfMurmur3 { .. } => "cudf_murmur3",
            };
            format!("{first} + {name} % {buckets}")
        }
        KeyFunction::Modulo { divisor, first } => format!("{first} + value % {divisor}"),
        KeyFunction::Range { size, first } => format!("{first} + value below {size}"),
        KeyFunction::Vocabulary { words, .. } => {
            format!("vocabulary of {} words", report::count(words.len() as u64))
        }
        KeyFunction::Buckets { boundaries, .. } => format!("{} buckets", boundaries.len() + 1),
        KeyFunction::Cross { columns, buckets, first } => {
            format!("{first} + cross of {} columns % {buckets}", columns.len())
        }
    }
}

impl OutputReport {
    fn new(output: &NetworkOutput) -> Self {
        Self { name: output.name.clone(), activation: lower(output.activation) }
    }
}

impl InputReport {
    fn new(schema: &Schema, i: usize) -> Self {
        let input = &schema.network.inputs[i];
        let fed_by = match &input.source {
            InputSource::Dense => format!("{} dense features", schema.dense_features.len()),
            InputSource::Vectors(lookups) => format!("{} vectors", lookups.len()),
            InputSource::Lengths(features) => format!("lengths of {} bags", features.len()),
            InputSource::Masks(features) => format!("masks of {} bags", features.len()),
        };
        Self { name: input.name.clone(), width: schema.input_width(input), fed_by }
    }
}

/// Returns the ONNX file of a bundle.
fn read_dense(bundle: &mut BundleReader) -> Result<Vec<u8>> {
    let (dense, mut onnx) = (bundle.manifest().dense, Vec::new());
    bundle.read_blob(dense, |bytes| {
        onnx.extend_from_slice(bytes);
        Ok::<(), BundleError>(())
    })?;
    Ok(onnx)
}

/// Reads every chunk of a bundle; returns the errors.
fn verify_bundle(bundle: &mut BundleReader) -> Vec<String> {
    let blobs = bundle.manifest().blobs.len() as u32;
    let read = |i| bundle.read_blob(i, |_| Ok::<(), BundleError>(())).err().map(|e| e.to_string());
    (0..blobs).filter_map(read).collect()
}

/// Reads every page and every other file of the live generation; returns the errors.
fn verify_flash(flash: &Flash) -> Vec<String> {
    let mut damage = Vec::new();
    for number in 0..flash.manifest().tables.len() {
        match flash.table(number) {
            Err(e) => damage.push(e.to_string()),
            Ok(table) => {
                damage.extend(
                    table.segments().iter().flat_map(|s| s.verify()).map(|e| e.to_string()),
                );
            }
        }
        damage.extend(flash.hot_keys(number).err().map(|e| e.to_string()));
    }
    damage.extend(flash.dense().err().map(|e| e.to_string()));
    damage.extend(flash.probe().err().map(|e| e.to_string()));
    damage
}

/// Returns the report of the live generation of a flash directory.
fn report_flash(flash: &Flash, verify: bool) -> Result<Report> {
    let onnx = flash.dense().map_err(Into::into);
    let bytes = match flash.bytes() {
        // The list of damage names the file.
        Err(_) if verify => 0,
        bytes => bytes?,
    };
    let mut report = Report::new("flash directory", flash.manifest(), bytes, onnx);
    report.damage = verify.then(|| verify_flash(flash));
    report.scrub = ScrubReport::read(flash);
    Ok(report)
}

/// Runs the command.
///
/// # Errors
/// The path is neither a bundle nor a flash directory, or `--verify` found damage.
pub fn run(args: &InspectArgs) -> Result<()> {
    let report = if args.path.is_dir() {
        let open = || Ok(Flash::open(&disk::system(), &args.path)?);
        let is_whole = |report: &Report| matches!(report.damage.as_deref(), Some([]));
        read_settled(open, |flash| report_flash(flash, args.verify), is_whole)
            .with_context(|| args.path.display().to_string())?
    } else {
        let mut bundle = BundleReader::open(&args.path)?;
        let bytes = bundle.manifest().blobs.iter().map(Blob::stored_bytes).sum();
        let onnx = read_dense(&mut bundle);
        let mut report = Report::new("bundle", bundle.manifest(), bytes, onnx);
        report.damage = args.verify.then(|| verify_bundle(&mut bundle));
        report
    };

    args.json.write(&report, || report.print())?;
    let damage = report.damage.map_or(0, |d| d.len());
    anyhow::ensure!(damage == 0, "{}: {damage} parts are damaged", args.path.display());
    Ok(())
}
