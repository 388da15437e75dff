//! The address of a row in a set-associative cache: the number of a set, and a *tag* that is unique
//! within the set. Set and tag together are a bijection of (table, key). Equal tags in one set
//! therefore mean equal rows, and no key has to be compared after a tag has matched.
//!
//! A tag has 32 bits if every table is indexed and all rows can be numbered in 32 bits, else 64.
//! A cache with a slot for every row needs no hash: a row's number gives its slot.
//! This file computes addresses. It never reads or writes a set.

use crate::cache::eviction::WAYS;

/// The identity of a row: its table and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// Index of the table in the model.
    pub table: u16,
    /// The key within the table.
    pub key: u64,
}

impl RowKey {
    /// Returns a 64-bit hash: the key is combined with the table's salt and mixed with
    /// MurmurHash3's finalizer.
    #[inline(always)]
    pub fn hash(self) -> u64 {
        mix(self.key ^ salt(self.table))
    }
}

/// Returns the salt of `table`, by which equal keys of different tables get different hashes.
#[inline(always)]
fn salt(table: u16) -> u64 {
    (u64::from(table) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Mixes 64 bits bijectively (MurmurHash3's `fmix64`): equal hashes mean equal keys.
#[inline(always)]
pub fn mix(key: u64) -> u64 {
    let mut h = key;
    h = (h ^ (h >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ (h >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// Returns the key of which `hash` is the [`mix`].
pub fn unmix(hash: u64) -> u64 {
    let mut h = hash ^ (hash >> 33);
    h = h.wrapping_mul(0x9cb4_b2f8_1293_37db);
    h = (h ^ (h >> 33)).wrapping_mul(0x4f74_430c_22a5_4005);
    h ^ (h >> 33)
}

/// Mixes 32 bits bijectively and maps 0 to 0 (MurmurHash3's `fmix32`).
#[inline(always)]
fn mix_32(key: u32) -> u32 {
    let mut h = key;
    h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// Returns the key of which `hash` is the `mix_32`.
fn unmix_32(hash: u32) -> u32 {
    let mut h = hash ^ (hash >> 16);
    h = h.wrapping_mul(0x7ed1_b41d);
    h ^= (h >> 13) ^ (h >> 26);
    h = h.wrapping_mul(0xa5cb_9243);
    h ^ (h >> 16)
}

/// The keys that a cache may hold: the tables that it serves, and the number of keys of each
/// indexed table.
#[derive(Clone, Debug)]
pub struct KeySpaces {
    /// The end of the index keys of each table of the model. `None` if the table's keys are sparse,
    /// `Some(0)` if the cache does not serve the table.
    ends: Vec<Option<u64>>,
}

impl KeySpaces {
    /// Creates the key spaces of a model. `ends` `[tables]` holds the end of each table's index
    /// keys: `None` if any 64-bit number may be a key, `Some(0)` if the cache does not serve the
    /// table.
    pub fn new(ends: Vec<Option<u64>>) -> Self {
        Self { ends }
    }

    /// Returns the end of a table's index keys.
    #[cfg(test)]
    pub(crate) fn end(&self, table: u16) -> Option<u64> {
        self.ends[usize::from(table)]
    }

    /// Returns the number of the first row of each table, and the end of the last table, `[tables +
    /// 1]`. Rows are numbered from 1 across all tables. Returns `None` if a table is sparse or 32
    /// bits are too few.
    fn bases(&self) -> Option<Box<[u32]>> {
        let mut bases = vec![1u32];
        for end in &self.ends {
            let base = u64::from(*bases.last()?).checked_add((*end)?)?;
            bases.push(u32::try_from(base).ok()?);
        }
        Some(bases.into())
    }

    /// Returns the number of bits that hold a table's number, counted from 1.
    fn table_bits(&self) -> u32 {
        usize::BITS - self.ends.len().leading_zeros()
    }

    /// Returns the smallest number of sets with which set and tag are a bijection of the row.
    pub(crate) fn sets_min(&self) -> usize {
        if self.bases().is_some() { 1 } else { 1 << self.table_bits() }
    }

    /// Returns the number of sets with a slot for every row; `None` if the rows cannot be numbered.
    pub(crate) fn sets_of_all_rows(&self) -> Option<usize> {
        let rows = *self.bases()?.last()? as usize - 1;
        Some(rows.div_ceil(WAYS).max(1))
    }

    /// Returns whether a tag has 32 bits.
    pub fn is_narrow(&self) -> bool {
        self.bases().is_some()
    }
}

/// The hash function of one table, which maps a key to a set and a tag.
#[derive(Clone, Copy)]
pub(crate) enum TableHasher {
    Indexed { base: u32, end: u64 },
    Numbered { base: u32, end: u64 },
    Hashed { salt: u64, table_bits: u32, table: u64 },
}

/// The address of a row: its set, and the tag that identifies the row within the set. No row has
/// tag 0.
#[derive(Clone, Copy, Default)]
pub(crate) struct SetTag {
    pub set: u32,
    pub tag: u64,
}

/// The slots of a table whose rows are stored in the order of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableSlots {
    /// The slot of key 0.
    pub first: u32,
    /// The number of rows.
    pub rows: u64,
}

impl TableSlots {
    /// The slot of a key that the table does not have. No cache has so many slots.
    pub const NO_SLOT: u32 = u32::MAX;

    /// Returns the slot of `key`, or `NO_SLOT` if the table does not have the key.
    #[inline(always)]
    pub fn slot(self, key: u64) -> u32 {
        if key < self.rows { self.first.wrapping_add(key as u32) } else { Self::NO_SLOT }
    }
}

/// The addresses of all rows in a cache with a fixed number of sets.
pub(crate) struct AddressMap {
    tables: Tables,
    sets: usize,
}

enum Tables {
    /// A tag is `mix_32` of the row's number among all rows. `bases` holds each table's first
    /// number.
    Indexed { bases: Box<[u32]> },
    /// Every row has a slot: row 1 the first, row 2 the second. A tag is the row's number among all
    /// rows. `bases` holds each table's first number.
    Numbered { bases: Box<[u32]> },
    /// A tag holds the low bits of the hash above the table's number, counted from 1.
    Hashed { table_bits: u32 },
}

impl AddressMap {
    /// Creates the map of a cache of `sets` sets, at least `spaces.sets_min()`.
    pub fn new(spaces: &KeySpaces, sets: usize) -> Self {
        let tables = match spaces.bases() {
            Some(bases) => Tables::Indexed { bases },
            None => Tables::Hashed { table_bits: spaces.table_bits() },
        };
        Self { tables, sets }
    }

    /// Creates the map of a cache with a slot for every row. Returns `None` if the rows cannot be
    /// numbered.
    pub fn of_all_rows(spaces: &KeySpaces) -> Option<Self> {
        let (bases, sets) = (spaces.bases()?, spaces.sets_of_all_rows()?);
        Some(Self { tables: Tables::Numbered { bases }, sets })
    }

    /// Returns the way of the row with this tag, if every row has a slot of its own.
    pub fn fixed_way(&self, tag: u64) -> Option<u32> {
        let numbered = matches!(self.tables, Tables::Numbered { .. });
        numbered.then(|| (tag.saturating_sub(1) % WAYS as u64) as u32)
    }

    /// Returns the slots of the rows of `table`, if every row has a slot of its own.
    #[inline(always)]
    pub fn slots_of(&self, table: u16) -> Option<TableSlots> {
        match self.table_hasher(table) {
            TableHasher::Numbered { base, end } => {
                Some(TableSlots { first: base.saturating_sub(1), rows: end })
            }
            _ => None,
        }
    }

    /// Returns the number of sets.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// Returns a 16-bit fingerprint of `tag`, never 0. Different tags of one set mostly have
    /// different fingerprints.
    pub fn fingerprint(&self, tag: u64) -> u16 {
        let hash = match &self.tables {
            Tables::Indexed { .. } | Tables::Numbered { .. } => tag,
            // The low bits are the table's number, which many rows of a set have in common.
            Tables::Hashed { table_bits } => tag >> table_bits,
        };
        (hash as u16).max(1)
    }

    /// Returns the hash function of `table`.
    #[inline(always)]
    pub fn table_hasher(&self, table: u16) -> TableHasher {
        let numbers = |bases: &[u32]| match bases.get(usize::from(table)..usize::from(table) + 2) {
            Some(&[base, next]) => (base, u64::from(next - base)),
            // A table that the cache does not know has no keys, so each of its keys is absent.
            _ => (0, 0),
        };
        match &self.tables {
            Tables::Indexed { bases } => {
                let (base, end) = numbers(bases);
                TableHasher::Indexed { base, end }
            }
            Tables::Numbered { bases } => {
                let (base, end) = numbers(bases);
                TableHasher::Numbered { base, end }
            }
            Tables::Hashed { table_bits } => TableHasher::Hashed {
                salt: salt(table),
                table_bits: *table_bits,
                table: u64::from(table) + 1,
            },
        }
    }

    /// Returns the address of `row`; its tag is 0 if the table cannot have the key.
    #[inline(always)]
    pub fn address_of(&self, row: RowKey) -> SetTag {
        self.hash(self.table_hasher(row.table), row.key)
    }

    /// Returns the address of `key`; its tag is 0 if the table cannot have the key.
    #[inline(always)]
    pub fn hash(&self, hasher: TableHasher, key: u64) -> SetTag {
        match hasher {
            TableHasher::Indexed { base, end } => self.indexed(base, end, key),
            TableHasher::Numbered { base, end } => Self::numbered(base, end, key),
            TableHasher::Hashed { salt, table_bits, table } => {
                self.hashed(salt, table_bits, table, key)
            }
        }
    }

    /// Returns the sets and the tags of `keys`. The tag of a key above `last` is 0.
    #[inline(always)]
    pub fn hash_all<const N: usize>(
        &self,
        hasher: TableHasher,
        last: u64,
        keys: &[u64; N],
    ) -> ([u32; N], [u64; N]) {
        let (mut sets, mut tags) = ([0; N], [0; N]);
        let mut put = |n: usize, key: u64, address: SetTag| {
            (sets[n], tags[n]) = (address.set, if key <= last { address.tag } else { 0 });
        };

        // Each kind of table has its own loop. In a common loop the compiled code would compute
        // both hashes for each key.
        match hasher {
            TableHasher::Indexed { base, end } => {
                keys.iter().enumerate().for_each(|(n, &key)| {
                    put(n, key, self.indexed(base, end, key));
                });
            }
            TableHasher::Numbered { base, end } => {
                keys.iter().enumerate().for_each(|(n, &key)| {
                    put(n, key, Self::numbered(base, end, key));
                });
            }
            TableHasher::Hashed { salt, table_bits, table } => {
                keys.iter().enumerate().for_each(|(n, &key)| {
                    put(n, key, self.hashed(salt, table_bits, table, key));
                });
            }
        }
        (sets, tags)
    }

    #[inline(always)]
    fn indexed(&self, base: u32, end: u64, key: u64) -> SetTag {
        let hash = if key < end { mix_32(base + key as u32) } else { 0 };
        // There are fewer than 2^32 sets. The cast lets the compiler use a 32-bit factor.
        let set = (u64::from(hash) * u64::from(self.sets as u32)) >> 32;
        SetTag { set: set as u32, tag: hash.into() }
    }

    #[inline(always)]
    fn numbered(base: u32, end: u64, key: u64) -> SetTag {
        let number = if key < end { base + key as u32 } else { 0 };
        SetTag { set: number.saturating_sub(1) / WAYS as u32, tag: number.into() }
    }

    #[inline(always)]
    fn hashed(&self, salt: u64, table_bits: u32, table: u64, key: u64) -> SetTag {
        let hash = mix(key ^ salt);
        let set = (u128::from(hash) * self.sets as u128) >> 64;
        SetTag { set: set as u32, tag: hash << table_bits | table }
    }

    /// Returns the row whose address is `address`: the inverse of `address_of`.
    pub fn row_of(&self, address: SetTag) -> RowKey {
        match &self.tables {
            Tables::Indexed { bases } => row_of_number(bases, unmix_32(address.tag as u32)),
            Tables::Numbered { bases } => row_of_number(bases, address.tag as u32),
            Tables::Hashed { table_bits } => {
                // The tag lacks the upper `table_bits` bits of the hash. The set bounds the hash to
                // a range in which only one value has the tag's lower bits.
                let table = (address.tag & ((1 << table_bits) - 1)) as u16 - 1;
                let low = address.tag >> table_bits;
                let from = (u128::from(address.set) << 64).div_ceil(self.sets as u128) as u64;
                let kept = u64::MAX >> table_bits;

                let mut hash = from & !kept | low;
                if hash < from {
                    hash = hash.wrapping_add(kept.wrapping_add(1));
                }
                RowKey { table, key: unmix(hash) ^ salt(table) }
            }
        }
    }
}

/// Returns the row with this number among all rows, from the first number of each table.
fn row_of_number(bases: &[u32], number: u32) -> RowKey {
    let table = bases.partition_point(|&b| b <= number) - 1;
    RowKey { table: table as u16, key: u64::from(number - bases[table]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unmix_inverts_mix(key: u64) {
            prop_assert_eq!(unmix(mix(key)), key);
            prop_assert_eq!(unmix_32(mix_32(key as u32)), key as u32);
        }

        #[test]
        fn set_and_tag_identify_the_row(table in 0u16..3, number: u64, more in 0usize..5000) {
            let indexed = vec![Some(100), Some(4_000_000_000), Some(1 << 20)];
            let ends = [indexed, vec![None, Some(50), None]];
            for spaces in ends.map(KeySpaces::new) {
                let map = AddressMap::new(&spaces, spaces.sets_min() + more);
                let key = spaces.end(table).map_or(number, |end| number % end);
                let address = map.hash(map.table_hasher(table), key);
                prop_assert!(address.tag != 0 && (address.set as usize) < map.sets);
                prop_assert_eq!(map.row_of(address), RowKey { table, key });
            }
        }

        #[test]
        fn every_row_has_a_slot_of_its_own(ends in prop::collection::vec(0u64..60, 1..5)) {
            let spaces = KeySpaces::new(ends.iter().copied().map(Some).collect());
            let map = AddressMap::of_all_rows(&spaces).unwrap();
            let mut next = 0;
            for (table, end) in (0..).zip(ends) {
                let slots = map.slots_of(table).unwrap();
                prop_assert_eq!(slots, TableSlots { first: next, rows: end });
                prop_assert_eq!(slots.slot(end), TableSlots::NO_SLOT);
                for key in 0..end {
                    let address = map.address_of(RowKey { table, key });
                    let way = map.fixed_way(address.tag).unwrap();
                    prop_assert_eq!(address.set * WAYS as u32 + way, next);
                    prop_assert_eq!(slots.slot(key), next);
                    prop_assert!((address.set as usize) < map.sets());
                    prop_assert_eq!(map.row_of(address), RowKey { table, key });
                    next += 1;
                }
                prop_assert_eq!(map.address_of(RowKey { table, key: end }).tag, 0);
            }
        }
    }
}
