//! A report about a GPU and its driver, with the first facts to know about a new board. If a fact
//! cannot be read, the report has the driver's error instead. Runs no kernel.

use crate::cuda::driver::{CudaError, Gpu, Images, Profile};
use crate::gpu::{dense_kernels, launch};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::sync::Arc;
use std::time::Instant;

const ATTRIBUTES: [(&str, Attribute); 9] = [
    ("memory shared with the CPU", Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED),
    ("multiprocessors", Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
    ("bytes of L2", Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    (
        "shared bytes that a block may use",
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    ),
    ("memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
    (
        "managed memory used by CPU and GPU concurrently",
        Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    ),
    ("host memory can be registered", Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
    (
        "host addresses are valid for registered memory",
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    ),
    ("host memory can be mapped", Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
];

/// Returns names and values of facts. They include whether the machine code of the kernels loads,
/// and how long the driver takes to compile their PTX.
///
/// # Errors
/// As [`Gpu::open`], if no GPU can be used at all.
pub fn facts() -> Result<Vec<(String, String)>, CudaError> {
    let [board, desk] = [true, false].map(|tegra| Gpu::open(Profile { tegra }));
    let (board, desk) = (board?, desk?);
    let memory = board.memory().map_or_else(|e| e.to_string(), |n| n.to_string());
    let mut facts = vec![
        ("GPU".to_owned(), board.name().to_owned()),
        ("compute capability".to_owned(), format!("{}.{}", board.sm() / 10, board.sm() % 10)),
        ("bytes of memory".to_owned(), memory),
    ];

    for images in [launch::LOOKUP, launch::CHANGES, dense_kernels::IMAGES] {
        facts.push((format!("machine code of `{}`", images.name), load(&board, &images)));
        let compiled = load(&desk, &Images { cubins: &[], ..images });
        // The first part of the error says that there is no machine code, which is intended here.
        let compiled = compiled.rsplit("; ").next().unwrap_or_default().to_owned();
        facts.push((format!("PTX of `{}`", images.name), compiled));
    }

    facts.extend(ATTRIBUTES.map(|(name, attribute)| {
        let value = board.attribute(attribute);
        (name.to_owned(), value.map_or_else(|e| e.to_string(), |value| value.to_string()))
    }));
    Ok(facts)
}

fn load(gpu: &Arc<Gpu>, images: &Images) -> String {
    let start = Instant::now();
    let loaded = gpu.module(images);
    let ms = start.elapsed().as_secs_f64() * 1e3;
    loaded.map_or_else(|e| e.to_string(), |_| format!("loads in {ms:.1} ms"))
}
