//! Subscribes to topics: to named ones at once, to those that match patterns when the cluster has them.
//!
//! librdkafka gets names only, never patterns, because its pattern syntax differs from that of the brokers. So a
//! pattern means the same for the subscription, the handlers and the identity, with every group protocol.

use std::sync::{Arc, Weak};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaResult;
use tokio::task::spawn_blocking;

use super::super::rebalance::Context;
use super::super::retention;
use super::super::sources::ReadTopics;
use super::Work;
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Error, Result};

/// The timeout for listing the topics.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// The pause after a search that Kafka did not answer, unless the usual pause is shorter.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl<B: Backend> Work<B> {
    /// Subscribes to the topics given by name, and starts the search for those that match patterns.
    pub(super) fn subscribe(&mut self) -> Result<()> {
        let named = self.topics.current();
        let names: Vec<&str> = named.iter().map(String::as_str).collect();
        if !names.is_empty()
            && let Err(error) = self.consumer.subscribe(&names)
        {
            let what = format!("cannot subscribe to the topics of {}", self.source());
            return Err(Error::configuration(what).with_source(error));
        }
        self.check_retention(named);
        if let Some(every) = self.topics.search_every() {
            let searching = search(Arc::downgrade(&self.consumer), Arc::clone(&self.topics), every);
            self.tasks.spawn_on(searching, self.intake.store.backend.reactor());
        }
        Ok(())
    }

    /// Subscribes again when topics that match patterns were created or deleted. Partitions of other topics are read
    /// without interruption, unless `partition.assignment.strategy` was set to an eager one.
    pub(super) fn follow_topics(&mut self) {
        let Some(changed) = self.topics.take_change() else { return };
        let names: Vec<&str> = changed.now.iter().map(String::as_str).collect();
        let subscribed = match names.is_empty() {
            true => {
                self.consumer.unsubscribe();
                Ok(())
            }
            false => self.consumer.subscribe(&names),
        };
        match subscribed {
            Ok(()) => {
                events::kafka::topics_changed(self.source(), &changed.come, &changed.gone);
                self.consumer.context().topics_changed();
                self.check_retention(changed.come);
            }
            Err(error) => {
                self.consumer.context().report_error("subscribe", &error);
                // Undone here, so that the next search finds the change again.
                self.topics.forget_change(&changed);
            }
        }
    }

    /// Warns if the inbox keeps identities for less time than Kafka keeps records. Runs in the background.
    fn check_retention(&mut self, topics: Vec<String>) {
        let Some(window) = self.window.filter(|_| !topics.is_empty()) else { return };
        let (config, tokens) = (self.config.clone(), self.tokens.clone());
        let asking = retention::warn_if_shorter(config, tokens, self.source().clone(), topics, window);
        self.tasks.spawn_on(asking, self.intake.store.backend.reactor());
    }
}

/// Searches for topics that match patterns until the task is aborted.
async fn search(consumer: Weak<BaseConsumer<Context>>, topics: Arc<ReadTopics>, every: Duration) {
    loop {
        let (asking, noting) = (consumer.clone(), Arc::clone(&topics));
        // The request blocks, and so does dropping the last reference to the consumer. Neither may happen on the
        // store's thread.
        let is_answered = spawn_blocking(move || ask(&asking, &noting)).await.unwrap_or(true);
        tokio::time::sleep(if is_answered { every } else { every.min(ASK_AGAIN) }).await;
    }
}

/// Searches once. Returns whether Kafka answered; true also when the consumer is being closed. Blocks.
fn ask(consumer: &Weak<BaseConsumer<Context>>, topics: &ReadTopics) -> bool {
    let Some(consumer) = consumer.upgrade().filter(|consumer| !consumer.context().is_closing()) else { return true };
    match names(&consumer) {
        Ok(names) => {
            // Without a subscription, this answer is the only sign that a broker is reachable.
            if topics.current().is_empty() {
                consumer.context().broker_answered();
            }
            topics.note(&names);
            true
        }
        Err(error) => {
            consumer.context().report_error("list the topics", &error);
            false
        }
    }
}

/// The names of all topics that this client may see.
fn names(consumer: &BaseConsumer<Context>) -> KafkaResult<Vec<String>> {
    let metadata = consumer.fetch_metadata(None, ANSWER_WAIT)?;
    Ok(metadata.topics().iter().map(|topic| topic.name().to_owned()).collect())
}
