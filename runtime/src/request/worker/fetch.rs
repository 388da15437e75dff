//! Reads the missing rows of a request. Locates the rows, sorts them by page, and reads each page
//! once with many reads in flight. As a page arrives, verifies it, and stages and caches its rows.
//! Never waits beyond the deadline.

use crate::clock::Clock;
use crate::flash::segment::fences::LOCATE_KEYS;
use crate::flash::table::RowLocation;
use crate::io::page::{Page, PageBytes};
use crate::io::reader::PageReader;
use crate::model::Model;
use crate::request::negative_cache::NegativeCache;
use crate::request::worker::counters::Counters;
use crate::request::worker::live_model::LiveModel;
use crate::request::worker::table_counts::TableCounters;
use crate::schema::MissPolicy;
use crate::schema::batch::Batch;
use hatchback_kernels::lookup::miss_list::{Miss, MissList, RowState};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Location of a key that no page can hold.
const NOWHERE: u64 = u64::MAX;

/// The part of a worker that fetches rows: the miss list, the page reader, and the rows to fetch
/// after the answer.
pub(super) struct RowFetcher {
    clock: Arc<dyn Clock>,
    pub misses: MissList,
    /// Rows to fetch while no request waits: those that a request answered with the default row,
    /// and those that a caller prefetches.
    pub deferred: Vec<Miss>,
    pub(super) negative_cache: NegativeCache,
    pub(super) reader: PageReader,
    /// Number of the current round of reads. A page of an earlier round, for which its request
    /// stopped waiting, may still arrive.
    pub(super) round: u32,
    pub counters: Counters,
    tables: Arc<TableCounters>,
    /// Whether the deadline passed before a row with the miss policy `wait` was read. The request
    /// then has no scores.
    pub is_overdue: bool,
}

