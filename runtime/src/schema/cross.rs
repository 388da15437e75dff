//! Crosses: the keys of a feature whose values are those of several others together, as Keras'
//! `HashedCrossing` and TensorFlow's `crossed_column` make them. Never reads a request itself.

use crate::limits::CROSS_COLUMNS_MAX;
use crate::schema::farmhash::fingerprint64;
use crate::schema::key_function::{KeyError, KeyFunction, UNKNOWN_KEY};
use crate::schema::raw_value::RawValue;
use crate::schema::{Feature, Schema, SchemaError, fault};

/// The hash with which TensorFlow begins a cross.
const FIRST_HASH: u64 = 0xde_cafc_affe;
/// The multiplier of the 64-bit MurmurHash, with which TensorFlow joins two hashes.
const MULTIPLIER: u64 = 0xc6a4_a793_5bd1_e995;

fn fold(bits: u64) -> u64 {
    bits ^ (bits >> 47)
}

/// Returns the hash of two hashes in this order.
fn join(left: u64, right: u64) -> u64 {
    let right = fold(right.wrapping_mul(MULTIPLIER)).wrapping_mul(MULTIPLIER);
    let both = (left ^ MULTIPLIER ^ right).wrapping_mul(MULTIPLIER);
    fold(fold(both).wrapping_mul(MULTIPLIER))
}

impl Feature {
    /// Returns the hash of a raw value of this feature in a cross: that of a text, an integer
    /// itself, and the number of a bucket.
    fn hash_in_cross(&self, value: &RawValue<'_>) -> Result<u64, KeyError> {
        match (&self.key, value) {
            (KeyFunction::Buckets { first, .. }, _) => Ok(self.key.apply(value)? - first),
            (_, RawValue::Text(text)) => Ok(fingerprint64(text.as_bytes())),
            (_, RawValue::Unsigned(n)) => Ok(*n),
            (_, RawValue::Negative(n)) => Ok(*n as u64),
            _ => Err(KeyError { value: value.to_string(), takes: "a text or an integer" }),
        }
    }
}

