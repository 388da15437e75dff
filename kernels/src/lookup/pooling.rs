//! Pools encoded rows: decodes them from memory into registers and adds them there, so that each
//! column of a bag is stored once. A row may change while it is read; the caller then detects this
//! by validation and drops the result. One body is compiled for each family of vector instructions.
//! Each gives the same bits as `RowFormat::accumulate`, row after row. This file never allocates.

// Vectors are loaded from raw pointers; `RawRows::row` checks each slot.
#![allow(unsafe_code)]
// Loops over `n` also compute addresses from `n`.
#![allow(clippy::needless_range_loop)]

use crate::cache::codec::{Codec, RowFormat};
use crate::cache::raw_rows::RawRows;
use crate::lookup::probe_ring::RING_KEYS;
use crate::simd::prefetch::{drops_prefetches, prefetch, prefetch_l2};
use crate::simd::vector::{Vector, VectorJob};

/// Prefetch distance of the rows, in keys. Pooling prefetches later rows between its additions; the
/// probe stage prefetches only the first rows of a pipeline.
pub(crate) const ROW_DISTANCE: usize = 64;
/// Distance of the second prefetch of a row of more than two lines, in keys, on a processor that
/// drops prefetches. The second prefetch requests the dropped lines again.
const REPEAT_DISTANCE: usize = 48;
/// Distance of the second prefetch of other rows that must be decoded, in keys. It brings the row
/// into the first cache level. All columns of a row of codes wait for the scale and the bias at its
/// end.
const NEAR_DISTANCE: usize = 8;
/// Values of a `Vector`.
const VECTOR_VALUES: usize = 16;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// The combination of the rows of a bag to one row.
#[derive(Clone, Copy)]
pub(crate) enum Combine<'a> {
    /// Their sum.
    Sum,
    /// Their sum, each multiplied by its key's weight. Weights are numbered as keys are.
    Weighted(&'a [f32]),
    /// The largest value of each column.
    Max,
}

/// The pooling of consecutive bags, or of a part of one bag.
pub(crate) struct PoolJob<'a> {
    pub combine: Combine<'a>,
    pub rows: RawRows<'a>,
    pub format: RowFormat,
    /// The slots of the keys' rows, each at its key's number modulo `RING_KEYS`.
    pub slots: &'a [u32; RING_KEYS],
    /// Bounds of the bags' keys, `[bags + 1]`; keys are numbered from `start`.
    pub offsets: &'a [u32],
    pub start: usize,
    /// Keys below this number have their slots in `slots`.
    pub probed: usize,
    /// Whether the sums start from zero; if not, from the values in `out`.
    pub from_zero: bool,
    /// The pooled bags, `[bags, stride]`, of which `dim` columns are written.
    pub out: &'a mut [f32],
    pub stride: usize,
    /// Whether `out` is too large for the CPU's caches. The job then stores past the caches, and
    /// the caller calls `simd::stream_fence` afterwards.
    pub stream: bool,
}

impl VectorJob for PoolJob<'_> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller promises that the machine has the instructions of `V`.
        unsafe {
            match self.combine {
                Combine::Sum => self.pool_rows::<V, _>(Sums),
                Combine::Weighted(weights) => self.pool_rows::<V, _>(WeightedSums(weights)),
                Combine::Max => self.pool_rows::<V, _>(Maxima),
            }
        }
    }
}

