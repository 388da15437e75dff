//! Zeroed memory that never moves or grows, on huge pages where the system gives them: a random row
//! then costs a cache miss, not a walk of the page tables as well.

#![allow(unsafe_code)]

use memmap2::{MmapMut, MmapRaw};
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Types whose all-zero bytes are a value.
///
/// # Safety
/// Zeroed bytes must be a valid value, the type must need no destructor and be aligned to a page at
/// most.
pub unsafe trait Zeroable {}

// SAFETY: zero is a value, and there is no destructor.
unsafe impl Zeroable for u8 {}
// SAFETY: as above.
unsafe impl Zeroable for i8 {}
// SAFETY: as above.
unsafe impl Zeroable for f32 {}
// SAFETY: as above.
unsafe impl Zeroable for half::f16 {}
// SAFETY: an atomic has the representation of its integer.
unsafe impl Zeroable for std::sync::atomic::AtomicU32 {}

/// A slice of `T`, zeroed when it is made. Starts on a page.
pub struct Zeroed<T> {
    /// `None` where there is nothing to hold.
    map: Option<MmapRaw>,
    of: PhantomData<T>,
}

impl<T> Default for Zeroed<T> {
    /// Nothing.
    fn default() -> Self {
        Self { map: None, of: PhantomData }
    }
}

impl<T: Zeroable> Zeroed<T> {
    /// `len` zeros.
    pub fn new(len: usize) -> Self {
        let layout =
            Layout::array::<T>(len).unwrap_or_else(|_| handle_alloc_error(Layout::new::<T>()));
        let map = (layout.size() > 0).then(|| {
            let map =
                MmapMut::map_anon(layout.size()).unwrap_or_else(|_| handle_alloc_error(layout));
            #[cfg(target_os = "linux")]
            if let Err(e) = map.advise(memmap2::Advice::HugePage) {
                log::debug!("{} bytes without huge pages: {e}", layout.size());
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
        // SAFETY: the mapping starts on a page, was zero when made, and is written through `T`
        // only.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / size_of::<T>()) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        let Some(map) = &self.map else { return &mut [] };
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe {
            std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), map.len() / size_of::<T>())
        }
    }
}
