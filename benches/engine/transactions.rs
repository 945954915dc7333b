//! Compares transactional handlers with a bare loop of prepared statements on as many connections. A backlog is
//! processed with one delivery per transaction, with several, and by a batch handler with one statement per call.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::ExpressionMethods;
use diesel_async::AsyncPgConnection;
use tokio_postgres::Client;
use wharf::batch::tx_batch_handler;
use wharf::store::PostgresOptions;
use wharf::{Failure, HandlerKey, Inbox, Limits, Message, Postgres, Raw, Registration, Store, tx_handler};

use crate::report::Report;
use crate::{Scale, bare_sql, fresh_database, ours, tidy_up};
use support::bench::{BATCH_ROWS, Measured, Meter, Pair, done_with};
use support::postgres::{Cluster, connect};

/// Connections that transactional handlers may hold at a time, with the default options.
const CONNECTIONS: usize = 8;
/// Deliveries in a shared transaction.
const SHARED: usize = 32;

const EFFECT: &str = "CREATE TABLE effect (message_id text NOT NULL)";
const INSERT: &str = "INSERT INTO effect (message_id) VALUES ($1)";
const COMPLETE: &str = "
    UPDATE inbox_delivery SET finished_at = now(), status = 2 /* done */, locked_until = NULL, locked_by = NULL
    WHERE message_seq = $1 AND handler_id = 1 AND attempts = $2 AND finished_at IS NULL";

diesel::table! { effect (message_id) { message_id -> Text } }

/// Counts runs of the handler without a query.
static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// Runs one repeat of all variants, with half of the messages, because each message needs a commit.
pub async fn measure(cluster: &Cluster, scale: Scale, report: &mut Report) {
    let scale = Scale { messages: (scale.messages / 2).max(CONNECTIONS), ..scale };
    let bare_sql = bare_loop(cluster, scale).await;
    report.tx.add(Pair { bare_sql, ours: drain(cluster, scale, "one by one", |handler| handler).await });
    let shared = drain(cluster, scale, "shared", |handler| handler.share_transaction(SHARED)).await;
    report.tx_shared.add(Pair { bare_sql, ours: shared });
    let key = HandlerKey::new("bench");
    let batches = |_| tx_batch_handler(key, write_effects).batch(SHARED, Duration::ZERO);
    report.tx_batch.add(Pair { bare_sql, ours: drain(cluster, scale, "batches", batches).await });
}

/// The baseline: BEGIN, insert, fenced update and COMMIT, with one round trip each. Deliveries are claimed before the
/// measurement.
async fn bare_loop(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    bare_sql::insert_all(cluster, &url, scale, 0).await;
    let first = connect(&url).await;
    first.batch_execute(EFFECT).await.unwrap();
    let claim = "UPDATE inbox_delivery SET attempts = 1, locked_until = now() + interval '1 hour'";
    first.batch_execute(claim).await.unwrap();
    let seqs = first.query("SELECT message_seq FROM inbox_delivery ORDER BY 1", &[]).await.unwrap();
    let seqs: Vec<i64> = seqs.iter().map(|row| row.get(0)).collect();
    tidy_up(&url).await;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(connect(&url).await);
    }
    let meter = Meter::start(cluster, None);
    let shares = clients.into_iter().enumerate().map(|(place, client)| {
        let share = seqs.iter().copied().skip(place).step_by(CONNECTIONS).collect();
        tokio::spawn(one_by_one(client, share))
    });
    for share in shares.collect::<Vec<_>>() {
        share.await.unwrap();
    }
    let measured = meter.stop(scale.messages);
    done_with(cluster, &url, "transactions, bare SQL").await;
    measured
}

async fn one_by_one(client: Client, seqs: Vec<i64>) {
    let insert = client.prepare(INSERT).await.unwrap();
    let complete = client.prepare(COMPLETE).await.unwrap();
    for seq in seqs {
        client.batch_execute("BEGIN").await.unwrap();
        client.execute(&insert, &[&format!("message-{seq}")]).await.unwrap();
        assert_eq!(client.execute(&complete, &[&seq, &1_i32]).await.unwrap(), 1);
        client.batch_execute("COMMIT").await.unwrap();
    }
}

/// Processes a backlog with one variant, and checks that each message has had its effect once.
async fn drain(
    cluster: &Cluster,
    scale: Scale,
    name: &str,
    option: impl FnOnce(Registration<Postgres>) -> Registration<Postgres>,
) -> Measured {
    let url = fresh_database(cluster).await;
    let client = connect(&url).await;
    client.batch_execute(EFFECT).await.unwrap();
    let inbox = inbox(&url, option).await;
    ours::accept_all(&inbox, scale).await;
    tidy_up(&url).await;
    HANDLED.store(0, Ordering::Relaxed);
    let meter = Meter::start(cluster, None);
    let running = inbox.start().await.unwrap();
    while HANDLED.load(Ordering::Relaxed) < scale.messages {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    ours::nothing_open(&url).await;
    let measured = meter.stop(scale.messages);
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    let effects: i64 = client.query_one("SELECT count(DISTINCT message_id) FROM effect", &[]).await.unwrap().get(0);
    let written: i64 = client.query_one("SELECT count(*) FROM effect", &[]).await.unwrap().get(0);
    assert_eq!((effects, written), (scale.messages as i64, scale.messages as i64), "each message has one effect");
    done_with(cluster, &url, &format!("transactions, {name}")).await;
    measured
}

/// An inbox with the defaults and a handler that inserts a row.
async fn inbox(url: &str, option: impl FnOnce(Registration<Postgres>) -> Registration<Postgres>) -> Inbox<Postgres> {
    assert_eq!(PostgresOptions::default().handler_connections, CONNECTIONS);
    let store = Store::<Postgres>::connect(url).await.unwrap();
    let limits = Limits::default().accept_batch_rows(BATCH_ROWS);
    let handler = tx_handler(HandlerKey::new("bench"), write_effect);
    Inbox::builder(store).limits(limits).subscribe("bench", option(handler)).build().unwrap()
}

async fn write_effect(message: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    // Imported here: at the top, its methods would hide others.
    use diesel_async::RunQueryDsl;
    diesel::insert_into(effect::table).values(effect::message_id.eq(message.id())).execute(conn).await?;
    HANDLED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

async fn write_effects(messages: Vec<Message<Raw>>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    use diesel_async::RunQueryDsl;
    let rows: Vec<_> = messages.iter().map(|message| effect::message_id.eq(message.id())).collect();
    diesel::insert_into(effect::table).values(rows).execute(conn).await?;
    HANDLED.fetch_add(messages.len(), Ordering::Relaxed);
    Ok(())
}
