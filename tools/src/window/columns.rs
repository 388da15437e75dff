//! The tensors of `rows.safetensors`: which columns each table has, and where their bytes are. The
//! `safetensors` crate proves that the tensors fill the file without gaps or overlaps. Reads only
//! the header.

use crate::limits::{HEADER_BYTES_MAX, WINDOW_ROWS_MAX};
use crate::window::error::WindowError;
use hatchback::limits::{DIM_MAX, TABLES_MAX};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of the length before the header.
const PREFIX: u64 = 8;

/// One array of a table: its first byte in the file and its entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColumnPlace {
    /// Offset of the first byte.
    pub at: u64,
    /// Number of entries; rows for the values.
    pub count: u64,
}

/// The columns of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableColumns {
    /// Values in a row.
    pub dim: usize,
    /// `NAME.keys`: the key of each row, u64.
    pub keys: ColumnPlace,
    /// `NAME.rows`: the values, f32 `[rows, dim]`.
    pub rows: ColumnPlace,
    /// `NAME.traffic`: lookups of each row in the window, f32.
    pub traffic: Option<ColumnPlace>,
    /// `NAME.since`: the window since which each row waits, u64. Backlogs only.
    pub since: Option<ColumnPlace>,
    /// `NAME.deleted`: deleted keys, u64.
    pub deleted: ColumnPlace,
    /// `NAME.deleted_since`: the window since which each deleted key waits, u64. Backlogs only.
    pub deleted_since: Option<ColumnPlace>,
    /// `NAME.hot`: the keys of most traffic, u64. Backlogs only.
    pub hot: ColumnPlace,
    /// `NAME.hot_traffic`: lookups of each of these in a window, f32. Backlogs only.
    pub hot_traffic: Option<ColumnPlace>,
}

/// Reads the columns of each table of `file`, which has `bytes` bytes and is named `path`.
///
/// # Errors
/// [`WindowError`] if the header or a tensor is not as FORMAT.md describes.
pub fn read_columns(
    path: &Path,
    file: &File,
    bytes: u64,
) -> Result<BTreeMap<String, TableColumns>, WindowError> {
    let mut prefix = [0; PREFIX as usize];
    file.read_exact_at(&mut prefix, 0).map_err(WindowError::io(path))?;
    let length = u64::from_le_bytes(prefix);
    if length > HEADER_BYTES_MAX || length.saturating_add(PREFIX) > bytes {
        let why = format!("over {HEADER_BYTES_MAX} or beyond the file's {bytes} bytes");
        return Err(WindowError::field(path, "header length", length, why));
    }

    let mut text = vec![0; length as usize];
    file.read_exact_at(&mut text, PREFIX).map_err(WindowError::io(path))?;
    let tensors: Metadata = serde_json::from_slice(&text).map_err(|e| {
        WindowError::field(path, "header", format!("{length} bytes of JSON"), e.to_string())
    })?;
    let expected = PREFIX + length + tensors.data_len() as u64;
    if expected != bytes {
        let why = format!("not {expected}, the header and all tensors");
        return Err(WindowError::field(path, "size", bytes, why));
    }

    let mut tables: BTreeMap<String, TableColumns> = BTreeMap::new();
    for name in tensors.offset_keys() {
        let Some(info) = tensors.info(&name) else { continue };
        let Some((table, column)) = name.rsplit_once('.') else {
            return Err(WindowError::field(path, "tensor", name, "not TABLE.COLUMN"));
        };
        let at = PREFIX + length + info.data_offsets.0 as u64;
        tables.entry(table.to_owned()).or_default().place(path, &name, column, info, at)?;
    }

    if tables.len() > TABLES_MAX {
        return Err(WindowError::field(path, "tables", tables.len(), format!("over {TABLES_MAX}")));
    }
    tables.iter().try_for_each(|(name, table)| table.check(path, name))?;
    Ok(tables)
}

impl TableColumns {
    fn place(
        &mut self,
        path: &Path,
        name: &str,
        column: &str,
        info: &TensorInfo,
        at: u64,
    ) -> Result<(), WindowError> {
        let bad = |field: &str, value: String, why: &str| {
            Err(WindowError::field(path, format!("{field} of tensor `{name}`"), value, why))
        };
        let count = info.shape.first().copied().unwrap_or_default() as u64;
        if count == 0 || count > WINDOW_ROWS_MAX {
            let why = format!("not 1 to {WINDOW_ROWS_MAX} entries; leave an empty column out");
            return bad("shape", format!("{:?}", info.shape), &why);
        }

        let (floats, rank) = match column {
            "keys" | "since" | "deleted" | "deleted_since" | "hot" => (false, 1),
            "traffic" | "hot_traffic" => (true, 1),
            "rows" => (true, 2),
            _ => {
                let why = "not keys, rows, traffic, since, deleted, deleted_since, hot or \
                           hot_traffic";
                return Err(WindowError::field(path, "column", name, why));
            }
        };
        if info.shape.len() != rank {
            let why = if rank == 1 { "not [rows]" } else { "not [rows, dim]" };
            return bad("shape", format!("{:?}", info.shape), why);
        }
        let allowed: &[Dtype] = if floats { &[Dtype::F32] } else { &[Dtype::U64, Dtype::I64] };
        if !allowed.contains(&info.dtype) {
            let why = if floats { "not F32" } else { "not U64 or I64" };
            return bad("dtype", info.dtype.to_string(), why);
        }

        let place = ColumnPlace { at, count };
        match column {
            "keys" => self.keys = place,
            "since" => self.since = Some(place),
            "deleted" => self.deleted = place,
            "deleted_since" => self.deleted_since = Some(place),
            "traffic" => self.traffic = Some(place),
            "hot" => self.hot = place,
            "hot_traffic" => self.hot_traffic = Some(place),
            _ => {
                self.dim = info.shape[1];
                if self.dim == 0 || self.dim > DIM_MAX {
                    return bad("dim", self.dim.to_string(), &format!("not 1 to {DIM_MAX}"));
                }
                self.rows = place;
            }
        }
        Ok(())
    }

    /// Checks that the columns of table `name` fit together.
    fn check(&self, path: &Path, name: &str) -> Result<(), WindowError> {
        let counts = [
            ("keys", Some(self.keys), self.rows.count),
            ("traffic", self.traffic, self.rows.count),
            ("since", self.since, self.rows.count),
            ("deleted_since", self.deleted_since, self.deleted.count),
            ("hot_traffic", Some(self.hot_traffic.unwrap_or_default()), self.hot.count),
        ];
        for (column, place, rows) in counts {
            let found = place.map_or(rows, |place| place.count);
            if found != rows {
                let why = format!("for {rows} rows or deleted keys");
                return Err(WindowError::field(path, format!("{name}.{column}"), found, why));
            }
        }
        Ok(())
    }
}
