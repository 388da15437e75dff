// Pooling: rows are loaded, decoded to the bit as kernels/src/cache/codec.rs does, and added column
// by column in key order. A lane has four columns of a row: 16 bytes of the output, so that the
// lanes of a warp write whole lines. The lanes that read one row together are a *team*; a warp has
// 32 / lanes teams, and rows of more than 128 columns are pooled 128 columns at a time.
//
// A sum starts with +0, as on the CPU, so that no sum is -0.
#pragma once
#include "lookup.cuh"

// Runs `...` with the feature's codec as the constant CODEC. It has no jump table, so that
// `machine_code.py` can follow it.
#define FOR_CODEC(f, ...)                                                        \
    {                                                                            \
        const u32 codec = uniform((f).codec);                                    \
        if (codec & 2) {                                                         \
            if (codec & 1) { constexpr u32 CODEC = U4; __VA_ARGS__ }             \
            else { constexpr u32 CODEC = U8; __VA_ARGS__ }                       \
        } else if (codec & 1) { constexpr u32 CODEC = F16; __VA_ARGS__ }         \
        else { constexpr u32 CODEC = F32; __VA_ARGS__ }                          \
    }

// Columns of a lane.
#define LANE_COLUMNS 4u

template <u32 CODEC>
struct Code {
    static constexpr u32 BITS = CODEC == F32 ? 32 : CODEC == F16 ? 16 : CODEC == U8 ? 8 : 4;
    // Words of a lane's four columns. Those of U4 are half a word.
    static constexpr u32 WORDS = CODEC == F32 ? 4 : CODEC == F16 ? 2 : 1;
    // Whether the last four bytes of a row are its scale and bias.
    static constexpr bool HAS_SCALE = CODEC == U8 || CODEC == U4;
};

// Rows of one kind in memory, and the lane's columns of them.
struct Rows {
    const u8* first;
    u32 bytes;      // from one row to the next
    u32 row_bytes;
    u32 column;     // the lane's first column

    __device__ __forceinline__ const u8* row(u32 slot) const { return first + (u64)slot * bytes; }
};

// Rows whose columns and scales are aligned to their loads: where the lane's columns of the first
// row and its scale are.
struct AlignedRows {
    const u8* columns;
    const u8* scales;
    u32 bytes;

    __device__ __forceinline__ AlignedRows(const Rows& rows, u32 bits)
        : columns(base_address(rows.first + rows.column * bits / 8)),
          scales(base_address(rows.first + rows.row_bytes - 4)), bytes(rows.bytes) {}
};

// Returns the code `v` of `word` as an f32: an integer in the mantissa of 2^23.
template <u32 CODEC>
__device__ __forceinline__ float code_of(u32 word, u32 v) {
    const u32 bits = CODEC == U8 ? __byte_perm(word, 0x4b000000u, 0x7640u + v)
                                 : 0x4b000000u | (word >> 4 * v & 15);
    return __uint_as_float(bits) - 8388608.0f;
}

// A lane's columns of one row, encoded.
template <u32 CODEC>
struct LaneRow {
    static constexpr u32 WORDS = Code<CODEC>::WORDS;
    u32 words[WORDS];
    u32 scale_and_bias;

    // Loads the columns of a row whose columns and scale are aligned to their loads; zeros, which
    // decode to +0, if `!wanted`.
    __device__ __forceinline__ void load(const AlignedRows& rows, u32 slot, bool wanted) {
        const u8* at = rows.columns + (u64)slot * rows.bytes;
        if constexpr (CODEC == U4) {
            words[0] = load_constant_half(at, wanted);
        } else {
            load_constant<WORDS>(words, at, wanted);
        }
        scale_and_bias = 0;
        if constexpr (Code<CODEC>::HAS_SCALE) {
            u32 (&scale)[1] = *(u32(*)[1])&scale_and_bias;
            load_constant<1>(scale, rows.scales + (u64)slot * rows.bytes, wanted);
        }
    }

