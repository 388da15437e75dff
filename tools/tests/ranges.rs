//! Tables that are packed by ranges of their rows merge into the bundle of one `pack`, byte for
//! byte: random tables, cut at random.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tools::import::onnx_writer::{Graph, Type, int};
use hatchback_tools::pack::merge::merge_shares;
use hatchback_tools::pack::range::{TableRange, learn_range, pack_range};
use hatchback_tools::pack::share::{Part, Share, pack_part};
use hatchback_tools::pack::{Overrides, pack_file};
use proptest::prelude::*;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const CODECS: [&str; 4] = ["f32", "f16", "u8", "u4"];
const DEFAULTS: [&str; 2] = ["zeros", "mean"];

/// The keys of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keys {
    /// The position of a row.
    Position,
    /// The positions in another order.
    Shuffled,
    /// Keys of a sparse table, with counts.
    Sparse,
}

/// A table, and the number of ranges that it is cut into.
#[derive(Clone, Debug)]
struct RandomTable {
    rows: usize,
    dim: usize,
    codec: &'static str,
    default: &'static str,
    keys: Keys,
    ranges: usize,
    seed: u64,
}

fn random_table() -> impl Strategy<Value = RandomTable> {
    let keys = prop::sample::select(vec![Keys::Position, Keys::Shuffled, Keys::Sparse]);
    let rows = prop_oneof![1usize..40, 1usize..3000, 30_000usize..50_000];
    let (codec, default) = (prop::sample::select(&CODECS), prop::sample::select(&DEFAULTS));
    let all = (rows, 1usize..40, codec, default, keys, 1usize..8, any::<u64>());
    all.prop_map(|(rows, dim, codec, default, keys, ranges, seed)| RandomTable {
        rows,
        dim,
        codec,
        default,
        keys,
        ranges,
        seed,
    })
}

fn npy(path: &Path, kind: &str, shape: &str, data: impl Iterator<Item = [u8; 8]>, each: usize) {
    let head = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend_from_slice(&(head.len() as u16).to_le_bytes());
    bytes.extend_from_slice(head.as_bytes());
    data.for_each(|number| bytes.extend_from_slice(&number[..each]));
    std::fs::write(path, bytes).unwrap();
}

/// A model of random tables in a folder.
struct Model {
    folder: tempfile::TempDir,
    tables: Vec<RandomTable>,
}

