//! Transactional handlers beside other sessions, and SQL errors in a transaction: PostgreSQL aborts the whole
//! transaction, SQLite only undoes the statement.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio_postgres::IsolationLevel;
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Message, Postgres, Raw, Store, tx_handler, with_state};

use super::effect::{self, Connection, effects};
use super::scene::{Runs, key, quick, record, records};
use super::transactional::{once_more, outcome_of, scene};

// A worker whose claim is no longer valid must not commit what its handler wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_lost_before_the_commit_rolls_the_writes_back() {
    let scene = scene().await;
    let (runs, url) = (Runs::new(), scene.database.url());
    // Another processor claims it during the first run, as after an expired lease.
    let robbed = effect::writing(&runs, "stock", move |message| {
        let url = url.clone();
        Box::pin(async move {
            if message.attempt() == 1 {
                let other = support::postgres::connect(&url).await;
                other.batch_execute("UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL").await?;
            }
            Ok(())
        })
    });
    assert_eq!(outcome_of(&scene, robbed).await, "done|0");
    assert_eq!((runs.count(), effects(&scene).await), (2, vec!["a".to_owned()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sql_error_that_the_handler_swallows_is_a_failure() {
    async fn careless(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        let _ = effect::execute(conn, "SELECT 1 / 0").await;
        Ok(())
    }
    let scene = scene().await;
    let registration = tx_handler(key("stock"), careless).retry(once_more());
    assert_eq!(outcome_of(&scene, registration).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

// Statements after the end would commit separately. A direct session is read-only then; behind a pooler the outcome
// reports it.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_its_own_transaction_has_failed() {
    async fn committing(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "COMMIT").await?;
        Ok(effect::write(conn, message.id()).await?)
    }
    async fn rolling_back(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        Ok(effect::execute(conn, "ROLLBACK").await?)
    }
    async fn beginning_anew(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "ROLLBACK").await?;
        effect::execute(conn, "BEGIN").await?;
        Ok(effect::write(conn, message.id()).await?)
    }
    let handlers = [
        tx_handler(key("stock"), committing),
        tx_handler(key("stock"), rolling_back),
        tx_handler(key("stock"), beginning_anew),
    ];
    let ended = "transaction ended before";
    let read_only = "cannot execute INSERT in a read-only transaction";
    let expected = match std::env::var_os("WHARF_TEST_THROUGH_PGBOUNCER").is_some() {
        true => [(2, ended), (0, ended), (0, ended)],
        false => [(0, read_only), (0, ended), (0, read_only)],
    };
    for (handler, (effects_left, error)) in handlers.into_iter().zip(expected) {
        let scene = scene().await;
        assert_eq!(outcome_of(&scene, handler.retry(once_more())).await, "poisoned|retries exhausted|2");
        assert_eq!(effects(&scene).await.len(), effects_left);
        let errors = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await;
        assert!(errors[0].contains(error), "{errors:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_settings_of_a_handler_do_not_reach_the_next() {
    async fn setting(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let seen = "INSERT INTO effect SELECT concat_ws(' ', current_setting('work_mem'), current_setting('TimeZone'), current_user,
                        current_setting('transaction_isolation'))";
        effect::execute(conn, seen).await?;
        let serializable = "SET default_transaction_isolation = 'serializable'";
        for set in ["SET work_mem = '7MB'", "SET TIME ZONE 'Asia/Tokyo'", serializable, "SET ROLE pg_monitor"] {
            effect::execute(conn, set).await?;
        }
        // The outcome is written with the role of the session.
        Ok(effect::execute(conn, "SET LOCAL ROLE NONE").await?)
    }
    let scene = scene().await;
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("stock"), setting).concurrency(1)).build().unwrap();
    inbox.accept_all(records(30)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 30);

    let mut seen = effects(&scene).await;
    assert_eq!(seen.len(), 30);
    seen.dedup();
    assert_eq!(
        seen,
        [scene
            .database
            .query_texts("SELECT concat_ws(' ', current_setting('work_mem'), 'UTC', current_user, 'read committed')")
            .await
            .concat()]
    );
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND state LIKE 'idle in transaction%'",
        scene.database.name()
    );
    assert_eq!(scene.database.query_one_i64(&open).await, 0);
}

// If RESET sets another time zone than the driver's, as behind a pooler, the driver's is set again.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_zone_of_the_driver_is_kept_if_the_session_has_another_default() {
    async fn setting(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "INSERT INTO effect SELECT current_setting('TimeZone')").await?;
        Ok(effect::execute(conn, "SET TIME ZONE 'Asia/Tokyo'").await?)
    }
    let scene = scene().await;
    let url = format!("{}?options=-c%20timezone%3DEurope/Berlin", scene.database.url());
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let handler = tx_handler(key("stock"), setting).concurrency(1);
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(5)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 5);

    assert_eq!(effects(&scene).await, ["UTC"; 5]);
}