impl PoolJob<'_> {
    #[inline(always)]
    unsafe fn pool_rows<V: Vector, K: Combiner>(self, combiner: K) {
        // SAFETY: the caller promises that the machine has the instructions of `V`.
        unsafe {
            match self.format.codec() {
                Codec::F32 => self.pool_codec::<V, F32, K>(combiner),
                Codec::F16 => self.pool_codec::<V, F16, K>(combiner),
                Codec::U8 => self.pool_codec::<V, U8, K>(combiner),
                Codec::U4 => self.pool_codec::<V, U4, K>(combiner),
            }
        }
    }

    /// Pools rows of one codec, as many vectors of columns at a time as fit into registers.
    #[inline(always)]
    unsafe fn pool_codec<V: Vector, C: Code, K: Combiner>(mut self, combiner: K) {
        let vectors = self.format.dim().div_ceil(VECTOR_VALUES);
        let mut done = 0;
        while done < vectors {
            let left = vectors - done;
            // SAFETY: the caller promises the instructions. A row has the vectors from `done` on,
            // the last perhaps in part.
            done += unsafe {
                match left {
                    8.. if V::VECTORS_MAX >= 8 => self.pool_columns::<V, C, K, 8>(combiner, done),
                    4.. => self.pool_columns::<V, C, K, 4>(combiner, done),
                    2.. => self.pool_columns::<V, C, K, 2>(combiner, done),
                    _ => self.pool_columns::<V, C, K, 1>(combiner, done),
                }
            };
        }
    }

    /// Pools `N` vectors of columns of each bag, from vector `from` on. Returns `N`.
    #[inline(always)]
    unsafe fn pool_columns<V: Vector, C: Code, K: Combiner, const N: usize>(
        &mut self,
        combiner: K,
        from: usize,
    ) -> usize {
        let Self { rows, format, slots, offsets, start, probed, from_zero, stride, stream, .. } =
            *self;
        let (row_bytes, end) = (format.row_bytes(), format.dim().min((from + N) * VECTOR_VALUES));
        // A constant, so the compiler unrolls the prefetches.
        let bytes = [N * C::BYTES, if C::SCALED { 4 } else { 0 }];
        let slot_of = |key: usize| slots[key % RING_KEYS];
        let into_l2 = |key| rows.prefetch(slot_of(key), from * C::BYTES, bytes, prefetch_l2);
        let into_l1 = |key| rows.prefetch(slot_of(key), from * C::BYTES, bytes, prefetch);
        let second = SecondPrefetch::of::<C>(row_bytes);
        // The last vector may have columns beyond `dim`. They are pooled here and dropped.
        let mut edge = [[0.0; VECTOR_VALUES]; N];
        for (bag, bounds) in offsets.windows(2).enumerate() {
            let out = &mut self.out[bag * stride..][from * VECTOR_VALUES..end];
            let whole = out.len() == N * VECTOR_VALUES;
            // A whole vector would reach past the output, so the sums so far are loaded from a
            // copy.
            if !whole && !from_zero {
                edge.as_flattened_mut()[..out.len()].copy_from_slice(out);
            }
            let to = out.as_mut_ptr();

            // SAFETY: the caller promises the instructions. A row has `from + N` vectors, of which
            // the last may be read up to `OVERREAD_BYTES` past the row. `to` has room for `N`
            // vectors, or for `out.len()` values, which are more than `N - 1` vectors.
            unsafe {
                let mut sums = [V::splat(K::FIRST); N];
                if !from_zero {
                    let before = if whole { to.cast_const() } else { edge.as_ptr().cast() };
                    for n in 0..N {
                        sums[n] = V::load(before.add(n * VECTOR_VALUES));
                    }
                }

                for key in bounds[0] as usize - start..bounds[1] as usize - start {
                    let row = rows.row(slot_of(key), row_bytes);
                    let (scale, bias) = if C::SCALED {
                        let (scale, bias) = V::halves(row.add(row_bytes - 4));
                        (V::splat(scale * format.unit()), V::splat(bias * format.unit()))
                    } else {
                        (V::splat(1.0), V::splat(0.0))
                    };

                    // One comparison for all distances. The last few rows are prefetched once.
                    if key + ROW_DISTANCE < probed {
                        into_l2(key + ROW_DISTANCE);
                        match second {
                            SecondPrefetch::Far => into_l2(key + REPEAT_DISTANCE),
                            SecondPrefetch::Near => into_l1(key + NEAR_DISTANCE),
                            SecondPrefetch::None => {}
                        }
                    }

                    let at = row.add(from * C::BYTES);
                    for n in 0..N {
                        let value = C::values::<V>(at.add(n * C::BYTES));
                        // The product is exact (see `RowFormat`), so a fused operation gives the
                        // same bits as a product and a sum.
                        let value = if C::SCALED { value.mul_add(scale, bias) } else { value };
                        sums[n] = combiner.combine(sums[n], value, key);
                    }
                }

                if stream && whole && to.addr().is_multiple_of(LINE_BYTES) {
                    for n in 0..N {
                        sums[n].stream(to.add(n * VECTOR_VALUES));
                    }
                } else {
                    let last = (N - 1) * VECTOR_VALUES;
                    for n in 0..N - 1 {
                        sums[n].store(to.add(n * VECTOR_VALUES));
                    }
                    match whole {
                        true => sums[N - 1].store(to.add(last)),
                        false => sums[N - 1].store_first(to.add(last), out.len() - last),
                    }
                }
            }
        }
        N
    }
}

