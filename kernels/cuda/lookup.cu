// The verb `query`: probe, decode, pool and concatenate, all tables in one launch, straight into
// the dense network's input; and `finish`, which pools the rest of the bags that missed, from the
// rows that the host read. What a query leaves open goes to a ring in host memory: the missing keys
// with their places, copies of the hits behind them, and counts. To the bit what
// kernels/src/query.rs does.
//
// A warp takes a few samples of one feature. Their keys lie side by side, so it names 32 at once, a
// lane each, and then has the sets and rows of several keys on their way from memory together,
// whichever bags they are of. A row is believed only where its set's sequence number is even and
// the same before and after it was read: after, by a fence; before, since where the row lies is
// known only from what was read with the number.
//
// A row that is too wide for registers is added as it is read, and believed then: a bag that took
// one in that had changed meanwhile counts for nothing and is asked for again.
//
// Changed since the first version: eight keys of narrow rows at once instead of four; bags that
// wait are read where they lie when `finish` runs, so that a graph can record it; wide rows in
// pieces, no local memory; a tile's offsets are read once.
#include "pool.cuh"

// Words of a lane that stay in registers while a bag is added: 128 columns, or more of small
// codecs.
template <u32 CODEC> struct Narrow { static constexpr u32 WORDS = CODEC == F32 ? 4 : CODEC == F16 ? 2 : 1; };
// Those of a piece of a wide row.
template <u32 CODEC> struct Piece { static constexpr u32 WORDS = 2 * Narrow<CODEC>::WORDS; };
// Keys whose rows are on their way at once.
#define KEYS 8
// How often a query looks again at a set that is being changed before it calls the row missing.
#define LOOKS 1000u

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

// A cached row's name, as kernels/src/names.rs makes it.
__device__ __forceinline__ Name name_of(const Feature& f, u64 key) {
    if (f.has_end && key >= f.keys_end) return {0, 0};
    if (f.cache.table_bits == 0) {
        u32 hash = key < f.end ? mix_32(f.base + (u32)key) : 0;
        return {(u32)((u64)hash * f.cache.sets >> 32), hash};
    }
    u64 hash = mix(key ^ f.salt);
    return {(u32)__umul64hi(hash, f.cache.sets), hash << f.cache.table_bits | (f.table + 1)};
}

// A resident row's position, from 1; 0 where the table does not have it.
__device__ __forceinline__ u64 position_of(const Feature& f, u64 key) {
    if (f.place == RESIDENT) return key < f.count ? key + 1 : 0;
    u64 hash = mix(key), bucket = __umul64hi(hash, f.bucket_count);
    for (u32 i = f.buckets[bucket]; i < f.buckets[bucket + 1]; i++)
        if (f.hashes[i] == hash) return i + 1;
    return 0;
}

// One more use of a way, as eviction.rs counts them; whoever else counts, none is lost.
__device__ __forceinline__ void use(u32* uses, u32 seen, u32 way) {
    u32 shift = 2 * way;
    while ((seen >> shift & 3) < 3) {
        u32 now = atomicCAS(uses, seen, seen + (1u << shift));
        if (now == seen) return;
        seen = now;
    }
}

// Where a cached row was found: its set's sequence number before it was read, its way, and the
// set's head, read before or since.
struct Found {
    u32 before, way, head;
};

// The bags of one warp, up to 32, taken key by key.
template <u32 CODEC, u32 WORDS, bool REGISTERS>
struct Bags {
    const Query& q;
    const Feature& f;
    Sum<CODEC, WORDS, REGISTERS> sum;
    u32 feature, lane;
    // The first, and where each ends, a lane each: offsets are read once, side by side.
    u32 first, ends;
    // The bag in hand.
    u32 sample, begin, end, absent;
    enum { WHOLE, OPEN, AGAIN } state;
    u32 first_ref, opened_at;

    __device__ __forceinline__ Bags(const Query& q, const Feature& f, u32 feature, u32 first, u32 samples, u32 lane)
        : q(q), f(f), sum(f, lane), feature(feature), lane(lane), first(first) {
        const u32* offsets = q.offsets + (u64)feature * (q.samples + 1) + first;
        ends = lane < samples ? offsets[lane + 1] : 0;
        end = offsets[0];
        start(first);
    }

    __device__ __forceinline__ void start(u32 at) {
        sample = at;
        begin = end;
        end = __shfl_sync(FULL, ends, at - first);
        absent = 0;
        state = WHOLE;
        sum.begin(at);
    }

