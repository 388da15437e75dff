//! Measures how long the device of a model's flash directory takes for the pages of a request. It
//! reads random pages of the model's own segments past the page cache, with the queue depth of the
//! budget. Never writes.

use anyhow::{Result, ensure};
use hatchback::flash::Flash;
use hatchback::flash::segment::Segment;
use hatchback::io::reader::{PageReader, ReadMethod};
use hatchback::mix;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// Numbers of pages in a batch, ascending.
const BATCHES: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Pages that are read for each batch size, in at least `REPEATS_MIN` batches.
const PAGES: usize = 400;
const REPEATS_MIN: usize = 20;

/// The time of a batch of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PageTime {
    /// Pages of the batch.
    pub pages: u32,
    /// Median, µs.
    pub p50_us: f64,
    /// 99th percentile, µs.
    pub p99_us: f64,
}

/// The times of a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceTimes {
    /// Reads in flight.
    pub depth: u32,
    /// `io_uring` or `threads`.
    pub method: String,
    /// The times, by ascending number of pages.
    pub times: Vec<PageTime>,
}

impl DeviceTimes {
    /// Measures the device of `flash` with up to `depth` reads in flight.
    ///
    /// # Errors
    /// A page cannot be read.
    pub fn measure(flash: &Flash, depth: u32) -> Result<Self> {
        let mut segments: Vec<Arc<Segment>> = Vec::new();
        for table in 0..flash.manifest().schema.tables.len() {
            segments.extend(flash.table(table)?.segments().iter().cloned());
        }
        let pages: u64 = segments.iter().map(|segment| pages_of(segment)).sum();
        ensure!(pages > 0, "{}: has no page of rows", flash.directory().display());

        let mut reader = PageReader::new(depth as usize, ReadMethod::Auto);
        let (mut random, mut times) = (0, Vec::<PageTime>::new());
        for batch in BATCHES {
            let mut us = Vec::new();
            for _ in 0..(PAGES / batch as usize).max(REPEATS_MIN) {
                random += u64::from(batch);
                let picked = (0..u64::from(batch)).map(|i| mix(random + i) % pages);
                us.push(read_batch(&mut reader, &segments, &picked.collect::<Vec<_>>())?);
            }
            us.sort_unstable_by(f64::total_cmp);
            let at = |percent: usize| us[(us.len() * percent).div_ceil(100) - 1];
            // More pages cannot take less time, so a lower figure is noise.
            let before: PageTime = times.last().copied().unwrap_or_default();
            let (p50_us, p99_us) = (at(50).max(before.p50_us), at(99).max(before.p99_us));
            times.push(PageTime { pages: batch, p50_us, p99_us });
        }
        Ok(Self { depth, method: reader.method().to_owned(), times })
    }

    /// Returns the 99th percentile of the time of `pages` pages, µs, interpolated between
    /// measurements.
    pub fn p99_us(&self, pages: f64) -> f64 {
        let (Some(first), Some(last)) = (self.times.first(), self.times.last()) else { return 0.0 };
        let points = self.times.windows(2).map(|pair| (pair[0], pair[1]));
        let between = |(a, b): (PageTime, PageTime)| {
            let (from, to) = (f64::from(a.pages), f64::from(b.pages));
            let is_within = (from..=to).contains(&pages);
            is_within.then(|| a.p99_us + (b.p99_us - a.p99_us) * (pages - from) / (to - from))
        };
        if pages < 1.0 {
            return first.p99_us * pages.ceil();
        }
        let beyond = || last.p99_us * pages / f64::from(last.pages);
        points.map(between).find_map(|us| us).unwrap_or_else(beyond)
    }
}

fn pages_of(segment: &Segment) -> u64 {
    u64::from(segment.counts().data_pages)
}

/// Reads the pages with these numbers, counted over all `segments`. Returns the time, µs.
fn read_batch(reader: &mut PageReader, segments: &[Arc<Segment>], picked: &[u64]) -> Result<f64> {
    let mut failed = None;
    let start = Instant::now();
    let mut next = picked.iter();
    let mut is_done = false;
    while !is_done || reader.in_flight() > 0 {
        while !is_done && reader.reserve() {
            let Some(&number) = next.next() else {
                is_done = true;
                break;
            };
            let (segment, page) = place_of(segments, number);
            reader.begin(segment.file(), page, 0);
        }
        if reader.in_flight() > 0 {
            let arrived = reader.next(None, |_, page| failed = failed.take().or(page.err()));
            ensure!(arrived, "the page reader failed");
        }
    }
    match failed {
        Some(e) => Err(e.into()),
        None => Ok(start.elapsed().as_secs_f64() * 1e6),
    }
}

fn place_of(segments: &[Arc<Segment>], mut number: u64) -> (&Segment, u32) {
    for segment in segments {
        if number < pages_of(segment) {
            return (segment, number as u32);
        }
        number -= pages_of(segment);
    }
    unreachable!("page numbers are below the number of all pages")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_and_beyond_the_measured_batches_are_on_lines() {
        let time = |pages, p99_us| PageTime { pages, p50_us: 0.0, p99_us };
        let times = vec![time(1, 100.0), time(4, 160.0), time(8, 400.0)];
        let device = DeviceTimes { times, ..DeviceTimes::default() };
        let found = [0.0, 0.3, 1.0, 2.0, 4.0, 6.0, 16.0].map(|pages| device.p99_us(pages));
        assert_eq!(found, [0.0, 100.0, 100.0, 120.0, 160.0, 280.0, 800.0]);
        assert_eq!(DeviceTimes::default().p99_us(3.0), 0.0);
    }
}
