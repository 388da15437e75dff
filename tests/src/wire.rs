//! A link that adds faults to another link: it breaks after a number of bytes or at random, never
//! ends, delivers single bytes, swaps answers, or answers every request with the same page.

use crate::random::Random;
use hatchback::update::link::{Link, LinkError, Take};
use std::ops::ControlFlow;

/// The faults of the link.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Delivers this many bytes in all; after that every request fails.
    pub breaks_after: Option<u64>,
    /// Breaks after this many bytes of each answer.
    pub breaks_each: Option<u64>,
    /// Never ends objects whose path starts with this.
    pub endless: Option<&'static str>,
    /// Delivers single bytes.
    pub single_bytes: bool,
    /// Answers requests with this page, as a captive portal does.
    pub portal: Option<&'static [u8]>,
    /// What the paths of these requests start with.
    pub portal_at: &'static str,
    /// Share of answers, per cent, that break at a random byte or deliver nothing.
    pub loss_percent: u64,
    /// One of so many answers is that of the request before.
    pub swaps_one_in: u64,
}

/// A link with faults.
pub struct Wire<L> {
    /// The link below.
    pub link: L,
    /// The faults.
    pub faults: Faults,
    /// Bytes delivered.
    pub bytes: u64,
    /// The requested paths.
    pub asked: Vec<String>,
    random: Random,
}

impl<L: Link> Wire<L> {
    /// Adds `faults` to `link`.
    pub fn new(link: L, faults: Faults) -> Self {
        Self { link, faults, bytes: 0, asked: Vec::new(), random: Random::new(17) }
    }
}

impl<L: Link> Link for Wire<L> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        self.asked.push(path.to_owned());
        let (faults, bytes) = (&self.faults, &mut self.bytes);
        let (mut broke, mut given) = (false, 0);
        let lost = self.random.below(100) < faults.loss_percent;
        let until = if lost { self.random.below(4_000) } else { u64::MAX };
        let swapped = faults.swaps_one_in > 0 && self.random.one_in(faults.swaps_one_in);
        let other = if swapped { self.asked.iter().rev().nth(1).cloned() } else { None };
        let path = other.as_deref().unwrap_or(path);
        let mut hand = |piece: &[u8]| {
            for part in piece.chunks(if faults.single_bytes { 1 } else { piece.len().max(1) }) {
                let all = faults.breaks_after.map_or(u64::MAX, |n| n.saturating_sub(*bytes));
                let each = faults.breaks_each.unwrap_or(u64::MAX).min(until).saturating_sub(given);
                let left = all.min(each).min(part.len() as u64);
                broke = left < part.len() as u64;
                (*bytes, given) = (*bytes + left, given + left);
                if (left > 0 && take(&part[..left as usize]).is_break()) || broke {
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        };
        let done = match faults.portal {
            Some(page) if path.starts_with(faults.portal_at) => {
                let _ = hand(&page[(from as usize).min(page.len())..]);
                Ok(())
            }
            _ => self.link.get(path, from, &mut hand),
        };
        if faults.endless.is_some_and(|start| path.starts_with(start)) && done.is_ok() {
            while hand(&[b' '; 4096]).is_continue() {}
        }
        if broke { Err(LinkError::Broken("cut".to_owned())) } else { done }
    }
}
