//! Gathers the newest row of each key from many messages. The messages of a partition arrive in
//! order, whatever their times: a producer's clock may go back. A key has rows in two partitions if
//! its topic got more partitions; then the time of the message decides. Never opens a connection.

use super::message::HpsMessage;
use std::collections::HashMap;

/// The newest rows of one table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GatheredRows {
    dim: usize,
    places: HashMap<u64, usize>,
    keys: Vec<u64>,
    values: Vec<f32>,
    /// The message of each row.
    sources: Vec<MessageSource>,
}

/// Where a row comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MessageSource {
    /// The partition of its message.
    pub partition: i32,
    /// The time of its message, milliseconds since 1970.
    pub time_ms: i64,
}

impl GatheredRows {
    /// Returns no rows of `dim` values each.
    pub fn new(dim: usize) -> Self {
        Self { dim, ..Self::default() }
    }

    /// Takes the rows of `message`, which comes from `source`. A beacon has none.
    pub fn take(&mut self, message: &HpsMessage, source: MessageSource) {
        let HpsMessage::Rows { keys, values } = message else { return };
        for (key, row) in keys.iter().zip(values.chunks_exact(self.dim.max(1))) {
            let next = self.keys.len();
            let place = *self.places.entry(*key).or_insert(next);
            if place == next {
                self.keys.push(*key);
                self.values.extend_from_slice(row);
                self.sources.push(source);
                continue;
            }
            let held = self.sources[place];
            if held.partition == source.partition || held.time_ms <= source.time_ms {
                self.values[place * self.dim..][..self.dim].copy_from_slice(row);
                self.sources[place] = source;
            }
        }
    }

    /// Returns the keys, in the order of their first messages.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// Returns the newest row `[dim]` of the key at `place` in [`GatheredRows::keys`].
    pub fn row(&self, place: usize) -> &[f32] {
        &self.values[place * self.dim..][..self.dim]
    }

    /// Returns about the bytes of memory that the rows take.
    pub fn bytes(&self) -> u64 {
        (self.keys.len() * (4 * self.dim + 8 + size_of::<MessageSource>() + 32)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(keys: &[u64], values: &[f32]) -> HpsMessage {
        HpsMessage::Rows { keys: keys.to_vec(), values: values.to_vec() }
    }

    #[test]
    fn the_newest_row_of_each_key_stays() {
        let mut gathered = GatheredRows::new(2);
        let at = |partition, time_ms| MessageSource { partition, time_ms };
        gathered.take(&rows(&[7, 9], &[1.0, 2.0, 3.0, 4.0]), at(0, 10));
        gathered.take(&HpsMessage::Beacon, at(0, 11));
        gathered.take(&rows(&[9, 9], &[5.0, 6.0, 7.0, 8.0]), at(1, 10));
        gathered.take(&rows(&[7], &[0.0, 0.0]), at(1, 9));
        assert_eq!(gathered.keys(), [7, 9]);
        assert_eq!(gathered.row(0), [1.0, 2.0], "an older message of another partition");
        assert_eq!(gathered.row(1), [7.0, 8.0], "the last of equally old ones");
        gathered.take(&rows(&[7], &[5.0, 6.0]), at(0, 3));
        assert_eq!(gathered.row(0), [5.0, 6.0], "a later message of the same partition");
    }
}
