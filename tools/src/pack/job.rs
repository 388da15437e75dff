//! One run of `pack`: a model.toml and the choices of the command line. Packs a whole model; its
//! other methods pack some tables (`share.rs`) and merge such shares (`merge.rs`).

use super::codec_error::CodecError;
use super::ending::Ending;
use super::learn::{Learnt, learn};
use super::spec::{CodecChoice, ModelSpec, ProbeSpec, TableSpec};
use super::spec_line::{at_line, line_of};
use super::table::{Destination, write_table};
use super::{Overrides, Packed, network, read_samples, table_major, weights};
use crate::import::{FrequentRows, RowSource};
use crate::limits::HEADER_BYTES_MAX;
use crate::report::input;
use crate::report::temporary::Claim;
use anyhow::{Context, Error, Result, bail, ensure};
use hatchback::Codec;
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Generation, TableBlobs, sha256};
use hatchback::flash::Flash;
use hatchback::io::in_order::WorkPool;
use hatchback::schema::change::check_change;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Schema, SchemaError, Table};
use std::path::{Path, PathBuf};

/// A model.toml and the choices of the command line.
#[derive(Debug)]
pub struct PackJob {
    pub(super) spec: ModelSpec,
    pub(super) overrides: Overrides,
    /// The folder of the files of `spec`.
    pub(super) base: PathBuf,
    /// `None` if a program made `spec`.
    file: Option<SpecFile>,
}

/// A model.toml on disk.
#[derive(Debug)]
struct SpecFile {
    path: PathBuf,
    text: String,
}

/// The rows of one table.
pub(super) struct OpenedSource {
    pub(super) rows: Box<dyn RowSource>,
    /// Rows that were left out because they are rare; `None` if the table has no counts for that.
    pub(super) left_out: Option<u64>,
}

/// What a bundle has besides its tables, and a car needs to score.
pub(super) struct NetworkFiles {
    onnx: Vec<u8>,
    /// The encoded probe set.
    probe: Option<Vec<u8>>,
}

impl PackJob {
    /// Reads the model.toml at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or is no model.toml; the error names the line.
    pub fn read(path: &Path, overrides: Overrides) -> Result<Self> {
        let text =
            input::read_text(path, HEADER_BYTES_MAX).with_context(|| path.display().to_string())?;
        let spec = ModelSpec::parse(&text, path)?;
        let base = path.parent().unwrap_or(Path::new(".")).to_owned();
        let file = Some(SpecFile { path: path.to_owned(), text });
        Ok(Self { spec, overrides, base, file })
    }

    /// Makes a job of a `spec` that a program made. Its files are in the folder `base`.
    #[must_use]
    pub fn new(spec: ModelSpec, base: &Path, overrides: Overrides) -> Self {
        Self { spec, overrides, base: base.to_owned(), file: None }
    }

