//! The outbox operations for SQLite: each method calls `outbox.rs` or `poison.rs`, in its turn of the single writer.

use std::time::Duration;

use super::{AsyncSqliteConnection, Sqlite, errors, outbox, poison};
use crate::store::outbound::{
    Held, Hold, Marked, Marking, NewOutgoing, Outbound, OutboxQuery, OutboxRows, PoisonCall, PurgedSent, Refused,
};
use crate::store::seam::Stamp;
use crate::types::Result;

impl Outbound for Sqlite {
    async fn publish(conn: &mut AsyncSqliteConnection, records: Vec<NewOutgoing>) -> Result<Vec<i64>> {
        let publishing = conn.spawn_blocking(move |conn| outbox::publish(conn, &records));
        publishing.await.map_err(errors::database("cannot store records in the outbox"))
    }

    async fn register_relay(&self, name: &str, lease: Duration) -> Result<i32> {
        let name = name.to_owned();
        self.write(move |conn| outbox::register(conn, &name, lease)).await
    }

    async fn hold_slots(&self, hold: &Hold) -> Result<Held> {
        let hold = hold.clone();
        self.writer.act(move |conn, sent_at| outbox::hold(conn, sent_at, &hold)).await
    }

    async fn release_slots(&self, relay: i32, slots: &[i16]) -> Result<()> {
        let slots = slots.to_vec();
        self.write(move |conn| outbox::release(conn, relay, &slots)).await
    }

    async fn remove_relay(&self, relay: i32) -> Result<()> {
        self.write(move |conn| outbox::remove(conn, relay)).await
    }

    async fn read_outgoing(&self, query: &OutboxQuery) -> Result<OutboxRows> {
        let query = query.clone();
        self.read(move |conn| outbox::read(conn, &query)).await
    }

    async fn mark_sent(&self, marking: &Marking) -> Result<Marked> {
        let marking = marking.clone();
        self.write(move |conn| outbox::mark_sent(conn, &marking)).await
    }

    async fn poison_outgoing(&self, relay: i32, refused: &[Refused]) -> Result<u64> {
        let refused = refused.to_vec();
        self.write(move |conn| outbox::poison(conn, relay, &refused)).await
    }

    const HAS_DEAD_LETTERS: bool = false;

    async fn claim_poison_calls(&self, lease: Duration, limit: u32) -> Result<Vec<PoisonCall>> {
        self.write(move |conn| poison::claim(conn, lease, limit)).await
    }

    async fn end_poison_call(&self, id: i64) -> Result<()> {
        self.write(move |conn| poison::end(conn, id)).await
    }

    async fn delay_poison_call(&self, id: i64, after: Duration) -> Result<()> {
        self.write(move |conn| poison::delay(conn, id, after)).await
    }

    async fn purge_sent(&self, older_than: Duration, from: Option<Stamp>, rows: u32) -> Result<PurgedSent> {
        self.write(move |conn| outbox::purge(conn, older_than, from, rows)).await
    }
}
