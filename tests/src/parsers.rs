//! The list of all parsers of bytes from outside. None may panic, hang or take unbounded memory on
//! any bytes. The smoke test here and the fuzz targets in `fuzz/` use the list.
//!
//! A parser after a checksum or a hash gets the bytes twice: unchanged, and with every checksum
//! made valid, so that the code after the check runs. Layouts of several files arrive as one byte
//! string, which [`split`] divides.

use crate::goldens;
use crate::rewrite::{self, Parts};
use hatchback::bundle::manifest::{Generation, Manifest};
use hatchback::bundle::{BundleError, BundleReader};
use hatchback::flash::live::LiveRecord;
use hatchback::flash::segment::verifier::SegmentVerifier;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::io::page::{Page, PageBytes, PageKind};
use hatchback::io::paired_record::PairedRecord;
use hatchback::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement, Schema, Table};
use hatchback::targets::Target;
use hatchback::update::accepted::Accepted;
use hatchback::update::fetch_status::FetchStatus;
use hatchback::update::install_status::InstallStatus;
use hatchback::update::rollback_floor::RollbackFloor;
use hatchback::{Codec, DenseEngine, Weights};
use hatchback_kernels::dense::{narrow_all, widen};
use hatchback_tools::import::{ImportError, RowBlock, Rows, Source};
use hatchback_tools::pack::spec::ModelSpec;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// Parses bytes; the result does not matter.
pub type Parser = fn(&[u8]);

/// Every parser with its name, which is also the name of its fuzz target.
pub const PARSERS: &[(&str, Parser)] = &[
    ("manifest", manifest),
    ("bundle", bundle),
    ("live_record", live_record),
    ("fetch_status", fetch_status),
    ("install_status", install_status),
    ("accepted", accepted),
    ("floor", floor),
    ("segment", segment),
    ("page", page),
    ("sample", sample),
    ("probe_set", probe_set),
    ("grpc_infer", grpc_infer),
    ("http_infer", http_infer),
    ("model_spec", model_spec),
    ("target", target),
    ("safetensors", safetensors),
    ("npy", npy),
    ("hugectr", hugectr),
    ("sok", sok),
    ("embedding_collection", embedding_collection),
    ("onnx", onnx),
];

/// Returns a folder with these files, in memory if possible.
fn files(files: &[(&str, &[u8])]) -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() {
        tempfile::tempdir_in(memory).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    };
    files.iter().for_each(|(name, bytes)| std::fs::write(folder.path().join(name), bytes).unwrap());
    folder
}

/// Joins files to one byte string: each but the last has its length in front, two bytes,
/// little-endian.
pub fn join(files: &[&[u8]]) -> Vec<u8> {
    let (last, first) = files.split_last().unwrap();
    let with_length = |f: &&[u8]| [&(f.len() as u16).to_le_bytes(), *f].concat();
    let mut joined: Vec<u8> = first.iter().flat_map(with_length).collect();
    joined.extend_from_slice(last);
    joined
}

/// The inverse of [`join`], on any bytes.
pub fn split<const N: usize>(mut bytes: &[u8]) -> [&[u8]; N] {
    std::array::from_fn(|i| {
        let length = match bytes.split_first_chunk() {
            Some((length, rest)) if i + 1 < N => {
                bytes = rest;
                usize::from(u16::from_le_bytes(*length)).min(bytes.len())
            }
            _ => bytes.len(),
        };
        let (file, rest) = bytes.split_at(length);
        bytes = rest;
        file
    })
}

/// Parses a manifest. A decoded manifest encodes to bytes that decode to the same manifest.
pub fn manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        assert_eq!(Manifest::decode(&manifest.encode().unwrap()).as_ref(), Ok(&manifest));
    }
}

/// Opens a bundle, reads every blob and checks every segment.
pub fn bundle(bytes: &[u8]) {
    read_bundle(bytes);
    if let Some(parts) = Parts::parse(bytes) {
        read_bundle(&parts.bytes());
    }
}

