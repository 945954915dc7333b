//! What happened to one message: its record without the payload, and the attempts, actions and corrections of each of
//! its deliveries. Read in four statements, however many handlers the message has.

// Public in a private module, like `operating.rs`.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::collections::HashMap;

use crate::types::{Correction, FailedAttempt, HistoryEntry, Record};

/// The history of a message.
#[derive(Default)]
pub struct MessageStory {
    /// None when the message was deleted. It has no payload.
    pub record: Option<Record>,
    /// The size of the payload.
    pub payload_bytes: Option<u64>,
    /// By the id of the handler. A delivery without failures and actions is left out.
    pub deliveries: HashMap<i16, DeliveryStory>,
}

/// The fields mean the same as in `DeliveryDetails`.
#[derive(Default)]
pub struct DeliveryStory {
    pub history: Vec<HistoryEntry>,
    pub failures: Vec<FailedAttempt>,
    pub correction: Option<Correction>,
}
