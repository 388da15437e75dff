// The rare path of a query: one bag at a time, with the whole warp. A bag that has only cached rows
// and absent keys is pooled as a whole. Any other bag is left open at its first missing row: the
// rows before it are pooled. The later lookups go to the ring in host memory. An output of f16 has
// no room for a sum of f32, so such a bag is left open as a whole. The bags of a feature with
// weights, with MAX or with unaligned rows all take this path.
#pragma once
#include "general.cuh"
#include "query.cuh"

// The current bag, in shared memory and volatile as `Tile` is.
struct RareBag {
    u32 left;       // the tile's rare bags from this one on, one bit a bag
    u32 sample;
    u32 begin;      // of the bag's keys
    u32 count;
    u32 counted;    // keys whose uses are counted already
    u32 opened_at;  // position of the first missing row; `count` if there is none
    u32 entry;      // the ring's entry of the lookup at `opened_at`
};

struct RarePath {
    const Query& q;
    const Feature& f;
    volatile Tile& tile;
    volatile RareBag& bag;

    // The lookup of the lane's key at `position` and, in `absent`, whether no row can have the key.
    __device__ __forceinline__ Lookup find(u32 position, bool& absent) const {
        const bool wanted = position < bag.count;
        Lookup lookup(q, f, bag.begin + position, wanted);
        absent = wanted & !lookup.hit() & ((f.storage != CACHED) | (lookup.set == NO_SLOT));
        return lookup;
    }

    __device__ __forceinline__ u32 first_missing() const {
#pragma unroll 1
        for (u32 at = 0; at < uniform(bag.count); at += 32) {
            const u32 position = at + lane_number();
            bool absent;
            const Lookup lookup = find(position, absent);
            const bool missing = position < bag.count && !lookup.hit() && !absent;
            const u32 lanes = __ballot_sync(ALL_LANES, missing);
            if (lanes) {
                return at + __ffs(lanes) - 1;
            }
        }
        return bag.count;
    }

    // Takes ring entries for the lookups from the first missing row on; returns false if the ring
    // is full.
    __device__ __forceinline__ bool open() const {
        const u32 entries = bag.count - bag.opened_at;
        const u32 lane = lane_number();
        const u32 taken = lane == 0 ? atomicAdd(&q.counts->entries, entries) : 0;
        const u32 first = uniform(taken);
        if (first > q.ring.entries_max || entries > q.ring.entries_max - first) {
            if (lane == 0) {
                BagNumber* to = q.ring.requeries + atomicAdd(&q.counts->requeries, 1u);
                *to = {tile.feature, bag.sample};
            }
            return false;
        }
        if (lane == 0) {
            bag.entry = first;
            OpenBag* to = q.ring.bags + atomicAdd(&q.counts->bags, 1u);
            *to = {tile.feature, bag.sample, bag.opened_at, first, entries, first_weight()};
        }
        __syncwarp();
        return true;
    }

    // Copies the rows of the lanes in `lanes`, which are cached, to the ring.
    __device__ __forceinline__ void copy_rows(u32 lanes, u32 slot, u32 first_entry) const {
        const u32 row_words = (f.cache.row_bytes + 3) / 4;
        for (; lanes; lanes &= lanes - 1) {
            const u32 from = __ffs(lanes) - 1;
            const u32* row = (const u32*)rows_of(f).row(__shfl_sync(ALL_LANES, slot, from));
            u32* to = q.ring.hit_rows + (u64)(first_entry + from) * q.ring.hit_stride;
#pragma unroll 4
            for (u32 i = lane_number(); i < row_words; i += 32) {
                to[i] = load_racing(row + i);
            }
        }
    }