fn read_bundle(bytes: &[u8]) {
    let folder = files(&[("b", bytes)]);
    let Ok(mut bundle) = BundleReader::open(&folder.path().join("b")) else { return };
    let manifest = bundle.manifest().clone();
    for blob in 0..manifest.blobs.len() as u32 {
        let _ = bundle.read_blob(blob, |_| Ok::<(), BundleError>(()));
    }
    let layers = |number| manifest.layers(number).into_iter().enumerate();
    let layers = (0..manifest.tables.len()).flat_map(|t| layers(t).map(move |(n, l)| (t, n, l)));
    for (number, serial, layer) in layers {
        let declared = &manifest.schema.tables[number];
        let is_delta = serial > 0 || manifest.is_delta(number);
        let part = if is_delta { Part::Delta } else { Part::Base };
        let origin = Generation { sequence: layer.sequence, ..manifest.generation.clone() };
        let kind = SegmentKind::new(&origin, 0, number, declared, part).expect("a checked schema");
        let rows = rows_over(part, declared);
        let mut check = SegmentVerifier::new(Path::new("segment"), kind, rows);
        let _ = bundle.read_blob(layer.segment, |chunk| {
            let _ = check.take(chunk);
            Ok::<(), BundleError>(())
        });
        let _ = check.finish();
    }
    if let Some(Ok(set)) = manifest.probe.map(|blob| bundle.blob(blob)) {
        let _ = Sample::decode_set(&set);
    }
}

/// Returns the row counts before and after a segment; a delta adds no row.
fn rows_over(part: Part, table: &Table) -> Range<u64> {
    (if part == Part::Delta { table.rows } else { 0 })..table.rows
}

/// Parses a live record.
pub fn live_record(bytes: &[u8]) {
    paired::<LiveRecord>(bytes);
}

/// Parses a record of the sync process.
pub fn fetch_status(bytes: &[u8]) {
    paired::<FetchStatus>(bytes);
}

/// Parses a record of the serving process.
pub fn install_status(bytes: &[u8]) {
    paired::<InstallStatus>(bytes);
}

/// Parses a record of what the serving process trusts.
pub fn accepted(bytes: &[u8]) {
    paired::<Accepted>(bytes);
}

/// Parses a rollback floor record.
pub fn floor(bytes: &[u8]) {
    paired::<RollbackFloor>(bytes);
}

fn paired<T: PairedRecord + Debug + PartialEq>(bytes: &[u8]) {
    with_valid_checksum(bytes, |bytes| {
        if let Ok((writes, record)) = T::decode(bytes) {
            assert_eq!(T::decode(&record.encode(writes)), Ok((writes, record)));
        }
    });
}

/// Parses the record unchanged, and with a valid checksum.
fn with_valid_checksum(bytes: &[u8], parse: impl Fn(&[u8])) {
    parse(bytes);
    let mut fixed = bytes.to_vec();
    if let Some((header, body)) = fixed.split_at_mut_checked(16) {
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&header[..12]), body);
        header[12..].copy_from_slice(&checksum.to_le_bytes());
        parse(&fixed);
    }
}

/// Returns a table of the golden segments.
pub fn golden_table(keys: KeySpace, codec: Codec, rows: u64) -> Table {
    Table {
        name: "t".to_owned(),
        dim: 8,
        keys,
        rows,
        codec,
        unit_exp: 0,
        placement: Placement::Cached,
        miss: MissPolicy::Wait,
        default_row: vec![0.0; 8],
    }
}

/// Returns the tables of the golden segments.
pub fn golden_tables() -> [Table; 4] {
    [
        golden_table(KeySpace::Sparse, Codec::U8, 600),
        golden_table(KeySpace::Index, Codec::F32, 300),
        golden_table(KeySpace::Sparse, Codec::F16, 5),
        golden_table(KeySpace::Index, Codec::U4, 1500),
    ]
}

/// Returns the generation of the golden segments.
pub fn golden_generation() -> Generation {
    Generation { lineage: "golden".to_owned(), sequence: 1 }
}

/// Checks a segment as it arrives in a bundle.
pub fn segment(bytes: &[u8]) {
    check_segment(bytes);
    let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
    let mut pages = pages.to_vec();
    pages.iter_mut().for_each(rewrite::reseal);
    check_segment(&pages.concat());
    check_segment(&[&pages.concat(), rest].concat());
}

fn check_segment(bytes: &[u8]) {
    for (number, table) in golden_tables().iter().enumerate() {
        for part in [Part::Base, Part::Delta] {
            let kind = SegmentKind::new(&golden_generation(), 0, number, table, part).unwrap();
            let mut check =
                SegmentVerifier::new(Path::new("segment"), kind, rows_over(part, table));
            if check.take(bytes).is_ok() {
                let _ = check.finish();
            }
        }
    }
}

/// Checks one page as every kind. An accepted page can be read to its last entry.
pub fn page(bytes: &[u8]) {
    let mut page = [0; PAGE_BYTES];
    let n = bytes.len().min(PAGE_BYTES);
    page[..n].copy_from_slice(&bytes[..n]);
    check_page(&page);
    rewrite::reseal(&mut page);
    check_page(&page);
}

