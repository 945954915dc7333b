//! Options that say which deliveries or quarantined records are meant.

use std::time::Duration;

use clap::{Args, ValueEnum};
use wharf::operate::{DeliveryFilter, QuarantineFilter, State};

use crate::exit::Failure;

/// Which deliveries are meant: those that fit everything that is said.
#[derive(Debug, Args)]
pub struct DeliveryOptions {
    /// Of this handler, by its key or a former one
    #[arg(long, value_name = "KEY")]
    handler: Option<String>,
    /// Of the message with this id
    #[arg(long, value_name = "ID")]
    message: Option<String>,
    /// Of messages of this source
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// Of messages of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Given up for this reason, e.g. "retries exhausted"
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// With this text in the last error
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// Whose last error has this fingerprint, as lists show it
    #[arg(long, value_name = "FINGERPRINT")]
    fingerprint: Option<String>,
    #[command(flatten)]
    age: AgeOptions,
}

/// Which quarantined records are meant: those that fit everything that is said.
#[derive(Debug, Args)]
pub struct QuarantineOptions {
    /// The one with this number
    #[arg(long, value_name = "NUMBER")]
    id: Option<i64>,
    /// Of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Quarantined for this reason
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// With this text in the detail
    #[arg(long, value_name = "TEXT")]
    detail: Option<String>,
    #[command(flatten)]
    age: AgeOptions,
}

#[derive(Debug, Args)]
pub struct AgeOptions {
    /// Longer ago than this, e.g. 3h or "2days 4h"
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// No longer ago than this
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    newer_than: Option<Duration>,
}

impl AgeOptions {
    /// Older than the first, and no older than the second.
    pub fn bounds(&self) -> (Option<Duration>, Option<Duration>) {
        (self.older_than, self.newer_than)
    }
}

impl DeliveryOptions {
    pub fn filter(&self) -> DeliveryFilter {
        let mut filter = DeliveryFilter::default();
        filter.handler_key.clone_from(&self.handler);
        filter.message_id.clone_from(&self.message);
        filter.source.clone_from(&self.source);
        filter.topic.clone_from(&self.topic);
        filter.reason.clone_from(&self.reason);
        filter.error.clone_from(&self.error);
        filter.fingerprint.clone_from(&self.fingerprint);
        filter.older_than = self.age.older_than;
        filter.newer_than = self.age.newer_than;
        filter
    }
}

impl QuarantineOptions {
    pub fn filter(&self) -> QuarantineFilter {
        let mut filter = QuarantineFilter::default();
        filter.id = self.id;
        filter.topic.clone_from(&self.topic);
        filter.reason.clone_from(&self.reason);
        filter.detail.clone_from(&self.detail);
        filter.older_than = self.age.older_than;
        filter.newer_than = self.age.newer_than;
        filter
    }
}

/// A change without a filter is refused before anything is looked up.
pub fn refuse_empty<T: Default + PartialEq>(filter: &T) -> Result<(), Failure> {
    match *filter == T::default() {
        true => Err(Failure::usage("which ones? Give a filter, or --all")),
        false => Ok(()),
    }
}

/// A delivery's state.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum StateOption {
    Pending,
    Running,
    Done,
    Poisoned,
    Discarded,
}

impl From<StateOption> for State {
    fn from(state: StateOption) -> Self {
        match state {
            StateOption::Pending => Self::Pending,
            StateOption::Running => Self::Running,
            StateOption::Done => Self::Done,
            StateOption::Poisoned => Self::Poisoned,
            StateOption::Discarded => Self::Discarded,
        }
    }
}