// Settings that the COMMIT of one run resets are part of the transaction of the next run, and are undone if that is
// rolled back.
#[tokio::test(flavor = "multi_thread")]
async fn session_settings_of_a_handler_stay_reset_after_the_next_one_failed() {
    async fn setting(succeeds: Arc<AtomicBool>, _: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "INSERT INTO effect SELECT current_setting('work_mem')").await?;
        effect::execute(conn, "SET work_mem = '7MB'").await?;
        match succeeds.fetch_not(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(Failure::poison("every second")),
        }
    }
    let scene = scene().await;
    let succeeds = Arc::new(AtomicBool::new(true));
    let handler = tx_handler(key("stock"), with_state(succeeds, setting)).concurrency(1);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    inbox.drain().await.unwrap();

    let default = scene.database.query_texts("SELECT current_setting('work_mem')").await;
    assert_eq!(effects(&scene).await, vec![default.concat(); 5]);
}

// A serializable handler that runs past a renewal of its claim can never be settled.
#[tokio::test(flavor = "multi_thread")]
async fn a_serializable_handler_that_outlives_a_renewal_is_poisoned_in_the_end() {
    async fn overtaken(url: String, _: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").await?;
        effect::execute(conn, "SELECT FROM inbox_delivery").await?;
        let renewing = support::postgres::connect(&url).await;
        let renew = "UPDATE inbox_delivery SET locked_until = locked_until + interval '1 ms'";
        Ok(renewing.batch_execute(renew).await?)
    }
    let scene = scene().await;
    let overtaken = tx_handler(key("stock"), with_state(scene.database.url(), overtaken));
    let limits = quick().store_error_limit(2);
    let inbox = scene.inbox().limits(limits).subscribe("orders", overtaken).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(1)).await.unwrap();
    scene.settled().await;
    let outcome = "SELECT concat_ws('|', state, reason, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(outcome).await, ["poisoned|store error|0|0"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// It has failed, as if it had returned an error: the promotion of the next delivery needs a snapshot of its own.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_handler_that_chooses_another_isolation_level_has_failed() {
    async fn strict(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await?;
        Ok(effect::execute(conn, "INSERT INTO effect VALUES ('strict')").await?)
    }
    let scene = scene().await;
    let strict = tx_handler(key("stock"), strict).retry(once_more()).ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", strict).build().unwrap();
    inbox.accept(record("a").with_key("k")).await.unwrap();
    inbox.drain().await.unwrap();
    let outcome = "SELECT concat_ws('|', state, reason, errors) FROM inbox_status";
    assert_eq!(scene.database.query_texts(outcome).await, ["poisoned|retries exhausted|2"]);
    assert_eq!(scene.count("inbox_poisoned WHERE last_error LIKE '%isolation level read committed%'").await, 1);
    assert!(effects(&scene).await.is_empty());
}

// A pooler or a role may give the engine such a session after it has connected. With the snapshot of the session's
// transaction, the settlement would not see the delivery that was held meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_an_ordered_handler_is_not_settled_at_another_isolation_level_and_strands_nothing() {
    let (scene, runs, gate) = (scene().await, Runs::new(), Arc::new(Semaphore::new(0)));
    let ordered = runs.held("stock", &gate).ordered_by(OrderKey::record_key());
    let limits = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", ordered).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a").with_key("k")).await.unwrap();
    runs.reached(1).await;
    let mut client = scene.database.client().await;
    let level = IsolationLevel::RepeatableRead;
    let strict = client.build_transaction().isolation_level(level).start().await.unwrap();
    strict.execute("SELECT FROM inbox_delivery", &[]).await.unwrap();
    inbox.accept(record("b").with_key("k")).await.unwrap();

    let settle = "SELECT inbox_settle_ordered(locked_by, ARRAY[message_seq], ARRAY[handler_id], ARRAY[attempts])
                  FROM inbox_delivery WHERE locked_by IS NOT NULL";
    let refused = strict.query(settle, &[]).await.unwrap_err();

    let refused = refused.as_db_error().unwrap();
    assert_eq!((refused.code().code(), refused.constraint()), ("WH005", Some("inbox_isolation")));
    strict.rollback().await.unwrap();
    gate.add_permits(2);
    scene.settled().await;
    assert_eq!(runs.ids(), ["a", "b"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// After a failover to a replica that lacks the latest claims, their attempts are claimed by others.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_another_processor_has_claimed_changes_nothing() {
    let scene = scene().await;
    let (plain, written, gate) = (Runs::new(), Runs::new(), watch::Sender::new(false));
    let opened = gate.clone();
    let writing = effect::writing(&written, "writing", move |_| {
        let mut opened = opened.subscribe();
        Box::pin(async move {
            let _ = opened.wait_for(|is_open| *is_open).await;
            Ok(())
        })
    });
    let inbox = scene.inbox().subscribe("orders", plain.gated("plain", &gate)).subscribe("orders", writing);
    let inbox = inbox.build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(1)).await.unwrap();
    plain.reached(1).await;
    written.reached(1).await;
    // The same attempt number, claimed by another processor that runs it now.
    scene.database.execute("UPDATE inbox_delivery SET locked_by = 99, locked_until = now() + interval '1 hour'").await;
    let delivery = "SELECT d::text FROM inbox_delivery d ORDER BY 1";
    let before = scene.database.query_texts(delivery).await;
    gate.send_replace(true);
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_eq!(scene.database.query_texts(delivery).await, before);
    assert!(effects(&scene).await.is_empty());
}
