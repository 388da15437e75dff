//! Memory that the GPU reaches: its own, or pinned and mapped host memory. What a Tegra lacks
//! (managed memory, memory pools, IPC) is used on no GPU. A [`View`] is what a launch is told of
//! either. Freeing waits until the device is done with it.

#![allow(unsafe_code)]

use super::driver::{Call, Gpu, Result, Stream};
use cudarc::driver::{DriverError, result, sys};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Plain values that lie in device memory as they do here; all-zero bytes are a value.
///
/// # Safety
/// `repr(C)` or a primitive, without padding, references or destructor, and valid as zeros.
pub unsafe trait DeviceValue: Copy {}
// SAFETY: primitives.
unsafe impl DeviceValue for u8 {}
// SAFETY: as above.
unsafe impl DeviceValue for u16 {}
// SAFETY: as above.
unsafe impl DeviceValue for u32 {}
// SAFETY: as above.
unsafe impl DeviceValue for u64 {}
// SAFETY: as above.
unsafe impl DeviceValue for i32 {}
// SAFETY: as above.
unsafe impl DeviceValue for f32 {}

/// Values that a launch reads or writes: their place for the device, and their number.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    address: u64,
    len: usize,
    of: PhantomData<&'a T>,
}

impl<T> View<'_, T> {
    /// Nothing; the kernels take it as "none".
    pub fn none() -> Self {
        Self { address: 0, len: 0, of: PhantomData }
    }

    /// The first `len`.
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len, "{len} of {} values", self.len);
        Self { len, ..self }
    }

    /// Where they lie.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Values in device memory.
pub struct Buffer<T> {
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
    of: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// All of them, for a launch.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, of: PhantomData }
    }

    /// Where they lie on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.context().bind_to_thread()?;
            // SAFETY: nobody has it any more; the driver waits for the device first.
            unsafe { result::free_sync(self.address) }
        };
        report("free device memory", free());
    }
}

/// Values in pinned host memory that the device reaches too. The host reads what the device wrote
/// only after it waited.
pub struct Mapped<T> {
    host: NonNull<T>,
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
}

// SAFETY: it owns its memory as a `Box` does.
unsafe impl<T: Send> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// All of them, for a launch.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, of: PhantomData }
    }

    /// Where they lie for the device.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl<T: DeviceValue> Deref for Mapped<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values were zeroed here; the device writes only between a launch and the
        // wait for it.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }
    }
}

impl<T: DeviceValue> DerefMut for Mapped<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.len) }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.context().bind_to_thread()?;
            // A kernel may still write here; none does on a GPU that cannot be waited for.
            report("wait for the device", self.gpu.wait_for_all());
            // SAFETY: nobody has it any more.
            unsafe { result::free_host(self.host.as_ptr().cast()) }
        };
        report("free pinned memory", free());
    }
}

impl Gpu {
    /// `len` zeros in device memory.
    ///
    /// # Errors
    /// There is not enough.
    pub fn buffer<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        self.context().bind_to_thread().call("bind")?;
        // The driver refuses an allocation of nothing.
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: nobody has its address before it is zeroed.
        let address = unsafe { result::malloc_sync(bytes) }.call("allocate device memory")?;
        let buffer = Buffer { address, len, gpu: Arc::clone(self), of: PhantomData };
        // On a stream of ours, and waited for: the driver's own zeroing is not done when it
        // returns, and is in no order with what our streams write then.
        let stream = self.own_stream();
        // SAFETY: those bytes were just allocated.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }
            .call("zero device memory")?;
        stream.synchronize().call("zero device memory")?;
        Ok(buffer)
    }

    /// `len` zeros in host memory that the device reaches too. Where its memory is not the host's
    /// every access of the device crosses the bus: for what is small or read once.
    ///
    /// # Errors
    /// There is not enough.
    pub fn mapped<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Mapped<T>> {
        self.context().bind_to_thread().call("bind")?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: nobody has its address before it is zeroed.
        let host = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }
            .call("allocate pinned memory")?;
        let out_of_memory = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let host: NonNull<T> =
            NonNull::new(host.cast()).ok_or(out_of_memory).call("allocate pinned memory")?;
        let mut mapped = Mapped { host, address: 0, len, gpu: Arc::clone(self) };
        // SAFETY: so many bytes were allocated; the driver writes one address.
        unsafe {
            mapped.host.as_ptr().cast::<u8>().write_bytes(0, bytes);
            sys::cuMemHostGetDevicePointer_v2(&mut mapped.address, mapped.host.as_ptr().cast(), 0)
        }
        .result()
        .call("map pinned memory")?;
        Ok(mapped)
    }
}

impl Stream {
    /// Copies `from` to `to[at..]` and waits for it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn upload<T: DeviceValue>(&self, from: &[T], to: &mut Buffer<T>, at: usize) -> Result<()> {
        assert!(at + from.len() <= to.len);
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let address = to.address + (at * size_of::<T>()) as u64;
        // SAFETY: it fits, and the host waits before it lets go of `from`.
        unsafe { result::memcpy_htod_async(address, from, self.raw().cu_stream()) }
            .call("copy to the device")?;
        self.wait()
    }

    /// Copies `from[at..]` to `to` and waits for it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn download<T: DeviceValue>(
        &self,
        from: &Buffer<T>,
        at: usize,
        to: &mut [T],
    ) -> Result<()> {
        assert!(at + to.len() <= from.len);
        if to.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let address = from.address + (at * size_of::<T>()) as u64;
        // SAFETY: it fits, any bytes are a value, and the host waits before it lets go of `to`.
        unsafe { result::memcpy_dtoh_async(to, address, self.raw().cu_stream()) }
            .call("copy from the device")?;
        self.wait()
    }

    /// Puts a copy of `from` to `to` onto the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn copy<T: DeviceValue>(&self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        assert!(from.len <= to.len);
        self.bind()?;
        let (bytes, stream) = (from.len * size_of::<T>(), self.raw().cu_stream());
        // SAFETY: it fits; both stay until the device has passed, since freeing waits for it.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream) }
            .call("copy on the device")
    }

    /// Puts a copy of the first `len` values of `from` to `to` onto the stream; they are read when
    /// the stream comes to it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn bring<T: DeviceValue>(
        &self,
        from: &Mapped<T>,
        to: &Buffer<T>,
        len: usize,
    ) -> Result<()> {
        assert!(len <= to.len);
        self.bind()?;
        // SAFETY: it fits; both stay until the device has passed, since freeing waits for it, and
        // any bytes are a value.
        unsafe { result::memcpy_htod_async(to.address, &from[..len], self.raw().cu_stream()) }
            .call("bring to the device")
    }
}

/// What became of giving something back: nobody is left to be told.
pub(super) fn report(what: &str, done: std::result::Result<(), DriverError>) {
    if let Err(e) = done {
        log::error!("CUDA: {what}: {e}");
    }
}
