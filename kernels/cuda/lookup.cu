// `query_tables` probes the caches, decodes rows, pools them and writes the sums into the dense
// network's input: all tables in one launch. What it leaves open goes to a ring in host memory: the
// missing keys with their epochs, copies of the cached rows that follow them in the same bag,
// and counts. `finish_bags` pools the rest of those bags from rows that the host has read. The bits
// are those of kernels/src/lookup/.
//
// A warp takes a few samples of one feature, whose keys are consecutive in memory. The warp hashes
// 32 keys together, one key a lane. Then it has the headers and the rows of KEYS keys in flight
// from memory together, across the bounds of bags.
//
// A row is valid only if its set's sequence number is even and the same before and after the row
// was read. A fence keeps the order after the read. The order before needs none: the address of the
// row depends on the header that was loaded with the sequence number.
//
// A row that is too wide for registers is added while it is read, and validated afterwards. A bag
// that added a torn row is discarded and queried again.
#include "pool.cuh"

// Words of a narrow row that a lane keeps in registers: 128 columns, or more of small codecs.
template <u32 CODEC>
struct NarrowRow {
    static constexpr u32 WORDS = CODEC == F32 ? 4 : CODEC == F16 ? 2 : 1;
};

// Words of one piece of a wide row.
template <u32 CODEC>
struct RowPiece {
    static constexpr u32 WORDS = 2 * NarrowRow<CODEC>::WORDS;
};

// Keys whose rows are in flight together.
#define KEYS 8
// Times that a query reads a set that is being changed before it takes the row as missing.
#define READ_RETRIES_MAX 1000u

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
    if (f.cache.table_bits == 0) {
        u32 hash = key < f.end ? mix_32(f.base + (u32)key) : 0;
        return {(u32)((u64)hash * f.cache.sets >> 32), hash};
    }
    u64 hash = mix(key ^ f.salt);
    return {(u32)__umul64hi(hash, f.cache.sets), hash << f.cache.table_bits | (f.table + 1)};
}

// Returns the position of a key's row in a resident table, from 1; 0 if the table does not have it.
__device__ __forceinline__ u64 position_of(const Feature& f, u64 key) {
    if (f.storage == RESIDENT) {
        return key < f.count ? key + 1 : 0;
    }
    u64 hash = mix(key);
    u64 bucket = __umul64hi(hash, f.bucket_count);
    for (u32 i = f.buckets[bucket]; i < f.buckets[bucket + 1]; i++) {
        if (f.hashes[i] == hash) {
            return i + 1;
        }
    }
    return 0;
}

// Counts one use of a way, up to 3, as kernels/src/cache/eviction.rs does. No use that another
// thread counts at the same time is lost.
__device__ __forceinline__ void touch(u32* uses, u32 seen, u32 way) {
    u32 shift = 2 * way;
    while ((seen >> shift & 3) < 3) {
        u32 now = atomicCAS(uses, seen, seen + (1u << shift));
        if (now == seen) {
            return;
        }
        seen = now;
    }
}

// The samples of one feature that a warp takes.
struct Tile {
    u32 feature;
    u32 first;
    u32 samples;
};

// One key of a tile: its index among the feature's keys, the key, and where its row may be cached.
// For a resident table the tag is the row's position, from 1. No row has tag 0.
struct Lookup {
    u32 at;
    u64 key;
    SetTag row;
};

// The bags of one tile, up to 32, pooled key by key.
template <u32 CODEC, u32 WORDS, bool REGISTERS>
struct Bags {
    const Query& q;
    const Feature& f;
    BagSum<CODEC, WORDS, REGISTERS> sum;
    u32 feature;
    u32 lane;
    // The first sample, and where each bag ends, one a lane: offsets are read once, side by side.
    u32 first;
    u32 ends;
    // The current bag.
    u32 sample;
    u32 begin;
    u32 end;
    u32 absent;
    enum { WHOLE, OPEN, REQUERY } state;
    u32 first_entry;
    u32 opened_at;

