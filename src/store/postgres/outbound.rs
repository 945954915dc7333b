//! The outbox operations for PostgreSQL: each method calls `outbox.rs` or `poison.rs` with a connection of the pool.

use std::time::Duration;

use diesel_async::AsyncPgConnection;

use super::{Postgres, act, outbox, poison};
use crate::store::outbound::{
    Held, Hold, Marked, Marking, NewOutgoing, Outbound, OutboxQuery, OutboxRows, PoisonCall, PurgedSent, Refused,
};
use crate::store::seam::Stamp;
use crate::types::Result;

impl Outbound for Postgres {
    async fn publish(conn: &mut AsyncPgConnection, records: Vec<NewOutgoing>) -> Result<Vec<i64>> {
        outbox::publish(conn, records).await
    }

    async fn register_relay(&self, name: &str, lease: Duration) -> Result<i32> {
        act!(self, conn => outbox::register(&mut conn, name, lease))
    }

    async fn hold_slots(&self, hold: &Hold) -> Result<Held> {
        // A connection that does not answer is closed early enough to try a new one before the lease ends.
        let patience = self.patience.min(hold.lease / 4);
        act!(self, &self.pool, within patience, conn => outbox::hold(&mut conn, hold))
    }

    async fn release_slots(&self, relay: i32, slots: &[i16]) -> Result<()> {
        act!(self, conn => outbox::release(&mut conn, relay, slots))
    }

    async fn remove_relay(&self, relay: i32) -> Result<()> {
        act!(self, conn => outbox::remove(&mut conn, relay))
    }

    async fn read_outgoing(&self, query: &OutboxQuery) -> Result<OutboxRows> {
        act!(self, conn => outbox::read(&mut conn, query))
    }

    async fn mark_sent(&self, marking: &Marking) -> Result<Marked> {
        act!(self, conn => outbox::mark_sent(&mut conn, marking))
    }

    async fn poison_outgoing(&self, relay: i32, refused: &[Refused]) -> Result<u64> {
        act!(self, conn => outbox::poison(&mut conn, relay, refused))
    }

    const HAS_DEAD_LETTERS: bool = true;

    async fn claim_poison_calls(&self, lease: Duration, limit: u32) -> Result<Vec<PoisonCall>> {
        act!(self, conn => poison::claim(&mut conn, lease, limit))
    }

    async fn end_poison_call(&self, id: i64) -> Result<()> {
        act!(self, conn => poison::end(&mut conn, id))
    }

    async fn delay_poison_call(&self, id: i64, after: Duration) -> Result<()> {
        act!(self, conn => poison::delay(&mut conn, id, after))
    }

    async fn purge_sent(&self, older_than: Duration, from: Option<Stamp>, rows: u32) -> Result<PurgedSent> {
        act!(self, conn => outbox::purge(&mut conn, older_than, from, rows))
    }
}
