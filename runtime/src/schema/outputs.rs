//! The scores of one sample with the names of their outputs. Never computes a score.

use crate::schema::NetworkOutput;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The scores of one sample. As JSON they are a list for a model with one output, `[0.5]`, and an
/// object for a model with several, `{"ctr": 0.5, "cvr": 0.25}`.
#[derive(Clone, Copy, Debug)]
pub struct NamedScores<'a> {
    /// The model's outputs.
    pub outputs: &'a [NetworkOutput],
    /// The scores of the sample.
    pub values: &'a [f32],
}

impl Serialize for NamedScores<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.outputs.len() == 1 {
            return self.values.serialize(to);
        }
        let mut map = to.serialize_map(Some(self.outputs.len()))?;
        for (output, value) in self.outputs.iter().zip(self.values) {
            map.serialize_entry(&output.name, value)?;
        }
        map.end()
    }
}