fn check_page(bytes: &PageBytes) {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let payload = PAGE_BYTES - PAGE_HEADER_BYTES;
    let kinds = [
        (PageKind::Index, 32),
        (PageKind::Hashed, 8 + 12),
        (PageKind::Fences, 4),
        (PageKind::Trailer, 4080),
        (PageKind::Deletes, 8),
    ];
    for (kind, entry) in kinds {
        let Ok(page) = Page::check(bytes, word(4), word(8), kind, payload / entry) else {
            continue;
        };
        if matches!(kind, PageKind::Hashed | PageKind::Deletes) {
            let _ = page.check_order(None).and(page.check_order(Some(page.order(0))));
        }
        for i in 0..page.count() {
            match kind {
                PageKind::Index => assert_eq!(page.row(kind, 32, i).len(), 32),
                PageKind::Hashed => {
                    assert_eq!(page.row(kind, 12, i).len(), 12);
                    let _ = page.position(page.order(i));
                }
                PageKind::Deletes => drop(page.order(i)),
                PageKind::Fences | PageKind::Trailer => assert!(4 * i < page.payload().len()),
                PageKind::KeySteps => unreachable!("segments read their steps"),
            }
        }
    }
}

/// Parses a sample, a line of JSON, with the schema of a golden model.
pub fn sample(bytes: &[u8]) {
    thread_local!(static SCHEMA: Schema = goldens::schema());
    SCHEMA.with(|schema| {
        if let Ok(sample) = Sample::from_json(&String::from_utf8_lossy(bytes), schema) {
            sample.check(schema).expect("a parsed sample is checked");
        }
    });
}

/// Samples of a request in the fuzz targets of the front door.
const BATCH_MAX: usize = 8;

/// Returns the schema of a golden model.
fn golden_schema() -> Arc<Schema> {
    thread_local!(static SCHEMA: Arc<Schema> = Arc::new(goldens::schema()));
    SCHEMA.with(Arc::clone)
}

/// Decodes a request for scores over gRPC.
pub fn grpc_infer(bytes: &[u8]) {
    if let Ok(batch) = hatchback_server::decode_request(bytes, None, &golden_schema(), BATCH_MAX) {
        assert!((1..=BATCH_MAX).contains(&batch.size()));
    }
}

/// Decodes a request for scores over HTTP; the first two bytes are the length of its JSON.
pub fn http_infer(bytes: &[u8]) {
    let Some((length, body)) = bytes.split_first_chunk::<2>() else { return };
    let length = usize::from(u16::from_le_bytes(*length));
    if let Ok(batch) =
        hatchback_server::decode_request(body, Some(length), &golden_schema(), BATCH_MAX)
    {
        assert!((1..=BATCH_MAX).contains(&batch.size()));
    }
}

/// Parses an encoded probe set.
pub fn probe_set(bytes: &[u8]) {
    if let Ok(samples) = Sample::decode_set(bytes) {
        assert_eq!(
            Sample::decode_set(&Sample::encode_set(&samples).unwrap()).unwrap().len(),
            samples.len()
        );
    }
}

/// Parses `model.toml` as far as possible without rows.
pub fn model_spec(bytes: &[u8]) {
    let folder = files(&[("model.toml", bytes)]);
    let Ok(spec) = ModelSpec::load(&folder.path().join("model.toml")) else { return };
    let Ok(keys) = spec.key_functions(folder.path()) else { return };
    let table = |t: &hatchback_tools::pack::spec::TableSpec| Table {
        name: t.name.clone(),
        dim: t.dim as u32,
        keys: t.keys,
        placement: t.placement,
        miss: t.miss,
        default_row: vec![0.0; t.dim.min(1 << 16)],
        codec: t.codec.resolve(100, t.dim.min(1 << 16)),
        ..golden_table(t.keys, Codec::F32, 100)
    };
    if let Ok(schema) = spec.schema(spec.tables.iter().map(table).collect(), &keys) {
        schema.check().expect("a made schema is checked");
    }
    for table in &spec.tables {
        let _ = table.source.open(folder.path(), table.dim);
    }
}

/// Parses a target beside the repository's `base.toml`.
pub fn target(bytes: &[u8]) {
    let base = include_bytes!("../../targets/base.toml");
    let folder = files(&[("t.toml", bytes), ("base.toml", base)]);
    let _ = Target::load(&folder.path().join("t.toml"));
}

