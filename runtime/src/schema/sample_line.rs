//! A sample as a line of JSON, before the schema gives its names a meaning. Never reads a schema.

use crate::schema::object::Object;
use crate::schema::raw_value::{RawValue, Shortened};
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// The fields of a line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line<'a> {
    #[serde(default)]
    pub dense: DenseValues,
    #[serde(default, borrow)]
    pub sparse: UniqueMap<Vec<RawValue<'a>>>,
    #[serde(default)]
    pub weights: UniqueMap<Vec<f32>>,
    pub label: Option<Outcome>,
    pub score: Option<Outcome>,
    /// The samples of a request, which all have the other fields of the line.
    #[serde(borrow)]
    pub candidates: Option<Vec<Object<Line<'a>>>>,
    /// The model that the sample is for. A server of several models reads it.
    #[serde(rename = "model")]
    _model: Option<IgnoredAny>,
}

impl Line<'_> {
    /// Adds the values of `request`, the line that has this candidate.
    ///
    /// # Errors
    /// The field that both have.
    pub fn add(&mut self, request: &Self) -> Result<(), String> {
        let double = self.sparse.add(&request.sparse).map(|name| ("sparse", name));
        let double = double.or(self.weights.add(&request.weights).map(|name| ("weights", name)));
        let dense = match (&mut self.dense, &request.dense) {
            (_, DenseValues::List(all)) if all.is_empty() => None,
            (DenseValues::List(own), all) if own.is_empty() => {
                self.dense = all.clone();
                None
            }
            (DenseValues::Named(own), DenseValues::Named(all)) => own.add(all),
            _ => return Err("dense".to_owned()),
        };
        match double.or(dense.map(|name| ("dense", name))) {
            Some((field, name)) => Err(format!("{field}.{}", Shortened(&name))),
            None => Ok(()),
        }
    }
}

/// A label or a score: of the only output, of each output in order, or of each output by name.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a label or score is a number, a list, or an object with a number for each output"
)]
pub(super) enum Outcome {
    One(f32),
    List(Vec<Option<f32>>),
    Named(UniqueMap<Option<f32>>),
}

/// The dense values: of each feature in order, or of each feature by name.
#[derive(Clone)]
pub(super) enum DenseValues {
    List(Vec<Option<f32>>),
    Named(UniqueMap<Option<f32>>),
}

impl Default for DenseValues {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

// By hand, as serde's `untagged` would lose the position of a wrong value.
impl<'de> Deserialize<'de> for DenseValues {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(DenseVisitor)
    }
}

struct DenseVisitor;

impl<'de> Visitor<'de> for DenseVisitor {
    type Value = DenseValues;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a list of numbers, or an object with a number for each dense feature")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<DenseValues, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(DenseValues::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<DenseValues, A::Error> {
        UniqueMapVisitor(PhantomData).visit_map(entries).map(DenseValues::Named)
    }
}

/// Values by name. A name that occurs twice is refused: one of its values would silently be lost.
#[derive(Clone)]
pub(super) struct UniqueMap<T>(pub BTreeMap<String, T>);

impl<T> Default for UniqueMap<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Clone> UniqueMap<T> {
    /// Adds `more`. Returns a name that both have.
    fn add(&mut self, more: &Self) -> Option<String> {
        let double = more.0.keys().find(|name| self.0.contains_key(*name)).cloned();
        self.0.extend(more.0.iter().map(|(name, value)| (name.clone(), value.clone())));
        double
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<T> {
    type Value = UniqueMap<T>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object with a value for each name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<UniqueMap<T>, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((name, value)) = entries.next_entry::<String, T>()? {
            if map.contains_key(&name) {
                let name = Shortened(&name);
                return Err(A::Error::custom(format!("`{name}` occurs twice in one object")));
            }
            map.insert(name, value);
        }
        Ok(UniqueMap(map))
    }
}

/// A number that other languages write and JSON does not have, such as NaN.
#[derive(Debug, PartialEq)]
pub(super) struct ForeignNumber<'a> {
    /// The place, such as `weights.history[2]`.
    pub field: String,
    /// The position in the list `dense`.
    pub dense: Option<usize>,
    pub text: &'a str,
}

/// A step from a line's object to one of its values.
enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// Returns the first NaN or infinity of `line` before byte `end`, or the number that ends there if
/// it is beyond a 32-bit float.
pub(super) fn foreign_number(line: &str, end: usize) -> Option<ForeignNumber<'_>> {
    let (mut steps, mut key, mut at) = (Vec::new(), "", 0);
    while at < end.min(line.len()) {
        let rest = &line[at..];
        let is_word = |c: char| c.is_ascii_alphanumeric() || "+-._".contains(c);
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        let is_foreign = word.parse().is_ok_and(|number: f32| !number.is_finite());
        let is_decimal = word.contains(|c: char| c.is_ascii_digit());
        if is_foreign && (!is_decimal || at + word.len() == end) {
            let dense = match steps.as_slice() {
                [Step::Key("dense"), Step::Index(i)] => Some(*i),
                _ => None,
            };
            let shown = |step: &Step| match step {
                Step::Key(key) => format!(".{}", Shortened(key)),
                Step::Index(i) => format!("[{i}]"),
            };
            let field = steps.iter().map(shown).collect::<String>();
            let field = field.trim_start_matches('.').to_owned();
            return Some(ForeignNumber { field, dense, text: word });
        }

        at += word.len().max(rest.chars().next().map_or(1, char::len_utf8));
        match (rest.as_bytes()[0], steps.last_mut()) {
            (b'"', _) => {
                let mut escaped = false;
                let ends = |&(_, c): &(usize, char)| {
                    let is_end = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    is_end
                };
                let (length, _) = rest[1..].char_indices().find(ends)?;
                key = &rest[1..=length];
                at += length + 1;
            }
            (b'{', _) => steps.push(Step::Key("")),
            (b'[', _) => steps.push(Step::Index(0)),
            (b'}' | b']', _) => drop(steps.pop()),
            (b':', Some(Step::Key(of))) => *of = key,
            (b',', Some(Step::Index(i))) => *i += 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_json_does_not_have_is_found_with_its_place() {
        let found = |line: &'static str| {
            let found = foreign_number(line, line.len())?;
            Some((found.field, found.dense, found.text))
        };
        let is = |line, field: &str, dense, text| {
            assert_eq!(found(line), Some((field.to_owned(), dense, text)), "{line}");
        };
        is(r#"{"sparse": {"a": [1, 2]}, "score": NaN}"#, "score", None, "NaN");
        is(r#"{"dense": [0.5, -Infinity]}"#, "dense[1]", Some(1), "-Infinity");
        is(r#"{"dense": {"a\"b": nan}}"#, "dense.a\\\\\\\"b", None, "nan");
        is(r#"{"weights": {"ä": [[1], inf]}}"#, "weights.ä[1]", None, "inf");
        assert_eq!(
            found(r#"{"sparse": {"NaN": ["nan", "x\\"]}, "score": 1e5, "label": null}"#),
            None
        );
        is(r#"{"dense": [1, 4e38"#, "dense[1]", Some(1), "4e38");
        assert_eq!(found(r#"{"sparse": {"a": [4e38]}, "score": x"#), None);
        assert_eq!(found("{\"é"), None);
    }
    /// Without its feature `float_roundtrip`, `serde_json` reads one double in ten as another.
    #[test]
    fn a_double_is_read_exactly() {
        let read: f64 = serde_json::from_str("0.38120423768821243").unwrap();
        assert_eq!(read.to_bits(), 0.381_204_237_688_212_43_f64.to_bits());
    }
}
