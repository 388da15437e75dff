//! Every maximum of the runtime, checked against the others at compile time. A maximum of the
//! kernels or of a program is in the `limits.rs` of its own crate.

use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use std::time::Duration;

// Models.

/// Tables in a model.
pub const TABLES_MAX: usize = 4096;
/// Sparse features in a model.
pub const FEATURES_MAX: usize = 4096;
/// Lookups of sparse features in tables. A model of fields that meet in pairs has the square of
/// their number.
pub const LOOKUPS_MAX: usize = 4096;
/// Dense features in a model.
pub const DENSE_FEATURES_MAX: usize = 1 << 16;
/// Values in a row.
pub const DIM_MAX: usize = 4096;
/// Keys of one feature in one sample.
pub const HOTNESS_MAX: usize = 4096;
/// Values per sample in one input of the dense network.
pub const INPUT_WIDTH_MAX: usize = 1 << 20;
/// Bytes of a name (model, table, feature, network input).
pub const NAME_BYTES_MAX: usize = 120;
/// Lookups and features that all inputs of the dense network list together.
pub const INPUT_FEATURES_MAX: usize = 1 << 16;
/// Outputs of the dense network.
pub const OUTPUTS_MAX: usize = 256;
/// Bytes of a raw value that is a text.
pub const RAW_BYTES_MAX: usize = 1024;
/// Bytes of a caller's text in a message.
pub const SHORTENED_BYTES_MAX: usize = 128;
/// Bytes of the words and keys of one vocabulary. The manifest of each release holds all of it.
pub const VOCABULARY_BYTES_MAX: usize = 16 << 20;
/// Boundaries between buckets of numbers.
pub const BOUNDARIES_MAX: usize = 1 << 16;
/// Columns of a cross.
pub const CROSS_COLUMNS_MAX: usize = 8;
/// Bytes of one sample as JSON.
pub const SAMPLE_BYTES_MAX: usize = 16 << 20;

// Requests.

/// Samples in one request.
pub const BATCH_MAX: usize = 1 << 16;
/// Request slots of one model: requests that wait or are served at the same time.
pub const SLOTS_MAX: usize = 1024;
/// Keys in the prefetch queue of one model.
pub const PREFETCH_MAX: usize = 4096;
/// Keys in the negative cache of one worker.
pub const NEGATIVE_CACHE_KEYS_MAX: usize = 4096;
/// Absolute difference that narrow weights of the dense network may make to a score, when `pack`
/// chooses them.
pub const SCORE_DIFFERENCE_MAX: f32 = 1e-3;
/// Samples of the probe set on which the forms of the weights, and the engines of a GPU, are
/// compared. They are enough to detect a network that does not tolerate fewer bits.
pub const PROBE_INPUTS_MAX: usize = 512;
/// Time after its deadline within which a request is answered, µs: with scores, or with the error
/// that the deadline is exceeded. Delays of the system's scheduler are not included.
pub const DEADLINE_GRACE_US: u64 = 1_000;
/// Time after its deadline for which a caller waits for scores, µs. The rest of the grace is for
/// the return to the caller.
pub const DEADLINE_WAIT_US: u64 = 500;
/// Longest expected time of a request that is scored on its caller's thread, µs. Longer ones go to
/// a worker, so that the caller's other requests keep their deadlines.
pub const CALLER_SCORE_US_MAX: u64 = 200;

// Bundles and the flash tier.

