//! What a GPU and its driver are, asked one by one: what is to be known first of a board that
//! nobody has tried. A question without an answer says why. Runs no kernel.

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
        "shared bytes a block may ask for",
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    ),
    ("memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
    (
        "managed memory used by both at once",
        Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    ),
    ("host memory can be registered", Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
    (
        "host addresses hold for registered memory",
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    ),
    ("host memory can be mapped", Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
];

/// Question and answer, in the order in which they matter: whether the machine code of the kernels
/// loads, and what the driver's compiler makes of their PTX where that is all there is, come first.
///
/// # Errors
/// There is no GPU for us at all.
pub fn facts() -> Result<Vec<(String, String)>, CudaError> {
    let [code, any] = [true, false].map(|tegra| Gpu::open(Profile { tegra }));
    let (code, any) = (code?, any?);
    let mut told = vec![
        ("GPU".to_owned(), code.name().to_owned()),
        ("compute capability".to_owned(), format!("{}.{}", code.sm() / 10, code.sm() % 10)),
        (
            "bytes of memory".to_owned(),
            code.memory().map_or_else(|e| e.to_string(), |n| n.to_string()),
        ),
    ];
    for images in [launch::LOOKUP, launch::CHANGES, dense_kernels::IMAGES] {
        told.push((format!("machine code of `{}`", images.name), load(&code, &images)));
        let compiled = load(&any, &Images { cubins: &[], ..images });
        // What went before is only that there is no machine code, by intent.
        let compiled = compiled.rsplit("; ").next().unwrap_or_default().to_owned();
        told.push((format!("PTX of `{}`", images.name), compiled));
    }
    told.extend(ATTRIBUTES.map(|(name, attribute)| {
        let value = code.context().attribute(attribute);
        (name.to_owned(), value.map_or_else(|e| e.to_string(), |value| value.to_string()))
    }));
    Ok(told)
}

fn load(gpu: &Arc<Gpu>, images: &Images) -> String {
    let start = Instant::now();
    let loaded = gpu.module(images);
    let ms = start.elapsed().as_secs_f64() * 1e3;
    loaded.map_or_else(|e| e.to_string(), |_| format!("loads in {ms:.1} ms"))
}
