//! Writes a window: rows, network and probe lines first, `window.json` last. Every file is durable
//! before `window.json` is renamed into place, so a killed writer leaves no window. Holds keys and
//! one row in memory, never all rows.

use crate::window::error::WindowError;
use crate::window::head::{
    BacklogState, DENSE, HEAD, KafkaOffsets, PROBE, ROWS, WINDOW_FORMAT, WindowFile, WindowHead,
};
use anyhow::{Context as _, Result};
use aws_lc_rs::digest::{Context, SHA256};
use hatchback::bundle::manifest::hex;
use hatchback::io::atomic_write::replace;
use hatchback::io::disk::{Disk, SystemDisk};
use safetensors::tensor::Dtype;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Bytes of the buffer before the file.
const WRITE_BYTES: usize = 1 << 20;

/// The changes of one table, without the values of its rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableChanges {
    /// The name of the table.
    pub name: String,
    /// Values in a row.
    pub dim: usize,
    /// The key of each row.
    pub keys: Vec<u64>,
    /// Lookups of each row.
    pub traffic: Option<Vec<f32>>,
    /// The window since which each row waits.
    pub since: Option<Vec<u64>>,
    /// The deleted keys.
    pub deleted: Vec<u64>,
    /// The window since which each deleted key waits.
    pub deleted_since: Option<Vec<u64>>,
    /// The keys of most traffic.
    pub hot: Vec<u64>,
    /// Lookups of each of these in a window.
    pub hot_traffic: Vec<f32>,
}

/// The fields of a window's `window.json`, and its small files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WindowContent {
    /// The name of the model.
    pub lineage: String,
    /// The number of the window.
    pub window: u64,
    /// The trainer's step.
    pub step: u64,
    /// The time of the step, milliseconds since 1970.
    pub closed_ms: u64,
    /// The dense network of that step.
    pub dense: Option<Vec<u8>>,
    /// Probe lines.
    pub probe: Option<Vec<u8>>,
    /// The state of `select`.
    pub backlog: Option<BacklogState>,
    /// Where the next window begins, if the rows came through Kafka.
    pub kafka: Option<KafkaOffsets>,
}

/// Appends the values of row `row` of table `table` to the vector, `[dim]`.
pub type FillRow<'a> = &'a mut dyn FnMut(usize, usize, &mut Vec<f32>) -> Result<()>;

/// Writes a window into `folder`, which is created if it is missing and holds no window yet.
///
/// # Errors
/// A file cannot be written, or `fill` fails. `folder` is then not a window.
pub fn write_window(
    folder: &Path,
    content: &WindowContent,
    tables: &[TableChanges],
    fill: FillRow<'_>,
) -> Result<WindowHead> {
    SystemDisk.create_dir(folder).map_err(WindowError::io(folder))?;
    let mut files = vec![write_rows(folder, tables, fill)?];
    for (name, bytes) in [(DENSE, &content.dense), (PROBE, &content.probe)] {
        if let Some(bytes) = bytes {
            let path = folder.join(name);
            let mut file = HashedFile::create(&path).map_err(WindowError::io(&path))?;
            file.write_all(bytes).map_err(WindowError::io(&path))?;
            files.push(file.finish(name).map_err(WindowError::io(&path))?);
        }
    }

    SystemDisk.sync_dir(folder).map_err(WindowError::io(folder))?;
    let head = WindowHead {
        format: WINDOW_FORMAT,
        lineage: content.lineage.clone(),
        window: content.window,
        step: content.step,
        closed_ms: content.closed_ms,
        files,
        backlog: content.backlog.clone(),
        kafka: content.kafka.clone(),
    };
    let path = folder.join(HEAD);
    let text = head.encode().with_context(|| path.display().to_string())?;
    replace(&SystemDisk, &path, &text).map_err(WindowError::io(&path))?;
    Ok(head)
}

/// One tensor of the file: its name, its shape, and what fills it.
struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    fill: Fill<'a>,
}

enum Fill<'a> {
    Words(&'a [u64]),
    Floats(&'a [f32]),
    /// The rows of the table with this number.
    Rows(usize),
}

impl Tensor<'_> {
    fn dtype(&self) -> Dtype {
        if matches!(self.fill, Fill::Words(_)) { Dtype::U64 } else { Dtype::F32 }
    }

    fn bytes(&self) -> usize {
        let each = if self.dtype() == Dtype::U64 { 8 } else { 4 };
        each * self.shape.iter().product::<usize>()
    }
}