    // Loads the columns of any row, word by word. Columns after the row's end are 0.
    __device__ __forceinline__ void load_words(const Rows& rows, u32 slot, bool wanted) {
        const u32* row = (const u32*)rows.row(slot);
        const u32 row_words = (rows.row_bytes + 3) / 4;
        const u32 at = rows.column * Code<CODEC>::BITS / 32;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            words[i] = wanted && at + i < row_words ? load_racing(row + at + i) : 0;
        }
        if (CODEC == U4 && rows.column % 8) {
            words[0] >>= 16;
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

    // Adds the row to `sums`. The products are exact: see kernels/src/cache/codec.rs.
    __device__ __forceinline__ void add_to(float (&sums)[LANE_COLUMNS], float unit) const {
        float scale = widen((u16)scale_and_bias) * unit;
        float bias = widen((u16)(scale_and_bias >> 16)) * unit;
#pragma unroll
        for (u32 v = 0; v < LANE_COLUMNS; v++) {
            if constexpr (CODEC == F32) {
                sums[v] += __uint_as_float(words[v]);
            } else if constexpr (CODEC == F16) {
                sums[v] += widen((u16)(words[v / 2] >> 16 * (v % 2)));
            } else {
                sums[v] += code_of<CODEC>(words[0], v) * scale + bias;
            }
        }
    }
};

// Writes the lane's columns to `out`, which points to the lane's first one: `columns` of them.
template <bool ALIGNED>
__device__ __forceinline__ void store_columns(
    float* out, const float (&values)[LANE_COLUMNS], u32 columns) {
    if constexpr (ALIGNED) {
        store_4(out, values, columns);
    } else {
#pragma unroll
        for (u32 v = 0; v < LANE_COLUMNS; v++) {
            store_1(out + v, values[v], v < columns);
        }
    }
}

// Divides the sum of `keys` rows by their number, where the feature wants the mean.
__device__ __forceinline__ void finish_sums(
    const Feature& f, float (&sums)[LANE_COLUMNS], u32 keys) {
    if (f.pooling == MEAN && keys > 1) {
        float count = (float)keys;
#pragma unroll
        for (u32 v = 0; v < LANE_COLUMNS; v++) {
            sums[v] = __fdiv_rn(sums[v], count);
        }
    }
}

// Writes zeros to the columns of a bag's output from `column` on.
__device__ __forceinline__ void zero_fill(const Feature& f, float* out, u32 column) {
    for (column += lane_number(); column < f.width; column += 32) {
        out[column] = 0.0f;
    }
}

// Pools rows of one bag with the whole warp, whatever their alignment: lane `i` has in `slot` the
// row of the lookup at `position + i`, or NO_SLOT for the default row. ROWS rows are in flight.
// Where the feature does not pool, each row is written at its own position of `out`.
template <u32 CODEC, u32 ROWS>
__device__ __forceinline__ void pool_slots(
    const Feature& f, const Rows& rows, u32 slot, u32 count, u32 position, float* out,
    float (&sums)[LANE_COLUMNS]) {
    const u32 columns = f.dim > rows.column ? f.dim - rows.column : 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i += ROWS) {
        LaneRow<CODEC> loaded[ROWS];
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            u32 from = __shfl_sync(ALL_LANES, slot, (i + u) % 32);
            loaded[u].load_words(rows, from, i + u < count && from != NO_SLOT && columns);
        }
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            if (i + u >= count) {
                break;
            }
            float value[LANE_COLUMNS] = {};
            if (__shfl_sync(ALL_LANES, slot, i + u) == NO_SLOT) {
#pragma unroll
                for (u32 v = 0; v < LANE_COLUMNS; v++) {
                    value[v] += v < columns ? f.default_row[rows.column + v] : 0.0f;
                }
            } else {
                loaded[u].add_to(value, f.unit);
            }
            if (f.pooling == NONE) {
                float* to = out + (u64)(position + i + u) * f.dim + rows.column;
                store_columns<false>(to, value, columns);
            }
#pragma unroll
            for (u32 v = 0; v < LANE_COLUMNS; v++) {
                sums[v] += value[v];
            }
        }
    }
}

// `pool_slots` for the feature's codec.
template <u32 ROWS>
__device__ __forceinline__ void pool_any_slots(
    const Feature& f, const Rows& rows, u32 slot, u32 count, u32 position, float* out,
    float (&sums)[LANE_COLUMNS]) {
    FOR_CODEC(f, { pool_slots<CODEC, ROWS>(f, rows, slot, count, position, out, sums); })
}
