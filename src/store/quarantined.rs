//! Quarantined records: how their detail is truncated, which of them are the same, and how a conflict becomes one.

use sha2::{Digest, Sha256};

use super::seam::{NewMessage, Quarantined};
use crate::types::{Record, sanitize};

/// Maximum number of characters kept of the detail.
const DETAIL_CHARS_MAX: usize = 500;

/// Converts a message whose identity belongs to another payload back to its record.
pub(super) fn conflict(message: &NewMessage) -> Quarantined {
    let record = Record::from(&*message.message);
    Quarantined {
        record,
        reason: "conflict",
        detail: Some("the identity belongs to a message with another payload".to_owned()),
    }
}

/// The record's topic as stored. The column is text, so invalid characters are replaced; Kafka allows only
/// [a-zA-Z0-9._-].
pub(super) fn topic(quarantined: &Quarantined) -> String {
    sanitize::text(&quarantined.record.topic, DETAIL_CHARS_MAX)
}

/// The cluster that the record was read from. The column is text, like the topic.
pub(super) fn cluster(quarantined: &Quarantined) -> Option<String> {
    quarantined.record.cluster.as_deref().map(|cluster| sanitize::text(cluster, DETAIL_CHARS_MAX))
}

/// The detail as stored. It may quote the record, so it is cut and cleaned like any outside text.
pub(super) fn detail(quarantined: &Quarantined) -> Option<String> {
    quarantined.detail.as_deref().map(|detail| sanitize::text(detail, DETAIL_CHARS_MAX))
}

/// A hash of position, identity and content: the same for a redelivered record, different for any other.
pub(crate) fn record_hash(record: &Record) -> Vec<u8> {
    let mut hash = Sha256::new();
    let mut part = |bytes: Option<&[u8]>| {
        // Lengths separate neighbouring fields; -1 distinguishes none from empty.
        hash.update(bytes.map_or(-1, |bytes| i64::try_from(bytes.len()).unwrap_or(i64::MAX)).to_be_bytes());
        hash.update(bytes.unwrap_or_default());
    };
    part(Some(record.topic.as_bytes()));
    part(record.position.map(|p| p.partition.to_be_bytes()).as_ref().map(|b| b.as_slice()));
    part(record.position.map(|p| p.offset.to_be_bytes()).as_ref().map(|b| b.as_slice()));
    part(record.cluster.as_deref().map(str::as_bytes));
    part(record.id.as_deref());
    part(record.source.as_deref());
    part(record.key.as_deref());
    part(record.headers.encoded());
    part(record.payload.as_deref());
    hash.finalize().to_vec()
}
