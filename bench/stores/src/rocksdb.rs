//! RocksDB: a log-structured merge tree, loaded by ingesting sorted files, read by sorted
//! `MultiGet`. Never compresses.

use hatchback_bench::flash::store::{CACHE_BYTES, PeerStore, put};
use hatchback_bench::flash::data::Data;
use anyhow::{Context, Result};
use rocksdb::{BlockBasedOptions, Cache, ColumnFamilyDescriptor, DB, DBCompressionType, Options};
use rocksdb::{IngestExternalFileOptions, SstFileWriter, WriteBatch, WriteOptions};
use std::path::{Path, PathBuf};

/// Bytes of a sorted file, RocksDB's own default.
const FILE_BYTES: u64 = 64 << 20;
const ROWS: &str = "default";

/// An open database.
pub struct Rocks(DB);

fn options() -> Result<Options> {
    let mut blocks = BlockBasedOptions::default();
    blocks.set_block_cache(&Cache::new_lru_cache(CACHE_BYTES)?);
    blocks.set_bloom_filter(10.0, false);
    let mut options = Options::default();
    options.create_if_missing(true);
    // The rows are as good as random.
    options.set_compression_type(DBCompressionType::None);
    options.set_block_based_table_factory(&blocks);
    Ok(options)
}

/// Writes all rows to sorted files in `folder`.
fn write_files(options: &Options, folder: &Path, data: &Data) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut writer = SstFileWriter::create(options);
    data.each_row(|order, row| {
        if files.is_empty() || writer.file_size() >= FILE_BYTES {
            if !files.is_empty() {
                writer.finish()?;
            }
            files.push(folder.join(format!("load-{}.sst", files.len())));
            writer = SstFileWriter::create(options);
            writer.open(&files[files.len() - 1])?;
        }
        Ok(writer.put(order.to_be_bytes(), row)?)
    })?;
    writer.finish()?;
    drop(writer);
    Ok(files)
}

impl PeerStore for Rocks {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let files = write_files(&options()?, folder, data)?;
        let Self(db) = Self::open(folder, data)?;
        let mut ingest = IngestExternalFileOptions::default();
        ingest.set_move_files(true);
        let rows = db.cf_handle(ROWS).context(ROWS)?;
        db.ingest_external_file_cf_opts(rows, &ingest, files)?;
        Ok(())
    }

    fn open(folder: &Path, _: &Data) -> Result<Self> {
        let rows = ColumnFamilyDescriptor::new(ROWS, options()?);
        Ok(Self(DB::open_cf_descriptors(&options()?, folder, [rows])?))
    }

    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()> {
        let row_bytes = out.len() / orders.len().max(1);
        let rows = self.0.cf_handle(ROWS).context(ROWS)?;
        let keys: Vec<[u8; 8]> = orders.iter().map(|order| order.to_be_bytes()).collect();
        let found = self.0.batched_multi_get_cf(rows, &keys, true);
        for (found, row) in found.into_iter().zip(out.chunks_exact_mut(row_bytes.max(1))) {
            put(row, &found?.context("a row is missing")?)?;
        }
        Ok(())
    }

    fn update(&self, data: &Data) -> Result<()> {
        let mut batch = WriteBatch::default();
        data.each_changed(|order, row| {
            batch.put(order.to_be_bytes(), row);
            Ok(())
        })?;
        let mut durable = WriteOptions::default();
        durable.set_sync(true);
        Ok(self.0.write_opt(batch, &durable)?)
    }
}
