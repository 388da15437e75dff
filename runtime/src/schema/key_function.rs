//! Key functions: how the raw values of a feature become keys, as the trainer made them. The
//! function is part of the schema, so an application can send raw values. A function allocates
//! nothing.

use crate::limits::{BOUNDARIES_MAX, RAW_BYTES_MAX};
use crate::schema::farmhash::fingerprint64;
use crate::schema::raw_value::RawValue;
use crate::schema::vocabulary::Vocabulary;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use siphasher::sip::SipHasher24;
use std::fmt::Write;
use std::hash::Hasher;
use std::sync::Arc;

/// The key of an unknown value. An index table never has a row for this key.
pub const UNKNOWN_KEY: u64 = u64::MAX;
/// The constant that cuDF adds to the hash of a row with one column.
const CUDF_COLUMN: u32 = 0x9e37_79b9;

/// How the values of a feature become keys. The order of the variants is part of the bundle format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum KeyFunction {
    /// The values are the keys.
    #[default]
    Key,
    /// `first` plus the hash modulo `buckets`. Texts and integers.
    Hash {
        /// The hash.
        hash: KeyHash,
        /// The number of keys.
        buckets: u64,
        /// The lowest key.
        first: u64,
    },
    /// `first` plus the value modulo `divisor`, a remainder that is never negative. Integers.
    Modulo {
        /// The number of keys.
        divisor: u64,
        /// The lowest key.
        first: u64,
    },
    /// `first` plus the value if it is below `size`, else [`UNKNOWN_KEY`]. Integers.
    Range {
        /// The number of keys.
        size: u64,
        /// The lowest key.
        first: u64,
    },
    /// The key of the word. Texts, and integers as decimal text.
    Vocabulary {
        /// The words with their keys.
        #[serde(serialize_with = "serialize_words", deserialize_with = "deserialize_words")]
        words: Arc<Vocabulary>,
        /// The key of any other word.
        unknown: Unknown,
    },
    /// `first` plus the number of boundaries below the value. Integers and floats.
    Buckets {
        /// The boundaries, ascending.
        boundaries: Vec<f64>,
        /// The lowest key.
        first: u64,
        /// The bucket of a value that is a boundary.
        side: Side,
    },
    /// `first` plus the hash of one value of each column modulo `buckets`: see `cross.rs`.
    Cross {
        /// The numbers of the features whose raw values are crossed.
        columns: Vec<u16>,
        /// The number of keys.
        buckets: u64,
        /// The lowest key.
        first: u64,
    },
}

/// A hash of a text or of an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyHash {
    /// FarmHash's Fingerprint64, of an integer's decimal text: TensorFlow's `to_hash_bucket_fast`.
    Farmhash64,
    /// SipHash-2-4 with a key of 128 bits, of an integer's decimal text: TensorFlow's
    /// `to_hash_bucket_strong`.
    Siphash {
        /// The key.
        key: [u64; 2],
    },
    /// MurmurHash3 for x86, 32 bits, of an integer's bytes.
    Murmur3 {
        /// The seed.
        seed: u32,
        /// The type of integers.
        integer: IntegerType,
    },
    /// The row hash of cuDF, which NVTabular's `HashBucket` uses: MurmurHash3 with seed 0, plus the
    /// constant with which cuDF combines columns.
    CudfMurmur3 {
        /// The type of integers.
        integer: IntegerType,
    },
}

/// The type of a trainer's integer column, whose bytes are hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IntegerType {
    /// 8 bytes.
    #[default]
    Int64,
    /// 4 bytes.
    Int32,
}

/// The key of a word that is not in the vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unknown {
    /// [`UNKNOWN_KEY`], which counts as absent.
    #[default]
    Absent,
    /// This key.
    Key(u64),
    /// `first` plus the word's Fingerprint64 modulo `buckets`.
    Buckets {
        /// The lowest key.
        first: u64,
        /// The number of keys.
        buckets: u64,
    },
}

/// The bucket of a value that is a boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The one above: TensorFlow's `Bucketize`, Keras' `Discretization`, NVTabular's `Bucketize`.
    #[default]
    Above,
    /// The one below: PyTorch's `bucketize` by default.
    Below,
}

/// Why a value has no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value} is not {takes}")]
pub struct KeyError {
    /// The value.
    pub value: String,
    /// The kind of value that the feature takes.
    pub takes: &'static str,
}

