//! Packs a snapshot by shares: each worker packs some of the tables, and a merge makes the bundle
//! that one `pack` would make, byte for byte. A worker needs the sources of its own tables only. A
//! table of a share has two files: its compressed blobs, and a head, which is renamed into place
//! last. A worker that is killed leaves no head for its table in hand, and runs again.

use super::spec::ModelSpec;
use super::spec_line::{at_line, line_of};
use super::table::{Destination, write_blob, write_table};
use super::{DenseNetwork, OpenedSources, Overrides, Packed, draft_tables, learn, open_sources};
use super::{check_name, read_network, read_probe, read_requests};
use crate::import::RowSource;
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Blob, Generation, Manifest, TableBlobs, sha256};
use hatchback::io::atomic_write::replace;
use hatchback::io::disk::SystemDisk;
use hatchback::schema::Table;
use hatchback::schema::key_function::KeyFunction;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The format of the head of a table in a share.
const HEAD_FORMAT: u32 = 1;
/// Shares of a model at most.
const SHARES_MAX: usize = 4096;

/// One of several shares of a model: `2/5` is the second of five.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    number: usize,
    of: usize,
}

impl FromStr for Share {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (number, of) = text.split_once('/').context("is not NUMBER/SHARES, such as 2/5")?;
        let (number, of) = (number.parse()?, of.parse()?);
        ensure!((1..=SHARES_MAX).contains(&of), "is not one of 1 to {SHARES_MAX} shares");
        ensure!((1..=of).contains(&number), "is not a number from 1 to {of}");
        Ok(Self { number, of })
    }
}

/// A packed table of a share.
#[derive(Serialize, Deserialize)]
struct Head {
    format: u32,
    /// SHA-256 of the model.toml, and what the command line replaced.
    model: [u8; 32],
    number: u32,
    table: Table,
    tables: TableBlobs,
    blobs: Vec<Blob>,
}

/// A model.toml that is open.
struct OpenModel {
    spec: ModelSpec,
    sources: Vec<Box<dyn RowSource>>,
    rows_left_out: u64,
    keys: Vec<KeyFunction>,
    base: PathBuf,
    hash: [u8; 32],
}

impl OpenModel {
    fn open(path: &Path, overrides: Overrides) -> Result<Self> {
        let shown = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(shown)?;
        let spec = ModelSpec::parse(&text, path)?;
        let base = path.parent().unwrap_or(Path::new(".")).to_owned();
        let at = |field: &str| at_line(path, line_of(&text, field));
        let opened = open_sources(&spec, &base, overrides.min_count, &at)?;
        let OpenedSources { sources, rows_left_out } = opened;
        let keys = spec.key_functions(&base)?;
        let hash = sha256(format!("{overrides:?}\0{text}").as_bytes());
        Ok(Self { spec, sources, rows_left_out, keys, base, hash })
    }

    fn generation(&self) -> Result<Generation> {
        let (lineage, sequence) = (self.spec.name.clone(), self.spec.sequence);
        let generation = Generation { lineage, sequence };
        check_name(&generation)?;
        Ok(generation)
    }

    /// Returns the tables of `share`. The largest table comes first, and each goes to the share
    /// that has the fewest values.
    fn tables_of(&self, share: Share) -> Vec<usize> {
        let values = |number: &usize| {
            self.sources[*number].rows().saturating_mul(self.spec.tables[*number].dim as u64)
        };
        let mut sorted: Vec<usize> = (0..self.sources.len()).collect();
        sorted.sort_by_key(|number| (std::cmp::Reverse(values(number)), *number));
        let mut loads = vec![0u64; share.of];
        let mut ours = Vec::new();
        for number in sorted {
            let least = (0..share.of).min_by_key(|at| (loads[*at], *at)).unwrap_or_default();
            loads[least] = loads[least].saturating_add(values(&number));
            if least + 1 == share.number {
                ours.push(number);
            }
        }
        ours
    }
}

fn blobs_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.blobs"))
}

fn head_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.head"))
}

