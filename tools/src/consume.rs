//! `consume`, with the feature `kafka`: turns the rows that HugeCTR publishes to Kafka into
//! windows. One window holds everything that every partition had when the window was begun. Its
//! `window.json` also has the offset at which the next window begins. So rows and offsets become
//! durable in one rename, and each message counts once, wherever a process is killed. Has no
//! consumer group: a lock on the folder keeps a second process out.

use crate::hps_kafka::{GatheredRows, HpsMessage, KeyWidth, topic_name};
use crate::report::args::mib_to_bytes;
use crate::window::folder::{closed_windows, window_folder};
use crate::window::writer::{TableChanges, WindowContent, write_window};
use crate::window::{KafkaOffsets, Window, WindowError};
use crate::{report, say};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk::{self, Lock};
use hatchback::schema::Table;
use rskafka::BackoffConfig;
use rskafka::client::partition::{OffsetAt, PartitionClient, UnknownTopicHandling};
use rskafka::client::{Client, ClientBuilder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Bytes of one fetch at most. HugeCTR's messages have 256 KiB.
const FETCH_BYTES_MAX: i32 = 8 << 20;
/// Time that a broker waits for a message, milliseconds.
const FETCH_WAIT_MS: i32 = 500;
/// Fetches without a message after which a partition counts as broken.
const EMPTY_FETCHES_MAX: usize = 20;
/// Time between two attempts to reach a broker at most.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Turns the rows that HugeCTR publishes to Kafka into windows
#[derive(Args, Clone, Debug)]
pub struct ConsumeArgs {
    /// A bundle or flash directory of the model: its tables have one topic each
    model: PathBuf,
    /// The brokers, HOST:PORT, one or more with commas between them
    #[arg(long, value_delimiter = ',', required = true)]
    brokers: Vec<String>,
    /// The folder of the windows
    #[arg(long)]
    windows: PathBuf,
    /// The name of the model in the topics [default: the bundle's]
    #[arg(long)]
    topic_model: Option<String>,
    /// The dense network of the trainer's newest pass, which goes into each window
    #[arg(long, value_name = "ONNX")]
    dense: Option<PathBuf>,
    /// Bytes of a key in the messages: 8, or 4
    #[arg(long, default_value = "8", value_parser = key_width)]
    key_bytes: KeyWidth,
    /// Makes a window every so many seconds, for ever; without it one window
    #[arg(long, value_parser = report::args::seconds)]
    every_s: Option<f64>,
    /// Memory for the rows of a window, MiB. More rows make a further window
    #[arg(long, default_value_t = 1024.0, value_parser = report::args::mib_above_zero)]
    window_mib: f64,
    /// Ends with an error if the brokers do not answer for so many seconds
    #[arg(long, default_value_t = 60.0, value_parser = report::args::seconds)]
    patience_s: f64,
    /// Writes the report as JSON to FILE; without FILE, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-",
          value_parser = report::json_file)]
    json: Option<PathBuf>,
}

fn key_width(text: &str) -> Result<KeyWidth> {
    match text {
        "4" => Ok(KeyWidth::Four),
        "8" => Ok(KeyWidth::Eight),
        _ => bail!("is neither 4 nor 8"),
    }
}

/// What one window has.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Consumed {
    /// The number of the window; none if there was no row.
    pub window: Option<u64>,
    /// Messages, beacons included.
    pub messages: u64,
    /// Rows in the messages.
    pub rows_read: u64,
    /// Rows in the window: the newest of each key.
    pub rows: u64,
    /// Whether messages wait that the window had no room for.
    pub is_full: bool,
}

/// Runs the command.
///
/// # Errors
/// The brokers do not answer, a message is refused, messages are lost, or a file cannot be written.
/// The messages since the last window are read again by the next run.
pub fn run(args: &ConsumeArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut consumer = Consumer::open(args).await?;
        loop {
            let done = consumer.window().await?;
            report::write_report(args.json.as_deref(), &done, || done.print())?;
            match args.every_s {
                _ if done.is_full => {}
                Some(every_s) => tokio::time::sleep(Duration::from_secs_f64(every_s)).await,
                None => return Ok(()),
            }
        }
    })
}

impl Consumed {
    fn print(&self) -> Result<()> {
        let Some(window) = self.window else { return say!("no new rows") };
        let (messages, read) = (report::count(self.messages), report::count(self.rows_read));
        let rows = report::count(self.rows);
        say!("window {window}: {rows} rows, the newest of {read} in {messages} messages")
    }
}

