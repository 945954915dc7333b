//! The test operations of the PostgreSQL store: a separate schema per test, and time that passes.
//!
//! The server's clock cannot be moved, so all stored timestamps are moved into the past instead, which is equivalent
//! for every statement.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel_async::{AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

use super::connect::{Connector, PostgresOptions};
use super::errors::database;
use super::process::millis;
use super::statement::{only_row, statements};
use super::{Postgres, act};
use crate::store::Store;
use crate::store::testing::{DeliveryRow, Testing, delivery};
use crate::types::{Delivery, Error, Result};

/// Schemas of tests begin with this, followed by the second of their creation.
const PREFIX: &str = "wharf_test_";
/// Older schemas were left behind by a killed test.
const LEFT_BEHIND_SECS: u64 = 3_600;

statements! {
    MoveClock("
        WITH past AS MATERIALIZED (SELECT :by_ms * interval '1 millisecond' AS elapsed),
        delivery AS (UPDATE inbox_delivery SET due_at = due_at - elapsed, locked_until = locked_until - elapsed,
                                               finished_at = finished_at - elapsed FROM past),
        message AS (UPDATE inbox_message SET received_at = received_at - elapsed, recorded_at = recorded_at - elapsed FROM past),
        handler AS (UPDATE inbox_handler SET paused_at = paused_at - elapsed, unknown_since = unknown_since - elapsed,
                                             registered_at = registered_at - elapsed, breaker_opened_at = breaker_opened_at - elapsed,
                                             breaker_probe_at = breaker_probe_at - elapsed,
                                             breaker_probe_until = breaker_probe_until - elapsed,
                                             rate_next_at = rate_next_at - elapsed FROM past),
        quarantine AS (UPDATE inbox_quarantine SET quarantined_at = quarantined_at - elapsed, recorded_at = recorded_at - elapsed,
                                                   replay_asked_at = replay_asked_at - elapsed,
                                                   replay_locked_until = replay_locked_until - elapsed FROM past),
        processor AS (UPDATE inbox_processor SET started_at = started_at - elapsed, seen_at = seen_at - elapsed,
                                                 alive_until = alive_until - elapsed FROM past),
        identity AS (UPDATE inbox_identity SET purged_at = purged_at - elapsed, forget_at = forget_at - elapsed FROM past),
        lease AS (UPDATE inbox_lease SET held_until = held_until - elapsed FROM past),
        retention AS (UPDATE inbox_retention SET purged_at = purged_at - elapsed FROM past),
        kept AS (UPDATE inbox_kept SET check_at = check_at - elapsed FROM past),
        ledger AS (UPDATE inbox_ledger SET updated_at = updated_at - elapsed, stopped_at = stopped_at - elapsed FROM past),
        gap AS (UPDATE inbox_gap SET noticed_at = noticed_at - elapsed FROM past),
        partition AS (UPDATE inbox_partition SET since = since - elapsed, seen_at = seen_at - elapsed FROM past),
        ingest AS (UPDATE inbox_ingest SET started_at = started_at - elapsed, seen_at = seen_at - elapsed,
                                           problem_since = problem_since - elapsed FROM past),
        outbox AS (UPDATE inbox_outbox SET stored_at = stored_at - elapsed, finished_at = finished_at - elapsed,
                                           recorded_at = recorded_at - elapsed FROM past),
        slots AS (UPDATE inbox_outbox_slots SET held_until = held_until - elapsed FROM past),
        relay AS (UPDATE inbox_relay SET started_at = started_at - elapsed, seen_at = seen_at - elapsed, alive_until = alive_until - elapsed,
                                         problem_since = problem_since - elapsed FROM past),
        poison_call AS (UPDATE inbox_poison_call SET poisoned_at = poisoned_at - elapsed, due_at = due_at - elapsed FROM past),
        attempt AS (UPDATE inbox_attempt SET failed_at = failed_at - elapsed FROM past),
        audit AS (UPDATE inbox_audit SET acted_at = acted_at - elapsed FROM past)
        UPDATE inbox_history SET finished_at = finished_at - elapsed FROM past") { by_ms: i64 }

    Newest("SELECT coalesce(max(seq), 0) FROM inbox_message") -> i64 {}

    Schema("SELECT current_schema()") -> Option<String> {}

    LeftBehind<'a>("
        SELECT nspname::text FROM pg_namespace
        WHERE starts_with(nspname, :prefix) AND split_part(nspname, '_', 3) < :older_than AND split_part(nspname, '_', 3) ~ '^[0-9]{10}$'
        LIMIT 100") -> String { prefix: &'a str, older_than: &'a str }
}

/// A delivery, for the rows of `inbox_status` that match a condition.
macro_rules! delivery_row {
    ($condition:literal) => {
        concat!(
            "SELECT state, attempts, errors, crashes,
                    CASE WHEN state = 'pending' AND due_at > now() AND due_at < 'infinity'
                         THEN (extract(epoch FROM due_at - now()) * 1e6)::bigint ELSE 0 END,
                    reason, last_error
             FROM inbox_status WHERE ",
            $condition
        )
    };
}

statements! {
    Find<'a>(delivery_row!("message_id = :message_id AND handler_key = :handler_key LIMIT 1"))
    -> DeliveryRow { message_id: &'a str, handler_key: &'a str }

    OfNext(delivery_row!("message_seq = (SELECT min(seq) FROM inbox_message WHERE seq > :after) ORDER BY handler_id LIMIT 1000"))
    -> DeliveryRow { after: i64 }
}

impl Store<Postgres> {
    /// Connects to a schema created for one test. The user's own tables in `public` come after it in the search path.
    pub(crate) async fn connect_for_test(url: &str) -> Result<Self> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let schema = format!("{PREFIX}{since_1970:010}_{:016x}", rand::random::<u64>());
        let mut connector = Connector::new(url, &PostgresOptions::default())?;
        connector.add_setting(&format!("-c search_path={schema},public"));
        let store = Self::open(connector, &PostgresOptions::default()).await?;
        let mut conn = store.backend.conn().await?;
        remove_left_behind(&mut conn, since_1970).await;
        let made = conn.batch_execute(&format!("CREATE SCHEMA {schema}")).await;
        made.map_err(database("cannot create a schema for the test"))?;
        let current: diesel::QueryResult<Option<String>> = Schema {}.load(&mut conn).await.and_then(only_row);
        let current = current.map_err(database("cannot read the schema of the test"))?;
        drop(conn);
        if current.as_deref() == Some(&schema) {
            return Ok(store);
        }
        store.backend.drop_schema(&schema).await?;
        Err(Error::configuration(
            "a test needs a connection to the server itself, not to a pooler that ignores search_path",
        ))
    }
}

