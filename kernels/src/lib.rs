//! The kernels: what runs on an accelerator or on the CPU's vector units. Every verb that a GPU
//! runs has a CPU twin, which defines the result: a GPU must give the same bytes and, but for
//! library matrix products, the same bits.
//!
//! * [`cache`]: row codecs, the embedding cache, resident tables.
//! * [`lookup`]: the fused lookup of a batch, and the miss list.
//! * [`dense`]: the dense network on the CPU.
//! * [`gpu`]: the twins of these verbs on a CUDA GPU.
//! * [`cuda`]: the fence around the CUDA driver, which knows no table and no network.
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
