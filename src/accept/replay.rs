//! Accepts quarantined records anew when a person has asked for it: identity, fan-out and limits are those of now.
//!
//! What is accepted leaves the quarantine, after it is stored, so that a process that dies in between does it again and finds a duplicate.
//! What is not stays, with its reason of now. A record that nobody wants any more stays too: nothing leaves the quarantine for nowhere.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;

use super::intake::Intake;
use super::write::{Patience, Row, RowBatch, write};
use crate::store::Backend;
use crate::store::operating::Replayed;
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
        let asked = intake.store.backend.asked_replays(topics.clone(), BATCH_ROWS).await?;
        if asked.is_empty() {
            return Ok(());
        }
        replay(intake, asked).await?;
    }
    Ok(())
}

async fn replay<B: Backend>(intake: &Arc<Intake<B>>, asked: Vec<(i64, Record)>) -> Result<()> {
    let (mut rows, mut replayed) = (Vec::new(), Vec::new());
    for (id, record) in asked {
        let has_id = record.id.is_some();
        match intake.row(record) {
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
    let written = write(intake, RowBatch { rows: &rows, ledger: &[] }, patience).await?;
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