/// Removes schemas that killed tests have left. Schemas that cannot be removed now stay until the next time.
async fn remove_left_behind(conn: &mut AsyncPgConnection, now_secs: u64) {
    let older_than = format!("{:010}", now_secs.saturating_sub(LEFT_BEHIND_SECS));
    let find = LeftBehind { prefix: PREFIX, older_than: &older_than };
    for schema in find.load::<String>(conn).await.unwrap_or_default() {
        let _ = conn.batch_execute(&format!("DROP SCHEMA IF EXISTS \"{schema}\" CASCADE")).await;
    }
}

impl Postgres {
    /// Waits for at most five seconds: another session of the test may still hold a lock.
    async fn drop_schema(&self, schema: &str) -> Result<()> {
        let drop = format!("BEGIN; SET LOCAL lock_timeout = '5s'; DROP SCHEMA IF EXISTS \"{schema}\" CASCADE; COMMIT");
        act!(self, conn => async { conn.batch_execute(&drop).await.map_err(database("cannot remove the schema of the test")) })
    }
}

impl Testing for Postgres {
    async fn move_clock(&self, by: Duration) -> Result<()> {
        let moved = MoveClock { by_ms: millis(by) };
        act!(self, conn => async { moved.execute(&mut conn).await.map(drop).map_err(database("cannot move the clock")) })
    }

    async fn find_delivery(&self, message_id: &str, handler_key: &str) -> Result<Option<Delivery>> {
        let find = Find { message_id, handler_key };
        let rows = act!(self, conn => async {
            find.load::<DeliveryRow>(&mut conn).await.map_err(database("cannot read a delivery"))
        });
        rows?.into_iter().next().map(delivery).transpose()
    }

    async fn newest_message(&self) -> Result<i64> {
        act!(self, conn => async {
            Newest {}.load(&mut conn).await.and_then(only_row).map_err(database("cannot read the messages"))
        })
    }

    async fn deliveries_after(&self, message_seq: i64) -> Result<Vec<Delivery>> {
        let rows = act!(self, conn => async {
            let rows = OfNext { after: message_seq }.load::<DeliveryRow>(&mut conn).await;
            rows.map_err(database("cannot read the deliveries"))
        });
        rows?.into_iter().map(delivery).collect()
    }

    async fn remove(&self) -> Result<()> {
        let current = act!(self, conn => async {
            let schema = Schema {}.load::<Option<String>>(&mut conn).await.and_then(only_row);
            schema.map_err(database("cannot read the schema of the test"))
        });
        match current? {
            // Removes only schemas that were created for a test.
            Some(schema) if schema.starts_with(PREFIX) => self.drop_schema(&schema).await,
            _ => Ok(()),
        }
    }
}
