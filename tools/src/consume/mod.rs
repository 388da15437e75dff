//! `consume`, with the feature `kafka`: turns the rows that HugeCTR publishes to Kafka into
//! windows. One window holds all messages that the partitions of this process had when the window
//! was started. Its `window.json` also has the offset at which the next window begins, so rows and
//! offsets become durable in one rename. A process closes a window only if its messages begin where
//! the newest window ends. So each message counts once, even if a process is killed or two
//! processes read it.

mod group;
mod reader;

use crate::hps_kafka::{GatheredRows, HpsMessage, KeyWidth, MessageSource, topic_name};
use crate::report::args::mib_to_bytes;
use crate::report::input;
use crate::window::folder::{closed_windows, window_folder};
use crate::window::writer::{TableChanges, WindowContent, write_window};
use crate::window::{KafkaOffsets, Window, WindowError};
use crate::{report, say};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use group::{GroupShare, Member, Partition};
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk::{self, Lock};
use hatchback::limits::DENSE_BYTES_MAX;
use hatchback::schema::Table;
use rdkafka::config::ClientConfig;
use rdkafka::message::{BorrowedMessage, Message};
use reader::{Bounds, Reader};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Longest interval between two searches for new topics and partitions, milliseconds.
const TOPICS_MS_MAX: u32 = 5000;
/// Longest time between two attempts to reach a broker, milliseconds.
const RECONNECT_MS_MAX: u32 = 5000;
/// Heartbeats that a process sends within the time of silence after which the group excludes it.
const HEARTBEATS: f64 = 6.0;
/// Time that writing a window may take before the group excludes the process, milliseconds.
const WRITE_MS_MAX: u32 = 300_000;
/// Longest wait for the lock before the process answers the group again.
const LOCK_WAIT: Duration = Duration::from_millis(200);

/// Turns the rows that HugeCTR publishes to Kafka into windows
#[derive(Args, Clone, Debug)]
pub struct ConsumeArgs {
    /// A bundle or flash directory of the model: its tables have one topic each
    model: PathBuf,
    /// The brokers, HOST:PORT, one or more with commas between them
    #[arg(long, value_delimiter = ',', required = true)]
    brokers: Vec<String>,
    /// The folder of the windows, which all processes of the group share
    #[arg(long)]
    windows: PathBuf,
    /// The consumer group: its processes share the partitions [default: hatchback-MODEL]
    #[arg(long)]
    group: Option<String>,
    /// Seconds of silence after which the group gives a process up, and moves its partitions
    #[arg(long, default_value_t = 10.0, value_parser = report::args::seconds)]
    session_s: f64,
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
    #[command(flatten)]
    json: Json,
}

fn key_width(text: &str) -> Result<KeyWidth> {
    match text {
        "4" => Ok(KeyWidth::Four),
        "8" => Ok(KeyWidth::Eight),
        _ => bail!("is neither 4 nor 8"),
    }
}

/// The content of one window.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Consumed {
    /// The number of the window; none if there was no row.
    pub window: Option<u64>,
    /// Partitions that the group gave to this process.
    pub partitions: usize,
    /// Messages, beacons included.
    pub messages: u64,
    /// Rows in the messages.
    pub rows_read: u64,
    /// Rows in the window: the newest of each key.
    pub rows: u64,
    /// Whether messages are left that did not fit into the window.
    pub is_full: bool,
}

/// Runs the command.
///
/// # Errors
/// The brokers do not answer, a message is refused, messages are lost, or a file cannot be written.
/// The messages since the last window are read again by the next run.
pub fn run(args: &ConsumeArgs) -> Result<()> {
    let consumer = Consumer::open(args)?;
    loop {
        let done = consumer.window()?;
        args.json.write(&done, || done.print())?;
        match args.every_s {
            _ if done.is_full => {}
            Some(every_s) => consumer.member.wait(Duration::from_secs_f64(every_s))?,
            None => return Ok(()),
        }
    }
}

impl Consumed {
    fn print(&self) -> Result<()> {
        let Some(window) = self.window else { return say!("no new rows") };
        let (messages, read) = (report::count(self.messages), report::count(self.rows_read));
        let (rows, partitions) = (report::count(self.rows), self.partitions);
        say!(
            "window {window}: {rows} rows, the newest of {read} in {messages} messages of \
             {partitions} partitions"
        )
    }
}

/// The connections of a process, and the folder that it fills.
struct Consumer<'a> {
    args: &'a ConsumeArgs,
    lineage: String,
    tables: Vec<Table>,
    /// The topic of each table.
    topics: Vec<String>,
    member: Member,
    reader: Reader,
    patience: Duration,
}

/// The rows of a window that is not closed yet.
struct OpenWindow {
    tables: Vec<GatheredRows>,
    /// The offset of each partition in the newest window, when this one was started.
    stored: BTreeMap<Partition, Option<i64>>,
    /// The messages to read of each partition. Those before `next` have been read.
    read: BTreeMap<Partition, Bounds>,
    done: Consumed,
    bytes_max: u64,
}

