// The hot path of a query: bags whose rows are all cached or resident. A warp takes a tile: a few
// samples of one feature, whose keys are consecutive in memory. Each lane hashes and probes one key
// (`Lookup`); then the teams of the warp (`pool.cuh`) read the rows, GROUP_ROWS a team in flight.
//
// A bag with any other key is rare. The functions here may write values for it, but `rare.cuh`
// pools it again.
#pragma once
#include "pool.cuh"

__device__ __forceinline__ u32 mix_32(u32 h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

__device__ __forceinline__ u64 mix(u64 h) {
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

// Returns the set and tag of a key's row, as kernels/src/cache/address.rs does.
__device__ __forceinline__ SetTag hash_key(const Feature& f, u64 key) {
    if (f.has_end && key >= f.keys_end) {
        return {0, 0};
    }
    if (is_whole(f.cache)) {
        u32 number = key < f.end ? f.base + (u32)key : 0;
        return {(number ? number - 1 : 0) / WAYS, number};
    }
    if (f.cache.table_bits == 0) {
        u32 hash = key < f.end ? mix_32(f.base + (u32)key) : 0;
        return {(u32)((u64)hash * f.cache.sets >> 32), hash};
    }
    u64 hash = mix(key ^ f.salt);
    return {(u32)__umul64hi(hash, f.cache.sets), hash << f.cache.table_bits | (f.table + 1)};
}

// Returns the slot of a key's row in a resident table; NO_SLOT if the table does not have it.
__device__ __forceinline__ u32 resident_slot(const Feature& f, u64 key) {
    if (f.storage == RESIDENT) {
        return key < f.count ? (u32)key : NO_SLOT;
    }
    u64 hash = mix(key);
    u64 bucket = __umul64hi(hash, f.bucket_count);
    for (u32 i = f.buckets[bucket]; i < f.buckets[bucket + 1]; i++) {
        if (f.hashes[i] == hash) {
            return i;
        }
    }
    return NO_SLOT;
}

// Counts one use of a cached row, up to USES_MAX, as kernels/src/cache/eviction.rs does. No use
// that another thread counts at the same time is lost.
__device__ __forceinline__ void count_use(const Cache& cache, u32 slot) {
    u32* uses = set_header(cache, slot / WAYS) + USES_WORD;
    const u32 shift = 2 * (slot % WAYS);
    u32 seen = load_racing(uses);
    while ((seen >> shift & 3) < USES_MAX) {
        const u32 now = atomicCAS(uses, seen, seen + (1u << shift));
        if (now == seen) {
            return;
        }
        seen = now;
    }
}

// The lane's own key.
struct Lookup {
    u64 key;
    u32 set;    // NO_SLOT if no row can have the key, or the table is resident
    Found row;

    // Finds the row of the key at `at` of the feature's keys, if `wanted`. All lanes of the warp
    // call it together.
    __device__ __forceinline__ Lookup(
        const Query& q, const Feature& f, u32 at, bool wanted) {
        key = load_key(q.keys + f.keys_before * q.samples + at, wanted);
        set = NO_SLOT;
        if (uniform(f.storage) != CACHED) {
            row = {wanted ? resident_slot(f, key) : NO_SLOT, false};
            return;
        }
        SetTag place = hash_key(f, key);
        place.set = set = wanted && place.tag ? place.set : NO_SLOT;
        row = probe_lanes(f.cache, place);
    }

    __device__ __forceinline__ bool hit() const { return row.slot != NO_SLOT; }
};

// The samples of one feature that a warp takes, and their bags. It is in shared memory and
// volatile. The compiler then reads it at each use, which leaves registers for rows.
struct Tile {
    u32 number;
    u32 had_rare;     // whether this tile of the warp or one before had rare bags
    u32 feature;
    u32 first;
    u32 samples;
    u32 begin;        // of the first bag
    u32 rare;         // one bit a bag
    u32 round;        // the first of the bags or keys that the warp works on together
    u32 listed;       // keys of the round whose rows are written one by one
    u32 column;       // the first column of a pass over the rows
    u32 found;        // whether any key of the round, or of the teams' chunks, has a row
    u32 step;         // the first of the round's bags that the teams pool together
    u32 stop;         // the first bag after the round's
    // The slots of the rows to load, of 32 keys; a group may load four more, which are not used;
    alignas(16) u32 slots[32 + GROUP_ROWS];
    alignas(16) u32 outs[32];   // and the first words of their outputs; NO_OUT for none
    u32 ends[32];     // of each bag; after the last bag, of the last one
    u32 counted[32];  // keys of a rare bag whose uses are counted already

    // All lanes of the warp call it together, and synchronise before they read the bags.
    __device__ __forceinline__ void start(const Query& q) volatile {
        const u32 lane = lane_number();
        if (lane == 0) {
            const bool is_shared = number >= q.own_tiles;
            const u32 each = is_shared ? q.request_tiles : q.tiles_each;
            const u32 within = number - (is_shared ? q.own_tiles : 0);
            const u32 before = is_shared ? q.own_features : 0;
            feature = q.only ? q.only[number].feature : before + within / each;
            first = q.only ? q.only[number].sample : within % each * q.tile;
            const u32 rest = (is_shared ? q.requests : q.samples) - first;
            samples = q.only ? 1 : min(q.tile, rest);
        }
        __syncwarp();
        const u32* offsets = q.offsets + (u64)feature * (q.samples + 1) + first;
        ends[lane] = offsets[lane < samples ? lane + 1 : u32(samples)];
        if (lane == 0) {
            begin = offsets[0];
            rare = 0;
        }
    }

    __device__ __forceinline__ u32 end() const volatile { return uniform(ends[31]); }

    __device__ __forceinline__ u32 begin_of(u32 bag) const volatile {
        return bag ? ends[bag - 1] : begin;
    }

    // Returns the number of keys of `bag`; 0 from the bag `stop` on.
    __device__ __forceinline__ u32 keys_of(u32 bag, u32 stop) const volatile {
        const u32 at = min(bag, 31u);
        return bag < stop ? ends[at] - begin_of(at) : 0;
    }

    // Returns the bag of the key at `at`, which is before `end()`: the number of bags that end
    // before it.
    __device__ __forceinline__ u32 bag_of(u32 at) const volatile {
        u32 bag = 0;
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) {
            bag += ends[bag + step - 1] <= at ? step : 0;
        }
        return bag;
    }

    // Makes the bags rare to which the keys of the lanes in `missing` belong. `bag` is the bag of a
    // lane's key. The uses of that bag's keys before `at` are counted. All lanes of the warp call
    // it together.
    __device__ __forceinline__ void set_rare(u32 missing, u32 bag, u32 at) volatile {
        for (; missing; missing &= missing - 1) {
            const u32 from = __ffs(missing) - 1;
            const u32 other = __shfl_sync(ALL_LANES, bag, from);
            const u32 until = __shfl_sync(ALL_LANES, at, from);
            if (lane_number() == 0 && !is_rare(other)) {
                const u32 begins = begin_of(other);
                counted[other] = until > begins ? until - begins : 0;
                rare |= 1u << other;
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ bool is_rare(u32 bag) const volatile { return rare >> bag & 1; }

    // Writes the lane's slot to `slots`, which all teams read, and sets `found`. All lanes of the
    // warp call it together, and have synchronised since another lane last read `slots`.
    __device__ __forceinline__ void share_slot(u32 slot) volatile;

    // Returns the bag that the lane's team pools in this round. All lanes of the warp call it
    // together.
    __device__ __forceinline__ u32 bag_of_team(const Feature& f) const volatile;

    __device__ __forceinline__ void advance(u32 by) volatile { set(round, round + by); }

    // Sets `word` of the tile. All lanes of the warp call it together, with one value. Other lanes'
    // reads of the old value end first. Each lane then reads the value that it has written itself.
    __device__ __forceinline__ void set(volatile u32& word, u32 value) volatile {
        __syncwarp();
        word = value;
    }

    // Begins a round of bags: those that have all their keys among the next 32, but one at least.
    // All lanes of the warp call it together.
    __device__ __forceinline__ void start_round() volatile {
        const u32 lane = lane_number();
        const bool fits = (lane < samples) & (ends[lane] <= begin_of(round) + 32);
        const u32 next = __popc(__ballot_sync(ALL_LANES, fits));
        set(stop, next);
        set(step, round);
    }
};

// The lane's position in its team.
struct Team {
    u32 lanes;
    u32 teams;
    u32 number;
    u32 lane;

    __device__ __forceinline__ explicit Team(const Feature& f) {
        const u32 lane_of_warp = lane_number();
        // Volatile, as `Tile` is.
        const u32 bits = uniform(((const volatile Feature&)f).lane_bits);
        lanes = 1u << bits;
        teams = 32u >> bits;
        number = lane_of_warp >> bits;
        lane = lane_of_warp & (lanes - 1);
    }
};

__device__ __forceinline__ u32 Tile::bag_of_team(const Feature& f) const volatile {
    return min(round + Team(f).number, 31u);
}

__device__ __forceinline__ Rows rows_of(const Feature& f) {
    return {(const u8*)f.rows, 4 * f.cache.row_words, f.cache.row_bytes, 0};
}

// Returns a slot for each lane: its own, or that of another lane for NO_SLOT. All lanes can then
// load rows without a branch, and only wanted rows are loaded. At least one lane has a slot. All
// lanes of the warp call it together.
__device__ __forceinline__ u32 loaded_slot(u32 slot) {
    const u32 lanes = __ballot_sync(ALL_LANES, slot != NO_SLOT);
    const u32 other = __shfl_sync(ALL_LANES, slot, __ffs(lanes) - 1);
    return slot == NO_SLOT ? other : slot;
}

__device__ __forceinline__ void Tile::share_slot(u32 slot) volatile {
    const bool any = __any_sync(ALL_LANES, slot != NO_SLOT);
    if (any) {
        const u32 lane = lane_number();
        const u32 loaded = loaded_slot(slot);
        slots[lane] = loaded;
        if (lane < GROUP_ROWS) {
            slots[32 + lane] = loaded;
        }
    }
    set(found, any);
}

// Marks no position in an output.
#define NO_OUT NO_SLOT

// Four words of shared memory, which one instruction loads.
struct Four {
    u32 word[GROUP_ROWS];

    __device__ __forceinline__ explicit Four(const volatile u32* from) {
        static_assert(GROUP_ROWS == 4, "a group's words are four");
        const uint4 four = *(const uint4*)from;
        word[0] = four.x;
        word[1] = four.y;
        word[2] = four.z;
        word[3] = four.w;
    }
};

// Returns the bytes of a column of the output.
template <Form FORM>
__device__ __forceinline__ u32 column_bytes(const volatile Feature& f) {
    return FORM == F32_OUT ? 4 : FORM == F16_OUT ? 2 : f.out_bytes;
}

// Writes the rows of the tile's 32 keys from `round` on to the outputs, one a team at a time.
template <u32 CODEC, Form FORM>
__device__ __forceinline__ void write_rows(const Feature& f, volatile Tile& tile) {
    constexpr u32 ROWS = GROUP_ROWS;
    constexpr u32 COLUMNS = FORM == F16_OUT && CODEC != F32 ? 8 : PIECE_COLUMNS;
    using Row = LaneRow<CODEC, COLUMNS>;
    // Volatile, as `Tile` is.
    const volatile Feature& late = f;
#pragma unroll 1
    for (tile.column = 0; uniform(tile.column) < late.dim;
         tile.set(tile.column, tile.column + (Code<CODEC>::COLUMNS << late.lane_bits))) {
        const Team team(f);
        Rows rows = rows_of(f);
        rows.column = tile.column + COLUMNS * team.lane;
        const AlignedRows<CODEC, COLUMNS> aligned(rows, team.lanes, late.dim);
        u8* const column = base_address(late.out + rows.column * column_bytes<FORM>(late));
        const u32 step = COLUMNS * team.lanes;
        // Pieces that the lane writes.
        const u32 columns = rows.column < late.dim ? late.dim - rows.column : 0;
        const u32 all = (columns + step - 1) / COLUMNS >> late.lane_bits;
        const float unit = late.unit;
#pragma unroll 1
        for (u32 key = ROWS * team.number; __any_sync(ALL_LANES, key < tile.listed);
             key += ROWS * team.teams) {
            const Four slots(tile.slots + key);
            Row loaded[ROWS];
#pragma unroll
            for (u32 u = 0; u < ROWS; u++) {
                loaded[u].load(aligned, slots.word[u]);
            }
            const Four outs(tile.outs + key);
#pragma unroll
            for (u32 u = 0; u < ROWS; u++) {
                const u32 to = outs.word[u];
                const u32 bytes = column_bytes<FORM>(late);
                const Scale scale = loaded[u].scale(unit);
                u8* at = column + (u64)to * bytes;
#pragma unroll
                for (u32 p = 0; p < Row::PIECES; p++) {
                    float values[COLUMNS];
                    loaded[u].read(values, p, scale);
                    store_piece<FORM>(at, values, (to != NO_OUT) & (p < all), bytes);
                    at += step * bytes;
                }
                if constexpr (Code<CODEC>::HAS_SCALE) {
                    // Keeps the compiler from decoding several rows at a time. No shared word needs
                    // it: no other lane reads what this one writes.
                    __syncwarp();
                }
            }
        }
    }
}

// `write_rows` for the feature's codec and output.
__device__ __forceinline__ void write_any_rows(const Feature& f, volatile Tile& tile) {
    FOR_CODEC(f, { FOR_FORM(f, { write_rows<CODEC, FORM>(f, tile); }) })
}

// Writes each row of the tile's bags at its own position: bags of one key, or without pooling.
__device__ __forceinline__ void list_rows(const Query& q, const Feature& f, volatile Tile& tile) {
#pragma unroll 1
    for (tile.round = tile.begin; uniform(tile.round) < tile.end(); tile.advance(32)) {
        const u32 at = tile.round;
        const u32 lane = lane_number();
        const bool wanted = at + lane < tile.end();
        const Lookup lookup(q, f, at + lane, wanted);
        const u32 bag = tile.bag_of(at + lane);
        const u32 position = at + lane - tile.begin_of(bag);
        const u32 missing = __ballot_sync(ALL_LANES, wanted && !lookup.hit());
        if (missing) {
            tile.set_rare(missing, bag, at);
        }

        const u32 slot = tile.is_rare(bag) ? NO_SLOT : lookup.row.slot;
        if (slot != NO_SLOT && lookup.row.uncounted) {
            count_use(f.cache, slot);
        }
        const u32 to = (tile.first + bag) * (u32)f.stride + position * f.dim;
        if (__any_sync(ALL_LANES, slot != NO_SLOT)) {
            tile.slots[lane] = loaded_slot(slot);
            tile.outs[lane] = slot == NO_SLOT ? NO_OUT : to;
            tile.listed = min(32u, tile.end() - tile.round);
            __syncwarp();
            write_any_rows(f, tile);
        }
    }

    // Bags with fewer keys than they have room for.
    const u32 lane = lane_number();
    const u32 filled = (tile.ends[lane] - tile.begin_of(lane)) * f.dim;
    u32 open = __ballot_sync(ALL_LANES, (lane < tile.samples) & (filled < f.width));
#pragma unroll 1
    for (; open; open &= open - 1) {
        const u32 bag = __ffs(open) - 1;
        zero_fill(f, tile.first + bag, __shfl_sync(ALL_LANES, filled, bag));
    }
}

// Adds rows of each team's bag, whose slots the tile has from `listed` to `end`.
template <u32 CODEC>
__device__ __forceinline__ void add_rows(
    const Feature& f, const volatile Tile& tile, u32 listed, u32 end,
    float (&sums)[Code<CODEC>::COLUMNS]) {
    constexpr u32 ROWS = Code<CODEC>::POOLED_ROWS;
    const Team team(f);
    Rows all = rows_of(f);
    all.column = tile.column + Code<CODEC>::COLUMNS * team.lane;
    const PooledRows<CODEC> rows(all, f.dim);
    // Volatile, as `Tile` is.
    const volatile Feature& late = f;
#pragma unroll 1
    for (u32 i = listed; __any_sync(ALL_LANES, i < end); i += ROWS) {
        // A team that has no more rows loads any.
        const volatile u32* const slots = tile.slots + min(i, 32u);
        PooledRow<CODEC> loaded[ROWS];
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            loaded[u].load(rows, slots[u]);
        }
        // Ends the reads of `slots`. It also keeps the compiler from using the first row before it
        // loads the last.
        __syncwarp();
        const float unit = late.unit;
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            loaded[u].add_to(sums, unit, i + u < end);
        }
    }
}

// Writes the sums of each team's bag, where `bag` is before `stop`.
template <u32 CODEC>
__device__ __forceinline__ void write_sums(
    const Feature& f, const volatile Tile& tile, u32 bag, u32 stop,
    float (&sums)[Code<CODEC>::COLUMNS]) {
    const u32 column = tile.column + Code<CODEC>::COLUMNS * Team(f).lane;
    const bool written = bag < stop && !tile.is_rare(bag);
    // Read here, and not before the rows, to leave registers for them.
    const volatile Feature& late = f;
    u8* out = output_at(late, tile.first + bag, column);
    finish_sums(f, sums, tile.keys_of(bag, stop));
    const i32 columns = written ? late.dim - column : 0;
    const u32 bytes = late.out_bytes;
    const bool is_f32 = uniform(f.aligned) == ALIGNED_F32;
#pragma unroll
    for (u32 v = 0; v < Code<CODEC>::COLUMNS; v += PIECE_COLUMNS) {
        float (&piece)[PIECE_COLUMNS] = *(float(*)[PIECE_COLUMNS])(sums + v);
        const bool wanted = (i32)v < columns;
        if (is_f32) {
            store_piece<F32_OUT>(out + 4 * v, piece, wanted, 4);
        } else {
            store_piece<ANY_OUT>(out + bytes * v, piece, wanted, bytes);
        }
    }
}

// Pools the bags of a round, whose slots the tile has, if any key was found.
template <u32 CODEC>
__device__ __forceinline__ void pool_round(const Feature& f, volatile Tile& tile) {
#pragma unroll 1
    while (uniform(tile.step) < tile.stop) {
#pragma unroll 1
        for (tile.set(tile.column, 0); uniform(tile.column) < f.dim;
             tile.set(tile.column, tile.column + (Code<CODEC>::COLUMNS << f.lane_bits))) {
            float sums[Code<CODEC>::COLUMNS] = {};
            if (uniform(tile.found)) {
                const u32 bag = tile.step + Team(f).number;
                const u32 listed = tile.begin_of(min(bag, 31u)) - tile.begin_of(tile.round);
                add_rows<CODEC>(f, tile, listed, listed + tile.keys_of(bag, tile.stop), sums);
            }
            write_sums<CODEC>(f, tile, tile.step + Team(f).number, tile.stop, sums);
        }
        tile.set(tile.step, tile.step + (32u >> f.lane_bits));
    }
}

// Pools the tile's bags, each of which has at most 32 keys. The warp finds the rows of the keys of
// as many bags as it has lanes for. Then it pools these bags, one a team at a time.
__device__ __forceinline__ void pool_together(
    const Query& q, const Feature& f, volatile Tile& tile) {
#pragma unroll 1
    for (tile.round = 0; uniform(tile.round) < tile.samples; tile.set(tile.round, tile.stop)) {
        tile.start_round();
        const u32 at = tile.begin_of(tile.round);
        const u32 lane = lane_number();
        const bool wanted = at + lane < tile.ends[tile.stop - 1];
        const Lookup lookup(q, f, at + lane, wanted);
        const u32 bag = tile.bag_of(at + lane);
        const u32 missing = __ballot_sync(ALL_LANES, wanted && !lookup.hit());
        if (missing) {
            tile.set_rare(missing, bag, at);
        }
        const u32 slot = lookup.row.slot;
        if (lookup.row.uncounted && !tile.is_rare(bag)) {
            count_use(f.cache, slot);
        }
        tile.share_slot(slot);
        FOR_CODEC(f, { pool_round<CODEC>(f, tile); })
    }
}

// Pools the tile's bags, one a team at a time. Each team finds the rows of its own bag's keys, as
// many at a time as it has lanes.
template <u32 CODEC>
__device__ __forceinline__ void pool_apart(const Query& q, const Feature& f, volatile Tile& tile) {
#pragma unroll 1
    for (tile.round = 0; uniform(tile.round) < tile.samples; tile.advance(32u >> f.lane_bits)) {
        const u32 count = tile.keys_of(tile.round + Team(f).number, tile.samples);
        // Whether all keys of each bag are found once for all passes over its rows.
        const bool one_chunk = !__any_sync(ALL_LANES, count > 1u << f.lane_bits);

#pragma unroll 1
        for (tile.set(tile.column, 0); uniform(tile.column) < f.dim;
             tile.set(tile.column, tile.column + (Code<CODEC>::COLUMNS << f.lane_bits))) {
            float sums[Code<CODEC>::COLUMNS] = {};
#pragma unroll 1
            for (u32 at = 0; __any_sync(ALL_LANES, at < count); at += 1u << f.lane_bits) {
                if (!uniform(tile.column) || !one_chunk) {
                    const Team team(f);
                    const u32 own = tile.bag_of_team(f);
                    const u32 begin = tile.begin_of(own);
                    const bool wanted = at + team.lane < count;
                    const Lookup lookup(q, f, begin + at + team.lane, wanted);
                    const u32 missing = __ballot_sync(ALL_LANES, wanted && !lookup.hit());
                    if (missing) {
                        tile.set_rare(missing, own, begin + at);
                    }
                    const u32 slot = lookup.row.slot;
                    if (!tile.column && lookup.row.uncounted && !tile.is_rare(own)) {
                        count_use(f.cache, slot);
                    }
                    tile.share_slot(slot);
                }
                // A rare bag's sums are not used, nor are those of a chunk without rows.
                if (uniform(tile.found)) {
                    const Team team(f);
                    const u32 rest = count > at ? count - at : 0;
                    const u32 listed = team.number << f.lane_bits;
                    add_rows<CODEC>(f, tile, listed, listed + min(rest, team.lanes), sums);
                }
            }
            write_sums<CODEC>(f, tile, tile.round + Team(f).number, tile.samples, sums);
        }
    }
}

// Returns whether `pool_together` is faster. With few teams, one bag for each team has fewer keys
// than the warp has lanes. All lanes of the warp call it together.
__device__ __forceinline__ bool are_together(const Feature& f, const volatile Tile& tile) {
    const u32 lane = lane_number();
    const u32 keys = tile.ends[lane] - tile.begin_of(lane);
    const u32 lanes = 1u << uniform(f.lane_bits);
    return lanes >= 16 && !__any_sync(ALL_LANES, keys > lanes);
}
