//! Zeroed memory on huge pages, if the system has them. A read of a random row then costs a cache
//! miss but no walk of the page tables. The memory never moves or grows.

#![allow(unsafe_code)]

use memmap2::{MmapMut, MmapRaw};
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A type of which all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes must be a valid value. The type must have no destructor and an alignment of at
/// most a page.
pub unsafe trait Zeroable {}

// SAFETY: zero is a value, and there is no destructor.
unsafe impl Zeroable for u8 {}
// SAFETY: zero is a value, and there is no destructor.
unsafe impl Zeroable for i8 {}
// SAFETY: zero is a value, and there is no destructor.
unsafe impl Zeroable for f32 {}
// SAFETY: zero is a value, and there is no destructor.
unsafe impl Zeroable for half::f16 {}
// SAFETY: an atomic has the representation of its integer.
unsafe impl Zeroable for std::sync::atomic::AtomicU32 {}

/// A slice of `T` that was zeroed at its creation and starts on a page.
pub struct Zeroed<T> {
    /// `None` if the slice is empty.
    map: Option<MmapRaw>,
    of: PhantomData<T>,
}

impl<T> Default for Zeroed<T> {
    /// Returns an empty slice.
    fn default() -> Self {
        Self { map: None, of: PhantomData }
    }
}

impl<T: Zeroable> Zeroed<T> {
    /// Creates a slice of `len` zeros.
    pub fn new(len: usize) -> Self {
        let layout =
            Layout::array::<T>(len).unwrap_or_else(|_| handle_alloc_error(Layout::new::<T>()));
        let map = (layout.size() > 0).then(|| {
            let map =
                MmapMut::map_anon(layout.size()).unwrap_or_else(|_| handle_alloc_error(layout));
            #[cfg(target_os = "linux")]
            if let Err(e) = map.advise(memmap2::Advice::HugePage) {
                log::debug!("{} bytes of memory are not on huge pages: {e}", layout.size());
            }
            MmapRaw::from(map)
        });
        Self { map, of: PhantomData }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: the mapping starts on a page, was created zeroed, and is written only through
        // `T`.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / size_of::<T>()) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        let Some(map) = &self.map else { return &mut [] };
        // SAFETY: as in `deref`, and `self` is borrowed mutably for as long as the slice.
        unsafe {
            std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), map.len() / size_of::<T>())
        }
    }
}
