// Pooling: rows are loaded, decoded to the bit as kernels/src/cache/codec.rs does, and added column
// by column in key order. The lanes that read one row together are a *team*; a warp has 32 / lanes
// teams. A lane has up to four *pieces* of a row. A piece is four columns, which are 16 bytes of
// the output; the pieces of a team's lanes are neighbours. A team therefore writes whole sectors of
// memory, and a lane reads 16 bytes of a row (8 of U4). Wider rows are pooled in several passes.
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

// Columns of a piece, if the output has no form with longer ones.
#define PIECE_COLUMNS 4u

// The forms of an output. With the first two a lane writes 16 bytes with one aligned store, or 8 of
// an F16_OUT whose rows are F32.
enum Form { F32_OUT, F16_OUT, ANY_OUT };

// Runs `...` with the form of the feature's output as the constant FORM. The second comparison is
// no equality, because the compiler would make a jump table of two.
#define FOR_FORM(f, ...)                                                         \
    {                                                                            \
        const u32 aligned = uniform((f).aligned);                                \
        if (aligned == ALIGNED_F32) {                                            \
            constexpr Form FORM = F32_OUT; __VA_ARGS__                           \
        } else if (aligned >= ALIGNED_F16) {                                     \
            constexpr Form FORM = F16_OUT; __VA_ARGS__                           \
        } else { constexpr Form FORM = ANY_OUT; __VA_ARGS__ }                    \
    }

// Rows of a team that are in flight together. All teams together have at most the warp's 32 rows.
// One team has at most as many rows as lanes, and it has at least 4 lanes.
#define GROUP_ROWS 4u

template <u32 CODEC>
struct Code {
    static constexpr u32 BITS = CODEC == F32 ? 32 : CODEC == F16 ? 16 : CODEC == U8 ? 8 : 4;
    // Columns of a lane.
    static constexpr u32 COLUMNS = CODEC == F32 ? 4 : CODEC == F16 ? 8 : 16;
    // Words of four columns. Those of U4 are half a word.
    static constexpr u32 WORDS = CODEC == F32 ? 4 : CODEC == F16 ? 2 : 1;
    // Rows of a team that are in flight together when rows are pooled. On compute capability 8.0
    // the compiler has no registers for four rows of U8 or U4.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
    static constexpr u32 POOLED_ROWS = CODEC == U8 || CODEC == U4 ? 2 : GROUP_ROWS;
#else
    static constexpr u32 POOLED_ROWS = GROUP_ROWS;
#endif
    // Whether the last four bytes of a row are its scale and bias.
    static constexpr bool HAS_SCALE = CODEC == U8 || CODEC == U4;
};

// Rows of one kind in memory, and the lane's first column of them.
struct Rows {
    const u8* first;
    u32 bytes;      // from one row to the next
    u32 row_bytes;
    u32 column;

    __device__ __forceinline__ const u8* row(u32 slot) const { return first + (u64)slot * bytes; }
};

// Returns the codes of a word of U8 or of half a word of U4, a byte each. The codes of U4 come in
// the order 0, 2, 1, 3.
template <u32 CODEC>
__device__ __forceinline__ u32 codes_of(u32 word) {
    return CODEC == U8 ? word : (word | word << 12) & 0x0f0f0f0f;
}

// Returns code `v` of these as an f32.
template <u32 CODEC>
__device__ __forceinline__ float code_of(u32 codes, u32 v) {
    return byte_as_float(codes, CODEC == U8 || v == 0 || v == 3 ? v : 3 - v);
}

// The scale and bias that convert the codes of a row to numbers. The products are exact: see
// kernels/src/cache/codec.rs.
struct Scale {
    float scale;
    float bias;

    __device__ __forceinline__ Scale(u32 scale_and_bias, float unit)
        : scale(widen((u16)scale_and_bias) * unit),
          bias(widen((u16)(scale_and_bias >> 16)) * unit) {}
};

// Returns column `v` of a piece of a row, of whose codes `scale` makes numbers.
template <u32 CODEC>
__device__ __forceinline__ float decode(
    const u32 (&words)[Code<CODEC>::WORDS], const Scale& scale, u32 v) {
    if constexpr (CODEC == F32) {
        return __uint_as_float(words[v]);
    } else if constexpr (CODEC == F16) {
        return widen((u16)(words[v / 2] >> 16 * (v % 2)));
    } else {
        return code_of<CODEC>(codes_of<CODEC>(words[0]), v) * scale.scale + scale.bias;
    }
}

// Rows whose columns and scales are aligned to their loads: the addresses of the lane's pieces of a
// row and of its scale. A piece has COLUMNS columns.
template <u32 CODEC, u32 COLUMNS>
struct AlignedRows {
    static constexpr u32 PIECES = Code<CODEC>::COLUMNS / COLUMNS;
    const u8* first;       // the lane's first piece of the first row
    u32 bytes;
    u32 after[PIECES];     // bytes from the lane's first piece to the others
    u32 scale;             // likewise to the scale

