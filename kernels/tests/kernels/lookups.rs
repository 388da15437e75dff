//! The cache and the counts of lookups through their public calls.

use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey, unmix};
use hatchback_kernels::cache::codec::{Codec, RowFormat};
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{Bags, FeatureView, Input, LookupStatus, Pooling, RowStore};
use hatchback_kernels::simd::isa::Isa;

/// Two rows of one set whose tags differ in one bit, low or high, are two rows.
#[test]
fn every_bit_of_a_wide_tag_counts() {
    let cache = Cache::new(8, 1 << 16, &KeySpaces::new(vec![None])).unwrap();
    let salt = unmix(RowKey { table: 0, key: 0 }.hash());
    let row = |hash| RowKey { table: 0, key: unmix(hash) ^ salt };
    // The upper bits of a hash choose the set, and the others are the tag.
    for (n, bit) in (0..48).enumerate() {
        let hash = (n as u64) << 52 | 0x5_5555_5555_5555;
        let (inside, outside) = (row(hash), row(hash ^ 1 << bit));
        assert!(cache.insert(inside, &[7; 8], cache.epoch(inside)));
        assert!(cache.query(inside, &mut [0; 8]), "bit {bit}");
        assert!(!cache.query(outside, &mut [0; 8]), "bit {bit}");
    }
}

#[test]
fn a_sum_of_statuses_has_every_count() {
    let one = LookupStatus { fresh: 1, defaulted: 2, absent: 3, damaged: 4, late: true };
    let mut sum = LookupStatus::default();
    sum.add(&one);
    sum.add(&LookupStatus { late: false, ..one });
    let expected = LookupStatus { fresh: 2, defaulted: 4, absent: 6, damaged: 8, late: true };
    assert_eq!((sum, sum.lookups()), (expected, 20));
}

/// A mean divides by the sum of the weights, and a square root by that of their squares. Weights
/// whose divisor is zero give zeros.
#[test]
fn weights_without_a_sum_give_zeros() {
    let rows: Vec<u8> =
        [1f32, 2.0, 3.0, 5.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let table = Resident::indexed(8, &rows);
    for (pooling, weights) in [(Pooling::Mean, [1.0, -1.0]), (Pooling::Sqrtn, [0.0, 0.0])] {
        let feature = FeatureView {
            id: 0,
            table: 0,
            format: RowFormat::new(Codec::F32, 2, 0).unwrap(),
            keys_end: Some(2),
            default_row: &[0.0; 2],
            pooling,
            rows: RowStore::Resident(&table),
            column: 0,
            width: 2,
        };
        let bags = Bags { weights: &weights, ..Bags::new(&[0, 1], &[0, 2]) };
        let (mut data, mut statuses) = ([7.0; 2], [LookupStatus::default()]);
        let mut input = Input { data: &mut data, stride: 2 };
        let mut misses = MissList::new(2, 8);
        feature.query(Isa::detect(), bags, 0, &mut input, &mut misses, &mut statuses);
        assert_eq!((data, statuses[0].fresh), ([0.0; 2], 2), "{pooling:?}");
    }
}

/// Missing rows with equal keys in two tables are two rows, in however short a miss list they meet.
#[test]
fn missing_rows_of_two_tables_are_never_one() {
    let cache = Cache::new(8, 1 << 16, &KeySpaces::new(vec![None, None])).unwrap();
    let feature = |table| FeatureView {
        id: table,
        table,
        format: RowFormat::new(Codec::F32, 2, 0).unwrap(),
        keys_end: None,
        default_row: &[0.0; 2],
        pooling: Pooling::Sum,
        rows: RowStore::Cached(&cache),
        column: 2 * usize::from(table),
        width: 2,
    };
    for key in 0..100 {
        let (mut data, mut statuses) = ([7.0; 4], [LookupStatus::default()]);
        let mut misses = MissList::new(2, 8);
        for table in 0..2 {
            let mut input = Input { data: &mut data, stride: 4 };
            let bags = Bags::new(std::slice::from_ref(&key), &[0, 1]);
            feature(table).query(Isa::detect(), bags, 0, &mut input, &mut misses, &mut statuses);
        }
        let tables: Vec<u16> = misses.list().iter().map(|miss| miss.row.table).collect();
        assert_eq!(tables, [0, 1], "key {key}");
    }
}

#[test]
fn a_row_that_is_no_number_is_not_encoded() {
    for codec in [Codec::F32, Codec::F16, Codec::U8] {
        let format = RowFormat::new(codec, 2, 0).unwrap();
        let mut row = vec![0; format.row_bytes()];
        assert!(format.encode(&[1.0, f32::INFINITY], &mut row).is_err(), "{codec:?}");
        assert!(format.encode(&[f32::NAN, 1.0], &mut row).is_err(), "{codec:?}");
    }
}
