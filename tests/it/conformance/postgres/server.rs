//! Features that only a server has: isolation levels, table and row locks, settings, schemas, stored functions. SQLite
//! has none of them; its own features are tested in `sqlite/`.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Receipt, Record, Store};

use super::claims::{four_processors_run, stuck};
use super::scene::{Runs, Scene, quick, record, records};

#[tokio::test(flavor = "multi_thread")]
async fn a_first_call_that_is_dropped_midway_leaves_no_transaction_open() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    // The first call registers the handlers, under a lock that the test holds.
    let register = "(hashtextextended('wharf register ' || current_schema(), 0))";
    let client = scene.database.client().await;
    client.batch_execute(&format!("SELECT pg_advisory_lock{register}")).await.unwrap();
    let call = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept(record("a")).await }
    });
    let ours = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'wharf'";
    scene.until(&format!("SELECT (count(*) = 1)::int::bigint {ours} AND wait_event = 'advisory'")).await;

    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    client.batch_execute(&format!("SELECT pg_advisory_unlock{register}")).await.unwrap();

    let open = "AND (state LIKE 'idle in transaction%' OR wait_event = 'advisory')";
    scene.until(&format!("SELECT (count(*) = 0)::int::bigint {ours} {open}")).await;
    let other = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
    assert_eq!(other.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 1 });
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
}

// Acknowledged data is durable, even where a role or a database has turned `synchronous_commit` off.
#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_records_are_committed_durably() {
    let scene = Scene::new().await;
    scene
        .database
        .execute(
            "CREATE TABLE seen (at_commit text);
             CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER see AFTER INSERT ON inbox_delivery DEFERRABLE INITIALLY DEFERRED
                 FOR EACH ROW EXECUTE FUNCTION see();
             CREATE CONSTRAINT TRIGGER see AFTER INSERT ON inbox_quarantine DEFERRABLE INITIALLY DEFERRED
                 FOR EACH ROW EXECUTE FUNCTION see();
             DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$",
        )
        .await;
    let runs = Runs::new();
    let first = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
    let both = scene.another_inbox().await;
    let both =
        both.subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail")).build().unwrap();

    first.accept(record("new")).await.unwrap();
    first.accept_or_quarantine([record("").with_payload("quarantined")]).await.unwrap();
    both.accept(record("new")).await.unwrap();
    both.accept_or_quarantine([record("new").with_payload("conflict")]).await.unwrap();

    assert_eq!(scene.database.query_texts("SELECT at_commit FROM seen").await, ["on"; 4]);
}

