//! The error that a codec makes: how far the values of encoded rows are from those of their source.
//! Never changes a row.

use hatchback::{Codec, RowFormat};
use serde::{Deserialize, Serialize};

/// The absolute differences between encoded values and those of their source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CodecError {
    /// The largest difference.
    pub largest: f32,
    squares: f64,
    values: u64,
}

impl CodecError {
    /// Counts a row `[dim]` with its encoded `bytes`. `decoded` `[dim]` is overwritten.
    pub(crate) fn count(
        &mut self,
        format: RowFormat,
        row: &[f32],
        bytes: &[u8],
        decoded: &mut [f32],
    ) {
        self.values += row.len() as u64;
        // Exact, and the decoding would take half of the time.
        if format.codec() == Codec::F32 {
            return;
        }
        format.decode(bytes, decoded);
        for (value, decoded) in row.iter().zip(decoded) {
            let difference = (value - *decoded).abs();
            self.largest = self.largest.max(difference);
            self.squares += f64::from(difference).powi(2);
        }
    }

    /// Adds the differences of other rows.
    pub(crate) fn add(&mut self, other: &Self) {
        self.largest = self.largest.max(other.largest);
        self.squares += other.squares;
        self.values += other.values;
    }

    /// Returns the root of the mean of the squares of all differences; 0 without values.
    pub fn rms(&self) -> f64 {
        (self.squares / self.values.max(1) as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_several_blocks_add_up() {
        let format = RowFormat::new(Codec::U4, 4, 0).unwrap();
        let (mut all, mut decoded, mut differences) = (CodecError::default(), [0.0; 4], Vec::new());
        for row in [[0.0, 0.1, 7.3, 15.0], [-1.0, 0.4, 0.5, 1.0]] {
            let (mut bytes, mut one) = (vec![0; format.row_bytes()], CodecError::default());
            format.encode(&row, &mut bytes).unwrap();
            one.count(format, &row, &bytes, &mut decoded);
            all.add(&one);
            differences.extend(row.iter().zip(&decoded).map(|(a, b)| (a - b).abs()));
        }
        let largest = differences.iter().copied().fold(0.0, f32::max);
        let squares: f64 = differences.iter().map(|d| f64::from(*d).powi(2)).sum();
        assert!(all.largest == largest && largest > 0.0);
        assert!((all.rms() - (squares / 8.0).sqrt()).abs() < 1e-12);
        assert_eq!(CodecError::default().rms(), 0.0);
    }
}
