//! The size of a query's tiles: the bags of one feature that a warp takes together. Plain
//! arithmetic, which changes the time of a query and no result.

/// What the size of a query's tiles depends on.
pub(super) struct TileShape {
    pub samples: usize,
    pub features: usize,
    /// The sum of the longest bags of all features.
    pub lookups: usize,
    /// Warps of the query that the GPU runs at the same time.
    pub warps: usize,
}

/// Samples of the largest tile: one a lane.
const TILE_SAMPLES: usize = 32;
/// Keys of a larger tile, at most. The fixed cost of a tile is then small beside that of its keys.
const TILE_KEYS: usize = 256;

/// Returns the samples of one feature in a tile.
pub(super) fn tile_of(shape: TileShape) -> usize {
    let TileShape { samples, features, lookups, warps } = shape;
    // A tile has a fixed cost of some 700 instructions and ten trips to memory, for one key as for
    // 32. So no warp takes a second tile before each warp has one, of full size if need be. The
    // tiles of one feature are counted, because its last tile can be smaller than the others.
    let tiles_each = (warps / features.max(1)).max(1);
    let by_warps = samples.div_ceil(tiles_each).clamp(1, TILE_SAMPLES);

    // With long bags the keys are the cost, and larger tiles only leave warps idle at the end. A
    // launch has one size of tile, so the mean bag of all features counts. The longest bags stand
    // for all, because a recorded launch does not know those of its requests.
    let mean_bag = lookups.div_ceil(features.max(1)).max(1);
    by_warps.min((TILE_KEYS / mean_bag).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(samples: usize, features: usize, bag: usize) -> usize {
        // As an H100 has them.
        tile_of(TileShape { samples, features, lookups: bag * features, warps: 132 * 32 })
    }

    #[test]
    fn every_resident_warp_has_a_tile_before_any_has_two() {
        for (samples, features) in
            (1..3000).step_by(7).flat_map(|s| [1, 8, 26, 100].map(|f| (s, f)))
        {
            let tile = tile(samples, features, 1);
            let tiles = |tile: usize| features * samples.div_ceil(tile);
            assert!(tile == TILE_SAMPLES || tiles(tile) <= 132 * 32, "{samples} x {features}");
            assert!(tile == 1 || tiles(tile - 1) > 132 * 32, "{samples} x {features}");
        }
        assert_eq!(
            [1, 64, 1024, 8192, 65536].map(|samples| tile(samples, 26, 1)),
            [1, 1, 7, 32, 32]
        );
    }

    #[test]
    fn tiles_of_long_bags_have_fewer_samples() {
        assert_eq!([1, 8, 9, 50, 300].map(|bag| tile(65536, 26, bag)), [32, 32, 28, 5, 1]);
        // Three features, one of them long.
        let mixed = TileShape { samples: 65536, features: 3, lookups: 102, warps: 4224 };
        assert_eq!(tile_of(mixed), 7);
        assert_eq!(tile_of(TileShape { samples: 8, features: 0, lookups: 0, warps: 32 }), 1);
    }
}
