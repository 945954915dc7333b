//! The cost of publishing: compares a transactional handler that writes a row with one that also publishes a record.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::ExpressionMethods;
use diesel_async::AsyncPgConnection;
use wharf::{Failure, HandlerKey, Inbox, Message, Outbox, Postgres, Raw, Record, Store, tx_handler, with_state};

use crate::{Scale, Servers, fresh_database, tidy_up};
use support::bench::{Measured, Meter, PAYLOAD_BYTES, done_with};
use support::postgres::connect;

diesel::table! { effect (message_id) { message_id -> Text } }

/// What the handler publishes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Publishes {
    Nothing,
    OneRecord,
}

/// Counts runs of the handler without a query.
static HANDLED: AtomicUsize = AtomicUsize::new(0);

async fn handle(
    (outbox, publishes): (Outbox<Postgres>, Publishes),
    message: Message<Raw>,
    conn: &mut AsyncPgConnection,
) -> Result<(), Failure> {
    // Imported here: at the top, its methods would hide others.
    use diesel_async::RunQueryDsl;
    diesel::insert_into(effect::table).values(effect::message_id.eq(message.id())).execute(conn).await?;
    if publishes == Publishes::OneRecord {
        let record = Record::new("bench").with_key(message.id().to_owned()).with_payload(message.payload.to_vec());
        outbox.publish(conn, record).await?;
    }
    HANDLED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Processes a tenth of the messages, because each one needs a commit.
pub async fn drain(servers: &Servers, scale: Scale, publishes: Publishes) -> Measured {
    let messages = (scale.messages / 10).max(100);
    let url = fresh_database(&servers.postgres).await;
    let client = connect(&url).await;
    client.batch_execute("CREATE TABLE effect (message_id text NOT NULL)").await.unwrap();
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let state = (Outbox::new(&store), publishes);
    let handler = tx_handler(HandlerKey::new("bench"), with_state(state, handle));
    let inbox = Inbox::builder(store).subscribe("bench", handler).build().unwrap();
    let record =
        |number| Record::new("bench").with_id(format!("message-{number}")).with_payload(vec![b'x'; PAYLOAD_BYTES]);
    inbox.accept_all((0..messages).map(record)).await.unwrap();
    tidy_up(&url).await;
    HANDLED.store(0, Ordering::Relaxed);
    let meter = Meter::start(&servers.postgres, None);
    let running = inbox.start().await.unwrap();
    while HANDLED.load(Ordering::Relaxed) < messages {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // `HANDLED` counts before the commit, so the shutdown, which waits for the last commits, is measured too.
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    let measured = meter.stop(messages);
    let published: i64 = client.query_one("SELECT count(*) FROM inbox_outbox", &[]).await.unwrap().get(0);
    let wanted = if publishes == Publishes::OneRecord { messages } else { 0 };
    assert_eq!(published, wanted as i64);
    done_with(&servers.postgres, &url, "handler").await;
    measured
}
