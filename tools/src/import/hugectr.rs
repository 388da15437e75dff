//! The folder of a HugeCTR sparse model, and of each table of an HPS repository: `key` i64[rows]
//! and `emb_vector` f32[rows, dim], without headers. Their sizes are the only description, so they
//! must match exactly. An optional `meta` has the use of each row and becomes the counts. The size
//! of an optional `slot_id` is checked; its content is never read.

use std::path::Path;

use super::array::{Array, Layout, Shape};
use super::dtype::Dtype;
use super::error::ImportError;

pub(super) fn open(folder: &Path) -> Result<Layout, ImportError> {
    // HugeCTR writes 8 bytes a key, even after training with u32 keys.
    let keys = Array::column(&folder.join("key"), 0, Dtype::I64)?;
    let values = Array::matrix(&folder.join("emb_vector"), 0, keys.rows, Dtype::F32)?;
    one_a_row(&folder.join("slot_id"), keys.rows)?;
    let counts = one_a_row(&folder.join("meta"), keys.rows)?;
    Ok(Layout { values, keys: Some(keys), counts })
}

/// Returns the array of an optional file of 8 bytes a row.
fn one_a_row(path: &Path, rows: u64) -> Result<Option<Array>, ImportError> {
    match path.try_exists() {
        Ok(false) => Ok(None),
        Ok(true) => Array::to_end(path, 0, Shape { rows, width: 1 }, Dtype::I64).map(Some),
        Err(error) => Err(ImportError::io(path, "size", error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::ImportError;
    use super::super::golden::{Golden, count, wide_key};
    use super::super::source::Source;

    const PLAIN: [&str; 2] = ["hugectr/plain/key", "hugectr/plain/emb_vector"];
    const LOCALIZED: [&str; 4] = [
        "hugectr/localized/key",
        "hugectr/localized/emb_vector",
        "hugectr/localized/slot_id",
        "hugectr/localized/meta",
    ];

    fn plain() -> Source {
        Source::Hugectr { path: "hugectr/plain".into() }
    }

    fn localized() -> Source {
        Source::Hugectr { path: "hugectr/localized".into() }
    }

    #[test]
    fn golden_folders_are_read() {
        let golden = Golden::copy(&PLAIN);
        golden.check(&plain(), 9, 8, 4, wide_key);
        assert_eq!(plain().open(golden.path(), 4).unwrap().counts().unwrap(), None);
        let golden = Golden::copy(&LOCALIZED);
        golden.check(&localized(), 10, 7, 2, wide_key);
        let counts = localized().open(golden.path(), 2).unwrap().counts().unwrap().unwrap();
        assert!(counts.into_iter().eq((0..7).map(count)));
    }

    #[test]
    fn every_truncation_and_every_excess_is_refused() {
        let golden = Golden::copy(&PLAIN);
        PLAIN.iter().for_each(|file| golden.check_sizes_are_exact(file, &plain(), 4));
        let golden = Golden::copy(&LOCALIZED);
        LOCALIZED.iter().for_each(|file| golden.check_sizes_are_exact(file, &localized(), 2));
    }

    #[test]
    fn the_refusals_say_which_file_and_why() {
        let golden = Golden::copy(&PLAIN);
        golden.write(PLAIN[0], &[0; 1001]);
        assert!(
            golden
                .refusal(&plain(), 4)
                .contains("plain/key: size 1001 is not a multiple of 8 (one i64 a row)")
        );
        golden.restore(PLAIN[0]);
        golden.write(PLAIN[1], &[0; 130]);
        assert!(
            golden
                .refusal(&plain(), 4)
                .contains("emb_vector: size 130 is not a multiple of 32 (8 rows")
        );
        golden.write(PLAIN[1], &[0; 96]);
        assert!(matches!(
            plain().open(golden.path(), 4),
            Err(ImportError::Dim { dim: 3, declared: 4, .. })
        ));
    }

    #[test]
    fn empty_and_missing_files_are_refused() {
        let golden = Golden::copy(&PLAIN);
        golden.write(PLAIN[0], &[]);
        golden.write(PLAIN[1], &[]);
        assert!(golden.refusal(&plain(), 4).contains("an empty table"));
        golden.restore(PLAIN[0]);
        assert!(
            golden.refusal(&plain(), 4).contains("emb_vector: shape is [8, 0], an empty table")
        );
        assert!(golden.refusal(&plain(), 0).contains("an empty table"));
        assert!(golden.refusal(&localized(), 2).contains("localized/key: cannot read its size"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn mutated_bytes_never_panic(
            file in 0..4usize,
            edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        ) {
            Golden::copy(&LOCALIZED).survives(LOCALIZED[file], &edits, &localized(), 2);
        }
    }
}
