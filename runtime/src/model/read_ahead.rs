//! Reads runs of pages on a thread of its own while the caller uses the run before. Never checks
//! what it read.

use crate::flash::table::{RowLocation, TableRows};
use crate::io::page::AlignedPage;
use crate::limits::{PAGE_BYTES, VERIFY_PAGES};
use std::sync::mpsc::{channel, sync_channel};
use std::thread;

/// Buffers for runs: the thread reads into one while the caller uses the other.
const BUFFERS: usize = 2;

/// Returns the bytes of all buffers for runs in segments of up to `pages` pages.
pub(super) fn buffer_bytes(pages: usize) -> usize {
    BUFFERS * pages.min(VERIFY_PAGES) * PAGE_BYTES
}

/// Consecutive pages of a segment, at least one.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// The first page.
    pub first: RowLocation,
    pub pages: usize,
}

/// The pages of the run that was read last. The device may have refused that run.
#[derive(Default)]
struct RunBuffer {
    pages: Vec<AlignedPage>,
    is_read: bool,
}

impl RunBuffer {
    /// Reads `run` of `rows` on the caller's thread.
    fn read(&mut self, rows: &TableRows, run: Run) {
        // The buffer only grows: runs have different lengths, and each buffer is used for many of
        // them. Exactly, as `buffer_bytes` counts it.
        self.pages.reserve_exact(run.pages.saturating_sub(self.pages.len()));
        self.pages.resize_with(self.pages.len().max(run.pages), AlignedPage::zeroed);
        let pages = &mut self.pages[..run.pages];
        self.is_read = rows.segment(run.first).file().read_pages(run.first.page, pages).is_ok();
    }

    /// Returns the pages of `run`, which was read last; `None` if the device refused it.
    fn pages_of(&self, run: Run) -> Option<&[AlignedPage]> {
        self.is_read.then(|| &self.pages[..run.pages])
    }
}

/// Reads `runs` of `rows` in their order. Passes the number of each and its pages to `take`; `None`
/// if the device refused that run. The caller's thread reads if the system gives no other thread,
/// or if the files are not the system's.
pub(super) fn read_ahead(
    rows: &TableRows,
    runs: &[Run],
    mut take: impl FnMut(usize, Option<&[AlignedPage]>),
) {
    let is_system = rows.segments()[0].file().system_file().is_some();
    let read = |buffer: &mut RunBuffer, run| buffer.read(rows, run);
    if runs.len() > 1 && is_system && read_on_thread(&read, runs, &mut take).is_some() {
        return;
    }
    let mut buffer = RunBuffer::default();
    for (number, run) in runs.iter().enumerate() {
        buffer.read(rows, *run);
        take(number, buffer.pages_of(*run));
    }
}

/// Does the work of [`read_ahead`] with `read`. Returns `None`, and has done nothing, if the system
/// gives no thread.
fn read_on_thread(
    read: &(impl Fn(&mut RunBuffer, Run) + Sync),
    runs: &[Run],
    take: &mut impl FnMut(usize, Option<&[AlignedPage]>),
) -> Option<()> {
    thread::scope(|scope| {
        let (used, unused) = channel::<RunBuffer>();
        let (done, filled) = sync_channel::<RunBuffer>(BUFFERS);
        let reader = move || {
            for run in runs {
                // The caller is gone if `take` panicked.
                let Ok(mut buffer) = unused.recv() else { return };
                read(&mut buffer, *run);
                if done.send(buffer).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().spawn_scoped(scope, reader).ok()?;
        for _ in 0..BUFFERS {
            used.send(RunBuffer::default()).ok()?;
        }
        for (number, run) in runs.iter().enumerate() {
            let Ok(buffer) = filled.recv() else { break };
            take(number, buffer.pages_of(*run));
            // The thread is gone after the last run.
            let _ = used.send(buffer);
        }
        Some(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(page: u32, pages: usize) -> Run {
        Run { first: RowLocation { segment: 0, page }, pages }
    }

    /// Writes the number of each page into the page. Refuses every fifth run.
    fn read(buffer: &mut RunBuffer, run: Run) {
        buffer.pages.resize_with(buffer.pages.len().max(run.pages), AlignedPage::zeroed);
        for (page, number) in buffer.pages[..run.pages].iter_mut().zip(run.first.page..) {
            page.0[..4].copy_from_slice(&number.to_le_bytes());
        }
        buffer.is_read = !run.first.page.is_multiple_of(5);
    }

    #[test]
    fn runs_arrive_in_their_order_with_their_own_pages() {
        let runs: Vec<Run> = (1..200).map(|n| run(7 * n, 1 + n as usize % 9)).collect();
        let mut arrived = 0;
        read_on_thread(&read, &runs, &mut |number, pages| {
            assert_eq!(number, arrived);
            arrived += 1;
            let run = runs[number];
            assert_eq!(pages.is_none(), run.first.page.is_multiple_of(5));
            let Some(pages) = pages else { return };
            assert_eq!(pages.len(), run.pages);
            let numbers =
                pages.iter().map(|p| u32::from_le_bytes([p.0[0], p.0[1], p.0[2], p.0[3]]));
            assert!(numbers.eq(run.first.page..run.first.page + run.pages as u32));
        })
        .unwrap();
        assert_eq!(arrived, runs.len());
    }

    #[test]
    fn the_thread_ends_with_a_caller_that_panics() {
        let runs = [run(1, 1); 50];
        let caller = || read_on_thread(&read, &runs, &mut |_, _| panic!("stop"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(caller)).is_err());
    }
}
