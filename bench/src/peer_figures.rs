//! What the comparisons of whole requests with peers share: their plan, their figures, and the CPU
//! time of our own requests. Never starts a peer.

use super::peer::cpu_us;
use super::results::Measurement;
use anyhow::Result;
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use serde::Serialize;

/// The family that all engines run. The others are compared with ONNX Runtime only.
pub const DLRM: &str = "DLRM";
/// The peer of the bars.
pub const ORT: &str = "ONNX Runtime";

/// The sizes of the comparison.
pub struct PeersPlan {
    /// Rows of each of the 26 tables.
    pub rows: usize,
    /// Turns of each engine at each batch size.
    pub rounds: usize,
    /// Samples in one turn, unless `calls_min` requests have more.
    pub samples: usize,
    /// Requests in one turn, at least.
    pub calls_min: usize,
}

impl PeersPlan {
    /// Returns the requests of one turn.
    pub fn calls(&self, batch: u32) -> usize {
        (self.samples / batch as usize).max(self.calls_min)
    }
}

/// The figures of one engine and batch size, or a peer that did not run.
pub type PeersMeasurement = Measurement<PeersFigures>;

/// The figures of one engine and batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeersFigures {
    /// Name of the model family.
    pub family: String,
    /// Name of the engine.
    pub engine: String,
    /// Samples in a request.
    pub batch: u32,
    /// CPU time of a request, median of the best turn, µs.
    pub p50_us: f64,
    /// CPU time of a request, 99th percentile of the turn that is best in it, µs.
    pub p99_us: f64,
    /// Largest difference of a score from ONNX Runtime's, if ONNX Runtime ran.
    pub score_difference: Option<f64>,
}

/// Returns the figures of `family` on `engine` at `batch`.
pub fn figures_at<'a>(
    points: &'a [PeersMeasurement],
    family: &str,
    engine: &str,
    batch: u32,
) -> Option<&'a PeersFigures> {
    let is_wanted =
        |m: &&PeersFigures| m.family == family && m.engine == engine && m.batch == batch;
    points.iter().filter_map(Measurement::figures).find(is_wanted)
}

/// Returns the CPU time of each request, after one that warms up, µs. It excludes the work of other
/// processes.
///
/// # Errors
/// The worker refuses a request.
pub fn times(worker: &mut Worker, batches: &[Batch]) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(batches.len());
    batches.first().map_or(Ok(()), |first| worker.score(first, None).map(drop))?;
    for batch in batches {
        let start = cpu_us();
        worker.score(batch, None)?;
        times.push(cpu_us() - start);
    }
    Ok(times)
}
