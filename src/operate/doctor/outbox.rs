//! What is wrong with sending: records that wait for a relay, for Kafka or for a person.

use super::{DUE_SECS_MAX, Symptoms, many, secs};
use crate::types::Facts;

impl Symptoms {
    pub(super) fn of_outbox(&mut self, facts: &Facts) {
        let outbox = &facts.outbox;
        let records = |count| many(count, "record", "records");
        if outbox.poisoned > 0 {
            let what = format!("Kafka refused {} of the outbox, to be looked at by a person", records(outbox.poisoned));
            self.problem("outbox poisoned", what, "wharf outbox list");
        }
        if outbox.waiting == 0 {
            return;
        }
        let waiting = format!(
            "{} of the outbox to be sent, the oldest for {}",
            records(outbox.waiting),
            secs(outbox.oldest_secs.unwrap_or_default())
        );
        if outbox.relays.is_empty() {
            let advice = "start a process with a relay: InboxBuilder::relay, or Relay::start";
            return self.problem("no relay", format!("no process sends: {waiting}"), advice);
        }
        let mut has_trouble = false;
        for relay in &outbox.relays {
            if let Some(trouble) = &relay.trouble {
                has_trouble = true;
                let since = secs(relay.trouble_secs.unwrap_or_default());
                let what = format!("{} cannot send, for {since}: {trouble}; {waiting}", relay.name);
                let advice = "look at the brokers, the credentials and the names of the topics";
                self.problem("relay trouble", what, advice);
            }
        }
        if !has_trouble && outbox.oldest_secs.is_some_and(|oldest| oldest > DUE_SECS_MAX) {
            let advice = "look at the brokers: a partition without a leader holds up what is behind it; or raise the relay's batch_rows";
            self.warning("outbox slow", waiting, advice);
        }
    }
}
