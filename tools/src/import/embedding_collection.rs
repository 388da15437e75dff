//! The folder of a HugeCTR EmbeddingCollection. `meta_data` describes the tables; `key<id>` and
//! `weight<id>` hold a 128-byte header and the raw array. All numbers are little-endian. The u64
//! counts in `meta_data` are not aligned.
//!
//! ```text
//! meta_data: i32 tables | i32 key type | i32 value type | i32[2] reserved | i32 ids[n] |
//!            u64 rows[n] | i32 dims[n]
//! key, weight: i32 kind | i32 id | i32[30] reserved | data
//! ```
//!
//! HugeCTR's dump from several processes computes each rank's offset in the wrong unit, so that the
//! file is too long and full of holes. The exact size check refuses such a file.

use std::path::Path;

use super::array::{Array, Layout, Shape};
use super::dtype::Dtype;
use super::error::ImportError;
use super::head::{Head, file_size};

const META_HEADER: u64 = 20;
/// Bytes of `meta_data` for one table.
const META_TABLE: u64 = 4 + 8 + 4;
const FILE_HEADER: u64 = 128;
const KIND_KEY: i32 = 1;
const KIND_WEIGHT: i32 = 2;

pub(super) fn open(folder: &Path, table: u32) -> Result<Layout, ImportError> {
    let meta = MetaData::read(&folder.join("meta_data"))?;
    let at = meta.find(table)?;
    let (rows, dim) = (meta.rows(at)?, meta.dim(at)?);

    let key_path = folder.join(format!("key{table}"));
    let keys = array(&key_path, KIND_KEY, table, Shape { rows, width: 1 }, meta.key)?;
    let value_path = folder.join(format!("weight{table}"));
    let values = array(&value_path, KIND_WEIGHT, table, Shape { rows, width: dim }, meta.value)?;

    Ok(Layout { values, keys: Some(keys), counts: None })
}

fn array(
    path: &Path,
    kind: i32,
    table: u32,
    shape: Shape,
    dtype: Dtype,
) -> Result<Array, ImportError> {
    let head = Head::read(path, FILE_HEADER)?;
    let (found, id) = (i32::from_le_bytes(head.field(0)?), i32::from_le_bytes(head.field(4)?));
    if found != kind {
        return Err(ImportError::field(
            path,
            "kind",
            found,
            format!("not {kind} (1 key, 2 weight, 3 optimizer)"),
        ));
    }
    if u32::try_from(id) != Ok(table) {
        return Err(ImportError::field(path, "table id", id, format!("not {table}")));
    }
    Array::to_end(path, FILE_HEADER, shape, dtype)
}

/// The folder's table of contents. Its size is checked.
struct MetaData {
    head: Head,
    tables: usize,
    key: Dtype,
    value: Dtype,
}

impl MetaData {
    fn read(path: &Path) -> Result<Self, ImportError> {
        let head = Head::read(path, META_HEADER)?;
        let (tables, size) = (i32::from_le_bytes(head.field(0)?), file_size(path)?);
        let count = u64::try_from(tables).ok().filter(|&n| size == META_HEADER + META_TABLE * n);
        let Some(count) = count else {
            let why = format!("is not {META_HEADER} + {META_TABLE} x {tables} tables");
            return Err(ImportError::size(path, size, why));
        };
        let key = one_of(&head, "key type", 4, [Dtype::U32, Dtype::I64])?;
        let value = one_of(&head, "value type", 8, [Dtype::F32, Dtype::F16])?;
        Ok(Self { head: Head::read(path, size)?, tables: count as usize, key, value })
    }

    fn find(&self, table: u32) -> Result<usize, ImportError> {
        let id = |at: usize| self.head.field(20 + 4 * at).map(i32::from_le_bytes);
        let ids = (0..self.tables).map(id).collect::<Result<Vec<i32>, ImportError>>()?;
        let found: Vec<usize> =
            (0..self.tables).filter(|&at| u32::try_from(ids[at]) == Ok(table)).collect();
        match found[..] {
            [at] => Ok(at),
            _ => Err(ImportError::field(
                &self.head.file,
                "table ids",
                format!("{ids:?}"),
                format!("not one of them {table}"),
            )),
        }
    }