/// The second prefetch of a row.
#[derive(Clone, Copy)]
enum SecondPrefetch {
    None,
    /// `REPEAT_DISTANCE` keys ahead, into the second cache level.
    Far,
    /// `NEAR_DISTANCE` keys ahead, into the first cache level.
    Near,
}

impl SecondPrefetch {
    /// Returns the second prefetch of rows of `row_bytes` bytes. Rows of f32 and narrow rows of f16
    /// gain nothing from a near one.
    #[inline(always)]
    fn of<C: Code>(row_bytes: usize) -> Self {
        match row_bytes > 2 * LINE_BYTES {
            true if drops_prefetches() => Self::Far,
            true if C::BYTES < F32::BYTES => Self::Near,
            false if C::SCALED => Self::Near,
            _ => Self::None,
        }
    }
}

/// The combination of a bag's columns with its next row, as a type, so that loops are compiled for
/// it.
trait Combiner: Copy {
    /// The value of each column before the first row.
    const FIRST: f32;
    /// Returns the columns with the values of the row of `key`.
    ///
    /// # Safety
    /// The machine has the instructions of `V`.
    unsafe fn combine<V: Vector>(self, columns: V, row: V, key: usize) -> V;
}

#[derive(Clone, Copy)]
struct Sums;

impl Combiner for Sums {
    const FIRST: f32 = 0.0;
    #[inline(always)]
    unsafe fn combine<V: Vector>(self, columns: V, row: V, _key: usize) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe { columns.add(row) }
    }
}

#[derive(Clone, Copy)]
struct WeightedSums<'a>(&'a [f32]);

impl Combiner for WeightedSums<'_> {
    const FIRST: f32 = 0.0;
    #[inline(always)]
    unsafe fn combine<V: Vector>(self, columns: V, row: V, key: usize) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe { columns.add(row.mul(V::splat(self.0[key]))) }
    }
}

#[derive(Clone, Copy)]
struct Maxima;

impl Combiner for Maxima {
    const FIRST: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    unsafe fn combine<V: Vector>(self, columns: V, row: V, _key: usize) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe { columns.max(row) }
    }
}

