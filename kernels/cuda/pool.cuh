// Pooling: a row is loaded, decoded to the bit as kernels/src/cache/codec.rs does, and added column
// by column in key order. A lane holds the words `lane`, `lane + 32`, ... of a row or of a piece of
// it, and the columns that those words encode.
#pragma once
#include "lookup.cuh"

// Values in one word, by codec.
template <u32 CODEC>
struct ValuesPerWord {
    static constexpr u32 N = CODEC == F32 ? 1 : CODEC == F16 ? 2 : CODEC == U8 ? 4 : 8;
};

// Whether the last four bytes of a row are its scale and bias.
template <u32 CODEC>
struct HasScale {
    static constexpr bool YES = CODEC == U8 || CODEC == U4;
};

// Loads a row's scale and bias: its last four bytes, which may begin inside a word.
template <u32 CODEC>
__device__ __forceinline__ u32 load_scale_and_bias(const u32* from, u32 row_bytes) {
    if (!HasScale<CODEC>::YES) {
        return 0;
    }
    u32 at = (row_bytes - 4) / 4;
    u32 shift = 8 * (row_bytes % 4);
    u32 low = load_racing(from + at);
    return shift ? __funnelshift_r(low, load_racing(from + at + 1), shift) : low;
}

// The lane's words of one row, or of a piece of it, in registers; the row's scale and bias.
template <u32 WORDS>
struct RegisterRow {
    u32 words[WORDS];
    u32 scale_and_bias;

    // Loads the words from `first` on.
    __device__ __forceinline__ void load(const u32* from, u32 first, u32 row_words, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            u32 at = first + lane + 32 * i;
            words[i] = at < row_words ? load_racing(from + at) : 0;
        }
    }

    // Copies the row to `to`, including a last word that holds only scale and bias.
    __device__ __forceinline__ void copy(u32* to, const Cache& shape, u32 lane) const {
        const u32 row_words = shape.row_words;
        const u32 shift = 8 * (shape.row_bytes % 4);
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if (lane + 32 * i < row_words) {
                to[lane + 32 * i] = words[i];
            }
        }
        if (row_words > 32 * WORDS && lane == 0) {
            to[32 * WORDS] = shift ? scale_and_bias >> (32 - shift) : scale_and_bias;
        }
    }

    // Returns value `v` of word `i`. The products are exact: see kernels/src/cache/codec.rs.
    template <u32 CODEC>
    __device__ __forceinline__ float value(u32 i, u32 v, float scale, float bias) const {
        u32 word = words[i];
        if (CODEC == F32) {
            return __uint_as_float(word);
        }
        if (CODEC == F16) {
            return widen((u16)(word >> 16 * v));
        }
        u32 code = CODEC == U8 ? word >> 8 * v & 0xff : word >> 4 * v & 15;
        return (float)code * scale + bias;
    }
};

// A row that is too wide for registers: it stays in memory and is read piece by piece.
struct MemoryRow {
    const u32* from;

    __device__ __forceinline__ void copy(u32* to, const Cache& shape, u32 lane) const {
        const u32 row_words = shape.row_words;
#pragma unroll 4
        for (u32 at = lane; at < row_words; at += 32) {
            to[at] = load_racing(from + at);
        }
    }
};

// The sum of a bag's rows: in registers, or in the output itself where rows are wide.
template <u32 CODEC, u32 WORDS, bool REGISTERS>
struct BagSum {
    static constexpr u32 N = ValuesPerWord<CODEC>::N;
    float sums[REGISTERS ? WORDS * N : 1];
    const Feature& f;
    float* out;
    u32 lane;

    __device__ __forceinline__ BagSum(const Feature& f, u32 lane)
        : f(f), out(nullptr), lane(lane) {}

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
                if (column < f.dim) {
                    each(i, v, column);
                }
            }
        }
    }

    // Calls `each(first)` for each piece of a row: one where the row fits into registers.
    template <class Each>
    __device__ __forceinline__ void pieces(Each each) {
        if constexpr (REGISTERS) {
            each(0u);
        } else {
#pragma unroll 1
            for (u32 first = 0; first * N < f.dim; first += 32 * WORDS) {
                each(first);
            }
        }
    }

    template <class Each>
    __device__ __forceinline__ void columns(Each each) {
        pieces([&](u32 first) { columns_of(first, each); });
    }

    // Adds `value(i, v, column)` for a piece of the row at `position` of its bag.
    template <class Value>
    __device__ __forceinline__ void add(u32 position, u32 first, Value value) {
        if (f.pooling == NONE) {
            float* to = out + position * f.dim;
            columns_of(first, [&](u32 i, u32 v, u32 column) {
                to[column] = 0.0f + value(i, v, column);
            });
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

    __device__ __forceinline__ void add_piece(
        u32 position, u32 first, const RegisterRow<WORDS>& row) {
        float scale = widen((u16)row.scale_and_bias) * f.unit;
        float bias = widen((u16)(row.scale_and_bias >> 16)) * f.unit;
        add(position, first, [&](u32 i, u32 v, u32) {
            return row.template value<CODEC>(i, v, scale, bias);
        });
    }

    __device__ __forceinline__ void add_row(u32 position, const RegisterRow<WORDS>& row) {
        add_piece(position, 0, row);
    }

    __device__ __forceinline__ void add_row(u32 position, const MemoryRow& row) {
        RegisterRow<WORDS> piece;
        piece.scale_and_bias = load_scale_and_bias<CODEC>(row.from, f.cache.row_bytes);
        pieces([&](u32 first) {
            piece.load(row.from, first, f.cache.row_words, lane);
            add_piece(position, first, piece);
        });
    }

    __device__ __forceinline__ void add_default(u32 position) {
        pieces([&](u32 first) {
            add(position, first, [&](u32, u32, u32 column) { return f.default_row[column]; });
        });
    }

    // Writes the sum so far to the output.
    __device__ __forceinline__ void store() {
        if (REGISTERS && f.pooling != NONE) {
            columns([&](u32 i, u32 v, u32 column) { out[column] = sums[i * N + v]; });
        }
    }

    // Completes the output of a bag whose `keys` rows are all added.
    __device__ __forceinline__ void close(u32 keys) {
        if (f.pooling == NONE || keys == 0) {
            u32 filled = f.pooling == NONE ? keys * f.dim : 0;
            for (u32 column = filled + lane; column < f.width; column += 32) {
                out[column] = 0.0f;
            }
            return;
        }

        if (f.pooling == MEAN && keys > 1) {
            float count = (float)keys;
            columns([&](u32 i, u32 v, u32 column) {
                if (REGISTERS) {
                    sums[i * N + v] = __fdiv_rn(sums[i * N + v], count);
                } else {
                    out[column] = __fdiv_rn(out[column], count);
                }
            });
        }
        store();
    }
};
