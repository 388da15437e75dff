//! Reads messages from given offsets of given partitions. Refuses offsets that the broker no longer
//! has, because their rows are lost. Never asks the group, and stores no offset.

use super::group::Partition;
use anyhow::{Context, Result, bail, ensure};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedMessage;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longest wait of one call for a message.
const POLL: Duration = Duration::from_millis(100);
/// Pause before an unanswered question to a broker is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// A connection that reads.
pub struct Reader {
    consumer: BaseConsumer,
    patience: Duration,
}

/// The range of messages to read of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Offset of the next message.
    pub next: i64,
    /// Offset after the last message.
    pub end: i64,
}

impl Reader {
    /// Opens a connection with the settings of `config`.
    ///
    /// # Errors
    /// The settings are refused.
    pub fn open(config: &ClientConfig, patience: Duration) -> Result<Self> {
        Ok(Self { consumer: config.create()?, patience })
    }

    /// Returns the number of partitions of each topic.
    ///
    /// # Errors
    /// The brokers do not answer.
    pub fn topics(&self) -> Result<BTreeMap<String, usize>> {
        let told = self.patiently(|left| self.consumer.fetch_metadata(None, left))?;
        let one = |topic: &rdkafka::metadata::MetadataTopic| {
            (topic.name().to_owned(), topic.partitions().len())
        };
        Ok(told.topics().iter().map(one).collect())
    }

    /// Returns the messages to read of a partition; those before `stored` are in windows.
    ///
    /// # Errors
    /// The brokers do not answer, or they no longer have the message at `stored`.
    pub fn bounds(&self, partition: &Partition, stored: Option<i64>) -> Result<Bounds> {
        let (topic, number) = (partition.topic.as_str(), partition.number);
        let (first, end) =
            self.patiently(|left| self.consumer.fetch_watermarks(topic, number, left))?;
        let next = stored.unwrap_or(first);
        ensure!(
            next >= first,
            "the messages from offset {next} to {first} are deleted, and their rows are lost; \
             publish a new snapshot, and begin a new folder of windows"
        );
        ensure!(
            next <= end,
            "the next message has offset {next}, but the partition ends at {end}: the topic was \
             made anew; publish a new snapshot, and begin a new folder of windows"
        );
        Ok(Bounds { next, end })
    }

    /// Repeats `ask` until there is an answer or the patience ends.
    fn patiently<T>(&self, ask: impl Fn(Duration) -> KafkaResult<T>) -> KafkaResult<T> {
        let start = Instant::now();
        loop {
            let left = self.patience.saturating_sub(start.elapsed());
            match ask(left) {
                Err(_) if left > RETRY_PAUSE => std::thread::sleep(RETRY_PAUSE),
                answer => return answer,
            }
        }
    }

    /// Moves to the first message of each partition.
    ///
    /// # Errors
    /// The client refuses an offset.
    pub fn start(&self, partitions: &BTreeMap<Partition, Bounds>) -> Result<()> {
        let mut list = TopicPartitionList::new();
        for (partition, bounds) in partitions {
            let next = Offset::Offset(bounds.next);
            list.add_partition_offset(&partition.topic, partition.number, next)?;
        }
        self.consumer.assign(&list).context("offsets to read from")
    }

    /// Returns the next message of any partition; `None` if none arrived within `POLL`.
    ///
    /// # Errors
    /// The broker no longer has the offset, or the client is broken for good.
    pub fn next(&self) -> Result<Option<BorrowedMessage<'_>>> {
        match self.consumer.poll(POLL) {
            Some(Ok(message)) => Ok(Some(message)),
            Some(Err(e @ KafkaError::MessageConsumptionFatal(_))) => Err(e.into()),
            Some(Err(e)) if is_lost_offset(&e) => {
                bail!("{e}: messages were deleted while they were read; read them again")
            }
            Some(Err(e)) => {
                log::debug!("reading messages: {e}");
                Ok(None)
            }
            None => Ok(None),
        }
    }
}

fn is_lost_offset(error: &KafkaError) -> bool {
    use rdkafka::types::RDKafkaErrorCode::{AutoOffsetReset, OffsetOutOfRange};
    matches!(error.rdkafka_error_code(), Some(AutoOffsetReset | OffsetOutOfRange))
}
