//! Asks Kafka how long it keeps the topics' records, and warns where the inbox knows their identities for a shorter time: a record that
//! is read again after that would be new. In the background, once; nothing depends on the answer.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, ConfigResource, ConfigResourceResult, OwnedResourceSpecifier, ResourceSpecifier,
};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult};

use crate::telemetry::events;
use crate::types::Backoff;

/// How long Kafka may take for an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// The longest pause between two questions to a Kafka that is away.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Keeps to itself that it has no use for the consumer's settings.
struct Silent;

impl ClientContext for Silent {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}

    fn error(&self, _: KafkaError, _: &str) {}
}

/// Asks until there is an answer, be it that nobody may ask. Must run on the store's thread.
pub(super) async fn warn_if_shorter(config: ClientConfig, group: String, topics: Vec<String>, window: Duration) {
    let mut backoff = Backoff::new(PAUSE_MAX);
    loop {
        match ask(&config, &topics).await {
            Ok(answers) => {
                for topic in &topics {
                    let is_about = |specifier: &OwnedResourceSpecifier| matches!(specifier, OwnedResourceSpecifier::Topic(name) if name == topic);
                    let answer = answers.iter().flatten().find(|answer| is_about(&answer.specifier));
                    judge(&group, topic, answer, window);
                }
                return;
            }
            Err(error) => events::kafka::retention_unknown(&group, "", &error),
        }
        backoff.pause().await;
    }
}

async fn ask(config: &ClientConfig, topics: &[String]) -> KafkaResult<Vec<ConfigResourceResult>> {
    let client: AdminClient<Silent> = config.create_with_context(Silent)?;
    let resources: Vec<ResourceSpecifier<'_>> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let answers = client.describe_configs(&resources, &AdminOptions::new().request_timeout(Some(ANSWER_WAIT))).await;
    // Its end is waited for: on a thread for such.
    drop(tokio::task::spawn_blocking(move || drop(client)));
    answers
}

fn judge(group: &str, topic: &str, answer: Option<&ConfigResource>, window: Duration) {
    let value = |name: &str| answer.and_then(|answer| answer.get(name)?.value.as_deref());
    // What may not be asked, and what is not there, is answered by nothing.
    let Some(retention_ms) = value("retention.ms") else {
        return events::kafka::retention_unknown(group, topic, &"Kafka does not tell");
    };
    let kept = kept_for(value("cleanup.policy"), retention_ms);
    if kept.is_none_or(|kept| kept > window) {
        events::kafka::retention_shorter(group, topic, kept, window);
    }
}

/// How long a record stays in a topic; `None`: for ever.
fn kept_for(cleanup_policy: Option<&str>, retention_ms: &str) -> Option<Duration> {
    let is_deleted = cleanup_policy.is_none_or(|policy| policy.split(',').any(|part| part.trim() == "delete"));
    let millis = retention_ms.parse::<u64>().ok();
    millis.filter(|_| is_deleted).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_stays_for_the_retention_or_for_ever() {
        let week = Some(Duration::from_secs(7 * 86_400));
        assert_eq!(kept_for(Some("delete"), "604800000"), week);
        assert_eq!(kept_for(Some("compact,delete"), "604800000"), week);
        for (policy, millis) in [(Some("delete"), "-1"), (Some("compact"), "604800000"), (None, "-1")] {
            assert_eq!(kept_for(policy, millis), None, "{policy:?} {millis:?}");
        }
    }
}
