// What a lookup is told and what it leaves, in the layout that kernels/src/cuda/launch.rs has too.
#pragma once
#include "cache.cuh"

enum Codec { F32, F16, U8, U4 };
enum Pooling { SUM, MEAN, NONE };
enum Place { CACHED, RESIDENT, RESIDENT_HASHED };

// One sparse feature. The same for every request of a worker.
struct Feature {
    Cache cache;           // CACHED
    const u32* rows;       // RESIDENT and RESIDENT_HASHED: `[count, cache.row]`
    const u64* hashes;     // RESIDENT_HASHED: of the keys, ascending, in row order
    const u32* buckets;    // and where each equal part of the hash space begins in them, `[bucket_count + 1]`
    u64 count, bucket_count;
    const float* default_row;
    float* out;            // first column in the network's input
    u64 stride;            // columns of that input
    u64 keys_before;       // keys that the features before it have room for, a sample
    u64 keys_end;          // keys from here up are absent, where `has_end`
    u64 salt;              // names where tables are not all indexed
    u32 base, end;         // names where they are: number of the first row, and rows
    u32 has_end, table;
    u32 dim, width;
    u32 codec, pooling, place;
    float unit;
};

// A bag whose pooling stopped at its first missing row: `done` rows are pooled, `refs` more are in
// the ring from `first` on.
struct OpenBag { u32 feature, sample, done, first, refs; };

enum Kind { MISSING, ABSENT, KEPT };

// A lookup of a bag that waits.
struct Ref {
    u64 key;
    u32 epoch;
    u32 kind;
};

// Lookups of one bag that its table does not have, before it was left open.
struct Absents { u32 sample, count; };

struct Counts { u32 bags, refs, absents, again; };

// What the last query left open, in host memory.
struct Ring {
    Counts* counts;
    OpenBag* bags;         // `[refs_max]`
    Ref* refs;             // `[refs_max]`
    u32* kept;             // the rows of KEPT lookups, at the number of the ref: `[refs_max, kept_stride]`
    Absents* absents;      // `[features * batch_max]`
    u32* again;            // bags to ask for again: no room, or a row changed as it was added: feature, sample; `[features * batch_max, 2]`
    u32 refs_max, kept_stride;
};

struct Query {
    const Feature* features;
    const u64* keys;       // by feature, with room for the longest bags of `samples`
    const u32* offsets;    // `[features, samples + 1]`
    Ring ring;
    Counts* counts;        // the same counts while the kernel runs, in device memory; zeros between launches
    u32* blocks;           // blocks that are done; likewise
    const u32* only;       // bags to do: feature, sample; or null for all
    u32 bags;              // how many: of `only`, or samples
    u32 samples;
    u32 feature_count;
    u32 tile;              // samples of a feature that one warp takes, 32 at most
};
static_assert(sizeof(Feature) == 176 && sizeof(Query) == 120, "as kernels/src/cuda/launch.rs has them");

// The bags that the host has found the rows of. Lies in host memory, so that a recorded launch
// learns them when it runs.
struct Finish {
    const Feature* features;
    const OpenBag* bags;
    const u32* slots;      // by ref: the row in `rows`, or NO_SLOT for the default row
    const u32* rows;
    u32 count, stride;
};

#define NO_SLOT FULL