impl RowFetcher {
    /// Allocates the memory of one worker on `model`, with an empty `misses` and its `tables`
    /// counters.
    pub fn new(
        model: &Model,
        misses: MissList,
        tables: Arc<TableCounters>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            clock,
            misses,
            deferred: Vec::with_capacity(model.budget().misses_max as usize),
            negative_cache: NegativeCache::new(),
            reader: model.page_reader(),
            round: 0,
            counters: Counters::default(),
            tables,
            is_overdue: false,
        }
    }

    /// Drops the state of one generation: rows to fetch later, with their locations on flash, and
    /// keys that their tables did not have.
    pub fn forget_generation(&mut self) {
        self.misses.clear();
        self.deferred.clear();
        self.negative_cache.clear();
        // Pages of the old generation that still arrive belong to no round.
        self.round = self.round.wrapping_add(1);
    }

    /// Clears the miss list.
    pub fn start_request(&mut self) {
        // A request that ended with an error left its misses.
        self.misses.clear();
        self.is_overdue = false;
    }

    /// Counts the lookups of `batch`.
    pub fn count_lookups(&mut self, model: &Model, batch: &Batch) {
        for lookup in &model.schema().lookups {
            let lookups = batch.bags(lookup.feature.into()).keys.len() as u64;
            self.counters.lookups += lookups;
            self.tables.look_up(lookup.table, lookups);
            if model.is_cached(lookup.table) {
                self.counters.cached_lookups += lookups;
            }
        }
    }

    /// Fetches the rows of the miss list with many reads in flight. Rows with the miss policy
    /// `wait`, without which the request has no scores, come first. Rows that were not read before
    /// the deadline are deferred.
    pub fn fetch(&mut self, model: &Model, live: &LiveModel, deadline: Option<Duration>) {
        self.read_misses(model, live, deadline);
        for miss in self.misses.list() {
            self.tables.miss(miss.row.table, self.misses.state(miss.slot));
        }
    }

    fn read_misses(&mut self, model: &Model, live: &LiveModel, deadline: Option<Duration>) {
        self.locate(model);
        let order = |m: &Miss| (model.miss_policy(m.row.table) as u8, m.row.table, m.place);
        self.misses.list_mut().sort_unstable_by_key(order);
        self.counters.misses += self.misses.list().len() as u64;
        self.counters.missed_lookups += self.misses.lookups();
        self.round = self.round.wrapping_add(1);

        let mut reads = Reads::default();
        loop {
            self.start_reads(model, deadline, &mut reads);
            // Reads of this request may be left to start although none is outstanding: abandoned
            // reads of an earlier request may fill the reader.
            if reads.outstanding == 0 && reads.next == self.misses.list().len() {
                return;
            }

            let wait = deadline.map(|deadline| deadline.saturating_sub(self.clock.now()));
            if !self.finish_read(model, live, wait, &mut reads) {
                // Without a deadline only a reader that failed returns no page.
                let unread = if deadline.is_some() { RowState::Late } else { RowState::Damaged };
                return self.give_up_reads(model, unread, reads.next);
            }
        }
    }

    /// Sets the location of each missing row.
    fn locate(&mut self, model: &Model) {
        let tables = self.misses.list_mut().chunk_by_mut(|a, b| a.row.table == b.row.table);
        for group in tables.flat_map(|of_table| of_table.chunks_mut(LOCATE_KEYS)) {
            let (mut keys, mut locations) = ([0; LOCATE_KEYS], [None; LOCATE_KEYS]);
            keys.iter_mut().zip(&*group).for_each(|(key, miss)| *key = miss.row.key);
            model.rows(group[0].row.table).locate_all(&keys[..group.len()], &mut locations);

            for (miss, location) in group.iter_mut().zip(locations) {
                // A base says only on which page a key would be. The negative cache has the keys
                // that were not there.
                let location = location.filter(|_| !self.negative_cache.contains(miss.row));
                miss.place = location.map_or(NOWHERE, RowLocation::pack);
            }
        }
    }

    /// Starts reads in order until the reader is full or every miss is started, deferred or absent.
    fn start_reads(&mut self, model: &Model, deadline: Option<Duration>, reads: &mut Reads) {
        while reads.next < self.misses.list().len() && self.reader.reserve() {
            let range = reads.next..reads.next + page_len(&self.misses.list()[reads.next..]);
            let Miss { row, place, .. } = self.misses.list()[range.start];
            let is_late = || deadline.is_some_and(|deadline| self.clock.now() >= deadline);
            reads.next = range.end;
            match model.miss_policy(row.table) {
                // First, because an absent row needs no read: neither policy nor deadline changes
                // its state.
                _ if place == NOWHERE => self.set_states(range, RowState::Absent),
                // Before the look at the clock: a row that nobody would wait for does not make an
                // answer late.
                MissPolicy::Default => self.defer(range, RowState::Pending),
                policy if is_late() => self.defer_late(range, policy),
                MissPolicy::Wait | MissPolicy::Deadline => {
                    let location = RowLocation::unpack(place);
                    let file = model.rows(row.table).segment(location).file();
                    self.reader.begin(file, location.page, token(self.round, range.start));
                    reads.outstanding += 1;
                }
            }
        }
    }

    /// Waits up to `wait` for one page and stages its rows. Returns false if none arrived.
    fn finish_read(
        &mut self,
        model: &Model,
        live: &LiveModel,
        wait: Option<Duration>,
        reads: &mut Reads,
    ) -> bool {
        let Self { reader, misses, negative_cache, counters, round, .. } = self;
        reader.next(wait, |token, page| {
            // An earlier round gave this page up, and its misses are gone from the list.
            let Some(start) = index_in(token, *round) else { return };
            let range = start..start + page_len(&misses.list()[start..]);
            let first = misses.list()[start];
            assert!(reads.outstanding > 0, "a page arrived that this round did not read");
            reads.outstanding -= 1;

            let page = check_page(model, first, page, counters);
            // Only the cache refuses a barred row. This request uses it, since it is of the
            // request's own generation.
            misses.list_mut()[range.clone()].iter_mut().for_each(|miss| refuse_barred(live, miss));
            stage(model, misses, range, page.as_ref(), negative_cache);
        })
    }

    /// Abandons the reads that are outstanding or, from `next` on, not started. Their rows get the
    /// state `unread`: late after the deadline, damaged if the reader failed.
    fn give_up_reads(&mut self, model: &Model, unread: RowState, next: usize) {
        for i in 0..self.misses.list().len() {
            let miss = self.misses.list()[i];
            if self.misses.state(miss.slot) != RowState::Pending {
                continue;
            }
            match model.miss_policy(miss.row.table) {
                _ if miss.place == NOWHERE => self.set_states(i..i + 1, RowState::Absent),
                MissPolicy::Default if i >= next => self.defer(i..i + 1, RowState::Pending),
                // `start_reads` has deferred it already.
                MissPolicy::Default => {}
                policy if unread == RowState::Late => self.defer_late(i..i + 1, policy),
                MissPolicy::Wait | MissPolicy::Deadline => self.defer(i..i + 1, unread),
            }
        }
    }

    /// Defers rows that were not read before the deadline.
    fn defer_late(&mut self, range: Range<usize>, policy: MissPolicy) {
        self.is_overdue |= policy == MissPolicy::Wait;
        self.defer(range, RowState::Late);
    }

    fn set_states(&mut self, range: Range<usize>, state: RowState) {
        range.for_each(|i| self.misses.set_state(self.misses.list()[i].slot, state));
    }

    /// Sets the state of the misses in `range`, and adds as many as there is room for to the
    /// deferred rows.
    fn defer(&mut self, range: Range<usize>, state: RowState) {
        self.set_states(range.clone(), state);
        let room = self.deferred.capacity() - self.deferred.len();
        // A row without room waits for the next request that misses it.
        self.deferred.extend(self.misses.list()[range].iter().take(room));
    }
}

