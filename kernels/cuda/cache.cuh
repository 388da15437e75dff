// The embedding cache as it lies in device memory: to the byte the layout of the CPU's
// (kernels/src/cache.rs), which says what it means. A set has a head (names of its rows, sequence,
// uses), a tail (epoch, eviction) and 14 slots of `row` words.
//
// A warp looks for one row: each lane compares a word of the head.
#pragma once
#include "prelude.cuh"

#define WAYS 14u
#define WAY_BITS 0x3fffu
// Words of a head: one cache line of 64 bytes, or two where words are wide.
#define LINE 16u
#define SEQUENCE 14u
#define USES 15u
// Words of a tail.
#define EPOCH 0u
#define HANDS 1u
#define GHOST_WORDS 4u
#define TAIL (2u + GHOST_WORDS)

struct Cache {
    u32* heads;
    u32* tails;
    u32* rows;
    u64 sets;
    // Bytes and words of a row; words of a head.
    u32 row_bytes, row, head;
    // Words are a hash above this many bits of table number; 0 where all tables are indexed.
    u32 table_bits;
};

// A row's set, and the word that names it there; word 0 names none.
struct Name {
    u32 set;
    u64 word;
};

__device__ __forceinline__ u32* head_of(const Cache& cache, u32 set) { return cache.heads + (u64)set * cache.head; }
__device__ __forceinline__ u32* tail_of(const Cache& cache, u32 set) { return cache.tails + (u64)set * TAIL; }
__device__ __forceinline__ u32* row_of(const Cache& cache, u32 set, u32 way) {
    return cache.rows + ((u64)set * WAYS + way) * cache.row;
}

// The lane's word of a head: low halves in the first line, high halves in the second where words
// are wide.
__device__ __forceinline__ u32 load_head(const Cache& cache, u32 set, u32 lane) {
    return load_racing(head_of(cache, set) + (lane & (cache.head - 1)));
}

// Where the row that `word` names stands, from its set's head over the warp; WAYS where it does
// not. For all lanes.
__device__ __forceinline__ u32 find(const Cache& cache, u64 word, u32 head, u32 lane) {
    u32 equal = __ballot_sync(FULL, head == (lane < LINE || cache.head == LINE ? (u32)word : (u32)(word >> 32)));
    u32 hits = equal & (cache.head == LINE ? FULL : equal >> LINE) & WAY_BITS;
    return word == 0 || hits == 0 ? WAYS : (u32)__ffs(hits) - 1;
}

__device__ __forceinline__ u64 word_of(const Cache& cache, u32 set, u32 way) {
    u32* head = head_of(cache, set);
    u64 high = cache.head == LINE ? 0 : load_racing(head + LINE + way);
    return high << 32 | load_racing(head + way);
}

__device__ __forceinline__ void set_word(const Cache& cache, u32 set, u32 way, u64 word) {
    u32* head = head_of(cache, set);
    store_racing(head + way, (u32)word);
    if (cache.head != LINE) store_racing(head + LINE + way, (u32)(word >> 32));
}