    fn rows(&self, at: usize) -> Result<u64, ImportError> {
        self.head.field(20 + 4 * self.tables + 8 * at).map(u64::from_le_bytes)
    }

    fn dim(&self, at: usize) -> Result<u64, ImportError> {
        let dim = i32::from_le_bytes(self.head.field(20 + 12 * self.tables + 4 * at)?);
        u64::try_from(dim).map_err(|_| ImportError::field(&self.head.file, "dim", dim, "below 0"))
    }
}

fn one_of(head: &Head, field: &str, at: usize, dtypes: [Dtype; 2]) -> Result<Dtype, ImportError> {
    match i32::from_le_bytes(head.field(at)?) {
        0 => Ok(dtypes[0]),
        1 => Ok(dtypes[1]),
        other => {
            let why = format!("not 0 ({}) or 1 ({})", dtypes[0], dtypes[1]);
            Err(ImportError::field(&head.file, field, other, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::ImportError;
    use super::super::golden::{Golden, short_key, wide_key};
    use super::super::source::Source;

    const WIDE: [&str; 5] = [
        "embedding_collection_0/meta_data",
        "embedding_collection_0/key1",
        "embedding_collection_0/weight1",
        "embedding_collection_0/key0",
        "embedding_collection_0/weight0",
    ];
    const SHORT: [&str; 7] = [
        "embedding_collection_1/meta_data",
        "embedding_collection_1/key0",
        "embedding_collection_1/weight0",
        "embedding_collection_1/key1",
        "embedding_collection_1/weight1",
        "embedding_collection_1/key2",
        "embedding_collection_1/weight2",
    ];

    fn table(e: u32, table: u32) -> Source {
        Source::EmbeddingCollection { path: format!("embedding_collection_{e}").into(), table }
    }

    /// The refusal of table 1 of the first folder, 9 rows of dim 2, after `bytes` were written at
    /// `at` of `file`.
    fn refusal(file: usize, at: usize, bytes: &[u8]) -> String {
        let golden = Golden::copy(&WIDE);
        golden.patch(WIDE[file], at, bytes);
        golden.refusal(&table(0, 1), 2)
    }

    #[test]
    fn golden_collections_are_read() {
        let golden = Golden::copy(&WIDE);
        golden.check(&table(0, 0), 11, 6, 4, wide_key);
        golden.check(&table(0, 1), 12, 9, 2, wide_key);
        let golden = Golden::copy(&SHORT);
        golden.check(&table(1, 0), 0, 3, 2, short_key);
        golden.check(&table(1, 1), 1, 5, 4, short_key);
        golden.check(&table(1, 2), 1, 4, 8, short_key);
    }

    #[test]
    fn every_truncation_and_every_excess_is_refused() {
        let golden = Golden::copy(&WIDE);
        WIDE[..3].iter().for_each(|file| golden.check_sizes_are_exact(file, &table(0, 1), 2));
        let golden = Golden::copy(&SHORT);
        SHORT[..3].iter().for_each(|file| golden.check_sizes_are_exact(file, &table(1, 0), 2));
    }

    #[test]
    fn every_field_of_meta_data_is_checked() {
        assert!(refusal(0, 0, &3i32.to_le_bytes()).contains("size 52 is not 20 + 16 x 3 tables"));
        assert!(refusal(0, 0, &(-1i32).to_le_bytes()).contains("16 x -1 tables"));
        assert!(refusal(0, 0, &i32::MAX.to_le_bytes()).contains("16 x 2147483647 tables"));
        assert!(
            refusal(0, 4, &2i32.to_le_bytes()).contains("key type is 2, not 0 (u32) or 1 (i64)")
        );
        assert!(
            refusal(0, 8, &(-1i32).to_le_bytes())
                .contains("value type is -1, not 0 (f32) or 1 (f16)")
        );
        assert!(
            refusal(0, 24, &5i32.to_le_bytes()).contains("table ids is [0, 5], not one of them 1")
        );
        assert!(
            refusal(0, 20, &1i32.to_le_bytes()).contains("table ids is [1, 1], not one of them 1")
        );
        assert!(
            refusal(0, 36, &10u64.to_le_bytes())
                .contains("key1: size 200 is not 128 of header + 10 rows")
        );
        assert!(refusal(0, 36, &u64::MAX.to_le_bytes()).contains("18446744073709551615 rows"));
        assert!(refusal(0, 36, &0u64.to_le_bytes()).contains("an empty table"));
        assert!(
            refusal(0, 48, &3i32.to_le_bytes())
                .contains("weight1: size 200 is not 128 of header + 9 rows x 3")
        );
        assert!(refusal(0, 48, &(-2i32).to_le_bytes()).contains("dim is -2, below 0"));
        assert!(refusal(0, 48, &0i32.to_le_bytes()).contains("an empty table"));
    }

    #[test]
    fn an_empty_collection_holds_no_table() {
        let golden = Golden::copy(&WIDE);
        golden.write(WIDE[0], &[0; 20]);
        assert!(golden.refusal(&table(0, 1), 2).contains("table ids is [], not one of them 1"));
    }

    #[test]
    fn every_field_of_the_array_headers_is_checked() {
        for (file, kind) in [(1, 1), (2, 2)] {
            for wrong in [0, 3 - kind, 3, -1] {
                assert!(
                    refusal(file, 0, &i32::to_le_bytes(wrong))
                        .contains(&format!("kind is {wrong}, not {kind}"))
                );
            }
            assert!(refusal(file, 4, &7i32.to_le_bytes()).contains("table id is 7, not 1"));
            assert!(refusal(file, 4, &(-1i32).to_le_bytes()).contains("table id is -1, not 1"));
        }
    }

    #[test]
    fn u32_keys_taken_for_i64_and_back_are_refused() {
        assert!(
            refusal(0, 4, &0i32.to_le_bytes())
                .contains("key1: size 200 is not 128 of header + 9 rows x 1 u32")
        );
        let golden = Golden::copy(&SHORT);
        golden.patch(SHORT[0], 4, &1i32.to_le_bytes());
        assert!(
            golden
                .refusal(&table(1, 1), 4)
                .contains("key1: size 148 is not 128 of header + 5 rows x 1 i64")
        );
    }

    /// `weight_offset = key_offset * dim * sizeof(float)`, where `key_offset` already is in bytes.
    #[test]
    fn the_multi_rank_dump_with_misplaced_weights_is_refused() {
        let golden = Golden::copy(&WIDE);
        let whole = golden.read(WIDE[2]);
        let (first_rank, second_rank) = whole[128..].split_at(5 * 2 * 4);
        let mut misplaced = whole[..128].to_vec();
        misplaced.extend(first_rank);
        misplaced.resize(128 + 5 * 8 * 2 * 4, 0);
        misplaced.extend(second_rank);
        golden.write(WIDE[2], &misplaced);
        let refused = golden.refusal(&table(0, 1), 2);
        assert!(
            refused.contains("weight1: size 480 is not 128 of header + 9 rows x 2 f32 of 4 bytes"),
            "{refused}"
        );
    }

    #[test]
    fn unknown_tables_missing_files_and_other_dims_are_refused() {
        let golden = Golden::copy(&WIDE[..3]);
        assert!(golden.refusal(&table(0, 2), 2).contains("not one of them 2"));
        assert!(golden.refusal(&table(0, 0), 4).contains("key0: cannot read its size"));
        assert!(matches!(
            table(0, 1).open(golden.path(), 4),
            Err(ImportError::Dim { dim: 2, declared: 4, .. })
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn mutated_bytes_never_panic(
            file in 0..3usize,
            edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        ) {
            Golden::copy(&WIDE).survives(WIDE[file], &edits, &table(0, 1), 2);
        }
    }
}
