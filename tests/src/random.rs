//! Random numbers from a seed, the same on every machine (SplitMix64). Never cryptographic.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream of `seed` that belongs to `purpose`: independent of the other purposes' streams.
    pub fn of(seed: u64, purpose: u64) -> Self {
        let mut random = Self(seed);
        let start = random.bits() ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(Self(start).bits())
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..end`.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A number in `-1.0..1.0`.
    pub fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// One of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}
