//! Makes a real inbox execute each of its statements, in large batches where possible.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_postgres::Client;
use wharf::flow::{FairKey, RateLimit};
use wharf::order::OrderKey;
use wharf::{
    Failure, Inbox, InboxBuilder, Limits, Message, Postgres, Raw, Receipt, Record, Registration, Retention, Store,
    handler, tx_handler,
};

use super::big::Big;
use crate::scene::{Runs, key, record};
use support::postgres::connect;
use support::proxy::{Fault, Proxy};

/// A text of each statement that no other statement contains.
pub const STATEMENTS: [(&str, &str); 44] = [
    ("accept", "nextval('inbox_message_seq')"),
    ("find known identities", "SELECT known.ord"),
    ("add missing deliveries", "SELECT DISTINCT w.group_no"),
    ("quarantine", "INSERT INTO inbox_quarantine"),
    ("claim", "SET locked_until = now() + $1 * interval '1 millisecond', locked_by = $2"),
    ("settle done", "unnest($3) AS attempt) s"),
    ("settle other", "last_error = coalesce(s.error, d.last_error)"),
    ("find lost claims", "AS s (message_seq, handler_id, attempt, status)\n"),
    ("renew", "WITH renewed AS"),
    ("release handed over", "d.locked_by = $3"),
    ("settle in a transaction", "d.attempts = claim_attempt"),
    ("settle in a shared transaction", "unnest(claim_attempts) AS attempt"),
    ("read back", "FOR NO KEY UPDATE SKIP LOCKED) free"),
    ("register processor", "WITH gone AS (DELETE FROM inbox_processor"),
    ("heartbeat", "OVERRIDING SYSTEM VALUE"),
    ("look for paused handlers", "SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL"),
    ("note unknown keys", "SET unknown_since ="),
    ("poison unknown keys", "reason = 'unknown key'"),
    ("replay", "SET status = 0, due_at = now()"),
    ("claim replays of the quarantine", "SET replay_locked_until = now()"),
    ("look for kept identities", "FROM unnest(hashes) WITH ORDINALITY"),
    ("take the lease of retention", "UPDATE inbox_lease SET holder"),
    ("walk to what is over", "ARRAY(SELECT seq FROM judged"),
    ("look at what was kept", "WITH due AS MATERIALIZED"),
    ("note what is kept", "INSERT INTO inbox_kept"),
    ("note how far a purge has looked", "INSERT INTO inbox_retention"),
    ("write identities", "WITH marked AS"),
    ("wait for identities", "ORDER BY i.forget_at DESC LIMIT 1"),
    ("lock what is over", "FOR UPDATE SKIP LOCKED) l"),
    ("remove what is over", "DELETE FROM inbox_message t"),
    ("forget identities", "DELETE FROM inbox_identity"),
    ("expire", "reason = 'expired'"),
    ("claim in order", "order_key AS MATERIALIZED"),
    ("look at tenants", "WITH RECURSIVE scan"),
    ("claim of tenants", "(d.fair_hash, d.due_at) >= (ask.fair_hash, ask.bottom)"),
    ("claim at a rate", "gate AS MATERIALIZED"),
    ("take from a rate limit", "SET rate_next_at = greatest"),
    ("look when a rate limit allows more", "WHERE h.id = ANY ($1) AND h.rate_interval_us IS NOT NULL"),
    ("settle in order", "unnest(run_attempts) AS attempt"),
    ("look for the next of all settled keys", "WITH promoted AS MATERIALIZED"),
    ("look for the next of a key", "h.order_hash = OLD.order_hash"),
    ("load large payloads", "SELECT seq, payload FROM inbox_message"),
    ("look for parked deliveries", "d.status = 3 AND d.reason = 'unknown key'"),
    ("accept one message", "coalesce((SELECT is_there FROM held),"),
];

/// More handlers than those that work, so that a claim is for many handlers.
const IDLE_HANDLERS: [&str; 12] = ["i1", "i2", "i3", "i4", "i5", "i6", "i7", "i8", "i9", "i10", "i11", "i12"];

