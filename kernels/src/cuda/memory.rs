//! Memory that the GPU can access: its own ([`Buffer`]), or pinned and mapped host memory
//! ([`Mapped`]). A launch receives either as a [`View`]. On all GPUs this file avoids features that
//! a Tegra lacks: managed memory, memory pools, IPC.
//!
//! Freeing does not wait for the device: NVIDIA only says that `cuMemFree` may, and a wait for the
//! whole context would wait for requests of other workers. The owner of memory has waited for what
//! it launched, or drops its streams first, whose drops wait. Who launched changes of the tables
//! waits for these.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::{CudaError, DriverError, Result, check, report};
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Plain values with the same layout in device memory as here; all-zero bytes are a value.
///
/// # Safety
/// `repr(C)` or a primitive, without padding, references or destructor, and valid as zeros.
pub unsafe trait DeviceValue: Copy {}

macro_rules! primitives {
    ($($primitive:ty)*) => {
        $(
            // SAFETY: a primitive number: no padding, and zero is a value.
            unsafe impl DeviceValue for $primitive {}
        )*
    };
}

primitives!(u8 u16 u32 u64 i32 f32);

/// Values that a launch reads or writes: their device address and their number.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    address: u64,
    len: usize,
    on_host: bool,
    of: PhantomData<&'a T>,
}

impl<T> View<'_, T> {
    /// Returns the null view, which kernels take as "none".
    pub fn none() -> Self {
        Self { address: 0, len: 0, on_host: false, of: PhantomData }
    }

    /// Returns the first `len` values.
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len, "{len} of {} values", self.len);
        Self { len, ..self }
    }

    /// Returns the values after the first `count`.
    pub fn skip(self, count: usize) -> Self {
        assert!(count <= self.len, "{count} of {} values", self.len);
        Self {
            address: self.address + (count * size_of::<T>()) as u64,
            len: self.len - count,
            ..self
        }
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns whether the values are in the host's memory.
    pub(crate) fn on_host(&self) -> bool {
        self.on_host
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the view holds no value.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Values in device memory, `[len]`.
pub struct Buffer<T> {
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
    of: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Returns a view of all values, for a launch.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, on_host: false, of: PhantomData }
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of values.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.bind()?;
            // SAFETY: the only owner is being dropped, after a wait for the work that used it.
            check("free device memory", unsafe { (self.gpu.driver().free)(self.address) })
        };
        report(free());
    }
}

/// Values in pinned host memory that the device can access too, `[len]`. The host reads values that
/// the device wrote only after it has waited for the device.
pub struct Mapped<T> {
    host: NonNull<T>,
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
}

// SAFETY: a `Mapped` owns its memory as a `Box` does.
unsafe impl<T: Send> Send for Mapped<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// Returns a view of all values, for a launch.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, on_host: true, of: PhantomData }
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl<T: DeviceValue> Deref for Mapped<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory holds `len` initialized values; the device writes only between a
        // launch and the host's wait for that launch.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }
    }
}

