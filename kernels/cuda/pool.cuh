// One row on its way from memory into a bag's sum: decoded to the bit as kernels/src/codec.rs says,
// added column by column in key order. A lane has the words `lane`, `lane + 32`, ... of the row, or
// of a piece of it, and the columns that lie in them.
#pragma once
#include "lookup.cuh"

// Values in a word, by codec.
template <u32 CODEC> struct Values { static constexpr u32 N = CODEC == F32 ? 1 : CODEC == F16 ? 2 : CODEC == U8 ? 4 : 8; };

// A row's scale and bias: the last four bytes, wherever they begin.
template <u32 CODEC>
__device__ __forceinline__ u32 load_parameters(const u32* from, u32 row_bytes) {
    if (CODEC != U8 && CODEC != U4) return 0;
    u32 at = (row_bytes - 4) / 4, shift = 8 * (row_bytes % 4);
    u32 low = load_racing(from + at);
    return shift ? __funnelshift_r(low, load_racing(from + at + 1), shift) : low;
}

// The lane's words of one row, or of a piece of it, in registers, and the row's scale and bias.
template <u32 WORDS>
struct Row {
    u32 words[WORDS];
    u32 parameters;

    // Its words from `first` on.
    __device__ __forceinline__ void load(const u32* from, u32 first, u32 row, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            u32 at = first + lane + 32 * i;
            words[i] = at < row ? load_racing(from + at) : 0;
        }
    }

    // Copies the row to `to`, a word that holds nothing but scale and bias included.
    __device__ __forceinline__ void copy(u32* to, u32 row, u32 row_bytes, u32 lane) const {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++)
            if (lane + 32 * i < row) to[lane + 32 * i] = words[i];
        u32 shift = 8 * (row_bytes % 4);
        if (row > 32 * WORDS && lane == 0) to[32 * WORDS] = shift ? parameters >> (32 - shift) : parameters;
    }

    // Value `v` of word `i`. The products are exact: see kernels/src/codec.rs.
    template <u32 CODEC>
    __device__ __forceinline__ float value(u32 i, u32 v, float scale, float bias) const {
        u32 word = words[i];
        if (CODEC == F32) return __uint_as_float(word);
        if (CODEC == F16) return widen((u16)(word >> 16 * v));
        u32 code = CODEC == U8 ? word >> 8 * v & 0xff : word >> 4 * v & 15;
        return (float)code * scale + bias;
    }
};

// A row that is wider: it stays where it lies, and is read a piece at a time.
struct FarRow {
    const u32* from;

    __device__ __forceinline__ void copy(u32* to, u32 row, u32, u32 lane) const {
#pragma unroll 4
        for (u32 at = lane; at < row; at += 32) to[at] = load_racing(from + at);
    }
};

// The sum of a bag's rows: in registers, or in the output itself where rows are wide.
template <u32 CODEC, u32 WORDS, bool REGISTERS>
struct Sum {
    static constexpr u32 N = Values<CODEC>::N;
    float sums[REGISTERS ? WORDS * N : 1];
    const Feature& f;
    float* out;
    u32 lane;

    __device__ __forceinline__ Sum(const Feature& f, u32 lane) : f(f), out(nullptr), lane(lane) {}

    __device__ __forceinline__ void begin(u32 sample) { out = f.out + sample * f.stride; }

    // Calls `each(word of the piece, value of the word, column)` for the lane's columns in the
    // piece from word `first` on.
    template <class Each>
    __device__ __forceinline__ void columns_of(u32 first, Each each) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
#pragma unroll
            for (u32 v = 0; v < N; v++) {
                u32 column = (first + lane + 32 * i) * N + v;
                if (column < f.dim) each(i, v, column);
            }
        }
    }

    // Calls `each(first)` for each piece of a row: one where all is in registers.
    template <class Each>
    __device__ __forceinline__ void pieces(Each each) {
        if constexpr (REGISTERS) {
            each(0u);
        } else {
#pragma unroll 1
            for (u32 first = 0; first * N < f.dim; first += 32 * WORDS) each(first);
        }
    }

    template <class Each>
    __device__ __forceinline__ void columns(Each each) {
        pieces([&](u32 first) { columns_of(first, each); });
    }

    // Adds what `value(i, v, column)` gives for a piece of the row at `position` of its bag.
    template <class Value>
    __device__ __forceinline__ void add(u32 position, u32 first, Value value) {
        if (f.pooling == NONE) {
            float* to = out + position * f.dim;
            columns_of(first, [&](u32 i, u32 v, u32 column) { to[column] = 0.0f + value(i, v, column); });
        } else if (REGISTERS) {
            columns_of(first, [&](u32 i, u32 v, u32 column) {
                float& sum = sums[i * N + v];
                sum = (position == 0 ? 0.0f : sum) + value(i, v, column);
            });
        } else {
            columns_of(first, [&](u32 i, u32 v, u32 column) {
                out[column] = (position == 0 ? 0.0f : out[column]) + value(i, v, column);
            });
        }
    }

    __device__ __forceinline__ void add_piece(u32 position, u32 first, const Row<WORDS>& row) {
        float scale = widen((u16)row.parameters) * f.unit, bias = widen((u16)(row.parameters >> 16)) * f.unit;
        add(position, first, [&](u32 i, u32 v, u32) { return row.template value<CODEC>(i, v, scale, bias); });
    }

    __device__ __forceinline__ void add_row(u32 position, const Row<WORDS>& row) { add_piece(position, 0, row); }

    __device__ __forceinline__ void add_row(u32 position, const FarRow& row) {
        Row<WORDS> piece;
        piece.parameters = load_parameters<CODEC>(row.from, f.cache.row_bytes);
        pieces([&](u32 first) {
            piece.load(row.from, first, f.cache.row, lane);
            add_piece(position, first, piece);
        });
    }

    __device__ __forceinline__ void add_default(u32 position) {
        pieces([&](u32 first) { add(position, first, [&](u32, u32, u32 column) { return f.default_row[column]; }); });
    }

    // Lays what is added so far into the output.
    __device__ __forceinline__ void store() {
        if (REGISTERS && f.pooling != NONE)
            columns([&](u32 i, u32 v, u32 column) { out[column] = sums[i * N + v]; });
    }

    // Completes the output of a bag whose `keys` rows are all added.
    __device__ __forceinline__ void close(u32 keys) {
        if (f.pooling == NONE || keys == 0) {
            for (u32 column = (f.pooling == NONE ? keys * f.dim : 0) + lane; column < f.width; column += 32) out[column] = 0.0f;
            return;
        }
        if (f.pooling == MEAN && keys > 1) {
            float count = (float)keys;
            columns([&](u32 i, u32 v, u32 column) {
                if (REGISTERS) sums[i * N + v] = __fdiv_rn(sums[i * N + v], count);
                else out[column] = __fdiv_rn(out[column], count);
            });
        }
        store();
    }
};
