//! The GPU path, on the stand-in for the driver or on a real GPU.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tests::standin;

mod cuda_build;
mod cuda_changes;
mod cuda_driver;
mod cuda_kernels;
mod cuda_requests;
mod cuda_swaps;
mod gpu_chain;
mod gpu_dense;
mod gpu_requests;
mod not_finite;
mod one_key;
mod plans;
mod tensorrt;
mod tensorrt_engines;

/// Suites that AddressSanitizer watches; the others start processes or compile.
const WATCHED: [&str; 6] = [
    "cuda_changes::",
    "cuda_kernels::",
    "cuda_requests::",
    "cuda_swaps::",
    "gpu_requests::",
    "not_finite::",
];

#[test]
fn the_suites_pass_under_address_sanitizer() {
    standin::again_under_address_sanitizer(&WATCHED);
}
