//! The health of a running inbox, as a value for the health endpoints of a service.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// The health of a running inbox. See [`Running::health`](crate::Running::health).
///
/// An inbox is *live* until a part of it has ended that cannot recover; then the process must be restarted. It is
/// *ready* while it can do its work. It is *degraded* while there is any reason for attention; most reasons pass by
/// themselves, and a restart helps with none of them unless the inbox is not live.
///
/// ```
/// use wharf::health::Health;
///
/// /// The status codes of a liveness and a readiness endpoint.
/// fn probes(health: &Health) -> (u16, u16) {
///     let code = |is_well| if is_well { 200 } else { 503 };
///     (code(health.is_live), code(health.is_ready))
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// False when processing or consumption has ended for good. For a liveness probe.
    pub is_live: bool,
    /// False when the inbox is not live, is shutting down, or has had no answer from its database for five seconds. For
    /// a readiness probe.
    pub is_ready: bool,
    /// Every reason for attention, the most severe first. Empty when the inbox is healthy.
    pub reasons: Vec<HealthReason>,
}

/// Why an inbox is not healthy. [`Health::reasons`] has them.
///
/// ```
/// use wharf::health::{Health, HealthReason};
///
/// fn page_someone(health: &Health) -> bool {
///     health.reasons.iter().any(|reason| matches!(reason, HealthReason::PartitionStopped { .. }))
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum HealthReason {
    /// Processing or consumption has ended, with the error of [`Running::failure`](crate::Running::failure).
    #[non_exhaustive]
    Failed {
        /// What has ended, and why.
        error: String,
    },
    /// The inbox is shutting down.
    Stopping,
    /// The database does not answer. Work resumes by itself when it answers again.
    #[non_exhaustive]
    DatabaseUnavailable {
        /// How long the database has not answered.
        secs: u64,
    },
    /// Handlers run, and none has returned for longer than
    /// [`Limits::no_progress_after`](crate::Limits::no_progress_after).
    #[non_exhaustive]
    NoProgress {
        /// The handler with the longest run.
        handler_key: String,
        /// How long no handler has returned.
        secs: u64,
    },
    /// A partition is not read until a person acts, because it is stopped (see `wharf ledger`) or because Kafka's
    /// client cannot read its next records.
    #[non_exhaustive]
    PartitionStopped {
        /// The name of the source that reads it.
        source: String,
        /// The topic.
        topic: String,
        /// The number of the partition.
        partition: i32,
        /// Why it is not read.
        why: String,
    },
    /// A partition is not read because the identity of its next record cannot be decoded now: a dependency of the
    /// decoder, such as a schema registry, is unavailable or refuses the credentials. Reading continues by itself.
    #[non_exhaustive]
    PartitionWaits {
        /// The name of the source that reads it.
        source: String,
        /// The topic.
        topic: String,
        /// The number of the partition.
        partition: i32,
        /// The decoder's error.
        why: String,
    },
    /// Nothing is read from a source until a person acts, because the last records of a topic were all quarantined.
    #[non_exhaustive]
    IntakeStopped {
        /// The name of the source.
        source: String,
        /// Which topic, and how many records.
        why: String,
    },
    /// No broker can be reached, Kafka refuses the credentials, the group, the cluster or a topic, a topic does not exist,
    /// or no topic matches a pattern.
    #[non_exhaustive]
    KafkaError {
        /// The name of the source; none for the relay of the outbox.
        source: Option<String>,
        /// The error of the Kafka client.
        error: String,
    },
    /// Reading from a source is paused until the backlog shrinks: records arrive faster than the database or the
    /// handlers can process them.
    #[non_exhaustive]
    IntakePaused {
        /// The name of the source.
        source: String,
    },
}

/// How long the database may be unreachable before an inbox is not ready. A single failed statement must not take a
/// process out of service.
const AWAY_NOT_READY: Duration = Duration::from_secs(5);

impl Health {
    /// Derives the health from the reasons of all parts.
    pub(crate) fn of(mut reasons: Vec<HealthReason>) -> Self {
        let is_live = !reasons.iter().any(|reason| matches!(reason, HealthReason::Failed { .. }));
        // A failed or stopped intake does not recover by itself, so "paused" would mislead.
        let stopped: Vec<String> = reasons.iter().filter_map(HealthReason::stopped_source).collect();
        reasons.retain(
            |reason| !matches!(reason, HealthReason::IntakePaused { source } if !is_live || stopped.contains(source)),
        );
        reasons.sort_by_key(HealthReason::rank);
        let is_ready = is_live && !reasons.iter().any(HealthReason::is_unready);
        Self { is_live, is_ready, reasons }
    }

