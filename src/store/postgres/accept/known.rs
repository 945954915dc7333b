//! Identities that were there before: which messages they are, and whether they are the same.

use diesel::QueryResult;

use super::KnownRow;
use crate::store::quarantined;
use crate::store::seam::{NewMessage, Quarantined};

/// A message that was there before: its place among those that were asked for, and whether it has the same payload.
pub(super) struct Stored {
    pub(super) at: usize,
    pub(super) seq: i64,
    pub(super) is_same: bool,
}

pub(super) fn stored(messages: &[&NewMessage], rows: Vec<KnownRow>) -> QueryResult<Vec<Stored>> {
    let stored = |KnownRow { ord, seq, payload_hash }| {
        let at = place(ord, messages.len())?;
        Ok(Stored { at, seq, is_same: payload_hash == messages[at].payload_hash })
    };
    rows.into_iter().map(stored).collect()
}

/// An ordinal of the database, which counts from 1, as a place in the array that it was given.
pub(super) fn place(ord: i64, count: usize) -> QueryResult<usize> {
    let place = usize::try_from(ord - 1).ok().filter(|&place| place < count);
    place.ok_or_else(|| {
        let odd = format!("the database answered for element {ord} of an array of {count}");
        diesel::result::Error::DeserializationError(odd.into())
    })
}

/// Messages that are the same as the stored ones, with their seq, and those that only claim to be.
pub(super) fn split_conflicts<'a>(
    messages: &[&'a NewMessage],
    found: &[Stored],
) -> (Vec<(i64, &'a NewMessage)>, Vec<Quarantined>) {
    let mut same = Vec::new();
    let mut conflicting = Vec::new();
    for &Stored { at, seq, is_same } in found {
        if is_same {
            same.push((seq, messages[at]));
        } else {
            conflicting.push(quarantined::conflict(messages[at]));
        }
    }
    (same, conflicting)
}
