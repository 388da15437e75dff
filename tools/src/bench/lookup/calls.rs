//! The shapes of the measured calls, and their keys. Never measures.

use crate::bench::filled_cache::TABLES;
use crate::workload::key_distributions::Scatter;
use anyhow::Result;
use rand::RngExt;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Zipf};

/// Samples per call.
pub const BATCHES: [usize; 4] = [1, 32, 256, 2048];
/// Keys per bag.
pub const HOTNESS: [usize; 2] = [1, 10];
/// Key distributions.
pub const KEYS: [&str; 2] = ["uniform", "zipf"];
/// Exponent of the Zipf keys.
const ALPHA: f64 = 1.05;

/// The shape of a call.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Key distribution, one of [`KEYS`].
    pub keys: &'static str,
    /// Keys per bag.
    pub hotness: usize,
    /// Samples.
    pub batch: usize,
}

/// Returns every combination of distribution, hotness and batch size.
pub fn shapes() -> impl Iterator<Item = Shape> {
    let keys = KEYS.into_iter().flat_map(|keys| HOTNESS.map(|hotness| (keys, hotness)));
    keys.flat_map(|(keys, hotness)| BATCHES.map(|batch| Shape { keys, hotness, batch }))
}

/// Fresh keys for some calls.
pub struct Calls {
    /// Shape of every call.
    pub shape: Shape,
    /// Row positions in a table, `[1 + calls][table][batch * hotness]`. Each engine warms up with
    /// the first call, which is not timed.
    pub positions: Vec<Vec<Vec<u64>>>,
    /// Offsets of a call's bags, `[batch + 1]`.
    pub offsets: Vec<u32>,
}

impl Calls {
    /// Draws `calls` timed calls, and the call before them, over tables of `rows` rows.
    ///
    /// # Errors
    /// `rows` is 0.
    pub fn draw(shape: Shape, rows: usize, calls: usize, rng: &mut StdRng) -> Result<Self> {
        let zipf = Zipf::new(rows as f64, ALPHA)?;
        let scatters =
            std::array::from_fn::<_, TABLES, _>(|table| Scatter::of_table(table, rows as u64));
        let mut one = |table: usize| match shape.keys {
            "uniform" => rng.random_range(0..rows as u64),
            // The scatter separates popular rows, differently in each table. The most popular row
            // has rank 1.
            _ => scatters[table].position((zipf.sample(rng) as u64).clamp(1, rows as u64) - 1),
        };

        let keys = shape.batch * shape.hotness;
        let mut call = || (0..TABLES).map(|t| (0..keys).map(|_| one(t)).collect()).collect();
        let positions = (0..=calls).map(|_| call()).collect();
        let offsets = (0..=shape.batch).map(|s| (s * shape.hotness) as u32).collect();
        Ok(Self { shape, positions, offsets })
    }

    /// Returns the keys of all calls, `[1 + calls][table][batch * hotness]`. `key` returns the key
    /// of a table's row position. An engine prepares all keys before its first call, as the peers
    /// do: keys that are prepared between two calls displace the engine's rows from the CPU's
    /// caches.
    pub fn keys(&self, key: impl Fn(usize, u64) -> u64) -> Vec<Vec<Vec<u64>>> {
        let of_table = |(table, positions): (usize, &Vec<u64>)| {
            positions.iter().map(|&position| key(table, position)).collect()
        };
        let of_call = |tables: &Vec<Vec<u64>>| tables.iter().enumerate().map(of_table).collect();
        self.positions.iter().map(of_call).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn popular_keys_leave_no_row_out() {
        let shape = Shape { keys: "zipf", hotness: 10, batch: 2048 };
        let drawn = Calls::draw(shape, 100, 1, &mut StdRng::seed_from_u64(3)).unwrap();
        for table in &drawn.positions[0] {
            let mut seen = [0; 100];
            table.iter().for_each(|&p| seen[p as usize] += 1);
            assert!(seen.iter().all(|&n| n > 0) && seen.iter().any(|&n| n > 2048), "{seen:?}");
        }
    }
}