impl Model {
    fn new(tables: Vec<RandomTable>) -> Self {
        let model = Self { folder: tempfile::tempdir().unwrap(), tables };
        let mut toml =
            "format = 1\nname = \"m\"\nsequence = 1\n\n[network]\nonnx = \"dense.onnx\"\n\
             output = \"out\"\nactivation = \"none\"\n"
                .to_owned();
        let mut graph = Graph::default();
        let (mut inputs, mut width) = (Vec::new(), 0);
        for (number, table) in model.tables.iter().enumerate() {
            model.write_table(number, table, &mut toml);
            graph.input(&format!("e{number}"), Type::Float, &[table.dim]);
            inputs.push(format!("e{number}"));
            width += table.dim;
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        graph.node("Concat", &inputs, "all", &[int("axis", 1)]);
        graph.floats("w", &[width, 1], &vec![0.5; width]);
        graph.node("MatMul", &["all", "w"], "out", &[]);
        graph.output("out", &[1]);
        std::fs::write(model.path("dense.onnx"), graph.file()).unwrap();
        std::fs::write(model.path("model.toml"), toml).unwrap();
        model
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn write_table(&self, number: usize, table: &RandomTable, toml: &mut String) {
        let &RandomTable { rows, dim, codec, default, keys, seed, .. } = table;
        let value = |i: usize| {
            let bits = hatchback::mix(seed ^ i as u64);
            let value = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
            let [a, b, c, d] = value.to_le_bytes();
            [a, b, c, d, 0, 0, 0, 0]
        };
        let values = self.path(&format!("t{number}.npy"));
        npy(&values, "<f4", &format!("{rows}, {dim}"), (0..rows * dim).map(value), 4);

        let key = |row: usize| match keys {
            Keys::Position => row as u64,
            Keys::Shuffled => ((row + rows / 3) % rows) as u64,
            Keys::Sparse => table.key(row),
        };
        let mut source = format!("format = \"npy\", path = \"t{number}.npy\"");
        if keys != Keys::Position {
            let shape = format!("{rows},");
            let path = self.path(&format!("k{number}.npy"));
            npy(&path, "<u8", &shape, (0..rows).map(|row| key(row).to_le_bytes()), 8);
            let count = |row: usize| (hatchback::mix(seed ^ !(row as u64)) % 7).to_le_bytes();
            npy(&self.path(&format!("c{number}.npy")), "<u8", &shape, (0..rows).map(count), 8);
            write!(source, ", keys = \"k{number}.npy\", counts = \"c{number}.npy\"").unwrap();
        }
        let space = if keys == Keys::Sparse { "sparse" } else { "index" };
        write!(
            toml,
            "\n[[network.input]]\nname = \"e{number}\"\nfeatures = [\"f{number}\"]\n\n[[table]]\n\
             name = \"t{number}\"\ndim = {dim}\nkeys = \"{space}\"\ncodec = \"{codec}\"\ndefault = \
             \"{default}\"\nsource = {{ {source} }}\n\n[[feature]]\nname = \"f{number}\"\ntable = \
             \"t{number}\"\npooling = \"sum\"\nhotness_max = 4\n"
        )
        .unwrap();
    }

    /// Packs on one machine; returns the bundle or the error.
    fn whole(&self, overrides: Overrides) -> Result<Vec<u8>, String> {
        let out = self.path("whole.hatch");
        let packed = pack_file(&self.path("model.toml"), &out, overrides, &mut |_, _| {});
        packed.map(|_| std::fs::read(&out).unwrap()).map_err(|error| format!("{error:#}"))
    }

    /// Packs the first table whole and the others by ranges, in two folders; returns the merged
    /// bundle or the error.
    fn merged(&self, overrides: Overrides) -> Result<Vec<u8>, String> {
        let folders = ["a", "b"].map(|folder| self.path(folder));
        let packed = self.pack_ranges(&folders, overrides).and_then(|()| {
            let out = self.path("merged.hatch");
            merge_shares(&self.path("model.toml"), &folders, &out, overrides)?;
            Ok(std::fs::read(&out)?)
        });
        packed.map_err(|error| format!("{error:#}"))
    }

    fn pack_ranges(&self, folders: &[PathBuf; 2], overrides: Overrides) -> anyhow::Result<()> {
        let (model, progress) = (self.path("model.toml"), &mut |_, _| {});
        let first = ["t0".to_owned()];
        pack_part(&model, Part::Tables(&first), &folders[0], overrides, progress)?;
        std::fs::create_dir_all(&folders[1])?;
        for (number, table) in self.tables.iter().enumerate().skip(1) {
            let (name, of) = (format!("t{number}"), table.ranges);
            let range = |n: usize| -> Share { format!("{n}/{of}").parse().unwrap() };
            for n in (1..=of).rev() {
                let part = TableRange { table: &name, range: range(n) };
                learn_range(&model, part, &folders[0], overrides, progress)?;
                let learnt = format!("t{number:04}-{n}of{of}.learnt");
                std::fs::copy(folders[0].join(&learnt), folders[1].join(&learnt))?;
            }
            for n in 1..=of {
                let part = TableRange { table: &name, range: range(n) };
                pack_range(&model, part, &folders[n % 2], overrides, progress)?;
            }
        }
        Ok(())
    }
}

impl RandomTable {
    fn key(&self, row: usize) -> u64 {
        hatchback::mix(row as u64 + (self.seed >> 32))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn ranges_merge_into_the_bundle_of_one_pack(
        tables in prop::collection::vec(random_table(), 2..4),
        min_count in prop::option::of(1u64..4),
        threads in prop::option::of(1usize..4),
    ) {
        let sparse = tables.iter().any(|table| table.keys == Keys::Sparse);
        let min_count = min_count.filter(|_| sparse);
        let threads = threads.and_then(std::num::NonZeroUsize::new);
        let model = Model::new(tables);
        let overrides = Overrides { min_count, threads, ..Overrides::default() };
        match (model.whole(overrides), model.merged(overrides)) {
            (Ok(whole), Ok(merged)) => prop_assert!(whole == merged, "other bytes"),
            (Err(whole), Err(merged)) => {
                let why = "no row was used so often";
                prop_assert!(whole.contains(why) && merged.contains(why), "{} {}", whole, merged);
            }
            (whole, merged) => {
                let said = |result: Result<Vec<u8>, String>| result.map(|bytes| bytes.len());
                prop_assert!(false, "{:?} {:?}", said(whole), said(merged));
            }
        }
    }
}

#[test]
fn what_is_missing_or_wrong_in_the_ranges_is_refused_by_name() {
    let table = |keys, rows| RandomTable {
        rows,
        dim: 4,
        codec: "u8",
        default: "mean",
        keys,
        ranges: 3,
        seed: 7,
    };
    let model = Model::new(vec![table(Keys::Position, 9), table(Keys::Sparse, 900)]);
    let overrides = Overrides::default();
    let folders = ["a", "b"].map(|folder| model.path(folder));
    let refused = |result: Result<Vec<u8>, String>, why: &str| {
        let error = result.unwrap_err();
        assert!(error.contains(why), "{error}");
    };

    // A range of the table cannot be encoded before all ranges are learnt.
    let part = TableRange { table: "t1", range: "2/3".parse().unwrap() };
    let early = pack_range(&model.path("model.toml"), part, &folders[0], overrides, &mut |_, _| {});
    assert!(format!("{:#}", early.unwrap_err()).contains("t0001-1of3.learnt"));

    assert_eq!(model.merged(overrides), model.whole(overrides));
    std::fs::remove_file(folders[0].join("t0001-2of3.head")).unwrap();
    let merge = || {
        let out = model.path("x.hatch");
        let merged = merge_shares(&model.path("model.toml"), &folders, &out, overrides);
        merged.map(|_| Vec::new()).map_err(|error| format!("{error:#}"))
    };
    refused(merge(), "range 2/3 of table `t1` is in none of the shares");
    assert_eq!(model.merged(overrides), model.whole(overrides), "the range is packed again");

    // One range of a finer division does not hide the whole one.
    let finer = TableRange { table: "t1", range: "1/5".parse().unwrap() };
    let learn = |number: usize| {
        let range = format!("{number}/5").parse().unwrap();
        let part = TableRange { range, ..finer };
        let (spec, folder) = (model.path("model.toml"), &folders[0]);
        learn_range(&spec, part, folder, overrides, &mut |_, _| {}).unwrap();
    };
    (1..=5).for_each(learn);
    pack_range(&model.path("model.toml"), finer, &folders[0], overrides, &mut |_, _| {}).unwrap();
    merge().unwrap();

    let blobs = folders[1].join("t0001-1of3.blobs");
    let mut bytes = std::fs::read(&blobs).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&blobs, bytes).unwrap();
    refused(merge(), "content does not match its hash");

    // The same key in two ranges.
    let model = Model::new(vec![table(Keys::Position, 9), table(Keys::Sparse, 900)]);
    let path = model.path("k1.npy");
    let mut bytes = std::fs::read(&path).unwrap();
    let (first, last) = (bytes.len() - 900 * 8, bytes.len() - 8);
    bytes.copy_within(first..first + 8, last);
    std::fs::write(&path, bytes).unwrap();
    refused(model.whole(overrides), "occurs twice");
    refused(model.merged(overrides), "occurs twice");
}
