// The embedding cache in device memory. Its layout equals the CPU's to the byte;
// kernels/src/cache/mod.rs describes it. A set has a header (the tags of its rows, a sequence
// number, use counts), a writer state (epoch, eviction) and 14 slots of `row_words` words.
//
// A warp looks for one row: each lane compares one word of the header.
#pragma once
#include "prelude.cuh"

#define WAYS 14u
#define WAY_BITS 0x3fffu
// Words of one header line (64 bytes). A header has one line, or two where tags are 64 bits wide.
#define LINE_WORDS 16u
// Words of the header's first line after the tags.
#define SEQUENCE_WORD 14u
#define USES_WORD 15u
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
    // A tag is a hash above this many bits of table number; 0 where every table is indexed.
    u32 table_bits;
};

// Where a row may be cached: its set, and its tag within the set. No row has tag 0.
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

// Loads the lane's word of a set's header. The first line holds the low halves of the tags, the
// second line, where tags are wide, the high halves.
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
