// `query_tables` probes the caches, decodes rows, pools them and writes the sums into the dense
// network's input: all tables in one launch. What it leaves open goes to a ring in host memory: the
// missing keys with their epochs, copies of the cached rows that follow them in the same bag,
// and counts. `finish_bags` pools the rest of those bags from rows that the host has read. The bits
// are those of kernels/src/lookup/, but for the payloads of NaNs.
//
// No cache changes while a query runs (kernels/src/gpu/turns.rs). So a query reads each row once,
// without a lock, a fence or a second look, and through loads of constant memory.
#include "rare.cuh"

// What the warps of a block have in shared memory. There a feature takes no registers, and no store
// to the output makes the compiler load it again.
struct Shared {
    struct {
        Feature feature;
        Tile tile;
        RareBag rare;
    } of_warp[4];
};

__device__ __forceinline__ void load_feature(Feature& to, const Feature* from) {
    static_assert(sizeof(Feature) <= 64 * 4, "two words a lane");
    const u32 lane = lane_number();
    const u32 words = sizeof(Feature) / 4;
    __syncwarp();
    ((u32*)&to)[lane] = ((const u32*)from)[lane];
    if (lane + 32 < words) {
        ((u32*)&to)[lane + 32] = ((const u32*)from)[lane + 32];
    }
    __syncwarp();
}

// Pools the bags of a tile.
__device__ __forceinline__ void query_tile(
    const Query& q, const Feature& f, volatile Tile& tile, volatile RareBag& bag) {
    if (!(uniform(f.aligned) & ALIGNED_ROWS)) {
        tile.counted[lane_number()] = 0;
        tile.rare = ALL_LANES >> (32 - tile.samples);
        __syncwarp();
    } else if (uniform(f.pooling) == NONE) {
        list_rows(q, f, tile);
    } else {
        pool_rows(q, f, tile);
    }
    if (tile.rare) {
        tile.had_rare = 1;
    }

    bag.left = tile.rare;
    __syncwarp();
#pragma unroll 1
    while (uniform(bag.left)) {
        RarePath{q, f, tile, bag}.run();
        __syncwarp();
        const u32 left = bag.left;
        __syncwarp();
        bag.left = left & (left - 1);
        __syncwarp();
    }
}

// Hands the counts to the host and zeroes them for the next launch. The last block to end runs it.
__device__ __forceinline__ void publish_counts(const Query& q) {
    u32* counts = (u32*)q.counts;
    *q.ring.counts = {
        load_racing(counts), load_racing(counts + 1), load_racing(counts + 2),
        load_racing(counts + 3)};
    for (u32 i = 0; i < 4; i++) {
        store_racing(counts + i, 0);
    }
    store_racing(q.blocks_done, 0);
    fence_system();
}

// Queries all features in one launch: tiles by feature, then by samples; or the single bags of
// `only`. A warp takes one tile, then the next.
extern "C" __global__ void __launch_bounds__(128, 8) query_tables(Query q) {
    SHARED(Shared, shared)
    auto& mine = shared.of_warp[threadIdx.x / 32];
    volatile Tile& tile = mine.tile;
    tile.number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    tile.had_rare = 0;
    __syncwarp();

#pragma unroll 1
    while (uniform(tile.number) < q.tiles) {
        tile.start(q);
        load_feature(mine.feature, q.features + tile.feature);
        query_tile(q, mine.feature, tile, mine.rare);
        const u32 next = tile.number + gridDim.x * (blockDim.x / 32);
        __syncwarp();
        tile.number = next;
        __syncwarp();
    }

    // The fences order the block's counts before its end, and all counts before the last block's
    // reads. A block without rare bags has counted nothing.
    const bool counted = __syncthreads_or(tile.had_rare);
    if (threadIdx.x == 0) {
        if (counted) {
            fence_device();
        }
        if (atomicAdd(q.blocks_done, 1u) == gridDim.x - 1) {
            fence_device();
            publish_counts(q);
        }
    }
}

// Pools the rest of one bag, onto the rows that the query has pooled.
__device__ __forceinline__ void finish_bag(
    const FinishBags& c, const Feature& f, const OpenBag& bag) {
    const u32 lane = lane_number();
    Rows rows = {(const u8*)c.rows, 4 * c.stride, f.cache.row_bytes, 0};
    float* const out = f.out + bag.sample * f.stride;
    const u32 count = bag.pooled + bag.entries;
#pragma unroll 1
    for (u32 first = 0; first < f.dim; first += 32 * LANE_COLUMNS) {
        float sums[LANE_COLUMNS] = {};
        rows.column = first + LANE_COLUMNS * lane;
        const u32 columns = f.dim > rows.column ? f.dim - rows.column : 0;
        if (bag.pooled && f.pooling != NONE) {
#pragma unroll
            for (u32 v = 0; v < LANE_COLUMNS; v++) {
                sums[v] = v < columns ? out[rows.column + v] : 0.0f;
            }
        }
#pragma unroll 1
        for (u32 at = 0; at < bag.entries; at += 32) {
            const u32 some = min(bag.entries - at, 32u);
            const u32 slot = lane < some ? c.slots[bag.first + at + lane] : NO_SLOT;
            pool_any_slots<8>(f, rows, slot, some, bag.pooled + at, out, sums);
        }
        if (f.pooling != NONE) {
            finish_sums(f, sums, count);
            store_columns<false>(out + rows.column, sums, columns);
        }
    }
    if (f.pooling == NONE) {
        zero_fill(f, out, count * f.dim);
    }
}

// Pools the rest of the open bags. A warp takes one bag, then the next.
extern "C" __global__ void __launch_bounds__(128, 4) finish_bags(const FinishBags* at) {
    u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const FinishBags c = *at;
    SHARED(Shared, shared)
    Feature& feature = shared.of_warp[threadIdx.x / 32].feature;

#pragma unroll 1
    for (; warp < c.count; warp += gridDim.x * (blockDim.x / 32)) {
        const OpenBag bag = c.bags[warp];
        load_feature(feature, c.features + bag.feature);
        finish_bag(c, feature, bag);
    }
}