/// Packs the tables of `share` of the model.toml at `path` into `folder`, which may hold other
/// shares too. Returns the numbers of the tables. A table that `folder` has already is not packed
/// again.
///
/// # Errors
/// The model.toml or a source is refused, or a file cannot be written.
pub fn pack_share(
    path: &Path,
    share: Share,
    folder: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<usize>> {
    let model = OpenModel::open(path, overrides)?;
    let generation = model.generation()?;
    let mut tables = draft_tables(&model.spec, &model.sources, overrides)?;
    let draft = model.spec.schema(tables.clone(), &model.keys)?;
    let requests = read_requests(&model.spec, &draft, &model.base)?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;

    let ours = model.tables_of(share);
    let total = 2 * ours.iter().map(|number| model.sources[*number].rows()).sum::<u64>();
    for &number in &ours {
        if read_head(folder, number).is_ok_and(|head| head.model == model.hash) {
            continue;
        }
        let (spec, source) = (&model.spec.tables[number], model.sources[number].as_ref());
        let place = || format!("table `{}`", spec.name);
        let mut advance = |rows: u64| progress(rows, total);
        let learnt = learn(spec, source, &mut advance).with_context(place)?;
        tables[number] = learnt.table(spec, source.rows(), overrides)?;
        let schema = model.spec.schema(tables.clone(), &model.keys)?;

        let mut bundle = BundleWriter::create(&blobs_path(folder, number))?;
        let generation = &generation;
        let destination =
            Destination { generation, schema: &schema, number, parent: None, requests: &requests };
        let blobs = write_table(&mut bundle, &destination, source, &mut advance);
        let head = Head {
            format: HEAD_FORMAT,
            model: model.hash,
            number: number as u32,
            table: schema.tables[number].clone(),
            tables: blobs.with_context(place)?,
            blobs: bundle.finish_part()?,
        };
        let path = head_path(folder, number);
        let bytes = postcard::to_allocvec(&head).with_context(place)?;
        replace(&SystemDisk, &path, &bytes).with_context(|| path.display().to_string())?;
    }
    Ok(ours)
}

fn read_head(folder: &Path, number: usize) -> Result<Head> {
    let path = head_path(folder, number);
    let shown = || path.display().to_string();
    let bytes = std::fs::read(&path).with_context(shown)?;
    let head: Head = postcard::from_bytes(&bytes).with_context(shown)?;
    ensure!(head.format == HEAD_FORMAT, "{}: format: is {}", shown(), head.format);
    ensure!(head.number as usize == number, "{}: number: is {}", shown(), head.number);
    Ok(head)
}

/// Makes the bundle `out` of the model.toml at `path` from the shares in `folders`.
///
/// # Errors
/// A table is in no folder, a share is of another model.toml or damaged, or a file cannot be
/// written.
pub fn merge_shares(
    path: &Path,
    folders: &[PathBuf],
    out: &Path,
    overrides: Overrides,
) -> Result<Packed> {
    let model = OpenModel::open(path, overrides)?;
    let generation = model.generation()?;
    let mut heads = Vec::new();
    for (number, table) in model.spec.tables.iter().enumerate() {
        let holder = folders.iter().find(|folder| head_path(folder, number).is_file());
        let Some(folder) = holder else { bail!("table `{}` is in none of the shares", table.name) };
        let head = read_head(folder, number)?;
        ensure!(
            head.model == model.hash,
            "{}: model: is a share of another model.toml, or of other --codec or --placement",
            head_path(folder, number).display()
        );
        heads.push((folder, head));
    }

    let tables = heads.iter().map(|(_, head)| head.table.clone()).collect();
    let schema = model.spec.schema(tables, &model.keys)?;
    let DenseNetwork { onnx, dense_engine } = read_network(&model.spec, &schema, &model.base)?;
    let probe = read_probe(&model.spec, &schema, &model.base)?;
    let mut bundle = BundleWriter::create(out)?;
    let mut tables = Vec::new();
    for (number, (folder, head)) in heads.into_iter().enumerate() {
        let path = blobs_path(folder, number);
        let mut file = File::open(&path).with_context(|| path.display().to_string())?;
        let first = bundle.blobs().len() as u32;
        bundle.copy_part(&head.blobs, &path, &mut file)?;
        let TableBlobs { segment, hot, clustered } = head.tables;
        tables.push(TableBlobs {
            segment: first + segment,
            hot: hot.map(|blob| first + blob),
            clustered: clustered.map(|blob| first + blob),
        });
    }

    let dense = write_blob(&mut bundle, &onnx)?;
    let probe = probe.map(|bytes| write_blob(&mut bundle, &bytes)).transpose()?;
    let manifest = Manifest {
        generation: generation.clone(),
        parent: None,
        schema: schema.clone(),
        blobs: Vec::new(),
        tables,
        dense,
        probe,
        deferral: None,
    };
    let bytes = bundle.finish(manifest)?;
    let rows_left_out = model.rows_left_out;
    Ok(Packed { generation, schema, bytes, dense_engine, rows_left_out })
}
