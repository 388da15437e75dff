//! FarmHash's Fingerprint64, which TensorFlow uses in `to_hash_bucket_fast`. It is written here
//! because the crate `farmhash` 1.1.5 returns other values for texts of 128, 192, ... bytes. Never
//! allocates.

/// The hash's three constants.
const K: [u64; 3] = [0xc3a5_c85c_97cb_3127, 0xb492_b66f_be98_f273, 0x9ae1_6a3b_2f90_404f];
/// The seed of the state of a text of more than 64 bytes.
const SEED: u64 = 81;
/// Bytes of a block of such a text.
const BLOCK: usize = 64;

/// A state of two words.
type Pair = [u64; 2];

/// Returns the fingerprint of `text`.
pub(super) fn fingerprint64(text: &[u8]) -> u64 {
    match text.len() {
        0..=16 => short(text),
        17..=32 => {
            let ([u, v], _) = ends(text, K[1]);
            join(u, v, multiplier(text))
        }
        33..=64 => medium(text),
        _ => long(text),
    }
}

/// Returns the 8 bytes from `at` on.
fn word(text: &[u8], at: usize) -> u64 {
    text[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn half_word(text: &[u8], at: usize) -> u64 {
    text[at..].first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)))
}

fn multiplier(text: &[u8]) -> u64 {
    K[2].wrapping_add(2 * text.len() as u64)
}

fn mix(value: u64) -> u64 {
    value ^ (value >> 47)
}

/// Joins two words.
fn join(u: u64, v: u64, multiplier: u64) -> u64 {
    let a = mix((u ^ v).wrapping_mul(multiplier));
    mix((v ^ a).wrapping_mul(multiplier)).wrapping_mul(multiplier)
}

fn short(text: &[u8]) -> u64 {
    let (n, by) = (text.len(), multiplier(text));
    match n {
        0 => K[2],
        1..=3 => {
            let [first, middle, last] = [0, n / 2, n - 1].map(|at| u64::from(text[at]));
            let (y, z) = (first + (middle << 8), n as u64 + (last << 2));
            mix(y.wrapping_mul(K[2]) ^ z.wrapping_mul(K[0])).wrapping_mul(K[2])
        }
        4..=7 => join(n as u64 + (half_word(text, 0) << 3), half_word(text, n - 4), by),
        _ => {
            let (a, b) = (word(text, 0).wrapping_add(K[2]), word(text, n - 8));
            let c = b.rotate_right(37).wrapping_mul(by).wrapping_add(a);
            let d = a.rotate_right(25).wrapping_add(b).wrapping_mul(by);
            join(c, d, by)
        }
    }
}

/// Returns two words of the first and the last 16 bytes, and the first word times `by`.
fn ends(text: &[u8], by: u64) -> (Pair, u64) {
    let n = text.len();
    let (a, b) = (word(text, 0).wrapping_mul(by), word(text, 8));
    let c = word(text, n - 8).wrapping_mul(multiplier(text));
    let d = word(text, n - 16).wrapping_mul(K[2]);
    let u = a.wrapping_add(b).rotate_right(43).wrapping_add(c.rotate_right(30)).wrapping_add(d);
    let v = a.wrapping_add(b.wrapping_add(K[2]).rotate_right(18)).wrapping_add(c);
    ([u, v], a)
}

fn medium(text: &[u8]) -> u64 {
    let (n, by) = (text.len(), multiplier(text));
    let ([y, v], a) = ends(text, K[2]);
    let z = join(y, v, by);
    let (e, f) = (word(text, 16).wrapping_mul(by), word(text, 24));
    let g = y.wrapping_add(word(text, n - 32)).wrapping_mul(by);
    let h = z.wrapping_add(word(text, n - 24)).wrapping_mul(by);
    let u = e.wrapping_add(f).rotate_right(43).wrapping_add(g.rotate_right(30)).wrapping_add(h);
    let v = e.wrapping_add(f.wrapping_add(a).rotate_right(18)).wrapping_add(g);
    join(u, v, by)
}

/// The state of a long text.
struct State {
    x: u64,
    y: u64,
    z: u64,
    v: Pair,
    w: Pair,
}

/// Mixes 32 bytes into a pair.
fn weak(text: &[u8], a: u64, b: u64) -> Pair {
    let [first, second, third, last] = [0, 8, 16, 24].map(|at| word(text, at));
    let a = a.wrapping_add(first);
    let b = b.wrapping_add(a).wrapping_add(last).rotate_right(21);
    let sum = a.wrapping_add(second).wrapping_add(third);
    [sum.wrapping_add(last), b.wrapping_add(sum.rotate_right(44)).wrapping_add(a)]
}

impl State {
    /// Mixes a block into the state. `by` is the multiplier. `few` has the factors of two words,
    /// which are 1 except for the last block.
    fn take(&mut self, block: &[u8], by: u64, few: [u64; 2]) {
        let Self { x, y, z, v, w } = self;
        let sum = x.wrapping_add(*y).wrapping_add(v[0]).wrapping_add(word(block, 8));
        *x = sum.rotate_right(37).wrapping_mul(by);
        let sum = y.wrapping_add(v[1]).wrapping_add(word(block, 48));
        *y = sum.rotate_right(42).wrapping_mul(by);
        *x ^= w[1].wrapping_mul(few[0]);
        *y = y.wrapping_add(v[0].wrapping_mul(few[1])).wrapping_add(word(block, 40));
        *z = z.wrapping_add(w[0]).rotate_right(33).wrapping_mul(by);
        *v = weak(block, v[1].wrapping_mul(by), x.wrapping_add(w[0]));
        *w = weak(&block[32..], z.wrapping_add(w[1]), y.wrapping_add(word(block, 16)));
        std::mem::swap(x, z);
    }
}

fn long(text: &[u8]) -> u64 {
    let y = SEED.wrapping_mul(K[1]).wrapping_add(113);
    let z = mix(y.wrapping_mul(K[2]).wrapping_add(113)).wrapping_mul(K[2]);
    let x = SEED.wrapping_mul(K[2]).wrapping_add(word(text, 0));
    let mut state = State { x, y, z, v: [0; 2], w: [0; 2] };

    // The last 64 bytes are mixed in at the end. They overlap the block before if the text does not
    // fill its last block.
    let blocks = (text.len() - 1) / BLOCK;
    text.chunks_exact(BLOCK).take(blocks).for_each(|block| state.take(block, K[1], [1, 1]));

    let by = K[1].wrapping_add((state.z & 0xff) << 1);
    state.w[0] = state.w[0].wrapping_add((text.len() as u64 - 1) & 63);
    state.v[0] = state.v[0].wrapping_add(state.w[0]);
    state.w[0] = state.w[0].wrapping_add(state.v[0]);
    state.take(&text[text.len() - BLOCK..], by, [9, 9]);

    let State { x, y, z, v, w } = state;
    let first = join(v[0], w[0], by).wrapping_add(mix(y).wrapping_mul(K[0])).wrapping_add(z);
    join(first, join(v[1], w[1], by).wrapping_add(x), by)
}
