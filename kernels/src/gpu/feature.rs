//! A sparse feature as a caller describes it, and as the kernels see it: the place of its rows,
//! their encoding, and the accesses that a kernel may make. It has one table: a column that feeds
//! several tables is as many features, with a copy of its keys each. Never launches.

use crate::cache::address::TableHasher;
use crate::cache::codec::{Codec, RowFormat};
use crate::gpu::input_type::InputType;
use crate::gpu::launch::{DeviceCacheView, DeviceFeature};
use crate::gpu::numbers::{Alignment, StorageNumber, codec_number, pooling_number};
use crate::gpu::tables::{DeviceIndex, DeviceTables, TableStorage};
use crate::lookup::Pooling;

/// One sparse feature, and the location of its vectors on the device.
pub struct FeatureOnDevice<'a> {
    /// The table's number.
    pub table: u16,
    /// The encoding of the table's rows.
    pub format: RowFormat,
    /// End of an indexed table's keys: this key and the keys above are absent.
    pub keys_end: Option<u64>,
    /// The row that is used for a key that is absent, damaged or late, `[dim]`.
    pub default_row: &'a [f32],
    /// The function that makes a vector of a bag.
    pub pooling: Pooling,
    /// Whether each row is multiplied by its key's weight. Only sums, divided or not, have weights.
    pub weighted: bool,
    /// Whether a request has one bag, and not each of its samples.
    pub shared: bool,
    /// The largest number of keys in a bag.
    pub hotness_max: usize,
    /// Device address of the network input that the feature fills, `[batch_max, stride]`. A shared
    /// feature fills a row for each request.
    pub input: u64,
    /// The type of that input. With F16, `stride`, `column` and the row's columns must be multiples
    /// of four.
    pub input_type: InputType,
    /// Columns of that input.
    pub stride: usize,
    /// First column of the feature.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// Returns the kernels' view of a feature, without the fields that depend on earlier features.
pub(crate) fn view_of(tables: &DeviceTables, feature: &FeatureOnDevice<'_>) -> DeviceFeature {
    let format = feature.format;
    assert_eq!(feature.default_row.len(), format.dim());
    assert!(feature.column + feature.width <= feature.stride);
    let rows_out = if feature.pooling == Pooling::None { feature.hotness_max } else { 1 };
    assert_eq!(feature.width, rows_out * format.dim());
    assert!(!feature.weighted || !matches!(feature.pooling, Pooling::None | Pooling::Max));
    let in_pieces = [format.dim(), feature.column, feature.stride]
        .iter()
        .all(|columns| columns.is_multiple_of(PIECE_COLUMNS));
    assert!(feature.input_type == InputType::F32 || (in_pieces && feature.input.is_multiple_of(8)));
    // A bag of at most one key without a weight is its row.
    let one_row = feature.hotness_max == 1 && !feature.weighted && feature.pooling != Pooling::Max;
    let pooling = if one_row { Pooling::None } else { feature.pooling };

    let view = DeviceFeature {
        out: address_of(feature),
        out_bytes: feature.input_type.bytes() as u32,
        stride: feature.stride as u64,
        keys_end: feature.keys_end.unwrap_or(0),
        has_end: feature.keys_end.is_some().into(),
        table: feature.table.into(),
        dim: format.dim() as u32,
        width: feature.width as u32,
        unit: format.unit(),
        codec: codec_number(format.codec()),
        pooling: pooling_number(pooling),
        weighted: feature.weighted.into(),
        ..DeviceFeature::default()
    };
    let view = match tables.storage(feature.table) {
        TableStorage::Cached(number) => view_of_cached(tables, feature, number, view),
        TableStorage::Resident(number) => view_of_resident(tables, feature, number, view),
    };
    DeviceFeature { lane_bits: lane_bits(format), aligned: alignment(feature) as u32, ..view }
}

/// Columns of a piece of a row, which a lane reads or writes together.
pub const PIECE_COLUMNS: usize = 4;

/// Returns the device address of the first column that `feature` fills.
fn address_of(feature: &FeatureOnDevice<'_>) -> u64 {
    feature.input + (feature.input_type.bytes() * feature.column) as u64
}

/// Returns the base-2 logarithm of the number of lanes that read one row together, which is 4 to
/// 32. A lane has up to four pieces (see `Code` of `pool.cuh`).
fn lane_bits(format: RowFormat) -> u32 {
    let pieces = match format.codec() {
        Codec::F32 => 1,
        Codec::F16 => 2,
        Codec::U8 | Codec::U4 => 4,
    };
    let lanes = format.dim().div_ceil(PIECE_COLUMNS * pieces);
    lanes.next_power_of_two().clamp(4, 32).trailing_zeros()
}

/// Returns the accesses of `feature` that a kernel may make 16 bytes at a time.
fn alignment(feature: &FeatureOnDevice<'_>) -> Alignment {
    let (format, codec) = (feature.format, feature.format.codec());
    let row_bytes = format.row_bytes();
    let stride = row_bytes.next_multiple_of(4);
    let is_plain = !feature.weighted && feature.pooling != Pooling::Max;
    let is_aligned = match codec {
        Codec::F32 => stride.is_multiple_of(16),
        Codec::F16 => stride.is_multiple_of(8),
        // The scale is the last word.
        Codec::U8 | Codec::U4 => row_bytes.is_multiple_of(4),
    };
    if !(format.dim().is_multiple_of(PIECE_COLUMNS) && is_aligned && is_plain) {
        return Alignment::Unaligned;
    }

    let bytes = feature.input_type.bytes();
    let is_aligned = address_of(feature).is_multiple_of(16)
        && (feature.stride * bytes).is_multiple_of(16)
        && (format.dim() * bytes).is_multiple_of(16);
    match feature.input_type {
        _ if !is_aligned => Alignment::AlignedRows,
        InputType::F32 => Alignment::AlignedF32,
        InputType::F16 => Alignment::AlignedF16,
    }
}

fn view_of_cached(
    tables: &DeviceTables,
    feature: &FeatureOnDevice<'_>,
    cache: usize,
    view: DeviceFeature,
) -> DeviceFeature {
    let (hasher, cache) = (tables.table_hasher(cache, feature.table), tables.cache_view(cache));
    assert_eq!(cache.row_bytes as usize, feature.format.row_bytes());

    let rows = cache.rows;
    let view = DeviceFeature { cache, rows, storage: StorageNumber::Cached as u32, ..view };
    match hasher {
        TableHasher::Indexed { base, end } | TableHasher::Numbered { base, end } => {
            DeviceFeature { base, end: end as u32, ..view }
        }
        TableHasher::Hashed { salt, .. } => DeviceFeature { salt, ..view },
    }
}

fn view_of_resident(
    tables: &DeviceTables,
    feature: &FeatureOnDevice<'_>,
    number: usize,
    view: DeviceFeature,
) -> DeviceFeature {
    let table = tables.resident(number);
    assert_eq!(table.row_bytes, feature.format.row_bytes());

    let view = DeviceFeature {
        cache: DeviceCacheView {
            row_bytes: table.row_bytes as u32,
            row_words: table.row_words as u32,
            ..DeviceCacheView::default()
        },
        rows: table.rows.address(),
        count: table.count as u64,
        storage: StorageNumber::Resident as u32,
        ..view
    };
    match &table.index {
        None => view,
        Some(DeviceIndex { hashes, buckets }) => DeviceFeature {
            storage: StorageNumber::ResidentHashed as u32,
            hashes: hashes.address(),
            buckets: buckets.address(),
            bucket_count: buckets.len() as u64 - 1,
            ..view
        },
    }
}