/// Where the windows of the folder end.
struct Newest {
    number: u64,
    offsets: KafkaOffsets,
}

impl<'a> Consumer<'a> {
    fn open(args: &'a ConsumeArgs) -> Result<Self> {
        let (lineage, tables) = read_tables(&args.model)?;
        let topic_model = args.topic_model.as_ref().unwrap_or(&lineage);
        let topics: Vec<String> = tables
            .iter()
            .map(|table| topic_name(topic_model, &table.name))
            .collect::<Result<_, _>>()?;
        disk::system().create_dir(&args.windows).map_err(WindowError::io(&args.windows))?;

        let patience = Duration::from_secs_f64(args.patience_s);
        let config = client_config(args, topic_model);
        let brokers = || format!("--brokers {}", args.brokers.join(","));
        let reader = Reader::open(&config, patience).with_context(brokers)?;
        let found = reader.topics().with_context(brokers)?;
        ensure!(
            topics.iter().any(|topic| found.contains_key(topic)),
            "the brokers have none of the model's topics, such as `{}`; give the name of the model \
             in the topics with --topic-model",
            topics.first().map_or("", String::as_str)
        );
        let member = Member::join(&config, &topics, patience).with_context(brokers)?;
        Ok(Self { args, lineage, tables, topics, member, reader, patience })
    }

    /// Makes the next window of all messages that the partitions of this process have now.
    fn window(&self) -> Result<Consumed> {
        loop {
            let share = self.member.share()?;
            let mut window = self.begin(&share)?;
            if !self.read(&share, &mut window)? {
                log::info!("the group took partitions back; their messages are read again");
                continue;
            }
            if window.done.rows == 0 || self.close(&mut window)? {
                return Ok(window.done);
            }
            log::info!("another process closed a window of these messages; they are read again");
        }
    }

    /// Returns a window without rows, which begins where the newest window ends.
    fn begin(&self, share: &GroupShare) -> Result<OpenWindow> {
        let Newest { offsets, .. } = self.newest()?;
        let mut window = OpenWindow {
            tables: self.tables.iter().map(|t| GatheredRows::new(t.dim as usize)).collect(),
            stored: BTreeMap::new(),
            read: BTreeMap::new(),
            done: Consumed::default(),
            bytes_max: mib_to_bytes(self.args.window_mib),
        };
        for partition in share.partitions.iter().flatten() {
            let stored = offset_of(&offsets, partition);
            let place = || format!("topic {}, partition {}", partition.topic, partition.number);
            let bounds = self.reader.bounds(partition, stored).with_context(place)?;
            window.stored.insert(partition.clone(), stored);
            window.read.insert(partition.clone(), bounds);
        }
        window.done.partitions = window.read.len();
        Ok(window)
    }

    /// Returns the newest window of the folder; number 0 if there is none.
    fn newest(&self) -> Result<Newest> {
        let folder = &self.args.windows;
        let Some(newest) = closed_windows(folder)?.pop() else {
            return Ok(Newest { number: 0, offsets: BTreeMap::new() });
        };
        let head = Window::read_head(&newest.folder)?;
        let offsets = head.kafka.with_context(|| {
            format!(
                "{}: kafka: is missing, so the messages of this window are unknown; give `consume` \
                 a folder of its own",
                newest.folder.display()
            )
        })?;
        Ok(Newest { number: newest.number, offsets })
    }

    /// Reads the messages of the window. Returns false if the group withdrew the share.
    fn read(&self, share: &GroupShare, window: &mut OpenWindow) -> Result<bool> {
        let is_open = |bounds: &Bounds| bounds.next < bounds.end;
        let mut open = window.read.clone();
        open.retain(|_, bounds| is_open(bounds));
        self.reader.start(&open)?;

        let mut heard = Instant::now();
        while window.read.values().any(is_open) && !window.done.is_full {
            if !self.member.holds(share)? {
                return Ok(false);
            }
            match self.reader.next()? {
                Some(message) => {
                    heard = Instant::now();
                    self.take(&message, window).with_context(|| {
                        let (topic, partition) = (message.topic(), message.partition());
                        format!("topic {topic}, partition {partition}: offset {}", message.offset())
                    })?;
                }
                None => ensure!(
                    heard.elapsed() < self.patience,
                    "the brokers sent no message for {} s, but the partitions have some",
                    self.patience.as_secs_f64()
                ),
            }
        }
        Ok(true)
    }

    /// Adds a message to the window. Skips later messages, and those that came twice.
    fn take(&self, message: &BorrowedMessage<'_>, window: &mut OpenWindow) -> Result<()> {
        let table = self.topics.iter().position(|topic| topic == message.topic());
        let at = Partition { topic: message.topic().to_owned(), number: message.partition() };
        let (Some(table), Some(bounds)) = (table, window.read.get_mut(&at)) else { return Ok(()) };
        if message.offset() < bounds.next || bounds.next >= bounds.end {
            return Ok(());
        }
        bounds.next = bounds.end.min(message.offset() + 1);
        if message.offset() >= bounds.end {
            return Ok(());
        }

        // In general a message without a value deletes its key. HugeCTR sends none.
        if let Some(value) = message.payload() {
            let dim = self.tables[table].dim as usize;
            let decoded = HpsMessage::decode(value, dim, self.args.key_bytes)?;
            let time_ms = message.timestamp().to_millis().unwrap_or(0);
            window.take(table, &decoded, MessageSource { partition: message.partition(), time_ms });
        }
        Ok(())
    }

