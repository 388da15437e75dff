//! A vocabulary: words and the key of each. A bundle carries it in the schema. The words are in one
//! text, in ascending order, so that a lookup is a binary search and allocates nothing.

use crate::limits::VOCABULARY_BYTES_MAX;
use serde::{Deserialize, Serialize};

/// Words in ascending order of their bytes, with the key of each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// All words, one after the other.
    text: String,
    /// The end of each word in `text`.
    ends: Vec<u32>,
    /// The key of each word.
    keys: Vec<u64>,
}

impl Vocabulary {
    /// Makes a vocabulary of words with their keys, in any order.
    ///
    /// # Errors
    /// A text that names the word that occurs twice, or the size if it is too large.
    pub fn new(mut words: Vec<(String, u64)>) -> Result<Self, String> {
        words.sort_unstable();
        let mut vocabulary = Self::default();
        for (word, key) in words {
            vocabulary.text.push_str(&word);
            // A longer text than u32 can count fails the check below.
            vocabulary.ends.push(u32::try_from(vocabulary.text.len()).unwrap_or(u32::MAX));
            vocabulary.keys.push(key);
        }
        vocabulary.check()?;
        Ok(vocabulary)
    }

    /// Checks that the words are in ascending order, each with a key.
    ///
    /// # Errors
    /// A text that names the wrong word or number.
    pub fn check(&self) -> Result<(), String> {
        if self.bytes() > VOCABULARY_BYTES_MAX {
            return Err(format!("{} bytes, over {VOCABULARY_BYTES_MAX}", self.bytes()));
        }
        let (words, ends) = (self.keys.len(), self.ends.len());
        if words == 0 && ends == 0 {
            return Err("has no word".to_owned());
        }
        let whole = self.ends.last().map_or(0, |end| *end as usize);
        if words != ends || whole != self.text.len() {
            return Err(format!("{words} keys and {ends} words, which end at byte {whole}"));
        }

        let mut before = None;
        for number in 0..words {
            let start = if number == 0 { 0 } else { self.ends[number - 1] as usize };
            let Some(word) = self.text.get(start..self.ends[number] as usize) else {
                return Err(format!("word {number} is not part of the text"));
            };
            if before.is_some_and(|before| before >= word) {
                let word = word.escape_debug();
                return Err(format!("`{word}` occurs twice or out of order"));
            }
            before = Some(word);
        }
        Ok(())
    }

    fn word(&self, number: usize) -> &str {
        let start = if number == 0 { 0 } else { self.ends[number - 1] as usize };
        self.text.get(start..self.ends[number] as usize).unwrap_or_default()
    }

    /// Returns the key of `word`; `None` if the vocabulary does not have it.
    pub fn key(&self, word: &str) -> Option<u64> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            match self.word(middle).cmp(word) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Some(self.keys[middle]),
            }
        }
        None
    }

    /// Returns the words in ascending order, with their keys.
    pub fn words(&self) -> impl Iterator<Item = (&str, u64)> {
        (0..self.len()).map(|number| (self.word(number), self.keys[number]))
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the largest key.
    pub fn key_max(&self) -> Option<u64> {
        self.keys.iter().copied().max()
    }

    /// Returns the bytes in memory.
    pub fn bytes(&self) -> usize {
        self.text.len() + 4 * self.ends.len() + 8 * self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn a_vocabulary_has_the_keys_of_a_map(
            words in prop::collection::btree_map(".{0,4}", any::<u64>(), 1..40),
            others in prop::collection::vec(".{0,4}", 20),
        ) {
            let map: BTreeMap<String, u64> = words;
            let list: Vec<(String, u64)> = map.clone().into_iter().rev().collect();
            let vocabulary = Vocabulary::new(list).unwrap();
            for word in map.keys().chain(&others) {
                prop_assert_eq!(vocabulary.key(word), map.get(word).copied());
            }
            prop_assert_eq!(vocabulary.words().count(), map.len());
            prop_assert_eq!(vocabulary.key_max(), map.values().copied().max());
        }
    }

    #[test]
    fn a_vocabulary_that_contradicts_itself_is_refused() {
        let word = |word: &str, key| (word.to_owned(), key);
        let refused = |list| Vocabulary::new(list).unwrap_err();
        assert!(refused(vec![word("a", 1), word("b", 2), word("a", 3)]).contains("`a` occurs"));
        assert!(refused(vec![]).contains("no word"));
        let whole = Vocabulary::new(vec![word("é", 1), word("z", 2)]).unwrap();
        let damaged = |damage: &dyn Fn(&mut Vocabulary)| {
            let mut vocabulary = whole.clone();
            damage(&mut vocabulary);
            assert!(vocabulary.check().is_err(), "{vocabulary:?}");
            let _ = (vocabulary.key("z"), vocabulary.words().take(1).count());
        };
        damaged(&|v| v.ends[0] = 2);
        damaged(&|v| v.ends[1] = 2);
        damaged(&|v| v.ends.swap(0, 1));
        damaged(&|v| v.text.push('x'));
        damaged(&|v| v.keys.truncate(1));
        damaged(&|v| v.text = "zyx".to_owned());
    }
}
