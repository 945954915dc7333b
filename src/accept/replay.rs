//! Accepts quarantined records again when an operator has asked for it, with the current identity policy, handlers and
//! limits.
//!
//! An accepted record leaves the quarantine after it is stored. After a crash in between, the replay runs again and
//! finds a duplicate: a record without identity gets an id that is derived from its quarantine row, not a random one.
//! Each process claims the records that it replays, so that two processes never replay the same one. Rejected records
//! stay in quarantine with an updated reason. So do records that no handler wants.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use sha2::{Digest, Sha256};

use super::batch::{Row, RowBatch};
use super::intake::Intake;
use super::write::{Patience, write};
use crate::store::Backend;
use crate::store::operating::Replayed;
use crate::store::quarantined::record_hash;
use crate::telemetry::events;
use crate::types::{Receipt, Record, Result, jittered};

/// Records that are read and written at a time. The number is small because quarantined records may be very large.
const BATCH_ROWS: u32 = 20;
/// The most topics of requested replays that are read in one round, if handlers subscribe to patterns. Further topics
/// follow when these are done.
const ASKED_TOPICS_MAX: u32 = 1_000;

/// Polls for requested replays, three times per lease, until `stopping` resolves.
pub(crate) async fn replay_loop<B: Backend>(intake: Arc<Intake<B>>, stopping: impl Future<Output = ()>) {
    let stopping = stopping.shared();
    loop {
        if let Err(error) = replay_asked(&intake, || stopping.clone().now_or_never().is_some()).await {
            events::store_error("replay quarantined records", &error);
        }
        tokio::select! {
            () = tokio::time::sleep(jittered(intake.limits.lease / 3)) => {}
            () = stopping.clone() => return,
        }
    }
}

/// Replays until no request is left. Ends between two batches when `is_stopping`.
async fn replay_asked<B: Backend>(intake: &Arc<Intake<B>>, is_stopping: impl Fn() -> bool) -> Result<()> {
    let mut topics: Vec<String> = intake.rules.topics().map(str::to_owned).collect();
    if intake.rules.has_patterns() {
        // The database cannot match the patterns, so it returns the topics of all requested replays.
        let asked = intake.store.backend.asked_topics(ASKED_TOPICS_MAX).await?;
        topics.extend(asked.into_iter().filter(|topic| intake.rules.is_wanted(topic)));
    }
    while !is_stopping() {
        let claimed = intake.store.backend.claim_replays(topics.clone(), intake.limits.lease, BATCH_ROWS).await?;
        if claimed.is_empty() {
            return Ok(());
        }
        let undecoded = replay(intake, claimed).await?;
        topics.retain(|topic| !undecoded.iter().any(|undecoded| **undecoded == **topic));
    }
    Ok(())
}

/// Replays claimed records. Returns the topics whose records cannot be decoded now: they are left out of this round,
/// their claims expire, and the replay is tried again.
async fn replay<B: Backend>(intake: &Arc<Intake<B>>, claimed: Vec<(i64, Record)>) -> Result<Vec<Arc<str>>> {
    let (mut rows, mut replayed, mut undecoded) = (Vec::new(), Vec::new(), Vec::new());
    // Well before the claims expire, so that no other process replays the same records meanwhile.
    let deadline = Instant::now() + intake.limits.accept_patience.min(intake.limits.lease / 3);
    for (id, record) in claimed {
        if undecoded.contains(&record.topic) {
            continue;
        }
        let (topic, has_id) = (Arc::clone(&record.topic), record.id.is_some());
        let own_id = own_id(id, &record);
        let row = match intake.row_once(record, deadline, || own_id).await {
            Ok(row) => row,
            Err(error) => {
                events::decoder_error(&topic, &error);
                undecoded.push(topic);
                continue;
            }
        };
        match row {
            None => stay(intake, id, "no handler wants it", None).await?,
            Some((Row::Quarantine(quarantined), _)) => {
                stay(intake, id, quarantined.reason, quarantined.detail.clone()).await?;
            }
            Some((row @ Row::Message { .. }, _)) => {
                rows.push(row);
                replayed.push((id, has_id));
            }
        }
    }
    if rows.is_empty() {
        return Ok(undecoded);
    }
    let patience = Patience::Until(Instant::now() + intake.limits.accept_patience);
    let written = write(intake, RowBatch { rows: &rows, ledger: &[], is_in_doubt: false }, patience).await?;
    for ((id, has_id), receipt) in replayed.into_iter().zip(written.receipts) {
        match receipt {
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } => leave(intake, id).await?,
            // The record had no id. Now it is in quarantine under the identity that it got, in another row.
            Receipt::Quarantined { .. } if !has_id => leave(intake, id).await?,
            Receipt::Quarantined { reason } => stay(intake, id, reason, None).await?,
            Receipt::Unwanted => stay(intake, id, "no handler wants it", None).await?,
        }
    }
    Ok(undecoded)
}

/// The id of a record without identity. It is the same in every process and at every try, but different for an equal
/// record that is quarantined later.
fn own_id(id: i64, record: &Record) -> u128 {
    let mut hash = Sha256::new();
    hash.update(id.to_be_bytes());
    hash.update(record_hash(record));
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    u128::from_be_bytes(short)
}

/// Removes an accepted record from the quarantine.
async fn leave<B: Backend>(intake: &Intake<B>, id: i64) -> Result<()> {
    intake.store.backend.replayed(id, Replayed::Left).await?;
    events::left_quarantine(id);
    Ok(())
}

/// Keeps a record in quarantine, with the current reason.
async fn stay<B: Backend>(intake: &Intake<B>, id: i64, reason: &'static str, detail: Option<String>) -> Result<()> {
    intake.store.backend.replayed(id, Replayed::Stays { reason, detail }).await?;
    events::stays_in_quarantine(id, reason);
    Ok(())
}
