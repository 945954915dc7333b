//! Handles librdkafka's errors: distinguishes outages from refusals, and reports the root cause once.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::super::access::Refused;
use super::super::outage::Say;
use super::Context;
use crate::telemetry::events;

impl Context {
    /// Records that Kafka, or the token provider, refuses something. Reported once, until it is allowed again.
    pub(in crate::kafka) fn refused(&self, what: &Refused, why: &str) {
        match self.access.refuse(what.clone(), || why.to_owned()) {
            true => events::kafka::access_refused(&self.source, what.name(), why),
            false => events::kafka::quiet_failure(&self.source, "consume", &why),
        }
    }

    /// Records that something is allowed. Emits an event if it was refused before.
    pub(in crate::kafka) fn allowed(&self, what: &Refused) {
        if self.access.allow(what) {
            events::kafka::access_granted(&self.source, what.name());
        }
    }

    /// Called when the client has a new token.
    pub(in crate::kafka) fn has_token(&self) {
        self.allowed(&Refused::Token);
    }

    /// Called when the token provider failed, or the client did not take its token.
    pub(in crate::kafka) fn has_no_token(&self, error: &str) {
        self.refused(&Refused::Token, &format!("there is no token to authenticate with: {error}"));
    }

    /// Why this process cannot read, for health checks; the most important reason first.
    pub(in crate::kafka) fn problems(&self) -> Vec<String> {
        let mut problems = self.access.reasons();
        problems.extend(self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone());
        problems.extend(self.topics_problem().clone());
        problems
    }

    fn topics_problem(&self) -> MutexGuard<'_, Option<String>> {
        self.topics_problem.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called when Kafka has answered about the topics that are read. `problem` is a topic that cannot be read; `None`
    /// if there is none, or if the subscription has changed since.
    pub(in crate::kafka) fn topics_judged(&self, problem: Option<String>) {
        *self.topics_problem() = problem;
    }

    /// Called when the subscription has changed: errors about earlier topics are not a reason any more. `watch.rs` asks
    /// Kafka about the topics that are read now.
    pub(in crate::kafka) fn topics_changed(&self) {
        self.topics_judged(None);
        self.check_topics.notify_one();
    }

    /// Called when partitions are assigned: the topic that had a problem may be among them.
    pub(super) fn topics_came(&self) {
        if self.topics_problem().is_some() {
            self.check_topics.notify_one();
        }
    }