impl<T: DeviceValue> DerefMut for Mapped<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` excludes every other access of the host.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.len) }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.bind()?;
            // SAFETY: as in the drop of a `Buffer`.
            let result = unsafe { (self.gpu.driver().free_pinned)(self.host.as_ptr().cast()) };
            check("free pinned memory", result)
        };
        report(free());
    }
}

impl Gpu {
    /// Allocates `len` zeros in device memory.
    ///
    /// # Errors
    /// [`CudaError::NoRoom`], or `CudaError::Driver`.
    pub fn buffer<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        self.bind()?;
        // The driver refuses an allocation of nothing.
        let bytes = (len * size_of::<T>()).max(1);
        let mut address = 0;
        // SAFETY: the call writes one address. No other code has it before the memory is zeroed.
        let result = unsafe { (self.driver().allocate)(&mut address, bytes) };
        if result == DriverError::OUT_OF_MEMORY.0 {
            return Err(CudaError::NoRoom { needed: bytes as u64, free: self.free_bytes()? });
        }
        check("allocate device memory", result)?;
        let buffer = Buffer { address, len, gpu: Arc::clone(self), of: PhantomData };

        // The memory is zeroed on a stream of this crate, and the host waits. The driver's own
        // `memset` returns before it is done and is not ordered with other streams.
        let stream = self.own_stream();
        // SAFETY: `bytes` bytes were just allocated at `address`.
        let result = unsafe { (self.driver().set_bytes)(address, 0, bytes, stream.handle()) };
        check("zero device memory", result)?;
        stream.wait()?;
        Ok(buffer)
    }

    /// Allocates `len` zeros in host memory that the device can access too. If the GPU has its own
    /// memory, every access by the device crosses the bus. This memory is therefore for small data
    /// and for data that the device reads once.
    ///
    /// # Errors
    /// `CudaError::Driver` if there is not enough memory.
    pub fn mapped<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Mapped<T>> {
        self.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        let (driver, mut host) = (self.driver(), null_mut());
        // SAFETY: the call writes one address. No other code has it before the memory is zeroed.
        let result =
            unsafe { (driver.allocate_pinned)(&mut host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) };
        check("allocate pinned memory", result)?;
        let Some(host) = NonNull::new(host.cast::<T>()) else {
            let error = DriverError::OUT_OF_MEMORY;
            return Err(CudaError::Driver { call: "allocate pinned memory", error });
        };
        let mut mapped = Mapped { host, address: 0, len, gpu: Arc::clone(self) };
        // SAFETY: `bytes` bytes were allocated at `host`; the driver writes one address.
        let result = unsafe {
            mapped.host.as_ptr().cast::<u8>().write_bytes(0, bytes);
            (driver.address_of_pinned)(&mut mapped.address, mapped.host.as_ptr().cast(), 0)
        };
        check("map pinned memory", result)?;
        Ok(mapped)
    }
}

impl Stream {
    /// Copies `from` to `to[at..]` and waits until the copy is done.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn upload<T: DeviceValue>(&self, from: &[T], to: &Buffer<T>, at: usize) -> Result<()> {
        assert!(at + from.len() <= to.len);
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let address = to.address + (at * size_of::<T>()) as u64;
        // SAFETY: the copy fits into `to`, and the host waits before it releases `from`.
        let result = unsafe {
            let (from, bytes) = (from.as_ptr().cast(), size_of_val(from));
            (self.gpu().driver().copy_to_device)(address, from, bytes, self.raw())
        };
        check("copy to the device", result)?;
        self.wait()
    }

    /// Copies `from[at..]` to `to` and waits until the copy is done.
    ///
    /// # Errors
    /// `CudaError::Driver`.
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
        // SAFETY: the copy fits, any bytes are a value, and the host waits before it releases `to`.
        let result = unsafe {
            let (to, bytes) = (to.as_mut_ptr().cast(), size_of_val(to));
            (self.gpu().driver().copy_from_device)(to, address, bytes, self.raw())
        };
        check("copy from the device", result)?;
        self.wait()
    }

    /// Puts a copy from `from` to `to` onto the stream. Both must outlive it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn copy<T: DeviceValue>(&self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        assert!(from.len <= to.len);
        self.bind()?;
        let (bytes, stream) = (from.len * size_of::<T>(), self.raw());
        // SAFETY: the copy fits, and the caller keeps both buffers until it is done.
        let result = unsafe {
            (self.gpu().driver().copy_on_device)(to.address, from.address, bytes, stream)
        };
        check("copy on the device", result)
    }

    /// Puts a copy of the first `len` values of `from` to `to` onto the stream. The device reads
    /// them when the stream reaches the copy, which both must outlive.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn upload_async<T: DeviceValue>(
        &self,
        from: &Mapped<T>,
        to: &Buffer<T>,
        len: usize,
    ) -> Result<()> {
        assert!(len <= to.len);
        self.bind()?;
        // SAFETY: the copy fits, any bytes are a value, and the caller keeps both until it is done.
        let result = unsafe {
            let (from, bytes) = (from[..len].as_ptr().cast(), len * size_of::<T>());
            (self.gpu().driver().copy_to_device)(to.address, from, bytes, self.raw())
        };
        check("copy to the device", result)
    }
}