impl KeyFunction {
    /// Returns the key of `value`.
    ///
    /// # Errors
    /// [`KeyError`] if the function does not take such a value.
    pub fn apply(&self, value: &RawValue<'_>) -> Result<u64, KeyError> {
        match self {
            Self::Key => match value {
                RawValue::Unsigned(key) => Ok(*key),
                // `pack` reads int64 keys by their bits, so a request's negative key has them too.
                RawValue::Negative(key) => Ok(*key as u64),
                other => Err(refuse(other, "a key, an integer of 64 bits")),
            },
            Self::Hash { hash, buckets, first } => Ok(first + hash.of(value)? % buckets),
            Self::Modulo { divisor, first } => {
                let rest = match value {
                    RawValue::Unsigned(n) => n % divisor,
                    RawValue::Negative(n) => {
                        let rest = i128::from(*n).rem_euclid(i128::from(*divisor));
                        u64::try_from(rest).unwrap_or_default()
                    }
                    other => return Err(refuse(other, "an integer of 64 bits")),
                };
                Ok(first + rest)
            }
            Self::Range { size, first } => match value {
                RawValue::Unsigned(n) if n < size => Ok(first + n),
                RawValue::Unsigned(_) | RawValue::Negative(_) => Ok(UNKNOWN_KEY),
                other => Err(refuse(other, "an integer of 64 bits")),
            },
            Self::Vocabulary { words, unknown } => {
                with_text(value, |word| words.key(word).unwrap_or_else(|| unknown.key(word)))
            }
            Self::Buckets { boundaries, first, side } => {
                let number = number(value).ok_or_else(|| refuse(value, "a finite number"))?;
                // The f32 of 0.7 is below the f64 of 0.7, so both sides are compared as f32.
                let rounded = |boundary: f64| match value {
                    RawValue::Float32(_) => f64::from(boundary as f32),
                    _ => boundary,
                };
                let is_below = |boundary: &f64| match side {
                    Side::Above => rounded(*boundary) <= number,
                    Side::Below => rounded(*boundary) < number,
                };
                Ok(first + boundaries.partition_point(is_below) as u64)
            }
            Self::Cross { .. } => Err(refuse(value, "for this feature: it crosses other columns")),
        }
    }

    /// Returns whether `newer` gives each value the same key as this function. Only words that are
    /// new in a vocabulary may differ.
    pub fn is_extended_by(&self, newer: &Self) -> bool {
        match (self, newer) {
            (
                Self::Vocabulary { words, unknown },
                Self::Vocabulary { words: more, unknown: same },
            ) => unknown == same && words.words().all(|(word, key)| more.key(word) == Some(key)),
            _ => self == newer,
        }
    }

    /// Returns the largest key that the function makes; `None` if any u64 can be a key. A value
    /// outside a vocabulary that counts as absent has none of these keys.
    pub fn key_max(&self) -> Option<u64> {
        match self {
            Self::Key => None,
            Self::Hash { buckets, first, .. } | Self::Cross { buckets, first, .. } => {
                Some(first + (buckets - 1))
            }
            Self::Modulo { divisor, first } => Some(first + (divisor - 1)),
            Self::Range { size, first } => Some(first + (size - 1)),
            Self::Vocabulary { words, unknown } => match unknown {
                Unknown::Absent => words.key_max(),
                Unknown::Key(key) => words.key_max().max(Some(*key)),
                Unknown::Buckets { first, buckets } => {
                    words.key_max().max(Some(first + (buckets - 1)))
                }
            },
            Self::Buckets { boundaries, first, .. } => Some(first + boundaries.len() as u64),
        }
    }

    /// Returns whether a value may become [`UNKNOWN_KEY`].
    pub fn may_be_unknown(&self) -> bool {
        matches!(self, Self::Range { .. } | Self::Vocabulary { unknown: Unknown::Absent, .. })
    }

    /// Returns whether the empty text is a word of its vocabulary.
    pub fn has_empty_word(&self) -> bool {
        matches!(self, Self::Vocabulary { words, .. } if words.key("").is_some())
    }

    /// Returns the bytes of its vocabulary in memory.
    pub fn bytes(&self) -> usize {
        if let Self::Vocabulary { words, .. } = self { words.bytes() } else { 0 }
    }