    __device__ __forceinline__ void finish() {
        if (state == WHOLE) sum.close(end - begin);
        if (lane == 0) {
            if (state == AGAIN) {
                u32 at = atomicAdd(&q.counts->again, 1u);
                q.ring.again[2 * at] = feature;
                q.ring.again[2 * at + 1] = sample;
            } else if (absent) {
                q.ring.absents[atomicAdd(&q.counts->absents, 1u)] = {sample, absent};
            }
        }
    }

    // Leaves the bag open at its first missing row; takes room for all that follow.
    __device__ __forceinline__ void open(u32 position) {
        u32 refs = end - begin - position;
        u32 first = __shfl_sync(FULL, lane == 0 ? atomicAdd(&q.counts->refs, refs) : 0, 0);
        if (first > q.ring.refs_max || refs > q.ring.refs_max - first) {
            state = AGAIN;
            return;
        }
        state = OPEN;
        first_ref = first;
        opened_at = position;
        if (position) sum.store();
        if (lane == 0) q.ring.bags[atomicAdd(&q.counts->bags, 1u)] = {feature, sample, position, first, refs};
    }

    // Goes on to the bag that has the lookup at `at`.
    __device__ __forceinline__ void go_to(u32 at) {
        while (at == end) {
            finish();
            start(sample + 1);
        }
    }

    // Writes down the lookup at `at` of the bag, which is open.
    __device__ __forceinline__ u32 note(u32 at, u64 key, Kind kind, u32 set) {
        u32 ref = first_ref + at - begin - opened_at;
        if (lane == 0) {
            u32 epoch = kind == MISSING ? load_racing(tail_of(f.cache, set) + EPOCH) : 0;
            q.ring.refs[ref] = {key, epoch, (u32)kind};
        }
        return ref;
    }

    // Takes the lookup at `at` of the bag, which was found or not.
    template <class AnyRow>
    __device__ __forceinline__ void take(u32 at, u64 key, Kind kind, u32 set, const AnyRow& row) {
        u32 position = at - begin;
        if (state == WHOLE) {
            if (kind == KEPT) return sum.add_row(position, row);
            if (kind == ABSENT) {
                absent++;
                return sum.add_default(position);
            }
            open(position);
        }
        if (state == AGAIN) return;
        u32 ref = note(at, key, kind, set);
        if (kind == KEPT) row.copy(q.ring.kept + (u64)ref * q.ring.kept_stride, f.cache.row, f.cache.row_bytes, lane);
    }

    // The row that the lookup at `at` took was another's in part.
    __device__ __forceinline__ void spoil(u32 at, u64 key, u32 set) {
        if (state == OPEN) note(at, key, MISSING, set);
        else state = AGAIN;
    }

    // Completes the bags before `sample`: the last one with keys, and empty ones behind it.
    __device__ __forceinline__ void end_at(u32 last) {
        for (finish(); sample + 1 < last; finish()) start(sample + 1);
    }
};

// Finds the row that `word` names in the head that was loaded.
__device__ __forceinline__ void see(const Feature& f, Found& found, u64 word, u32 lane) {
    found.before = __shfl_sync(FULL, found.head, SEQUENCE);
    found.way = find(f.cache, word, found.head, lane);
}

template <u32 CODEC, u32 WORDS>
__device__ __forceinline__ void load(const Feature& f, Row<WORDS>& row, const u32* from, u32 lane) {
    row.load(from, 0, f.cache.row, lane);
    row.parameters = load_parameters<CODEC>(from, f.cache.row_bytes);
}

template <u32 CODEC, u32 WORDS>
__device__ __forceinline__ void read(const Feature& f, const Found& found, Row<WORDS>& row, u32 set, u32 lane) {
    if (found.way < WAYS) load<CODEC>(f, row, row_of(f.cache, set, found.way), lane);
}

// Whether the row that was read is whole, and the name's; counts its use then.
__device__ __forceinline__ bool believe(const Feature& f, const Found& found, Name name, u32 lane) {
    bool same = found.before % 2 == 0 && __shfl_sync(FULL, found.head, SEQUENCE) == found.before
        && find(f.cache, name.word, found.head, lane) == found.way;
    if (same && lane == USES) use(head_of(f.cache, name.set) + USES, found.head, found.way);
    return same;
}

