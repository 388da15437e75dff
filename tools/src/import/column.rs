//! Reads an array from its first row to its last and decodes it. Knows nothing of tables.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use super::array::Array;
use super::dtype::{Decode, Dtype};
use super::error::ImportError;
use crate::report::input;

/// An open array with a read position.
#[derive(Debug)]
pub(super) struct Column<T> {
    /// For messages: the array's name.
    pub(super) name: String,
    file: File,
    raw: Vec<u8>,
    row_bytes: u64,
    dtype: Dtype,
    decode: Decode<T>,
}

impl<T> Column<T> {
    pub(super) fn open(array: &Array, decode: Decode<T>) -> Result<Self, ImportError> {
        let fail = |error| ImportError::io(&array.file, "data", error);
        let mut file = input::open(&array.file).map_err(fail)?;
        file.seek(SeekFrom::Start(array.start)).map_err(fail)?;
        let (name, dtype, row_bytes) =
            (array.name.clone(), array.dtype, array.width * array.dtype.size());
        Ok(Self { name, file, raw: Vec::new(), row_bytes, dtype, decode })
    }

    /// Appends the next `rows` rows to `out`.
    pub(super) fn read(&mut self, rows: u64, out: &mut Vec<T>) -> Result<(), ImportError> {
        self.raw.resize((rows * self.row_bytes) as usize, 0);
        let read = self.file.read_exact(&mut self.raw);
        read.map_err(|error| ImportError::Io {
            file: self.name.clone(),
            field: "data",
            source: error,
        })?;
        (self.decode)(&self.raw, out);
        Ok(())
    }

    /// Returns number `at` of the last read before it was rounded to f32, if the array stores f64.
    pub(super) fn f64_at(&self, at: usize) -> Option<f64> {
        let bytes = self.raw.as_chunks().0.get(at)?;
        (self.dtype == Dtype::F64).then(|| f64::from_le_bytes(*bytes))
    }
}

/// Returns the decoder of an array of values, or an error if the array holds integers.
pub(super) fn value_decoder(array: &Array) -> Result<Decode<f32>, ImportError> {
    array.dtype.values().ok_or_else(|| bad_dtype("values", array, "not f16, bf16, f32 or f64"))
}

/// Returns the decoder of an array of keys or counts, or an error if it holds no integers.
pub(super) fn key_decoder(field: &'static str, array: &Array) -> Result<Decode<u64>, ImportError> {
    array.dtype.keys().ok_or_else(|| bad_dtype(field, array, "not i32, i64, u32 or u64"))
}

fn bad_dtype(field: &str, array: &Array, why: &str) -> ImportError {
    let (file, value) = (array.name.clone(), array.dtype.to_string());
    ImportError::Field { file, field: format!("dtype of {field}"), value, why: why.into() }
}
