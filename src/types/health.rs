//! Health: how a running inbox is, as a value for the service's own endpoints.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// How a running inbox is. See [`Running::health`](crate::Running::health).
///
/// An inbox is *live* until something has ended that cannot go on by itself: then the process has to be restarted. It is *ready* while it can
/// do its work. It is *degraded* while there is any reason to look at it; most of these pass by themselves, and a restart helps with
/// none of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// False when processing or consuming has ended for good. For a liveness probe.
    pub is_live: bool,
    /// False when the inbox is not live, is shutting down, or has had no answer from its database for five seconds. For a readiness probe.
    pub is_ready: bool,
    /// Everything that is not as it should be, the worst first. Empty when all is well.
    pub reasons: Vec<HealthReason>,
}

/// Why an inbox is not well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum HealthReason {
    /// Processing or consuming has ended: the error is that of [`Running::failure`](crate::Running::failure).
    #[non_exhaustive]
    Failed {
        /// What has ended, and why.
        error: String,
    },
    /// The inbox is shutting down.
    Stopping,
    /// The database does not answer. Everything goes on by itself when it does again.
    #[non_exhaustive]
    DatabaseAway {
        /// For so long.
        secs: u64,
    },
    /// Handlers run, and none has returned for longer than [`Limits::no_progress_after`](crate::Limits::no_progress_after).
    #[non_exhaustive]
    NoProgress {
        /// The handler whose run began first.
        handler_key: String,
        /// For so long no handler has returned.
        secs: u64,
    },
    /// A partition is not read until a person acts: see `wharf ledger`.
    #[non_exhaustive]
    PartitionStopped {
        /// The topic.
        topic: String,
        /// The partition of the topic.
        partition: i32,
        /// Why.
        why: String,
    },
    /// Nothing is read from Kafka until a person acts: the last records of a topic were all quarantined.
    #[non_exhaustive]
    IntakeStopped {
        /// Which topic, and how many records.
        why: String,
    },
    /// No broker can be reached, or Kafka refuses the credentials, the group or a topic.
    #[non_exhaustive]
    KafkaTrouble {
        /// What Kafka's client says.
        error: String,
    },
    /// Nothing is read from Kafka until there is room: the database or the handlers are slower than what comes.
    IntakePaused,
}

/// How long the database may not answer before an inbox is not ready. One statement that fails is no reason to take a process out of
/// service.
const AWAY_NOT_READY: Duration = Duration::from_secs(5);

impl Health {
    pub(crate) fn of(mut reasons: Vec<HealthReason>) -> Self {
        let is_live = !reasons.iter().any(|reason| matches!(reason, HealthReason::Failed { .. }));
        // Nothing is read then either, and this does not pass by itself.
        let is_stopped = !is_live || reasons.iter().any(|reason| matches!(reason, HealthReason::IntakeStopped { .. }));
        reasons.retain(|reason| !is_stopped || *reason != HealthReason::IntakePaused);
        reasons.sort_by_key(HealthReason::rank);
        let is_ready = is_live && !reasons.iter().any(HealthReason::is_unready);
        Self { is_live, is_ready, reasons }
    }

    /// Whether there is any reason to look at the inbox.
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
    /// The worst first.
    fn rank(&self) -> u8 {
        match self {
            Self::Failed { .. } => 0,
            Self::Stopping => 1,
            Self::DatabaseAway { .. } => 2,
            Self::KafkaTrouble { .. } => 3,
            Self::IntakeStopped { .. } => 4,
            Self::PartitionStopped { .. } => 5,
            Self::NoProgress { .. } => 6,
            Self::IntakePaused => 7,
        }
    }

    fn is_unready(&self) -> bool {
        match self {
            Self::Failed { .. } | Self::Stopping => true,
            Self::DatabaseAway { secs } => *secs >= AWAY_NOT_READY.as_secs(),
            Self::NoProgress { .. }
            | Self::PartitionStopped { .. }
            | Self::IntakeStopped { .. }
            | Self::KafkaTrouble { .. }
            | Self::IntakePaused => false,
        }
    }
}

impl fmt::Display for HealthReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error } => f.write_str(error),
            Self::Stopping => f.write_str("the inbox is shutting down"),
            Self::DatabaseAway { secs } => write!(f, "the database has not answered for {}", since(*secs)),
            Self::NoProgress { handler_key, secs } => {
                write!(f, "no handler has returned for {}; {handler_key} runs longest", since(*secs))
            }
            Self::PartitionStopped { topic, partition, why } => {
                write!(f, "partition {partition} of {topic} is stopped: {why}")
            }
            Self::IntakeStopped { why } => write!(f, "nothing is read from Kafka: {why}"),
            Self::KafkaTrouble { error } => write!(f, "Kafka: {error}"),
            Self::IntakePaused => f.write_str("nothing is read from Kafka until records that were read are written"),
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
        HealthReason::DatabaseAway { secs }
    }

    #[test]
    fn an_inbox_is_ready_until_the_database_was_away_for_five_seconds() {
        assert!(Health::of(vec![away(4)]).is_ready);
        let health = Health::of(vec![away(65)]);
        assert!(health.is_live && !health.is_ready && health.is_degraded());
        assert_eq!(health.to_string(), "not ready: the database has not answered for 1m 5s");
    }

    #[test]
    fn a_failed_inbox_is_neither_live_nor_ready_and_says_so_first() {
        let failed = HealthReason::Failed { error: "processing has stopped".to_owned() };
        let health = Health::of(vec![away(1), failed]);
        assert!(!health.is_live && !health.is_ready);
        assert_eq!(health.to_string(), "failed: processing has stopped; the database has not answered for 1s");
    }

    #[test]
    fn a_stopped_partition_makes_an_inbox_degraded_but_not_unready() {
        let why = "the log ends before the ledger".to_owned();
        let health = Health::of(vec![HealthReason::PartitionStopped { topic: "orders".to_owned(), partition: 3, why }]);
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