// The lane's key of the 32 from `chunk` on, and its name; word 0 where there is none. A resident
// row's word is its position.
__device__ __forceinline__ Name name_at(const Feature& f, const u64* keys, u32 at, u32 end, u64& key) {
    key = at < end ? keys[at] : 0;
    if (at >= end) return {0, 0};
    return f.place == CACHED ? name_of(f, key) : Name{0, position_of(f, key)};
}

template <u32 CODEC>
__device__ __forceinline__ void pool(const Query& q, u32 feature, const Feature& f, u32 first, u32 samples, u32 lane) {
    constexpr u32 WORDS = Narrow<CODEC>::WORDS;
    Bags<CODEC, WORDS, true> bags(q, f, feature, first, samples, lane);
    const u64* keys = q.keys + f.keys_before * q.samples;
    u32 end = __shfl_sync(FULL, bags.ends, samples - 1);
    for (u32 chunk = bags.begin; chunk < end; chunk += 32) {
        u64 key;
        Name name = name_at(f, keys, chunk + lane, end, key);
        for (u32 group = 0; group < 32 && chunk + group < end; group += KEYS) {
            Found found[KEYS];
            Row<WORDS> rows[KEYS];
            if (f.place == CACHED) {
                // Each of these loops has loads of all keys under way before the next needs the
                // first of them.
#pragma unroll
                for (u32 k = 0; k < KEYS; k++) found[k].head = load_head(f.cache, __shfl_sync(FULL, name.set, group + k), lane);
#pragma unroll
                for (u32 k = 0; k < KEYS; k++) see(f, found[k], __shfl_sync(FULL, name.word, group + k), lane);
#pragma unroll
                for (u32 k = 0; k < KEYS; k++) read<CODEC>(f, found[k], rows[k], __shfl_sync(FULL, name.set, group + k), lane);
                fence();
                __syncwarp();
#pragma unroll
                for (u32 k = 0; k < KEYS; k++) found[k].head = load_head(f.cache, __shfl_sync(FULL, name.set, group + k), lane);
            } else {
#pragma unroll
                for (u32 k = 0; k < KEYS; k++) {
                    u64 position = __shfl_sync(FULL, name.word, group + k);
                    if (position) load<CODEC>(f, rows[k], f.rows + (position - 1) * f.cache.row, lane);
                }
            }
#pragma unroll 1
            for (u32 k = 0; k < KEYS && chunk + group + k < end; k++) {
                // The one whose turn it is, picked out: so what follows is there once.
                Found now = found[0];
                Row<WORDS> row = rows[0];
#pragma unroll
                for (u32 other = 1; other < KEYS; other++)
                    if (other == k) now = found[other], row = rows[other];
                u64 this_key = __shfl_sync(FULL, key, group + k);
                Name this_name = {__shfl_sync(FULL, name.set, group + k), __shfl_sync(FULL, name.word, group + k)};
                Kind kind = this_name.word ? KEPT : ABSENT;
                if (kind == KEPT && f.place == CACHED) {
                    kind = MISSING;
                    for (u32 look = 0; look < LOOKS && now.way < WAYS; look++) {
                        if (look) {
                            now.head = load_head(f.cache, this_name.set, lane);
                            see(f, now, this_name.word, lane);
                            read<CODEC>(f, now, row, this_name.set, lane);
                            fence();
                            __syncwarp();
                            now.head = load_head(f.cache, this_name.set, lane);
                        }
                        if (now.way < WAYS && believe(f, now, this_name, lane)) {
                            kind = KEPT;
                            break;
                        }
                    }
                }
                bags.go_to(chunk + group + k);
                bags.take(chunk + group + k, this_key, kind, this_name.set, row);
            }
        }
    }
    bags.end_at(first + samples);
}