    __device__ __forceinline__ Bags(const Query& q, const Feature& f, const Tile& tile, u32 lane)
        : q(q), f(f), sum(f, lane), feature(tile.feature), lane(lane), first(tile.first) {
        const u32* offsets = q.offsets + (u64)feature * (q.samples + 1) + first;
        ends = lane < tile.samples ? offsets[lane + 1] : 0;
        end = offsets[0];
        start(first);
    }

    __device__ __forceinline__ void start(u32 next_sample) {
        sample = next_sample;
        begin = end;
        end = __shfl_sync(ALL_LANES, ends, sample - first);
        absent = 0;
        state = WHOLE;
        sum.begin(sample);
    }

    __device__ __forceinline__ void finish() {
        if (state == WHOLE) {
            sum.close(end - begin);
        }
        if (lane == 0) {
            if (state == REQUERY) {
                q.ring.requeries[atomicAdd(&q.counts->requeries, 1u)] = {feature, sample};
            } else if (absent) {
                q.ring.absents[atomicAdd(&q.counts->absents, 1u)] = {sample, absent};
            }
        }
    }

    // Leaves the bag open at its first missing row; takes ring entries for all rows from there on.
    __device__ __forceinline__ void open(u32 position) {
        u32 entries = end - begin - position;
        u32 taken = lane == 0 ? atomicAdd(&q.counts->entries, entries) : 0;
        u32 first = __shfl_sync(ALL_LANES, taken, 0);
        if (first > q.ring.entries_max || entries > q.ring.entries_max - first) {
            state = REQUERY;
            return;
        }

        state = OPEN;
        first_entry = first;
        opened_at = position;
        if (position) {
            sum.store();
        }
        if (lane == 0) {
            u32 number = atomicAdd(&q.counts->bags, 1u);
            q.ring.bags[number] = {feature, sample, position, first, entries};
        }
    }

    // Advances to the bag that holds the lookup at `at`.
    __device__ __forceinline__ void advance_to(u32 at) {
        while (at == end) {
            finish();
            start(sample + 1);
        }
    }

    // Writes the ring entry of a lookup of the bag, which is open; returns the entry's number.
    __device__ __forceinline__ u32 record(const Lookup& lookup, EntryKind kind) {
        u32 entry = first_entry + lookup.at - begin - opened_at;
        if (lane == 0) {
            u32 epoch = 0;
            if (kind == MISSING) {
                epoch = load_racing(set_writer_state(f.cache, lookup.row.set) + EPOCH_WORD);
            }
            q.ring.entries[entry] = {lookup.key, epoch, (u32)kind};
        }
        return entry;
    }

    // Adds a row of the bag, or records its lookup where the bag is open.
    template <class AnyRow>
    __device__ __forceinline__ void take(const Lookup& lookup, EntryKind kind, const AnyRow& row) {
        u32 position = lookup.at - begin;
        if (state == WHOLE) {
            if (kind == HIT) {
                return sum.add_row(position, row);
            }
            if (kind == ABSENT) {
                absent++;
                return sum.add_default(position);
            }
            open(position);
        }

        if (state == REQUERY) {
            return;
        }
        u32 entry = record(lookup, kind);
        if (kind == HIT) {
            row.copy(q.ring.hit_rows + (u64)entry * q.ring.hit_stride, f.cache, lane);
        }
    }

    // Marks the row of the last `take` as torn: the lookup becomes a miss, or the bag is queried
    // again.
    __device__ __forceinline__ void mark_torn(const Lookup& lookup) {
        if (state == OPEN) {
            record(lookup, MISSING);
        } else {
            state = REQUERY;
        }
    }

    // Completes the bags before sample `end_sample`: the last one with keys and empty ones after.
    __device__ __forceinline__ void end_at(u32 end_sample) {
        for (finish(); sample + 1 < end_sample; finish()) {
            start(sample + 1);
        }
    }
};

// One probe of a set: the sequence number before the row was read, the way of the row (WAYS: not
// cached), and the lane's word of the set's header, loaded before or after the read.
struct Probe {
    u32 before;
    u32 way;
    u32 header;

    // Finds the row with `tag` in the header that was loaded.
    __device__ __forceinline__ void match(const Feature& f, u64 tag, u32 lane) {
        before = __shfl_sync(ALL_LANES, header, SEQUENCE_WORD);
        way = match_tags(f.cache, tag, header, lane);
    }

