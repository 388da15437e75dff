//! Loops of launches without a wait between them, timed on the GPU and on the host. Never launches
//! by itself.

use anyhow::Result;
use hatchback_kernels::cuda::driver::Stream;
use std::time::{Duration, Instant};

/// A loop ends early after this time.
const TIME_LIMIT: Duration = Duration::from_secs(1);
/// Rounds that every loop has, however slow.
const ROUNDS_LEAST: usize = 5;

/// The rounds of a loop, and the launches of a round.
#[derive(Clone, Copy)]
pub struct LoopSize {
    /// Rounds. A loop that takes long has fewer.
    pub rounds: usize,
    /// Launches of a round, which follow one another without a wait.
    pub repeats: usize,
}

impl LoopSize {
    /// Returns the size for launches of `keys` keys: short launches need more repeats, because an
    /// event is accurate to half a microsecond only.
    pub fn of_launches(keys: usize, quick: bool) -> Self {
        match (quick, keys) {
            (true, _) => Self { rounds: 2, repeats: 1 },
            (false, ..200_000) => Self { rounds: 30, repeats: 20 },
            (false, _) => Self { rounds: 30, repeats: 5 },
        }
    }

    /// Returns all launches of the loop.
    pub fn launches(&self) -> usize {
        self.rounds * self.repeats + 1
    }
}

/// The times of one launch, one for each round, µs.
pub struct LaunchTimes {
    /// On the host, until the last launch of a round ended.
    pub host_us: Vec<f64>,
    /// On the GPU, between two events.
    pub gpu_us: Vec<f64>,
}

/// Times `launch`, which puts its work onto the stream that `stream_of` returns.
///
/// # Errors
/// The GPU fails, its driver cannot tell the time between events, or that of `launch`.
pub fn time_launches<T>(
    target: &mut T,
    stream_of: impl Fn(&T) -> &Stream,
    size: LoopSize,
    mut launch: impl FnMut(&mut T) -> Result<()>,
) -> Result<LaunchTimes> {
    let gpu = stream_of(target).gpu();
    let (begun, ended) = (gpu.timed_event()?, gpu.timed_event()?);
    let repeats = size.repeats as f64;
    let mut times = LaunchTimes { host_us: Vec::new(), gpu_us: Vec::new() };
    launch(target)?;
    stream_of(target).wait()?;

    let start = Instant::now();
    while times.gpu_us.len() < size.rounds {
        if times.gpu_us.len() >= ROUNDS_LEAST && start.elapsed() > TIME_LIMIT {
            break;
        }
        let round = Instant::now();
        stream_of(target).record(&begun)?;
        for _ in 0..size.repeats {
            launch(target)?;
        }
        stream_of(target).record(&ended)?;
        ended.wait()?;
        times.host_us.push(round.elapsed().as_secs_f64() * 1e6 / repeats);
        // The stand-in for the driver knows no time.
        times.gpu_us.push((ended.us_since(&begun)? / repeats).max(1e-3));
    }
    Ok(times)
}
