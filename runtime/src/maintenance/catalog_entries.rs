//! The entries of the catalog, in memory and encoded for a key-value store. Every entry can be
//! rebuilt: the counts from the segments, the others from their start values. The entries never
//! decide which generation is live.

use crate::flash::Flash;
use crate::flash::live::SegmentRef;
use crate::flash::segment::{Counts, Part};
use crate::io::daily_bytes::DailyBytes;
use crate::maintenance::scrub::Scrub;
use crc_fast::crc32_iscsi as crc32c;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The format number at the start of each value.
const FORMAT: u32 = 1;

/// The encoded keys and values.
pub type EncodedEntries = BTreeMap<Vec<u8>, Vec<u8>>;

/// A segment of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentKey {
    /// The number of the table.
    pub table: u32,
    /// The segment of the table.
    pub segment: SegmentRef,
}

/// The content of the catalog.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CatalogEntries {
    /// The sequence of the live generation at the last commit.
    pub sequence: u64,
    /// The counts of each live segment.
    pub segments: BTreeMap<SegmentKey, Counts>,
    /// The bytes written to flash.
    pub wear: DailyBytes,
    /// The current scrub, or the last one if none is running.
    pub scrub: Scrub,
    /// The time at which the last scrub ended; `None` while a scrub is running.
    pub scrubbed: Option<Duration>,
}

/// The entry that proves that all others are of one commit: `seal` is their CRC-32C.
#[derive(Serialize, Deserialize)]
struct Head {
    sequence: u64,
    seal: u32,
}

impl CatalogEntries {
    /// Returns the entries after a loss: the wear budget of the day counts as spent.
    pub fn lost() -> Self {
        Self { wear: DailyBytes::unknown(), ..Self::default() }
    }

    /// Returns only the entries that are valid for any live generation.
    pub fn device_wide(&self) -> Self {
        Self { wear: self.wear, ..Self::default() }
    }

    /// Forgets the segments: a rebuild has other files of the same names.
    pub fn forget_segments(&mut self) {
        self.segments.clear();
        self.scrub.damage.clear();
    }

    /// Updates the entries to the live generation: adds the counts of its segments and removes
    /// those of other segments.
    pub fn follow(&mut self, flash: &Flash) {
        let live = &flash.record().live;
        self.sequence = live.generation.sequence;

        // Counts of a segment never change, so only new segments are opened.
        let mut known = std::mem::take(&mut self.segments);
        for (number, table) in live.tables.iter().enumerate() {
            for (segment, part) in table.segments() {
                let key = SegmentKey { table: number as u32, segment };
                let counts =
                    known.remove(&key).or_else(|| read_counts(flash, number, segment, part));
                if let Some(counts) = counts {
                    self.segments.insert(key, counts);
                }
            }
        }

        let is_live =
            |table: usize, of| live.tables.get(table)?.segments().find(|(live, _)| *live == of);
        self.scrub.damage.retain(|d| is_live(d.table, d.segment).is_some());
    }

    /// Encodes the entries for a store.
    pub fn encode(&self) -> EncodedEntries {
        let mut entries = EncodedEntries::new();
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

    /// Decodes entries from any bytes.
    ///
    /// # Errors
    /// A text with the wrong entry and its problem.
    pub fn decode(entries: &EncodedEntries) -> Result<Self, String> {
        let mut rest = entries.clone();
        let head: Head = take(&mut rest, b"head")?;
        if head.seal != seal(head.sequence, &rest) {
            return Err("head: seal: the entries are not all of one commit".to_owned());
        }

        let (wear, scrub) = (take(&mut rest, b"wear")?, take(&mut rest, b"scrub")?);
        let scrubbed = take(&mut rest, b"scrubbed")?;
        let mut segments = BTreeMap::new();
        for (key, value) in &rest {
            let Some(segment) = segment_key(key) else {
                return Err(format!("{}: is not a known entry", key.escape_ascii()));
            };
            segments.insert(segment, parse(key, value)?);
        }
        Ok(Self { sequence: head.sequence, segments, wear, scrub, scrubbed })
    }
}

/// Reads the counts of a segment; returns `None` if it does not open, which the scrub reports.
fn read_counts(flash: &Flash, number: usize, of: SegmentRef, part: Part) -> Option<Counts> {
    match flash.segment_pages(number, of, part) {
        Ok(segment) => Some(segment.counts()),
        Err(e) => {
            log::warn!("a segment does not open and is not in the catalog: {e}");
            None
        }
    }
}

fn segment_entry(of: &SegmentKey) -> Vec<u8> {
    let mut key = b"segment/".to_vec();
    key.extend(of.table.to_be_bytes());
    key.extend(of.segment.sequence.to_be_bytes());
    key.extend(of.segment.serial.to_be_bytes());
    key
}

/// Inverse of `segment_entry`; returns `None` for another entry.
fn segment_key(key: &[u8]) -> Option<SegmentKey> {
    let rest = key.strip_prefix(b"segment/")?;
    let (table, rest) = rest.split_first_chunk()?;
    let (sequence, serial) = rest.split_first_chunk()?;
    let (sequence, serial) =
        (u64::from_be_bytes(*sequence), u32::from_be_bytes(serial.try_into().ok()?));
    let segment = SegmentRef { sequence, serial };
    Some(SegmentKey { table: u32::from_be_bytes(*table), segment })
}

fn value(of: &impl Serialize) -> Vec<u8> {
    let Ok(body) = postcard::to_allocvec(of) else {
        unreachable!("strings and integers in memory always encode")
    };
    let mut bytes = FORMAT.to_le_bytes().to_vec();
    bytes.extend(body);
    bytes
}

fn take<T: DeserializeOwned>(entries: &mut EncodedEntries, key: &[u8]) -> Result<T, String> {
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

/// Returns the CRC-32C of the sequence and of all entries but the head.
fn seal(sequence: u64, entries: &EncodedEntries) -> u32 {
    let mut sealed = sequence.to_le_bytes().to_vec();
    for (key, value) in entries {
        // With the lengths, bytes that move from a key to its value change the seal.
        sealed.extend((key.len() as u32).to_le_bytes());
        sealed.extend((value.len() as u32).to_le_bytes());
        sealed.extend(key);
        sealed.extend(value);
    }
    crc32c(&sealed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> CatalogEntries {
        let mut entries = CatalogEntries {
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
            let segment = SegmentRef { sequence: 7, serial };
            entries.segments.insert(SegmentKey { table: serial % 2, segment }, counts);
        }
        entries
    }

    #[test]
    fn come_back_as_they_were() {
        assert_eq!(CatalogEntries::decode(&entries().encode()).unwrap(), entries());
        assert_eq!(
            CatalogEntries::decode(&CatalogEntries::lost().encode()).unwrap(),
            CatalogEntries::lost()
        );
    }

    /// No entry may be missing, changed, unknown or of another commit.
    #[test]
    fn entries_of_two_commits_are_refused() {
        let (good, mut other) = (entries().encode(), entries());
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
        assert!(CatalogEntries::decode(&EncodedEntries::new()).is_err());
        let mut more = good.clone();
        more.insert(b"x".into(), vec![]);
        assert!(CatalogEntries::decode(&more).is_err());
    }
}