    // Returns whether the row that was read is whole and has the tag, by the header that was loaded
    // after the read; counts a use of the row if so.
    __device__ __forceinline__ bool validate(const Feature& f, const SetTag& row, u32 lane) const {
        bool valid = before % 2 == 0 && __shfl_sync(ALL_LANES, header, SEQUENCE_WORD) == before
            && match_tags(f.cache, row.tag, header, lane) == way;
        if (valid && lane == USES_WORD) {
            touch(set_header(f.cache, row.set) + USES_WORD, header, way);
        }
        return valid;
    }
};

template <u32 CODEC, u32 WORDS>
__device__ __forceinline__ void load_row(
    const Feature& f, RegisterRow<WORDS>& row, const u32* from, u32 lane) {
    row.load(from, 0, f.cache.row_words, lane);
    row.scale_and_bias = load_scale_and_bias<CODEC>(from, f.cache.row_bytes);
}

// Reads a cached row again until it is valid; `probe` and `row` are of the first read, of which the
// header after the read is loaded. Returns MISSING if the row is not cached or changes too often.
template <u32 CODEC, u32 WORDS>
__device__ __forceinline__ EntryKind settle_row(
    const Feature& f, Probe& probe, RegisterRow<WORDS>& row, const SetTag& place, u32 lane) {
    for (u32 tries = 0; tries < READ_RETRIES_MAX && probe.way < WAYS; tries++) {
        if (tries) {
            probe.header = load_header(f.cache, place.set, lane);
            probe.match(f, place.tag, lane);
            if (probe.way < WAYS) {
                load_row<CODEC>(f, row, slot_row(f.cache, place.set, probe.way), lane);
            }
            fence_device();
            __syncwarp();
            probe.header = load_header(f.cache, place.set, lane);
        }
        if (probe.way < WAYS && probe.validate(f, place, lane)) {
            return HIT;
        }
    }
    return MISSING;
}

// The lane's key of the 32 from `chunk` on, and where its row may be stored.
struct LaneKey {
    u64 key;
    SetTag row;

    __device__ __forceinline__ LaneKey(const Feature& f, const u64* keys, u32 at, u32 end) {
        key = at < end ? keys[at] : 0;
        if (at >= end) {
            row = {0, 0};
        } else if (f.storage == CACHED) {
            row = hash_key(f, key);
        } else {
            row = {0, position_of(f, key)};
        }
    }

    __device__ __forceinline__ u32 set_of(u32 lane) const {
        return __shfl_sync(ALL_LANES, row.set, lane);
    }

    __device__ __forceinline__ u64 tag_of(u32 lane) const {
        return __shfl_sync(ALL_LANES, row.tag, lane);
    }

    // Returns the key of `lane`, which is the lookup at `at`, to all lanes.
    __device__ __forceinline__ Lookup lookup_of(u32 lane, u32 at) const {
        return {at, __shfl_sync(ALL_LANES, key, lane), {set_of(lane), tag_of(lane)}};
    }
};

// Loads the rows of the KEYS keys from lane `group` on. Each loop has the loads of all keys in
// flight before the next loop needs the first of them.
template <u32 CODEC, u32 WORDS>
__device__ __forceinline__ void load_group(
    const Feature& f, const LaneKey& keys, u32 group,
    Probe (&probes)[KEYS], RegisterRow<WORDS> (&rows)[KEYS]) {
    u32 lane = threadIdx.x % 32;
    if (f.storage != CACHED) {
#pragma unroll
        for (u32 k = 0; k < KEYS; k++) {
            u64 position = keys.tag_of(group + k);
            if (position) {
                load_row<CODEC>(f, rows[k], f.rows + (position - 1) * f.cache.row_words, lane);
            }
        }
        return;
    }

#pragma unroll
    for (u32 k = 0; k < KEYS; k++) {
        probes[k].header = load_header(f.cache, keys.set_of(group + k), lane);
    }
#pragma unroll
    for (u32 k = 0; k < KEYS; k++) {
        probes[k].match(f, keys.tag_of(group + k), lane);
    }
#pragma unroll
    for (u32 k = 0; k < KEYS; k++) {
        u32 set = keys.set_of(group + k);
        if (probes[k].way < WAYS) {
            load_row<CODEC>(f, rows[k], slot_row(f.cache, set, probes[k].way), lane);
        }
    }
    fence_device();
    __syncwarp();
#pragma unroll
    for (u32 k = 0; k < KEYS; k++) {
        probes[k].header = load_header(f.cache, keys.set_of(group + k), lane);
    }
}

