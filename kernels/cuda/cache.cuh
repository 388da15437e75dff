// The embedding cache in device memory. Its layout equals the CPU's to the byte;
// kernels/src/cache/mod.rs describes it. A set has a header, a writer state and 14 slots of
// `row_words` words. The header has the tags of the rows, a sequence number and use counts; the
// writer state has the epoch and the state of eviction.
//
// A query probes 32 rows together, four lanes a row: `probe_lanes`. A change looks for one row with
// the whole warp, each lane at one word of the header: `match_tags`.
//
// No query runs while a cache changes: kernels/src/gpu/turns.rs orders them. A query therefore
// finds every header and row whole. Queries run concurrently; they write use counts only.
#pragma once
#include "prelude.cuh"

#define WAYS 14u
#define WAY_BITS 0x3fffu
// Words of one header line (64 bytes). A header has one line, or two if tags have 64 bits.
#define LINE_WORDS 16u
// Words of the header's first line after the tags. On a GPU no code reads the sequence number.
#define SEQUENCE_WORD 14u
#define USES_WORD 15u
#define USES_MAX 3u
// Words of the writer state.
#define EPOCH_WORD 0u
#define HANDS_WORD 1u
#define GHOST_WORDS 4u
#define WRITER_STATE_WORDS (2u + GHOST_WORDS)

struct Cache {
    u32* set_headers;
    u32* writer_states;
    u32* rows;
    u64 sets;
    u32 row_bytes;
    u32 row_words;
    u32 header_words;
    // A tag is a hash above this many bits of table number; 0 if every table is indexed. WHOLE if
    // the cache is whole.
    u32 table_bits;
};

// Value of `table_bits` of a cache with a slot for every row. A tag is the number of a row, counted
// from 1, and the row's slot is that number less 1.
#define WHOLE 0xffffffffu

__device__ __forceinline__ bool is_whole(const Cache& cache) {
    return cache.table_bits == WHOLE;
}

// The address of a row: its set, and its tag within the set. No row has tag 0.
struct SetTag {
    u32 set;
    u64 tag;
};

__device__ __forceinline__ u32* set_header(const Cache& cache, u32 set) {
    return cache.set_headers + (u64)set * cache.header_words;
}

__device__ __forceinline__ u32* set_writer_state(const Cache& cache, u32 set) {
    return cache.writer_states + (u64)set * WRITER_STATE_WORDS;
}

__device__ __forceinline__ u32* slot_row(const Cache& cache, u32 set, u32 way) {
    return cache.rows + ((u64)set * WAYS + way) * cache.row_words;
}

// Loads the lane's word of a set's header. The first line holds the low halves of the tags. If tags
// are wide, the second line holds the high halves.
__device__ __forceinline__ u32 load_header(const Cache& cache, u32 set, u32 lane) {
    return load_racing(set_header(cache, set) + (lane & (cache.header_words - 1)));
}

// Returns the way of the row with `tag`, or WAYS if the set does not hold it. `header` is the
// lane's word of the set's header. All lanes of the warp call it together.
__device__ __forceinline__ u32 match_tags(const Cache& cache, u64 tag, u32 header, u32 lane) {
    bool low = lane < LINE_WORDS || cache.header_words == LINE_WORDS;
    u32 equal = __ballot_sync(ALL_LANES, header == (low ? (u32)tag : (u32)(tag >> 32)));
    u32 high = cache.header_words == LINE_WORDS ? ALL_LANES : equal >> LINE_WORDS;
    u32 hits = equal & high & WAY_BITS;
    return tag == 0 || hits == 0 ? WAYS : (u32)__ffs(hits) - 1;
}

// Marks no slot, and no set.
#define NO_SLOT 0xffffffffu

// The result of a probe for a lane's row.
struct Found {
    u32 slot;       // NO_SLOT: the row is not cached
    bool uncounted; // whether the row's use count is not full
};

// Probes 32 rows, one a lane. The four lanes of a group load the headers of their four rows one
// after the other, 16 bytes a lane. `row.set` is NO_SLOT if the lane has no row. All lanes of the
// warp call it together.
__device__ __forceinline__ Found probe_lanes(const Cache& cache, const SetTag& row) {
    const u32 lane = lane_number();
    const u32 quarter = lane % 4;
    const u32 group = lane - quarter;
    uint4 words[4];
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 set = __shfl_sync(ALL_LANES, row.set, group + r);
        words[r] = load_racing_4(set_header(cache, set) + 4 * quarter, set != NO_SLOT);
    }

    // The ways whose tags have the low half of the lane's tag, one bit a way.
    u32 ways = 0;
    u32 uses = 0;
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 tag = __shfl_sync(ALL_LANES, (u32)row.tag, group + r);
        u32 equal = (words[r].x == tag ? 1 : 0) | (words[r].y == tag ? 2 : 0)
            | (words[r].z == tag ? 4 : 0) | (words[r].w == tag ? 8 : 0);
        equal <<= 4 * quarter;
        equal |= __shfl_xor_sync(ALL_LANES, equal, 1);
        equal |= __shfl_xor_sync(ALL_LANES, equal, 2);
        const u32 uses_here = __shfl_sync(ALL_LANES, words[r].w, group + 3);
        ways = quarter == r ? equal : ways;
        uses = quarter == r ? uses_here : uses;
    }

    ways = row.set != NO_SLOT ? ways & WAY_BITS : 0;
    if (cache.header_words != LINE_WORDS) {
        // Nearly always there is one such way, and its tag has the high half too.
        const u32* high = set_header(cache, row.set) + LINE_WORDS;
        while (ways && load_racing(high + __ffs(ways) - 1) != (u32)(row.tag >> 32)) {
            ways &= ways - 1;
        }
    }
    const u32 way = (u32)__ffs(ways) - 1;
    return {ways ? row.set * WAYS + way : NO_SLOT, ways && (uses >> 2 * way & 3) < USES_MAX};
}

__device__ __forceinline__ u64 load_tag(const Cache& cache, u32 set, u32 way) {
    u32* header = set_header(cache, set);
    u64 high = cache.header_words == LINE_WORDS ? 0 : load_racing(header + LINE_WORDS + way);
    return high << 32 | load_racing(header + way);
}

__device__ __forceinline__ void store_tag(const Cache& cache, u32 set, u32 way, u64 tag) {
    u32* header = set_header(cache, set);
    store_racing(header + way, (u32)tag);
    if (cache.header_words != LINE_WORDS) {
        store_racing(header + LINE_WORDS + way, (u32)(tag >> 32));
    }
}
