//! The figures of `bench gpu requests`: names, bars and the table. Never measures.

use super::keys::Rotation;
use crate::bars::Bar;
use crate::results::table;
use anyhow::Result;
use hatchback_tools::{report, say};
use serde::Serialize;

/// Whole requests, each one recorded graph. The bar on launches counts these.
pub const GRAPH: &str = "request, one graph";
/// Whole requests, each kernel launched alone.
pub const KERNELS: &str = "request, kernel by kernel";
/// Whole requests of which some rows are missing.
pub const MISSES: &str = "request, misses inserted";
/// Whole requests while another thread updates rows.
pub const UPDATES: &str = "request, rows updated during it";
/// Lookups alone, keys in device memory. The bar on the memory's speed counts these.
pub const LOOKUP: &str = "lookup";
/// Lookups that first copy their keys to the device.
pub const LOOKUP_KEYS_COPIED: &str = "lookup, keys brought";
/// Lookups that read their keys from host memory.
pub const LOOKUP_KEYS_IN_PLACE: &str = "lookup, keys in place";

/// The figures of one kind of work at one batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuFigures {
    /// Name of the work.
    pub what: String,
    /// Samples.
    pub batch: usize,
    /// Rounds that were timed: requests, or loops of launches.
    pub rounds: usize,
    /// Share of the lookups whose rows were cached.
    pub hit_rate: f64,
    /// Median time, µs.
    pub p50_us: f64,
    /// 99th percentile of the time, µs.
    pub p99_us: f64,
    /// Median time on the GPU, between two events, µs; lookups alone.
    pub gpu_us_p50: Option<f64>,
    /// Kernels and graphs launched per request.
    pub launches: f64,
    /// Times that the host waited per request.
    pub waits: f64,
    /// Bytes of rows, sets and results per second that a lookup must move; lookups alone.
    pub gb_per_s: Option<f64>,
    /// The key sets of the loop and what they touch; lookups alone.
    #[serde(flatten)]
    pub rotation: Option<Rotation>,
}

/// Returns the demanded figures; `copied_gb_per_s` is the memory's own speed.
pub fn bars(points: &[GpuFigures], copied_gb_per_s: f64) -> Vec<Bar> {
    let lookups = points.iter().filter(|p| p.what == LOOKUP);
    let widest = lookups.max_by_key(|p| p.batch);
    let share = widest.and_then(|p| p.gb_per_s).map(|g| g / copied_gb_per_s);
    let batch = widest.map_or(0, |p| p.batch);

    let hits = points.iter().filter(|p| p.what == GRAPH && p.hit_rate == 1.0);
    let most = hits.map(|p| p.launches.max(p.waits)).fold(0.0, f64::max);

    vec![
        Bar::at_least_if(
            format!("lookups of batch {batch}, share of the memory's copying speed"),
            share,
            0.7,
        ),
        Bar::at_least("requests an own launch and an own wait, all rows cached", 1.0 / most, 1.0),
        Bar::not_run(
            "lookups a second beside HPS's cache kernels on the same keys",
            2.0,
            "`bench/peers/gpu.py` runs them",
        ),
    ]
}

/// Prints the table.
///
/// # Errors
/// Standard output is closed.
pub fn print_table(points: &[GpuFigures]) -> Result<()> {
    let cells = |p: &GpuFigures| {
        let time =
            |us: f64| if us < 100.0 { format!("{us:.1} µs") } else { format!("{us:.0} µs") };
        [
            p.what.clone(),
            report::count(p.batch as u64),
            format!("{:.3}", p.hit_rate),
            time(p.p50_us),
            time(p.p99_us),
            p.gpu_us_p50.map_or(String::new(), time),
            format!("{:.0}", p.launches),
            format!("{:.0}", p.waits),
            p.gb_per_s.map_or(String::new(), |g| format!("{g:.0}")),
            p.rotation.map_or(String::new(), |r| report::bytes(r.bytes_a_rotation as u64)),
        ]
    };
    let heads = ", batch, hit rate, p50, p99, on the GPU, launches, waits, GB/s, key sets touch";
    say!("{}", table(heads, points.iter().map(cells)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(what: &str, batch: usize, launches: f64, gb_per_s: Option<f64>) -> GpuFigures {
        GpuFigures {
            what: what.to_owned(),
            batch,
            rounds: 1,
            hit_rate: 1.0,
            p50_us: 1.0,
            p99_us: 1.0,
            gpu_us_p50: None,
            launches,
            waits: 1.0,
            gb_per_s,
            rotation: None,
        }
    }

    #[test]
    fn the_widest_lookups_and_the_most_launches_count() {
        let points = [
            point(LOOKUP, 1, 1.0, Some(90.0)),
            point(LOOKUP, 64, 1.0, Some(60.0)),
            point(GRAPH, 1, 1.0, None),
            point(GRAPH, 64, 2.0, None),
        ];
        let found: Vec<String> = bars(&points, 100.0).iter().map(ToString::to_string).collect();
        assert!(
            found[0].contains("batch 64")
                && found[0].contains("0.600")
                && found[0].ends_with("MISSED")
        );
        assert!(found[1].contains("0.500") && found[1].ends_with("MISSED"), "{found:?}");
        assert!(found[2].contains("HPS") && found[2].contains("not run"), "{found:?}");
        let found: Vec<String> =
            bars(&points[2..3], 100.0).iter().map(ToString::to_string).collect();
        assert!(found[0].contains("not run") && found[1].ends_with("holds"), "{found:?}");
    }
}
