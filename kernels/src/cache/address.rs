//! How a cache names rows: a set's number and a *word* that is unique within the set. Both together
//! are a bijection of (table, key), so that equal words in a set are equal rows, however unlikely a
//! collision. Where all tables are indexed and their rows can be numbered in 32 bits, a word has 32
//! bits, else 64.

/// What names a row: its table and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// Index of the table in the model.
    pub table: u16,
    /// The key within the table.
    pub key: u64,
}

impl RowKey {
    /// A 64-bit hash: the table is folded in by an odd multiplier, then mixed as MurmurHash3
    /// finishes.
    #[inline(always)]
    pub fn hash(self) -> u64 {
        mix(self.key ^ salt(self.table))
    }
}

#[inline(always)]
fn salt(table: u16) -> u64 {
    (u64::from(table) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A bijective 64-bit mix (MurmurHash3's `fmix64`): equal hashes mean equal keys.
#[inline(always)]
pub fn mix(key: u64) -> u64 {
    let mut h = key;
    h = (h ^ (h >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ (h >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// The inverse of [`mix`].
pub fn unmix(hash: u64) -> u64 {
    let mut h = hash ^ (hash >> 33);
    h = h.wrapping_mul(0x9cb4_b2f8_1293_37db);
    h = (h ^ (h >> 33)).wrapping_mul(0x4f74_430c_22a5_4005);
    h ^ (h >> 33)
}

/// A bijective 32-bit mix that leaves 0 where it is (MurmurHash3's `fmix32`).
#[inline(always)]
fn mix_32(key: u32) -> u32 {
    let mut h = key;
    h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// The inverse of [`mix_32`].
fn unmix_32(hash: u32) -> u32 {
    let mut h = hash ^ (hash >> 16);
    h = h.wrapping_mul(0x7ed1_b41d);
    h ^= (h >> 13) ^ (h >> 26);
    h = h.wrapping_mul(0xa5cb_9243);
    h ^ (h >> 16)
}

/// How rows are named in a cache: which tables it serves, and how many keys those that are indexed
/// have.
#[derive(Clone, Debug)]
pub struct KeySpaces {
    /// For each table of the model the end of its index keys; `None` where keys are sparse;
    /// `Some(0)` for a table that the cache does not serve.
    ends: Vec<Option<u64>>,
}

impl KeySpaces {
    /// `ends` has for each table of the model the end of its index keys, `None` where any 64-bit
    /// number is a key, and `Some(0)` where the cache does not serve the table.
    pub fn new(ends: Vec<Option<u64>>) -> Self {
        Self { ends }
    }

    /// The end of a table's index keys.
    #[cfg(test)]
    pub(crate) fn end(&self, table: u16) -> Option<u64> {
        self.ends[usize::from(table)]
    }

    /// Where the rows of each table begin when all rows are numbered through from 1, with the end
    /// of the last; `None` if there are sparse tables or too many rows for 32 bits.
    fn bases(&self) -> Option<Box<[u32]>> {
        let mut bases = vec![1u32];
        for end in &self.ends {
            let base = u64::from(*bases.last()?).checked_add((*end)?)?;
            bases.push(u32::try_from(base).ok()?);
        }
        Some(bases.into())
    }

    /// Bits that tell the tables apart; 0 is no table.
    fn table_bits(&self) -> u32 {
        usize::BITS - self.ends.len().leading_zeros()
    }

    /// Sets that the words can tell apart need at least this many sets.
    pub(crate) fn sets_min(&self) -> usize {
        if self.bases().is_some() { 1 } else { 1 << self.table_bits() }
    }

    /// Whether a word has 32 bits.
    pub(crate) fn is_narrow(&self) -> bool {
        self.bases().is_some()
    }
}

/// How the keys of one table become sets and words.
#[derive(Clone, Copy)]
pub(crate) enum TableHasher {
    Indexed { base: u32, end: u64 },
    Hashed { salt: u64, table_bits: u32, table: u64 },
}

/// A row's place among the sets, and what names it there; `word` 0 names no row.
#[derive(Clone, Copy, Default)]
pub(crate) struct SetTag {
    pub set: u32,
    pub word: u64,
}

/// The naming of one cache of so many sets.
pub(crate) struct AddressMap {
    tables: Tables,
    sets: usize,
}

enum Tables {
    /// A word is `mix_32` of the row's number among all rows, from 1. Tables begin at their bases.
    Indexed { bases: Box<[u32]> },
    /// A word is the hash's low bits above the table's number, counted from 1.
    Hashed { table_bits: u32 },
}

impl AddressMap {
    /// `sets` is at least `names.sets_min()`.
    pub fn new(names: &KeySpaces, sets: usize) -> Self {
        let tables = match names.bases() {
            Some(bases) => Tables::Indexed { bases },
            None => Tables::Hashed { table_bits: names.table_bits() },
        };
        Self { tables, sets }
    }

    /// Sets that it tells apart.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// A byte that many words of a set differ in; never 0.
    pub fn tag(&self, word: u64) -> u8 {
        let hash = match &self.tables {
            Tables::Indexed { .. } => word,
            Tables::Hashed { table_bits } => word >> table_bits,
        };
        (hash as u8).max(1)
    }

    /// How the keys of `table` are named.
    #[inline(always)]
    pub fn namer(&self, table: u16) -> TableHasher {
        match &self.tables {
            Tables::Indexed { bases } => {
                match bases.get(usize::from(table)..usize::from(table) + 2) {
                    Some(&[base, next]) => {
                        TableHasher::Indexed { base, end: u64::from(next - base) }
                    }
                    _ => TableHasher::Indexed { base: 0, end: 0 },
                }
            }
            Tables::Hashed { table_bits } => TableHasher::Hashed {
                salt: salt(table),
                table_bits: *table_bits,
                table: u64::from(table) + 1,
            },
        }
    }

    /// The name of `key`; word 0 if the table cannot have it.
    #[inline(always)]
    pub fn name(&self, namer: TableHasher, key: u64) -> SetTag {
        match namer {
            TableHasher::Indexed { base, end } => self.indexed(base, end, key),
            TableHasher::Hashed { salt, table_bits, table } => {
                self.hashed(salt, table_bits, table, key)
            }
        }
    }

    /// The names of some keys below `last`, or word 0.
    #[inline(always)]
    pub fn name_all(
        &self,
        namer: TableHasher,
        last: u64,
        keys: &[u64],
        sets: &mut [u32],
        words: &mut [u64],
    ) {
        let names = keys.iter().zip(sets.iter_mut().zip(words));
        let put = |set: &mut u32, word: &mut u64, key: u64, name: SetTag| {
            (*set, *word) = (name.set, if key <= last { name.word } else { 0 });
        };
        // A loop for each kind: in one the compiler would do both for every key.
        match namer {
            TableHasher::Indexed { base, end } => {
                names.for_each(|(&key, (set, word))| {
                    put(set, word, key, self.indexed(base, end, key))
                });
            }
            TableHasher::Hashed { salt, table_bits, table } => {
                let name = |key| self.hashed(salt, table_bits, table, key);
                names.for_each(|(&key, (set, word))| put(set, word, key, name(key)));
            }
        }
    }

    #[inline(always)]
    fn indexed(&self, base: u32, end: u64, key: u64) -> SetTag {
        let hash = if key < end { mix_32(base + key as u32) } else { 0 };
        // There are fewer sets than 2^32, and the compiler should know.
        let set = (u64::from(hash) * u64::from(self.sets as u32)) >> 32;
        SetTag { set: set as u32, word: hash.into() }
    }

    #[inline(always)]
    fn hashed(&self, salt: u64, table_bits: u32, table: u64, key: u64) -> SetTag {
        let hash = mix(key ^ salt);
        let set = (u128::from(hash) * self.sets as u128) >> 64;
        SetTag { set: set as u32, word: hash << table_bits | table }
    }

    /// The inverse of `name`.
    pub fn row_of(&self, name: SetTag) -> RowKey {
        match &self.tables {
            Tables::Indexed { bases } => {
                let number = unmix_32(name.word as u32);
                let table = bases.partition_point(|&b| b <= number) - 1;
                RowKey { table: table as u16, key: u64::from(number - bases[table]) }
            }
            Tables::Hashed { table_bits } => {
                // The set says between which bounds the hash lies, closer than the bits that the
                // word lacks.
                let table = (name.word & ((1 << table_bits) - 1)) as u16 - 1;
                let low = name.word >> table_bits;
                let from = (u128::from(name.set) << 64).div_ceil(self.sets as u128) as u64;
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mixes_can_be_undone(key: u64) {
            prop_assert_eq!(unmix(mix(key)), key);
            prop_assert_eq!(unmix_32(mix_32(key as u32)), key as u32);
        }

        /// The set and the word together say which row it is.
        #[test]
        fn names_can_be_undone(table in 0u16..3, number: u64, more in 0usize..5000) {
            let ends = [vec![Some(100), Some(4_000_000_000), Some(1 << 20)], vec![None, Some(50), None]];
            for names in ends.map(KeySpaces::new) {
                let naming = AddressMap::new(&names, names.sets_min() + more);
                let key = names.end(table).map_or(number, |end| number % end);
                let name = naming.name(naming.namer(table), key);
                prop_assert!(name.word != 0 && (name.set as usize) < naming.sets);
                prop_assert_eq!(naming.row_of(name), RowKey { table, key });
            }
        }
    }
}
