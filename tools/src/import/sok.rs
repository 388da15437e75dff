//! `sok.dump`: `<table>-key` and `<table>-weight`, each with a 296-byte header (big-endian numbers,
//! space-padded names) before little-endian data. Never reads optimizer slots. Dumps of SOK 23.12
//! to 25.03 lack `meta_info` and the names in the headers; where a dump has them, they must match
//! the table.
//!
//! ```text
//! 0 name[256] | 256 u32 BE kind | 260 variable[32] | 292 u32 BE dtype | 296 data
//! meta_info, all BE: u32 n | u32 keys[n] | u32 values[n] | u32 dims[n] | u64 rows[n] |
//!                    names[n][256] | opts[n][32]
//! ```

use std::path::Path;

use super::array::{Array, Layout};
use super::dtype::Dtype;
use super::error::ImportError;
use super::head::{Head, file_size};

const HEADER: u64 = 296;
const KIND_KEY: u32 = 0;
const KIND_WEIGHT: u32 = 1;
/// Bytes of `meta_info` for one table.
const META_TABLE: u64 = 4 + 4 + 4 + 8 + 256 + 32;

pub(super) fn open(folder: &Path, table: &str) -> Result<Layout, ImportError> {
    let stem = stem(table);
    let (key, weight) = (folder.join(format!("{stem}-key")), folder.join(format!("{stem}-weight")));
    let keys = Array::column(&key, HEADER, read_header(&key, &stem, KIND_KEY)?)?;
    let values =
        Array::matrix(&weight, HEADER, keys.rows, read_header(&weight, &stem, KIND_WEIGHT)?)?;
    let meta = folder.join("meta_info");
    if meta.try_exists().map_err(|error| ImportError::io(&meta, "size", error))? {
        MetaInfo::read(&meta)?.check(&stem, &keys, &values)?;
    }
    Ok(Layout { values, keys: Some(keys), counts: None })
}

/// Returns SOK's file name of a table: all ASCII punctuation becomes `_`.
fn stem(table: &str) -> String {
    table.trim().replace(|c: char| c.is_ascii_punctuation(), "_")
}

fn read_header(path: &Path, stem: &str, kind: u32) -> Result<Dtype, ImportError> {
    let head = Head::read(path, HEADER)?;
    let (name, found) = (text::<256>(&head, 0, "name")?, u32::from_be_bytes(head.field(256)?));
    if !name.is_empty() && self::stem(&name) != stem {
        return Err(ImportError::field(path, "name", format!("{name:?}"), format!("not {stem:?}")));
    }
    if found != kind {
        let why = format!("not {kind} (0 key, 1 weight, 2 optimizer; big-endian)");
        return Err(ImportError::field(path, "kind", found, why));
    }
    let variable = text::<32>(&head, 260, "variable")?;
    if !variable.is_empty() {
        return Err(ImportError::field(
            path,
            "variable",
            format!("{variable:?}"),
            "not blank: an optimizer's slot",
        ));
    }
    dtype(path, u32::from_be_bytes(head.field(292)?))
}

fn text<const N: usize>(head: &Head, at: usize, field: &str) -> Result<String, ImportError> {
    let raw = head.field::<N>(at)?;
    let bad = |_| {
        ImportError::field(&head.file, field, String::from_utf8_lossy(&raw).trim(), "not UTF-8")
    };
    std::str::from_utf8(&raw).map(|text| text.trim().to_owned()).map_err(bad)
}

fn dtype(path: &Path, index: u32) -> Result<Dtype, ImportError> {
    let known =
        [Dtype::I32, Dtype::I64, Dtype::U32, Dtype::U64, Dtype::F16, Dtype::F32, Dtype::F64];
    let found = usize::try_from(index).ok().and_then(|index| known.get(index));
    found
        .copied()
        .ok_or_else(|| ImportError::field(path, "dtype", index, "not 0 to 6 (big-endian)"))
}

/// The folder's table of contents.
struct MetaInfo {
    head: Head,
    tables: usize,
}

