//! Accepts quarantined records anew when a person has asked for it: identity, fan-out and limits are those of now.
//!
//! What is accepted leaves the quarantine, after it is stored, so that a process that dies in between does it again and finds a duplicate.
//! What is not stays, with its reason of now. A record that nobody wants any more stays too: nothing leaves the quarantine for nowhere.

use std::sync::Arc;
use std::time::Instant;

use super::Receipt;
use super::acceptor::row;
use super::write::{Batch, Patience, Row, write};
use crate::inbox::Shared;
use crate::process::Engine;
use crate::store::Backend;
use crate::store::operating::Replayed;
use crate::telemetry::events;
use crate::types::{Record, Result, jittered};

/// Records that are read and written at a time. Few: they may be the largest there are.
const BATCH_ROWS: u32 = 20;

/// Looks for replays that were asked for, three times a lease, until the engine stops.
pub(crate) async fn replay_loop<B: Backend>(shared: Arc<Shared<B>>, engine: Arc<Engine<B>>) {
    loop {
        if let Err(error) = replay_asked(&shared, &engine).await {
            events::store_trouble("replay quarantined records", &error);
        }
        tokio::select! {
            () = tokio::time::sleep(jittered(shared.limits.lease / 3)) => {}
            () = engine.stopping() => return,
        }
    }
}

async fn replay_asked<B: Backend>(shared: &Arc<Shared<B>>, engine: &Engine<B>) -> Result<()> {
    let topics: Vec<&str> = shared.topics.keys().map(String::as_str).collect();
    while engine.is_running() {
        let asked = shared.store.backend.asked_replays(&topics, BATCH_ROWS).await?;
        if asked.is_empty() {
            return Ok(());
        }
        replay(shared, asked).await?;
    }
    Ok(())
}

async fn replay<B: Backend>(shared: &Arc<Shared<B>>, asked: Vec<(i64, Record)>) -> Result<()> {
    let (mut rows, mut replayed) = (Vec::new(), Vec::new());
    for (id, record) in asked {
        let has_id = record.id.is_some();
        match row(shared, record) {
            None => stay(shared, id, "no handler wants it", None).await?,
            Some((Row::Quarantine(quarantined), _)) => {
                stay(shared, id, quarantined.reason, quarantined.detail.as_deref()).await?;
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
    let patience = Patience::Until(Instant::now() + shared.limits.accept_patience);
    let written = write(shared, Batch { rows: &rows, ledger: &[] }, patience).await?;
    for ((id, has_id), receipt) in replayed.into_iter().zip(written.receipts) {
        match receipt {
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } => leave(shared, id).await?,
            // Quarantined under its identity of now: a row of its own, unless it had that identity before.
            Receipt::Quarantined { .. } if !has_id => leave(shared, id).await?,
            Receipt::Quarantined { reason } => stay(shared, id, reason, None).await?,
            Receipt::Unwanted => stay(shared, id, "no handler wants it", None).await?,
        }
    }
    Ok(())
}

async fn leave<B: Backend>(shared: &Shared<B>, id: i64) -> Result<()> {
    shared.store.backend.replayed(id, &Replayed::Left).await?;
    events::left_quarantine(id);
    Ok(())
}

async fn stay<B: Backend>(shared: &Shared<B>, id: i64, reason: &str, detail: Option<&str>) -> Result<()> {
    shared.store.backend.replayed(id, &Replayed::Stays { reason, detail }).await?;
    events::stays_in_quarantine(id, reason);
    Ok(())
}
