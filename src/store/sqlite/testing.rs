//! What only tests ask of a store: to move its clock, and how a delivery stands.

use std::time::Duration;

use diesel::sql_types::{BigInt, Integer, Nullable, Text};
use diesel::{RunQueryDsl, SqliteConnection};

use super::Sqlite;
use super::clock::micros;
use super::errors::database;
use super::statement::statement;
use crate::types::Result;
use crate::types::{Delivery, State};

statement! {
    MoveClock("UPDATE inbox_clock SET offset_us = offset_us + ?1") {
        by: i64 => BigInt,
    }
}

statement! {
    /// Without a message, any delivery.
    Find<'a>("
        SELECT s.state, s.attempts, s.errors, s.crashes, max(0, CASE s.state WHEN 'pending' THEN d.due_at - now.at ELSE 0 END),
               s.reason, s.last_error
        FROM inbox_status s
        JOIN inbox_delivery d ON d.message_seq = s.message_seq AND d.handler_id = s.handler_id
        CROSS JOIN inbox_now now
        WHERE (?1 IS NULL OR (s.message_id = ?1 AND s.handler_key = ?2)) LIMIT 1")
    -> (Text, Integer, Integer, Integer, BigInt, Nullable<Text>, Nullable<Text>) {
        message_id: Option<&'a str> => Nullable<Text>,
        handler_key: &'a str => Text,
    }
}

impl Sqlite {
    pub(crate) async fn move_clock(&self, by: Duration) -> Result<()> {
        let act = move |conn: &mut SqliteConnection| {
            let moved = MoveClock { by: micros(by) }.execute(conn);
            moved.map(drop).map_err(database("cannot move the clock"))
        };
        self.write(act).await
    }

    pub(crate) async fn delivery(&self, message_id: &str, handler_key: &str) -> Result<Option<Delivery>> {
        let (message_id, handler_key) = (message_id.to_owned(), handler_key.to_owned());
        self.read(move |conn| find(conn, Some(&message_id), &handler_key)).await
    }

    pub(crate) async fn any_delivery(&self) -> Result<Option<Delivery>> {
        self.read(|conn| find(conn, None, "")).await
    }
}

fn find(conn: &mut SqliteConnection, message_id: Option<&str>, handler_key: &str) -> Result<Option<Delivery>> {
    type Row = (String, i32, i32, i32, i64, Option<String>, Option<String>);
    let rows = Find { message_id, handler_key }.load::<Row>(conn).map_err(database("cannot look at a delivery"))?;
    let delivery = |(state, attempts, errors, crashes, due_in_us, reason, last_error): Row| Delivery {
        state: match state.as_str() {
            "running" => State::Running,
            "done" => State::Done,
            "discarded" => State::Discarded,
            "poisoned" => State::Poisoned,
            _ => State::Pending,
        },
        attempts: attempts.unsigned_abs(),
        errors: errors.unsigned_abs(),
        crashes: crashes.unsigned_abs(),
        due_in: Duration::from_micros(due_in_us.unsigned_abs()),
        reason,
        last_error,
    };
    Ok(rows.into_iter().next().map(delivery))
}
