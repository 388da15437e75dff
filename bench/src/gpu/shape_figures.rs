//! The figures of `bench gpu shapes`: names, the bar and the table. Never measures.

use super::keys::Rotation;
use crate::bars::Bar;
use hatchback_tools::report;
use serde::Serialize;

/// The bar: share of the gather's speed, for rows of this many bytes and up, and such batches.
const BAR: f64 = 0.75;
const BAR_ROW_BYTES: usize = 128;
const BAR_BATCH: usize = 8192;

/// The time of lookups in tiles of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TileTime {
    /// Samples of one feature that a warp takes together.
    pub tile: usize,
    /// Median time of a lookup on the GPU, µs.
    pub gpu_us_p50: f64,
}

/// One shape.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeFigures {
    /// How rows are encoded.
    pub codec: String,
    /// Columns of a row.
    pub dim: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Keys of a bag.
    pub hotness: usize,
    /// `uniform` or `zipf`.
    pub keys: String,
    /// Rows of each table.
    pub rows: usize,
    /// The file of the keys, if they were written: those of f32 and f16 rows.
    pub keys_file: Option<String>,
    /// Samples.
    pub batch: usize,
    /// Key sets that rotate, and what they touch.
    #[serde(flatten)]
    pub rotation: Rotation,
    /// Median time of a lookup on the GPU, µs.
    pub gpu_us_p50: f64,
    /// 99th percentile of it.
    pub gpu_us_p99: f64,
    /// Samples of a tile of these lookups.
    pub tile: usize,
    /// Times with half of that tile and twice of it, as far as a tile can have as many samples.
    pub other_tiles: Vec<TileTime>,
    /// Bytes of keys, headers, rows and results a second.
    pub gb_per_s: f64,
    /// The same of a plain gather of the same rows: rows read and rows written.
    pub gather_gb_per_s: f64,
    /// The former as a part of the latter.
    pub share: f64,
}

impl ShapeFigures {
    /// Returns the fastest tile; of equal ones that of the lookup itself.
    fn best_tile(&self) -> TileTime {
        let own = TileTime { tile: self.tile, gpu_us_p50: self.gpu_us_p50 };
        let faster = |a: TileTime, b: &TileTime| if b.gpu_us_p50 < a.gpu_us_p50 { *b } else { a };
        self.other_tiles.iter().fold(own, faster)
    }
}

/// Returns the demanded figures.
pub fn bars(points: &[ShapeFigures]) -> Vec<Bar> {
    let counts = |p: &&ShapeFigures| p.row_bytes >= BAR_ROW_BYTES && p.batch >= BAR_BATCH;
    let shares = points.iter().filter(counts).map(|p| p.share);
    let what = format!(
        "lookups of rows of {BAR_ROW_BYTES} bytes and up, batch {BAR_BATCH} and up: least share \
         of a plain gather's speed"
    );
    let bar = Bar::at_least(what, shares.reduce(f64::min), BAR);
    vec![bar.because("no such shape was measured")]
}

/// The heads of the table.
pub const HEADS: &str = "rows, bytes, keys a bag, keys, batch, p50, p99, GB/s, gather, share, \
                         tile, best tile, key sets touch";

/// Returns a row of the table.
pub fn cells(p: &ShapeFigures) -> [String; 13] {
    let best = p.best_tile();
    [
        format!("{} x {}", p.dim, p.codec),
        p.row_bytes.to_string(),
        p.hotness.to_string(),
        p.keys.clone(),
        report::count(p.batch as u64),
        format!("{:.1} µs", p.gpu_us_p50),
        format!("{:.1} µs", p.gpu_us_p99),
        format!("{:.0}", p.gb_per_s),
        format!("{:.0}", p.gather_gb_per_s),
        format!("{:.2}", p.share),
        p.tile.to_string(),
        format!("{}: {:.1} µs", best.tile, best.gpu_us_p50),
        report::bytes(p.rotation.bytes_a_rotation as u64),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(row_bytes: usize, batch: usize, share: f64) -> ShapeFigures {
        ShapeFigures {
            codec: "f16".to_owned(),
            dim: row_bytes / 2,
            row_bytes,
            hotness: 1,
            keys: "zipf".to_owned(),
            rows: 1,
            keys_file: None,
            batch,
            rotation: Rotation { sets: 4, rows_a_rotation: 1, bytes_a_rotation: 1 },
            gpu_us_p50: 1.0,
            gpu_us_p99: 1.0,
            tile: 16,
            other_tiles: Vec::new(),
            gb_per_s: 1.0,
            gather_gb_per_s: 1.0,
            share,
        }
    }

    #[test]
    fn the_bar_takes_the_worst_of_the_large_batches_of_wide_rows() {
        let points = [
            point(64, 8192, 0.1),
            point(128, 64, 0.2),
            point(128, 8192, 0.8),
            point(512, 65536, 0.76),
        ];
        let said = bars(&points)[0].to_string();
        assert!(said.contains("0.760") && said.ends_with("holds"), "{said}");
        assert!(bars(&points[..2])[0].to_string().contains("not run: no such shape"));
    }

    #[test]
    fn the_best_tile_is_the_fastest() {
        let mut point = point(64, 8192, 0.1);
        assert_eq!(point.best_tile().tile, 16);
        let times = [(8, 1.5), (32, 0.5)];
        point.other_tiles = times.map(|(tile, gpu_us_p50)| TileTime { tile, gpu_us_p50 }).into();
        assert_eq!(point.best_tile(), point.other_tiles[1]);
        point.other_tiles[1].gpu_us_p50 = 1.0;
        assert_eq!(point.best_tile().tile, 16);
    }
}
