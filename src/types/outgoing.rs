//! A record on its way out, as a relay sends it.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;

use super::Headers;

/// A record of the outbox that is to be sent.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    /// Its row. Records of one slot are sent in this order.
    pub(crate) id: i64,
    pub(crate) slot: i16,
    pub(crate) topic: Arc<str>,
    pub(crate) recorded_at: Option<SystemTime>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
}
