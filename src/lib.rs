//! Wharf is a durable work queue with Kafka ingest. It stores each record once, with one delivery for each of its
//! handlers, and runs each delivery until it succeeds, despite crashes, redeliveries and failures.
//!
//! ```text
//!  record ──► accept ──────────► store ──────────► process ─────────► handler
//!             identity, fan-out   one message,      claim, run,        your code
//!             batch, dedup        N deliveries      settle, retry         │
//!                                                     ▲                   │
//!                                                     └──── outcome ◄─────┘
//! ```
//!
//! A **record** comes from Kafka or from your own code. Once it is accepted, it is a **message** with one **delivery**
//! for each handler that subscribes to its topic. Each delivery is retried on its own. A delivery that cannot succeed
//! is **poisoned**: it is kept for a person, who replays or discards it. A record that cannot become a message is
//! **quarantined**.
//!
//! # First example
//!
//! This program runs without a server, on SQLite in memory (feature `sqlite`):
//!
//! ```
//! use wharf::{Failure, HandlerKey, Inbox, Message, Receipt, Record, Sqlite, Store, handler};
//!
//! /// Deliveries are stored under this name, so the function can be renamed. An invalid key does not compile.
//! const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct Order { number: u32 }
//!
//! /// Runs at least once for each message. Any error is retried later.
//! async fn send_receipt(order: Message<Order>) -> Result<(), Failure> {
//!     println!("a receipt for order {}, attempt {}", order.payload.number, order.attempt());
//!     Ok(())
//! }
//!
//! #[tokio::main]
//! async fn main() -> wharf::Result<()> {
//!     let store = Store::<Sqlite>::in_memory().await?;
//!     store.migrate().await?;
//!     let inbox = Inbox::builder(store).subscribe("orders", handler(SEND_RECEIPT, send_receipt)).build()?;
//!
//!     let record = Record::new("orders").with_id("order-17/placed").json(&Order { number: 17 });
//!     assert_eq!(inbox.accept(record.clone()).await?, Receipt::Accepted { deliveries: 1 });
//!     assert_eq!(inbox.accept(record).await?, Receipt::Duplicate { added: 0 });
//!     assert_eq!(inbox.drain().await?, 1); // runs what is due; a service calls `start` instead
//!     Ok(())
//! }
//! ```
//!
//! # With Kafka and PostgreSQL
//!
//! ```no_run
//! use std::time::Duration;
//! use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
//! use tokio::signal::unix::{SignalKind, signal};
//! use wharf::kafka::Kafka;
//! use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, RetryPolicy, Store, handler, tx_handler};
//! # #[derive(serde::Deserialize)] struct Order { number: u32 }
//! # async fn send_receipt(_: Message<Order>) -> Result<(), Failure> { Ok(()) }
//! # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
//!
//! const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
//!
//! /// Exactly once: the writes through `conn` and the outcome are committed together.
//! async fn reserve_stock(order: Message<Order>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
//!     conn.batch_execute("UPDATE stock SET reserved = reserved + 1").await?;
//!     Ok(())
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
//!     store.migrate().await?;
//!     let inbox = Inbox::builder(store)
//!         .subscribe("orders", tx_handler(RESERVE_STOCK, reserve_stock).concurrency(8))
//!         .subscribe("orders", handler(SEND_RECEIPT, send_receipt)
//!             .retry(RetryPolicy::exponential().max_retries(12).max_delay(Duration::from_secs(600)))
//!             .timeout(Duration::from_secs(30)))
//!         .retention(Duration::from_secs(30 * 86_400)) // finished messages are deleted after a month
//!         .build()?; // refuses colliding keys and invalid limits before anything runs
//!
//!     let running = inbox.start_from(Kafka::new("broker-1:9092", "shop")).await?;
//!     signal(SignalKind::terminate())?.recv().await;
//!     running.shutdown(Duration::from_secs(20)).await?; // handlers finish, the others are released
//!     Ok(())
//! }
//! ```
//!
//! # Guides
//!
//! | guide | answers |
//! |---|---|
//! | [Getting started] | How do I define, register and stop handlers, pass them state, decode Protobuf, add clusters? |
//! | [Exactly once] | What runs once and what may run twice? How do I use sqlx? |
//! | [Errors and retries] | What does an error do? How do I replay last night's failures? |
//! | [Order and flow] | How do I keep order, share a handler between tenants, limit its rate, survive an outage? |
//! | [Testing] | How do I test retries, crashes and transactional handlers? |
//! | [Operating] | Why does work not move? How do I see traces, bound memory, size the database, use PgBouncer? |
//! | [Upgrading] | How do I rename, add and remove handlers in a rolling deploy? |
//!
//! [Getting started]: guide::getting_started
//! [Exactly once]: guide::exactly_once
//! [Errors and retries]: guide::errors_and_retries
//! [Order and flow]: guide::order_and_flow
//! [Testing]: guide::testing
//! [Operating]: guide::operating
//! [Upgrading]: guide::upgrading
//!
//! # What is guaranteed
//!
//! - When [`Inbox::accept`] has returned, the message and its deliveries are durable, or the record is quarantined
//!   unchanged. A record that arrives again, by the [`Identity`] of its topic, is a duplicate, also after a handler was
//!   renamed ([`Registration::formerly`]).
//! - Each delivery ends as `done`, `discarded` or `poisoned`, and poisoned deliveries are kept for a person. A handler
//!   runs **at least once** for each delivery that ends as `done`. Apart from retries, snoozes and replays, a delivery
//!   runs again only if its run was interrupted or not yet settled: by a crash, a lost claim, a database error, a
//!   shutdown past its grace, an operator's release, or a batch or shared transaction that failed as a whole.
//! - The writes of a transactional handler ([`tx_handler`], [`tx_batch_handler`](batch::tx_batch_handler)) through its
//!   connection take effect **exactly once**. So do the writes of a handler that settles its delivery in a transaction
//!   of its own PostgreSQL client ([`Registration::settles_itself`]).
//! - If a message makes every call of a batch handler fail ([`batch_handler`](batch::batch_handler)), only that message
//!   is poisoned. Only that message consumes retries, too, unless the failure says that a dependency is unavailable.
//! - Deliveries with one key of an ordered handler ([`Registration::ordered_by`]) run one at a time, in the order in
//!   which their messages were accepted, across processes, crashes and retries.
//! - A process that has lost its claim changes nothing. A delivery that crashes its process is poisoned after three
//!   crashes; deliveries that ran beside it are not poisoned. A slow or failing handler and an invalid record delay no
//!   other delivery. What a crashed process had claimed runs in another one when its lease has expired
//!   ([`Limits::lease`], 30 s).
//! - Only finished messages are purged, and only after their period ([`Retention`]). Poisoned deliveries and
//!   quarantined records are deleted only by a person, or by an expiry that you set.
//! - A record that a transaction publishes through the [`Outbox`] is sent to Kafka if and only if the transaction
//!   commits: at least once, with a stable id, in the order of its key. An inbox that reads the topic accepts it once,
//!   so two services in a row are exactly once end to end.
//! - Outages of the database and of brokers never consume a retry, poison a delivery or drop a record. Work resumes
//!   when they are over.
//!
//! # What is not guaranteed
//!
//! - Order, unless a handler asks for it: deliveries run concurrently, and retries run later. See
//!   [`Registration::ordered_by`].
//! - A record that arrives again after its message was purged is new, unless its identity is kept
//!   ([`Retention::keep_identities`]).
//! - Effects outside of the transaction (HTTP, mail, another database) can happen again. Use [`Message::id`] as the
//!   idempotency key.
//! - A handler that blocks its thread cannot be stopped by its timeout. Its claim is kept until it returns.
//! - Data survives only if the database keeps what it has acknowledged. A disk that ignores fsync, or a failover to an
//!   asynchronous standby that was behind, loses data.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `postgres` | yes | [`Store<Postgres>`](Postgres): PostgreSQL 14+, also behind PgBouncer 1.21+ (transaction mode) |
//! | `kafka` | yes | [`kafka`]: reads records from Kafka, and sends the records of the outbox to it |
//! | `ssl` | no | Kafka with TLS, and with SASL PLAIN, SCRAM or OAUTHBEARER |
//! | `sasl` | no | Kafka with Kerberos (SASL GSSAPI) |
//! | `oidc` | no | Kafka with tokens from an OpenID Connect endpoint |
//! | `sqlite` | no | [`Store<Sqlite>`](Sqlite): SQLite, built in, in a file of one host or in memory for tests |
//! | `avro`, `protobuf` | no | [`formats`]: decoders with the schemas of a schema registry (`schema-registry`) |
//! | `json-schema` | no | `JsonSchema::validated_by`: validation with the JSON Schemas of a schema registry |
//! | `metrics` | no | counters, gauges and histograms for any recorder of the `metrics` crate; [`observe`] lists them |
//! | `otel` | no | `wharf::otel`: connects the `tracing` spans of each run with OpenTelemetry |
//! | `dashboard` | no | `wharf::dashboard`: the inbox in a browser, as an axum router for your service |
//! | `testing` | no | `wharf::testing`: the test kit, on SQLite in memory or on your PostgreSQL |
//! | `cli` | no | the binary `wharf`, which inspects an inbox and acts on it from a shell; not for embedding |
//!
//! `ARCHITECTURE.md` describes the code, the states of a delivery, and what happens after a crash at each point.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(any(feature = "postgres", feature = "sqlite")))]
compile_error!("wharf needs a store: enable the feature `postgres`, which is the default, or `sqlite`");

