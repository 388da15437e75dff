//! Every maximum of the runtime, in one place, cross-checked at compile time.

use hatchback_kernels::cache::codec::ROW_BYTES_MAX;

/// Bytes of a page: the unit of every read from flash and of every checksum in a segment.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a page before its payload.
pub const PAGE_HEADER_BYTES: usize = 16;
/// Raw bytes of a chunk of a bundle; the last chunk of a blob may be shorter.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of an encoded manifest.
pub const MANIFEST_BYTES_MAX: usize = 64 << 20;
/// Bytes of the dense network's ONNX file.
pub const DENSE_BYTES_MAX: u64 = 256 << 20;
/// Bytes of an encoded probe set.
pub const PROBE_BYTES_MAX: u64 = 64 << 20;
/// Keys of one table's hot list.
pub const HOT_KEYS_MAX: usize = 1 << 22;
/// A table's most used rows may lie on flash a second time, packed together: one row in so many at
/// most, so that the index of their keys stays under 1.3 bits for each key of the table...
pub const PLACED_ONE_IN: u64 = 100;
/// ...or this many, in a small table.
pub const PLACED_ROWS_MIN: u64 = 256;
/// Tables in a model.
pub const TABLES_MAX: usize = 4096;
/// Sparse features in a model.
pub const FEATURES_MAX: usize = 4096;
/// Dense features in a model.
pub const DENSE_FEATURES_MAX: usize = 1 << 16;
/// Values in a row.
pub const DIM_MAX: usize = 4096;
/// Keys of one feature in one sample.
pub const HOTNESS_MAX: usize = 4096;
/// Values a sample of one input of the dense network.
pub const INPUT_WIDTH_MAX: usize = 1 << 20;
/// Samples in one request.
pub const BATCH_MAX: usize = 1 << 16;
/// Bytes of a name (model, table, feature, network input).
pub const NAME_BYTES_MAX: usize = 120;
/// Requests of one model that are waiting or being served at once.
pub const SLOTS_MAX: usize = 1024;
/// Keys of one model that wait to be prefetched.
pub const PREFETCH_MAX: usize = 4096;
/// Keys that one worker remembers as not in their tables.
pub const ABSENT_MAX: usize = 4096;
/// Bytes of one sample as JSON.
pub const SAMPLE_BYTES_MAX: usize = 16 << 20;
/// Bytes of signed metadata that are read from a link, by role.
pub const ROOT_BYTES_MAX: u64 = 512 << 10;
/// As above, the timestamp.
pub const TIMESTAMP_BYTES_MAX: u64 = 16 << 10;
/// As above, the snapshot.
pub const SNAPSHOT_BYTES_MAX: u64 = 2 << 20;
/// As above, the targets.
pub const TARGETS_BYTES_MAX: u64 = 5 << 20;
/// Root versions that one refresh takes up.
pub const ROTATIONS_MAX: u32 = 256;
/// Seconds by which the car's clock may be behind the newest signed time.
pub const CLOCK_SLACK_S: u64 = 3600;
/// Starts with a release that may end without an end in good order before it is taken back.
pub const STARTS_MAX: u32 = 5;
/// Times that an object is asked for again from where it broke off.
pub const BREAKS_MAX: u32 = 64;
/// Times in a row of those that may bring nothing.
pub const STALLS_MAX: u32 = 1;

const _: () = assert!(CHUNK_BYTES.is_multiple_of(PAGE_BYTES), "a chunk holds whole pages");
const _: () = assert!(
    PAGE_HEADER_BYTES + 8 + ROW_BYTES_MAX <= PAGE_BYTES,
    "a page holds a key and the widest row"
);
const _: () = assert!(
    TABLES_MAX <= u16::MAX as usize && FEATURES_MAX <= u16::MAX as usize,
    "u16 numbers them"
);
const _: () =
    assert!((BATCH_MAX * HOTNESS_MAX) as u64 <= u32::MAX as u64, "u32 offsets hold a batch");
