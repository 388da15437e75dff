//! PoolJob of encoded rows: decoded on their way from memory into registers and added there, so
//! that a column of a bag is written once. RawRows may change while they are read; the caller finds
//! out afterwards whether a sum is one of whole rows. One body for all families of vector
//! instructions; each gives the bits of `RowFormat::accumulate`, row after row. Never allocates.

// Vectors are loaded from raw pointers; `RawRows::row` checks each slot.
#![allow(unsafe_code)]
// Vectors of a sum are numbers, not elements.
#![allow(clippy::needless_range_loop)]

use crate::cache::codec::{Codec, RowFormat};
use crate::simd::atomics::AtomicU32;
use crate::simd::vector::Vector;
use crate::simd::{BEYOND, prefetch_l2};
use std::marker::PhantomData;

/// Keys that are looked up at a time, at most; a power of two.
pub(crate) const RING: usize = 256;
/// How far ahead of the sums rows are asked for, but for the first ones: between the additions, not
/// all at once.
pub(crate) const ROWS_AHEAD: usize = 48;
/// Values of a `Vector`.
const LANES: usize = 16;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Encoded rows in memory, `stride` bytes apart, and `BEYOND` bytes.
#[derive(Clone, Copy)]
pub(crate) struct RawRows<'a> {
    start: *const u8,
    len: usize,
    stride: usize,
    of: PhantomData<&'a [AtomicU32]>,
}

impl<'a> RawRows<'a> {
    /// RawRows that may change meanwhile, `stride` words apart.
    pub fn racing(words: &'a [AtomicU32], stride: usize) -> Self {
        Self {
            start: words.as_ptr().cast(),
            len: 4 * words.len(),
            stride: 4 * stride,
            of: PhantomData,
        }
    }

    /// RawRows that nobody changes, `stride` bytes apart.
    pub fn still(bytes: &'a [u8], stride: usize) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), stride, of: PhantomData }
    }

    /// The first of `bytes` bytes of the row in `slot`.
    #[inline(always)]
    fn row(&self, slot: u32, bytes: usize) -> *const u8 {
        let start = slot as usize * self.stride;
        assert!(start + bytes + BEYOND <= self.len);
        // SAFETY: it lies in the rows, which are borrowed for as long as `self`.
        unsafe { self.start.add(start) }
    }

    /// Asks for the values of a row from byte `from` on, and for as many bytes `behind` them.
    #[inline(always)]
    pub fn prefetch(&self, slot: u32, from: usize, values: usize, behind: usize) {
        let at = self.start.wrapping_add(slot as usize * self.stride + from);
        (0..values).step_by(LINE).for_each(|byte| prefetch_l2(at.wrapping_add(byte)));
        // A row need not begin with a line.
        if !self.stride.is_multiple_of(LINE) {
            prefetch_l2(at.wrapping_add(values + behind - 1));
        }
    }
}

/// The sums of the rows of some bags one after the other, or of a part of one.
pub(crate) struct PoolJob<'a> {
    pub rows: RawRows<'a>,
    pub format: RowFormat,
    /// Where the rows of keys are, by the key's number modulo `RING`.
    pub slots: &'a [u32; RING],
    /// Where the keys of each bag begin, and where the last ends; keys are numbered from `start`.
    pub offsets: &'a [u32],
    pub start: usize,
    /// Keys before it have their slots already.
    pub seen: usize,
    /// Whether the sums begin from zero, and not from `out`.
    pub first: bool,
    /// `[bags, stride]`, of which `dim` columns are written.
    pub out: &'a mut [f32],
    pub stride: usize,
    /// Whether `out` is too large to stay near the core, and `simd::drain` follows.
    pub stream: bool,
}

