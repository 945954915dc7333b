//! Symptoms of the outbox: records that wait for a relay, for Kafka or for a person's decision.

use super::{DUE_SECS_MAX, Symptoms, many, secs};
use crate::types::Facts;

impl Symptoms {
    /// A relay that reports its own problem explains why records wait, so `outbox slow` is not added to it.
    pub(super) fn of_outbox(&mut self, facts: &Facts) {
        let outbox = &facts.outbox;
        let records = |count| many(count, "record", "records");
        if outbox.poisoned > 0 {
            let what =
                format!("Kafka refused {} of the outbox; a person must decide about them", records(outbox.poisoned));
            self.problem("outbox poisoned", what, "wharf outbox list");
        }
        if outbox.waiting == 0 {
            return;
        }
        let waiting = format!(
            "{} of the outbox waiting, the oldest for {}",
            records(outbox.waiting),
            secs(outbox.oldest_secs.unwrap_or_default())
        );
        if outbox.relays.is_empty() {
            let advice = "start a process with a relay: InboxBuilder::relay, or Relay::start";
            return self.problem("no relay", format!("no process sends: {waiting}"), advice);
        }
        let mut has_problem = false;
        for relay in &outbox.relays {
            if let Some(problem) = &relay.problem {
                has_problem = true;
                let since = secs(relay.problem_secs.unwrap_or_default());
                let what = format!("{} cannot send, for {since}: {problem}; {waiting}", relay.name);
                let advice = "check the brokers, the credentials and the topic names";
                self.problem("relay error", what, advice);
            }
        }
        if !has_problem && outbox.oldest_secs.is_some_and(|oldest| oldest > DUE_SECS_MAX) {
            let advice = "check the brokers: a partition without a leader delays all records of its keys; or raise the relay's batch_rows";
            self.warning("outbox slow", waiting, advice);
        }
    }
}
