//! The test operations of the SQLite store: the clock is a row of the database, and a database in memory leaves nothing
//! behind.

use std::time::Duration;

use diesel::{RunQueryDsl, SqliteConnection};

use super::Sqlite;
use super::clock::micros;
use super::errors::database;
use super::statement::statements;
use crate::store::testing::{DeliveryRow, Testing, delivery};
use crate::types::{Delivery, Result};

statements! {
    MoveClock("UPDATE inbox_clock SET offset_us = offset_us + :by") { by: i64 }

    /// Without a message, any delivery.
    Find<'a>("
        SELECT s.state, s.attempts, s.errors, s.crashes, max(0, CASE WHEN s.state = 'pending' AND d.due_at < 9223372036854775807 THEN d.due_at - now.at ELSE 0 END),
               s.reason, s.last_error
        FROM inbox_status s
        JOIN inbox_delivery d ON d.message_seq = s.message_seq AND d.handler_id = s.handler_id
        CROSS JOIN inbox_now now
        WHERE (:message_id IS NULL OR (s.message_id = :message_id AND s.handler_key = :handler_key)) LIMIT 1")
    -> DeliveryRow { message_id: Option<&'a str>, handler_key: &'a str }
}

impl Testing for Sqlite {
    async fn move_clock(&self, by: Duration) -> Result<()> {
        let act = move |conn: &mut SqliteConnection| {
            let moved = MoveClock { by: micros(by) }.execute(conn);
            moved.map(drop).map_err(database("cannot move the clock"))
        };
        self.write(act).await
    }

    async fn find_delivery(&self, of: Option<(&str, &str)>) -> Result<Option<Delivery>> {
        let (message_id, handler_key) = of.unzip();
        let (message_id, handler_key) = (message_id.map(str::to_owned), handler_key.unwrap_or_default().to_owned());
        let find = move |conn: &mut SqliteConnection| {
            let find = Find { message_id: message_id.as_deref(), handler_key: &handler_key };
            let rows = find.load::<DeliveryRow>(conn).map_err(database("cannot read a delivery"))?;
            rows.into_iter().next().map(delivery).transpose()
        };
        self.read(find).await
    }

    async fn remove(&self) -> Result<()> {
        Ok(())
    }
}