/// A connection, and the folder that it fills.
struct Consumer<'a> {
    args: &'a ConsumeArgs,
    lineage: String,
    tables: Vec<Table>,
    /// The topic of each table.
    topics: Vec<String>,
    client: Client,
    _lock: Lock,
}

/// The rows of a window that is not closed yet.
struct OpenWindow {
    tables: Vec<GatheredRows>,
    offsets: KafkaOffsets,
    done: Consumed,
    bytes_max: u64,
}

impl<'a> Consumer<'a> {
    async fn open(args: &'a ConsumeArgs) -> Result<Self> {
        let (lineage, tables) = read_tables(&args.model)?;
        let topic_model = args.topic_model.as_ref().unwrap_or(&lineage);
        let topics: Vec<String> = tables
            .iter()
            .map(|table| topic_name(topic_model, &table.name))
            .collect::<Result<_, _>>()?;

        let disk = disk::system();
        disk.create_dir(&args.windows).map_err(WindowError::io(&args.windows))?;
        let path = args.windows.join("consume.lock");
        let lock = disk.lock(&path, Duration::ZERO).map_err(WindowError::io(&path))?;
        let lock = lock.with_context(|| {
            format!("{}: another `consume` fills the folder", args.windows.display())
        })?;

        let backoff = BackoffConfig {
            max_backoff: RETRY_PAUSE_MAX,
            deadline: Some(Duration::from_secs_f64(args.patience_s)),
            ..BackoffConfig::default()
        };
        let builder = ClientBuilder::new(args.brokers.clone()).client_id("hatchback-consume");
        let client = builder.backoff_config(backoff).build().await;
        let client = client.with_context(|| format!("--brokers {}", args.brokers.join(",")))?;
        Ok(Self { args, lineage, tables, topics, client, _lock: lock })
    }

    /// Makes the next window of everything that the partitions have now.
    async fn window(&mut self) -> Result<Consumed> {
        let (number, offsets) = self.resume()?;
        let mut window = OpenWindow {
            tables: self.tables.iter().map(|t| GatheredRows::new(t.dim as usize)).collect(),
            offsets,
            done: Consumed::default(),
            bytes_max: mib_to_bytes(self.args.window_mib),
        };

        let partitions = self.partitions().await?;
        for (table, topic) in self.topics.iter().enumerate() {
            for &partition in partitions.get(topic).into_iter().flatten() {
                if !window.done.is_full {
                    let place = || format!("topic {topic}, partition {partition}");
                    self.read(table, partition, &mut window).await.with_context(place)?;
                }
            }
        }
        if window.done.rows > 0 {
            self.close(number, &mut window)?;
        }
        Ok(window.done)
    }

    /// Returns the number of the next window, and where its messages begin.
    fn resume(&self) -> Result<(u64, KafkaOffsets)> {
        let folder = &self.args.windows;
        let Some(newest) = closed_windows(folder)?.pop() else { return Ok((1, BTreeMap::new())) };
        let head = Window::read_head(&newest.folder)?;
        let offsets = head.kafka.with_context(|| {
            format!(
                "{}: kafka: is missing, so the messages of this window are unknown; give `consume` \
                 a folder of its own",
                newest.folder.display()
            )
        })?;
        Ok((newest.number + 1, offsets))
    }

    /// Returns the partitions of each of the model's topics.
    async fn partitions(&self) -> Result<BTreeMap<String, Vec<i32>>> {
        let mut found = BTreeMap::new();
        for topic in self.client.list_topics().await.context("the list of topics")? {
            if self.topics.contains(&topic.name) {
                found.insert(topic.name, topic.partitions.into_iter().collect());
            }
        }
        ensure!(
            !found.is_empty(),
            "the brokers have none of the model's topics, such as `{}`; give the name of the model \
             in the topics with --topic-model",
            self.topics.first().map_or("", String::as_str)
        );
        Ok(found)
    }

