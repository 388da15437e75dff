//! Every maximum of the `hatchback` program that is not the runtime's own. The runtime's are in
//! `hatchback::limits`.

/// Largest size that a flag in MiB takes: 1 PiB.
pub(crate) const MIB_MAX: f64 = (1u64 << 30) as f64;
/// Longest time that a flag in seconds takes: about eleven days.
pub(crate) const SECONDS_MAX: f64 = 1e6;
/// Longest time that a flag in days takes: a hundred years.
pub(crate) const DAYS_MAX: u64 = 36_500;

/// Columns of a printed table.
pub(crate) const COLUMNS_MAX: u16 = 100;
/// Days before the root expires from which on `publish` asks for a rotation.
pub(crate) const ROOT_DAYS_MIN: u64 = 60;

/// Rounds of PBKDF2 of an encrypted key: each takes a quarter of a microsecond.
pub(crate) const PBKDF2_ROUNDS_MAX: u32 = 10_000_000;

/// Largest header of a trainer's file, in bytes. A length above it is damage.
pub(crate) const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest text header of an `.npy` file, in bytes: NumPy's own limit (`max_header_size`). The
/// header of a plain array takes 54 to 118.
pub(crate) const NPY_HEADER_BYTES_MAX: u64 = 10_000;
/// Characters of a trainer's file that an error message repeats.
pub(crate) const MESSAGE_CHARS_MAX: usize = 300;

/// Temporary files over which a sort spreads rows in one pass. Rows that need more files are spread
/// in several passes.
pub(crate) const SORT_PARTITIONS_MAX: u64 = 128;

/// Difference of a probe score from the recorded one that `pack` allows, as `targets/base.toml`
/// does for a release in a car.
pub(crate) const PROBE_DIFFERENCE_MAX: f32 = 0.02;

/// Longest plotted line, in points, that has a dot at each point.
pub(crate) const PLOT_DOTS_MAX: usize = 24;

/// Bytes of a window's `window.json`.
pub(crate) const WINDOW_HEAD_BYTES_MAX: u64 = 1 << 20;
/// Rows of one table in one window.
pub(crate) const WINDOW_ROWS_MAX: u64 = 1 << 31;
/// Keys without a row that a window may leave below the new rows of an index table.
pub(crate) const GROWTH_GAP_MAX: u64 = 1 << 20;