    /// Writes the window with the offsets at which the next one begins. Returns false, and writes
    /// nothing, if another process closed a window of the same messages.
    fn close(&self, window: &mut OpenWindow) -> Result<bool> {
        let _lock = self.lock()?;
        let Newest { number, mut offsets } = self.newest()?;
        let stored = |partition: &Partition| offset_of(&offsets, partition);
        if window.stored.iter().any(|(partition, begin)| stored(partition) != *begin) {
            return Ok(false);
        }
        for (at, bounds) in &window.read {
            offsets.entry(at.topic.clone()).or_default().insert(at.number, bounds.next);
        }

        let folder = window_folder(&self.args.windows, number + 1);
        match disk::system().remove_file(&folder) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(WindowError::io(&folder)(e))?,
            _ => {}
        }
        self.write(&folder, number + 1, offsets, window)?;
        disk::system().sync_dir(&self.args.windows).map_err(WindowError::io(&self.args.windows))?;
        window.done.window = Some(number + 1);
        Ok(true)
    }

    /// Takes the lock under which windows are closed. Answers the group while it waits.
    fn lock(&self) -> Result<Lock> {
        let path = self.args.windows.join("consume.lock");
        let start = Instant::now();
        loop {
            let lock = disk::system().lock(&path, LOCK_WAIT).map_err(WindowError::io(&path))?;
            if let Some(lock) = lock {
                return Ok(lock);
            }
            self.member.wait(Duration::from_millis(1))?;
            ensure!(
                start.elapsed() < self.patience,
                "{}: another `consume` holds the lock for {} s; is it stopped?",
                path.display(),
                self.patience.as_secs_f64()
            );
        }
    }

    fn write(
        &self,
        folder: &Path,
        number: u64,
        offsets: KafkaOffsets,
        window: &OpenWindow,
    ) -> Result<()> {
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

        let read = |path: &PathBuf| {
            input::read(path, DENSE_BYTES_MAX).with_context(|| path.display().to_string())
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let messages: i64 = offsets.values().flat_map(BTreeMap::values).sum();
        let content = WindowContent {
            lineage: self.lineage.clone(),
            window: number,
            step: messages.unsigned_abs(),
            closed_ms: now.as_millis() as u64,
            dense: self.args.dense.as_ref().map(read).transpose()?,
            kafka: Some(offsets),
            ..WindowContent::default()
        };
        write_window(folder, &content, &changes, &mut |table, row, values| {
            values.extend_from_slice(window.tables[table].row(row));
            Ok(())
        })?;
        Ok(())
    }
}

impl OpenWindow {
    fn take(&mut self, table: usize, message: &HpsMessage, source: MessageSource) {
        self.tables[table].take(message, source);
        self.done.messages += 1;
        if let HpsMessage::Rows { keys, .. } = message {
            self.done.rows_read += keys.len() as u64;
        }
        self.done.rows = self.tables.iter().map(|rows| rows.keys().len() as u64).sum();
        self.done.is_full =
            self.tables.iter().map(GatheredRows::bytes).sum::<u64>() >= self.bytes_max;
    }
}

fn offset_of(offsets: &KafkaOffsets, partition: &Partition) -> Option<i64> {
    offsets.get(&partition.topic)?.get(&partition.number).copied()
}

/// Returns the settings of both connections.
fn client_config(args: &ConsumeArgs, topic_model: &str) -> ClientConfig {
    let group = args.group.clone().unwrap_or_else(|| format!("hatchback-{topic_model}"));
    let session_ms = args.session_s * 1000.0;
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", args.brokers.join(","))
        .set("client.id", "hatchback-consume")
        .set("group.id", group)
        .set("session.timeout.ms", format!("{session_ms:.0}"))
        .set("heartbeat.interval.ms", format!("{:.0}", session_ms / HEARTBEATS))
        .set("max.poll.interval.ms", WRITE_MS_MAX.to_string())
        .set("partition.assignment.strategy", "roundrobin")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "error")
        .set("allow.auto.create.topics", "false")
        .set("topic.metadata.refresh.interval.ms", TOPICS_MS_MAX.to_string())
        .set("reconnect.backoff.max.ms", RECONNECT_MS_MAX.to_string());
    config
}

/// Returns the lineage and the tables of a bundle or of a flash directory.
fn read_tables(model: &Path) -> Result<(String, Vec<Table>)> {
    let manifest = match model.is_dir() {
        true => Flash::open(&disk::system(), model)?.manifest().clone(),
        false => BundleReader::open(model)?.manifest().clone(),
    };
    Ok((manifest.generation.lineage, manifest.schema.tables))
}
