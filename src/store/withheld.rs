//! Payloads that a claim has withheld because they are large: which ones to load, and those that were loaded.
//!
//! A delivery has the payload of its message, or the newest one that an operator has corrected for its handler.

// Public in a private module, like `seam.rs`.
#![allow(unreachable_pub, missing_docs)]

use std::collections::HashMap;

use bytes::Bytes;

use super::seam::Claimed;

/// Payloads to load.
#[derive(Debug, Clone, Default)]
pub struct Withheld {
    /// The messages whose payloads are needed, each once.
    pub message_seqs: Vec<i64>,
    /// The deliveries with corrected payloads: message seq and handler id.
    pub corrected: Vec<(i64, i16)>,
}

/// Loaded payloads. Those of rows that are gone are missing.
#[derive(Debug, Default)]
pub struct Payloads {
    pub of_messages: HashMap<i64, Bytes>,
    pub corrected: HashMap<(i64, i16), Bytes>,
}

impl Withheld {
    /// What was withheld from these deliveries.
    pub fn of(deliveries: &[Claimed]) -> Self {
        let mut withheld = Self::default();
        for delivery in deliveries.iter().filter(|delivery| delivery.withheld_bytes.is_some()) {
            match is_corrected(delivery) {
                true => withheld.corrected.push((delivery.claim.message_seq, delivery.claim.handler_id)),
                false => withheld.message_seqs.push(delivery.claim.message_seq),
            }
        }
        withheld.message_seqs.sort_unstable();
        withheld.message_seqs.dedup();
        withheld
    }
}

impl Payloads {
    /// The payload of a delivery, if it was loaded.
    pub fn of(&self, delivery: &Claimed) -> Option<&Bytes> {
        let (message_seq, handler_id) = (delivery.claim.message_seq, delivery.claim.handler_id);
        match is_corrected(delivery) {
            true => self.corrected.get(&(message_seq, handler_id)),
            false => self.of_messages.get(&message_seq),
        }
    }
}

fn is_corrected(delivery: &Claimed) -> bool {
    delivery.message.as_ref().is_some_and(|message| message.is_corrected)
}