    // Counts the uses and the absent keys, and records the lookups of an open bag.
    __device__ __forceinline__ void record() const {
        u32 absents = 0;
#pragma unroll 1
        for (u32 at = 0; at < uniform(bag.count); at += 32) {
            const u32 lane = lane_number();
            const u32 position = at + lane;
            bool absent;
            const Lookup lookup = find(position, absent);
            if (position >= bag.counted && lookup.row.uncounted) {
                count_use(f.cache, lookup.row.slot);
            }
            absents += __popc(__ballot_sync(ALL_LANES, absent && position < bag.opened_at));

            const bool recorded = position >= bag.opened_at && position < bag.count;
            // May wrap around before the first entry, and is used only after it.
            const u32 first_entry = bag.entry + at - bag.opened_at;
            if (recorded) {
                const bool missing = !lookup.hit() && !absent;
                const u32 kind = lookup.hit() ? HIT : absent ? ABSENT : MISSING;
                const u32* epoch = set_writer_state(f.cache, lookup.set) + EPOCH_WORD;
                Entry* to = q.ring.entries + (first_entry + lane);
                *to = {lookup.key, missing ? load_racing(epoch) : 0, kind};
            }
            const u32 hits = __ballot_sync(ALL_LANES, recorded && lookup.hit());
            copy_rows(hits, lookup.row.slot, first_entry);
        }
        if (absents && lane_number() == 0) {
            q.ring.absents[atomicAdd(&q.counts->absents, 1u)] = {
                tile.feature, bag.sample, absents};
        }
    }

    __device__ __forceinline__ u32 first_weight() const {
        return (u32)f.weights_before * q.samples + bag.begin;
    }

    __device__ __forceinline__ AnyBag any_bag() const {
        return {bag.sample, f.weighted ? q.weights + first_weight() : nullptr};
    }

    // Pools the rows before the first missing one.
    __device__ __forceinline__ void pool() const {
#pragma unroll 1
        for (u32 first = 0; first < uniform(f.dim); first += WARP_COLUMNS) {
            const float start = before_first(f);
            float columns[1][PIECE_COLUMNS] = {{start, start, start, start}};
#pragma unroll 1
            for (u32 at = 0; at < uniform(bag.opened_at); at += 32) {
                bool absent;
                const u32 slot = find(at + lane_number(), absent).row.slot;
                const u32 some = min(bag.opened_at - at, 32u);
                const AnyBag any = any_bag();
                Rows rows = rows_of(f);
                rows.column = first + PIECE_COLUMNS * lane_number();
                pool_any_slots<1>(f, rows, slot, uniform(some), at, any, columns);
            }
            const u32 column = first + PIECE_COLUMNS * lane_number();
            const u32 columns_end = column < f.dim ? f.dim - column : 0;
            if (f.pooling == NONE) {
                continue;
            }
            if (bag.opened_at == bag.count) {
                u8* const out = output_at(f, bag.sample, column);
                close_bag(f, columns, bag.count, any_bag(), out, columns_end);
            } else if (bag.opened_at) {
                u8* const out = output_at(f, bag.sample, column);
                store_columns(out, columns[0], columns_end, f.out_bytes);
            }
        }
        if (f.pooling == NONE && bag.opened_at == bag.count) {
            zero_fill(f, bag.sample, bag.count * f.dim);
        }
    }

    // Processes the first of the remaining bags.
    __device__ __forceinline__ void run() const {
        const u32 number = __ffs(bag.left) - 1;
        const u32 begin = tile.begin_of(number);
        if (lane_number() == 0) {
            bag.sample = tile.first + number;
            bag.begin = begin;
            bag.count = tile.ends[number] - begin;
            bag.counted = tile.counted[number];
        }
        __syncwarp();
        const u32 missing_at = first_missing();
        const bool is_sum_of_half = f.out_bytes == 2 && f.pooling != NONE;
        if (lane_number() == 0) {
            bag.opened_at = is_sum_of_half && missing_at < bag.count ? 0 : missing_at;
        }
        __syncwarp();
        if (uniform(bag.opened_at) == bag.count || open()) {
            record();
            pool();
        }
    }
};
