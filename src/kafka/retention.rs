//! Asks Kafka how long it keeps the records of topics, and warns if the inbox keeps identities for less time: a record
//! that is read again after that counts as new. Runs in the background, once for each new subscription; nothing depends
//! on the answer.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, ConfigResource, ConfigResourceResult, OwnedResourceSpecifier, ResourceSpecifier,
};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult};

use super::native;
use super::settings;
use super::token::TokenProvider;
use crate::telemetry::events;
use crate::types::{Backoff, SourceName};

/// The timeout for an answer of Kafka.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// The longest pause between two tries while Kafka is away.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Ignores librdkafka's log, which warns about consumer settings that an admin client does not use. Errors are returned
/// by the request.
struct Silent;

impl ClientContext for Silent {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}

    fn error(&self, _: KafkaError, _: &str) {}
}

/// Retries until Kafka answers. "Not authorized" is an answer. Must run on a tokio runtime.
pub(super) async fn warn_if_shorter(
    config: ClientConfig,
    tokens: Option<TokenProvider>,
    source: SourceName,
    topics: Vec<String>,
    window: Duration,
) {
    let (config, mut backoff) = (settings::to_ask(&config), Backoff::new(PAUSE_MAX));
    loop {
        match ask(&config, tokens.as_ref(), &topics).await {
            Ok(answers) => {
                for topic in &topics {
                    let is_about = |specifier: &OwnedResourceSpecifier| matches!(specifier, OwnedResourceSpecifier::Topic(name) if name == topic);
                    let answer = answers.iter().flatten().find(|answer| is_about(&answer.specifier));
                    judge(&source, topic, answer, window);
                }
                return;
            }
            Err(error) => events::kafka::retention_unknown(&source, "", &error),
        }
        backoff.pause().await;
    }
}

/// Asks once for the configuration of the topics.
async fn ask(
    config: &ClientConfig,
    tokens: Option<&TokenProvider>,
    topics: &[String],
) -> KafkaResult<Vec<ConfigResourceResult>> {
    let client: AdminClient<Silent> = config.create_with_context(Silent)?;
    if let Some(tokens) = tokens
        && let Ok(token) = tokens.ask().await
    {
        // Without a token there is no answer, and the request is repeated. The consumer reports why there is none.
        let _ = native::token::set(client.inner(), &token);
    }
    let resources: Vec<ResourceSpecifier<'_>> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let answers = client.describe_configs(&resources, &AdminOptions::new().request_timeout(Some(ANSWER_WAIT))).await;
    // Dropping the client blocks, so it needs a blocking thread.
    drop(tokio::task::spawn_blocking(move || drop(client)));
    answers
}

/// Warns if Kafka keeps the records of the topic for longer than the inbox keeps identities.
fn judge(source: &SourceName, topic: &str, answer: Option<&ConfigResource>, window: Duration) {
    let value = |name: &str| answer.and_then(|answer| answer.get(name)?.value.as_deref());
    // The value is missing if the topic does not exist or may not be described.
    let Some(retention_ms) = value("retention.ms") else {
        return events::kafka::retention_unknown(source, topic, &"Kafka does not report it");
    };
    let kept = kept_for(value("cleanup.policy"), retention_ms);
    if kept.is_none_or(|kept| kept > window) {
        events::kafka::retention_shorter(source, topic, kept, window);
    }
}

/// How long a record stays in a topic; `None`: forever, because of the policy or a negative time.
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
