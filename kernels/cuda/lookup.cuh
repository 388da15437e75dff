// The arguments of a lookup and its results for the host: the structures of
// kernels/src/gpu/launch.rs, field by field, and the numbers of kernels/src/gpu/numbers.rs.
#pragma once
#include "cache.cuh"

enum Codec { F32, F16, U8, U4 };
enum Pooling { SUM, MEAN, NONE, SQRTN, MAX };
enum Storage { CACHED, RESIDENT, RESIDENT_HASHED };

// The accesses that a feature's alignment allows. ALIGNED_ROWS: a lane loads each piece of a row,
// and the row's scale, with aligned loads. All columns are then in whole pieces, the bags have no
// weights, and they are not pooled by MAX. ALIGNED_F32 and ALIGNED_F16 also mean that a lane stores
// such columns with aligned stores of 16 bytes.
enum Alignment { UNALIGNED, ALIGNED_ROWS, ALIGNED_F32, ALIGNED_F16 };

// One sparse feature. It is the same for every request of a worker.
struct Feature {
    Cache cache;           // CACHED; of a resident table the shape of its rows
    const u32* rows;       // all rows of the cache or of the resident table
    const u64* hashes;     // RESIDENT_HASHED: of the keys, ascending, in row order
    const u32* buckets;    // first row of each equal part of the hash space, `[bucket_count + 1]`
    u64 count;
    u64 bucket_count;
    const float* default_row;
    u8* out;               // first column in the network's input
    u64 stride;            // columns of that input
    u64 keys_before;       // keys of one sample for which the earlier features have room
    u64 weights_before;    // likewise weights
    u64 keys_end;          // keys from here up are absent, if `has_end`
    u64 salt;              // of the hash, if not all tables are indexed
    u32 base;              // if they are: number of the first row,
    u32 end;               // and number of rows
    u32 has_end;
    u32 table;
    u32 dim;
    u32 width;
    u32 codec;
    u32 pooling;           // NONE also if no bag has more than one key
    u32 storage;
    float unit;
    u32 lane_bits;         // a row is read by 1 << lane_bits lanes, 32 at most
    u32 aligned;           // an Alignment
    u32 weighted;          // whether each row is multiplied by its key's weight
    u32 out_bytes;         // of a column of that input: 4 is f32, 2 is f16
};

// A bag whose pooling stopped at its first missing row: `pooled` rows are added, and `entries` more
// are in the ring from `first` on.
struct OpenBag {
    u32 feature;
    u32 sample;
    u32 pooled;
    u32 first;
    u32 entries;
    u32 weights;           // number of the bag's first weight, if it has weights
};

enum EntryKind { MISSING, ABSENT, HIT };

// One lookup of an open bag.
struct Entry {
    u64 key;
    u32 epoch;
    u32 kind;
};

// The number of lookups of one whole bag whose keys the table does not have.
struct AbsentCount {
    u32 feature;
    u32 sample;
    u32 count;
};

struct BagNumber {
    u32 feature;
    u32 sample;
};

struct RingCounts {
    u32 bags;
    u32 entries;
    u32 absents;
    u32 requeries;
};

// The bags that the last query left open, in host memory.
struct MissRing {
    RingCounts* counts;
    OpenBag* bags;         // `[entries_max]`
    Entry* entries;        // `[entries_max]`
    u32* hit_rows;         // of HIT entries, by entry number: `[entries_max, hit_stride]`
    AbsentCount* absents;  // `[features * batch_max]`
    // Bags to query again, because the ring was full: `[features * batch_max]`.
    BagNumber* requeries;
    u32 entries_max;
    u32 hit_stride;
};

// A sample's number is that of a request in the bags of shared features, which a request has once.
struct Query {
    const Feature* features;  // the shared ones last
    const u64* keys;       // by feature, with room for the longest bags of `samples`
    const u32* offsets;    // `[features, samples + 1]`
    const float* weights;  // by feature with weights, in the order of the keys
    MissRing ring;
    RingCounts* counts;    // counts in device memory while the kernel runs; zeros between launches
    u32* blocks_done;      // likewise
    const BagNumber* only; // the bags to query, each a tile; null for all
    u32 samples;
    u32 tile;              // samples of one feature that one warp takes, 32 at most
    u32 tiles_each;        // tiles of one feature that is not shared
    u32 tiles;
    u32 own_features;      // features that are not shared
    u32 own_tiles;         // their tiles
    u32 requests;          // bags of a shared feature
    u32 request_tiles;     // tiles of one shared feature
};

// The open bags, after the host has read their rows. The structure is in host memory, so that a
// recorded launch reads it when it runs.
struct FinishBags {
    const Feature* features;
    const OpenBag* bags;
    const u32* slots;      // by entry: the row in `rows`, or NO_SLOT for the default row
    const u32* rows;
    const float* weights;
    u32 count;
    u32 stride;
};

static_assert(sizeof(Feature) == 200 && sizeof(Query) == 144 && sizeof(FinishBags) == 48,
              "kernels/src/gpu/launch.rs has the same structures");
static_assert(sizeof(OpenBag) == 24 && sizeof(Entry) == 16 && sizeof(RingCounts) == 16,
              "kernels/src/gpu/launch.rs has the same structures");
