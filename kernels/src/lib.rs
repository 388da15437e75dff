//! The kernels: the code that runs on an accelerator or on the CPU's vector units. Each operation
//! of a GPU has a CPU twin, which defines the result. A GPU must give the same bytes in caches and,
//! except for matrix products of libraries, the same bits in scores.
//!
//! * [`cache`]: row codecs, the embedding cache, resident tables.
//! * [`lookup`]: the fused lookup of a batch, and the miss list.
//! * [`dense`]: the dense network on the CPU.
//! * [`gpu`]: the same operations on a CUDA GPU.
//! * [`cuda`]: the safe wrapper of the CUDA driver, which knows no table and no network.
//! * [`simd`]: vector instructions, prefetches, atomics, huge pages.
//!
//! This crate reads no files but shared libraries and TensorRT plans, and opens no sockets. Imports
//! run down only: `gpu` to `dense` and `lookup`, these to `cache`, `cuda` and `simd`.

#![deny(unsafe_code)]

pub mod cache;
pub mod cuda;
pub mod dense;
pub mod gpu;
pub mod lookup;
pub mod simd;