    /// Reads a partition of the topic of `table`, up to the end that it has now.
    async fn read(&self, table: usize, partition: i32, window: &mut OpenWindow) -> Result<()> {
        let (topic, dim) = (&self.topics[table], self.tables[table].dim as usize);
        let client = self
            .client
            .partition_client(topic.as_str(), partition, UnknownTopicHandling::Retry)
            .await?;
        let stored = window.offsets.get(topic).and_then(|of| of.get(&partition)).copied();
        let (mut next, end) = bounds(&client, stored).await?;

        let mut empty_fetches = 0;
        while next < end && !window.done.is_full {
            let (messages, _) =
                client.fetch_records(next, 1..FETCH_BYTES_MAX, FETCH_WAIT_MS).await?;
            empty_fetches = if messages.is_empty() { empty_fetches + 1 } else { 0 };
            ensure!(
                empty_fetches <= EMPTY_FETCHES_MAX,
                "the broker sends no message at offset {next}, but says that the end is {end}"
            );
            for message in messages {
                if message.offset >= end {
                    next = end;
                    break;
                }
                if message.offset < next {
                    continue;
                }
                let time_ms = message.record.timestamp.timestamp_millis();
                // A message without a value deletes its key elsewhere; HugeCTR sends none.
                if let Some(value) = &message.record.value {
                    let decoded = HpsMessage::decode(value, dim, self.args.key_bytes);
                    let decoded = decoded.with_context(|| format!("offset {}", message.offset))?;
                    window.take(table, &decoded, time_ms);
                }
                next = message.offset + 1;
            }
        }
        window.offsets.entry(topic.clone()).or_default().insert(partition, next);
        Ok(())
    }

    /// Writes the window with the offsets at which the next one begins.
    fn close(&self, number: u64, window: &mut OpenWindow) -> Result<()> {
        let folder = window_folder(&self.args.windows, number);
        match disk::system().remove_file(&folder) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(WindowError::io(&folder)(e))?,
            _ => {}
        }
        let changes: Vec<TableChanges> = self
            .tables
            .iter()
            .zip(&window.tables)
            .map(|(table, rows)| TableChanges {
                name: table.name.clone(),
                dim: table.dim as usize,
                keys: rows.keys().to_vec(),
                ..TableChanges::default()
            })
            .collect();

        let read = |path: &PathBuf| std::fs::read(path).with_context(|| path.display().to_string());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let messages: i64 = window.offsets.values().flat_map(BTreeMap::values).sum();
        let content = WindowContent {
            lineage: self.lineage.clone(),
            window: number,
            step: messages.unsigned_abs(),
            closed_ms: now.as_millis() as u64,
            dense: self.args.dense.as_ref().map(read).transpose()?,
            kafka: Some(window.offsets.clone()),
            ..WindowContent::default()
        };
        write_window(&folder, &content, &changes, &mut |table, row, values| {
            values.extend_from_slice(window.tables[table].row(row));
            Ok(())
        })?;
        disk::system().sync_dir(&self.args.windows).map_err(WindowError::io(&self.args.windows))?;
        window.done.window = Some(number);
        Ok(())
    }
}

impl OpenWindow {
    fn take(&mut self, table: usize, message: &HpsMessage, time_ms: i64) {
        self.tables[table].take(message, time_ms);
        self.done.messages += 1;
        if let HpsMessage::Rows { keys, .. } = message {
            self.done.rows_read += keys.len() as u64;
        }
        self.done.rows = self.tables.iter().map(|rows| rows.keys().len() as u64).sum();
        self.done.is_full =
            self.tables.iter().map(GatheredRows::bytes).sum::<u64>() >= self.bytes_max;
    }
}

/// Returns the offset of the first message to read and that after the last one. Messages that the
/// broker deleted before they were read are lost rows.
async fn bounds(client: &PartitionClient, stored: Option<i64>) -> Result<(i64, i64)> {
    let first = client.get_offset(OffsetAt::Earliest).await?;
    let end = client.get_offset(OffsetAt::Latest).await?;
    let next = stored.unwrap_or(first);
    ensure!(
        next >= first,
        "the messages from offset {next} to {first} are deleted, and their rows are lost; publish \
         a new snapshot, and begin a new folder of windows"
    );
    ensure!(
        next <= end,
        "the next message has offset {next}, but the partition ends at {end}: the topic was made \
         anew; publish a new snapshot, and begin a new folder of windows"
    );
    Ok((next, end))
}

/// Returns the lineage and the tables of a bundle or of a flash directory.
fn read_tables(model: &Path) -> Result<(String, Vec<Table>)> {
    let manifest = match model.is_dir() {
        true => Flash::open(&disk::system(), model)?.manifest().clone(),
        false => BundleReader::open(model)?.manifest().clone(),
    };
    Ok((manifest.generation.lineage, manifest.schema.tables))
}