/// Bytes of a page: the unit of every read from flash and of every checksum in a segment.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a page before its payload.
pub const PAGE_HEADER_BYTES: usize = 16;
/// Uncompressed bytes of a chunk of a bundle; the last chunk of a blob may be shorter.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of an encoded manifest.
pub const MANIFEST_BYTES_MAX: usize = 64 << 20;
/// Bytes of the dense network's ONNX file.
pub const DENSE_BYTES_MAX: u64 = 256 << 20;
/// Bytes of an encoded probe set.
pub const PROBE_BYTES_MAX: u64 = 64 << 20;
/// Keys of one table's hot list.
pub const HOT_KEYS_MAX: usize = 1 << 22;
/// Deltas over one base. Compaction merges deltas long before this is reached.
pub const DELTAS_MAX: usize = 64;
/// Overlays of a table. A lookup has one CPU cache miss in each overlay; these misses overlap.
pub const OVERLAYS_MAX: usize = 8;
/// Pages of one delta.
pub const DELTA_PAGES_MAX: u32 = 1 << 24;
/// Bytes of one copy of the live record.
pub const LIVE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of one table's hot list.
pub const HOT_BYTES_MAX: u64 = HOT_KEYS_MAX as u64 * 8;
/// Threads that read pages where io_uring is not available. More threads do not keep the device
/// busier.
pub const READ_THREADS_MAX: usize = 16;
/// Page reads that a background thread has in flight. A request's read waits for at most these.
pub const BACKGROUND_READS_MAX: usize = 1;
/// Bytes of a bundle that an install checks and writes between two pauses. Whole pages.
pub const INSTALL_PIECE_BYTES: usize = 8 * PAGE_BYTES;
/// Files that an install writes before it makes them durable together.
pub const UNSYNCED_FILES_MAX: usize = 32;
/// Files of a bundle that an install makes durable one by one, at most. The device flushes its
/// cache for each. For more files one sync of the file system is faster.
pub const SYNCED_FILES_MAX: usize = 256;
/// Longest single wait for io_uring. The kernel refuses times that its own clock cannot hold.
pub const URING_WAIT_MAX: Duration = Duration::from_secs(1 << 30);

// Maintenance.

/// Damaged pages that one scrub lists. The next scrub lists the rest, after these are repaired.
pub const DAMAGE_MAX: usize = 1024;
/// Quarantined catalogs that are kept for inspection.
pub const QUARANTINED_CATALOGS_MAX: usize = 2;
/// Longest step of maintenance work: a caller that stops the work waits no longer than this.
pub const MAINTENANCE_STEP_MAX: Duration = Duration::from_millis(20);
/// Pages of one step of maintenance work.
pub const MAINTENANCE_PAGES_MAX: u64 = 256;
/// Pages that a check of a segment reads at a time: a mebibyte, for the device's sequential rate.
pub const VERIFY_PAGES: usize = 256;
/// Longest time between two steps that counts as elapsed time for the wear budget.
pub const CLOCK_STEP_MAX: Duration = Duration::from_secs(60 * 60);

// Updates.

