//! `inspect`: what a bundle or a flash directory holds, and, on demand, whether every byte of it is
//! sound; and which pages the daemon's scrubs found bad.

use crate::report;
use anyhow::Result;
use clap::Args;
use hatchback::bundle::manifest::{Blob, Manifest};
use hatchback::bundle::{BundleError, BundleReader};
use hatchback::flash::Flash;
use hatchback::maintenance::catalog::Catalog;
use hatchback::maintenance::scrub::Damage;
use hatchback::schema::{InputSource, Schema};
use serde::Serialize;
use std::path::PathBuf;
use std::time::SystemTime;

/// Shows what a bundle or a flash directory holds
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// A bundle or a flash directory
    path: PathBuf,
    /// Reads and checks every chunk or page
    #[arg(long)]
    verify: bool,
    /// Writes the report as JSON (`-`: standard output)
    #[arg(long)]
    json: Option<PathBuf>,
}

/// What is there.
#[derive(Debug, Serialize)]
struct Report {
    kind: &'static str,
    generation: String,
    parent: Option<u64>,
    bytes: u64,
    dense_features: usize,
    tables: Vec<TableReport>,
    features: Vec<FeatureReport>,
    inputs: Vec<InputReport>,
    onnx_bytes: u64,
    probe_bytes: u64,
    /// What `--verify` found wrong; `None` where it did not look.
    damage: Option<Vec<String>>,
    /// What the daemon's scrubs know; `None` where there is no catalog.
    scrub: Option<ScrubReport>,
}

/// What the catalog says of the last scrub, or of the one under way.
#[derive(Debug, Serialize)]
struct ScrubReport {
    /// When it ended, in seconds since 1970; `None` while it is under way.
    ended_unix_s: Option<u64>,
    pages: u64,
    bad_pages: Vec<BadPage>,
}

#[derive(Debug, Serialize)]
struct BadPage {
    table: String,
    /// The segment's generation and serial.
    segment: String,
    page: u32,
    /// Keys on the page, at most.
    keys_max: u64,
    fault: String,
}

