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
