// The kernels that change a cache (`insert_rows`, `update_rows`, `invalidate_rows`) and those that
// read its state (`probe_rows`, `dump_rows`). The result equals that of kernels/src/cache/mod.rs to
// the byte, for the same rows in the same order. `write_rows` replaces rows of resident tables.
//
// The host sorts a list of changes by set, and keeps their order within one set. One warp makes all
// changes of a set, so a set has one writer in a launch. All launches of this file are on one
// stream, and no query runs during them (kernels/src/gpu/turns.rs). A change therefore needs no
// fence. The lanes of its warp synchronise (`__syncwarp`) between two changes, and a launch ends
// before the next one reads.
#include "eviction.cuh"

struct Change {
    u64 tag;
    u32 set;
    // The set's epoch before the row was read (insert).
    u32 epoch;
    // Index of the row's bytes in `rows`.
    u32 slot;
    // Index of the change in the caller's order, where its result is written.
    u32 number;
};

struct Changes {
    Cache cache;
    const Change* list;
    // The position of each set's first change in the list, `[sets + 1]`.
    const u32* runs;
    u32 sets;
    // Words from one row in `rows` to the next.
    u32 stride;
    const u32* rows;
    // 1 if the row was inserted (insert), or was cached (update, invalidate).
    u8* done;
};

struct ProbeResult {
    u32 cached;
    u32 epoch;
};

struct ProbeRows {
    Cache cache;
    const Change* list;
    ProbeResult* results;
    u32 count;
};

struct DumpRows {
    Cache cache;
    // The first slot, and the number of slots.
    u64 first;
    u32 count;
    // `[count]`, and `[count, cache.row_words]`.
    u64* tags;
    u32* rows;
};

// A row of a resident table to replace.
struct RowWrite {
    u32* to;
    // The first word of the new row in `rows`.
    u32 from;
    u32 words;
};

struct RowWrites {
    const RowWrite* list;
    const u32* rows;
    u32 count;
};

static_assert(sizeof(RowWrite) == 16 && sizeof(RowWrites) == 24,
              "kernels/src/gpu/launch.rs has the same structures");
static_assert(sizeof(Cache) == 48 && sizeof(Change) == 24 && sizeof(ProbeResult) == 8,
              "kernels/src/gpu/launch.rs has the same structures");
static_assert(sizeof(Changes) == 88 && sizeof(ProbeRows) == 72 && sizeof(DumpRows) == 80,
              "kernels/src/gpu/launch.rs has the same structures");

enum Verb { INSERT, UPDATE, INVALIDATE };

