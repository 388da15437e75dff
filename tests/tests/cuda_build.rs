//! The kernels that are committed are those of their sources: built anew they are the same to the byte, within their registers and
//! without spills. And what is said where there is no GPU.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_kernels::cuda::driver::{CudaError, Gpu, Profile};
use hatchback_tests::models::repository;
use std::process::Command;

#[test]
fn built_anew_the_kernels_are_the_same() {
    let done = Command::new("python3").arg(repository("kernels/cuda/make")).arg("--check").output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    match done.status.code() {
        Some(0) => println!("{said}"),
        Some(3) => println!("SKIPPED: building the kernels anew: {said}"),
        _ => panic!("{said}"),
    }
}

/// Only the machine's own driver can be asked before the stand-in is loaded: in a process of its own.
#[test]
fn without_a_gpu_the_reason_is_typed() {
    const CHILD: &str = "HATCHBACK_WITHOUT_STANDIN";
    if std::env::var_os(CHILD).is_some() {
        match Gpu::open(Profile::default()) {
            Err(e @ (CudaError::NoDriver | CudaError::NoGpu | CudaError::TooOld { .. })) => {
                println!("refused: {e}")
            }
            Err(e) => panic!("{e}"),
            Ok(gpu) => println!("SKIPPED: this machine has a GPU: {}", gpu.name()),
        }
        return;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "without_a_gpu_the_reason_is_typed", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && (said.contains("refused: ") || said.contains("SKIPPED")), "{said}");
}