// No delivery is claimed by two processors.
#[tokio::test(flavor = "multi_thread")]
async fn each_delivery_runs_once_with_another_default_isolation() {
    // Behind a pooler such sessions are refused: see `connections::`.
    if std::env::var_os("WHARF_TEST_THROUGH_PGBOUNCER").is_some() {
        return;
    }
    for level in ["repeatable read", "serializable"] {
        let scene = Scene::new().await;
        let name = scene.database.name().to_owned();
        scene.database.execute(&format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")).await;
        let runs = four_processors_run(&scene, 2_000).await;
        assert_eq!(runs.count(), 2_000, "{level}");
        assert_eq!(scene.count_not_done_at_first().await, 0, "{level}");
    }
}

// A delivery that is claimed while the inbox shuts down must not stay locked until its lease expires and then count as
// a crash.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_in_progress_at_shutdown_is_released() {
    let scene = Scene::new().await;
    let limits = quick().poll(Duration::from_millis(5));
    let inbox = scene.inbox().limits(limits).subscribe("orders", stuck("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let mut client = scene.database.client().await;
    let lock = client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE inbox_delivery IN EXCLUSIVE MODE").await.unwrap();
    lock.batch_execute(ONE_DUE).await.unwrap();
    let waits = "SELECT least(count(*), 1)::bigint FROM pg_stat_activity WHERE datname = current_database()
                 AND wait_event_type = 'Lock' AND query LIKE '%WITH claimed AS%'";
    scene.until(waits).await;

    let mut shutdown = Box::pin(running.shutdown(Duration::from_secs(1)));
    // Polled once, so that it has begun.
    tokio::select! {
        biased;
        _ = &mut shutdown => panic!("it did not wait for the claim"),
        () = std::future::ready(()) => {}
    }
    lock.commit().await.unwrap();
    shutdown.await.unwrap();

    let row = "SELECT concat_ws('|', state, errors, crashes, locked_until) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["pending|0|0"]);
}

const ONE_DUE: &str = "
    INSERT INTO inbox_message (message_id, source, topic, payload_hash) VALUES ('a', 'orders', 'orders', '');
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT currval('inbox_message_seq'), id, now() - interval '1 second' FROM inbox_handler";

// Later ids can become visible before earlier ones, so no scan continues from the last id it saw.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_committed_late_is_found_behind_claimed_ones() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let limits = quick().poll(Duration::from_secs(60));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock").concurrency(4)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let mut client = scene.database.client().await;
    let slow = client.transaction().await.unwrap();
    slow.batch_execute(
        "INSERT INTO inbox_message (message_id, source, topic, payload_hash) VALUES ('late', 'orders', 'orders', '');
         INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
         SELECT currval('inbox_message_seq'), id, now() FROM inbox_handler",
    )
    .await
    .unwrap();

    inbox.accept_all(records(1_000)).await.unwrap();
    runs.reached(500).await;
    slow.commit().await.unwrap();
    // The next poll is a minute away: ongoing work finds it.
    inbox.accept_all((0..500).map(|number| record(&format!("more-{number}")))).await.unwrap();

    scene.settled().await;
    assert_eq!(runs.ids().iter().filter(|id| *id == "late").count(), 1);
    assert_eq!(runs.count(), 1_501);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// One row that cannot be recovered must not keep the others from being recovered.
#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_expired_locks_are_recovered_beside_a_locked_row() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(300)).await.unwrap();
    let die = "UPDATE inbox_delivery SET attempts = 1, locked_by = 999, locked_until = now() - interval '1 second'";
    scene.database.execute(die).await;
    let mut client = scene.database.client().await;
    let holder = client.transaction().await.unwrap();
    let hold = "SELECT 1 FROM inbox_delivery ORDER BY due_at, message_seq LIMIT 1 FOR UPDATE";
    holder.batch_execute(hold).await.unwrap();

    let running = inbox.start().await.unwrap();
    let rest = "SELECT (count(*) = 1)::int::bigint FROM inbox_delivery WHERE finished_at IS NULL";
    scene.until(rest).await;
    holder.rollback().await.unwrap();
    scene.settled().await;
    assert_eq!(runs.count(), 300);
    assert_eq!(scene.count_done_uncharged().await, 300);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_schemas_of_one_database_are_two_inboxes() {
    let scene = Scene::new().await;
    let url = scene.database.url();
    let separator = if url.contains('?') { '&' } else { '?' };
    for schema in ["left_side", "right_side"] {
        scene.database.execute(&format!("CREATE SCHEMA {schema}")).await;
        let store = Store::connect(&format!("{url}{separator}options=-csearch_path%3D{schema}")).await.unwrap();
        store.migrate().await.unwrap();
        let runs = Runs::new();
        let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap();

        assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 1 });

        assert_eq!(inbox.drain().await.unwrap(), 1);
        assert_eq!(scene.count(&format!("{schema}.inbox_status WHERE state = 'done'")).await, 1);
    }
    assert_eq!(scene.count("inbox_message").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_acts_on_its_own_inbox_whatever_the_search_path_is() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox =
        scene.inbox().subscribe("orders", runs.answering("stock", |_| Err(Failure::poison("no")))).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let client = scene.database.client().await;
    client.batch_execute("CREATE SCHEMA elsewhere; SET search_path = elsewhere").await.unwrap();

    let row = client.query_one("SELECT public.inbox_replay('a', 'stock')", &[]).await.unwrap();

    assert_eq!(row.get::<_, i64>(0), 1);
    assert_eq!(scene.states().await, ["a stock pending"]);
}

// A script passes NULL for a variable that it never set.
#[tokio::test(flavor = "multi_thread")]
async fn an_action_without_an_id_or_a_key_changes_nothing() {
    let scene = Scene::new().await;
    let failing = |name| Runs::new().answering(name, |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing("stock")).subscribe("orders", failing("mail"));
    let inbox = inbox.build().unwrap();
    inbox.accept_or_quarantine([record("a"), record("b"), Record::new("orders").with_payload("no id")]).await.unwrap();
    inbox.drain().await.unwrap();
    let client = scene.database.client().await;
    let (filters, nulls) = (["replay", "discard"], r#"'{"handler_key": null}'"#);
    let mut actions: Vec<String> = ["NULL, 'stock'", "'a', NULL", "NULL, NULL"]
        .iter()
        .flat_map(|given| ["replay", "discard", "release"].map(|action| format!("inbox_{action}({given})")))
        .chain(filters.map(|action| format!("inbox_{action}_matching({nulls})")))
        .chain(filters.map(|action| format!(r#"inbox_{action}_matching('{{"all": true}}', NULL)"#)))
        .chain(filters.map(|action| format!(r#"inbox_quarantine_{action}('{{"id": null}}')"#)))
        .chain(filters.map(|action| format!(r#"inbox_outbox_{action}('{{"all": true}}', NULL)"#)))
        .collect();
    actions.extend(
        [
            "inbox_replay_corrected(NULL, 'stock', 'x')",
            "inbox_replay_corrected('a', 'stock', NULL)",
            "inbox_pause_handler(NULL)",
            "inbox_resume_handler(NULL)",
            "inbox_open_breaker(NULL)",
            "inbox_close_breaker(NULL)",
            "inbox_set_rate(NULL, 5)",
            "inbox_unsubscribe(NULL)",
            "inbox_forget_identity(NULL, 'orders')",
            "inbox_ledger_reset('shop', NULL)",
            "inbox_ledger_skip('shop', 'orders', NULL, 5)",
        ]
        .map(str::to_owned),
    );
    for action in actions {
        let refused = client.batch_execute(&format!("SELECT {action}")).await.expect_err(&action);
        assert_eq!(refused.code().unwrap().code(), "22004", "{action}: {refused:?}");
    }
    assert_eq!(scene.states().await, ["a mail poisoned", "a stock poisoned", "b mail poisoned", "b stock poisoned"]);
    assert_eq!(scene.count("inbox_audit").await, 0);
}

// The trigger that makes the next delivery of a key due is turned off by a setting of the engine's own statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_setting_of_the_caller_does_not_strand_a_key() {
    let scene = Scene::new().await;
    let ordered = Runs::new().handler("stock").ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", ordered).build().unwrap();
    for id in ["a", "b", "c"] {
        inbox.accept(record(id).with_key("one")).await.unwrap();
    }
    let held = "inbox_delivery WHERE due_at = 'infinity'";
    assert_eq!(scene.count(held).await, 2);
    let client = scene.database.client().await;

    client.batch_execute("SET wharf.promotes = 'together'; SELECT inbox_discard('a', 'stock')").await.unwrap();
    assert_eq!(scene.count(held).await, 1);

    let claim = "UPDATE inbox_delivery SET attempts = 1, locked_by = 1, locked_until = now() + interval '1 hour'
                 WHERE finished_at IS NULL AND due_at < 'infinity'";
    scene.database.execute(claim).await;
    let settle =
        "SELECT inbox_settle(format('[%s,%s,1,1]', message_seq, handler_id)) FROM inbox_delivery WHERE locked_by = 1";
    client.batch_execute(settle).await.unwrap();
    assert_eq!(scene.count(held).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_functions_for_operators_work_with_any_bytes() {
    let scene = Scene::new().await;
    let client = scene.database.client().await;
    let mut runner = TestRunner::deterministic();
    let any_bytes = prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(255)], 0..40);
    let mut samples: Vec<Vec<u8>> = (0..500).map(|_| any_bytes.new_tree(&mut runner).unwrap().current()).collect();
    samples.extend([
        vec![],
        vec![0],
        vec![0xff; 4],
        vec![0x7f, 0xff, 0xff, 0xff],
        vec![0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 1],
        vec![0, 0, 0, 0, 0x80, 0, 0, 0, 1],
        vec![0x80, 0, 0, 0, 0, 0, 0, 0],
    ]);
    let sql = "SELECT length(inbox_text($1)), (SELECT count(*) FROM inbox_headers($1))";
    let statement = client.prepare(sql).await.unwrap();
    for bytes in samples {
        let result = client.query_one(&statement, &[&bytes]).await;
        assert!(result.is_ok(), "{bytes:02x?}: {:?}", result.unwrap_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_shown_in_a_parallel_query_too() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(Record::new("orders").with_id("a").with_payload(vec![0xff, 0])).await.unwrap();
    let client = scene.database.client().await;
    let parallel = "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0;
                    SET max_parallel_workers_per_gather = 2";
    client.batch_execute(parallel).await.unwrap();

    let row = client.query_one("SELECT count(*) FROM inbox_message WHERE inbox_text(payload) = '\\xff00'", &[]).await;

    assert_eq!(row.unwrap().get::<_, i64>(0), 1);
}