/// Opens a table of any width and reads all keys, values and counts.
fn import(folder: &TempDir, source: &Source) {
    match source.open(folder.path(), 4) {
        Ok(rows) => read_rows(&rows),
        Err(ImportError::Dim { dim, .. }) => {
            if let Ok(rows) = source.open(folder.path(), dim as usize) {
                read_rows(&rows);
            }
        }
        Err(_) => {}
    }
}

fn read_rows(rows: &Rows) {
    if let Ok(Some(counts)) = rows.counts() {
        assert_eq!(counts.len() as u64, rows.rows());
    }
    let (Ok(mut blocks), mut block, mut seen) = (rows.blocks(), RowBlock::default(), 0) else {
        return;
    };
    loop {
        match blocks.next(&mut block) {
            Ok(true) => {
                assert_eq!(block.rows.len(), block.keys.len() * rows.dim());
                assert!(block.rows.iter().all(|v| v.is_finite()));
                seen += block.keys.len() as u64;
            }
            Ok(false) => return assert_eq!(seen, rows.rows()),
            Err(_) => return,
        }
    }
}

/// Imports a safetensors file with the tensors of the golden one, with and without keys.
pub fn safetensors(bytes: &[u8]) {
    let folder = files(&[("m", bytes)]);
    for (tensor, keys, counts) in
        [("plain", None, None), ("sparse.rows", Some("sparse.keys"), Some("sparse.counts"))]
    {
        let [keys, counts] = [keys, counts].map(|name: Option<&str>| name.map(str::to_owned));
        import(
            &folder,
            &Source::Safetensors { path: "m".into(), tensor: tensor.to_owned(), keys, counts },
        );
    }
}

/// Imports two NumPy arrays: keys and values.
pub fn npy(bytes: &[u8]) {
    let [keys, values] = split(bytes);
    let folder = files(&[("k", keys), ("v", values)]);
    for keys in [None, Some("k".into())] {
        import(&folder, &Source::Npy { path: "v".into(), counts: keys.clone(), keys });
    }
}

/// Imports a HugeCTR folder, whole and as ranges of keys: `key`, `meta`, `emb_vector`.
pub fn hugectr(bytes: &[u8]) {
    let [key, meta, values] = split(bytes);
    let folder = files(&[("key", key), ("meta", meta), ("emb_vector", values)]);
    import(&folder, &Source::Hugectr { path: "".into() });
    for (first, rows) in [(0, None), (1, Some(1)), (u64::MAX, Some(2))] {
        import(&folder, &Source::Deployed { path: "".into(), first, rows });
    }
}

/// Imports a dump of the Sparse Operation Kit: key, `meta_info`, weight.
pub fn sok(bytes: &[u8]) {
    let [key, meta, weight] = split(bytes);
    let folder =
        files(&[("emb_user_0-key", key), ("meta_info", meta), ("emb_user_0-weight", weight)]);
    import(&folder, &Source::Sok { path: "".into(), table: "emb/user:0".to_owned() });
    std::fs::remove_file(folder.path().join("meta_info")).unwrap();
    import(&folder, &Source::Sok { path: "".into(), table: "emb/user:0".to_owned() });
}

/// Imports a folder of a HugeCTR EmbeddingCollection: `meta_data`, `key1`, `weight1`.
pub fn embedding_collection(bytes: &[u8]) {
    let [meta, key, weight] = split(bytes);
    let folder = files(&[("meta_data", meta), ("key1", key), ("weight1", weight)]);
    import(&folder, &Source::EmbeddingCollection { path: "".into(), table: 1 });
}

/// Loads the ONNX file as the dense network of each model family.
pub fn onnx(bytes: &[u8]) {
    let load = |inputs: &[(&str, usize)], output| {
        let _ = DenseEngine::load(bytes.to_vec(), inputs, output, hatchback::Activation::None);
    };
    load(&[("dense", 2), ("a", 34)], "out");
    load(&[("dense", 3), ("emb", 48)], "logit");
    load(&[("dense", 3), ("emb", 28)], "logit");
    load(&[("dense", 3), ("first", 4), ("second", 20)], "logit");
    load(&[("dense", 3), ("wide", 2), ("deep", 35)], "logit");
    load(&[("dense", 3), ("emb", 15)], "ctr");
    load(&[("dense", 3), ("target", 6), ("history", 30)], "logit");
    load(&[("dense", 3), ("target", 6), ("history", 24)], "logit");
    load(&[("dense", 3), ("target", 8), ("history", 40)], "logit");
    load(&[("x", 4), ("y", 12), ("z", 6)], "out");
    let _ = widen(bytes.to_vec());
    for weights in [Weights::F16, Weights::Int8] {
        let _ = narrow_all(bytes, weights);
    }
}
