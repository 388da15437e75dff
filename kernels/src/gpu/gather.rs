//! A plain gather of rows, whose speed is the limit for a lookup. Only `hatchback-bench gpu shapes`
//! runs it. Never waits.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream, images};
use crate::cuda::memory::Buffer;
use std::sync::Arc;

static IMAGES: Images = images!("gather");

/// Threads of a block, and units that each thread has in flight.
const THREADS: u32 = 256;
const UNITS: u64 = 4;

/// `PlainGather` of `gather.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgument {
    rows: u64,
    slots: u64,
    out: u64,
    row_words: u32,
    count: u32,
}

const _: () = assert!(size_of::<GatherArgument>() == 32);

/// The kernels of the gather on one GPU.
pub struct PlainGather {
    lines: Kernel,
    words: Kernel,
}

impl PlainGather {
    /// Loads the kernels.
    ///
    /// # Errors
    /// `CudaError::NoKernels`.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = gpu.module(&IMAGES)?;
        Ok(Self { lines: module.kernel("gather_lines")?, words: module.kernel("gather_words")? })
    }

    /// Puts onto `stream` a copy of the rows at `slots` of `rows`, each of `row_words` words, to
    /// the start of `out`. Every slot is one of the rows.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn launch(
        &self,
        stream: &Stream,
        rows: &Buffer<u32>,
        slots: &Buffer<u32>,
        row_words: usize,
        out: &Buffer<u32>,
    ) -> Result<()> {
        let values = slots.len() * row_words;
        assert!(row_words > 0 && out.len() >= values && values < u32::MAX as usize);
        let (kernel, unit) = match row_words.is_multiple_of(4) {
            true => (&self.lines, 4),
            false => (&self.words, 1),
        };
        let argument = GatherArgument {
            rows: rows.address(),
            slots: slots.address(),
            out: out.address(),
            row_words: row_words as u32,
            count: slots.len() as u32,
        };
        let units = (values / unit) as u64;
        let blocks = units.div_ceil(u64::from(THREADS) * UNITS);
        // SAFETY: the kernel's parameter; `out` has room, and the caller vouches for the slots.
        unsafe { stream.launch(kernel, blocks as u32, THREADS, argument) }
    }
}