// The same for rows that are too wide for registers, one after the other.
template <u32 CODEC>
__device__ __forceinline__ void pool_wide(const Query& q, u32 feature, const Feature& f, u32 first, u32 samples, u32 lane) {
    Bags<CODEC, Piece<CODEC>::WORDS, false> bags(q, f, feature, first, samples, lane);
    const u64* keys = q.keys + f.keys_before * q.samples;
    u32 end = __shfl_sync(FULL, bags.ends, samples - 1);
    for (u32 chunk = bags.begin; chunk < end; chunk += 32) {
        u64 key;
        Name name = name_at(f, keys, chunk + lane, end, key);
        for (u32 k = 0; k < 32 && chunk + k < end; k++) {
            u64 this_key = __shfl_sync(FULL, key, k);
            Name this_name = {__shfl_sync(FULL, name.set, k), __shfl_sync(FULL, name.word, k)};
            bags.go_to(chunk + k);
            if (bags.state == bags.AGAIN) continue;
            Kind kind = this_name.word ? KEPT : ABSENT;
            FarRow row = {nullptr};
            Found found;
            if (kind == KEPT && f.place != CACHED) row.from = f.rows + (this_name.word - 1) * f.cache.row;
            if (kind == KEPT && f.place == CACHED) {
                kind = MISSING;
                for (u32 look = 0; look < LOOKS; look++) {
                    found.head = load_head(f.cache, this_name.set, lane);
                    see(f, found, this_name.word, lane);
                    if (found.way == WAYS || found.before % 2 == 0) break;
                    fence();
                    __syncwarp();
                }
                if (found.way < WAYS && found.before % 2 == 0) kind = KEPT, row.from = row_of(f.cache, this_name.set, found.way);
            }
            bags.take(chunk + k, this_key, kind, this_name.set, row);
            if (kind != KEPT || f.place != CACHED) continue;
            fence();
            __syncwarp();
            found.head = load_head(f.cache, this_name.set, lane);
            if (!believe(f, found, this_name, lane)) bags.spoil(chunk + k, this_key, this_name.set);
        }
    }
    bags.end_at(first + samples);
}

template <u32 CODEC>
__device__ __forceinline__ void pool_codec(const Query& q, u32 feature, const Feature& f, u32 first, u32 samples, u32 lane) {
    constexpr u32 WORDS = Narrow<CODEC>::WORDS;
    // All columns must lie in those words; one more may hold the scale and the bias.
    bool narrow = f.dim <= 32 * WORDS * Values<CODEC>::N && f.cache.row <= 32 * WORDS + (CODEC == U8 || CODEC == U4);
    if (narrow) pool<CODEC>(q, feature, f, first, samples, lane);
    else pool_wide<CODEC>(q, feature, f, first, samples, lane);
}

// One launch for all features: warps by feature, then by tile of samples.
extern "C" __global__ void __launch_bounds__(128) query_tables(Query q) {
    u32 lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 tiles = (q.bags + q.tile - 1) / q.tile;
    u32 feature = q.only ? 0 : warp / tiles, first = q.only ? 0 : warp % tiles * q.tile, samples = 1;
    bool mine = q.only ? warp < q.bags : feature < q.feature_count;
    if (mine) {
        if (q.only) {
            feature = q.only[2 * warp];
            first = q.only[2 * warp + 1];
        } else {
            samples = min(q.tile, q.bags - first);
        }
        const Feature& f = q.features[feature];
        switch (f.codec) {
        case F32: pool_codec<F32>(q, feature, f, first, samples, lane); break;
        case F16: pool_codec<F16>(q, feature, f, first, samples, lane); break;
        case U8: pool_codec<U8>(q, feature, f, first, samples, lane); break;
        default: pool_codec<U4>(q, feature, f, first, samples, lane);
        }
    }
    // The last block to end tells the host what was left open.
    __syncthreads();
    if (threadIdx.x == 0) {
        fence();
        if (atomicAdd(q.blocks, 1u) == gridDim.x - 1) {
            fence();
            u32* counts = (u32*)q.counts;
            *q.ring.counts = {load_racing(counts), load_racing(counts + 1), load_racing(counts + 2), load_racing(counts + 3)};
            for (u32 i = 0; i < 4; i++) store_racing(counts + i, 0);
            store_racing(q.blocks, 0);
            fence_host();
        }
    }
}

template <u32 CODEC>
__device__ __forceinline__ void finish_bag(const Finish& c, const Feature& f, const OpenBag& bag, u32 lane) {
    Sum<CODEC, Piece<CODEC>::WORDS, false> sum(f, lane);
    sum.begin(bag.sample);
    for (u32 i = 0; i < bag.refs; i++) {
        u32 slot = c.slots[bag.first + i];
        if (slot == NO_SLOT) {
            sum.add_default(bag.done + i);
        } else {
            sum.add_row(bag.done + i, FarRow{c.rows + (u64)slot * c.stride});
        }
    }
    sum.close(bag.done + bag.refs);
}

// A warp an open bag, and then the next.
extern "C" __global__ void __launch_bounds__(128) finish_bags(const Finish* at) {
    u32 lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    Finish c = *at;
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
