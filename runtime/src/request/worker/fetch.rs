//! Reading the rows that a request misses: located, sorted by page, each page read once with many
//! in flight, checked, and its rows staged and cached as it arrives. Never waits beyond the
//! deadline for a row that it may cut.

use crate::flash::segment::fences::AT_ONCE;
use crate::flash::table::RowLocation;
use crate::io::page::{Page, PageBytes};
use crate::model::Model;
use crate::request::negative_cache::NegativeCache;
use crate::request::worker::{Counters, Worker};
use crate::schema::MissPolicy;
use hatchback_kernels::lookup::miss_list::{Miss, MissList, RowState};
use std::io;
use std::ops::Range;
use std::time::Duration;

/// Stands for a key that no page can hold.
const NO_PLACE: u64 = u64::MAX;

impl Worker {
    /// Fetches the missing rows, many pages in flight: first what must be waited for, then what the
    /// deadline allows. The rest is noted for `fetch_behind`.
    pub(super) fn fetch(&mut self, model: &Model, deadline: Option<Duration>) {
        self.locate(model);
        let order = |m: &Miss| (model.miss_policy(m.row.table) as u8, m.row.table, m.place);
        self.misses.list_mut().sort_unstable_by_key(order);
        self.counters.misses += self.misses.list().len() as u64;
        self.counters.missed_lookups += self.misses.lookups();
        self.round = self.round.wrapping_add(1);
        let mut state = Fetch { next: 0, must: 0, may: 0 };
        loop {
            self.begin_reads(model, deadline, &mut state);
            // MissList may be left to begin although none of this request's reads is outstanding:
            // the reader may be full of those that an earlier request no longer waits for.
            let next = self.misses.list().get(state.next);
            if state.must + state.may == 0 && next.is_none() {
                return;
            }
            // Once only reads remain that the deadline may cut, it cuts the wait for them.
            let may_cut = next.is_none_or(|m| model.miss_policy(m.row.table) != MissPolicy::Wait);
            let cut = deadline.filter(|_| state.must == 0 && may_cut);
            let wait = cut.map(|d| d.saturating_sub(self.clock.now()));
            if !self.finish_read(model, wait, &mut state) {
                return self.leave_unread(model, cut.is_some(), state.next);
            }
        }
    }

    /// Notes where each missing row lies.
    fn locate(&mut self, model: &Model) {
        let tables = self.misses.list_mut().chunk_by_mut(|a, b| a.row.table == b.row.table);
        for some in tables.flat_map(|of_table| of_table.chunks_mut(AT_ONCE)) {
            let (mut keys, mut places) = ([0; AT_ONCE], [None; AT_ONCE]);
            keys.iter_mut().zip(&*some).for_each(|(key, miss)| *key = miss.row.key);
            model.rows(some[0].row.table).locate_all(&keys[..some.len()], &mut places);
            for (miss, place) in some.iter_mut().zip(places) {
                let place = place.filter(|_| !self.absent.holds(miss.row));
                miss.place = place.map_or(NO_PLACE, RowLocation::pack);
            }
        }
    }

    /// Begins reads in order until the reader is full or nothing is left to begin.
    fn begin_reads(&mut self, model: &Model, deadline: Option<Duration>, state: &mut Fetch) {
        while state.next < self.misses.list().len() && self.reader.has_room() {
            let range = state.next..state.next + group_len(&self.misses.list()[state.next..]);
            let Miss { row, place, .. } = self.misses.list()[range.start];
            let late = || deadline.is_some_and(|d| self.clock.now() >= d);
            state.next = range.end;
            match model.miss_policy(row.table) {
                _ if place == NO_PLACE => self.set_states(range, RowState::Absent),
                MissPolicy::Default => self.leave(range, RowState::Pending),
                MissPolicy::Deadline if late() => self.leave(range, RowState::Late),
                policy => {
                    let place = RowLocation::unpack(place);
                    let token = u64::from(self.round) << 32 | range.start as u64;
                    self.reader.begin(
                        model.rows(row.table).segment(place).file(),
                        place.page,
                        token,
                    );
                    *state.count(policy) += 1;
                }
            }
        }
    }

