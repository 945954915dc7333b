//! The test operations of the SQLite store: the clock is a row of the database, and a database in memory leaves nothing
//! behind.

use std::time::Duration;

use diesel::{RunQueryDsl, SqliteConnection};

use super::Sqlite;
use super::clock::micros;
use super::errors::database;
use super::statement::{only_row, statements};
use crate::store::testing::{DeliveryRow, Testing, delivery};
use crate::types::{Delivery, Result};

statements! {
    MoveClock("UPDATE inbox_clock SET offset_us = offset_us + :by") { by: i64 }

    Newest("SELECT coalesce(max(seq), 0) FROM inbox_message") -> i64 {}
}

/// A delivery, for the rows `s` of `inbox_status` that match a condition.
macro_rules! delivery_row {
    ($condition:literal) => {
        concat!(
            "SELECT s.state, s.attempts, s.errors, s.crashes,
                    max(0, CASE WHEN s.state = 'pending' AND d.due_at < 9223372036854775807 THEN d.due_at - now.at ELSE 0 END),
                    s.reason, s.last_error
             FROM inbox_status s
             JOIN inbox_delivery d ON d.message_seq = s.message_seq AND d.handler_id = s.handler_id
             CROSS JOIN inbox_now now
             WHERE ",
            $condition
        )
    };
}

statements! {
    Find<'a>(delivery_row!("s.message_id = :message_id AND s.handler_key = :handler_key LIMIT 1"))
    -> DeliveryRow { message_id: &'a str, handler_key: &'a str }

    OfNext(delivery_row!("s.message_seq = (SELECT min(seq) FROM inbox_message WHERE seq > :after) ORDER BY s.handler_id LIMIT 1000"))
    -> DeliveryRow { after: i64 }
}

impl Testing for Sqlite {
    async fn move_clock(&self, by: Duration) -> Result<()> {
        let act = move |conn: &mut SqliteConnection| {
            let moved = MoveClock { by: micros(by) }.execute(conn);
            moved.map(drop).map_err(database("cannot move the clock"))
        };
        self.write(act).await
    }

    async fn find_delivery(&self, message_id: &str, handler_key: &str) -> Result<Option<Delivery>> {
        let (message_id, handler_key) = (message_id.to_owned(), handler_key.to_owned());
        let find = move |conn: &mut SqliteConnection| {
            let find = Find { message_id: &message_id, handler_key: &handler_key };
            let rows = find.load::<DeliveryRow>(conn).map_err(database("cannot read a delivery"))?;
            rows.into_iter().next().map(delivery).transpose()
        };
        self.read(find).await
    }

    async fn newest_message(&self) -> Result<i64> {
        let newest = |conn: &mut SqliteConnection| {
            Newest {}.load(conn).and_then(only_row).map_err(database("cannot read the messages"))
        };
        self.read(newest).await
    }

    async fn deliveries_after(&self, message_seq: i64) -> Result<Vec<Delivery>> {
        let find = move |conn: &mut SqliteConnection| {
            let rows = OfNext { after: message_seq }.load::<DeliveryRow>(conn);
            rows.map_err(database("cannot read the deliveries"))?.into_iter().map(delivery).collect()
        };
        self.read(find).await
    }

    async fn remove(&self) -> Result<()> {
        Ok(())
    }
}
