//! Where the rows of a table come from: the files that model.toml lists (`Source`), and the
//! interface through which `pack` reads rows from those files or from a generator (`RowSource`).
//! Never stores a row.

use super::error::ImportError;
use super::rows::{RowBlock, Rows};
use super::{deployed, embedding_collection, hugectr, npy, safetensors, sok};
use anyhow::Result;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Receives a block of rows: keys `[rows]` and values `[rows, dim]`.
pub type TakeBlock<'a> = &'a mut dyn FnMut(&[u64], &[f32]) -> Result<()>;

/// The rows of a table. `pack` reads them two or three times.
pub trait RowSource {
    /// Returns the number of rows.
    fn rows(&self) -> u64;

    /// Returns whether rows have keys of their own. If not, the key of a row is its position.
    fn has_keys(&self) -> bool;

    /// Returns how often each row was used in training, in row order, if the source has counts.
    ///
    /// # Errors
    /// The counts cannot be read or are wrong.
    fn counts(&self) -> Result<Option<Vec<u64>>>;

    /// Passes all rows to `take`, one block after another.
    ///
    /// # Errors
    /// The rows cannot be read or are wrong, or `take` fails.
    fn each_block(&self, take: TakeBlock<'_>) -> Result<()>;
}

impl RowSource for Rows {
    fn rows(&self) -> u64 {
        self.rows()
    }

    fn has_keys(&self) -> bool {
        self.has_keys()
    }

    fn counts(&self) -> Result<Option<Vec<u64>>> {
        Ok(self.counts()?)
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let (mut blocks, mut block) = (self.blocks()?, RowBlock::default());
        while blocks.next(&mut block)? {
            take(&block.keys, &block.rows)?;
        }

        Ok(())
    }
}

/// The files of a table: `source = { format = "...", ... }` of a `[[table]]` in model.toml. Paths
/// are relative to the folder of model.toml.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "format", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// Tensors of one safetensors file.
    Safetensors {
        /// The safetensors file.
        path: PathBuf,
        /// The tensor of values, `[rows, dim]`.
        tensor: String,
        /// The tensor of keys, `[rows]`. Without it the key of a row is its position.
        keys: Option<String>,
        /// The tensor of lookup counts, `[rows]`.
        counts: Option<String>,
    },
    /// NumPy arrays, one file each.
    Npy {
        /// The file of values, `[rows, dim]`, C order.
        path: PathBuf,
        /// The file of keys, `[rows]`. Without it the key of a row is its position.
        keys: Option<PathBuf>,
        /// The file of lookup counts, `[rows]`.
        counts: Option<PathBuf>,
    },
    /// A HugeCTR sparse model, or one table of an HPS repository.
    Hugectr {
        /// The folder with `key` and `emb_vector`.
        path: PathBuf,
    },
    /// A table of a repository that NVIDIA's DLRM and DCNv2 recipe deployed.
    Deployed {
        /// The folder with `key` and `emb_vector`.
        path: PathBuf,
        /// The first key of the table in the folder.
        #[serde(default)]
        first: u64,
        /// Rows of the table. Without it all rows from `first` on.
        rows: Option<u64>,
    },
    /// A table dumped by HugeCTR's Sparse Operation Kit.
    Sok {
        /// The folder given to `sok.dump`.
        path: PathBuf,
        /// The variable's name. Its punctuation may be written as in the trainer or as `_`.
        table: String,
    },
    /// A table of a HugeCTR EmbeddingCollection.
    EmbeddingCollection {
        /// The folder `embedding_collection_<e>`.
        path: PathBuf,
        /// The table's id.
        table: u32,
    },
}

impl Source {
    /// Reads and checks the headers and sizes of the files. `base` is the folder of model.toml,
    /// `dim` the width that the table declares.
    ///
    /// # Errors
    /// A file is missing, or does not match its layout or `dim`.
    pub fn open(&self, base: &Path, dim: usize) -> Result<Rows, ImportError> {
        let at = |path: &PathBuf| base.join(path);
        let layout = match self {
            Self::Safetensors { path, tensor, keys, counts } => {
                safetensors::open(&at(path), tensor, keys.as_deref(), counts.as_deref())
            }
            Self::Npy { path, keys, counts } => {
                let (keys, counts) = (keys.as_ref().map(at), counts.as_ref().map(at));
                npy::open(&at(path), keys.as_deref(), counts.as_deref())
            }
            Self::Hugectr { path } => hugectr::open(&at(path)),
            Self::Deployed { path, first, rows } => deployed::open(&at(path), *first, *rows),
            Self::Sok { path, table } => sok::open(&at(path), table),
            Self::EmbeddingCollection { path, table } => {
                embedding_collection::open(&at(path), *table)
            }
        }?;

        Rows::new(layout, dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Source, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn sources_are_declared_by_format() {
        let npy = Source::Npy { path: "a.npy".into(), keys: Some("k.npy".into()), counts: None };
        assert_eq!(parse(r#"{"format": "npy", "path": "a.npy", "keys": "k.npy"}"#).unwrap(), npy);
        let sok = Source::Sok { path: "dump".into(), table: "emb/user:0".into() };
        assert_eq!(
            parse(r#"{"format": "sok", "path": "dump", "table": "emb/user:0"}"#).unwrap(),
            sok
        );
        let collection = Source::EmbeddingCollection { path: "e".into(), table: 3 };
        assert_eq!(
            parse(r#"{"format": "embedding_collection", "path": "e", "table": 3}"#).unwrap(),
            collection
        );
        assert!(parse(r#"{"format": "safetensors", "path": "m", "tensor": "t"}"#).is_ok());
        assert!(parse(r#"{"format": "hugectr", "path": "m"}"#).is_ok());
    }

    #[test]
    fn misspelt_declarations_are_refused() {
        assert!(parse(r#"{"format": "npy", "path": "a.npy", "key": "k.npy"}"#).is_err());
        assert!(parse(r#"{"format": "hugectr", "path": "m", "dim": 4}"#).is_err());
        assert!(parse(r#"{"format": "embedding_collection", "path": "e", "table": -1}"#).is_err());
        assert!(parse(r#"{"format": "pickle", "path": "m.pt"}"#).is_err());
    }
}
