//! The wrapper of the driver: its errors, what a recording refuses, and memory that threads free
//! while the device uses it. Runs on the stand-in for the driver, or with HATCHBACK_GPU=real on the
//! machine's GPU.

use hatchback_kernels::cuda::driver::{CudaError, Gpu, Profile, Stream};
use hatchback_kernels::cuda::graph::Graphs;
use hatchback_kernels::cuda::memory::{Buffer, Mapped};
use hatchback_kernels::gpu::GpuDenseError;
use hatchback_tests::standin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A driver that is newer than this program returns codes that no list has.
#[test]
fn an_error_that_no_list_has_is_typed() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a real driver returns no such code");
    };
    let stream = gpu.stream().unwrap();
    for (code, text) in [(46, "CUDA_ERROR (stand-in) (46)"), (9999, "error 9999, which the driver")]
    {
        stand_in.fault_code(code);
        stand_in.fault(c"wait", 0, 1);
        let e = stream.wait().unwrap_err();
        assert!(matches!(&e, CudaError::Driver { call: "wait for the stream", error }
            if error.0 == code as u32));
        assert!(e.to_string().contains(text), "{e}");
    }
    stand_in.fault_code(2);
    stream.wait().unwrap();
}

/// A stream's drop waits for its work; what the work used is freed even if that wait fails.
#[test]
fn a_stream_that_cannot_be_waited_for_keeps_no_memory() {
    let _turn = standin::alone();
    let gpu = standin::gpu(9);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a call that fails: only the stand-in can inject a fault");
    };
    let before = stand_in.counts().bytes;
    let owned = (gpu.stream().unwrap(), gpu.mapped::<u32>(9).unwrap());
    stand_in.fault(c"wait", 0, 1);
    drop(owned);
    assert_eq!(stand_in.counts().bytes, before);
    // The drop took the fault.
    gpu.stream().unwrap().wait().unwrap();
}

/// Work that waits or allocates memory cannot be recorded; the stream stays usable.
#[test]
fn work_that_invalidates_a_recording_is_an_error() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    let mut graphs = Graphs::new(gpu.stream().unwrap());
    let started = Instant::now();
    let refused: Result<usize, CudaError> = graphs.record(|stream| stream, |stream| stream.wait());
    assert!(matches!(refused.err().unwrap(), CudaError::Driver { .. }));
    // It pauses between attempts, for what other code does meanwhile.
    assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
    graphs.resources().wait().unwrap();
    let takes = |stream: &mut Stream| stream.gpu().buffer::<u8>(8).map(drop);
    assert!(graphs.record(|stream| stream, takes).is_err());
    let other = gpu.event().unwrap();
    gpu.stream().unwrap().record(&other).unwrap();
    assert!(graphs.record(|stream| stream, |stream| stream.after(&other)).is_err());
    graphs.resources().wait().unwrap();
    let failed = graphs.record(|stream| stream, |_| Err(GpuDenseError::Buffers("no".into())));
    assert!(matches!(failed.err().unwrap(), GpuDenseError::Buffers(_)));
    graphs.resources().wait().unwrap();
    // A recording that other code invalidates is repeated.
    let mut times = 0;
    let once = |stream: &mut Stream| {
        times += 1;
        if times == 1 { stream.wait() } else { Ok::<_, CudaError>(()) }
    };
    graphs.record(|stream| stream, once).unwrap();
    assert_eq!(times, 2);
}

/// Any thread may free an object that the device no longer uses. A graph's stream is dropped before
/// what the graph uses, so its work is over then. Nothing leaks.
#[test]
fn any_thread_frees_what_the_device_no_longer_uses() {
    let _turn = standin::alone();
    let gpu = standin::gpu(9);
    let bytes = || standin::load().map(|s| s.counts().bytes);
    let before = bytes();
    let (stream, event, buffer) =
        (gpu.stream().unwrap(), gpu.event().unwrap(), gpu.buffer::<u32>(999).unwrap());
    let mut pinned = gpu.mapped::<u32>(999).unwrap();
    pinned.fill(7);
    stream.upload_async(&pinned, &buffer, 999).unwrap();
    stream.record(&event).unwrap();
    std::thread::spawn(move || event.wait().unwrap()).join().unwrap();
    std::thread::spawn(move || drop(pinned)).join().unwrap();
    let mut out = vec![0; 999];
    stream.download(&buffer, 0, &mut out).unwrap();
    assert!(out.iter().all(|&v| v == 7));
    let mut graphs = Graphs::new((stream, buffer, gpu.buffer::<u32>(999).unwrap()));
    let work = |(stream, from, to): &mut (Stream, Buffer<u32>, Buffer<u32>)| stream.copy(from, to);
    graphs.record(|named| &named.0, work).unwrap();
    graphs.launch(0, |named| &named.0, |_, launch| launch()).unwrap();
    std::thread::spawn(move || drop(graphs)).join().unwrap();
    assert_eq!(bytes(), before);
}

/// Other threads allocate, free and wait while work is recorded.
#[test]
fn a_recording_and_other_threads_do_not_disturb_each_other() {
    let _turn = standin::alone();
    let gpu = standin::gpu(8);
    let done = AtomicBool::new(false);

    // A second opening, as by another model of the process.
    let other = Gpu::open(Profile { tegra: standin::is_board() }).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let (mapped, buffer) =
                    (other.mapped::<u32>(9).unwrap(), other.buffer::<u32>(9).unwrap());
                let stream = other.stream().unwrap();
                stream.upload_async(&mapped, &buffer, 9).unwrap();
                stream.wait().unwrap();
            }
        });

        let recorded = (0..60).try_for_each(|_| {
            let (from, to) = (gpu.mapped::<u32>(3).unwrap(), gpu.buffer::<u32>(3).unwrap());
            let mut graphs = Graphs::new((gpu.stream().unwrap(), from, to));
            let work = |(stream, from, to): &mut (Stream, Mapped<u32>, Buffer<u32>)| {
                stream.upload_async(from, to, 3)?;
                // Gives the other threads time to run.
                std::thread::sleep(Duration::from_micros(300));
                stream.upload_async(from, to, 3)
            };
            graphs.record(|named| &named.0, work)?;
            graphs.launch(0, |named| &named.0, |_, launch| launch())?;
            graphs.resources().0.wait()
        });

        done.store(true, Ordering::Relaxed);
        recorded.unwrap();
    });
}
