//! `key = { function = "...", ... }` of a `[[feature]]` in model.toml: how raw values become keys.
//! Reads the file of a vocabulary; never reads rows.

use crate::report::input;
use anyhow::{Context, Result, anyhow, bail, ensure};
use hatchback::limits::VOCABULARY_BYTES_MAX;
use hatchback::schema::key_function::{IntegerType, KeyFunction, KeyHash, Side, Unknown};
use hatchback::schema::vocabulary::Vocabulary;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A key function.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "function", rename_all = "snake_case", deny_unknown_fields)]
pub enum KeySpec {
    /// TensorFlow's `to_hash_bucket_fast`, Keras' `Hashing`.
    Farmhash64 {
        /// Number of keys.
        buckets: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// TensorFlow's `to_hash_bucket_strong`, Keras' `Hashing` with a salt.
    Siphash {
        /// The two numbers of the hash's key.
        key: [u64; 2],
        /// Number of keys.
        buckets: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// MurmurHash3 for x86, 32 bits.
    Murmur3 {
        /// Seed of the hash.
        #[serde(default)]
        seed: u32,
        /// Type of the trainer's integer column.
        #[serde(default)]
        integer: IntegerType,
        /// Number of keys.
        buckets: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// NVTabular's `HashBucket` on a GPU.
    CudfMurmur3 {
        /// Type of the trainer's integer column.
        #[serde(default)]
        integer: IntegerType,
        /// Number of keys.
        buckets: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// The remainder of a division.
    Modulo {
        /// Number of keys.
        divisor: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// The value itself, within a range.
    Range {
        /// Number of keys. A value from `size` on counts as absent.
        size: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
    /// The position of a word in a vocabulary.
    Vocabulary {
        /// A file with one word a line.
        path: PathBuf,
        /// Key of the first word.
        #[serde(default)]
        first: u64,
        /// Least count of a word. Each line then has a tab and the count after the word.
        min_count: Option<u64>,
        /// The key of any other word.
        #[serde(default)]
        unknown: UnknownSpec,
    },
    /// The bucket in which a number is.
    Buckets {
        /// The boundaries, ascending.
        boundaries: Vec<f64>,
        /// Key of the lowest bucket.
        #[serde(default)]
        first: u64,
        /// Bucket of a value that is a boundary.
        #[serde(default)]
        side: Side,
    },
    /// Keras' `HashedCrossing`.
    Cross {
        /// Names of the features whose raw values are crossed, in the order of the trainer.
        columns: Vec<String>,
        /// Number of keys.
        buckets: u64,
        /// Lowest key.
        #[serde(default)]
        first: u64,
    },
}

/// The key of a word that is not in the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(untagged, expecting = "unknown is a key, or a table with `first` and `buckets`")]
pub enum UnknownSpec {
    /// No key of the table.
    #[default]
    #[serde(skip)]
    Absent,
    /// One key.
    Key(u64),
    /// One of several keys, by the word's hash.
    Buckets(UnknownBuckets),
}

/// The keys of words that are not in the vocabulary.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnknownBuckets {
    /// Lowest key.
    pub first: u64,
    /// Number of keys.
    pub buckets: u64,
}

impl KeySpec {
    /// Returns the key function. `base` is the folder of model.toml, and `names` are those of the
    /// features.
    ///
    /// # Errors
    /// The file of a vocabulary cannot be read or is wrong; the error names the line.
    pub fn load(&self, base: &Path, names: &[&str]) -> Result<KeyFunction> {
        let hash = |hash, &buckets, &first| KeyFunction::Hash { hash, buckets, first };
        Ok(match self {
            Self::Farmhash64 { buckets, first } => hash(KeyHash::Farmhash64, buckets, first),
            Self::Siphash { key, buckets, first } => {
                hash(KeyHash::Siphash { key: *key }, buckets, first)
            }
            &Self::Murmur3 { seed, integer, ref buckets, ref first } => {
                hash(KeyHash::Murmur3 { seed, integer }, buckets, first)
            }
            &Self::CudfMurmur3 { integer, ref buckets, ref first } => {
                hash(KeyHash::CudfMurmur3 { integer }, buckets, first)
            }
            &Self::Modulo { divisor, first } => KeyFunction::Modulo { divisor, first },
            &Self::Range { size, first } => KeyFunction::Range { size, first },
            Self::Vocabulary { path, first, min_count, unknown } => {
                let words = read_words(&base.join(path), *first, *min_count)?;
                let unknown = match *unknown {
                    UnknownSpec::Absent => Unknown::Absent,
                    UnknownSpec::Key(key) => Unknown::Key(key),
                    UnknownSpec::Buckets(UnknownBuckets { first, buckets }) => {
                        Unknown::Buckets { first, buckets }
                    }
                };
                KeyFunction::Vocabulary { words: Arc::new(words), unknown }
            }
            Self::Buckets { boundaries, first, side } => {
                let boundaries = boundaries.clone();
                KeyFunction::Buckets { boundaries, first: *first, side: *side }
            }
            Self::Cross { columns, buckets, first } => {
                let number = |column: &String| {
                    let number = names.iter().position(|name| name == column);
                    let number = number.and_then(|number| u16::try_from(number).ok());
                    number.with_context(|| format!("columns: there is no feature `{column}`"))
                };
                let columns = columns.iter().map(number).collect::<Result<_>>()?;
                KeyFunction::Cross { columns, buckets: *buckets, first: *first }
            }
        })
    }
}

/// Reads a file of words, of which the first has the key `first`. With `min_count` the words with a
/// lower count are left out before the words are numbered.
fn read_words(path: &Path, first: u64, min_count: Option<u64>) -> Result<Vocabulary> {
    let name = || path.display().to_string();
    let text = input::read_text(path, 4 * VOCABULARY_BYTES_MAX as u64).with_context(name)?;

    let counted = |line: &str| {
        let count = line.rsplit_once('\t').map(|(_, count)| count.trim());
        count.is_some_and(|count| count.parse::<u64>().is_ok())
    };
    // Such words would be in no request.
    ensure!(
        min_count.is_some() || text.is_empty() || !text.lines().all(counted),
        "{}: every line ends with a tab and a count; set `min_count`, 0 for all words",
        name()
    );

    let mut words = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let at = || format!("{}:{}", name(), number + 1);
        let (word, count) = match min_count {
            None => (line, None),
            Some(_) => {
                let (word, count) = line.rsplit_once('\t').with_context(|| {
                    format!("{}: min_count needs a tab and a count after the word", at())
                })?;
                let count: u64 =
                    count.trim().parse().with_context(|| format!("{}: count `{count}`", at()))?;
                (word, Some(count))
            }
        };
        if count >= min_count {
            let key = first.checked_add(words.len() as u64);
            let key = key.with_context(|| format!("{}: no key is left", at()))?;
            words.push((word.to_owned(), key));
        }
    }
    if let (true, Some(least)) = (words.is_empty() && !text.is_empty(), min_count) {
        bail!("{}: min_count: no word has a count of at least {least}", name());
    }
    Vocabulary::new(words).map_err(|problem| anyhow!("{}: {problem}", name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::schema::raw_value::RawValue;

    fn load(toml: &str, words: &str) -> Result<KeyFunction> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("words.txt"), words)?;
        toml::from_str::<KeySpec>(toml)?.load(folder.path(), &[])
    }

    fn vocabulary(rest: &str, words: &str) -> Result<KeyFunction> {
        load(&format!("function = \"vocabulary\"\npath = \"words.txt\"\n{rest}"), words)
    }

    #[test]
    fn words_are_numbered_after_the_rare_ones_are_left_out() {
        let text = "b\t7\nrare\t2\na b\t3\nc\t12\n";
        let function = vocabulary("first = 2\nmin_count = 3\nunknown = 1", text).unwrap();
        let key = |word: &str| function.apply(&RawValue::from(word)).unwrap();
        assert_eq!([key("b"), key("a b"), key("c"), key("rare"), key("")], [2, 3, 4, 1, 1]);
        let plain = vocabulary("", "x\ty\nz\n").unwrap();
        assert_eq!(plain.apply(&RawValue::from("x\ty")), Ok(0));
        assert_eq!(plain.apply(&RawValue::from("w")), Ok(u64::MAX));
    }

    #[test]
    fn the_byte_order_mark_of_a_file_is_no_part_of_its_first_word() {
        let function = vocabulary("first = 1\nunknown = 0", "\u{feff}a\r\nb\r\n").unwrap();
        let key = |word: &str| function.apply(&RawValue::from(word)).unwrap();
        assert_eq!([key("a"), key("b"), key("c")], [1, 2, 0]);
    }

    #[test]
    fn a_wrong_file_of_words_is_refused_by_its_line() {
        let refused = |rest: &str, words: &str, problem: &str| {
            let error = format!("{:#}", vocabulary(rest, words).unwrap_err());
            assert!(error.contains("words.txt") && error.contains(problem), "{error}");
        };
        refused("", "a\nb\na\n", "`a` occurs twice");
        refused("", "", "has no word");
        refused("min_count = 0", "", "has no word");
        refused("", "a\t9\nb\t7\n", "set `min_count`, 0 for all words");
        refused("min_count = 1", "a\t3\nb\n", "words.txt:2: min_count needs a tab");
        refused("min_count = 1", "a\t3\nb\tx\n", "words.txt:2: count `x`");
        refused("first = 9223372036854775807\nmin_count = 5", "a\t3\n", "a count of at least 5");
    }

    #[test]
    fn a_misspelt_function_is_refused() {
        for toml in [
            "function = \"farmhash\"\nbuckets = 3",
            "function = \"farmhash64\"",
            "function = \"farmhash64\"\nbuckets = 3\nseed = 1",
            "function = \"vocabulary\"\npath = \"words.txt\"\nunknown = { first = 3 }",
            "function = \"buckets\"\nboundaries = [1.0]\nside = \"left\"",
        ] {
            assert!(toml::from_str::<KeySpec>(toml).is_err(), "{toml}");
        }
    }
}
