//! What runs on or talks to an accelerator, and the CPU twin of each verb.
//!
//! Today this is the CPU side: row codecs ([`codec`]), the embedding cache ([`cache`]), resident tables
//! ([`resident`]), the fused lookup ([`query`]) with its miss list ([`misses`]), and the dense network
//! ([`dense`]). It is the reference that every accelerator must equal to the bit.

#![deny(unsafe_code)]

mod ahead;
pub mod cache;
mod changes;
pub mod codec;
pub mod cuda;
pub mod dense;
mod eviction;
pub mod gather;
mod heads;
pub mod isa;
pub mod lead;
mod memory;
pub mod misses;
pub mod names;
pub mod query;
pub mod resident;
mod simd;
mod sum;
mod sync;
pub mod tensorrt;
mod vector;

pub use simd::prefetch;
