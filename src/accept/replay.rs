//! Accepts quarantined records anew when a person has asked for it: identity, fan-out and limits are those of now.
//!
//! An accepted record leaves the quarantine after it is stored. A process that crashes in between does it again and finds a duplicate: a
//! record without identity gets its id from its row in the quarantine, not by chance. Each process claims the records that it replays, so
//! that no two do the same work. Rejected records stay in quarantine with an updated reason. So do records that no handler wants.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use sha2::{Digest, Sha256};

use super::intake::Intake;
use super::write::{Patience, Row, RowBatch, write};
use crate::store::Backend;
use crate::store::operating::Replayed;
use crate::store::quarantined::record_hash;
use crate::telemetry::events;
use crate::types::{Receipt, Record, Result, jittered};

/// Records that are read and written at a time. Few: they may be the largest there are.
const BATCH_ROWS: u32 = 20;

/// Looks for replays that were asked for, three times a lease, until `stopping`.
pub(crate) async fn replay_loop<B: Backend>(intake: Arc<Intake<B>>, stopping: impl Future<Output = ()>) {
    let stopping = stopping.shared();
    loop {
        if let Err(error) = replay_asked(&intake, || stopping.clone().now_or_never().is_some()).await {
            events::store_trouble("replay quarantined records", &error);
        }
        tokio::select! {
            () = tokio::time::sleep(jittered(intake.limits.lease / 3)) => {}
            () = stopping.clone() => return,
        }
    }
}

async fn replay_asked<B: Backend>(intake: &Arc<Intake<B>>, is_stopping: impl Fn() -> bool) -> Result<()> {
    let topics: Vec<String> = intake.rules.topics().map(str::to_owned).collect();
    while !is_stopping() {
        let claimed = intake.store.backend.claim_replays(topics.clone(), intake.limits.lease, BATCH_ROWS).await?;
        if claimed.is_empty() {
            return Ok(());
        }
        replay(intake, claimed).await?;
    }
    Ok(())
}

async fn replay<B: Backend>(intake: &Arc<Intake<B>>, claimed: Vec<(i64, Record)>) -> Result<()> {
    let (mut rows, mut replayed) = (Vec::new(), Vec::new());
    for (id, record) in claimed {
        let has_id = record.id.is_some();
        let own_id = own_id(id, &record);
        match intake.row_with(record, || own_id) {
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
        return Ok(());
    }
    let patience = Patience::Until(Instant::now() + intake.limits.accept_patience);
    let written = write(intake, RowBatch { rows: &rows, ledger: &[], is_in_doubt: false }, patience).await?;
    for ((id, has_id), receipt) in replayed.into_iter().zip(written.receipts) {
        match receipt {
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } => leave(intake, id).await?,
            // Quarantined under its identity of now: a row of its own, unless it had that identity before.
            Receipt::Quarantined { .. } if !has_id => leave(intake, id).await?,
            Receipt::Quarantined { reason } => stay(intake, id, reason, None).await?,
            Receipt::Unwanted => stay(intake, id, "no handler wants it", None).await?,
        }
    }
    Ok(())
}

/// The same in every process and at every try; another for a record like it that is quarantined later.
fn own_id(id: i64, record: &Record) -> u128 {
    let mut hash = Sha256::new();
    hash.update(id.to_be_bytes());
    hash.update(record_hash(record));
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    u128::from_be_bytes(short)
}

async fn leave<B: Backend>(intake: &Intake<B>, id: i64) -> Result<()> {
    intake.store.backend.replayed(id, Replayed::Left).await?;
    events::left_quarantine(id);
    Ok(())
}

async fn stay<B: Backend>(intake: &Intake<B>, id: i64, reason: &'static str, detail: Option<String>) -> Result<()> {
    intake.store.backend.replayed(id, Replayed::Stays { reason, detail }).await?;
    events::stays_in_quarantine(id, reason);
    Ok(())
}