// Pools the bags of a tile whose rows fit into registers.
template <u32 CODEC>
__device__ __forceinline__ void pool_narrow(
    const Query& q, const Feature& f, const Tile& tile, u32 lane) {
    constexpr u32 WORDS = NarrowRow<CODEC>::WORDS;
    Bags<CODEC, WORDS, true> bags(q, f, tile, lane);
    const u64* keys = q.keys + f.keys_before * q.samples;
    u32 end = __shfl_sync(ALL_LANES, bags.ends, tile.samples - 1);

    for (u32 chunk = bags.begin; chunk < end; chunk += 32) {
        LaneKey lane_key(f, keys, chunk + lane, end);
        for (u32 group = 0; group < 32 && chunk + group < end; group += KEYS) {
            Probe probes[KEYS];
            RegisterRow<WORDS> rows[KEYS];
            load_group<CODEC>(f, lane_key, group, probes, rows);

#pragma unroll 1
            for (u32 k = 0; k < KEYS && chunk + group + k < end; k++) {
                // Picks key `k` out of the arrays, so that the code below exists once.
                Probe probe = probes[0];
                RegisterRow<WORDS> row = rows[0];
#pragma unroll
                for (u32 other = 1; other < KEYS; other++) {
                    if (other == k) {
                        probe = probes[other];
                        row = rows[other];
                    }
                }

                Lookup lookup = lane_key.lookup_of(group + k, chunk + group + k);
                EntryKind kind = lookup.row.tag ? HIT : ABSENT;
                if (kind == HIT && f.storage == CACHED) {
                    kind = settle_row<CODEC>(f, probe, row, lookup.row, lane);
                }
                bags.advance_to(lookup.at);
                bags.take(lookup, kind, row);
            }
        }
    }
    bags.end_at(tile.first + tile.samples);
}

// Finds the row of a lookup in the cache, when its set is not being changed; returns MISSING
// otherwise.
__device__ __forceinline__ EntryKind find_wide_row(
    const Feature& f, const SetTag& place, Probe& probe, MemoryRow& row, u32 lane) {
    for (u32 tries = 0; tries < READ_RETRIES_MAX; tries++) {
        probe.header = load_header(f.cache, place.set, lane);
        probe.match(f, place.tag, lane);
        if (probe.way == WAYS || probe.before % 2 == 0) {
            break;
        }
        fence_device();
        __syncwarp();
    }

    if (probe.way == WAYS || probe.before % 2 != 0) {
        return MISSING;
    }
    row.from = slot_row(f.cache, place.set, probe.way);
    return HIT;
}

// Pools the bags of a tile whose rows are too wide for registers, one row after the other.
template <u32 CODEC>
__device__ __forceinline__ void pool_wide(
    const Query& q, const Feature& f, const Tile& tile, u32 lane) {
    Bags<CODEC, RowPiece<CODEC>::WORDS, false> bags(q, f, tile, lane);
    const u64* keys = q.keys + f.keys_before * q.samples;
    u32 end = __shfl_sync(ALL_LANES, bags.ends, tile.samples - 1);

    for (u32 chunk = bags.begin; chunk < end; chunk += 32) {
        LaneKey lane_key(f, keys, chunk + lane, end);
        for (u32 k = 0; k < 32 && chunk + k < end; k++) {
            Lookup lookup = lane_key.lookup_of(k, chunk + k);
            bags.advance_to(lookup.at);
            if (bags.state == bags.REQUERY) {
                continue;
            }

            EntryKind kind = lookup.row.tag ? HIT : ABSENT;
            MemoryRow row = {nullptr};
            Probe probe;
            if (kind == HIT && f.storage != CACHED) {
                row.from = f.rows + (lookup.row.tag - 1) * f.cache.row_words;
            }
            if (kind == HIT && f.storage == CACHED) {
                kind = find_wide_row(f, lookup.row, probe, row, lane);
            }
            bags.take(lookup, kind, row);

            if (kind != HIT || f.storage != CACHED) {
                continue;
            }
            fence_device();
            __syncwarp();
            probe.header = load_header(f.cache, lookup.row.set, lane);
            if (!probe.validate(f, lookup.row, lane)) {
                bags.mark_torn(lookup);
            }
        }
    }
    bags.end_at(tile.first + tile.samples);
}

