// A plain gather: copies rows at known slots, without a cache, a codec or a sum. `hatchback-bench
// gpu` measures it on the rows of a lookup, as the limit of a lookup's speed. No request runs it.
#include "prelude.cuh"

struct PlainGather {
    const u32* rows;   // `[.., row_words]`
    const u32* slots;  // `[count]`
    u32* out;          // `[count, row_words]`
    u32 row_words;
    u32 count;
};

static_assert(sizeof(PlainGather) == 32, "kernels/src/gpu/gather.rs has the same structure");

// Units of rows that a thread has in flight.
#define UNITS 4

// Copies rows of `WORDS`-word units: neighbouring threads copy neighbouring units.
template <u32 WORDS>
static __device__ __forceinline__ void gather(const PlainGather& p) {
    const u32 units = p.row_words / WORDS;
    const u64 all = (u64)p.count * units;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 first = blockIdx.x * blockDim.x + threadIdx.x; first < all; first += UNITS * threads) {
        u32 loaded[UNITS][WORDS];
#pragma unroll
        for (u32 u = 0; u < UNITS; u++) {
            const u64 at = first + u * threads < all ? first + u * threads : first;
            const u32 row = (u32)at / units;
            const u32* from = p.rows + (u64)p.slots[row] * p.row_words + (u32)at % units * WORDS;
            load_constant<WORDS>(loaded[u], from);
        }
#pragma unroll
        for (u32 u = 0; u < UNITS; u++) {
            const u64 at = first + u * threads;
            if (at < all) {
                u32* to = p.out + at * WORDS;
                if constexpr (WORDS == 4) {
                    *(uint4*)to = {loaded[u][0], loaded[u][1], loaded[u][2], loaded[u][3]};
                } else {
                    to[0] = loaded[u][0];
                }
            }
        }
    }
}

// Rows of a multiple of 16 bytes. Fewer than 2^32 units.
extern "C" __global__ void __launch_bounds__(256) gather_lines(PlainGather p) { gather<4>(p); }

// Rows of a multiple of 4 bytes. Fewer than 2^32 words.
extern "C" __global__ void __launch_bounds__(256) gather_words(PlainGather p) { gather<1>(p); }
