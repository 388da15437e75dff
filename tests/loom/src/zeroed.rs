//! Memory of the model checker's atomics, which cannot be made from zeroed bytes. Takes the place
//! of `kernels/src/simd/huge_pages.rs` in a build with `--cfg loom`.

/// A slice of default values.
pub struct Zeroed<T>(Box<[T]>);

impl<T: Default> Zeroed<T> {
    /// Creates a slice of `len` default values.
    pub fn new(len: usize) -> Self {
        Self((0..len).map(|_| T::default()).collect())
    }
}

impl<T> std::ops::Deref for Zeroed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}