impl Schema {
    /// Calls `add` with the keys of feature `f`, if that is a cross: one for each choice of a value
    /// of each of its columns, where the last column changes fastest. `len` returns the number of
    /// values in the bag of a feature, and `value` returns one of them.
    ///
    /// # Errors
    /// The error of `value`, or a [`KeyError`] that `refused` has given the column's feature.
    pub fn cross<'a, E>(
        &self,
        f: usize,
        len: impl Fn(usize) -> usize,
        value: impl Fn(usize, usize) -> Result<RawValue<'a>, E>,
        refused: impl Fn(usize, KeyError) -> E,
        mut add: impl FnMut(u64),
    ) -> Result<(), E> {
        let feature = &self.features[f];
        let KeyFunction::Cross { columns, buckets, first } = &feature.key else { return Ok(()) };
        // A longer bag is refused where its own feature is checked.
        let len = |c: usize| len(c).min(self.features[c].hotness_max as usize);
        let columns = || columns.iter().map(|column| usize::from(*column));
        if columns().any(|c| len(c) == 0) {
            return Ok(());
        }

        let mut at = [0; CROSS_COLUMNS_MAX];
        loop {
            let (mut hash, mut is_missing) = (FIRST_HASH, false);
            for (c, at) in columns().zip(at) {
                let value = value(c, at)?;
                if feature.null.is_some() && value.is_missing() {
                    is_missing = true;
                    continue;
                }
                let right = self.features[c].hash_in_cross(&value).map_err(|e| refused(c, e))?;
                hash = join(hash, right);
            }
            add(feature.null.filter(|_| is_missing).unwrap_or(first + hash % buckets));

            let next = columns().zip(at).rposition(|(c, at)| at + 1 < len(c));
            let Some(column) = next else { return Ok(()) };
            at[column] += 1;
            at[column + 1..].fill(0);
        }
    }

    /// Returns the key of the cross `f` for one raw value of each of its columns, in their order.
    ///
    /// # Errors
    /// [`KeyError`] if feature `f` crosses not so many columns, or one does not take its value.
    pub fn cross_key(&self, f: usize, values: &[RawValue<'_>]) -> Result<u64, KeyError> {
        let columns = match &self.features[f].key {
            KeyFunction::Cross { columns, .. } if columns.len() == values.len() => columns,
            _ => {
                let value = format!("a list of {}", values.len());
                return Err(KeyError { value, takes: "one value for each column of a cross" });
            }
        };
        let value = |c: usize, _| {
            let at = columns.iter().position(|column| usize::from(*column) == c);
            Ok(at.map_or(RawValue::Null, |at| values[at].clone()))
        };
        let mut made = UNKNOWN_KEY;
        self.cross(f, |_| 1, value, |_, e| e, |key| made = key)?;
        Ok(made)
    }

    /// Checks the columns of feature `f`, if that is a cross.
    pub(super) fn check_cross(&self, f: usize) -> Result<(), SchemaError> {
        let KeyFunction::Cross { columns, .. } = &self.features[f].key else { return Ok(()) };
        let refuse = |problem: String| fault(format!("feature[{f}].key"), problem);
        if columns.len() < 2 || columns.len() > CROSS_COLUMNS_MAX {
            let problem = format!("{} columns, not 2 to {CROSS_COLUMNS_MAX}", columns.len());
            return refuse(problem);
        }
        if self.features[f].weighted {
            return refuse("a cross has no weights".to_owned());
        }
        let mut keys = 1u64;
        for &column in columns {
            let Some(base) = self.features.get(usize::from(column)) else {
                return refuse(format!("no feature {column}"));
            };
            if base.retired {
                return refuse(format!("`{}` is retired", base.name));
            }
            if matches!(base.key, KeyFunction::Cross { .. }) {
                return refuse(format!("`{}` is a cross itself", base.name));
            }
            keys = keys.saturating_mul(base.hotness_max.into());
        }
        match u64::from(self.features[f].hotness_max) {
            max if keys > max => refuse(format!("makes {keys} keys, over hotness_max {max}")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Network;
    use serde_json::Value;

    /// Made by `tests/data/keys/cross.py` with keras 3.15.1 and tensorflow 2.21.0: buckets, the
    /// values of the columns, and the bucket that Keras' `HashedCrossing` returns.
    const GOLDEN: &str = include_str!("../../../tests/data/keys/cross.json");

    fn schema(columns: u16, buckets: u64) -> Schema {
        let key = KeyFunction::Cross { columns: (0..columns).collect(), buckets, first: 0 };
        let mut features: Vec<Feature> =
            (0..columns).map(|c| Feature::plain(&c.to_string(), 3)).collect();
        features.push(Feature { key, ..Feature::plain("cross", 9) });
        let network = Network { inputs: vec![], outputs: vec![] };
        Schema { dense_features: vec![], tables: vec![], features, lookups: vec![], network }
    }

    fn raw(value: &Value) -> RawValue<'_> {
        match value.as_str() {
            Some(text) => text.into(),
            None => value.as_i64().unwrap().into(),
        }
    }

    fn keys(schema: &Schema, bags: &[Value]) -> Vec<u64> {
        let bag = |c: usize| bags[c].as_array().unwrap();
        let (mut keys, f) = (Vec::new(), bags.len());
        let value = |c: usize, at: usize| Ok::<_, KeyError>(raw(&bag(c)[at]));
        schema.cross(f, |c| bag(c).len(), value, |_, e| e, |key| keys.push(key)).unwrap();
        keys
    }

    #[test]
    fn crosses_are_those_of_keras() {
        let golden: Vec<(u64, Vec<Value>, u64)> = serde_json::from_str(GOLDEN).unwrap();
        assert!(golden.len() > 100);
        for (buckets, values, expected) in golden {
            let schema = schema(values.len() as u16, buckets);
            let bags: Vec<Value> = values.iter().map(|value| serde_json::json!([value])).collect();
            assert_eq!(keys(&schema, &bags), [expected], "{values:?}");
            let raw: Vec<RawValue<'_>> = values.iter().map(raw).collect();
            assert_eq!(schema.cross_key(raw.len(), &raw), Ok(expected), "{values:?}");
            assert!(schema.cross_key(raw.len(), &raw[1..]).is_err());
            assert!(schema.cross_key(0, &raw).is_err());
        }
    }

    #[test]
    fn bags_are_crossed_in_the_order_of_tensorflow() {
        // `tf.sparse.cross_hashed([[["a", "b"]], [["c", "d", "e"]]], 1000)`
        let bags = [serde_json::json!(["a", "b"]), serde_json::json!(["c", "d", "e"])];
        assert_eq!(keys(&schema(2, 1000), &bags), [566, 182, 817, 254, 454, 361]);
        let none = [serde_json::json!(["a", "b"]), serde_json::json!([])];
        assert!(keys(&schema(2, 1000), &none).is_empty());
    }

    #[test]
    fn a_cross_that_contradicts_its_columns_is_refused() {
        let refused = |change: &dyn Fn(&mut Schema), expected: &str| {
            let mut schema = schema(2, 10);
            change(&mut schema);
            let error = schema.check_cross(2).unwrap_err().to_string();
            assert_eq!(error, format!("feature[2].key: {expected}"));
        };
        let of = |columns: &[u16]| {
            let columns = columns.to_vec();
            move |schema: &mut Schema| {
                let columns = columns.clone();
                schema.features[2].key = KeyFunction::Cross { columns, buckets: 10, first: 0 };
            }
        };
        refused(&of(&[0]), "1 columns, not 2 to 8");
        refused(&of(&[0; 9]), "9 columns, not 2 to 8");
        refused(&of(&[0, 7]), "no feature 7");
        refused(&of(&[0, 2]), "`cross` is a cross itself");
        refused(&|s| s.features[2].weighted = true, "a cross has no weights");
        refused(&|s| s.features[2].hotness_max = 8, "makes 9 keys, over hotness_max 8");
    }
}
