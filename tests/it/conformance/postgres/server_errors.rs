//! Server errors are retried, and no record is quarantined because of them. SQLite has no server; its only such error,
//! a writer that is held for long, is in `sqlite/one_writer.rs`. Batches that commit in two parts exist only on
//! PostgreSQL as well.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Client;
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Receipt, Record};

use super::effect;
use super::refused::{ACCEPTED, stock_inbox};
use super::scene::{Db, Runs, Scene, quick, record, within};
use support::events::Events;

/// Rejects every other row of the quarantine, with an error that diesel does not know and with one that it knows.
const REFUSED_AT_FIRST: [&str; 2] = [
    "CREATE SEQUENCE tries;
     CREATE FUNCTION refuse_at_first() RETURNS trigger LANGUAGE plpgsql AS $$
     BEGIN
         IF nextval('tries') % 2 = 1 THEN RAISE EXCEPTION 'not now'; END IF;
         RETURN NEW;
     END $$;
     CREATE TRIGGER refuse_at_first BEFORE INSERT ON inbox_quarantine FOR EACH ROW EXECUTE FUNCTION refuse_at_first()",
    "CREATE SEQUENCE tries;
     ALTER TABLE inbox_quarantine ADD CONSTRAINT refuse_at_first CHECK (nextval('tries') % 2 = 0)",
];

#[tokio::test(flavor = "multi_thread")]
async fn handed_over_deliveries_run_although_the_rest_of_their_batch_is_rejected_at_first() {
    for refusal in REFUSED_AT_FIRST {
        hand_over_beside_refusals(refusal).await;
    }
}

