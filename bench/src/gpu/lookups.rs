//! Lookups alone, in loops of launches with rotating key sets. Never computes a score.

use super::figures::{GpuFigures, LOOKUP, LOOKUP_KEYS_COPIED, LOOKUP_KEYS_IN_PLACE};
use super::keys::{KEY_BYTES, KeySet, Rotation, Skew, load_sets, rotating_sets};
use super::loops::{LoopSize, time_launches};
use super::model::{DeviceInput, GpuModel, features};
use crate::filled_cache::TABLES;
use crate::peer::percentile;
use anyhow::Result;
use hatchback_kernels::gpu::InputType;
use hatchback_kernels::gpu::lookup::{GpuLookup, Keys, LookupLimits};

/// Where the keys of the timed lookups are.
#[derive(Clone, Copy)]
enum KeyTransfer {
    /// The keys are in device memory before the clock starts.
    Before,
    /// Each lookup copies its keys to the device.
    Copied,
    /// Each lookup reads its keys from host memory.
    InPlace,
}

/// Times lookups of `batch` samples with each way of their keys to the GPU. Many launches follow
/// one another, so that the figure is the device's time and not the way to the device.
///
/// # Errors
/// The device fails or has too little memory.
pub fn time_lookups(model: &GpuModel, batch: usize, quick: bool) -> Result<Vec<GpuFigures>> {
    let size = LoopSize::of_launches(batch * TABLES, quick);
    let row_bytes = model.format.row_bytes();
    // Headers do not count here, because rows share them.
    let launch_bytes = batch * TABLES * (8 + row_bytes);
    let count = rotating_sets(&model.gpu, launch_bytes, size.launches())?;
    let mut draw = model.tables.draw.with_seed(2);
    let sets: Vec<_> = (0..count).map(|_| draw.draw(batch, Skew::Uniform)).collect();
    let rotation = Rotation::new(&sets, model.tables.rows, row_bytes);

    let timed = LookupSets { model, sets: &sets, batch, size };
    let ways = [
        (LOOKUP, KeyTransfer::Before),
        (LOOKUP_KEYS_COPIED, KeyTransfer::Copied),
        (LOOKUP_KEYS_IN_PLACE, KeyTransfer::InPlace),
    ];
    let figures = ways.into_iter().map(|(what, transfer)| {
        Ok(GpuFigures { rotation: Some(rotation), ..timed.time(what, transfer)? })
    });
    figures.collect()
}

/// The lookups of one batch size.
struct LookupSets<'a> {
    model: &'a GpuModel,
    sets: &'a [KeySet],
    batch: usize,
    size: LoopSize,
}

impl LookupSets<'_> {
    fn time(&self, what: &str, transfer: KeyTransfer) -> Result<GpuFigures> {
        let Self { model, sets, batch, size } = *self;
        let format = model.format;
        let vectors = model.gpu.buffer::<f32>(batch * TABLES * format.dim())?;
        let default_row = vec![0.0; format.dim()];
        let input = DeviceInput { address: vectors.address(), input_type: InputType::F32 };
        let keys = match transfer {
            KeyTransfer::Before | KeyTransfer::Copied => Keys::Copied,
            KeyTransfer::InPlace => Keys::InPlace,
        };
        let limits = LookupLimits { keys, ..model.limits(batch, 1) };
        let features = features(format, 1, &default_row, input);
        let mut lookup = GpuLookup::new(&model.tables.on_gpu, &features, limits)?;
        let offsets: Vec<u32> = (0..=batch as u32).collect();
        load_sets(&mut lookup, sets, &offsets)?;

        let times = time_launches(&mut lookup, GpuLookup::stream, size, |lookup| {
            lookup.next_request();
            if let KeyTransfer::Copied = transfer {
                lookup.copy_keys(batch)?;
            }
            Ok(lookup.launch(batch)?)
        });
        let mut times = times?;
        let moved = TABLES * (KEY_BYTES + format.row_bytes() + 4 * format.dim());
        let gpu_us = percentile(&mut times.gpu_us, 0.5);
        Ok(GpuFigures {
            what: what.to_owned(),
            batch,
            rounds: times.host_us.len(),
            hit_rate: 1.0,
            p50_us: percentile(&mut times.host_us, 0.5),
            p99_us: percentile(&mut times.host_us, 0.99),
            gpu_us_p50: Some(gpu_us),
            launches: 1.0,
            gb_per_s: Some((batch * moved) as f64 / gpu_us / 1e3),
            ..GpuFigures::default()
        })
    }
}
