//! Importers: how `hatchback pack` reads the embedding tables that a trainer left behind.
//!
//! Every layout is the same thing, an array of values and perhaps an array of keys, somewhere in
//! some file. So each layout's own file parses headers and yields that description, and one reader
//! (`rows.rs`) streams it. An import never holds a table in memory, never unpickles, never repairs:
//! what does not fit its layout exactly is refused with the file, the field and the value.
//!
//! Not done here: finding duplicate keys (`pack` sorts and sees them), dropping the padding rows of
//! DeepLearningExamples' deployed tables.
//!
//! ```toml
//! [[table]]
//! name = "user"
//! dim = 64
//! source = { format = "hugectr", path = "dcn0_sparse_2000.model" }
//! ```

mod array;
mod column;
mod dtype;
mod embedding_collection;
mod error;
#[cfg(test)]
mod golden;
mod head;
mod hugectr;
mod npy;
mod rows;
mod safetensors;
mod sok;

use std::path::{Path, PathBuf};

use serde::Deserialize;

pub use error::ImportError;
pub use rows::{BLOCK_BYTES, Blocks, RowBlock, Rows};

/// Where a table's rows come from: the `source = { format = "...", ... }` of a `[[table]]` in
/// model.toml. Paths are relative to the folder of model.toml.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "format", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// Tensors of one safetensors file.
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The tensor of values, `[rows][dim]`.
        tensor: String,
        /// The tensor of keys, `[rows]`. Without it a row's key is its position.
        keys: Option<String>,
        /// The tensor of lookup counts, `[rows]`.
        counts: Option<String>,
    },
    /// NumPy arrays, a file each.
    Npy {
        /// The values, `[rows][dim]`, C order.
        path: PathBuf,
        /// The keys, `[rows]`. Without them a row's key is its position.
        keys: Option<PathBuf>,
        /// The lookup counts, `[rows]`.
        counts: Option<PathBuf>,
    },
    /// A HugeCTR sparse model, or one table of an HPS repository.
    Hugectr {
        /// The folder with `key` and `emb_vector`.
        path: PathBuf,
    },
    /// A table dumped by HugeCTR's Sparse Operation Kit.
    Sok {
        /// The folder given to `sok.dump`.
        path: PathBuf,
        /// The variable's name; its punctuation may be written as it is or as `_`.
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
    /// Reads and checks the headers and sizes. `base` is the folder of model.toml, `dim` what the
    /// table declares.
    pub fn open(&self, base: &Path, dim: usize) -> Result<Rows, ImportError> {
        let at = |path: &PathBuf| base.join(path);
        let layout = match self {
            Self::Safetensors { path, tensor, keys, counts } => {
                safetensors::open(&at(path), tensor, keys.as_deref(), counts.as_deref())
            }
            Self::Npy { path, keys, counts } => npy::open(
                &at(path),
                keys.as_ref().map(at).as_deref(),
                counts.as_ref().map(at).as_deref(),
            ),
            Self::Hugectr { path } => hugectr::open(&at(path)),
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