    /// Checks the numbers of the function.
    ///
    /// # Errors
    /// A text that names the wrong number.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Key => Ok(()),
            Self::Hash { buckets, first, .. } | Self::Cross { buckets, first, .. } => {
                check_range(*first, *buckets)
            }
            Self::Modulo { divisor, first } => check_range(*first, *divisor),
            Self::Range { size, first } => check_range(*first, *size),
            Self::Vocabulary { words, unknown } => {
                words.check().map_err(|problem| format!("vocabulary: {problem}"))?;
                match unknown {
                    Unknown::Buckets { first, buckets } => check_range(*first, *buckets),
                    _ => Ok(()),
                }
            }
            Self::Buckets { boundaries, first, .. } => {
                let n = boundaries.len();
                if n == 0 || n > BOUNDARIES_MAX {
                    return Err(format!("{n} boundaries, not 1 to {BOUNDARIES_MAX}"));
                }
                let ascending = boundaries.windows(2).all(|pair| pair[0] < pair[1]);
                if !ascending || boundaries.iter().any(|b| !b.is_finite()) {
                    return Err("the boundaries are not finite and ascending".to_owned());
                }
                check_range(*first, n as u64 + 1)
            }
        }
    }
}

fn serialize_words<S: Serializer>(words: &Arc<Vocabulary>, to: S) -> Result<S::Ok, S::Error> {
    words.as_ref().serialize(to)
}

fn deserialize_words<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<Vocabulary>, D::Error> {
    Vocabulary::deserialize(from).map(Arc::new)
}

/// Checks that `count` is positive and that all of the `count` keys from `first` on are below
/// [`UNKNOWN_KEY`].
fn check_range(first: u64, count: u64) -> Result<(), String> {
    match first.checked_add(count) {
        Some(_) if count > 0 => Ok(()),
        _ => Err(format!("{count} keys from {first} on")),
    }
}

impl Unknown {
    fn key(self, word: &str) -> u64 {
        match self {
            Self::Absent => UNKNOWN_KEY,
            Self::Key(key) => key,
            Self::Buckets { first, buckets } => first + fingerprint64(word.as_bytes()) % buckets,
        }
    }
}

impl KeyHash {
    /// Returns the hash of `value`.
    fn of(self, value: &RawValue<'_>) -> Result<u64, KeyError> {
        match self {
            Self::Farmhash64 => with_text(value, |text| fingerprint64(text.as_bytes())),
            Self::Siphash { key } => with_text(value, |text| {
                let mut hasher = SipHasher24::new_with_keys(key[0], key[1]);
                hasher.write(text.as_bytes());
                hasher.finish()
            }),
            Self::Murmur3 { seed, integer } => Ok(murmur3(value, seed, integer)?.into()),
            Self::CudfMurmur3 { integer } => {
                Ok(murmur3(value, 0, integer)?.wrapping_add(CUDF_COLUMN).into())
            }
        }
    }
}

/// Returns the MurmurHash3 of the bytes of `value`.
fn murmur3(value: &RawValue<'_>, seed: u32, integer: IntegerType) -> Result<u32, KeyError> {
    let of = |mut bytes: &[u8]| {
        murmur3::murmur3_32(&mut bytes, seed).unwrap_or_else(|e| unreachable!("a slice: {e}"))
    };
    let bits = match value {
        RawValue::Text(text) => return check_text(text).map(|text| of(text.as_bytes())),
        RawValue::Unsigned(n) => i128::from(*n),
        RawValue::Negative(n) => i128::from(*n),
        RawValue::Float(_) | RawValue::Float32(_) | RawValue::Null => {
            return Err(refuse(value, "a text or an integer of 64 bits"));
        }
    };
    match integer {
        // A u64 and an i64 of the same bits have the same hash.
        IntegerType::Int64 => Ok(of(&(bits as u64).to_le_bytes())),
        IntegerType::Int32 => match i32::try_from(bits) {
            Ok(n) => Ok(of(&n.to_le_bytes())),
            Err(_) => Err(refuse(value, "an integer of 32 bits")),
        },
    }
}

