//! The steady state: installs delta after delta as a car does, and runs maintenance by its own
//! rules between them. Counts the written bytes, so the figures are the same on every machine.
//! Never measures times.

use super::data::{Data, Draw};
use super::fetch::Fetcher;
use super::figures::{Figures, OURS, measure};
use anyhow::{Context, Result};
use hatchback::bundle::manifest::{Generation, Manifest, TableBlobs};
use hatchback::bundle::{BundleReader, BundleWriter};
use hatchback::flash::Flash;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::io::disk;
use hatchback::limits::PAGE_BYTES;
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{
    DenseFeature, Feature, InputSource, KeySpace, MissPolicy, Network, NetworkInput, NetworkOutput,
    Placement, Schema, Table,
};
use hatchback::{Activation, Codec, Pooling};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Deltas, each of one row in a hundred.
const DELTAS: u64 = 48;
/// Most rows of the table.
const COUNTED_ROWS: u64 = 2_000_000;
/// The network of the synthetic model. The bench never runs it.
const DENSE_ONNX: &[u8] = include_bytes!("../../../tools/demo/criteo/dense.onnx");
/// Features of the network.
const FEATURES: u16 = 26;
/// Values in a row.
const DIM: u32 = 32;
/// Bytes of a row of f32.
const ROW_BYTES: usize = 4 * DIM as usize;
/// Pages of one step of maintenance.
const STEP_PAGES: u64 = 4096;
/// Time from one delta to the next.
const EVERY: Duration = Duration::from_secs(60 * 60);

/// Installs all deltas with maintenance between them. Adds the written bytes over those of the
/// changed rows to `figures`.
///
/// # Errors
/// A file cannot be written or read, or a row is wrong after the last delta.
pub fn measure(data: &Data, folder: &Path, figures: &mut Figures) -> Result<()> {
    let data = Data { rows: data.rows.min(COUNTED_ROWS), row_bytes: ROW_BYTES };
    let (path, directory) = (folder.join("bundle"), folder.join("flash"));
    let mut flash = install(&data, 0, &path, &directory)?.flash;
    let mut maintenance =
        Maintenance::new(MaintenanceRules::default(), None, CatalogEntries::default());
    let (mut written, mut changed, mut compactions) = (0, 0, 0);
    let mut at_compaction = None;

    for delta in 1..=DELTAS {
        let installed = install(&data, delta, &path, &directory)?;
        flash = installed.flash;
        (written, changed) = (written + installed.written, changed + installed.row_bytes);
        let now = EVERY * delta as u32;
        loop {
            match maintenance.step(&mut flash, now, STEP_PAGES)? {
                StepOutcome::Compacted { compacted, .. } => {
                    written += compacted.bytes + PAGE_BYTES as u64;
                    compactions += 1;
                    at_compaction = Some((written, changed));
                }
                StepOutcome::Merged { .. } => {}
                _ => break,
            }
        }
    }

    let rows = flash.table(0)?;
    let keys = Draw::new(data, 5)?.uniform(1000);
    let mut out = vec![0; keys.len() * data.row_bytes];
    Fetcher::new(16).fetch(&rows, &keys, &mut out)?;
    data.check(&keys, DELTAS, &out).context("after the last delta")?;

    // Only whole cycles count: the deltas since the last compaction have not paid for theirs.
    let (written, changed) = at_compaction.unwrap_or((written, changed));
    figures.put(OURS, measure::STEADY_AMP, written as f64 / changed.max(1) as f64);
    figures.put(OURS, measure::COMPACTIONS, f64::from(compactions));
    let row_bytes = (data.rows * ROW_BYTES as u64) as f64;
    figures.put(OURS, measure::STEADY_SPACE, rows.file_bytes() as f64 / row_bytes);
    Ok(())
}

/// The result of an install.
struct Installed {
    flash: Flash,
    /// Bytes of the changed rows, without their keys.
    row_bytes: u64,
    /// Bytes written: the segment, the manifest and the live record.
    written: u64,
}

/// Packs the rows that delta number `delta` changes (0: all rows) and installs them.
fn install(data: &Data, delta: u64, path: &Path, directory: &Path) -> Result<Installed> {
    let schema = schema(data);
    let generation = Generation { lineage: "bench".to_owned(), sequence: delta + 1 };
    let part = if delta == 0 { Part::Base } else { Part::Delta };
    let kind = SegmentKind::new(&generation, 0, 0, &schema.tables[0], part)
        .context("a row without a codec")?;

    let mut bundle = BundleWriter::create(path)?;
    let (segment, blob) = bundle.blob();
    let mut writer = SegmentWriter::new(blob, kind);
    let push = |order, row: &[u8]| Ok(writer.push(order, row)?);
    if delta == 0 {
        data.each_row(push)?
    } else {
        data.each_changed_by(delta, push)?
    };
    let (blob, counts) = writer.finish()?;
    blob.end()?;

    let (dense, mut blob) = bundle.blob();
    blob.write_all(DENSE_ONNX)?;
    blob.end()?;

    // Delta `n` has the sequence `n + 1`, and its parent the sequence `n`.
    let parent = (delta > 0).then_some(delta);
    let tables = vec![TableBlobs { segment, hot: None, whole: false }];
    bundle.finish(Manifest {
        generation,
        parent,
        schema,
        blobs: Vec::new(),
        tables,
        dense,
        probe: None,
        packed_on: None,
        deferral: None,
        restored: None,
    })?;

    let mut bundle = BundleReader::open(path)?;
    let manifest_bytes = bundle.manifest_bytes().len() as u64;
    let flash = Flash::install(&disk::system(), directory, &mut bundle, |_| ())?;
    let written = counts.file_bytes() + manifest_bytes + PAGE_BYTES as u64;
    Ok(Installed { flash, row_bytes: counts.rows * data.row_bytes as u64, written })
}

fn schema(data: &Data) -> Schema {
    let table = Table {
        name: "rows".to_owned(),
        dim: DIM,
        keys: KeySpace::Sparse,
        rows: data.rows,
        codec: Codec::F32,
        unit_exp: 0,
        placement: Placement::Cached,
        miss: MissPolicy::Wait,
        default_row: vec![0.0; DIM as usize],
    };

    let feature = |f| Feature::plain(&format!("f{f}"), 1);
    let lookup = |feature| Lookup { feature, table: 0, pooling: Pooling::Sum };
    let input = |name: &str, source| NetworkInput { name: name.to_owned(), source };
    let inputs = vec![
        input("dense", InputSource::Dense),
        input("emb", InputSource::Vectors((0..FEATURES).collect())),
    ];

    let output = NetworkOutput { name: "logit".to_owned(), activation: Activation::Sigmoid };
    let network = Network { inputs, outputs: vec![output] };
    let dense_features = (0..13).map(|n| DenseFeature::plain(&format!("int_{n}"))).collect();

    Schema {
        dense_features,
        tables: vec![table],
        features: (0..FEATURES).map(feature).collect(),
        lookups: (0..FEATURES).map(lookup).collect(),
        network,
    }
}