    /// Stores the reason for health checks until a broker answers.
    fn note_problem(&self, problem: String) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
        self.has_problem.store(true, Ordering::Relaxed);
    }

    pub(super) fn clear_problem(&self) {
        if self.has_problem.swap(false, Ordering::Relaxed) {
            self.problem.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// Reports an error. During an outage or a refusal it is only logged at debug level: the root cause is reported
    /// already.
    pub(in crate::kafka) fn report_error(&self, operation: &'static str, error: &impl std::fmt::Display) {
        match self.outage.is_on() || self.access.is_shut_out() {
            true => events::kafka::quiet_failure(&self.source, operation, error),
            false => events::kafka::failure(&self.source, operation, error),
        }
    }
}

impl ClientContext for Context {
    /// Passes librdkafka's log lines on as events, at debug level while the root cause is reported already.
    fn log(&self, level: RDKafkaLogLevel, _facility: &str, line: &str) {
        let is_told = self.outage.is_on() || self.access.is_shut_out();
        let level = if is_told { RDKafkaLogLevel::Debug } else { level };
        events::kafka::log(&self.source, level as i32, without_values(line));
    }

    /// Called inside the poll, every few seconds. Passes the JSON on unparsed, because rdkafka would parse every field.
    fn stats_raw(&self, json: &[u8]) {
        match self.statistics.note(json) {
            true => {
                let newest = self.statistics.newest();
                events::kafka::fetch_queue(&self.source, newest.queued_records, newest.queued_bytes);
                for (broker, secs) in &newest.round_trips {
                    events::kafka::round_trip(&self.source, *broker, *secs);
                }
            }
            false => events::kafka::quiet_failure(&self.source, "read statistics", &"unknown format"),
        }
    }

    /// Called inside the poll for every error, with more detail than the poll returns.
    fn error(&self, error: KafkaError, reason: &str) {
        let reason = without_values(reason);
        if is_of_credentials(&error) {
            return self.refused(&Refused::Credentials, &told_of_credentials(reason));
        }
        match error.rdkafka_error_code() {
            // librdkafka reports brokers that refuse the credentials as down.
            Some(RDKafkaErrorCode::AllBrokersDown) if self.access.is_shut_out() => {
                self.is_cut_off.store(true, Ordering::Relaxed);
                return events::kafka::quiet_failure(&self.source, "consume", &reason);
            }
            Some(RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure) => {
                self.is_cut_off.store(true, Ordering::Relaxed);
                self.note_problem(format!("no broker answers: {reason}"));
                let error = format_args!("{error}: {reason}");
                return match self.outage.failed(Instant::now()) {
                    Say::Warning { lasts, suppressed } => {
                        events::kafka::brokers_away(&self.source, lasts, suppressed, &error);
                    }
                    Say::Nothing => events::kafka::quiet_failure(&self.source, "consume", &error),
                };
            }
            Some(RDKafkaErrorCode::GroupAuthorizationFailed) => {
                let why = format!(
                    "consumer group {} may not be used: it needs READ on the group ({reason})",
                    self.source.group
                );
                return self.refused(&Refused::Group, &why);
            }
            Some(RDKafkaErrorCode::ClusterAuthorizationFailed) => {
                return self.refused(&Refused::Cluster, &format!("Kafka refuses the cluster: {reason}"));
            }
            Some(RDKafkaErrorCode::TopicAuthorizationFailed) => {
                // librdkafka does not always name the topic, so `watch.rs` asks about each one.
                self.check_topics.notify_one();
                return events::kafka::quiet_failure(&self.source, "consume", &format_args!("{error}: {reason}"));
            }
            Some(RDKafkaErrorCode::UnknownTopicOrPartition) => {
                // librdkafka reports a missing topic once, so the next answer of a broker must not end the problem.
                self.topics_judged(Some(format!("{error}: {reason}")));
                self.check_topics.notify_one();
            }
            // Records that librdkafka cannot read. It repeats the error, and the partition makes no progress.
            Some(
                RDKafkaErrorCode::BadMessage | RDKafkaErrorCode::BadCompression | RDKafkaErrorCode::NotImplemented,
            ) => {
                let place = offset_in(reason).and_then(|offset| Some((self.assigned().only_one_at(offset)?, offset)));
                if let Some(((topic, partition), offset)) = place {
                    self.assigned().set_blocked(&(Arc::clone(&topic), partition), reason);
                    return events::kafka::partition_blocked(&self.source, &topic, partition, offset, reason);
                }
            }
            Some(_) | None => {}
        }
        self.report_error("consume", &format_args!("{error}: {reason}"));
    }
}

/// Whether Kafka refuses the client: a wrong password, a refused or expired token, a certificate.
pub(in crate::kafka) fn is_of_credentials(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{Authentication, SaslAuthenticationFailed};
    matches!(error.rdkafka_error_code(), Some(Authentication | SaslAuthenticationFailed))
}

/// The text of a refusal. librdkafka's own OIDC client reports a token endpoint that fails as refused credentials.
pub(in crate::kafka) fn told_of_credentials(reason: &str) -> String {
    const NO_TOKEN: &str = "Failed to acquire SASL OAUTHBEARER token: ";
    match reason.split_once(NO_TOKEN) {
        Some((_, error)) => format!("there is no token to authenticate with: {error}"),
        None => format!("Kafka refuses the credentials: {reason}"),
    }
}

/// Cuts the text after the name of this setting: librdkafka quotes its invalid values, which may be secrets.
pub(in crate::kafka) fn without_values(text: &str) -> &str {
    const QUOTED: &str = "sasl.oauthbearer.config";
    text.find(QUOTED).map_or(text, |at| &text[..at + QUOTED.len()])
}

/// The offset in librdkafka's error text.
fn offset_in(reason: &str) -> Option<i64> {
    let words = ["offset ", "message at "].iter().find_map(|words| reason.split_once(words))?;
    words.1.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use futures_util::FutureExt;
    use rdkafka::TopicPartitionList;
    use rdkafka::consumer::ConsumerContext;

    use super::super::super::assigned::AssignedPartitions;
    use super::super::super::begin::Begins;
    use super::super::offsets;
    use super::*;
    use crate::types::SourceName;

    fn context() -> Context {
        let source = SourceName { name: "shop".into(), group: "shop".into() };
        Context::new(source, Begins::default(), channel().1, AssignedPartitions::new(1, Box::new(|_| false)))
    }

    #[test]
    fn an_unsubscribed_topic_is_no_problem_any_more_but_an_outage_is() {
        let (context, failed) = (context(), KafkaError::MessageConsumption);
        context.error(failed(RDKafkaErrorCode::UnknownTopicOrPartition), "Subscribed topic not available: t");
        assert_eq!(context.problems().len(), 1);
        context.broker_answered();
        assert_eq!(context.problems().len(), 1, "brokers answer, and the topic is missing");
        context.topics_changed();
        assert_eq!(context.problems(), [""; 0]);
        assert!(context.check_topics.notified().now_or_never().is_some(), "Kafka is asked about the other topics");

        context.error(failed(RDKafkaErrorCode::AllBrokersDown), "1/1 brokers are down");
        context.topics_changed();
        assert_eq!(context.problems(), ["no broker answers: 1/1 brokers are down"]);
    }

    #[test]
    fn a_group_that_accepts_a_commit_is_refused_no_longer() {
        let context = context();
        context.error(KafkaError::Global(RDKafkaErrorCode::GroupAuthorizationFailed), "JoinGroup failed");
        let committed = offsets(&[(("t".into(), 0), 5)]).unwrap();
        context
            .commit_callback(Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::GroupAuthorizationFailed)), &committed);
        context.commit_callback(Ok(()), &TopicPartitionList::new());
        assert_eq!(context.problems().len(), 1);
        context.commit_callback(Ok(()), &committed);
        assert_eq!(context.problems(), [""; 0]);
    }

    #[test]
    fn the_offset_of_a_damaged_record_is_found_in_what_librdkafka_says() {
        let damaged = "MessageSet at offset 17 (99 bytes) failed CRC32C check (original 0x1 != calculated 0x2)";
        assert_eq!(offset_in(damaged), Some(17));
        assert_eq!(offset_in("Decompression (codec 0x4) of message at 5 of 70 bytes failed: x"), Some(5));
        assert_eq!(offset_in("1/1 brokers are down"), None);
    }
}