/// The statement for new records has committed when the one for known records is rejected.
async fn hand_over_beside_refusals(refusal: &str) {
    let scene = Scene::new().await;
    scene.database.execute(refusal).await;
    let runs = Runs::new();
    // A delivery that waits for an expired claim would wait for longer than this test.
    let limits = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("known")).await.unwrap();

    // Several times, because the claim loop decides whether a slot is free for a hand-over.
    for number in 0..10 {
        let forged = record("known").with_payload(format!("forged {number}"));
        let receipts = inbox.accept_or_quarantine([record(&format!("new {number}")), forged]).await.unwrap();
        assert_eq!(receipts[1], Receipt::Quarantined { reason: "conflict" });
    }

    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, 11);
    assert_eq!((runs.count(), scene.count("inbox_quarantine").await), (11, 10));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The handler causes the error, but the lost connection hides that.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_idles_past_the_servers_limit_every_time_is_poisoned_and_its_neighbours_are_done() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let impatient = "CREATE FUNCTION be_impatient() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF NEW.message_id = 'bad' THEN PERFORM set_config('idle_in_transaction_session_timeout', '20ms', true); END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER be_impatient BEFORE INSERT ON effect FOR EACH ROW EXECUTE FUNCTION be_impatient()";
    scene.database.execute(impatient).await;
    let (runs, client) = (Runs::new(), Arc::new(scene.database.client().await));
    let idling = effect::writing(&runs, "stock", move |message| {
        let client = Arc::clone(&client);
        Box::pin(async move {
            let open = "SELECT count(*) FROM pg_stat_activity
                        WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
            while message.id() == "bad" && client.query_one(open, &[]).await.unwrap().get::<_, i64>(0) > 0 {}
            Ok(())
        })
    });
    let inbox = scene.inbox().limits(quick().store_error_limit(2)).subscribe("orders", idling).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(["bad", "x", "y"].map(record)).await.unwrap();
    scene.settled().await;

    let outcomes = "SELECT concat_ws('|', message_id, state, reason, errors, crashes) FROM inbox_status ORDER BY 1";
    let expected = ["bad|poisoned|store error|0|0", "x|done|0|0", "y|done|0|0"];
    assert_eq!(scene.database.query_texts(outcomes).await, expected);
    assert_eq!(effect::effects(&scene).await, ["x", "y"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

async fn pid_of(client: &Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}

/// An inbox that has already accepted a record, and a session to cause the errors from.
async fn before_the_outage(setting: &str) -> (Scene, Client, Inbox<Db>) {
    let scene = Scene::new().await;
    let client = scene.database.client().await;
    client.batch_execute(&format!("ALTER DATABASE {} SET {setting}", scene.database.name())).await.unwrap();
    // Sessions keep the setting they started with, also those that a pooler holds.
    let others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    client.batch_execute(&format!("SELECT pg_terminate_backend(pid) {others}")).await.unwrap();
    scene.until(&format!("SELECT (count(*) = 0)::int::bigint {others} AND pid <> {}", pid_of(&client).await)).await;
    let inbox = stock_inbox(&scene, &Runs::new()).await;
    assert_eq!(inbox.accept(record("first")).await.unwrap(), ACCEPTED);
    (scene, client, inbox)
}

/// Accepts the record during an outage that `end_of_outage` ends after several attempts. Returns the receipt; nothing
/// was quarantined.
async fn waits_out(
    scene: &Scene,
    inbox: &Inbox<Db>,
    record: Record,
    sign: &str,
    end_of_outage: impl AsyncFnOnce(),
) -> Receipt {
    let events = Events::capture();
    let mut call = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept(record).await }
    });

    let is_sign = |error: &str| error.contains(sign);
    let many_tries =
        events.wait_for_count(6, |event| event.message == "store error" && event.field("error").is_some_and(is_sign));
    let early = tokio::select! {
        _ = many_tries => None,
        answer = &mut call => Some(answer),
    };
    end_of_outage().await;
    let answer = match early {
        Some(answer) => answer,
        None => within(call).await,
    };

    assert_eq!(scene.count("inbox_quarantine").await, 0);
    answer.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_database_costs_no_record() {
    let scene = Scene::new().await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let limits = quick().backoff_max(Duration::from_millis(100));
    let runs = Runs::new();
    let inbox = Inbox::builder(store).limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("first")).await.unwrap();
    proxy.refuse().await;
    proxy.reset_all().await;
    let events = Events::capture();
    let target = format!("{} at 127.0.0.1:{}", scene.database.name(), proxy.port());

    let call = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept_all((0..100).map(|number| record(&number.to_string()))).await }
    });
    let is_ours = |error: &str| error.contains(&target);
    events.wait_for_count(8, |event| event.field("error").is_some_and(is_ours)).await;
    proxy.pass().await;

    assert_eq!(within(call).await.unwrap().unwrap(), vec![ACCEPTED; 100]);
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (101, 0));
}

// This happens in a failover, until the new primary is writable.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_read_only_for_a_while_costs_no_record() {
    let (scene, client, inbox) = before_the_outage("default_transaction_read_only = off").await;
    let name = scene.database.name();
    let switch = async |state: &str| {
        // Sessions keep the setting they started with, and this session may be among them.
        let sql = format!(
            "SET default_transaction_read_only = off;
             ALTER DATABASE {name} SET default_transaction_read_only = {state};
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'wharf'"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    switch("on").await;

    let receipt =
        waits_out(&scene, &inbox, record("good"), "read-only transaction", async || switch("off").await).await;

    assert_eq!(receipt, ACCEPTED);
}

// This happens in a migration that rewrites the table.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_locked_for_a_while_costs_no_record() {
    let (scene, client, inbox) = before_the_outage("lock_timeout = '20ms'").await;
    client.batch_execute("BEGIN; LOCK TABLE inbox_message IN ACCESS EXCLUSIVE MODE").await.unwrap();

    let unlock = async || client.batch_execute("ROLLBACK").await.unwrap();
    let receipt = waits_out(&scene, &inbox, record("good"), "lock timeout", unlock).await;

    assert_eq!(receipt, ACCEPTED);
}

// This happens when an operator has left a transaction open.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_known_message_costs_no_record() {
    let (scene, client, inbox) = before_the_outage("lock_timeout = '20ms'").await;
    client.batch_execute("BEGIN; SELECT FROM inbox_message FOR UPDATE").await.unwrap();

    let unlock = async || client.batch_execute("ROLLBACK").await.unwrap();
    let receipt = waits_out(&scene, &inbox, record("first"), "lock timeout", unlock).await;

    assert_eq!(receipt, Receipt::Duplicate { added: 0 });
}

