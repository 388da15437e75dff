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

/// Suites and tests that AddressSanitizer watches. The others start processes, compile, or count
/// bytes over the bus, which the watched stand-in does not.
const WATCHED: [&str; 11] = [
    "cuda_changes::",
    "cuda_kernels::",
    "cuda_requests::",
    "cuda_swaps::",
    "gpu_chain::a_worker",
    "gpu_chain::an_answer",
    "gpu_chain::the_",
    "gpu_dense::",
    "gpu_requests::",
    "not_finite::",
    "tensorrt_engines::",
];

#[test]
fn the_suites_pass_under_address_sanitizer() {
    standin::again_under_address_sanitizer(&WATCHED);
}