// The root has what most services need; the public modules have the rest.
mod accept;
#[cfg(feature = "dashboard")]
pub mod dashboard;
pub mod formats;
mod handler;
mod inbox;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod operate;
mod outbox;
mod process;
pub mod store;
mod telemetry;
mod types;

#[cfg(feature = "testing")]
pub mod testing;

/// Guides: one or two screens each, with code that the tests compile. They link to the longer pages in the folder
/// `docs`.
///
/// This module exists only in the documentation.
#[cfg(any(doc, doctest))]
pub mod guide {
    // For the links in the pages.
    #[cfg(feature = "testing")]
    #[allow(unused_imports)]
    use crate::testing::*;
    #[allow(unused_imports)]
    use crate::*;

    macro_rules! guides {
        ($($name:ident: $file:literal)*) => {
            $(
                // In Markdown the first definition of a link counts. The pages define relative links, for the
                // repository; `links.txt` defines absolute ones, for this documentation.
                #[doc = include_str!("../docs/guide/links.txt")]
                #[doc = include_str!(concat!("../docs/guide/", $file))]
                pub mod $name {}
            )*
        };
    }

    guides! {
        getting_started: "getting-started.md"
        exactly_once: "exactly-once.md"
        errors_and_retries: "errors-and-retries.md"
        order_and_flow: "order-and-flow.md"
        testing: "testing.md"
        operating: "operating.md"
        upgrading: "upgrading.md"
    }
}

