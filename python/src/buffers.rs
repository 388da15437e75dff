//! Python arrays as slices. Never copies, except 64-bit offsets.

use crate::errors;
use hatchback_capi::outcome::request;
use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A Python array, open for reading. The array cannot be resized or freed while it is open.
pub struct Array {
    name: &'static str,
    buffer: PyUntypedBuffer,
}

impl Array {
    /// Opens the array `from`. `name` is the argument's name, for errors.
    pub fn open(name: &'static str, from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(from)
            .map_err(|_| PyTypeError::new_err(format!("{name}: must be an array")))?;
        // pyo3 takes big-endian values for those of this machine.
        if let [b'>' | b'!', ..] = buffer.format().to_bytes() {
            let problem = "is big-endian; pass array.astype(array.dtype.newbyteorder(\"=\"))";
            return Err(PyTypeError::new_err(format!("{name}: {problem}")));
        }
        // The buffer of a masked array has the values under the mask, but not the mask.
        if from.get_type().name()? == "MaskedArray"
            && from.getattr("mask")?.call_method0("any")?.is_truthy()?
        {
            let problem = "has masked values; pass array.filled(value)";
            return Err(PyTypeError::new_err(format!("{name}: {problem}")));
        }
        Ok(Self { name, buffer })
    }

    /// Opens an array with one axis, as `open` does.
    pub fn open_line(name: &'static str, from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let array = Self::open(name, from)?;
        let problem = || format!("{name}: has shape {:?}, must have one axis", array.shape());
        if array.shape().len() == 1 { Ok(array) } else { Err(errors::of(request(problem()))) }
    }

    /// Returns the lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// Returns the values if they have the type `T`, else `None`.
    fn values<T: Element>(&self) -> PyResult<Option<&[T]>> {
        let Ok(typed) = self.buffer.as_typed::<T>() else { return Ok(None) };
        let not_contiguous = || {
            let problem = "is not C-contiguous; use numpy.ascontiguousarray";
            PyValueError::new_err(format!("{}: {problem}", self.name))
        };
        let values = typed.as_slice_ptr().ok_or_else(not_contiguous)?;
        // SAFETY: the buffer is open, so its values stay where they are. This thread holds the
        // interpreter's lock while it reads them; a caller who changes an array on another thread
        // without the lock breaks the rule of Python's buffers.
        Ok(Some(unsafe { values.as_ref() }))
    }

    /// Returns the values as f32.
    pub fn f32(&self) -> PyResult<&[f32]> {
        self.values::<f32>()?.ok_or_else(|| self.wrong_type("float32"))
    }

    /// Returns the values as keys. A negative key is the u64 of the same bits.
    pub fn keys(&self) -> PyResult<&[u64]> {
        // Most programs have int64 keys, so these are tried first.
        let Some(keys) = self.values::<i64>()? else {
            return self.values::<u64>()?.ok_or_else(|| self.wrong_type("int64 or uint64"));
        };
        // SAFETY: u64 has the size and alignment of i64, and every bit pattern is a value.
        Ok(unsafe { std::slice::from_raw_parts(keys.as_ptr().cast(), keys.len()) })
    }

    /// Returns the values as offsets. 64-bit offsets are converted into `wide`.
    pub fn offsets<'a>(&'a self, wide: &'a mut Vec<u32>) -> PyResult<&'a [u32]> {
        let out_of_range =
            |value: i64| PyValueError::new_err(format!("{}: {value} is not an offset", self.name));
        let narrow = |value: i64| u32::try_from(value).map_err(|_| out_of_range(value));
        if let Some(offsets) = self.values::<i64>()? {
            for &offset in offsets {
                wide.push(narrow(offset)?);
            }
        } else if let Some(offsets) = self.values::<i32>()? {
            for &offset in offsets {
                wide.push(narrow(offset.into())?);
            }
        } else {
            let offsets = self.values::<u32>()?;
            return offsets.ok_or_else(|| self.wrong_type("int64, int32 or uint32"));
        }
        Ok(wide)
    }

    /// Returns the values, to be written. The caller has just made the array; no other code has it.
    #[allow(clippy::mut_from_ref)]
    pub fn room<T: Element>(&self) -> PyResult<&mut [T]> {
        let typed = self.buffer.as_typed::<T>()?;
        let values = typed.as_slice_ptr().filter(|_| !self.buffer.readonly());
        let mut values = values.ok_or_else(|| self.wrong_type("writable array"))?;
        // SAFETY: the buffer is open and writable, and no other code has the array.
        Ok(unsafe { values.as_mut() })
    }

    fn wrong_type(&self, needed: &str) -> PyErr {
        let found = self.buffer.format().to_string_lossy().into_owned();
        PyTypeError::new_err(format!("{}: must be {needed}, is of format `{found}`", self.name))
    }
}
