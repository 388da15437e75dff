// Chooses which row of a full set is evicted: S3-FIFO inside one set, step by step as
// kernels/src/cache/eviction.rs. One lane runs it.
#pragma once
#include "cache.cuh"

#define PROBATION_WAYS 2u
#define GHOSTS 8u

// The eviction state of one set.
struct SetEviction {
    // Use counts, two bits a way.
    u32 uses;
    // The ways on probation, one bit a way.
    u32 probation;
    u32 main_hand;
    u32 probation_hand;
    u32 ghost_hand;
    // Fingerprints of rows that were evicted from probation, two in a word, 0 for none.
    u32 ghosts[GHOST_WORDS];
};

__device__ inline SetEviction load_eviction(const Cache& cache, u32 set) {
    const u32* state = set_writer_state(cache, set);
    u32 hands = load_racing(state + HANDS_WORD);

    SetEviction e = {};
    e.uses = load_racing(set_header(cache, set) + USES_WORD);
    e.probation = hands & 0xffff;
    e.main_hand = hands >> 16 & 15;
    e.probation_hand = hands >> 20 & 15;
    e.ghost_hand = hands >> 24;
    for (u32 i = 0; i < GHOST_WORDS; i++) {
        e.ghosts[i] = load_racing(state + HANDS_WORD + 1 + i);
    }
    return e;
}

__device__ inline void store_eviction(const Cache& cache, u32 set, const SetEviction& e) {
    u32* state = set_writer_state(cache, set);
    u32 hands = e.probation | e.main_hand << 16 | e.probation_hand << 20 | e.ghost_hand << 24;
    store_racing(set_header(cache, set) + USES_WORD, e.uses);
    store_racing(state + HANDS_WORD, hands);
    for (u32 i = 0; i < GHOST_WORDS; i++) {
        store_racing(state + HANDS_WORD + 1 + i, e.ghosts[i]);
    }
}

// Returns the 16-bit fingerprint of a tag; never 0.
__device__ inline u32 fingerprint_of(const Cache& cache, u64 tag) {
    u32 fingerprint = (u32)(tag >> cache.table_bits) & 0xffff;
    return fingerprint ? fingerprint : 1;
}

// Returns the first way of `ways` (one bit a way) from `hand` on, and moves the hand past it.
__device__ inline u32 next_way(u32& hand, u32 ways) {
    u32 way = hand;
    for (u32 i = 0; i < WAYS; i++) {
        u32 w = (hand + i) % WAYS;
        if (ways >> w & 1) {
            way = w;
            break;
        }
    }
    hand = (way + 1) % WAYS;
    return way;
}

// Assigns `way` to the row with this fingerprint. A row whose fingerprint is a ghost skips
// probation.
__device__ inline void occupy_way(SetEviction& e, u32 way, u32 fingerprint) {
    bool returns = false;
    for (u32 i = 0; i < GHOSTS; i++) {
        u32 shift = 16 * (i % 2);
        if (!returns && (e.ghosts[i / 2] >> shift & 0xffff) == fingerprint) {
            e.ghosts[i / 2] &= ~(0xffffu << shift);
            returns = true;
        }
    }

    e.uses &= ~(3u << 2 * way);
    e.probation = (e.probation & ~(1u << way)) | (returns ? 0u : 1u << way);
}

// Stores the fingerprint of a row that is evicted from probation.
__device__ inline void remember_ghost(SetEviction& e, u32 fingerprint) {
    u32 shift = 16 * (e.ghost_hand % 2);
    for (u32 i = 0; i < GHOST_WORDS; i++) {
        if (i == e.ghost_hand / 2) {
            e.ghosts[i] = (e.ghosts[i] & ~(0xffffu << shift)) | fingerprint << shift;
        }
    }
    e.ghost_hand = (e.ghost_hand + 1) % GHOSTS;
}

// Returns the way of a full set whose row is evicted.
__device__ inline u32 evict(const Cache& cache, u32 set, SetEviction& e) {
    // Every step takes a use from a row or a row from probation, so the loop ends.
    for (;;) {
        if ((u32)__popc(e.probation) >= PROBATION_WAYS) {
            u32 way = next_way(e.probation_hand, e.probation);
            if (e.uses >> 2 * way & 3) {
                e.probation &= ~(1u << way);
                e.uses &= ~(3u << 2 * way);
                continue;
            }
            remember_ghost(e, fingerprint_of(cache, load_tag(cache, set, way)));
            return way;
        }

        u32 way = next_way(e.main_hand, ~e.probation & WAY_BITS);
        if ((e.uses >> 2 * way & 3) == 0) {
            return way;
        }
        e.uses -= 1u << 2 * way;
    }
}