    // The pieces of the team's `lanes` lanes are neighbours. For a piece after the row's last
    // column the lane reads another piece of the row and does not use it.
    __device__ __forceinline__ AlignedRows(const Rows& rows, u32 lanes, u32 dim)
        : bytes(rows.bytes) {
        const u32 column = rows.column < dim ? rows.column : 0;
        const u32 from = column * Code<CODEC>::BITS / 8;
        first = base_address(rows.first + from);
        scale = rows.row_bytes - 4 - from;
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
            const u32 columns = p * COLUMNS * lanes;
            after[p] = column + columns < dim ? columns * Code<CODEC>::BITS / 8 : 0;
        }
    }
};

// A lane's pieces of one row, encoded.
template <u32 CODEC, u32 COLUMNS>
struct LaneRow {
    static constexpr u32 PIECES = Code<CODEC>::COLUMNS / COLUMNS;
    // Words of a load: the alignment of every row, in words. Words of a piece; half a word is one.
    static constexpr u32 LOADED = Code<CODEC>::WORDS;
    static constexpr u32 WORDS = (COLUMNS * Code<CODEC>::BITS + 31) / 32;
    u32 words[PIECES][WORDS / LOADED][LOADED];
    u32 scale_and_bias;

    __device__ __forceinline__ void load(const AlignedRows<CODEC, COLUMNS>& rows, u32 slot) {
        const u8* row = element(rows.first, slot, rows.bytes);
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
            const u8* at = row + rows.after[p];
            if constexpr (COLUMNS * Code<CODEC>::BITS == 16) {
                words[p][0][0] = load_constant_half(at);
            } else {
#pragma unroll
                for (u32 i = 0; i < WORDS / LOADED; i++) {
                    load_constant<LOADED>(words[p][i], at + 4 * LOADED * i);
                }
            }
        }
        scale_and_bias = 0;
        if constexpr (Code<CODEC>::HAS_SCALE) {
            u32 (&scale)[1] = *(u32(*)[1])&scale_and_bias;
            load_constant<1>(scale, row + rows.scale);
        }
    }

    __device__ __forceinline__ Scale scale(float unit) const {
        Scale scale(scale_and_bias, unit);
        // With a bias of +0 instead of -0 no number is -0.
        scale.bias += 0.0f;
        return scale;
    }

    // Returns piece `p` in `values`. No value is -0.
    __device__ __forceinline__ void read(
        float (&values)[COLUMNS], u32 p, const Scale& scale) const {
#pragma unroll
        for (u32 v = 0; v < COLUMNS; v++) {
            float value;
            if constexpr (CODEC == U4 && COLUMNS == 8) {
                const u32 codes = words[p][0][0] >> 4 * (v % 2) & 0x0f0f0f0f;
                value = byte_as_float(codes, v / 2) * scale.scale + scale.bias;
            } else {
                value = decode<CODEC>(words[p][v / 4], scale, v % 4);
            }
            values[v] = Code<CODEC>::HAS_SCALE ? value : 0.0f + value;
        }
    }
};

// Aligned rows that are pooled: the addresses of the lane's columns and of the scale of a row.
// Unlike the pieces of `AlignedRows`, the columns of a lane are consecutive, so that every load has
// the same address but for a constant.
template <u32 CODEC>
struct PooledRows {
    const u8* first;       // the lane's first column of the first row
    u32 bytes;
    u32 scale;             // bytes from the lane's first column to the scale

    // A lane without columns reads those of another lane and does not use them.
    __device__ __forceinline__ PooledRows(const Rows& rows, u32 dim) : bytes(rows.bytes) {
        const u32 column = rows.column < dim ? rows.column : 0;
        const u32 from = column * Code<CODEC>::BITS / 8;
        first = base_address(rows.first + from);
        scale = rows.row_bytes - 4 - from;
    }
};

// A lane's columns of one row, encoded.
template <u32 CODEC>
struct PooledRow {
    static constexpr u32 WORDS = Code<CODEC>::COLUMNS * Code<CODEC>::BITS / 32;
    // Words of a load: the alignment of every row, in words.
    static constexpr u32 LOADED = CODEC == F32 ? 4 : CODEC == F16 ? 2 : 1;
    u32 words[WORDS / LOADED][LOADED];
    u32 scale_and_bias;

    // The words of the last columns may reach past the row, up to 12 bytes.
    __device__ __forceinline__ void load(const PooledRows<CODEC>& rows, u32 slot) {
        const u8* row = element(rows.first, slot, rows.bytes);
#pragma unroll
        for (u32 i = 0; i < WORDS / LOADED; i++) {
            load_constant<LOADED>(words[i], row + 4 * LOADED * i);
        }
        scale_and_bias = 0;
        if constexpr (Code<CODEC>::HAS_SCALE) {
            u32 (&scale)[1] = *(u32(*)[1])&scale_and_bias;
            load_constant<1>(scale, row + rows.scale);
        }
    }

