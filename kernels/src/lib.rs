//! What runs on or talks to an accelerator, and the CPU twin of each verb.
//!
//! Today this is the CPU side: row codecs ([`codec`]), the embedding cache ([`cache`]), resident
//! tables ([`resident`]), the fused lookup ([`query`]) with its miss list ([`misses`]), and the
//! dense network ([`dense`]). It is the reference that every accelerator must equal to the bit.

#![deny(unsafe_code)]

pub mod cache;
pub mod cuda;
pub mod dense;
pub mod gpu;
pub mod lookup;
pub mod simd;
