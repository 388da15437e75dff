// `query_tables` probes the caches, decodes rows, pools them and writes the sums into the dense
// network's input, for all tables in one launch. Bags with missing rows are left open and go to a
// ring in host memory. The ring has the missing keys with their epochs, copies of the cached rows
// that follow them in the same bag, and counts. `finish_bags` pools the rest of those bags from
// rows that the host has read. The bits equal those of kernels/src/lookup/, except the payloads of
// NaNs.
//
// No cache changes while a query runs (kernels/src/gpu/turns.rs). A query therefore reads each row
// once, without a lock, a fence or a validation, and with loads for memory that does not change.
#include "rare.cuh"

// The shared memory of a block's warps. A feature in it takes no registers, and the compiler need
// not load it again after a store to the output.
struct Shared {
    struct {
        Feature feature;
        Tile tile;
        RareBag rare;
    } of_warp[4];
};

// Copies a structure of the caller to shared memory. All lanes of the warp call it together, and
// have synchronised since another lane last read `to`.
template <class T>
__device__ __forceinline__ void copy_words(T& to, const T* from) {
    static_assert(sizeof(T) <= 64 * 4, "two words a lane");
    const u32 lane = lane_number();
    const u32 words = sizeof(T) / 4;
    if (lane < words) {
        ((u32*)&to)[lane] = ((const u32*)from)[lane];
    }
    if (lane + 32 < words) {
        ((u32*)&to)[lane + 32] = ((const u32*)from)[lane + 32];
    }
    __syncwarp();
}

// Pools the bags of a tile.
__device__ __forceinline__ void query_tile(
    const Query& q, const Feature& f, volatile Tile& tile, volatile RareBag& bag) {
    if (uniform(f.aligned) == UNALIGNED) {
        tile.counted[lane_number()] = 0;
        tile.rare = ALL_LANES >> (32 - tile.samples);
    } else if (uniform(f.pooling) == NONE) {
        list_rows(q, f, tile);
    } else if (are_together(f, tile)) {
        pool_together(q, f, tile);
    } else {
        FOR_CODEC(f, { pool_apart<CODEC>(q, f, tile); })
    }
    if (tile.rare) {
        tile.had_rare = 1;
    }

    // Each lane reads only what it has written itself, which is the same in all lanes.
    bag.left = tile.rare;
#pragma unroll 1
    while (uniform(bag.left)) {
        RarePath{q, f, tile, bag}.run();
        const u32 left = bag.left;
        __syncwarp();
        bag.left = left & (left - 1);
    }
}

// Copies the counts to host memory and zeroes them for the next launch. The last block to end calls
// it.
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

// Queries all features in one launch. Tiles are ordered by feature, then by samples; with `only`
// each bag is a tile. A warp takes one tile after the other.
extern "C" __global__ void __launch_bounds__(128, 8) query_tables(Query q) {
    SHARED(Shared, shared)
    auto& mine = shared.of_warp[threadIdx.x / 32];
    volatile Tile& tile = mine.tile;
    tile.number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    tile.had_rare = 0;

#pragma unroll 1
    while (uniform(tile.number) < q.tiles) {
        tile.start(q);
        copy_words(mine.feature, q.features + tile.feature);
        query_tile(q, mine.feature, tile, mine.rare);
        const u32 next = tile.number + gridDim.x * (blockDim.x / 32);
        __syncwarp();
        tile.number = next;
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

// A bag to finish, in shared memory and volatile as `Tile` is.
struct FinishWork {
    OpenBag bag;
    u32 number;  // of the bag
    u32 first;   // the first column of the pass
};

struct SharedFinish {
    // One copy for the block: it comes from the host's memory, perhaps over a bus.
    FinishBags bags;
    struct {
        Feature feature;
        FinishWork work;
    } of_warp[4];
};

// Rows of a bag that `finish_bags` reads from the host at the same time.
#define FINISH_ROWS 4u

// Sets `word`, as `Tile::set` does.
__device__ __forceinline__ void set_word(volatile u32& word, u32 value) {
    __syncwarp();
    word = value;
}

// Pools one pass over the rest of a bag, and adds it to the sum of the rows that the query has
// pooled.
__device__ __forceinline__ void finish_pass(
    const Feature& f, const volatile FinishBags& c, volatile FinishWork& work) {
    const volatile OpenBag& bag = work.bag;
    const AnyBag any = {bag.sample, f.weighted ? c.weights + bag.weights : nullptr};
    const float start = before_first(f);
    float columns[1][PIECE_COLUMNS] = {{start, start, start, start}};
    // Only sums of f32 are left open in the middle of a bag.
    if (bag.pooled && f.pooling != NONE) {
        const u32 column = work.first + PIECE_COLUMNS * lane_number();
#pragma unroll
        for (u32 v = 0; v < PIECE_COLUMNS; v++) {
            const float* sum = (const float*)output_at(f, bag.sample, column + v);
            columns[0][v] = column + v < f.dim ? *sum : 0.0f;
        }
    }
#pragma unroll 1
    for (u32 at = 0; at < uniform(bag.entries); at += 32) {
        const u32 lane = lane_number();
        const u32 some = min(bag.entries - at, 32u);
        const u32 slot = lane < some ? c.slots[bag.first + at + lane] : NO_SLOT;
        const u32 column = work.first + PIECE_COLUMNS * lane;
        const Rows rows = {(const u8*)c.rows, 4 * c.stride, f.cache.row_bytes, column};
        pool_any_slots<FINISH_ROWS>(f, rows, slot, uniform(some), bag.pooled + at, any, columns);
    }
    if (f.pooling != NONE) {
        const u32 column = work.first + PIECE_COLUMNS * lane_number();
        const u32 columns_end = f.dim > column ? f.dim - column : 0;
        u8* const out = output_at(f, bag.sample, column);
        close_bag(f, columns, bag.pooled + bag.entries, any, out, columns_end);
    }
}

// Pools the rest of the open bags. A warp takes one bag after the other.
extern "C" __global__ void __launch_bounds__(128, 8) finish_bags(const FinishBags* at) {
    SHARED(SharedFinish, shared)
    auto& mine = shared.of_warp[threadIdx.x / 32];
    volatile FinishWork& work = mine.work;
    if (threadIdx.x < 32) {
        copy_words(shared.bags, at);
    }
    __syncthreads();
    const volatile FinishBags& c = shared.bags;
    set_word(work.number, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);

#pragma unroll 1
    while (uniform(work.number) < c.count) {
        copy_words(mine.work.bag, c.bags + work.number);
        copy_words(mine.feature, c.features + work.bag.feature);
        const volatile Feature& f = mine.feature;
        set_word(work.first, 0);
#pragma unroll 1
        while (uniform(work.first) < f.dim) {
            finish_pass(mine.feature, c, work);
            set_word(work.first, work.first + WARP_COLUMNS);
        }
        if (f.pooling == NONE) {
            const u32 pooled = (work.bag.pooled + work.bag.entries) * f.dim;
            zero_fill(mine.feature, work.bag.sample, pooled);
        }
        set_word(work.number, work.number + gridDim.x * (blockDim.x / 32));
    }
}
