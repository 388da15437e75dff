// Which row of a full set gives way: S3-FIFO inside a set, step by step what
// kernels/src/eviction.rs does. One lane runs it.
#pragma once
#include "cache.cuh"

#define PROBATION_WAYS 2u
#define GHOSTS 16u

struct Ways {
    // Two bits a way.
    u32 uses;
    // One bit a way.
    u32 probation;
    u32 main_hand, probation_hand, ghost_hand;
    // Tags, four in a word, 0 for none.
    u32 ghosts[GHOST_WORDS];
};

__device__ inline Ways load_ways(const Cache& cache, u32 set) {
    const u32* tail = tail_of(cache, set);
    u32 hands = load_racing(tail + HANDS);
    Ways w = {load_racing(head_of(cache, set) + USES), hands & 0xffff, hands >> 16 & 15, hands >> 20 & 15, hands >> 24, {}};
    for (u32 i = 0; i < GHOST_WORDS; i++) w.ghosts[i] = load_racing(tail + HANDS + 1 + i);
    return w;
}

__device__ inline void store_ways(const Cache& cache, u32 set, const Ways& w) {
    u32* tail = tail_of(cache, set);
    store_racing(head_of(cache, set) + USES, w.uses);
    store_racing(tail + HANDS, w.probation | w.main_hand << 16 | w.probation_hand << 20 | w.ghost_hand << 24);
    for (u32 i = 0; i < GHOST_WORDS; i++) store_racing(tail + HANDS + 1 + i, w.ghosts[i]);
}

// A byte that many words of a set differ in; never 0.
__device__ inline u32 tag_of(const Cache& cache, u64 word) {
    u32 tag = (u32)(word >> cache.table_bits) & 0xff;
    return tag ? tag : 1;
}

// The next way from `hand` on that is of the part; leaves the hand behind it.
__device__ inline u32 next_way(u32& hand, u32 part) {
    u32 way = hand;
    for (u32 i = 0; i < WAYS; i++) {
        u32 w = (hand + i) % WAYS;
        if (part >> w & 1) {
            way = w;
            break;
        }
    }
    hand = (way + 1) % WAYS;
    return way;
}

// Takes `way` for the row with this tag.
__device__ inline void place(Ways& w, u32 way, u32 tag) {
    bool returns = false;
    for (u32 i = 0; i < GHOSTS; i++) {
        u32 shift = 8 * (i % 4);
        if (!returns && (w.ghosts[i / 4] >> shift & 0xff) == tag) {
            w.ghosts[i / 4] &= ~(0xffu << shift);
            returns = true;
        }
    }
    w.uses &= ~(3u << 2 * way);
    w.probation = (w.probation & ~(1u << way)) | (returns ? 0u : 1u << way);
}

// Makes room in a full set.
__device__ inline u32 evict(const Cache& cache, u32 set, Ways& w) {
    // Every step takes a use from a row or a row from probation, so this ends.
    for (;;) {
        if ((u32)__popc(w.probation) >= PROBATION_WAYS) {
            u32 way = next_way(w.probation_hand, w.probation);
            if (w.uses >> 2 * way & 3) {
                w.probation &= ~(1u << way);
                w.uses &= ~(3u << 2 * way);
                continue;
            }
            u32 tag = tag_of(cache, word_of(cache, set, way)), shift = 8 * (w.ghost_hand % 4);
            for (u32 i = 0; i < GHOST_WORDS; i++)
                if (i == w.ghost_hand / 4) w.ghosts[i] = (w.ghosts[i] & ~(0xffu << shift)) | tag << shift;
            w.ghost_hand = (w.ghost_hand + 1) % GHOSTS;
            return way;
        }
        u32 way = next_way(w.main_hand, ~w.probation & WAY_BITS);
        if ((w.uses >> 2 * way & 3) == 0) return way;
        w.uses -= 1u << 2 * way;
    }
}