    __device__ __forceinline__ u32 word(u32 i) const { return words[i / LOADED][i % LOADED]; }

    // Returns the lane's column `v`.
    __device__ __forceinline__ float decode(const Scale& scale, u32 v) const {
        if constexpr (CODEC == F32) {
            return __uint_as_float(word(v));
        } else if constexpr (CODEC == F16) {
            return widen((u16)(word(v / 2) >> 16 * (v % 2)));
        } else if constexpr (CODEC == U8) {
            return byte_as_float(word(v / 4), v % 4) * scale.scale + scale.bias;
        } else {
            const u32 codes = word(v / 8) >> 4 * (v % 2) & 0x0f0f0f0f;
            return byte_as_float(codes, v % 8 / 2) * scale.scale + scale.bias;
        }
    }

    // Adds the row to `sums` if `wanted`. No sum is -0.
    __device__ __forceinline__ void add_to(
        float (&sums)[Code<CODEC>::COLUMNS], float unit, bool wanted) const {
        // With zeros every code is +0. With a bias of +0 instead of -0 no number is -0.
        Scale scale(wanted ? scale_and_bias : 0, unit);
        scale.bias += 0.0f;
#pragma unroll
        for (u32 v = 0; v < Code<CODEC>::COLUMNS; v++) {
            const float sum = sums[v] + decode(scale, v);
            sums[v] = wanted || Code<CODEC>::HAS_SCALE ? sum : sums[v];
        }
    }
};

// Returns the address of column `column` of a sample's part of the output.
__device__ __forceinline__ u8* output_at(const volatile Feature& f, u32 sample, u32 column) {
    return (u8*)element(f.out, sample * (u32)f.stride + column, f.out_bytes);
}

// Writes `columns` columns of a piece to `out`, with `bytes` bytes each. A piece of f16 is whole.
__device__ __forceinline__ void store_columns(
    u8* out, const float (&values)[PIECE_COLUMNS], u32 columns, u32 bytes) {
    const bool is_half = bytes == 2;
    store_words_2(out, narrow_2(values[0], values[1]), narrow_2(values[2], values[3]),
                  is_half && columns);
    const u32 singles = is_half ? 0 : columns;
#pragma unroll
    for (u32 v = 0; v < PIECE_COLUMNS; v++) {
        store_1(out + 4 * v, values[v], v < singles);
    }
}

// Writes a whole piece to `out` if `wanted`, with `bytes` bytes a column.
template <Form FORM, u32 COLUMNS>
__device__ __forceinline__ void store_piece(
    u8* out, const float (&values)[COLUMNS], bool wanted, u32 bytes) {
    if constexpr (FORM == F32_OUT) {
        store_4(out, values, wanted);
    } else if constexpr (FORM == ANY_OUT) {
        store_columns(out, values, wanted ? COLUMNS : 0, bytes);
    } else if constexpr (COLUMNS == 4) {
        store_words_2(out, narrow_2(values[0], values[1]), narrow_2(values[2], values[3]), wanted);
    } else {
        const float words[4] = {
            __uint_as_float(narrow_2(values[0], values[1])),
            __uint_as_float(narrow_2(values[2], values[3])),
            __uint_as_float(narrow_2(values[4], values[5])),
            __uint_as_float(narrow_2(values[6], values[7]))};
        store_4(out, words, wanted);
    }
}

// Returns the divisor of the sum of `keys` rows, by the feature's pooling; 1 for none.
__device__ __forceinline__ float divisor_of(const Feature& f, u32 keys) {
    const float count = (float)keys;
    return keys < 2 ? 1.0f
        : f.pooling == MEAN  ? count
        : f.pooling == SQRTN ? __fsqrt_rn(count)
                             : 1.0f;
}

// Divides the sum of `keys` rows.
template <u32 COLUMNS>
__device__ __forceinline__ void finish_sums(
    const Feature& f, float (&sums)[COLUMNS], u32 keys) {
    const u32 pooling = uniform(f.pooling);
    if (pooling == MEAN || pooling == SQRTN) {
        const float divisor = divisor_of(f, keys);
#pragma unroll
        for (u32 v = 0; v < COLUMNS; v++) {
            // x / 1 is x.
            sums[v] = __fdiv_rn(sums[v], divisor);
        }
    }
}

// Writes zeros to the columns of a sample's part of the output from `column` on: whole words.
__device__ __forceinline__ void zero_fill(const Feature& f, u32 sample, u32 column) {
    const u32 words = f.width * f.out_bytes / 4;
    u32* out = (u32*)output_at(f, sample, 0);
    for (u32 i = column * f.out_bytes / 4 + lane_number(); i < words; i += 32) {
        out[i] = 0;
    }
}