/// Health of a running inbox, for the endpoints of the service. See [`Running::health`].
pub mod health {
    pub use crate::inbox::Monitor;
    pub use crate::types::{Health, HealthReason};
}

/// The list of every metric that a service exports with the feature `metrics`. `wharf observe` makes a Grafana
/// dashboard and alert rules from it.
pub mod observe {
    pub use crate::telemetry::{Metric, MetricKind, MetricScope, MetricUnit, metrics};
}

/// Layers: async functions around each run of a handler. See [`InboxBuilder::layer`] and [`Registration::layer`].
pub mod layer {
    pub use crate::handler::{Attempt, Next};
}

/// Batch handlers: one call for several messages. Begin with [`batch_handler`](batch::batch_handler).
pub mod batch {
    pub use crate::handler::{Answers, BatchHandler, TxBatchHandler, batch_handler, tx_batch_handler};
}

/// Flow: when deliveries of a handler may start. See [`Registration::breaker`], [`Registration::rate`],
/// [`Registration::fair_by`] and [`Registration::priority`].
pub mod flow {
    pub use crate::handler::{Breaker, FairKey, Priority, RateLimit};
}

/// Order: the key by which the deliveries of a handler are ordered. See [`Registration::ordered_by`].
pub mod order {
    pub use crate::handler::{OnPoison, OrderKey};
}

/// Poisoned deliveries, as alarms and dead-letter topics report them. See [`InboxBuilder::on_poison`] and
/// [`Registration::dead_letter`].
pub mod poison {
    pub use crate::handler::{Poisoned, Reason};
}

/// Traces: each run of a handler, each accepted batch and each batch of outcomes is a `tracing` span. A bridge exports
/// them to a tracing system, with OpenTelemetry's names for messaging, and connects them with the traces of producers
/// and consumers.
///
/// For OpenTelemetry enable the feature `otel` and call `wharf::otel::install()`. `docs/observability.md` describes the
/// spans, their parents and their links.
pub mod traces {
    pub use crate::telemetry::traces::{
        Attribute, Bridge, SpanEnd, SpanError, SpanKind, SpanParent, SpanStart, current, install,
    };
    pub use crate::types::TraceContext;
}

/// The bridge to OpenTelemetry, for services whose `tracing` subscriber has a layer of `tracing-opentelemetry` 0.34.
///
/// ```
/// # fn main() -> wharf::Result<()> {
/// wharf::otel::install()?;
/// # Ok(()) }
/// ```
#[cfg(feature = "otel")]
pub mod otel {
    pub use crate::telemetry::otel::{OtelBridge, install};
}

// The inbox and its input.
pub use accept::Identity;
pub use inbox::{Inbox, InboxBuilder, Running};
pub use types::{Headers, Limits, Position, Receipt, Record};

// Handlers and their input.
pub use handler::{
    Failure, Handler, HandlerKey, Registration, RetryPolicy, Topics, TxHandler, handler, tx_handler, with_state,
};
pub use types::{CloudEvent, Message, Payload, Raw};

// Output.
pub use outbox::Outbox;

// Storage.
#[doc(inline)]
pub use operate::Retention;
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use store::Postgres;
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use store::Sqlite;
#[doc(inline)]
pub use store::Store;

// Errors.
pub use types::{Error, Result};

/// Stored in `inbox_processor`, so that an operator sees which builds are alive.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Compiles the code of the page on Kafka.
#[cfg(all(doctest, feature = "kafka", feature = "postgres"))]
#[doc = include_str!("../docs/kafka.md")]
struct KafkaPage;

/// Compiles the code of the page on formats.
#[cfg(all(doctest, feature = "avro", feature = "json-schema", feature = "postgres", feature = "protobuf"))]
#[doc = include_str!("../docs/formats.md")]
struct FormatsPage;

/// Compiles the code of the page on deployment.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../docs/deployment.md")]
struct DeploymentPage;

/// Compiles the code of the page on the dashboard.
#[cfg(all(doctest, feature = "avro", feature = "dashboard", feature = "postgres", feature = "protobuf"))]
#[doc = include_str!("../docs/dashboard.md")]
struct DashboardPage;

/// Compiles the code of the page on observability.
#[cfg(all(doctest, feature = "otel"))]
#[doc = include_str!("../docs/observability.md")]
struct ObservabilityPage;
