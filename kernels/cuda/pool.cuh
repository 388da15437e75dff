// One row on its way from memory into a bag's sum: decoded to the bit as kernels/src/codec.rs says, added column by column in key
// order. A lane has the words `lane`, `lane + 32`, ... of the row and the columns that lie in them.
#pragma once
#include "lookup.cuh"

// Values in a word, by codec.
template <u32 CODEC> struct Values { static constexpr u32 N = CODEC == F32 ? 1 : CODEC == F16 ? 2 : CODEC == U8 ? 4 : 8; };

// The lane's words of one row, and the row's scale and bias.
template <u32 WORDS>
struct Row {
    // Registers while there are few; else each lane's own memory, and loops stay loops.
    static constexpr u32 UNROLL = WORDS <= 4 ? WORDS : 1;
    u32 words[WORDS];
    u32 parameters;

    template <u32 CODEC>
    __device__ __forceinline__ void load(const u32* from, u32 row, u32 row_bytes, u32 lane) {
#pragma unroll UNROLL
        for (u32 i = 0; i < WORDS; i++) words[i] = lane + 32 * i < row ? load_racing(from + lane + 32 * i) : 0;
        if (CODEC == U8 || CODEC == U4) {
            // The last four bytes, wherever they begin.
            u32 at = (row_bytes - 4) / 4, shift = 8 * (row_bytes % 4);
            u32 low = load_racing(from + at);
            parameters = shift ? __funnelshift_r(low, load_racing(from + at + 1), shift) : low;
        }
    }

    // Copies the row to `to`, a word that holds nothing but scale and bias included.
    __device__ __forceinline__ void copy(u32* to, u32 row, u32 row_bytes, u32 lane) const {
#pragma unroll UNROLL
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

    // Calls `each(register, column)` for the lane's columns.
    template <class Each>
    __device__ __forceinline__ void columns(Each each) {
#pragma unroll Row<WORDS>::UNROLL
        for (u32 i = 0; i < WORDS; i++) {
#pragma unroll
            for (u32 v = 0; v < N; v++) {
                u32 column = (lane + 32 * i) * N + v;
                if (column < f.dim) each(i, v, column);
            }
        }
    }

    // Adds what `value(i, v, column)` gives for the row at `position` of its bag.
    template <class Value>
    __device__ __forceinline__ void add(u32 position, Value value) {
        if (f.pooling == NONE) {
            float* to = out + position * f.dim;
            columns([&](u32 i, u32 v, u32 column) { to[column] = 0.0f + value(i, v, column); });
        } else if (REGISTERS) {
            columns([&](u32 i, u32 v, u32 column) {
                float& sum = sums[i * N + v];
                sum = (position == 0 ? 0.0f : sum) + value(i, v, column);
            });
        } else {
            columns([&](u32 i, u32 v, u32 column) {
                out[column] = (position == 0 ? 0.0f : out[column]) + value(i, v, column);
            });
        }
    }

    __device__ __forceinline__ void add_row(u32 position, const Row<WORDS>& row) {
        float scale = widen((u16)row.parameters) * f.unit, bias = widen((u16)(row.parameters >> 16)) * f.unit;
        add(position, [&](u32 i, u32 v, u32) { return row.template value<CODEC>(i, v, scale, bias); });
    }

    __device__ __forceinline__ void add_default(u32 position) {
        add(position, [&](u32, u32, u32 column) { return f.default_row[column]; });
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