/// Executes every statement, planned with this `plan_cache_mode`: behind a pooler the engine's own setting may not
/// reach the server. `round` keeps the identities of several calls apart.
pub async fn every_statement(big: &Big, round: &str, plan_cache_mode: &str) {
    let proxy = Proxy::start(big.cluster.port()).await;
    // As through a pooler that drops start-up settings.
    let options = format!(
        "-c%20wharf.session%3Dpooled%20-c%20jit%3Don%20-c%20enable_seqscan%3Don%20-c%20plan_cache_mode%3D{plan_cache_mode}"
    );
    let url = format!("{}?options={options}", big.cluster.url(&big.name));
    let store = Store::connect(&proxy.url(&url)).await.unwrap();
    // The lease is long enough that no claim expires on a busy machine.
    let limits = Limits::default()
        .lease(Duration::from_secs(9))
        .poll(Duration::from_millis(30))
        .unknown_key_grace(Duration::ZERO);
    let gate = Arc::new(Semaphore::new(0));
    let held = Runs::new();
    let thief = Arc::new(connect(&big.cluster.url(&big.name)).await);
    let inbox = inbox(&store, limits, &gate, &held, thief);

    fill_and_redeliver(&inbox, round).await;
    let running = inbox.start().await.unwrap();
    big.until("SELECT count(*) >= 500 FROM inbox_poisoned WHERE reason = 'unknown key'").await;
    for topic in ["failures", "robbed", "sorted", "sharing", "metered", "tenants"] {
        inbox.accept_all((0..600).map(|n| of(topic, round, n).with_key(format!("k{}", n % 200)))).await.unwrap();
    }
    // Deliveries of ordered handlers are claimed, never handed over.
    let large = of("sorted", round, 600).with_key("large").with_payload(vec![b'x'; 100_000]);
    inbox.accept(large).await.unwrap();
    hold_a_claim_until_it_is_renewed(big, &inbox, &gate, &held, round).await;
    lose_two_answers(big, &inbox, &proxy, round).await;
    replay(big).await;
    big.until(
        "SELECT count(*) = 0 FROM inbox_delivery d JOIN inbox_handler h ON h.id = d.handler_id
         WHERE finished_at IS NULL AND due_at <= now() AND h.key <> 'stranger'",
    )
    .await;
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    purge(big, &store).await;
}

/// With and without identities, some thousand rows per step.
async fn purge(big: &Big, store: &Store<Postgres>) {
    big.execute(
        "CREATE FUNCTION age_identity() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN NEW.purged_at := NEW.purged_at - interval '1 hour'; RETURN NEW; END $$;
         CREATE TRIGGER age_identity BEFORE INSERT ON inbox_identity FOR EACH ROW EXECUTE FUNCTION age_identity()",
    )
    .await;
    let half = Duration::from_secs(12 * 3_600);
    let keeping = Retention::after(half).keep_identities(100 * half).for_handler("audit", half).batch_rows(5_000);
    let purged = store.purge(&keeping, |_| {}).await.unwrap();
    assert!(purged.messages > 15_000 && purged.identities_kept == purged.messages, "{purged}");
    assert!(purged.identities_forgotten >= 4_999, "{purged}");
    // Messages that were kept are checked again.
    big.execute("UPDATE inbox_kept SET check_at = now()").await;
    store.purge(&keeping, |_| {}).await.unwrap();
}

/// One handler has deliveries that may expire; none does.
fn working(runs: &Runs, name: &'static str) -> Registration<Postgres> {
    let handler = runs.handler(name).concurrency(600);
    if name == "mail" { handler.expires_after(Duration::from_secs(300 * 86_400)) } else { handler }
}

fn inbox(
    store: &Store<Postgres>,
    limits: Limits,
    gate: &Arc<Semaphore>,
    held: &Runs,
    thief: Arc<Client>,
) -> Inbox<Postgres> {
    let (runs, gate, held) = (Runs::new(), Arc::clone(gate), held.clone());
    let builder = Inbox::builder(store.clone()).limits(limits);
    let builder = ["stock", "mail", "audit"]
        .into_iter()
        .fold(builder, |builder, name| builder.subscribe("orders", working(&runs, name)));
    let builder = IDLE_HANDLERS
        .into_iter()
        .fold(builder, |builder: InboxBuilder<Postgres>, name| builder.subscribe("idle", runs.handler(name)));
    let failing = runs.answering("failing", |message| match message.id().len() % 3 {
        0 => Err(Failure::discard("not ours")),
        1 => Err(Failure::poison("hopeless")),
        _ if message.attempt() > 1 => Ok(()),
        _ => Err(Failure::retry_after(Duration::from_millis(50), "busy")),
    });
    let slow = move |message: Message<Raw>| {
        held.note(&message);
        let gate = Arc::clone(&gate);
        async move { gate.acquire().await.map(drop) }
    };
    let robbed = move |message: Message<Raw>| {
        let thief = Arc::clone(&thief);
        async move { rob(&thief, &message).await }
    };
    // Only deliveries that are done are settled with the next of their keys.
    let sorted_out = runs.answering("sorted_out", |_| Err(Failure::discard("not ours")));
    let metered = RateLimit::per_second(1_000).burst(400);
    builder
        .subscribe("failures", failing.concurrency(600))
        .subscribe("robbed", handler(key("robbed"), robbed).concurrency(600))
        .subscribe("slow", handler(key("slow"), slow))
        .subscribe("resting", runs.handler("resting"))
        .subscribe("sorted", runs.handler("sorted").concurrency(600).ordered_by(OrderKey::record_key()))
        .subscribe("sorted", sorted_out.concurrency(600).ordered_by(OrderKey::record_key()))
        .subscribe("tenants", runs.handler("fair").concurrency(600).fair_by(FairKey::record_key()))
        .subscribe("tenants", runs.handler("slice").concurrency(600).fair_by(FairKey::record_key()).rate(metered))
        .subscribe("metered", runs.handler("metered").concurrency(600).rate(metered))
        .subscribe("metered", runs.handler("both").concurrency(600).ordered_by(OrderKey::record_key()).rate(metered))
        .subscribe("tx", tx_handler(key("tx"), nothing))
        .subscribe("sharing", tx_handler(key("sharing"), nothing).concurrency(1).share_transaction(8))
        .build()
        .unwrap()
}