impl ScrubReport {
    /// As the catalog beside `flash` has it.
    fn read(flash: &Flash) -> Option<Self> {
        let place = Catalog::place(flash.directory());
        if !place.exists() {
            return None;
        }
        let scratch = tempfile::tempdir().ok()?;
        let notes = Catalog::peek(&place, scratch.path())
            .inspect_err(|e| eprintln!("no scrubs known: {e}"))
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

    fn print(&self) {
        let now =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let pages = report::count(self.pages);
        match self.ended_unix_s {
            Some(at) => {
                let hours = now.saturating_sub(at) / 3600;
                println!(
                    "the last scrub read {pages} pages and ended {hours} h ago: {} bad",
                    self.bad_pages.len()
                );
            }
            None => {
                println!("a scrub is under way, {pages} pages so far: {} bad", self.bad_pages.len())
            }
        }
        if self.bad_pages.is_empty() {
            return;
        }
        let mut bad =
            report::table(&["bad page of table", "segment", "page", "keys, at most", "fault"]);
        for p in &self.bad_pages {
            bad.add_row([
                &p.table,
                &p.segment,
                &p.page.to_string(),
                &p.keys_max.to_string(),
                &p.fault,
            ]);
        }
        println!("{bad}");
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
    placed_bytes: u64,
    segment_bytes: u64,
    stored_bytes: u64,
}

#[derive(Debug, Serialize)]
struct FeatureReport {
    name: String,
    table: String,
    pooling: String,
    hotness_max: u32,
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
    fn new(kind: &'static str, manifest: &Manifest, bytes: u64) -> Self {
        let schema = &manifest.schema;
        let size = |blob: Option<u32>| blob.map_or(0, |b| manifest.blobs[b as usize].raw_bytes());
        Self {
            kind,
            generation: manifest.generation.to_string(),
            parent: manifest.parent,
            bytes,
            dense_features: schema.dense_features.len(),
            tables: (0..schema.tables.len()).map(|i| TableReport::new(manifest, i)).collect(),
            features: (0..schema.features.len()).map(|i| FeatureReport::new(schema, i)).collect(),
            inputs: (0..schema.network.inputs.len()).map(|i| InputReport::new(schema, i)).collect(),
            onnx_bytes: size(Some(manifest.dense)),
            probe_bytes: size(manifest.probe),
            damage: None,
            scrub: None,
        }
    }

    fn print(&self) {
        let parent = self.parent.map_or(String::new(), |p| format!(", delta from {p}"));
        println!("{} {}{parent}, {}", self.kind, self.generation, report::bytes(self.bytes));
        let mut tables = report::table(&[
            "table",
            "keys",
            "rows",
            "dim",
            "codec",
            "placement",
            "miss",
            "hot",
            "placed",
            "segment",
            "stored",
        ]);
        for t in &self.tables {
            let codec = if t.unit_exp == 0 {
                t.codec.to_owned()
            } else {
                format!("{} x 2^{}", t.codec, t.unit_exp)
            };
            let (rows, hot) = (report::count(t.rows), report::count(t.hot_keys));
            let placed = report::bytes(t.placed_bytes);
            let (segment, stored) = (report::bytes(t.segment_bytes), report::bytes(t.stored_bytes));
            let (name, keys, placement, miss) =
                (t.name.clone(), t.keys.clone(), t.placement.clone(), t.miss.clone());
            tables.add_row([
                name,
                keys,
                rows,
                t.dim.to_string(),
                codec,
                placement,
                miss,
                hot,
                placed,
                segment,
                stored,
            ]);
        }
        println!("{tables}");
        let mut features = report::table(&["feature", "table", "pooling", "hotness max"]);
        for f in &self.features {
            features.add_row([&f.name, &f.table, &f.pooling, &f.hotness_max.to_string()]);
        }
        println!("{features}");
        let mut inputs = report::table(&["network input", "width", "fed by"]);
        for i in &self.inputs {
            inputs.add_row([i.name.clone(), i.width.to_string(), i.fed_by.clone()]);
        }
        println!(
            "{inputs}\nONNX {}, probe set {}",
            report::bytes(self.onnx_bytes),
            report::bytes(self.probe_bytes)
        );
        self.scrub.iter().for_each(ScrubReport::print);
        match &self.damage {
            None => {}
            Some(damage) if damage.is_empty() => println!("every byte was read and is sound"),
            Some(damage) => damage.iter().for_each(|d| println!("DAMAGED  {d}")),
        }
    }
}

impl TableReport {
    fn new(manifest: &Manifest, i: usize) -> Self {
        let (table, blobs) = (&manifest.schema.tables[i], &manifest.tables[i]);
        let segment = &manifest.blobs[blobs.segment as usize];
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
            placed_bytes: blobs.placed.map_or(0, |p| manifest.blobs[p as usize].raw_bytes()),
            segment_bytes: segment.raw_bytes(),
            stored_bytes: segment.stored_bytes(),
        }
    }
}

impl FeatureReport {
    fn new(schema: &Schema, i: usize) -> Self {
        let (feature, table) = (&schema.features[i], schema.table_of(i));
        Self {
            name: feature.name.clone(),
            table: table.name.clone(),
            pooling: lower(feature.pooling),
            hotness_max: feature.hotness_max,
        }
    }
}

impl InputReport {
    fn new(schema: &Schema, i: usize) -> Self {
        let input = &schema.network.inputs[i];
        let fed_by = match &input.source {
            InputSource::Dense => format!("{} dense features", schema.dense_features.len()),
            InputSource::Features(features) => format!("{} sparse features", features.len()),
        };
        Self { name: input.name.clone(), width: schema.input_width(input), fed_by }
    }
}

/// Reads every chunk of a bundle; returns what is wrong.
fn verify_bundle(bundle: &mut BundleReader) -> Vec<String> {
    let blobs = bundle.manifest().blobs.len() as u32;
    let read = |i| bundle.read_blob(i, |_| Ok::<(), BundleError>(())).err().map(|e| e.to_string());
    (0..blobs).filter_map(read).collect()
}

/// Reads every page of the live generation and every file beside them; returns what is wrong.
fn verify_flash(flash: &Flash) -> Vec<String> {
    let mut damage = Vec::new();
    for number in 0..flash.manifest().tables.len() {
        let scanned = flash.table(number).map(|t| {
            let mut segments = t.segments().iter().chain(t.placed());
            segments.try_for_each(|s| s.scan(|_, _| {}, |e| damage.push(e.to_string())))
        });
        match scanned {
            Err(e) => damage.push(e.to_string()),
            Ok(Err(e)) => damage.push(e.to_string()),
            Ok(Ok(())) => {}
        }
        damage.extend(flash.hot_keys(number).err().map(|e| e.to_string()));
    }
    damage.extend(flash.dense().err().map(|e| e.to_string()));
    damage.extend(flash.probe().err().map(|e| e.to_string()));
    damage
}

/// Runs the command.
///
/// # Errors
/// The path holds neither, or `--verify` found damage.
pub fn run(args: &InspectArgs) -> Result<()> {
    let mut report = if args.path.is_dir() {
        let flash = Flash::open(&hatchback::io::disk::system(), &args.path)?;
        let mut report = Report::new("flash directory", flash.manifest(), flash.bytes()?);
        report.damage = args.verify.then(|| verify_flash(&flash));
        report.scrub = ScrubReport::read(&flash);
        report
    } else {
        let mut bundle = BundleReader::open(&args.path)?;
        let bytes = bundle.manifest().blobs.iter().map(Blob::stored_bytes).sum();
        let mut report = Report::new("bundle", bundle.manifest(), bytes);
        report.damage = args.verify.then(|| verify_bundle(&mut bundle));
        report
    };
    match &args.json {
        Some(path) => report::write_json(path, &report)?,
        None => report.print(),
    }
    let damage = report.damage.take().map_or(0, |d| d.len());
    anyhow::ensure!(damage == 0, "{}: {damage} damaged places", args.path.display());
    Ok(())
}
