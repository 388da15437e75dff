//! The shapes of the measured calls, and their keys. Never measures.

use crate::filled_cache::TABLES;
use anyhow::Result;
use rand::RngExt;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Zipf};

/// Samples per call.
pub const BATCHES: [usize; 4] = [1, 32, 256, 2048];
/// Keys per bag.
pub const HOTNESS: [usize; 2] = [1, 10];
/// Key distributions: uniform and Zipf over all rows, and Zipf over the popular rows.
pub const KEYS: [&str; 3] = ["uniform", "zipf", POPULAR];
/// Zipf keys of the most popular quarter of the rows: keys that a cache of a smaller budget holds.
pub const POPULAR: &str = "popular";
/// One row in so many is popular.
const POPULAR_PART: usize = 4;
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

impl Shape {
    /// Returns the number of rows, the most popular of `rows`, that the keys may request.
    pub fn rows_requested(&self, rows: usize) -> usize {
        if self.keys == POPULAR { popular(rows) } else { rows }
    }
}

/// Returns the number of popular rows of `rows`.
pub fn popular(rows: usize) -> usize {
    rows.div_ceil(POPULAR_PART)
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
    /// Popularity ranks of rows, `[1 + calls][table][batch * hotness]`. Rank 0 is the most popular
    /// row of its table. Each engine warms up with the first call, which is not timed.
    pub ranks: Vec<Vec<Vec<u64>>>,
    /// Offsets of a call's bags, `[batch + 1]`.
    pub offsets: Vec<u32>,
}

impl Calls {
    /// Draws `calls` timed calls, and the call before them, over tables of `rows` rows.
    ///
    /// # Errors
    /// `rows` is 0.
    pub fn draw(shape: Shape, rows: usize, calls: usize, rng: &mut StdRng) -> Result<Self> {
        let rows = shape.rows_requested(rows) as u64;
        let zipf = Zipf::new(rows as f64, ALPHA)?;
        let mut one = || match shape.keys {
            "uniform" => rng.random_range(0..rows),
            _ => (zipf.sample(rng) as u64).clamp(1, rows) - 1,
        };

        let keys = shape.batch * shape.hotness;
        let mut call = || (0..TABLES).map(|_| (0..keys).map(|_| one()).collect()).collect();
        let ranks = (0..=calls).map(|_| call()).collect();
        let offsets = (0..=shape.batch).map(|s| (s * shape.hotness) as u32).collect();
        Ok(Self { shape, ranks, offsets })
    }

    /// Returns the keys of all calls, `[1 + calls][table][batch * hotness]`. `key` returns the key
    /// of a table's popularity rank. An engine prepares all keys before its first call, as the
    /// peers do: keys that are prepared between two calls displace the engine's rows from the CPU's
    /// caches.
    pub fn keys(&self, key: impl Fn(usize, u64) -> u64) -> Vec<Vec<Vec<u64>>> {
        let of_table = |(table, ranks): (usize, &Vec<u64>)| {
            ranks.iter().map(|&rank| key(table, rank)).collect()
        };
        let of_call = |tables: &Vec<Vec<u64>>| tables.iter().enumerate().map(of_table).collect();
        self.ranks.iter().map(of_call).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn counts_of_ranks(keys: &'static str) -> Vec<[u32; 100]> {
        let shape = Shape { keys, hotness: 10, batch: 2048 };
        let drawn = Calls::draw(shape, 100, 1, &mut StdRng::seed_from_u64(3)).unwrap();
        let count = |ranks: &Vec<u64>| {
            let mut counts = [0; 100];
            ranks.iter().for_each(|&rank| counts[rank as usize] += 1);
            counts
        };
        drawn.ranks[0].iter().map(count).collect()
    }

    #[test]
    fn zipf_keys_leave_no_row_out() {
        for counts in counts_of_ranks("zipf") {
            assert!(counts.iter().all(|&n| n > 0) && counts[0] > 2048, "{counts:?}");
        }
    }

    #[test]
    fn popular_keys_are_a_quarter_of_the_rows() {
        for counts in counts_of_ranks(POPULAR) {
            assert!(counts[..25].iter().all(|&n| n > 0), "{counts:?}");
            assert_eq!(counts[25..], [0; 75]);
        }
    }
}
