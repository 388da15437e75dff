// The general way to pool a bag: with the whole warp, one piece a lane. It works for any alignment
// of rows, with and without weights, and for sums and maxima. `rare.cuh` and `finish_bags` use it.
#pragma once
#include "pool.cuh"

// Columns of a pass.
#define WARP_COLUMNS (32 * PIECE_COLUMNS)

// A lane's piece of one row, encoded.
template <u32 CODEC>
struct AnyRow {
    static constexpr u32 WORDS = Code<CODEC>::WORDS;
    u32 words[WORDS];
    u32 scale_and_bias;

    // Loads the piece word by word. Columns after the row's end are 0.
    __device__ __forceinline__ void load(const Rows& rows, u32 slot, bool wanted) {
        const u32* row = (const u32*)rows.row(slot);
        const u32 row_words = (rows.row_bytes + 3) / 4;
        const u32 at = rows.column * Code<CODEC>::BITS / 32;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            words[i] = wanted && at + i < row_words ? load_racing(row + at + i) : 0;
        }
        if (CODEC == U4) {
            words[0] = rows.column % 8 ? words[0] >> 16 : words[0] & 0xffff;
        }

        scale_and_bias = 0;
        if (Code<CODEC>::HAS_SCALE && wanted) {
            // The last four bytes may begin inside a word.
            const u32 word = (rows.row_bytes - 4) / 4;
            const u32 shift = 8 * (rows.row_bytes % 4);
            u32 low = load_racing(row + word);
            scale_and_bias = shift ? __funnelshift_r(low, load_racing(row + word + 1), shift) : low;
        }
    }
};

// A bag that the warp pools.
struct AnyBag {
    u32 sample;
    const float* weights;  // of its keys; null for none

    // Returns the factor of the row at `position`. A product with 1 is exact.
    __device__ __forceinline__ float weight(u32 position) const {
        return weights ? weights[position] : 1.0f;
    }
};

// Returns the value of a column of a bag before its first row.
__device__ __forceinline__ float before_first(const Feature& f) {
    return f.pooling == MAX ? __uint_as_float(0xff800000u) : 0.0f;
}

// Adds `value` times `weight` to a column of a bag; with MAX, keeps the larger value. A product is
// rounded before it is added, as on the CPU.
__device__ __forceinline__ void take(const Feature& f, float& column, float value, float weight) {
    if (f.pooling == MAX) {
        column = value > column ? value : column;
    } else {
        column = __fadd_rn(column, __fmul_rn(value, weight));
    }
}

// Pools rows of one bag. `slot` of lane `i` is the row of the lookup at `position + i`, or NO_SLOT
// for the default row. ROWS rows are in flight. If the feature does not pool, each row is written
// at its own position of the output.
template <u32 CODEC, u32 ROWS>
__device__ __forceinline__ void pool_slots(
    const Feature& f, const Rows& rows, u32 slot, u32 count, u32 position, const AnyBag& bag,
    float (&columns)[1][PIECE_COLUMNS]) {
    const u32 columns_end = f.dim > rows.column ? f.dim - rows.column : 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i += ROWS) {
        AnyRow<CODEC> loaded[ROWS];
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            u32 from = __shfl_sync(ALL_LANES, slot, (i + u) % 32);
            loaded[u].load(rows, from, i + u < count && from != NO_SLOT && columns_end);
        }
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            if (i + u >= count) {
                break;
            }
            const bool is_default = __shfl_sync(ALL_LANES, slot, i + u) == NO_SLOT;
            const float weight = bag.weight(position + i + u);
            const Scale scale(loaded[u].scale_and_bias, f.unit);
            float listed[PIECE_COLUMNS];
#pragma unroll
            for (u32 v = 0; v < PIECE_COLUMNS; v++) {
                const float value = !is_default ? decode<CODEC>(loaded[u].words, scale, v)
                    : v < columns_end           ? f.default_row[rows.column + v]
                                                : 0.0f;
                listed[v] = 0.0f + value;
                take(f, columns[0][v], value, weight);
            }
            if (f.pooling == NONE) {
                const u32 column = (position + i + u) * f.dim + rows.column;
                u8* to = output_at(f, bag.sample, column);
                store_columns(to, listed, columns_end, f.out_bytes);
            }
        }
    }
}

// `pool_slots` for the feature's codec.
template <u32 ROWS>
__device__ __forceinline__ void pool_any_slots(
    const Feature& f, const Rows& rows, u32 slot, u32 count, u32 position, const AnyBag& bag,
    float (&columns)[1][PIECE_COLUMNS]) {
    FOR_CODEC(f, { pool_slots<CODEC, ROWS>(f, rows, slot, count, position, bag, columns); })
}

// Returns the divisor of a weighted sum of `keys` rows: the sum of the weights or, with SQRTN, the
// root of the sum of their squares. It adds in key order, as the CPU does.
__device__ __forceinline__ float weights_divisor(const Feature& f, const AnyBag& bag, u32 keys) {
    const bool squares = f.pooling == SQRTN;
    float sum = 0.0f;
#pragma unroll 1
    for (u32 i = 0; i < keys; i++) {
        const float weight = bag.weights[i];
        sum = __fadd_rn(sum, squares ? __fmul_rn(weight, weight) : weight);
    }
    return squares ? __fsqrt_rn(sum) : sum;
}

// Writes a pooled piece of a bag of `keys` rows. A bag without keys, or with a divisor of zero,
// gives zeros. All lanes of the warp call it together.
__device__ __forceinline__ void close_bag(
    const Feature& f, float (&columns)[1][PIECE_COLUMNS], u32 keys, const AnyBag& bag, u8* out,
    u32 columns_end) {
    const bool divides = f.pooling == MEAN || f.pooling == SQRTN;
    const float divisor = !divides ? 1.0f
        : bag.weights              ? weights_divisor(f, bag, keys)
                                   : divisor_of(f, keys);
#pragma unroll
    for (u32 v = 0; v < PIECE_COLUMNS; v++) {
        // x / 1 is x.
        const float value = __fdiv_rn(columns[0][v], divisor);
        columns[0][v] = keys && divisor != 0.0f ? value : 0.0f;
    }
    store_columns(out, columns[0], columns_end, f.out_bytes);
}