/// Calls `take` with a text, or with the decimal text of an integer.
fn with_text<T>(value: &RawValue<'_>, take: impl FnOnce(&str) -> T) -> Result<T, KeyError> {
    let mut decimal = heapless::String::<24>::new();
    // An integer of 64 bits has at most 20 characters.
    let written = match value {
        RawValue::Text(text) => return check_text(text).map(take),
        RawValue::Unsigned(n) => write!(decimal, "{n}"),
        RawValue::Negative(n) => write!(decimal, "{n}"),
        RawValue::Float(_) | RawValue::Float32(_) | RawValue::Null => {
            return Err(refuse(value, "a text or an integer of 64 bits"));
        }
    };
    debug_assert!(written.is_ok());
    Ok(take(&decimal))
}

fn check_text(text: &str) -> Result<&str, KeyError> {
    if text.len() <= RAW_BYTES_MAX {
        return Ok(text);
    }
    let value = format!("a text of {} bytes", text.len());
    Err(KeyError { value, takes: "one of at most 1024 bytes" })
}

fn number(value: &RawValue<'_>) -> Option<f64> {
    match value {
        RawValue::Text(_) | RawValue::Null => None,
        RawValue::Unsigned(n) => Some(*n as f64),
        RawValue::Negative(n) => Some(*n as f64),
        RawValue::Float(x) => x.is_finite().then_some(*x),
        RawValue::Float32(x) => x.is_finite().then_some(f64::from(*x)),
    }
}

fn refuse(value: &RawValue<'_>, takes: &'static str) -> KeyError {
    KeyError { value: value.to_string(), takes }
}

