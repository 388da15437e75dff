//! The reference of the request flow: tables are maps of decoded rows, and a bag is pooled in key
//! order. Shares only the row codec and the schema with the product.

use crate::models::TableRows;
use hatchback::LookupStatus;
use hatchback::Pooling;
use hatchback::schema::sample::Sample;
use hatchback::schema::{InputSource, Schema};
use std::collections::HashMap;

/// Computes what a model must answer.
pub struct Reference {
    schema: Schema,
    tables: Vec<HashMap<u64, Vec<f32>>>,
}

impl Reference {
    /// Makes the reference of a model of `schema`. `rows` has the rows of each table.
    pub fn new(schema: &Schema, rows: &[TableRows]) -> Self {
        let tables = schema.tables.iter().zip(rows).map(|(table, rows)| {
            let format = table.format().unwrap();
            let mut bytes = vec![0; format.row_bytes()];
            let mut decoded = |row: &[f32]| {
                let mut values = vec![0.0; row.len()];
                format.encode(row, &mut bytes).unwrap();
                format.decode(&bytes, &mut values);
                values
            };
            rows.each().map(|(key, row)| (key, decoded(row))).collect()
        });
        Self { tables: tables.collect(), schema: schema.clone() }
    }

    /// Returns the decoded row of `key`, if table `t` has it.
    pub fn row(&self, t: usize, key: u64) -> Option<&[f32]> {
        self.tables[t].get(&key).map(Vec::as_slice)
    }

    /// Returns the network's inputs for `sample`, side by side, computed from the rows of all keys.
    pub fn output(&self, sample: &Sample) -> Vec<f32> {
        self.output_without(sample, &|_, _| false)
    }

    /// Returns the network's inputs if the default row replaces every row for which
    /// `lost(table, key)` is true.
    pub fn output_without(&self, sample: &Sample, lost: &dyn Fn(usize, u64) -> bool) -> Vec<f32> {
        let mut out = Vec::new();
        for input in &self.schema.network.inputs {
            match &input.source {
                InputSource::Dense => out.extend_from_slice(&sample.dense),
                InputSource::Vectors(lookups) => {
                    for &l in lookups {
                        out.extend(self.pool(usize::from(l), sample, lost));
                    }
                }
                InputSource::Lengths(features) => {
                    out.extend(
                        features.iter().map(|&f| sample.sparse[usize::from(f)].len() as f32),
                    );
                }
                InputSource::Masks(features) => {
                    for &f in features {
                        let (keys, f) = (sample.sparse[usize::from(f)].len(), usize::from(f));
                        let places = 0..self.schema.features[f].hotness_max as usize;
                        out.extend(places.map(|place| f32::from(u8::from(place < keys))));
                    }
                }
            }
        }
        out
    }

    /// Returns a sample's status if every row was fetched: each key is fresh or absent.
    pub fn status(&self, sample: &Sample) -> LookupStatus {
        self.status_without(sample, &|_, _| false)
    }

    /// Returns a sample's status if the pages of all rows for which `damaged(table, key)` is true
    /// cannot be read.
    pub fn status_without(
        &self,
        sample: &Sample,
        damaged: &dyn Fn(usize, u64) -> bool,
    ) -> LookupStatus {
        let mut status = LookupStatus::default();
        for lookup in &self.schema.lookups {
            let t = usize::from(lookup.table);
            for &key in &sample.sparse[usize::from(lookup.feature)] {
                match self.row(t, key) {
                    _ if damaged(t, key) => status.damaged += 1,
                    Some(_) => status.fresh += 1,
                    None => status.absent += 1,
                }
            }
        }
        status
    }

    /// Returns the column of the output at which the vector of lookup `l` begins.
    pub fn column(&self, l: usize) -> usize {
        let mut column = 0;
        for input in &self.schema.network.inputs {
            let InputSource::Vectors(lookups) = &input.source else {
                column += self.schema.input_width(input);
                continue;
            };
            for &other in lookups {
                if usize::from(other) == l {
                    return column;
                }
                column += self.width(usize::from(other));
            }
        }
        panic!("lookup {l} feeds no input")
    }

    /// Returns the number of values that lookup `l` adds to the output.
    pub fn width(&self, l: usize) -> usize {
        let lookup = &self.schema.lookups[l];
        let feature = &self.schema.features[usize::from(lookup.feature)];
        let dim = self.schema.tables[usize::from(lookup.table)].dim as usize;
        if lookup.pooling == Pooling::None { dim * feature.hotness_max as usize } else { dim }
    }

    fn pool(&self, l: usize, sample: &Sample, lost: &dyn Fn(usize, u64) -> bool) -> Vec<f32> {
        let lookup = &self.schema.lookups[l];
        let f = usize::from(lookup.feature);
        let (feature, bag) = (&self.schema.features[f], &sample.sparse[f]);
        let t = usize::from(lookup.table);
        let table = &self.schema.tables[t];
        let row = |key: u64| match self.row(t, key) {
            Some(row) if !lost(t, key) => row,
            _ => &table.default_row,
        };
        let mut out = vec![0.0; self.width(l)];
        for (position, &key) in bag.iter().enumerate() {
            let start =
                if lookup.pooling == Pooling::None { position * table.dim as usize } else { 0 };
            for (column, value) in row(key).iter().enumerate() {
                let out = &mut out[start + column];
                *out = match lookup.pooling {
                    Pooling::Max if position == 0 || value > out => *value,
                    Pooling::Max => *out,
                    _ if feature.weighted => *out + value * sample.weights[f][position],
                    _ => *out + value,
                };
            }
        }
        let ones = vec![1.0; bag.len()];
        let weights = if feature.weighted { &sample.weights[f] } else { &ones };
        let divisor: f32 = match lookup.pooling {
            Pooling::Mean => weights.iter().fold(0.0, |sum, w| sum + w),
            Pooling::Sqrtn => weights.iter().fold(0.0, |sum, w| sum + w * w).sqrt(),
            Pooling::Sum | Pooling::None | Pooling::Max => return out,
        };
        let quotient = |v: f32| if divisor == 0.0 { 0.0 } else { v / divisor };
        out.into_iter().map(quotient).collect()
    }
}

/// Returns the area under the ROC curve by its definition: the share of pairs of a positive and a
/// negative sample in which the positive scores higher. A tie counts half.
pub fn auc(scores: &[f32], labels: &[f32]) -> f64 {
    let (mut won, mut pairs) = (0.0, 0.0);
    for (i, _) in labels.iter().enumerate().filter(|(_, l)| **l > 0.5) {
        for (j, _) in labels.iter().enumerate().filter(|(_, l)| **l <= 0.5) {
            pairs += 1.0;
            won += if scores[i] > scores[j] {
                1.0
            } else {
                0.5 * f64::from(u8::from(scores[i] == scores[j]))
            };
        }
    }
    won / pairs
}

/// Returns whether both are equal bit for bit.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}