/// Returns the tensors in file order: those of 8-byte entries first, then by name.
fn tensors_of(tables: &[TableChanges]) -> Vec<Tensor<'_>> {
    let mut tensors = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        let mut add = |column: &str, shape: Vec<usize>, fill| {
            if shape[0] > 0 {
                tensors.push(Tensor { name: format!("{}.{column}", table.name), shape, fill });
            }
        };
        let rows = table.keys.len();
        add("keys", vec![rows], Fill::Words(&table.keys));
        add("rows", vec![rows, table.dim], Fill::Rows(number));
        if let Some(traffic) = &table.traffic {
            add("traffic", vec![rows], Fill::Floats(traffic));
        }
        if let Some(since) = &table.since {
            add("since", vec![rows], Fill::Words(since));
        }
        add("deleted", vec![table.deleted.len()], Fill::Words(&table.deleted));
        if let Some(since) = &table.deleted_since {
            add("deleted_since", vec![table.deleted.len()], Fill::Words(since));
        }
        add("hot", vec![table.hot.len()], Fill::Words(&table.hot));
        add("hot_traffic", vec![table.hot_traffic.len()], Fill::Floats(&table.hot_traffic));
    }

    tensors.sort_by(|a, b| {
        let narrow = |tensor: &Tensor<'_>| tensor.dtype() != Dtype::U64;
        (narrow(a), &a.name).cmp(&(narrow(b), &b.name))
    });
    tensors
}

/// Returns the length and the JSON of the header, in file order, padded so that the data starts at
/// a multiple of 8.
fn header_of(tensors: &[Tensor<'_>]) -> Result<Vec<u8>> {
    let (mut entries, mut at) = (Vec::new(), 0);
    for tensor in tensors {
        let (name, dtype) = (serde_json::to_string(&tensor.name)?, tensor.dtype());
        let (shape, end) = (serde_json::to_string(&tensor.shape)?, at + tensor.bytes());
        entries.push(format!(
            "{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{at},{end}]}}"
        ));
        at = end;
    }

    let mut text = format!("{{{}}}", entries.join(",")).into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok(bytes)
}

fn write_rows(folder: &Path, tables: &[TableChanges], fill: FillRow<'_>) -> Result<WindowFile> {
    let path = folder.join(ROWS);
    let tensors = tensors_of(tables);
    let mut file = HashedFile::create(&path).map_err(WindowError::io(&path))?;
    file.write_all(&header_of(&tensors)?).map_err(WindowError::io(&path))?;

    let (mut row, mut bytes) = (Vec::new(), Vec::new());
    for tensor in &tensors {
        match tensor.fill {
            Fill::Words(words) => {
                for word in words {
                    file.write_all(&word.to_le_bytes()).map_err(WindowError::io(&path))?;
                }
            }
            Fill::Floats(values) => {
                for value in values {
                    file.write_all(&value.to_le_bytes()).map_err(WindowError::io(&path))?;
                }
            }
            Fill::Rows(table) => {
                for number in 0..tensor.shape[0] {
                    row.clear();
                    fill(table, number, &mut row)?;
                    assert_eq!(row.len(), tensor.shape[1], "rows have one length");
                    bytes.clear();
                    row.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                    file.write_all(&bytes).map_err(WindowError::io(&path))?;
                }
            }
        }
    }
    Ok(file.finish(ROWS).map_err(WindowError::io(&path))?)
}

/// A file that is hashed while it is written.
struct HashedFile {
    out: File,
    /// Bytes that are neither hashed nor written yet: many short writes become one.
    buffer: Vec<u8>,
    hash: Context,
    bytes: u64,
}

impl HashedFile {
    fn create(path: &Path) -> std::io::Result<Self> {
        let out = File::create(path)?;
        let buffer = Vec::with_capacity(WRITE_BYTES);
        Ok(Self { out, buffer, hash: Context::new(&SHA256), bytes: 0 })
    }

    fn write_buffer(&mut self) -> std::io::Result<()> {
        self.hash.update(&self.buffer);
        self.bytes += self.buffer.len() as u64;
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Makes the file durable.
    fn finish(mut self, name: &str) -> std::io::Result<WindowFile> {
        self.write_buffer()?;
        self.out.sync_all()?;
        let sha256 = hex(self.hash.finish().as_ref());
        Ok(WindowFile { name: name.to_owned(), bytes: self.bytes, sha256 })
    }
}

impl Write for HashedFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= WRITE_BYTES {
            self.write_buffer()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.write_buffer()?;
        self.out.flush()
    }
}
