//! The consumer group. Several processes share the partitions of a model, and the brokers give the
//! partitions of a process that stops to the others. The group only decides who reads what. The
//! offsets in the windows decide whether a message counts.

use anyhow::{Result, bail};
use rdkafka::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::TopicPartitionList;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that one poll waits for a message of the group.
const POLL: Duration = Duration::from_millis(100);

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Partition {
    /// The topic.
    pub topic: String,
    /// The number of the partition within the topic.
    pub number: i32,
}

/// The partitions that the group assigned to this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupShare {
    /// The number of the distribution. A share that was withdrawn has another number than every
    /// later one.
    pub round: u64,
    /// The partitions; none while the group distributes them.
    pub partitions: Option<BTreeSet<Partition>>,
}

/// The membership of this process in the group; dropping it leaves the group.
pub struct Member {
    consumer: BaseConsumer<NewestShare>,
    patience: Duration,
}

/// The share of this process by the newest message of the group.
#[derive(Default)]
struct NewestShare(Mutex<GroupShare>);

impl Member {
    /// Joins the group of `config`, which shares the partitions of `topics`. A topic that does not
    /// exist yet is shared as soon as it does.
    ///
    /// # Errors
    /// The settings or a topic's name are refused.
    pub fn join(config: &ClientConfig, topics: &[String], patience: Duration) -> Result<Self> {
        let consumer: BaseConsumer<_> = config.create_with_context(NewestShare::default())?;
        consumer.subscribe(&topics.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(Self { consumer, patience })
    }

    /// Returns the share of this process, once the group has distributed the partitions.
    ///
    /// # Errors
    /// The group takes longer than the patience, or the membership is broken for good.
    pub fn share(&self) -> Result<GroupShare> {
        let start = Instant::now();
        let mut newest_error = None;
        loop {
            newest_error = self.poll(POLL)?.or(newest_error);
            let share = self.newest();
            if share.partitions.is_some() {
                return Ok(share);
            }
            if start.elapsed() > self.patience {
                let why = newest_error.map_or_else(String::new, |e| format!(": {e}"));
                bail!(
                    "the consumer group gave this process no share within {} s{why}; raise \
                     --patience-s above --session-s, or look at the brokers",
                    self.patience.as_secs_f64()
                );
            }
        }
    }

    /// Returns whether `share` is still that of this process, after the group's newest messages.
    ///
    /// # Errors
    /// The membership is broken for good.
    pub fn holds(&self, share: &GroupShare) -> Result<bool> {
        self.poll(Duration::ZERO)?;
        Ok(self.newest().round == share.round)
    }

    /// Stays a member for `time`.
    ///
    /// # Errors
    /// The membership is broken for good.
    pub fn wait(&self, time: Duration) -> Result<()> {
        let start = Instant::now();
        while let Some(left) = time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            self.poll(left.min(POLL))?;
        }
        Ok(())
    }

    fn newest(&self) -> GroupShare {
        self.consumer.context().0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Handles the group's messages. Returns a temporary error, such as a broker that does not
    /// answer.
    fn poll(&self, timeout: Duration) -> Result<Option<KafkaError>> {
        match self.consumer.poll(timeout) {
            Some(Err(e @ KafkaError::MessageConsumptionFatal(_))) => Err(e.into()),
            Some(Err(e)) => {
                log::debug!("consumer group: {e}");
                Ok(Some(e))
            }
            // A message that arrived before the pause took effect. The reader reads it again.
            Some(Ok(_)) | None => Ok(None),
        }
    }
}

impl ClientContext for NewestShare {}

impl ConsumerContext for NewestShare {
    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        let partitions = match rebalance {
            Rebalance::Assign(given) => {
                // The reader reads the messages, from the offsets in the windows.
                if let Err(e) = consumer.pause(given) {
                    log::warn!("consumer group: {e}");
                }
                Some(partitions_of(given))
            }
            Rebalance::Revoke(_) | Rebalance::Error(_) => None,
        };
        log::info!("consumer group: this process reads {partitions:?}");
        let mut share = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *share = GroupShare { round: share.round + 1, partitions };
    }
}

fn partitions_of(list: &TopicPartitionList) -> BTreeSet<Partition> {
    let one = |topic: &str, number| Partition { topic: topic.to_owned(), number };
    list.elements().iter().map(|at| one(at.topic(), at.partition())).collect()
}