impl MetaInfo {
    fn read(path: &Path) -> Result<Self, ImportError> {
        let tables = u32::from_be_bytes(Head::read(path, 4)?.field(0)?);
        let (size, wanted) = (file_size(path)?, 4 + u64::from(tables) * META_TABLE);
        if size != wanted {
            let why = format!("is not 4 + {META_TABLE} x {tables} tables (big-endian)");
            return Err(ImportError::size(path, size, why));
        }
        Ok(Self { head: Head::read(path, size)?, tables: tables as usize })
    }

    fn check(&self, stem: &str, keys: &Array, values: &Array) -> Result<(), ImportError> {
        let at = self.find(stem)?;
        let number = |column: usize| {
            self.head.field(4 + column * self.tables + 4 * at).map(u32::from_be_bytes)
        };
        let rows = u64::from_be_bytes(self.head.field(4 + 12 * self.tables + 8 * at)?);
        self.agree(stem, "key dtype", dtype(&self.head.file, number(0)?)?, keys.dtype)?;
        self.agree(stem, "value dtype", dtype(&self.head.file, number(4)?)?, values.dtype)?;
        self.agree(stem, "dim", u64::from(number(8)?), values.width)?;
        self.agree(stem, "rows", rows, keys.rows)
    }

    fn find(&self, stem: &str) -> Result<usize, ImportError> {
        let mut found = Vec::new();
        for at in 0..self.tables {
            let name = text::<256>(&self.head, 4 + 20 * self.tables + 256 * at, "name")?;
            found.extend((self::stem(&name) == stem).then_some(at));
        }
        match found[..] {
            [at] => Ok(at),
            _ => Err(ImportError::field(
                &self.head.file,
                format!("entries for {stem:?}"),
                found.len(),
                "not 1",
            )),
        }
    }