    /// Packs the model into the bundle `out`: with a `parent` as a delta from its live generation,
    /// with changed rows, new keys and deleted keys. A delta encodes each table as the parent does,
    /// unless the model.toml names another codec. A table that the parent does not have under its
    /// number, or has with another dim, key space or codec, is in the delta whole.
    /// Calls `progress` with the rows of each block that was read and with the total, twice the
    /// number of rows.
    ///
    /// # Errors
    /// A file is missing or wrong, or the parent cannot be read or has other tables. An error in
    /// model.toml names the line. No file is left at `out` then.
    pub fn pack(
        &self,
        parent: Option<&Flash>,
        out: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Packed> {
        let opened = (0..self.spec.tables.len()).map(|number| self.open_source(number));
        let opened: Vec<OpenedSource> = opened.collect::<Result<_>>()?;
        let left_out: Vec<Option<u64>> = opened.iter().map(|source| source.left_out).collect();
        let rows_left_out = self.sum_left_out(&left_out)?;
        let sources: Vec<_> = opened.into_iter().map(|source| source.rows).collect();
        Ok(Packed { rows_left_out, ..self.pack_rows(&sources, parent, out, progress)? })
    }

    /// Packs as [`Self::pack`] does, the rows of `sources`, one for each table, instead of those
    /// that the model.toml names.
    ///
    /// # Errors
    /// As [`Self::pack`].
    pub fn pack_rows(
        &self,
        sources: &[Box<dyn RowSource>],
        parent: Option<&Flash>,
        out: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Packed> {
        self.write(sources, parent, out, progress).map_err(|error| self.placed(error))
    }

    fn write(
        &self,
        sources: &[Box<dyn RowSource>],
        parent: Option<&Flash>,
        out: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Packed> {
        let generation = &self.generation()?;
        if let Some(parent) = parent {
            check_succession(generation, &parent.manifest().generation)?;
        }
        // Everything that needs no rows is read first, so that an error in it costs no pass over
        // the tables.
        let keys = self.spec.key_functions(&self.base)?;
        let draft = self.spec.schema(self.draft_tables(sources)?, &keys)?;
        if let Some(parent) = parent.map(Flash::manifest) {
            let changed = check_change(&parent.schema, &draft);
            changed.with_context(|| format!("callers of {} cannot use it", parent.generation))?;
        }
        let files = self.network_files(&draft)?;

        let total = 2 * sources.iter().map(|s| s.rows()).sum::<u64>();
        let mut advance = |rows: u64| progress(rows, total);
        let workers = &self.overrides.workers()?;
        let tables = self.learn_tables(sources, parent, workers, &mut advance)?;
        let schema = &self.spec.schema(tables, &keys)?;
        let _part = Claim::part_of(out);
        let mut bundle = BundleWriter::create_on(out, workers)?;
        let mut tables = Vec::new();
        for (number, source) in sources.iter().enumerate() {
            let destination = Destination { generation, schema, number, parent, workers };
            let written = write_table(&mut bundle, &destination, source.as_ref(), &mut advance);
            let named = || format!("table `{}`", schema.tables[number].name);
            let written = written.with_context(named)?;
            tables.push((written.blobs, written.error));
        }
        self.finish(bundle, schema, tables, files, parent)
    }

    /// Ends the bundle behind its `tables`, each with the error of its codec.
    pub(super) fn finish(
        &self,
        bundle: BundleWriter,
        schema: &Schema,
        tables: Vec<(TableBlobs, CodecError)>,
        files: NetworkFiles,
        parent: Option<&Flash>,
    ) -> Result<Packed> {
        let generation = &self.generation()?;
        let (tables, codec_errors) = tables.into_iter().unzip();
        let NetworkFiles { onnx, probe } = files;
        let ending = Ending { generation, parent, schema, tables, probe, deferral: None };
        let ended = match parent {
            // The rows of a delta alone do not score the probe set.
            Some(parent) => {
                let samples = ending.samples()?;
                ending.finish_delta(bundle, weights::as_parent(&onnx, schema, parent, &samples)?)
            }
            None => ending.finish_snapshot(bundle, onnx, self.overrides.probe_difference_max),
        }?;
        Ok(Packed {
            generation: generation.clone(),
            schema: schema.clone(),
            bytes: ended.bytes,
            dense_engine: schema.load_dense(ended.onnx)?.runs_on(),
            rows_left_out: 0,
            codec_errors,
            proof: ended.proof,
        })
    }

    /// Returns the generation that the model.toml names.
    pub(super) fn generation(&self) -> Result<Generation, SchemaError> {
        let (lineage, sequence) = (self.spec.name.clone(), self.spec.sequence);
        let generation = Generation { lineage, sequence };
        let named = |problem| SchemaError { field: "name".to_owned(), problem };
        generation.check().map_err(named)?;
        Ok(generation)
    }

    /// Returns a SHA-256 of the model.toml and of what the command line replaced.
    pub(super) fn hash(&self) -> [u8; 32] {
        let Overrides { codec, placement, min_count, .. } = self.overrides;
        let text = self.file.as_ref().map_or("", |file| &file.text);
        sha256(format!("{:?}\0{text}", (codec, placement, min_count)).as_bytes())
    }

    /// Opens the files of table `number`. With `--min-count` leaves out the rare rows of a sparse
    /// table that has counts.
    pub(super) fn open_source(&self, number: usize) -> Result<OpenedSource> {
        let table = &self.spec.tables[number];
        let field = || self.place(&format!("table[{number}].source"));
        let place = || format!("{}: table `{}`", field(), table.name);
        let rows = table.source.open(&self.base, table.dim).with_context(place)?;
        let least = self.overrides.min_count.filter(|_| table.keys == KeySpace::Sparse);
        let Some(least) = least.filter(|_| rows.has_counts()) else {
            return Ok(OpenedSource { rows: Box::new(rows), left_out: None });
        };
        let rows = FrequentRows::new(rows, least).with_context(place)?;
        let left_out = rows.left_out();
        // A table without rows grows by deltas; one whose rows are all rare is a mistake.
        ensure!(
            rows.rows() > 0 || left_out == 0,
            "table `{}`: --min-count {least}: no row was used so often",
            table.name
        );
        Ok(OpenedSource { rows: Box::new(rows), left_out: Some(left_out) })
    }

    /// Returns the sum of the rows that were left out of all tables. `left_out` has one element for
    /// each table.
    pub(super) fn sum_left_out(&self, left_out: &[Option<u64>]) -> Result<u64> {
        let least = self.overrides.min_count;
        if let (Some(least), true) = (least, left_out.iter().all(Option::is_none)) {
            bail!("--min-count {least}: no sparse table has `counts` in its source");
        }
        Ok(left_out.iter().flatten().sum())
    }

    /// Returns table `number` of the schema, as far as it is known before its rows are read.
    pub(super) fn draft_table(&self, table: &TableSpec, rows: u64) -> Result<Table> {
        Learnt::nothing(table).table(table, rows, self.overrides)
    }

    fn draft_tables(&self, sources: &[Box<dyn RowSource>]) -> Result<Vec<Table>> {
        let tables = self.spec.tables.iter().zip(sources);
        tables.map(|(table, source)| self.draft_table(table, source.rows())).collect()
    }

    /// Reads the rows of all tables once; returns the tables of the schema.
    fn learn_tables(
        &self,
        sources: &[Box<dyn RowSource>],
        parent: Option<&Flash>,
        workers: &WorkPool,
        advance: &mut dyn FnMut(u64),
    ) -> Result<Vec<Table>> {
        let mut tables = Vec::new();
        for (number, (table, source)) in self.spec.tables.iter().zip(sources).enumerate() {
            let learnt = learn(table, source.as_ref(), workers, advance)
                .with_context(|| format!("table `{}`", table.name))?;
            let mut table = learnt.table(table, source.rows(), self.overrides)?;
            if let Some(parent) = parent {
                let chosen = self.overrides.codec.unwrap_or(self.spec.tables[number].codec);
                encode_as_parent(&mut table, number, parent, chosen);
            }
            tables.push(table);
        }
        Ok(tables)
    }

    /// Reads the network and the probe set, and checks that both fit the schema.
    pub(super) fn network_files(&self, schema: &Schema) -> Result<NetworkFiles> {
        let encode = |probe: &ProbeSpec| -> Result<Vec<u8>> {
            let samples = read_samples(&self.base.join(&probe.samples), schema)?;
            Ok(Sample::encode_set(&samples)?)
        };
        let onnx = self.read_network(schema)?;
        Ok(NetworkFiles { onnx, probe: self.spec.probe.as_ref().map(encode).transpose()? })
    }

    fn read_network(&self, schema: &Schema) -> Result<Vec<u8>> {
        let network = &self.spec.network;
        let (path, onnx) = match (&network.onnx, &network.hugectr) {
            (Some(onnx), None) => {
                let path = self.base.join(onnx);
                let read = network::read(&path)?;
                let onnx = match network.table_major {
                    true => table_major::to_batch_major(&read, schema)
                        .with_context(|| path.display().to_string())?,
                    false => read,
                };
                (path, onnx)
            }
            (None, Some(hugectr)) if !network.table_major => {
                (self.base.join(&hugectr.dense), hugectr.read(&self.base)?)
            }
            _ => {
                let problem =
                    "takes one of `onnx` and `hugectr`; `table_major` belongs to `onnx`".to_owned();
                return Err(SchemaError { field: "network".to_owned(), problem }.into());
            }
        };
        let loaded = schema.load_dense(onnx.clone());
        let loaded = loaded.map_err(|error| network::with_batch(&onnx, error));
        loaded.with_context(|| path.display().to_string())?;
        Ok(onnx)
    }

    /// Returns the place of a field, in the form that editors open.
    fn place(&self, field: &str) -> String {
        match &self.file {
            Some(file) => at_line(&file.path, line_of(&file.text, field)),
            None => field.to_owned(),
        }
    }

    /// Returns the error with the line of model.toml that it is about.
    fn placed(&self, error: Error) -> Error {
        match error.downcast_ref::<SchemaError>() {
            Some(SchemaError { field, .. }) if self.file.is_some() => {
                let place = self.place(field);
                error.context(place)
            }
            _ => error,
        }
    }

    /// Returns the number of the table `name`.
    pub(super) fn number_of(&self, name: &str) -> Result<usize> {
        let number = self.spec.tables.iter().position(|table| table.name == *name);
        let path = self.file.as_ref().map_or(Path::new("model.toml"), |file| &file.path);
        number.with_context(|| format!("{}: has no table `{name}`", path.display()))
    }
}

/// Returns an error unless `generation` may follow `parent`.
fn check_succession(generation: &Generation, parent: &Generation) -> Result<(), SchemaError> {
    let fault = |field: &str, problem| Err(SchemaError { field: field.to_owned(), problem });
    if generation.lineage != parent.lineage {
        let problem = format!("`{}`, the parent's is `{}`", generation.lineage, parent.lineage);
        return fault("name", problem);
    }
    if generation.sequence <= parent.sequence {
        let (ours, theirs) = (generation.sequence, parent.sequence);
        return fault("sequence", format!("{ours} is not above the parent's, {theirs}"));
    }
    Ok(())
}

/// Gives `table` the encoding of the parent's table `number`, if that is the same table and no
/// other codec was `chosen`: a delta compares encoded rows byte for byte with the rows that they
/// replace.
fn encode_as_parent(table: &mut Table, number: usize, parent: &Flash, chosen: CodecChoice) {
    let Some(old) = parent.manifest().schema.tables.get(number) else { return };
    let is_same = (&table.name, table.dim, table.keys) == (&old.name, old.dim, old.keys);
    // `auto` takes f32 only for values that no other codec holds.
    let holds = table.codec != Codec::F32 || old.codec == Codec::F32;
    if is_same && (chosen == CodecChoice::Auto && holds || table.codec == old.codec) {
        (table.codec, table.unit_exp) = (old.codec, old.unit_exp);
    }
}