/// Bytes of signed root metadata that are read from a link.
pub const ROOT_BYTES_MAX: u64 = 512 << 10;
/// Bytes of signed timestamp metadata that are read from a link.
pub const TIMESTAMP_BYTES_MAX: u64 = 16 << 10;
/// Bytes of signed snapshot metadata that are read from a link.
pub const SNAPSHOT_BYTES_MAX: u64 = 2 << 20;
/// Bytes of signed targets metadata that are read from a link.
pub const TARGETS_BYTES_MAX: u64 = 5 << 20;
/// Root versions that one refresh follows.
pub const ROTATIONS_MAX: u32 = 256;
/// Seconds by which the car's clock may be behind the newest signed time.
pub const CLOCK_SLACK_S: u64 = 3600;
/// Trials of a release in a row that a crash of the process may end. A trial begins before the
/// release's code runs and ends with its probe or its first answers.
pub const TRIALS_MAX: u32 = 5;
/// Trials of a release in a row that a restart of the machine may end. A release that resets the
/// machine at every start is thus rejected after some starts.
pub const TRIAL_CUTS_MAX: u32 = 30;
/// Answers after which a trial counts as passed.
pub const TRIAL_ANSWERS: u64 = 1;
/// Age of a process, in seconds, at which a trial without requests counts as passed.
pub const TRIAL_S: u64 = 60;
/// Looks of a `Follower` at the directory for which it does not retry a generation that it refused.
pub const REFUSED_LOOKS: u32 = 60;
/// Steps in a row that may fail through a fault of the car before the attempt is abandoned.
pub const FAILED_STEPS_MAX: u32 = 30;
/// Longest pause, in seconds, before a retry of a release that a fault of the car stopped.
pub const RETRY_S_MAX: u64 = 24 * 3600;
/// Rejected releases that the serving process remembers.
pub const REFUSED_MAX: usize = 64;
/// Needs that a release may have: formats, operators and sizes.
pub const NEEDS_MAX: usize = 512;
/// Bundles for one generation, each for programs of other versions.
pub const VARIANTS_MAX: u8 = 8;
/// Releases whose failed fetches the sync process remembers.
pub const SET_ASIDE_MAX: usize = 64;
/// Failures after which other releases are preferred to one: a failure of its own counts twice, a
/// fetch that the link ended without progress once.
pub const FETCH_FAILURES_MAX: u32 = 4;
/// Polls for which a release is set aside at most.
pub const SET_ASIDE_POLLS_MAX: u32 = 64;
/// Bytes of a reason in the status of an update.
pub const NOTE_BYTES_MAX: usize = 1024;
/// Attempts of a release that faults of the car ended, after which another path is preferred.
pub const ATTEMPTS_MAX: u32 = 4;
/// Releases of which the car remembers such attempts.
pub const ATTEMPTED_MAX: usize = 8;
/// Bytes of the fields that later formats may append to a record, each as short as it can be.
pub const APPENDED_BYTES_MAX: usize = 256;
/// Bytes of a status record of an update.
pub const STATUS_BYTES_MAX: u64 = 256 << 10;
/// Bytes of the record of the newest accepted root and targets.
pub const TRUST_BYTES_MAX: u64 = ROOT_BYTES_MAX + 1024;
/// Bytes of a copy of the rollback floor.
pub const FLOOR_BYTES_MAX: u64 = 1024;
/// Times that the fetch of one object is resumed after the link broke.
pub const BREAKS_MAX: u32 = 64;
/// Resumed fetches in a row that may deliver no byte.
pub const STALLS_MAX: u32 = 1;
/// Steps of an update that its status keeps.
pub const HISTORY_MAX: usize = 64;
/// Bytes of cache of the model that a probe opens: a probe reads few rows.
pub const PROBE_CACHE_BYTES_MAX: u64 = 8 << 20;
/// Times that a flash directory that changes is read without its lock.
pub const SETTLED_READS_MAX: u32 = 8;

// Targets.

/// Target files in one chain of `inherits`.
pub const INHERIT_MAX: usize = 8;
/// Minutes between two polls: a week, because a car that does not poll never updates.
pub const POLL_MINUTES_MAX: u32 = 7 * 24 * 60;
/// The longest time until the next poll after one that failed.
pub const POLL_RETRY_MAX: Duration = Duration::from_secs(300);
/// Highest real-time priority of the daemon. A real-time kernel handles interrupts at 50; a busy
/// daemon above that would block flash and network.
pub const REALTIME_PRIORITY_MAX: u8 = 49;
/// CPUs in an affinity mask of Linux.
pub const CPUS_MAX: u16 = 1024;

const _: () = assert!(CHUNK_BYTES.is_multiple_of(PAGE_BYTES), "a chunk holds whole pages");
const _: () = assert!(
    PAGE_HEADER_BYTES + 8 + ROW_BYTES_MAX <= PAGE_BYTES,
    "a page holds a key and the widest row"
);
const _: () = assert!(
    TABLES_MAX <= u16::MAX as usize && FEATURES_MAX <= LOOKUPS_MAX,
    "u16 numbers tables, and every feature has a lookup"
);
const _: () = assert!(
    LOOKUPS_MAX <= u16::MAX as usize && LOOKUPS_MAX <= INPUT_FEATURES_MAX,
    "u16 numbers lookups, and each feeds an input"
);
const _: () =
    assert!((BATCH_MAX * HOTNESS_MAX) as u64 <= u32::MAX as u64, "u32 offsets hold a batch");
const _: () = assert!(SLOTS_MAX <= u16::MAX as usize, "u16 numbers the slots");
const _: () = assert!(DELTA_PAGES_MAX <= 1 << 24, "a page of a delta has a number of 24 bits");
const _: () = assert!(DEADLINE_WAIT_US < DEADLINE_GRACE_US);
const _: () = assert!(CALLER_SCORE_US_MAX < DEADLINE_GRACE_US - DEADLINE_WAIT_US);