    fn agree<T: PartialEq + ToString>(
        &self,
        stem: &str,
        field: &str,
        stated: T,
        is: T,
    ) -> Result<(), ImportError> {
        match stated == is {
            true => Ok(()),
            false => {
                let why = format!("but the table's files have {}", is.to_string());
                Err(ImportError::field(
                    &self.head.file,
                    format!("{field} of {stem:?}"),
                    stated.to_string(),
                    why,
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::ImportError;
    use super::super::golden::{Golden, short_key, wide_key};
    use super::super::source::Source;

    const FILES: [&str; 6] = [
        "sok/emb_user_0-key",
        "sok/emb_user_0-weight",
        "sok/meta_info",
        "sok/item-key",
        "sok/item-weight",
        "sok/emb_user_0-Adam-m",
    ];
    const BARE: [&str; 2] = ["sok_bare/table1_0-key", "sok_bare/table1_0-weight"];

    fn user() -> Source {
        Source::Sok { path: "sok".into(), table: "emb/user:0".into() }
    }

    /// The refusal after `bytes` were written at `at` of `file`.
    fn refusal(file: &str, at: usize, bytes: &[u8]) -> String {
        let golden = Golden::copy(&FILES);
        golden.patch(file, at, bytes);
        golden.refusal(&user(), 4)
    }

    #[test]
    fn golden_dumps_are_read() {
        let golden = Golden::copy(&FILES);
        golden.check(&user(), 6, 11, 4, wide_key);
        golden.check(
            &Source::Sok { path: "sok".into(), table: "emb_user_0".into() },
            6,
            11,
            4,
            wide_key,
        );
        golden.check(
            &Source::Sok { path: "sok".into(), table: "item".into() },
            1,
            13,
            2,
            short_key,
        );
        let bare = Source::Sok { path: "sok_bare".into(), table: "table1:0".into() };
        Golden::copy(&BARE).check(&bare, 8, 5, 3, wide_key);
    }

    #[test]
    fn every_truncation_and_every_excess_is_refused() {
        let golden = Golden::copy(&FILES);
        FILES[..3].iter().for_each(|file| golden.check_sizes_are_exact(file, &user(), 4));
        let bare = Source::Sok { path: "sok_bare".into(), table: "table1_0".into() };
        let golden = Golden::copy(&BARE);
        BARE.iter().for_each(|file| golden.check_sizes_are_exact(file, &bare, 3));
    }

    #[test]
    fn a_header_read_in_the_wrong_byte_order_is_refused() {
        assert!(refusal(FILES[0], 256, &2u32.to_le_bytes()).contains("kind is 33554432"));
        assert!(refusal(FILES[0], 292, &1u32.to_le_bytes()).contains("dtype is 16777216"));
        assert!(
            refusal(FILES[2], 0, &2u32.to_le_bytes()).contains("x 33554432 tables (big-endian)")
        );
    }

    #[test]
    fn every_header_field_is_checked() {
        assert!(
            refusal(FILES[0], 250, b"other:")
                .contains("name is \"emb/other:\", not \"emb_user_0\"")
        );
        assert!(refusal(FILES[0], 0, b"\xff").contains("not UTF-8"));
        assert!(
            refusal(FILES[0], 256, &1u32.to_be_bytes()).contains("user_0-key: kind is 1, not 0")
        );
        assert!(
            refusal(FILES[1], 256, &0u32.to_be_bytes()).contains("user_0-weight: kind is 0, not 1")
        );
        assert!(refusal(FILES[1], 291, b"m").contains("variable is \"m\", not blank"));
        assert!(refusal(FILES[1], 292, &7u32.to_be_bytes()).contains("dtype is 7"));
        assert!(
            refusal(FILES[0], 292, &6u32.to_be_bytes())
                .contains("key dtype of \"emb_user_0\" is i64, but")
        );
        assert!(
            refusal(FILES[1], 292, &4u32.to_be_bytes())
                .contains("value dtype of \"emb_user_0\" is f32, but")
        );
    }

    #[test]
    fn float_keys_and_integer_values_are_refused() {
        let golden = Golden::copy(&BARE);
        let bare = Source::Sok { path: "sok_bare".into(), table: "table1_0".into() };
        golden.patch(BARE[0], 292, &6u32.to_be_bytes());
        assert!(golden.refusal(&bare, 3).contains("dtype of keys is f64"));
        golden.restore(BARE[0]);
        golden.patch(BARE[1], 292, &1u32.to_be_bytes());
        assert!(golden.refusal(&bare, 3).contains("dtype of values is i64"));
    }

    #[test]
    fn meta_info_must_agree_with_the_files() {
        let wrong = |at, bytes: &[u8]| refusal(FILES[2], at, bytes);
        assert!(wrong(0, &3u32.to_be_bytes()).contains("size 620 is not 4 + 308 x 3 tables"));
        assert!(wrong(0, &u32::MAX.to_be_bytes()).contains("x 4294967295 tables"));
        assert!(wrong(4, &3u32.to_be_bytes()).contains("key dtype of \"emb_user_0\" is u64, but"));
        assert!(wrong(4, &9u32.to_be_bytes()).contains("dtype is 9"));
        assert!(
            wrong(12, &6u32.to_be_bytes()).contains("value dtype of \"emb_user_0\" is f64, but")
        );
        assert!(
            wrong(20, &5u32.to_be_bytes())
                .contains("dim of \"emb_user_0\" is 5, but the table's files have 4")
        );
        assert!(wrong(28, &10u64.to_be_bytes()).contains("rows of \"emb_user_0\" is 10, but"));
        assert!(wrong(44 + 250, b"other:").contains("entries for \"emb_user_0\" is 0"));
        assert!(wrong(44 + 256 + 246, b"emb_user.0").contains("entries for \"emb_user_0\" is 2"));
    }

    #[test]
    fn unknown_tables_and_other_dims_are_refused() {
        let golden = Golden::copy(&FILES);
        let unknown = Source::Sok { path: "sok".into(), table: "../etc".into() };
        assert!(golden.refusal(&unknown, 4).contains("sok/___etc-key: cannot read its size"));
        assert!(matches!(
            user().open(golden.path(), 8),
            Err(ImportError::Dim { dim: 4, declared: 8, .. })
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn mutated_bytes_never_panic(
            file in 0..3usize,
            edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        ) {
            Golden::copy(&FILES).survives(FILES[file], &edits, &user(), 4);
        }
    }
}
