//! The cost of memory on small pages: the time of a load whose cache line is in the processor's
//! caches but whose page may be in no translation buffer. A virtual machine may have small pages
//! although its system has huge ones. Never looks a row up.

use crate::peer::cpu_us;
use hatchback_kernels::simd::huge_pages::Zeroed;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::hint::black_box;

/// Loaded cache lines: 512 KiB, which the second-level cache of most servers holds.
const LINES: usize = 8192;
/// Values of a cache line.
const LINE: usize = 16;
/// Values of a page of 4 KiB.
const PAGE: usize = 1024;
/// Loads of one turn.
const LOADS: usize = 400_000;
/// Turns, of which the fastest counts.
const TURNS: usize = 5;

/// The times of a load, ns.
pub struct PageWalks {
    /// The lines are neighbours.
    pub packed_ns: f64,
    /// Each line is on a page of 4 KiB of its own.
    pub spread_ns: f64,
}

impl PageWalks {
    /// Measures both times.
    pub fn measure(rng: &mut StdRng) -> Self {
        let packed_ns = load_ns(|line| line * LINE, rng);
        // Lines at one place of every page would compete for few sets of the caches.
        let spread_ns = load_ns(|line| line * PAGE + line % (PAGE / LINE) * LINE, rng);
        Self { packed_ns, spread_ns }
    }
}

/// Returns the time of a load in a chain through all lines, in random order, ns.
fn load_ns(place: impl Fn(usize) -> usize, rng: &mut StdRng) -> f64 {
    let mut memory: Zeroed<f32> = Zeroed::new(place(LINES - 1) + LINE);
    let mut order: Vec<usize> = (0..LINES).collect();
    order.shuffle(rng);
    for (from, to) in order.iter().zip(order.iter().cycle().skip(1)) {
        memory[place(*from)] = f32::from_bits(place(*to) as u32);
    }

    let follow =
        |loads: usize| (0..loads).fold(place(order[0]), |at, _| memory[at].to_bits() as usize);
    let time = |_| {
        let start = cpu_us();
        black_box(follow(LOADS));
        1e3 * (cpu_us() - start) / LOADS as f64
    };
    black_box(follow(LINES));
    (0..TURNS).map(time).fold(f64::INFINITY, f64::min)
}
