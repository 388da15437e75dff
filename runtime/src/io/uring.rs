//! Page reads through io_uring. The only file of the runtime with `unsafe` code. Never touches a
//! buffer that the kernel may still write to.

#![allow(unsafe_code)]

use crate::io::page::{AlignedPage, PageBytes};
use crate::limits::{PAGE_BYTES, URING_WAIT_MAX};
use io_uring::{IoUring, Probe, opcode, types};
use std::cell::UnsafeCell;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// The user data of the timeout entry.
const TIMEOUT: u64 = u64::MAX;

/// A ring with one buffer for each read that may be in flight.
pub(crate) struct Ring {
    ring: ManuallyDrop<IoUring>,
    buffers: ManuallyDrop<Box<[UnsafeCell<AlignedPage>]>>,
    /// The limit of a wait. The kernel reads it when it accepts a timeout entry, which may be in a
    /// later call than the one that queued the entry.
    limit: ManuallyDrop<Box<types::Timespec>>,
    /// The read in flight into each buffer: its file, which stays open, and its token.
    reads: Vec<Option<(Arc<File>, u64)>>,
    free: Vec<usize>,
}

// SAFETY: the buffers are accessed only through `&mut Ring`, and only while no read into them is in
// flight. Moving the ring to another thread therefore moves the only access to the buffers.
unsafe impl Send for Ring {}

impl Ring {
    /// Returns a ring for up to `depth` reads in flight.
    ///
    /// # Errors
    /// The system has no io_uring with reads, or does not allow it.
    pub fn new(depth: usize) -> io::Result<Self> {
        // One more entry for the timeout.
        let entries = u32::try_from(depth + 1).map_err(io::Error::other)?.next_power_of_two();
        let ring = ManuallyDrop::new(IoUring::new(entries)?);
        // Linux 5.1 to 5.5 has rings, but would refuse each read.
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let buffers = (0..depth).map(|_| UnsafeCell::new(AlignedPage::zeroed())).collect();
        let reads = (0..depth).map(|_| None).collect();
        Ok(Self {
            ring,
            buffers: ManuallyDrop::new(buffers),
            limit: ManuallyDrop::default(),
            reads,
            free: (0..depth).collect(),
        })
    }

    pub fn in_flight(&self) -> usize {
        self.reads.len() - self.free.len()
    }

    /// Queues a read. Queued reads are submitted to the kernel together: when enough are queued, or
    /// when `next` waits.
    pub fn begin(&mut self, file: Arc<File>, number: u32, token: u64) {
        let Some(slot) = self.free.pop() else { unreachable!("the caller checked for room") };
        let buffer = self.buffers[slot].get().cast::<u8>();
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer, PAGE_BYTES as u32)
            .offset(u64::from(number) * PAGE_BYTES as u64)
            .build()
            .user_data(slot as u64);
        self.reads[slot] = Some((file, token));

        // SAFETY: the buffer and the file live until this entry's completion is handled. The slot
        // leaves `free` here and returns only in `complete`. `drop` waits for every slot or leaks
        // the buffers.
        let pushed = unsafe { self.ring.submission().push(&read) };
        assert!(pushed.is_ok(), "the ring has an entry for every buffer");

        // One system call for each quarter of the depth keeps the device busy while the caller
        // handles completions.
        if self.ring.submission().len() > self.reads.len() / 4 {
            self.submit();
        }
    }

    fn submit(&self) {
        if let Err(e) = self.ring.submit() {
            // The entries stay queued; `next` submits them again.
            log::warn!("io_uring: reads were not submitted, the next wait submits them again: {e}");
        }
    }

    /// Passes the token and the result of one completed read to `take`. Waits for a completion for
    /// at most `wait`; `None` waits without a limit. Returns false if no read completed.
    pub fn next(
        &mut self,
        wait: Option<Duration>,
        take: impl FnOnce(u64, io::Result<&PageBytes>),
    ) -> bool {
        let mut waited = false;
        while self.in_flight() > 0 {
            let completion = self.ring.completion().next().map(|c| (c.user_data(), c.result()));

            match completion {
                Some((TIMEOUT, _)) => {}
                Some((slot, result)) => {
                    self.complete(slot as usize, result, take);
                    return true;
                }
                None if waited && wait.is_some() => return false,
                None => {
                    if let Err(e) = self.wait(wait) {
                        log::error!("io_uring: waiting for reads failed: {e}");
                        return false;
                    }
                    waited = true;
                }
            }
        }

        false
    }

    fn complete(
        &mut self,
        slot: usize,
        result: i32,
        take: impl FnOnce(u64, io::Result<&PageBytes>),
    ) {
        let Some((_, token)) = self.reads[slot].take() else {
            unreachable!("the kernel completes a read once")
        };
        self.free.push(slot);

        let read = match result {
            n if n < 0 => Err(io::Error::from_raw_os_error(-n)),
            n if n as usize == PAGE_BYTES => {
                // SAFETY: the kernel completed the read into this buffer. No other read into the
                // buffer can start before `take` returns, because this method holds `&mut self`.
                Ok(unsafe { &(*self.buffers[slot].get()).0 })
            }
            n => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{n} bytes of a page"))),
        };
        take(token, read);
    }

    /// Submits the queued reads and waits for completions, for at most `wait`. With a limit it
    /// waits for one completion. Without a limit it waits until a sixteenth of the reads in flight
    /// are complete. One system call then returns several, and the device still has work.
    fn wait(&mut self, wait: Option<Duration>) -> io::Result<()> {
        if wait == Some(Duration::ZERO) {
            return self.ring.submit().map(drop);
        }

        if let Some(wait) = wait.map(|w| w.min(URING_WAIT_MAX)) {
            **self.limit = types::Timespec::new().sec(wait.as_secs()).nsec(wait.subsec_nanos());
            // The timeout also ends with the next completion. Kernels from 5.4 on support it.
            let timeout = opcode::Timeout::new(&**self.limit).count(1).build().user_data(TIMEOUT);
            // SAFETY: the kernel copies the time when it accepts the entry. The time lives as long
            // as the ring.
            let pushed = unsafe { self.ring.submission().push(&timeout) };
            if pushed.is_err() {
                return self.ring.submit().map(drop);
            }
        }

        let wanted = if wait.is_some() { 1 } else { self.in_flight() / 16 };
        match self.ring.submit_and_wait(wanted.max(1)) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            done => done.map(drop),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight() > 0 && self.next(None, |_, _| ()) {}
        if self.in_flight() > 0 {
            // The ring failed with reads in flight: the kernel may still write to the buffers, so
            // their memory is leaked.
            return;
        }
        // SAFETY: no field is used again. With no read in flight the kernel uses no buffer, and
        // without a ring it accepts no queued timeout.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            ManuallyDrop::drop(&mut self.buffers);
            ManuallyDrop::drop(&mut self.limit);
        }
    }
}