const _: () = assert!(RAW_BYTES_MAX == 1024, "the text of an error says so");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(hash: KeyHash, buckets: u64) -> KeyFunction {
        KeyFunction::Hash { hash, buckets, first: 0 }
    }

    fn keys<'a>(
        function: &KeyFunction,
        values: impl IntoIterator<Item = RawValue<'a>>,
    ) -> Vec<u64> {
        values.into_iter().map(|value| function.apply(&value).unwrap()).collect()
    }

    /// The values of TensorFlow's own tests, `string_to_hash_bucket_op_test.py`.
    #[test]
    fn hashes_of_texts_are_tensorflows() {
        let texts = || ["a", "b", "c", "d"].map(RawValue::from);
        assert_eq!(keys(&hash(KeyHash::Farmhash64, 10), texts()), [9, 2, 2, 5]);
        assert_eq!(KeyHash::Farmhash64.of(&"a".into()), Ok(12_917_804_110_809_363_939));
        let strong = KeyHash::Siphash { key: [98_765, 132] };
        assert_eq!(keys(&hash(strong, 10), texts())[..3], [4, 2, 8]);
        assert_eq!(strong.of(&"b".into()), Ok(15_805_638_358_933_211_562));
    }

    /// The values in the documentation of cuDF's `Series.hash_values`.
    #[test]
    fn hashes_of_integers_are_cudfs() {
        let cudf = KeyHash::CudfMurmur3 { integer: IntegerType::Int64 };
        let values = || [10u64, 120, 30].map(RawValue::from);
        let expected = [-1_930_516_747i32, 422_619_251, -941_520_876];
        let hashes = values().map(|value| cudf.of(&value).unwrap());
        assert_eq!(hashes.map(|hash| hash as u32 as i32), expected);
        assert_eq!(keys(&hash(cudf, 1000), values()), [549, 251, 420]);
    }

    /// The values that MurmurHash3's users publish.
    #[test]
    fn murmur3_is_that_of_its_author() {
        let of = |text: &str, seed| {
            let hash = KeyHash::Murmur3 { seed, integer: IntegerType::Int64 };
            hash.of(&text.into()).unwrap()
        };
        let fox = "The quick brown fox jumps over the lazy dog";
        assert_eq!([of("", 0), of("", 1), of(fox, 0)], [0, 0x514e_28b7, 0x2e4f_f723]);
    }

    /// The digests of the hashes of 300 texts of all lengths come from the C++ code of the hashes'
    /// authors. They were computed with the Python packages `cityhash`, `mmh3` and `siphash24`.
    #[test]
    fn hashes_of_texts_of_all_lengths_are_those_of_their_authors() {
        let text = |n: usize| -> String {
            (0..n).map(|i| char::from(b'a' + ((n * 7 + i * 13) % 26) as u8)).collect()
        };
        let digest = |hash: KeyHash| {
            let next =
                |digest: u64, n| digest.rotate_left(7) ^ hash.of(&text(n)[..].into()).unwrap();
            (0..300).fold(0, next)
        };
        assert_eq!(digest(KeyHash::Farmhash64), 15_389_709_709_350_049_958);
        assert_eq!(digest(KeyHash::Siphash { key: [98_765, 132] }), 15_167_272_690_938_298_000);
        let murmur3 = KeyHash::Murmur3 { seed: 42, integer: IntegerType::Int64 };
        assert_eq!(digest(murmur3), 709_054_734_662_718_241);
    }

    #[test]
    fn integers_are_hashed_as_their_text_or_their_bytes() {
        let text = hash(KeyHash::Farmhash64, 1 << 40);
        assert_eq!(text.apply(&(-7i64).into()), text.apply(&"-7".into()));
        assert_eq!(text.apply(&u64::MAX.into()), text.apply(&"18446744073709551615".into()));
        let of = |integer, value: RawValue<'_>| {
            KeyHash::Murmur3 { seed: 0, integer }.of(&value).map(|hash| hash as u32)
        };
        let bytes = |mut bytes: &[u8]| Ok(murmur3::murmur3_32(&mut bytes, 0).unwrap());
        assert_eq!(of(IntegerType::Int64, (-7i64).into()), bytes(&(-7i64).to_le_bytes()));
        assert_eq!(of(IntegerType::Int32, (-7i64).into()), bytes(&(-7i32).to_le_bytes()));
        let error = of(IntegerType::Int32, (1u64 << 31).into()).unwrap_err().to_string();
        assert_eq!(error, "2147483648 is not an integer of 32 bits");
    }

    #[test]
    fn a_number_that_is_a_boundary_has_the_same_bucket_as_f32_and_as_f64() {
        for (side, bucket) in [(Side::Above, 1), (Side::Below, 0)] {
            let buckets = KeyFunction::Buckets { boundaries: vec![0.7], first: 0, side };
            let key = |value: RawValue<'_>| buckets.apply(&value).unwrap();
            assert_eq!([key(0.7.into()), key(RawValue::Float32(0.7))], [bucket; 2], "{side:?}");
        }
    }

    #[test]
    fn a_negative_key_is_the_u64_of_the_same_bits() {
        let key = |value: RawValue<'_>| KeyFunction::Key.apply(&value);
        assert_eq!(key((-1i64).into()), Ok(u64::MAX));
        assert_eq!(key(i64::MIN.into()), key((1u64 << 63).into()));
    }

    #[test]
    fn values_of_another_type_are_refused() {
        let words = Arc::new(Vocabulary::new(vec![("a".to_owned(), 3)]).unwrap());
        let vocabulary = KeyFunction::Vocabulary { words, unknown: Unknown::Key(1) };
        let buckets = KeyFunction::Buckets { boundaries: vec![0.5], first: 0, side: Side::Above };
        let modulo = KeyFunction::Modulo { divisor: 3, first: 0 };
        let long = "x".repeat(RAW_BYTES_MAX + 1);
        let refused: [(&KeyFunction, RawValue<'_>, &str); 8] = [
            (&KeyFunction::Key, "a".into(), "the text `a` is not a key"),
            (&hash(KeyHash::Farmhash64, 3), 0.5.into(), "0.5 is not a text or an integer"),
            (&vocabulary, 0.5.into(), "0.5 is not a text or an integer"),
            (&vocabulary, long.as_str().into(), "a text of 1025 bytes is not one of at most"),
            (&modulo, "1".into(), "the text `1` is not an integer of 64 bits"),
            (&modulo, 2f64.powi(64).into(), "about 1.8446744073709552e19 is not an integer of 64"),
            (&buckets, "1".into(), "the text `1` is not a finite number"),
            (&buckets, f64::NAN.into(), "NaN is not a finite number"),
        ];
        for (function, value, problem) in refused {
            let error = function.apply(&value).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{error}");
        }
    }

    #[test]
    fn functions_that_contradict_themselves_are_refused() {
        let buckets = |boundaries: &[f64]| KeyFunction::Buckets {
            boundaries: boundaries.to_vec(),
            first: 0,
            side: Side::Above,
        };
        for function in [
            hash(KeyHash::Farmhash64, 0),
            KeyFunction::Modulo { divisor: 0, first: 5 },
            KeyFunction::Modulo { divisor: 2, first: u64::MAX - 1 },
            KeyFunction::Range { size: 0, first: 5 },
            KeyFunction::Range { size: 3, first: u64::MAX - 1 },
            buckets(&[]),
            buckets(&[1.0, 1.0]),
            buckets(&[f64::NAN]),
            buckets(&[0.0, f64::INFINITY]),
        ] {
            assert!(function.check().is_err(), "{function:?}");
        }
    }

    #[test]
    fn a_vocabulary_may_grow_but_no_word_may_change_its_key() {
        let function = |words: &[(&str, u64)], unknown| {
            let words = words.iter().map(|(word, key)| ((*word).to_owned(), *key)).collect();
            let words = Arc::new(Vocabulary::new(words).unwrap());
            KeyFunction::Vocabulary { words, unknown }
        };
        let old = function(&[("a", 2), ("b", 3)], Unknown::Key(1));
        assert!(old.is_extended_by(&function(&[("a", 2), ("b", 3), ("c", 4)], Unknown::Key(1))));
        assert!(!old.is_extended_by(&function(&[("a", 3), ("b", 2)], Unknown::Key(1))));
        assert!(!old.is_extended_by(&function(&[("a", 2)], Unknown::Key(1))));
        assert!(!old.is_extended_by(&function(&[("a", 2), ("b", 3)], Unknown::Key(0))));
        assert!(!old.is_extended_by(&KeyFunction::Key));
        assert!(hash(KeyHash::Farmhash64, 5).is_extended_by(&hash(KeyHash::Farmhash64, 5)));
        assert!(!hash(KeyHash::Farmhash64, 5).is_extended_by(&hash(KeyHash::Farmhash64, 6)));
    }

    proptest! {
        #[test]
        fn a_bucket_is_the_number_of_boundaries_below(
            mut boundaries in prop::collection::vec(-20i8..20, 1..20),
            value in -25i8..25,
            first in 0u64..5,
        ) {
            boundaries.sort_unstable();
            boundaries.dedup();
            let floats: Vec<f64> = boundaries.iter().map(|b| f64::from(*b)).collect();
            for side in [Side::Above, Side::Below] {
                let function = KeyFunction::Buckets { boundaries: floats.clone(), first, side };
                function.check().unwrap();
                let is_below = |b: &&i8| **b < value || (side == Side::Above && **b == value);
                let below = boundaries.iter().filter(is_below).count() as u64;
                prop_assert_eq!(function.apply(&f64::from(value).into()), Ok(first + below));
                prop_assert_eq!(function.apply(&i64::from(value).into()), Ok(first + below));
                prop_assert!(function.key_max() >= Some(first + below));
            }
        }

        #[test]
        fn a_rest_is_never_negative(value in any::<i64>(), divisor in 1u64.., first in 0u64..9) {
            let function = KeyFunction::Modulo { divisor: divisor >> 4, first };
            prop_assume!(function.check().is_ok());
            let rest = i128::from(value).rem_euclid(i128::from(divisor >> 4));
            prop_assert_eq!(function.apply(&value.into()), Ok(first + rest as u64));
        }

        #[test]
        fn a_value_outside_its_range_has_no_key(value in -9i64..99, size in 1u64..50) {
            let first = size % 9;
            let function = KeyFunction::Range { size, first };
            let inside = u64::try_from(value).ok().filter(|value| *value < size);
            let key = inside.map_or(UNKNOWN_KEY, |value| first + value);
            prop_assert_eq!(function.apply(&value.into()), Ok(key));
        }

        #[test]
        fn a_key_is_within_the_range(text in ".{0,80}", buckets in 1u64..1000, first in 0u64..9) {
            for hash in [
                KeyHash::Farmhash64,
                KeyHash::Siphash { key: [1, 2] },
                KeyHash::Murmur3 { seed: 3, integer: IntegerType::Int64 },
                KeyHash::CudfMurmur3 { integer: IntegerType::Int32 },
            ] {
                let function = KeyFunction::Hash { hash, buckets, first };
                let key = function.apply(&text.as_str().into()).unwrap();
                prop_assert!((first..first + buckets).contains(&key));
                prop_assert_eq!(function.key_max(), Some(first + buckets - 1));
            }
            let function = KeyFunction::Modulo { divisor: buckets, first };
            prop_assert_eq!(function.key_max(), Some(first + buckets - 1));
        }
    }
}