// This happens when an operator ends blocked sessions.
#[tokio::test(flavor = "multi_thread")]
async fn repeatedly_ended_sessions_cost_no_record() {
    let (scene, client, inbox) = before_the_outage("jit = off").await;
    client.batch_execute("BEGIN; LOCK TABLE inbox_message IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let call = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept(record("good")).await }
    });

    let blocked = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let is_given_up = "(SELECT count(*) FROM inbox_quarantine) > 0";
    for _ in 0..5 {
        scene.until(&format!("SELECT ((SELECT count(*) {blocked}) = 1 OR {is_given_up})::int::bigint")).await;
        let pid = scene.database.query_one_i64(&format!("SELECT coalesce(max(pid), 0)::bigint {blocked}")).await;
        scene.database.execute(&format!("SELECT pg_terminate_backend({pid}) WHERE {pid} <> 0")).await;
        scene.until(&format!("SELECT (count(*) = 0)::int::bigint FROM pg_stat_activity WHERE pid = {pid}")).await;
    }
    client.batch_execute("ROLLBACK").await.unwrap();

    assert_eq!(within(call).await.unwrap().unwrap(), ACCEPTED);
    assert_eq!(scene.count("inbox_quarantine").await, 0);
}

// The claims of the two kinds of handlers are two statements. Here the one for ordered handlers always fails, and the
// other one always claims something.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_fails_for_ordered_handlers_only_is_reported_and_delays_no_other_handler() {
    let scene = Scene::new().await;
    let refusal = "CREATE FUNCTION refuse_claim() RETURNS trigger LANGUAGE plpgsql AS $$
                   BEGIN RAISE EXCEPTION 'no claim of an ordered delivery'; END $$;
                   CREATE TRIGGER refuse_claim BEFORE UPDATE ON inbox_delivery FOR EACH ROW
                   WHEN (NEW.order_hash IS NOT NULL AND NEW.locked_until IS NOT NULL) EXECUTE FUNCTION refuse_claim()";
    scene.database.execute(refusal).await;
    let (busy, ordered) = (Runs::new(), Runs::new());
    let always_due = busy.answering("stock", |_| Err(Failure::snooze(Duration::ZERO)));
    let in_order = ordered.handler("mail").ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", always_due).subscribe("returns", in_order).build().unwrap();
    let events = Events::capture();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("busy")).await.unwrap();
    inbox.accept(Record::new("returns").with_id("in order").with_key("k")).await.unwrap();

    let is_refused = |error: &str| error.contains("no claim of an ordered delivery");
    events
        .wait_for_count(3, |event| event.message == "store error" && event.field("error").is_some_and(is_refused))
        .await;
    let ran_before = busy.count();
    busy.reached(ran_before + 10).await;
    assert_eq!(ordered.count(), 0);
    scene.database.execute("DROP TRIGGER refuse_claim ON inbox_delivery").await;

    ordered.reached(1).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// A drain is expected to run everything that is due, so it returns the error if some of it could not be claimed.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_returns_the_error_of_a_claim_that_fails_for_ordered_handlers_only() {
    let scene = Scene::new().await;
    let (plain, ordered) = (Runs::new(), Runs::new());
    let in_order = ordered.handler("mail").ordered_by(OrderKey::record_key());
    let inbox =
        scene.inbox().subscribe("orders", plain.handler("stock")).subscribe("orders", in_order).build().unwrap();
    inbox.accept(record("a").with_key("k")).await.unwrap();
    scene.database.execute("ALTER TABLE inbox_delivery ADD CHECK (order_hash IS NULL OR locked_until IS NULL)").await;

    let error = inbox.drain().await.unwrap_err();

    assert!(error.to_string().contains("cannot claim deliveries"), "{error:#}");
    assert_eq!((plain.count(), ordered.count()), (1, 0));
}