    /// Takes one page in; returns whether one came within `wait`.
    fn finish_read(&mut self, model: &Model, wait: Option<Duration>, state: &mut Fetch) -> bool {
        let Self { reader, misses, absent, counters, round, .. } = self;
        reader.next(wait, |token, page| {
            // A page that a request before this one no longer waited for.
            if (token >> 32) as u32 != *round {
                return;
            }
            let start = token as u32 as usize;
            let range = start..start + group_len(&misses.list()[start..]);
            *state.count(model.miss_policy(misses.list()[start].row.table)) -= 1;
            stage(model, misses, absent, range, page, counters);
        })
    }

    /// Gives up the reads that are outstanding and, from `next` on, not begun: the deadline has
    /// come, or the reader failed.
    fn leave_unread(&mut self, model: &Model, late: bool, next: usize) {
        for i in 0..self.misses.list().len() {
            let miss = self.misses.list()[i];
            match (self.misses.state(miss.slot), model.miss_policy(miss.row.table)) {
                (RowState::Pending, _) if miss.place == NO_PLACE => {
                    self.set_states(i..i + 1, RowState::Absent)
                }
                (RowState::Pending, MissPolicy::Default) if i >= next => {
                    self.leave(i..i + 1, RowState::Pending)
                }
                (RowState::Pending, MissPolicy::Default) => {}
                (RowState::Pending, _) if late => self.leave(i..i + 1, RowState::Late),
                (RowState::Pending, _) => self.leave(i..i + 1, RowState::Damaged),
                _ => {}
            }
        }
    }

    fn set_states(&mut self, range: Range<usize>, state: RowState) {
        range.for_each(|i| self.misses.set_state(self.misses.list()[i].slot, state));
    }

    fn leave(&mut self, range: Range<usize>, state: RowState) {
        self.set_states(range.clone(), state);
        let room = self.behind.capacity() - self.behind.len();
        self.behind.extend(self.misses.list()[range].iter().take(room));
    }
}

/// Where a fetch stands.
struct Fetch {
    /// The first miss that no read was begun for.
    next: usize,
    /// Reads outstanding that the request waits for.
    must: usize,
    /// Reads outstanding that the deadline may cut.
    may: usize,
}

impl Fetch {
    fn count(&mut self, policy: MissPolicy) -> &mut usize {
        if policy == MissPolicy::Wait { &mut self.must } else { &mut self.may }
    }
}

/// How many misses at the front are of the same page.
pub(super) fn group_len(misses: &[Miss]) -> usize {
    let same = |m: &&Miss| (m.row.table, m.place) == (misses[0].row.table, misses[0].place);
    misses.iter().take_while(same).count()
}

/// Checks a page that was read for `misses`; a bad one is counted and reported.
pub(super) fn check_page<'a>(
    model: &Model,
    miss: Miss,
    page: io::Result<&'a PageBytes>,
    counters: &mut Counters,
) -> Option<Page<'a>> {
    counters.pages += 1;
    let place = RowLocation::unpack(miss.place);
    match model.rows(miss.row.table).segment(place).check_read(place.page, page) {
        Ok(page) => Some(page),
        Err(e) => {
            counters.pages_damaged += 1;
            log::error!("{e}");
            None
        }
    }
}

/// Stages and caches the rows of a page for the misses in `range`, which are all of it.
fn stage(
    model: &Model,
    misses: &mut MissList,
    absent: &mut NegativeCache,
    range: Range<usize>,
    page: io::Result<&PageBytes>,
    counters: &mut Counters,
) {
    let page = check_page(model, misses.list()[range.start], page, counters);
    for i in range {
        let miss = misses.list()[i];
        let segment = model.rows(miss.row.table).segment(RowLocation::unpack(miss.place));
        let state = match page.as_ref().map(|p| segment.row(p, miss.row.key)) {
            None => RowState::Damaged,
            Some(None) => {
                absent.note(miss.row);
                RowState::Absent
            }
            Some(Some(bytes)) => {
                misses.row_mut(miss.slot)[..bytes.len()].copy_from_slice(bytes);
                // On a GPU all rows go in together, behind the last page.
                if let Some(cache) = model.cache(miss.row.table) {
                    cache.insert(miss.row, bytes, miss.epoch);
                }
                RowState::Fresh
            }
        };
        misses.set_state(miss.slot, state);
    }
}
