//! The child processes of the chain: services that read a topic, write an effect for each record, and publish it to the
//! next topic.

use std::time::Duration;

use diesel::sql_types::{Integer, Text};
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use tokio::signal::unix::{SignalKind, signal};
use wharf::kafka::{Kafka, Relay};
use wharf::order::{OnPoison, OrderKey};
use wharf::{Failure, HandlerKey, Inbox, Limits, Message, Outbox, Postgres, Record, Store, tx_handler, with_state};

use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("link", work);

const URL: &str = "LINK_URL";
const BROKERS: &str = "LINK_BROKERS";
const NAME: &str = "LINK_NAME";
const FROM: &str = "LINK_FROM";
/// The topic that records are published to; empty at the end of the chain.
const TO: &str = "LINK_TO";
/// The topic for poisoned deliveries; empty for none.
const DEAD: &str = "LINK_DEAD";

/// One in this many records cannot be handled by the first service.
pub const HOPELESS_EVERY: i32 = 250;

/// The settings of a service in the chain.
#[derive(Clone)]
pub struct Link {
    pub url: String,
    pub brokers: String,
    pub from: String,
    pub to: String,
    pub dead: String,
}

impl Link {
    /// A service that is restarted under the same name gets its partitions back at once.
    pub fn spawn(&self, name: &str) -> Child {
        let variables = [
            (URL, self.url.as_str()),
            (BROKERS, &self.brokers),
            (NAME, name),
            (FROM, &self.from),
            (TO, &self.to),
            (DEAD, &self.dead),
        ];
        Child::spawn(ROLE.0, &variables)
    }
}

/// The payload of the records in the chain.
#[derive(serde::Deserialize, serde::Serialize)]
struct Parcel {
    key: String,
    number: i32,
}

async fn carry(
    (outbox, to): (Outbox<Postgres>, String),
    parcel: Message<Parcel>,
    conn: &mut AsyncPgConnection,
) -> Result<(), Failure> {
    let Parcel { key, number } = &parcel.payload;
    if !to.is_empty() && number % HOPELESS_EVERY == 0 {
        return Err(Failure::poison("cannot be carried"));
    }
    let effect = diesel::sql_query("INSERT INTO effect (key, number) VALUES ($1, $2)");
    effect.bind::<Text, _>(key).bind::<Integer, _>(*number).execute(conn).await?;
    if !to.is_empty() {
        outbox.publish(conn, Record::new(to).with_key(key.clone()).json(&parcel.payload)).await?;
    }
    Ok(())
}

#[tokio::main]
async fn work() {
    let (from, to, dead) = (parameter(FROM), parameter(TO), parameter(DEAD));
    let store = loop {
        // The server may be restarting.
        match Store::<Postgres>::connect(&parameter(URL)).await {
            Ok(store) => break store,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    let limits =
        Limits::default().lease(Duration::from_secs(2)).backoff_max(Duration::from_millis(500)).crash_limit(1_000);
    let order = OrderKey::record_key().on_poison(OnPoison::Pass);
    let state = (Outbox::new(&store).with_source("/chain"), to);
    let mut registration =
        tx_handler(HandlerKey::new("carry"), with_state(state, carry)).ordered_by(order).concurrency(64);
    if !dead.is_empty() {
        registration = registration.dead_letter(dead);
    }
    let relay = Relay::new(parameter(BROKERS)).lease(Duration::from_secs(2)).set("reconnect.backoff.max.ms", "500");
    let inbox = Inbox::builder(store)
        .limits(limits.poll(Duration::from_millis(50)))
        .subscribe(&*from, registration)
        .relay(relay);
    let source = Kafka::new(parameter(BROKERS), format!("{from}-readers"))
        .set("group.instance.id", parameter(NAME))
        .set("reconnect.backoff.max.ms", "500");
    let inbox = inbox.build().unwrap();
    let running = loop {
        match inbox.start_from(source.clone()).await {
            Ok(running) => break running,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    say("at work");
    signal(SignalKind::terminate()).unwrap().recv().await;
    // The database may be unavailable now: then the claims expire.
    let _ = running.shutdown(Duration::from_secs(10)).await;
}
