//! The figures of `bench gpu requests`: names, bars and the table. Never measures.

use super::keys::Rotation;
use crate::bars::{Bar, largest};
use hatchback_kernels::cuda::graph::GraphShape;
use hatchback_tools::report;
use serde::Serialize;

/// Whole requests, each one recorded graph. The bar on launches counts these.
pub const GRAPH: &str = "request, one graph";
/// Graphs of kernels that do nothing, with the nodes and the longest chain of a request's.
pub const EMPTY: &str = "empty graph";
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
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
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
    /// Nodes and longest chain of the graph, if there is one and the driver tells them.
    pub graph: Option<GraphShape>,
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

/// Returns the median time of `what` at `batch`, µs.
fn p50_us(points: &[GpuFigures], what: &str, batch: usize) -> Option<f64> {
    points.iter().find(|p| p.what == what && p.batch == batch).map(|p| p.p50_us)
}

/// Returns the demanded figures; `copied_gb_per_s` is the memory's own speed.
pub fn bars(points: &[GpuFigures], copied_gb_per_s: f64) -> Vec<Bar> {
    let lookups = points.iter().filter(|p| p.what == LOOKUP);
    let widest = lookups.max_by_key(|p| p.batch);
    let share = widest.and_then(|p| p.gb_per_s).map(|g| g / copied_gb_per_s);
    let batch = widest.map_or(0, |p| p.batch);

    let hits = points.iter().filter(|p| p.what == GRAPH && p.hit_rate == 1.0);
    let most = largest(hits.map(|p| p.launches.max(p.waits)));

    let whole = "µs of a request of batch 256, all rows cached, p50";
    let whole = match p50_us(points, GRAPH, 256) {
        Some(us) => Bar::at_most(whole, us, 300.0),
        None => Bar::not_run(whole, 300.0, "the run has no batch 256"),
    };
    let one = "a request of one sample, in times of an empty graph with its nodes and its chain";
    let one = match [GRAPH, EMPTY].map(|what| p50_us(points, what, 1)) {
        [Some(us), Some(empty)] => Bar::at_most(one, us / empty, 1.5),
        [None, _] => Bar::not_run(one, 1.5, "the run has no batch 1"),
        [_, None] => Bar::not_run(one, 1.5, "no graph, or its driver does not list its edges"),
    };
    vec![
        Bar::at_least(
            format!("lookups of batch {batch}, share of the memory's copying speed"),
            share,
            0.7,
        )
        .because("no lookup was measured"),
        Bar::at_least(
            "requests an own launch and an own wait, all rows cached",
            most.map(f64::recip),
            1.0,
        )
        .because("no graph ran with all rows cached"),
        whole,
        one,
    ]
}

/// The heads of the table.
pub const HEADS: &str = "what, batch, hit rate, p50, p99, on the GPU, nodes, launches, waits, \
                         GB/s, key sets touch";

/// Returns a row of the table.
pub fn cells(p: &GpuFigures) -> [String; 11] {
    let nodes = |g: GraphShape| format!("{}, chain {}", g.nodes, g.chain);
    [
        p.what.clone(),
        report::count(p.batch as u64),
        format!("{:.3}", p.hit_rate),
        report::micros(p.p50_us),
        report::micros(p.p99_us),
        p.gpu_us_p50.map_or(String::new(), report::micros),
        p.graph.map_or(String::new(), nodes),
        format!("{:.0}", p.launches),
        format!("{:.0}", p.waits),
        p.gb_per_s.map_or(String::new(), |g| format!("{g:.0}")),
        p.rotation.map_or(String::new(), |r| report::bytes(r.bytes_a_rotation as u64)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(what: &str, batch: usize, p50_us: f64) -> GpuFigures {
        let (what, gb_per_s) = (what.to_owned(), Some(p50_us));
        let once = GpuFigures { launches: 1.0, waits: 1.0, hit_rate: 1.0, ..Default::default() };
        GpuFigures { what, batch, p50_us, gb_per_s, ..once }
    }

    fn said(points: &[GpuFigures]) -> Vec<String> {
        bars(points, 100.0).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_widest_lookups_and_the_most_launches_count() {
        let two = GpuFigures { launches: 2.0, ..point(GRAPH, 64, 1.0) };
        let points = [point(LOOKUP, 1, 90.0), point(LOOKUP, 64, 60.0), point(GRAPH, 1, 1.0), two];
        let found = said(&points);
        assert!(found[0].contains("batch 64") && found[0].contains("0.600"), "{found:?}");
        assert!(found[1].contains("0.500") && found[1].ends_with("MISSED"), "{found:?}");
        let found = said(&points[2..3]);
        assert!(found[0].contains("not run") && found[1].ends_with("holds"), "{found:?}");
    }

    #[test]
    fn a_request_is_compared_with_a_time_and_with_an_empty_graph() {
        let points = [point(GRAPH, 1, 30.0), point(EMPTY, 1, 15.0), point(GRAPH, 256, 299.0)];
        let found = said(&points);
        assert!(found[2].contains("299") && found[2].ends_with("holds"), "{found:?}");
        assert!(found[3].contains("2.000") && found[3].ends_with("MISSED"), "{found:?}");
        let found = said(&points[..1]);
        assert!(found[2].ends_with("no batch 256") && found[3].contains("no graph"), "{found:?}");
        assert!(said(&points[2..])[3].ends_with("no batch 1"));
    }
}