template <u32 CODEC>
__device__ __forceinline__ void pool(const Query& q, const Feature& f, const Tile& tile, u32 lane) {
    constexpr u32 WORDS = NarrowRow<CODEC>::WORDS;
    // All columns must be in those words; one more word may hold the scale and the bias.
    bool narrow = f.dim <= 32 * WORDS * ValuesPerWord<CODEC>::N
        && f.cache.row_words <= 32 * WORDS + HasScale<CODEC>::YES;
    if (narrow) {
        pool_narrow<CODEC>(q, f, tile, lane);
    } else {
        pool_wide<CODEC>(q, f, tile, lane);
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

// Queries all features in one launch: warps by feature, then by tile of samples; or the single bags
// of `only`, one a warp.
extern "C" __global__ void __launch_bounds__(128) query_tables(Query q) {
    u32 lane = threadIdx.x % 32;
    u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 tiles = (q.bags + q.tile - 1) / q.tile;
    Tile tile = {q.only ? 0 : warp / tiles, q.only ? 0 : warp % tiles * q.tile, 1};
    bool has_tile = q.only ? warp < q.bags : tile.feature < q.feature_count;

    if (has_tile) {
        if (q.only) {
            tile.feature = q.only[warp].feature;
            tile.first = q.only[warp].sample;
        } else {
            tile.samples = min(q.tile, q.bags - tile.first);
        }
        const Feature& f = q.features[tile.feature];
        switch (f.codec) {
        case F32: pool<F32>(q, f, tile, lane); break;
        case F16: pool<F16>(q, f, tile, lane); break;
        case U8: pool<U8>(q, f, tile, lane); break;
        default: pool<U4>(q, f, tile, lane);
        }
    }

    __syncthreads();
    if (threadIdx.x == 0) {
        fence_device();
        if (atomicAdd(q.blocks_done, 1u) == gridDim.x - 1) {
            fence_device();
            publish_counts(q);
        }
    }
}

template <u32 CODEC>
__device__ __forceinline__ void finish_bag(
    const FinishBags& c, const Feature& f, const OpenBag& bag, u32 lane) {
    BagSum<CODEC, RowPiece<CODEC>::WORDS, false> sum(f, lane);
    sum.begin(bag.sample);
    for (u32 i = 0; i < bag.entries; i++) {
        u32 slot = c.slots[bag.first + i];
        if (slot == NO_SLOT) {
            sum.add_default(bag.pooled + i);
        } else {
            sum.add_row(bag.pooled + i, MemoryRow{c.rows + (u64)slot * c.stride});
        }
    }
    sum.close(bag.pooled + bag.entries);
}

// Pools the rest of the open bags. A warp takes one bag, then the next.
extern "C" __global__ void __launch_bounds__(128) finish_bags(const FinishBags* at) {
    u32 lane = threadIdx.x % 32;
    u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    FinishBags c = *at;

    for (; warp < c.count; warp += gridDim.x * (blockDim.x / 32)) {
        OpenBag bag = c.bags[warp];
        const Feature& f = c.features[bag.feature];
        switch (f.codec) {
        case F32: finish_bag<F32>(c, f, bag, lane); break;
        case F16: finish_bag<F16>(c, f, bag, lane); break;
        case U8: finish_bag<U8>(c, f, bag, lane); break;
        default: finish_bag<U4>(c, f, bag, lane);
        }
    }
}
