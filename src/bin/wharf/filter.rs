//! Filter options for deliveries and quarantined records.

use std::time::Duration;

use clap::{Args, ValueEnum};
use wharf::operate::{DeliveryFilter, QuarantineFilter, State};

use crate::exit::Failure;

/// A filter for deliveries: those that match every given option.
#[derive(Debug, Args)]
pub struct DeliveryOptions {
    /// The handler, by its key or a former one
    #[arg(long, value_name = "KEY")]
    handler: Option<String>,
    /// The id of the message
    #[arg(long, value_name = "ID")]
    message: Option<String>,
    /// The source of the message
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// The topic of the message
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Why the delivery was poisoned or discarded, e.g. "retries exhausted"
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// Text that the last error must contain
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// The fingerprint of the last error, as lists show it
    #[arg(long, value_name = "FINGERPRINT")]
    fingerprint: Option<String>,
    #[command(flatten)]
    age: AgeOptions,
}

/// A filter for quarantined records: those that match every given option.
#[derive(Debug, Args)]
pub struct QuarantineOptions {
    /// The id of the record
    #[arg(long, value_name = "NUMBER")]
    id: Option<i64>,
    /// The topic of the record
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// The id of the Kafka cluster that the record was read from
    #[arg(long, value_name = "ID")]
    cluster: Option<String>,
    /// Why the record was quarantined
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// Text that the detail must contain
    #[arg(long, value_name = "TEXT")]
    detail: Option<String>,
    #[command(flatten)]
    age: AgeOptions,
}

#[derive(Debug, Args)]
pub struct AgeOptions {
    /// Only older than this, e.g. 3h or "2days 4h"
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// Only newer than this
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    newer_than: Option<Duration>,
}

impl AgeOptions {
    /// The minimum and the maximum age.
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
        filter.cluster_id.clone_from(&self.cluster);
        filter.reason.clone_from(&self.reason);
        filter.detail.clone_from(&self.detail);
        filter.older_than = self.age.older_than;
        filter.newer_than = self.age.newer_than;
        filter
    }
}

/// Refuses a change without a filter, before any query.
pub fn refuse_empty<T: Default + PartialEq>(filter: &T) -> Result<(), Failure> {
    match *filter == T::default() {
        true => Err(Failure::usage("no filter is given: use a filter, or --all")),
        false => Ok(()),
    }
}

/// The state of a delivery.
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