__device__ __forceinline__ u32 warp_in_grid() {
    return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

// Words of a row that a lane reads before the row's slot is known.
#define EARLY_WORDS 4u

// A row of the caller, which may be in host memory. The loads of its first 512 bytes are in flight
// while the set's header is read.
struct NewRow {
    const u32* from;
    u32 words[EARLY_WORDS];

    __device__ __forceinline__ NewRow(const Cache& cache, const u32* from, u32 lane) : from(from) {
#pragma unroll
        for (u32 i = 0; i < EARLY_WORDS; i++) {
            const u32 at = lane + 32 * i;
            words[i] = from && at < cache.row_words ? from[at] : 0;
        }
    }

    // Copies the row to `to`. The bytes of the last word after the row become 0.
    __device__ __forceinline__ void write(const Cache& cache, u32* to, u32 lane) const {
        const u32 last = cache.row_words - 1;
        const u32 bits = 8 * (cache.row_bytes % 4);
        const u32 mask = bits ? ALL_LANES >> (32 - bits) : ALL_LANES;
#pragma unroll
        for (u32 i = 0; i < EARLY_WORDS; i++) {
            const u32 at = lane + 32 * i;
            if (at <= last) {
                store_racing(to + at, words[i] & (at == last ? mask : ALL_LANES));
            }
        }
#pragma unroll 4
        for (u32 at = lane + 32 * EARLY_WORDS; at <= last; at += 32) {
            store_racing(to + at, from[at] & (at == last ? mask : ALL_LANES));
        }
    }
};

// Returns a way for a row that is not cached: a free one, or that of the row that it evicts.
__device__ inline u32 take_way(const Cache& cache, SetTag row) {
    SetEviction eviction = load_eviction(cache, row.set);
    u32 way = WAYS;
    for (u32 w = WAYS; w-- > 0;) {
        if (load_tag(cache, row.set, w) == 0) {
            way = w;
        }
    }
    if (way == WAYS) {
        way = evict(cache, row.set, eviction);
    }
    occupy_way(eviction, way, fingerprint_of(cache, row.tag));
    store_eviction(cache, row.set, eviction);
    return way;
}

template <Verb VERB>
__device__ __forceinline__ void change_rows(const Changes& c) {
    u32 lane = threadIdx.x % 32;
    u32 warp = warp_in_grid();
    if (warp >= c.sets) {
        return;
    }

    const Cache& cache = c.cache;
    for (u32 i = c.runs[warp]; i < c.runs[warp + 1]; i++) {
        Change change = c.list[i];
        SetTag row = {change.set, change.tag};

        const bool has_row = VERB != INVALIDATE;
        const NewRow new_row(cache, has_row ? c.rows + (u64)change.slot * c.stride : nullptr, lane);
        u32* sequence = set_header(cache, row.set) + SEQUENCE_WORD;
        u32* epoch = set_writer_state(cache, row.set) + EPOCH_WORD;
        const u32 before = load_racing(sequence);
        const u32 since = load_racing(epoch);

        // In a whole cache a row has a way of its own.
        u32 way = VERB == INSERT && is_whole(cache)
                      ? ((u32)row.tag - 1) % WAYS
                      : match_tags(cache, row.tag, load_header(cache, row.set, lane), lane);
        bool done = VERB == INSERT ? row.tag != 0 && since == change.epoch : way < WAYS;
        if (done && way == WAYS) {
            way = __shfl_sync(ALL_LANES, lane == 0 ? take_way(cache, row) : 0, 0);
        }
        if (done && has_row) {
            new_row.write(cache, slot_row(cache, row.set, way), lane);
        }
        if (lane == 0) {
            if (done) {
                store_tag(cache, row.set, way, VERB == INVALIDATE ? 0 : row.tag);
            }
            if (VERB != INSERT) {
                store_racing(epoch, since + 1);
            }
            // As on the CPU, so that both caches have the same bytes.
            store_racing(sequence, before + 2);
            c.done[change.number] = done;
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(128) insert_rows(Changes changes) {
    change_rows<INSERT>(changes);
}

extern "C" __global__ void __launch_bounds__(128) update_rows(Changes changes) {
    change_rows<UPDATE>(changes);
}

extern "C" __global__ void __launch_bounds__(128) invalidate_rows(Changes changes) {
    change_rows<INVALIDATE>(changes);
}

// The next two kernels are on the stream of the changes, so no set changes while they run.

// Writes for each row of the list whether it is cached, and its set's epoch. The host uses it for
// rows to prefetch. One warp a row.
extern "C" __global__ void __launch_bounds__(128) probe_rows(ProbeRows p) {
    u32 lane = threadIdx.x % 32;
    u32 warp = warp_in_grid();
    if (warp >= p.count) {
        return;
    }

    SetTag row = {p.list[warp].set, p.list[warp].tag};
    u32 epoch = load_racing(set_writer_state(p.cache, row.set) + EPOCH_WORD);
    u32 way = match_tags(p.cache, row.tag, load_header(p.cache, row.set, lane), lane);
    if (lane == 0) {
        p.results[warp] = ProbeResult{way < WAYS, epoch};
    }
}

// Copies the tags and rows of `count` slots from `first` on; an empty slot has tag 0. One warp a
// slot.
extern "C" __global__ void __launch_bounds__(128) dump_rows(DumpRows d) {
    u32 lane = threadIdx.x % 32;
    u32 warp = warp_in_grid();
    if (warp >= d.count) {
        return;
    }

    u32 set = (u32)((d.first + warp) / WAYS);
    u32 way = (u32)((d.first + warp) % WAYS);
    u32* to = d.rows + (u64)warp * d.cache.row_words;
    for (u32 i = lane; i < d.cache.row_words; i += 32) {
        to[i] = load_racing(slot_row(d.cache, set, way) + i);
    }
    if (lane == 0) {
        d.tags[warp] = load_tag(d.cache, set, way);
    }
}

// Replaces rows of resident tables. One warp a row.
extern "C" __global__ void __launch_bounds__(128) write_rows(RowWrites w) {
    u32 lane = threadIdx.x % 32;
    u32 warp = warp_in_grid();
    if (warp >= w.count) {
        return;
    }

    const RowWrite row = w.list[warp];
    for (u32 i = lane; i < row.words; i += 32) {
        row.to[i] = w.rows[row.from + i];
    }
}
