//! The first pass over a table: learns what the encoding of its rows depends on, and refuses bad
//! rows. Holds one block of rows.

use super::overrides::Overrides;
use super::spec::{CodecChoice, DefaultRow, NamedRow, TableSpec};
use crate::import::RowSource;
use anyhow::Result;
use hatchback::io::in_order::{InOrder, WorkPool};
use hatchback::schema::Table;
use hatchback::{Codec, choose_unit_exp};

/// The largest value of an f16.
const F16_MAX: f32 = 65_504.0;
/// A value that fits a u8 row with any other: the largest unit times 2^13.
const U8_MAX: f32 = (1u128 << 77) as f32;

/// The result of the first pass over a table.
#[derive(Debug)]
pub(super) struct Learnt {
    ranges: Ranges,
    /// The sums of the columns, if the default row is their mean.
    sums: Option<Vec<f64>>,
}

/// The ranges of values in some rows.
#[derive(Clone, Copy, Debug)]
struct Ranges {
    magnitude_max: f32,
    /// The smallest range of a row that has one.
    row_range_min: f32,
}

impl Ranges {
    const NONE: Self = Self { magnitude_max: 0.0, row_range_min: f32::INFINITY };

    fn of(values: &[f32], dim: usize) -> Self {
        values.chunks_exact(dim).fold(Self::NONE, |ranges, row| {
            let (low, high) = row_range(row);
            let row_range_min = if high > low { high - low } else { f32::INFINITY };
            ranges.and(Self { magnitude_max: low.abs().max(high.abs()), row_range_min })
        })
    }

    fn and(self, other: Self) -> Self {
        Self {
            magnitude_max: self.magnitude_max.max(other.magnitude_max),
            row_range_min: self.row_range_min.min(other.row_range_min),
        }
    }
}

/// Returns the smallest and the largest of finite values.
fn row_range(row: &[f32]) -> (f32, f32) {
    /// Values that one vector instruction compares.
    const LANES: usize = 16;
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            low[lane] = if chunk[lane] < low[lane] { chunk[lane] } else { low[lane] };
            high[lane] = if chunk[lane] > high[lane] { chunk[lane] } else { high[lane] };
        }
    }
    let low = low.iter().chain(rest).fold(f32::INFINITY, |least, value| least.min(*value));
    let high = high.iter().chain(rest).fold(f32::NEG_INFINITY, |most, value| most.max(*value));
    (low, high)
}

/// Reads the rows of `source` once.
///
/// # Errors
/// The rows cannot be read or are wrong.
pub(super) fn learn(
    table: &TableSpec,
    source: &dyn RowSource,
    workers: &WorkPool,
    advance: &mut dyn FnMut(u64),
) -> Result<Learnt> {
    let mut learnt = Learnt::nothing(table);
    let dim = table.dim;
    let mut ranges = InOrder::new(workers);

    source.each_block(&mut |keys, values| {
        if let Some(sums) = &mut learnt.sums {
            // One thread adds the rows in their order, so the sums depend on nothing else.
            for row in values.chunks_exact(dim) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
            }
        }
        let values = values.to_vec();
        if let Some(block) = ranges.start(move || Ranges::of(&values, dim)) {
            learnt.ranges = learnt.ranges.and(block);
        }
        advance(keys.len() as u64);
        Ok(())
    })?;
    while let Some(block) = ranges.wait() {
        learnt.ranges = learnt.ranges.and(block);
    }
    Ok(learnt)
}

impl Learnt {
    /// Returns what is known of `table` before its rows are read.
    pub(super) fn nothing(table: &TableSpec) -> Self {
        let mean = table.default == DefaultRow::Named(NamedRow::Mean);
        Self { ranges: Ranges::NONE, sums: mean.then(|| vec![0.0; table.dim]) }
    }

    /// Returns the table of the schema. It has `rows` rows.
    ///
    /// # Errors
    /// The dim is too large.
    pub(super) fn table(&self, spec: &TableSpec, rows: u64, overrides: Overrides) -> Result<Table> {
        let choice = overrides.codec.unwrap_or(spec.codec);
        let codec = match choice.resolve(rows, spec.dim) {
            codec if choice != CodecChoice::Auto => codec,
            Codec::F16 if self.ranges.magnitude_max > F16_MAX => Codec::F32,
            Codec::U8 if self.ranges.magnitude_max > U8_MAX => Codec::F32,
            codec => codec,
        };
        let range_min = Some(self.ranges.row_range_min).filter(|range| range.is_finite());
        let range_min = range_min.unwrap_or_default();
        let default_row = match (&spec.default, &self.sums) {
            (DefaultRow::Values(values), _) => values.clone(),
            (DefaultRow::Named(NamedRow::Mean), Some(sums)) => {
                sums.iter().map(|sum| (sum / rows.max(1) as f64) as f32).collect()
            }
            _ => vec![0.0; spec.dim],
        };

        Ok(Table {
            name: spec.name.clone(),
            dim: u32::try_from(spec.dim)?,
            keys: spec.keys,
            rows,
            codec,
            unit_exp: choose_unit_exp(codec, self.ranges.magnitude_max, range_min),
            placement: overrides.placement.unwrap_or(spec.placement),
            miss: spec.miss,
            default_row,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_takes_f32_for_values_that_the_smaller_codecs_do_not_hold() {
        let spec = |codec: &str| {
            let text = format!(
                "name = 't'\ndim = 4\nkeys = 'index'\ncodec = '{codec}'\n\
                 source = {{ format = 'npy', path = 'v.npy' }}"
            );
            toml::from_str::<TableSpec>(&text).unwrap()
        };
        let codec = |codec: &str, rows: u64, magnitude_max: f32| {
            let (spec, ranges) = (spec(codec), Ranges { magnitude_max, row_range_min: 1.0 });
            let learnt = Learnt { ranges, sums: None };
            learnt.table(&spec, rows, Overrides::default()).unwrap().codec
        };
        assert_eq!(codec("auto", 10, 65_504.0), Codec::F16);
        assert_eq!(codec("auto", 10, 70_000.0), Codec::F32);
        assert_eq!(codec("auto", 10_000_000, 70_000.0), Codec::U8);
        assert_eq!(codec("auto", 10_000_000, 3e38), Codec::F32);
        assert_eq!(codec("f16", 10, 70_000.0), Codec::F16);
    }
}
