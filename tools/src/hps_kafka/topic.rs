//! The topic of a table and the partition of a key, as HugeCTR's producer chooses them. The
//! messages of one key are in order only within their partition.

use hatchback::limits::NAME_BYTES_MAX;

/// Prefix of every topic of rows.
const PREFIX: &str = "hps_et";

/// Why a name cannot be part of a topic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("topic: {part} is `{name}`, not 1 to {NAME_BYTES_MAX} of [A-Za-z0-9_-]")]
pub struct TopicError {
    /// `model` or `table`.
    pub part: &'static str,
    /// The name.
    pub name: String,
}

/// Returns the topic of `table` of `model`.
///
/// # Errors
/// [`TopicError`] if HugeCTR would refuse a name.
pub fn topic_name(model: &str, table: &str) -> Result<String, TopicError> {
    for (part, name) in [("model", model), ("table", table)] {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
            return Err(TopicError { part, name: name.escape_debug().to_string() });
        }
    }
    Ok(format!("{PREFIX}.{model}.{table}"))
}

/// Returns the hash that spreads keys over partitions (rrxmrrxmsx_0).
fn hash(key: u64) -> u64 {
    let mut x = key;
    x ^= x.rotate_right(25) ^ x.rotate_right(50);
    x = x.wrapping_mul(0xa24b_aed4_963e_e407);
    x ^= x.rotate_right(24) ^ x.rotate_right(49);
    x = x.wrapping_mul(0x9fb2_1c65_1e98_df25);
    x ^ (x >> 28)
}

/// Returns the partition of `key` among `partitions`.
///
/// # Panics
/// If there are no partitions.
pub fn partition_of(key: u64, partitions: u64) -> u64 {
    hash(key) % partitions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_and_partitions_are_those_of_hugectr() {
        for (key, expected, partition) in [
            (1, 0x0dad_bfee_b7d6_4133, 3),
            (2, 0x90ae_ea20_4343_5d3e, 6),
            (3, 0x27c6_40c5_3309_12d0, 0),
            (42, 0x7e54_08d0_aa97_9155, 5),
            (1000, 0x3b1e_3778_bd1c_f415, 5),
            (u64::MAX, 0xe398_180a_dc04_d6fc, 4),
        ] {
            assert_eq!((hash(key), partition_of(key, 8)), (expected, partition), "key {key}");
        }
    }

    #[test]
    fn names_are_those_that_hugectr_accepts() {
        assert_eq!(topic_name("dlrm", "item_1-a").unwrap(), "hps_et.dlrm.item_1-a");
        for name in ["", "a.b", "ü", &"x".repeat(121)] {
            assert_eq!(topic_name("m", name).unwrap_err().part, "table");
            assert_eq!(topic_name(name, "t").unwrap_err().part, "model");
        }
    }
}