    /// Whether there is any reason for attention.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        !self.reasons.is_empty()
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.is_live, self.is_ready, self.is_degraded()) {
            (false, _, _) => "failed",
            (true, false, _) => "not ready",
            (true, true, true) => "degraded",
            (true, true, false) => return f.write_str("healthy"),
        };
        f.write_str(state)?;
        for (place, reason) in self.reasons.iter().enumerate() {
            f.write_str(if place == 0 { ": " } else { "; " })?;
            reason.fmt(f)?;
        }
        Ok(())
    }
}

impl HealthReason {
    /// The source from which nothing is read until a person acts; `None` for other reasons.
    fn stopped_source(&self) -> Option<String> {
        if let Self::IntakeStopped { source, .. } = self { Some(source.clone()) } else { None }
    }

    /// The sort key: the most severe reason has the lowest rank.
    fn rank(&self) -> u8 {
        match self {
            Self::Failed { .. } => 0,
            Self::Stopping => 1,
            Self::DatabaseUnavailable { .. } => 2,
            Self::KafkaError { .. } => 3,
            Self::IntakeStopped { .. } => 4,
            Self::PartitionStopped { .. } => 5,
            Self::PartitionWaits { .. } => 6,
            Self::NoProgress { .. } => 7,
            Self::IntakePaused { .. } => 8,
        }
    }

    /// Whether the inbox cannot do its work, so that a readiness probe must fail.
    fn is_unready(&self) -> bool {
        match self {
            Self::Failed { .. } | Self::Stopping => true,
            Self::DatabaseUnavailable { secs } => *secs >= AWAY_NOT_READY.as_secs(),
            Self::NoProgress { .. }
            | Self::PartitionStopped { .. }
            | Self::PartitionWaits { .. }
            | Self::IntakeStopped { .. }
            | Self::KafkaError { .. }
            | Self::IntakePaused { .. } => false,
        }
    }
}

impl fmt::Display for HealthReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error } => f.write_str(error),
            Self::Stopping => f.write_str("the inbox is shutting down"),
            Self::DatabaseUnavailable { secs } => write!(f, "the database has not answered for {}", since(*secs)),
            Self::NoProgress { handler_key, secs } => {
                write!(f, "no handler has returned for {}; {handler_key} runs longest", since(*secs))
            }
            Self::PartitionStopped { source, topic, partition, why } => {
                write!(f, "Kafka source {source}: partition {partition} of {topic} is stopped: {why}")
            }
            Self::PartitionWaits { source, topic, partition, why } => {
                write!(f, "Kafka source {source}: partition {partition} of {topic} waits for its decoder: {why}")
            }
            Self::IntakeStopped { source, why } => write!(f, "nothing is read from Kafka source {source}: {why}"),
            Self::KafkaError { source: Some(source), error } => write!(f, "Kafka source {source}: {error}"),
            Self::KafkaError { source: None, error } => write!(f, "Kafka: {error}"),
            Self::IntakePaused { source } => {
                write!(f, "nothing is read from Kafka source {source} until records that were read are written")
            }
        }
    }
}

fn since(secs: u64) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(secs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away(secs: u64) -> HealthReason {
        HealthReason::DatabaseUnavailable { secs }
    }

    #[test]
    fn an_inbox_is_ready_until_the_database_was_unavailable_for_five_seconds() {
        assert!(Health::of(vec![away(4)]).is_ready);
        let health = Health::of(vec![away(65)]);
        assert!(health.is_live && !health.is_ready && health.is_degraded());
        assert_eq!(health.to_string(), "not ready: the database has not answered for 1m 5s");
    }

    #[test]
    fn a_failed_inbox_is_neither_live_nor_ready_and_this_is_its_first_reason() {
        let failed = HealthReason::Failed { error: "processing has stopped".to_owned() };
        let health = Health::of(vec![away(1), failed]);
        assert!(!health.is_live && !health.is_ready);
        assert_eq!(health.to_string(), "failed: processing has stopped; the database has not answered for 1s");
    }

    #[test]
    fn a_stopped_partition_makes_an_inbox_degraded_but_not_unready() {
        let why = "the log ends before the ledger".to_owned();
        let health = Health::of(vec![HealthReason::PartitionStopped {
            source: "shop".to_owned(),
            topic: "orders".to_owned(),
            partition: 3,
            why,
        }]);
        assert!(health.is_live && health.is_ready && health.is_degraded());
        let json = serde_json::to_value(&health).unwrap();
        assert_eq!(json["reasons"][0]["reason"], "partition_stopped");
        assert_eq!(json["reasons"][0]["partition"], 3);
    }

    #[test]
    fn a_healthy_inbox_has_no_reasons() {
        let health = Health::of(Vec::new());
        assert!(health.is_live && health.is_ready && !health.is_degraded());
        assert_eq!(health.to_string(), "healthy");
    }
}