/// The encoding of a row's values, as a type, so that loops are compiled for it.
trait Code {
    /// Bytes of a vector's values.
    const BYTES: usize;
    /// Whether the values are codes that the row's scale and bias convert to numbers.
    const SCALED: bool;
    /// Loads a vector's values.
    ///
    /// # Safety
    /// The machine has the instructions of `V`, and `BYTES` bytes can be read at `at`.
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
                // SAFETY: the caller promises the instructions and the bytes.
                unsafe { V::$load(at) }
            }
        }
    };
}
code!(F32, 4 * VECTOR_VALUES, false, f32s);
code!(F16, 2 * VECTOR_VALUES, false, f16s);
code!(U8, VECTOR_VALUES, true, u8s);
code!(U4, VECTOR_VALUES / 2, true, u4s);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::resident::Resident;
    use crate::simd::huge_pages::Zeroed;
    use crate::simd::isa::Isa;
    use crate::simd::{Job, Plain, Simd, dispatch, stream_fence};

    struct Pool<'a>(PoolJob<'a>);

    impl Job for Pool<'_> {
        type Out = bool;
        #[inline(always)]
        fn run<S: Simd>(self) -> bool {
            S::run_vectors(self.0)
        }
    }

    /// For each codec, family and way to combine rows, with rows wider than one pass, in one part
    /// and in two.
    #[test]
    fn pooling_has_the_bits_of_adding_row_after_row() {
        let weights: Vec<f32> = (0..RING_KEYS + 5).map(|key| (key as f32 * 0.91).cos()).collect();
        for combine in [Combine::Sum, Combine::Weighted(&weights), Combine::Max] {
            pool_as_row_after_row(combine);
        }
    }

    /// Returns what an empty bag has in each column.
    fn before_first(combine: Combine<'_>) -> f32 {
        if matches!(combine, Combine::Max) { f32::NEG_INFINITY } else { 0.0 }
    }

    /// Adds the row of `key` to `out`, column by column.
    fn take_row(
        format: RowFormat,
        combine: Combine<'_>,
        row: &[u8],
        key: usize,
        out: &mut [f32],
        first: bool,
    ) {
        match combine {
            Combine::Sum => format.accumulate::<Plain>(row, out, first),
            Combine::Weighted(weights) => {
                format.accumulate_weighted::<Plain>(row, weights[key], out, first);
            }
            Combine::Max => format.maximize::<Plain>(row, out, first),
        }
    }

    fn pool_as_row_after_row(combine: Combine<'_>) {
        for (codec, dim) in [Codec::F32, Codec::F16, Codec::U8, Codec::U4]
            .into_iter()
            .flat_map(|c| (1..200).map(move |d| (c, d)))
        {
            let format =
                RowFormat::new(codec, dim, if codec.is_quantized() { -3 } else { 0 }).unwrap();
            let mut bytes = vec![0; 20 * format.row_bytes()];
            for (n, row) in bytes.chunks_exact_mut(format.row_bytes()).enumerate() {
                let value = |i: usize| ((i * 7 + n * 13) as f32 * 0.37).sin() / (n + 1) as f32;
                format.encode(&(0..dim).map(value).collect::<Vec<_>>(), row).unwrap();
            }
            let table = Resident::indexed(format.row_bytes(), &bytes);
            let slots = std::array::from_fn(|i| (i * 7 % 20) as u32);
            // Bags start on a cache line, so that they can be stored past the caches.
            let stride = (dim + 3).next_multiple_of(VECTOR_VALUES);
            // The second bag is empty, the third wraps around the ring.
            let (start, offsets) = (1000, [1003, 1010, 1010, 1000 + RING_KEYS as u32 + 5]);
            let mut plain = vec![7.0; 3 * stride];
            for (out, bounds) in plain.chunks_mut(stride).zip(offsets.windows(2)) {
                out[..dim].fill(before_first(combine));
                for key in bounds[0] as usize - start..bounds[1] as usize - start {
                    let row = &bytes[slots[key % RING_KEYS] as usize * format.row_bytes()..]
                        [..format.row_bytes()];
                    let (out, first) = (&mut out[..dim], key + start == bounds[0] as usize);
                    take_row(format, combine, row, key, out, first);
                }
            }

            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for isa in Isa::available() {
                let pool = |offsets: &[u32], from_zero, out: &mut [f32], stream| {
                    let rows = table.rows();
                    dispatch(
                        isa,
                        Pool(PoolJob {
                            combine,
                            rows,
                            format,
                            slots: &slots,
                            offsets,
                            start,
                            probed: 0,
                            from_zero,
                            out,
                            stride,
                            stream,
                        }),
                    )
                };
                for stream in [false, true] {
                    let mut out = Zeroed::new(3 * stride);
                    out.fill(7.0);
                    let pooled = pool(&offsets, true, &mut out, stream);
                    stream_fence();
                    // The plain family has no vectors.
                    assert_eq!(pooled, isa != Isa::available()[0]);
                    assert!(
                        !pooled || bits(&out) == bits(&plain),
                        "{isa:?}, {codec:?}, {dim} columns"
                    );
                }

                let pooled = isa != Isa::available()[0];
                let mut parts = vec![7.0; stride];
                pool(&[1003, 1006], true, &mut parts, false);
                pool(&[1006, 1010], false, &mut parts, false);
                assert!(
                    !pooled || bits(&parts) == bits(&plain[..stride]),
                    "{isa:?}, {codec:?}, {dim} columns, parts"
                );
            }
        }
    }
}
