//! What the catalog holds, in memory and as entries of a store. Everything here can be had again:
//! counts from the segments, the rest by starting over. Never says what is live.

use crate::flash::Flash;
use crate::flash::live::SegmentRef;
use crate::flash::segment::{Counts, Part};
use crate::maintenance::scrub::Scrub;
use crate::maintenance::wear::Wear;
use crc_fast::{CrcAlgorithm, Digest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The format of every entry; it stands before each value.
const FORMAT: u32 = 2;

/// Keys and values as a store has them.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// A segment of a table: the table's number, and which one.
pub type SegmentKey = (u32, SegmentRef);

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CatalogEntries {
    /// The live generation that they were written for.
    pub sequence: u64,
    /// What each live segment holds.
    pub segments: BTreeMap<SegmentKey, Counts>,
    /// What was written to flash.
    pub wear: Wear,
    /// The scrub under way or, where none is, the last one.
    pub scrub: Scrub,
    /// When the last scrub ended; none while one is under way.
    pub scrubbed: Option<Duration>,
}

/// Proves that the entries beside it are of one commit.
#[derive(Serialize, Deserialize)]
struct Head {
    sequence: u64,
    seal: u32,
}

impl CatalogEntries {
    /// Where there were notes and they are lost.
    pub fn lost() -> Self {
        Self { wear: Wear::unknown(), ..Self::default() }
    }

    /// The part that holds whatever generation is live.
    pub fn of_the_device(&self) -> Self {
        Self { wear: self.wear, ..Self::default() }
    }

    /// Brings them up to what is live: counts of the segments that are, and of no other.
    pub fn follow(&mut self, flash: &Flash) {
        let live = &flash.record().live;
        self.sequence = live.generation.sequence;
        let mut known = std::mem::take(&mut self.segments);
        for (number, table) in live.tables.iter().enumerate() {
            for (of, part) in table.segments() {
                let key = (number as u32, of);
                match known.remove(&key).map_or_else(|| counts(flash, number, of, part), Some) {
                    Some(counts) => drop(self.segments.insert(key, counts)),
                    None => continue,
                }
            }
        }
        let is_live =
            |table: usize, of| live.tables.get(table)?.segments().find(|(live, _)| *live == of);
        self.scrub.damage.retain(|d| is_live(d.table, d.segment).is_some());
    }

    /// As entries of a store.
    pub fn encode(&self) -> Entries {
        let mut entries = Entries::new();
        for (key, counts) in &self.segments {
            entries.insert(segment_entry(key), value(counts));
        }
        entries.insert(b"wear".into(), value(&self.wear));
        entries.insert(b"scrub".into(), value(&self.scrub));
        entries.insert(b"scrubbed".into(), value(&self.scrubbed));
        let head = Head { sequence: self.sequence, seal: seal(self.sequence, &entries) };
        entries.insert(b"head".into(), value(&head));
        entries
    }

    /// Reads back what `encode` made, of any bytes.
    ///
    /// # Errors
    /// Which entry is wrong and how.
    pub fn decode(entries: &Entries) -> Result<Self, String> {
        let mut rest = entries.clone();
        let head: Head = take(&mut rest, b"head")?;
        if head.seal != seal(head.sequence, &rest) {
            return Err("head: seal: the entries are not all of one commit".to_owned());
        }
        let (wear, scrub) = (take(&mut rest, b"wear")?, take(&mut rest, b"scrub")?);
        let scrubbed = take(&mut rest, b"scrubbed")?;
        let mut segments = BTreeMap::new();
        for (key, value) in &rest {
            let Some(segment) = segment_of(key) else {
                return Err(format!("{}: is not a known entry", key.escape_ascii()));
            };
            segments.insert(segment, parse(key, value)?);
        }
        Ok(Self { sequence: head.sequence, segments, wear, scrub, scrubbed })
    }
}

/// What a segment says of itself; none if it does not open, which reads of it will report.
fn counts(flash: &Flash, number: usize, of: SegmentRef, part: Part) -> Option<Counts> {
    match flash.segment_pages(number, of, part) {
        Ok(segment) => Some(segment.counts()),
        Err(e) => {
            log::warn!("not in the catalog: {e}");
            None
        }
    }
}

fn segment_entry((table, of): &SegmentKey) -> Vec<u8> {
    let mut key = b"segment/".to_vec();
    key.extend(table.to_be_bytes());
    key.extend(of.sequence.to_be_bytes());
    key.extend(of.serial.to_be_bytes());
    key
}

fn segment_of(key: &[u8]) -> Option<SegmentKey> {
    let rest = key.strip_prefix(b"segment/")?;
    let (table, rest) = rest.split_first_chunk()?;
    let (sequence, serial) = rest.split_first_chunk()?;
    let (sequence, serial) =
        (u64::from_be_bytes(*sequence), u32::from_be_bytes(serial.try_into().ok()?));
    Some((u32::from_be_bytes(*table), SegmentRef { sequence, serial }))
}

fn value(of: &impl Serialize) -> Vec<u8> {
    let mut bytes = FORMAT.to_le_bytes().to_vec();
    // Integers and strings in memory always encode; an empty body would be refused by `parse`.
    bytes.extend(postcard::to_allocvec(of).unwrap_or_default());
    bytes
}

fn take<T: DeserializeOwned>(entries: &mut Entries, key: &[u8]) -> Result<T, String> {
    match entries.remove(key) {
        Some(value) => parse(key, &value),
        None => Err(format!("{}: is missing", key.escape_ascii())),
    }
}

fn parse<T: DeserializeOwned>(key: &[u8], value: &[u8]) -> Result<T, String> {
    let wrong = |problem: String| Err(format!("{}: {problem}", key.escape_ascii()));
    let Some((format, body)) = value.split_first_chunk() else {
        return wrong(format!("{} bytes are too few", value.len()));
    };
    let format = u32::from_le_bytes(*format);
    if format != FORMAT {
        return wrong(format!("format {format} is not {FORMAT}, the one this version reads"));
    }
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => wrong(format!("{} bytes follow the value", rest.len())),
        Err(e) => wrong(format!("does not decode ({e})")),
    }
}

