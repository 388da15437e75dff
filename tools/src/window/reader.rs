//! Opens a window and reads its columns and rows. Holding a [`Window`] proves that `window.json` is
//! sound and that every file has the size that it states. [`Window::verify`] also checks the
//! hashes. Never changes a window.

use crate::limits::WINDOW_HEAD_BYTES_MAX;
use crate::report::input;
use crate::window::columns::{ColumnPlace, TableColumns, read_columns};
use crate::window::error::WindowError;
use crate::window::head::{DENSE, HEAD, PROBE, ROWS, WindowFile, WindowHead};
use hatchback::io::disk::{Disk, SystemDisk};
use hatchback::limits::DENSE_BYTES_MAX;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes that one read takes of a long column or file.
const READ_BYTES: usize = 1 << 20;

/// A closed window.
#[derive(Debug)]
pub struct Window {
    folder: PathBuf,
    /// The content of `window.json`.
    pub head: WindowHead,
    rows: File,
    /// The tables with changes, by name.
    pub tables: Vec<WindowTable>,
}

/// The changes of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowTable {
    /// The name of the table.
    pub name: String,
    /// The places of its columns.
    pub columns: TableColumns,
}

/// Buffers for one row, which the caller reuses from row to row.
#[derive(Debug, Default)]
pub struct RowBuffer {
    bytes: Vec<u8>,
    /// The values of the row, `[dim]`.
    pub values: Vec<f32>,
}

impl Window {
    /// Opens the window in `folder`.
    ///
    /// # Errors
    /// [`WindowError`] if a file is missing or is not what `window.json` says.
    pub fn open(folder: &Path) -> Result<Self, WindowError> {
        let head = Self::read_head(folder)?;
        for file in &head.files {
            let path = folder.join(&file.name);
            let bytes = std::fs::metadata(&path).map_err(WindowError::io(&path))?.len();
            if bytes != file.bytes {
                let why = format!("but {HEAD} says {}", file.bytes);
                return Err(WindowError::field(&path, "size", bytes, why));
            }
        }

        let path = folder.join(ROWS);
        let rows = input::open(&path).map_err(WindowError::io(&path))?;
        let bytes = rows.metadata().map_err(WindowError::io(&path))?.len();
        let columns = read_columns(&path, &rows, bytes)?;
        let tables =
            columns.into_iter().map(|(name, columns)| WindowTable { name, columns }).collect();
        Ok(Self { folder: folder.to_owned(), head, rows, tables })
    }

    /// Reads `window.json` of the window in `folder`.
    ///
    /// # Errors
    /// [`WindowError`] if the file cannot be read or a field is not allowed.
    pub fn read_head(folder: &Path) -> Result<WindowHead, WindowError> {
        let path = folder.join(HEAD);
        let text = SystemDisk.read(&path, WINDOW_HEAD_BYTES_MAX).map_err(WindowError::io(&path))?;
        WindowHead::parse(&path, &text)
    }

    /// Checks the hash of every file.
    ///
    /// # Errors
    /// [`WindowError`] with the first file whose content does not match its hash.
    pub fn verify(&self) -> Result<(), WindowError> {
        self.head.files.iter().try_for_each(|file| self.verify_file(file))
    }

    fn verify_file(&self, file: &WindowFile) -> Result<(), WindowError> {
        let path = self.folder.join(&file.name);
        let found = input::sha256(&path).map_err(WindowError::io(&path))?;
        if found != file.sha256 {
            let why = format!("but {HEAD} says {}", file.sha256);
            return Err(WindowError::field(&path, "SHA-256", found, why));
        }
        Ok(())
    }

    /// Returns the folder of the window.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the table named `name`, if the window changes it.
    pub fn table(&self, name: &str) -> Option<&WindowTable> {
        self.tables.iter().find(|table| table.name == name)
    }

    /// Returns the dense network, if the window has one.
    ///
    /// # Errors
    /// [`WindowError::Io`] if the file cannot be read or is over the limit.
    pub fn dense(&self) -> Result<Option<Vec<u8>>, WindowError> {
        self.content(DENSE)
    }

    /// Returns the probe lines, if the window has some.
    ///
    /// # Errors
    /// As [`Window::dense`].
    pub fn probe(&self) -> Result<Option<Vec<u8>>, WindowError> {
        self.content(PROBE)
    }

    fn content(&self, name: &str) -> Result<Option<Vec<u8>>, WindowError> {
        if self.head.file(name).is_none() {
            return Ok(None);
        }
        let path = self.folder.join(name);
        SystemDisk.read(&path, DENSE_BYTES_MAX).map(Some).map_err(WindowError::io(&path))
    }

    /// Returns a column of integers.
    ///
    /// # Errors
    /// [`WindowError::Io`] if the file cannot be read.
    pub fn words(&self, column: ColumnPlace) -> Result<Vec<u64>, WindowError> {
        let mut words = Vec::with_capacity(column.count as usize);
        self.each_block(column.at, 8 * column.count, |block| {
            words.extend(block.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)));
        })?;
        Ok(words)
    }

    /// Returns a column of one f32 a row, all finite and not negative.
    ///
    /// # Errors
    /// [`WindowError`] if the file cannot be read or a value is not allowed.
    pub fn floats(&self, column: ColumnPlace) -> Result<Vec<f32>, WindowError> {
        let mut values = Vec::with_capacity(column.count as usize);
        self.each_block(column.at, 4 * column.count, |block| {
            values.extend(block.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        })?;
        match values.iter().find(|value: &&f32| !(0.0..f32::INFINITY).contains(*value)) {
            None => Ok(values),
            Some(value) => {
                let path = self.folder.join(ROWS);
                Err(WindowError::field(&path, "traffic", value, "not finite or below 0"))
            }
        }
    }

    fn each_block(
        &self,
        at: u64,
        bytes: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), WindowError> {
        let mut block = vec![0; READ_BYTES.min(bytes as usize)];
        let mut done = 0;
        while done < bytes {
            let length = (bytes - done).min(READ_BYTES as u64) as usize;
            self.rows
                .read_exact_at(&mut block[..length], at + done)
                .map_err(|source| WindowError::Io { path: self.folder.join(ROWS), source })?;
            take(&block[..length]);
            done += length as u64;
        }
        Ok(())
    }

    /// Reads row `row` of `table` into `buffer`.
    ///
    /// # Errors
    /// [`WindowError::NotFinite`] if a value is NaN or infinite, [`WindowError::Io`] if the file
    /// cannot be read.
    pub fn read_row(
        &self,
        table: &WindowTable,
        row: u64,
        buffer: &mut RowBuffer,
    ) -> Result<(), WindowError> {
        let columns = &table.columns;
        let row_bytes = 4 * columns.dim;
        buffer.bytes.resize(row_bytes, 0);
        self.rows
            .read_exact_at(&mut buffer.bytes, columns.rows.at + row * row_bytes as u64)
            .map_err(|source| WindowError::Io { path: self.folder.join(ROWS), source })?;

        let values = buffer.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        buffer.values.clear();
        buffer.values.extend(values);
        match buffer.values.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(column) => Err(WindowError::NotFinite {
                path: self.folder.join(ROWS),
                table: table.name.clone(),
                row,
                column,
                value: buffer.values[column],
            }),
        }
    }
}