/// The reads of one fetch.
#[derive(Default)]
struct Reads {
    /// The first miss for which no read was started.
    next: usize,
    /// Reads that were started and are not complete.
    outstanding: usize,
}

/// Returns the token of a read: the round in the upper half, the index of its first miss below.
pub(super) fn token(round: u32, index: usize) -> u64 {
    u64::from(round) << 32 | index as u64
}

/// Returns the index in `token`, or `None` if the read is of an earlier round.
pub(super) fn index_in(token: u64, round: u32) -> Option<usize> {
    ((token >> 32) as u32 == round).then_some(token as u32 as usize)
}

/// Returns how many misses at the front of `misses` are on the same page.
pub(super) fn page_len(misses: &[Miss]) -> usize {
    let first = misses[0];
    let same = |m: &&Miss| (m.row.table, m.place) == (first.row.table, first.place);
    misses.iter().take_while(same).count()
}

/// Verifies a page that was read for `miss`. Counts and logs a damaged one.
pub(super) fn check_page<'a>(
    model: &Model,
    miss: Miss,
    page: io::Result<&'a PageBytes>,
    counters: &mut Counters,
) -> Option<Page<'a>> {
    counters.pages += 1;
    let location = RowLocation::unpack(miss.place);
    match model.rows(miss.row.table).segment(location).check_read(location.page, page) {
        Ok(page) => Some(page),
        Err(e) => {
            counters.pages_damaged += 1;
            log::error!("{e}");
            None
        }
    }
}

/// Makes the cache refuse the row of `miss` if a transition bars it. See [`LiveModel::bar`].
pub(super) fn refuse_barred(live: &LiveModel, miss: &mut Miss) {
    if live.bars(miss.row) {
        miss.epoch = miss.epoch.outdated();
    }
}

/// Stages and caches the rows of `page` for the misses in `range`, which are all on that page.
/// `None` is a damaged page.
fn stage(
    model: &Model,
    misses: &mut MissList,
    range: Range<usize>,
    page: Option<&Page<'_>>,
    negative_cache: &mut NegativeCache,
) {
    for i in range {
        let miss = misses.list()[i];
        let segment = model.rows(miss.row.table).segment(RowLocation::unpack(miss.place));

        let state = match page.map(|page| segment.row(page, miss.row.key)) {
            None => RowState::Damaged,
            Some(None) => {
                negative_cache.insert(miss.row);
                RowState::Absent
            }
            Some(Some(bytes)) => {
                misses.row_mut(miss.slot)[..bytes.len()].copy_from_slice(bytes);
                // On a GPU, `finish_bags` inserts all rows together after the last page.
                if let Some(cache) = model.cpu_cache(miss.row.table) {
                    cache.insert(miss.row, bytes, miss.epoch);
                }
                RowState::Fresh
            }
        };

        misses.set_state(miss.slot, state);
    }
}