fn seal(sequence: u64, entries: &Entries) -> u32 {
    let mut seal = Digest::new(CrcAlgorithm::Crc32Iscsi);
    seal.update(&sequence.to_le_bytes());
    for (key, value) in entries {
        seal.update(&(key.len() as u32).to_le_bytes());
        seal.update(&(value.len() as u32).to_le_bytes());
        seal.update(key);
        seal.update(value);
    }
    seal.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes() -> CatalogEntries {
        let mut notes = CatalogEntries {
            sequence: 7,
            scrubbed: Some(Duration::from_secs(9)),
            ..CatalogEntries::default()
        };
        for serial in 0..5 {
            let counts = Counts {
                rows: u64::from(serial) * 1000,
                deletes: 3,
                data_pages: 4,
                index_pages: 5,
            };
            notes.segments.insert((serial % 2, SegmentRef { sequence: 7, serial }), counts);
        }
        notes
    }

    #[test]
    fn come_back_as_they_were() {
        assert_eq!(CatalogEntries::decode(&notes().encode()).unwrap(), notes());
        assert_eq!(
            CatalogEntries::decode(&CatalogEntries::lost().encode()).unwrap(),
            CatalogEntries::lost()
        );
    }

    /// No entry may be missing, changed, of another commit or from elsewhere.
    #[test]
    fn entries_of_two_commits_are_refused() {
        let (good, mut other) = (notes().encode(), notes());
        other.wear.spend(Duration::from_secs(5), 1);
        other.segments.pop_first();
        for key in good.keys() {
            let mut less = good.clone();
            less.remove(key);
            assert!(CatalogEntries::decode(&less).is_err());
            for bit in 0..good[key].len() * 8 {
                let mut changed = good.clone();
                changed.get_mut(key).unwrap()[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    CatalogEntries::decode(&changed).is_err(),
                    "{} bit {bit}",
                    key.escape_ascii()
                );
            }
        }
        let mut mixed = other.encode();
        mixed.insert(b"wear".into(), good[&b"wear"[..]].clone());
        assert!(CatalogEntries::decode(&mixed).is_err());
        assert!(CatalogEntries::decode(&Entries::new()).is_err());
        let mut more = good.clone();
        more.insert(b"x".into(), vec![]);
        assert!(CatalogEntries::decode(&more).is_err());
    }
}