async fn nothing(_: Message<Raw>, _: &mut diesel_async::AsyncPgConnection) -> Result<(), Failure> {
    Ok(())
}

/// Takes the claim of the first five records while the handler runs, as if another processor had claimed them.
async fn rob(thief: &Client, message: &Message<Raw>) -> Result<(), Failure> {
    let number: usize = message.id().rsplit('-').next().unwrap_or_default().parse()?;
    if number < 5 && message.attempt() == 1 {
        let steal = "UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = now() + interval '1 second'
                     WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = $1)";
        thief.execute(steal, &[&message.id()]).await?;
    }
    Ok(())
}

fn of(topic: &str, round: &str, number: usize) -> Record {
    // Ids of three lengths: the handler with store errors distinguishes them.
    Record::new(topic).with_id(format!("{topic}-{round}-{}-{number}", "x".repeat(number % 3))).with_payload("anything")
}

/// A batch of 1,000 new records for three handlers; 500 known ones that lack a delivery; 20 that are in conflict.
async fn fill_and_redeliver(inbox: &Inbox<Postgres>, round: &str) {
    let new = (0..1_000).map(|number| record(&format!("new-{round}-{number}")));
    let receipts = inbox.accept_all(new).await.unwrap();
    assert!(receipts.iter().all(|receipt| *receipt == Receipt::Accepted { deliveries: 3 }));
    let known = (1..=500).map(|number| record(&format!("old-{number}")));
    let receipts = inbox.accept_all(known).await.unwrap();
    assert!(receipts.iter().all(|receipt| matches!(receipt, Receipt::Duplicate { .. })));
    let conflicting = (1..=20).map(|number| record(&format!("old-{number}")).with_payload(format!("other {round}")));
    let receipts = inbox.accept_or_quarantine(conflicting).await.unwrap();
    assert!(receipts.iter().all(|receipt| *receipt == Receipt::Quarantined { reason: "conflict" }));
}

async fn hold_a_claim_until_it_is_renewed(
    big: &Big,
    inbox: &Inbox<Postgres>,
    gate: &Semaphore,
    held: &Runs,
    round: &str,
) {
    inbox.accept(of("slow", round, 0)).await.unwrap();
    held.reached(1).await;
    let row = "FROM inbox_delivery d JOIN inbox_handler h ON h.id = d.handler_id
               WHERE h.key = 'slow' AND finished_at IS NULL";
    let lock = big.client.query_one(&format!("SELECT locked_until::text {row}"), &[]).await.unwrap();
    let lock: String = lock.get(0);
    big.until(&format!("SELECT count(*) = 1 {row} AND locked_until > '{lock}'")).await;
    gate.add_permits(1);
}

/// Called by hand often enough for a generic plan, with the application name by which plans are searched.
async fn replay(big: &Big) {
    big.execute("SET application_name = wharf").await;
    for number in 190_001..190_010 {
        big.execute(&format!("SELECT inbox_replay('old-{number}', 'audit')")).await;
    }
    big.execute("RESET application_name").await;
}

/// Loses the reply to an accept, whose handed-over deliveries are then released; and the reply to a COMMIT, whose
/// result is then read.
async fn lose_two_answers(big: &Big, inbox: &Inbox<Postgres>, proxy: &Proxy, round: &str) {
    // Paused, so that no claim takes the delivery before it is released.
    big.execute("UPDATE inbox_handler SET paused_at = now() WHERE key = 'resting'").await;
    let lost = proxy.on_next_statement("INSERT INTO inbox_message", Fault::LoseReply);
    inbox.accept(of("resting", round, 0)).await.unwrap();
    lost.fired().await;
    big.execute("UPDATE inbox_handler SET paused_at = NULL").await;
    let lost = proxy.on_next_commit(Fault::LoseReply);
    inbox.accept(of("tx", round, 0)).await.unwrap();
    lost.fired().await;
    inbox.accept(of("tx", round, 1)).await.unwrap();
}
