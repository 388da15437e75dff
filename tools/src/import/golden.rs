//! Shared by the tests of all layouts: private copies of the files that
//! `tests/data/layouts/make.py` wrote, and the formulas of their values and keys, repeated in Rust.
//! Never compiled into the tool.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::rows::RowBlock;
use super::source::Source;

/// Key of row `r` in the tables with i64 keys.
pub(super) fn wide_key(r: u64) -> u64 {
    ((r.cast_signed() - 2) * 10_000_000_019).cast_unsigned()
}

/// Key of row `r` in the tables with u32 keys.
pub(super) fn short_key(r: u64) -> u64 {
    (r * 2_654_435_761) % (1 << 32)
}

/// Key of row `r` in the tables without keys.
pub(super) fn position(r: u64) -> u64 {
    r
}

/// Count of row `r`.
pub(super) fn count(r: u64) -> u64 {
    1000 / (r + 1)
}

fn table(t: u64, rows: u64, dim: u64, key: fn(u64) -> u64) -> RowBlock {
    let value = |r: u64, c: u64| (t * 1000 + r * 10 + c) as f32 / 8.0;
    let rows_of_values = (0..rows).flat_map(|r| (0..dim).map(move |c| value(r, c)));
    RowBlock { keys: (0..rows).map(key).collect(), rows: rows_of_values.collect() }
}

/// A copy of some golden files that a test may damage.
pub(super) struct Golden {
    folder: TempDir,
}

impl Golden {
    /// Copies these files, given relative to the folder of golden files.
    pub(super) fn copy(files: &[&str]) -> Self {
        let golden = Self { folder: tempfile::tempdir().unwrap() };
        for file in files {
            fs::create_dir_all(golden.at(file).parent().unwrap()).unwrap();
            golden.restore(file);
        }
        golden
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn at(&self, file: &str) -> PathBuf {
        self.path().join(file)
    }

    pub(super) fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.at(file)).unwrap()
    }

    pub(super) fn write(&self, file: &str, bytes: &[u8]) {
        fs::write(self.at(file), bytes).unwrap();
    }

    /// Undoes all damage to a file.
    pub(super) fn restore(&self, file: &str) {
        let original =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/layouts")).join(file);
        self.write(file, &fs::read(original).unwrap());
    }

    /// Overwrites some bytes of a file.
    pub(super) fn patch(&self, file: &str, at: usize, bytes: &[u8]) {
        let mut whole = self.read(file);
        whole[at..at + bytes.len()].copy_from_slice(bytes);
        self.write(file, &whole);
    }

    /// Asserts that the source yields table `t` of the formulas, in two passes.
    pub(super) fn check(&self, source: &Source, t: u64, rows: u64, dim: u64, key: fn(u64) -> u64) {
        let opened = source.open(self.path(), dim as usize).unwrap();
        assert_eq!((opened.rows(), opened.dim()), (rows, dim as usize));
        for _pass in 0..2 {
            let (mut blocks, mut block) = (opened.blocks().unwrap(), RowBlock::default());
            assert!(blocks.next(&mut block).unwrap());
            assert_eq!(block, table(t, rows, dim, key));
            assert!(!blocks.next(&mut block).unwrap());
        }
    }

    /// Returns whether the source opens.
    pub(super) fn opens(&self, source: &Source, dim: usize) -> bool {
        source.open(self.path(), dim).is_ok()
    }

    /// Returns the error with which the source is refused; paths are relative to the folder.
    pub(super) fn refusal(&self, source: &Source, dim: usize) -> String {
        let message = source.open(self.path(), dim).unwrap_err().to_string();
        message.replace(&format!("{}/", self.path().display()), "")
    }

    /// Asserts that the source opens with `file` as it is and not with any shorter or somewhat
    /// longer one.
    pub(super) fn check_sizes_are_exact(&self, file: &str, source: &Source, dim: usize) {
        let whole = self.read(file);
        assert!(self.opens(source, dim));
        for length in (0..whole.len()).chain([1, 4, 8, 16, 4096].map(|more| whole.len() + more)) {
            let mut other = whole.clone();
            other.resize(length, 0);
            self.write(file, &other);
            assert!(
                !self.opens(source, dim),
                "{file} with {length} of {} bytes was taken",
                whole.len()
            );
        }
        self.write(file, &whole);
    }

    /// Sets some bytes of a file, then reads all of the table if it opens. The outcome does not
    /// matter.
    pub(super) fn survives(&self, file: &str, edits: &[(usize, u8)], source: &Source, dim: usize) {
        let mut whole = self.read(file);
        let length = whole.len();
        edits.iter().for_each(|&(at, byte)| whole[at % length] = byte);
        self.write(file, &whole);
        let Ok(rows) = source.open(self.path(), dim) else { return };
        let _ = rows.counts();
        let (Ok(mut blocks), mut block) = (rows.blocks(), RowBlock::default()) else { return };
        while let Ok(true) = blocks.next(&mut block) {}
    }
}