impl PoolJob<'_> {
    /// Adds them up.
    ///
    /// # Safety
    /// The machine has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller's.
        unsafe {
            match self.format.codec() {
                Codec::F32 => self.coded::<V, F32>(),
                Codec::F16 => self.coded::<V, F16>(),
                Codec::U8 => self.coded::<V, U8>(),
                Codec::U4 => self.coded::<V, U4>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn coded<V: Vector, C: Code>(mut self) {
        let vectors = self.format.dim().div_ceil(LANES);
        let mut done = 0;
        while done < vectors {
            let left = vectors - done;
            // SAFETY: the caller's; no more vectors than the row has, the last of them perhaps in
            // part.
            done += unsafe {
                match left {
                    8.. if V::VECTORS_MAX >= 8 => self.columns::<V, C, 8>(done),
                    4.. => self.columns::<V, C, 4>(done),
                    2.. => self.columns::<V, C, 2>(done),
                    _ => self.columns::<V, C, 1>(done),
                }
            };
        }
    }

    /// Adds `N` vectors of columns of each bag, from vector `from` on; returns `N`.
    #[inline(always)]
    unsafe fn columns<V: Vector, C: Code, const N: usize>(&mut self, from: usize) -> usize {
        let Self { rows, format, slots, offsets, start, seen, first, stride, stream, .. } = *self;
        let (row_bytes, end) = (format.row_bytes(), format.dim().min((from + N) * LANES));
        // Columns beyond the last are added up here and forgotten.
        let mut edge = [[0.0; LANES]; N];
        for (bag, bounds) in offsets.windows(2).enumerate() {
            let out = &mut self.out[bag * stride..][from * LANES..end];
            let whole = out.len() == N * LANES;
            if !whole && !first {
                edge.as_flattened_mut()[..out.len()].copy_from_slice(out);
            }
            let to = if whole { out.as_mut_ptr() } else { edge.as_mut_ptr().cast() };
            // SAFETY: the caller's; a row has `from + N` vectors, and the last may be read `BEYOND`
            // it; at `to` there is room for `N`.
            unsafe {
                let mut sums = [V::splat(0.0); N];
                if !first {
                    for n in 0..N {
                        sums[n] = V::load(to.add(n * LANES));
                    }
                }
                for key in bounds[0] as usize - start..bounds[1] as usize - start {
                    let row = rows.row(slots[key % RING], row_bytes);
                    let (scale, bias) = if C::SCALED {
                        let (scale, bias) = V::halves(row.add(row_bytes - 4));
                        (V::splat(scale * format.unit()), V::splat(bias * format.unit()))
                    } else {
                        (V::splat(1.0), V::splat(0.0))
                    };
                    if key + ROWS_AHEAD < seen {
                        let behind = if C::SCALED { 4 } else { 0 };
                        rows.prefetch(
                            slots[(key + ROWS_AHEAD) % RING],
                            from * C::BYTES,
                            N * C::BYTES,
                            behind,
                        );
                    }
                    let at = row.add(from * C::BYTES);
                    for n in 0..N {
                        let value = C::values::<V>(at.add(n * C::BYTES));
                        // The product is exact (see `RowFormat`), so that it may as well be fused.
                        let value = if C::SCALED { value.mul_add(scale, bias) } else { value };
                        sums[n] = sums[n].add(value);
                    }
                }
                if stream && whole && to.addr().is_multiple_of(LINE) {
                    for n in 0..N {
                        sums[n].stream(to.add(n * LANES));
                    }
                } else {
                    for n in 0..N {
                        sums[n].store(to.add(n * LANES));
                    }
                }
            }
            if !whole {
                out.copy_from_slice(&edge.as_flattened()[..out.len()]);
            }
        }
        N
    }
}

/// How the values of a row lie in bytes.
trait Code {
    /// Bytes of a vector.
    const BYTES: usize;
    /// Whether they are codes that are multiplied with the row's scale.
    const SCALED: bool;
    unsafe fn values<V: Vector>(at: *const u8) -> V;
}

macro_rules! code {
    ($name:ident, $bytes:expr, $scaled:expr, $load:ident) => {
        struct $name;
        impl Code for $name {
            const BYTES: usize = $bytes;
            const SCALED: bool = $scaled;
            #[inline(always)]
            unsafe fn values<V: Vector>(at: *const u8) -> V {
                // SAFETY: the caller's.
                unsafe { V::$load(at) }
            }
        }
    };
}
code!(F32, 4 * LANES, false, f32s);
code!(F16, 2 * LANES, false, f16s);
code!(U8, LANES, true, u8s);
code!(U4, LANES / 2, true, u4s);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::huge_pages::Zeroed;
    use crate::simd::isa::Isa;
    use crate::simd::{Job, Plain, Simd, dispatch, drain};

    struct Whole<'a>(PoolJob<'a>);

    impl Job for Whole<'_> {
        type Out = bool;
        #[inline(always)]
        fn run<S: Simd>(self) -> bool {
            S::sum(self.0)
        }
    }

    /// Each codec and family, rows of all widths up to beyond those of one pass, in one part and in
    /// two.
    #[test]
    fn a_sum_has_the_bits_of_one_row_after_the_other() {
        for (codec, dim) in [Codec::F32, Codec::F16, Codec::U8, Codec::U4]
            .into_iter()
            .flat_map(|c| (1..200).map(move |d| (c, d)))
        {
            let format =
                RowFormat::new(codec, dim, if codec.is_quantized() { -3 } else { 0 }).unwrap();
            let mut bytes = vec![0; 20 * format.row_bytes() + BEYOND];
            for (n, row) in
                bytes[..20 * format.row_bytes()].chunks_exact_mut(format.row_bytes()).enumerate()
            {
                let value = |i: usize| ((i * 7 + n * 13) as f32 * 0.37).sin() / (n + 1) as f32;
                format.encode(&(0..dim).map(value).collect::<Vec<_>>(), row).unwrap();
            }
            let slots = std::array::from_fn(|i| (i * 7 % 20) as u32);
            // The second bag is empty, the third goes over the end of the ring.
            // Whole lines, so that sums may go past the caches.
            let stride = (dim + 3).next_multiple_of(LANES);
            let (start, offsets) = (1000, [1003, 1010, 1010, 1000 + RING as u32 + 5]);
            let mut plain = vec![7.0; 3 * stride];
            for (out, bounds) in plain.chunks_mut(stride).zip(offsets.windows(2)) {
                out[..dim].fill(0.0);
                for key in bounds[0] as usize - start..bounds[1] as usize - start {
                    let row = &bytes[slots[key % RING] as usize * format.row_bytes()..]
                        [..format.row_bytes()];
                    format.accumulate::<Plain>(
                        row,
                        &mut out[..dim],
                        key + start == bounds[0] as usize,
                    );
                }
            }
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for isa in Isa::available() {
                let sum = |offsets: &[u32], first, out: &mut [f32], stream| {
                    let rows = RawRows::still(&bytes, format.row_bytes());
                    dispatch(
                        isa,
                        Whole(PoolJob {
                            rows,
                            format,
                            slots: &slots,
                            offsets,
                            start,
                            seen: 0,
                            first,
                            out,
                            stride,
                            stream,
                        }),
                    )
                };
                for stream in [false, true] {
                    let mut out = Zeroed::new(3 * stride);
                    out.fill(7.0);
                    let summed = sum(&offsets, true, &mut out, stream);
                    drain();
                    // The plain form has no sums of its own.
                    assert_eq!(summed, isa != Isa::available()[0]);
                    assert!(
                        !summed || bits(&out) == bits(&plain),
                        "{isa:?}, {codec:?}, {dim} columns"
                    );
                }
                let summed = isa != Isa::available()[0];
                let mut parts = vec![7.0; stride];
                sum(&[1003, 1006], true, &mut parts, false);
                sum(&[1006, 1010], false, &mut parts, false);
                assert!(
                    !summed || bits(&parts) == bits(&plain[..stride]),
                    "{isa:?}, {codec:?}, {dim} columns, parts"
                );
            }
        }
    }
}
