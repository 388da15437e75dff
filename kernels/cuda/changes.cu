// The verbs that change a cache, `insert`, `update` and `invalidate`, and those that tell what it
// holds, `probe` and `dump`. To the byte what kernels/src/cache.rs does with the same rows in the
// same order.
//
// The host sorts a list of changes by set, keeping their order within one, and a warp takes all of
// a set: so a set has one writer in a launch. Launches that change a cache are on one stream;
// queries on others go on meanwhile, and the sequence number of a set, odd while it changes, tells
// them what not to believe.
//
// Changed since the first version: a warp meets before it passes a fence, so that what all its
// lanes wrote is behind it; dumps copy without looking twice, since nothing changes meanwhile.
#include "eviction.cuh"

struct Change {
    u64 word;
    u32 set;
    // The set's epoch from before the row was read (insert).
    u32 epoch;
    // Number of the row's bytes in `rows`.
    u32 slot;
    // Number of the change in the caller's order, where its result goes.
    u32 number;
};

struct Changes {
    Cache cache;
    const Change* list;
    // Where each set's changes begin in the list, `[sets + 1]`.
    const u32* runs;
    u32 sets;
    // Words from one row in `rows` to the next.
    u32 stride;
    const u32* rows;
    // 1 where the row is in (insert), or was (update, invalidate).
    u8* done;
};

enum Verb { INSERT, UPDATE, INVALIDATE };

__device__ __forceinline__ void write_row(const Cache& cache, u32 set, u32 way, const u32* from, u32 lane) {
    u32* to = row_of(cache, set, way);
    u32 last = cache.row_bytes % 4 ? FULL >> (32 - 8 * (cache.row_bytes % 4)) : FULL;
    for (u32 i = lane; i < cache.row; i += 32) store_racing(to + i, from[i] & (i == cache.row - 1 ? last : FULL));
}

// A way for a row that is not there yet.
__device__ inline u32 take_way(const Cache& cache, Name name) {
    Ways ways = load_ways(cache, name.set);
    u32 way = WAYS;
    for (u32 w = WAYS; w-- > 0;)
        if (word_of(cache, name.set, w) == 0) way = w;
    if (way == WAYS) way = evict(cache, name.set, ways);
    place(ways, way, tag_of(cache, name.word));
    store_ways(cache, name.set, ways);
    return way;
}

template <Verb VERB>
__device__ __forceinline__ void change_rows(const Changes& c) {
    u32 lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (warp >= c.sets) return;
    const Cache& cache = c.cache;
    for (u32 i = c.runs[warp]; i < c.runs[warp + 1]; i++) {
        Change change = c.list[i];
        Name name = {change.set, change.word};
        u32 *sequence = head_of(cache, name.set) + SEQUENCE, *epoch = tail_of(cache, name.set) + EPOCH;
        u32 before = load_racing(sequence), since = load_racing(epoch);
        if (lane == 0) {
            store_racing(sequence, before + 1);
            if (VERB != INSERT) store_racing(epoch, since + 1);
        }
        __syncwarp();
        fence();
        u32 way = find(cache, name.word, load_head(cache, name.set, lane), lane);
        bool done = VERB == INSERT ? name.word != 0 && since == change.epoch : way < WAYS;
        if (done && way == WAYS) way = __shfl_sync(FULL, lane == 0 ? take_way(cache, name) : 0, 0);
        if (done && lane == 0) set_word(cache, name.set, way, VERB == INVALIDATE ? 0 : name.word);
        if (done && VERB != INVALIDATE) write_row(cache, name.set, way, c.rows + (u64)change.slot * c.stride, lane);
        __syncwarp();
        fence();
        if (lane == 0) {
            store_racing(sequence, before + 2);
            c.done[change.number] = done;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) insert_rows(Changes changes) { change_rows<INSERT>(changes); }

extern "C" __global__ void __launch_bounds__(128) update_rows(Changes changes) { change_rows<UPDATE>(changes); }

extern "C" __global__ void __launch_bounds__(128) invalidate_rows(Changes changes) { change_rows<INVALIDATE>(changes); }

struct Probed {
    u32 cached;
    u32 epoch;
};

// These two are on the stream of the changes, so nothing changes meanwhile.

// Whether rows are cached, and the epochs of their sets; for rows to be read ahead. A warp a row.
extern "C" __global__ void __launch_bounds__(128) probe_rows(Cache cache, const Change* list, Probed* out, u32 count) {
    u32 lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (warp >= count) return;
    Name name = {list[warp].set, list[warp].word};
    u32 epoch = load_racing(tail_of(cache, name.set) + EPOCH);
    u32 way = find(cache, name.word, load_head(cache, name.set, lane), lane);
    if (lane == 0) out[warp] = Probed{way < WAYS, epoch};
}

// The words and rows of `count` slots from `first` on; word 0 where there is no row. A warp a slot.
extern "C" __global__ void __launch_bounds__(128) dump_rows(Cache cache, u64 first, u32 count, u64* words, u32* rows) {
    u32 lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (warp >= count) return;
    u32 set = (u32)((first + warp) / WAYS), way = (u32)((first + warp) % WAYS);
    for (u32 i = lane; i < cache.row; i += 32) rows[(u64)warp * cache.row + i] = load_racing(row_of(cache, set, way) + i);
    if (lane == 0) words[warp] = word_of(cache, set, way);
}
