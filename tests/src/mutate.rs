//! Seeded damage to bytes, such as a flash cell, a broken download or an attacker causes.

use crate::random::Random;

/// Values at which lengths and counts overflow.
const EXTREMES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Returns `bytes` with a few random changes. Inserted pieces come from `others`.
pub fn mutated(bytes: &[u8], others: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=random.below(4) {
        mutate(&mut out, others, random);
    }
    out
}

fn mutate(out: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Random) {
    let n = out.len() as u64;
    // Headers at the start and trailers at the end are hit more often.
    let at = match random.below(4) {
        0 => random.below(n.min(64) + 1),
        1 => n - random.below(n.min(80) + 1),
        _ => random.below(n + 1),
    } as usize;
    let left = out.len() - at;
    match random.below(8) {
        0 | 1 if left > 0 => out[at] ^= 1 << random.below(8),
        2 if left > 0 => out[at] = random.bits() as u8,
        3 => out.truncate(at),
        4 => {
            let value = random.pick(&EXTREMES).to_le_bytes();
            let width = (*random.pick(&[1, 2, 4, 8])).min(left);
            out[at..at + width].copy_from_slice(&value[..width]);
            if random.one_in(3) {
                out[at..at + width].reverse();
            }
        }
        5 => {
            let end = at + random.below(left as u64 + 1) as usize;
            let end = end.min(at + 200);
            out.drain(at..end);
        }
        6 => {
            let from = random.pick(others);
            let start = random.below(from.len() as u64 + 1) as usize;
            let length = random.below((from.len() - start).min(300) as u64 + 1) as usize;
            out.splice(at..at, from[start..start + length].iter().copied());
        }
        _ => {
            let from = random.pick(others);
            let length = left.min(from.len()).min(300);
            out[at..at + length].copy_from_slice(&from[..length]);
        }
    }
}
