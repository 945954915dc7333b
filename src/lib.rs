//! Wharf is a durable inbox: a record is written down once, together with one row for each handler that must see it; then every
//! handler is carried to an outcome on its own, however often the process dies, the record comes again or a handler fails.
//!
//! ```text
//!  record ──► accept ──────────► store ──────────► process ─────────► handler
//!             identity, fan-out   one message,      claim, run,        your code
//!             batch, dedup        N deliveries      settle, retry         │
//!                                                     ▲                   │
//!                                                     └──── outcome ◄─────┘
//! ```
//!
//! ```no_run
//! use std::time::Duration;
//! use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, RetryPolicy, Store, handler, tx_handler};
//! use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
//!
//! const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve"); // a bad key does not compile
//! const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
//!
//! // Exactly once for what it writes through `conn`: the writes and the outcome commit together.
//! async fn reserve_stock(order: Message<serde_json::Value>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
//!     conn.batch_execute("UPDATE stock SET reserved = reserved + 1").await?;
//!     Ok(())
//! }
//!
//! // At least once: any error is retried, with jittered exponential backoff, and poisoned in the end.
//! async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
//!     println!("a receipt for {}, attempt {}", order.id(), order.attempt());
//!     Ok(())
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
//! store.migrate().await?;
//! let inbox = Inbox::builder(store)
//!     .subscribe("orders", tx_handler(RESERVE_STOCK, reserve_stock).formerly("reserve_stock").concurrency(8))
//!     .subscribe("orders", handler(SEND_RECEIPT, send_receipt)
//!         .retry(RetryPolicy::exponential().max_retries(12).max_delay(Duration::from_secs(600)))
//!         .timeout(Duration::from_secs(30)))
//!     .build()?; // refuses colliding keys and impossible limits, all at once, before anything runs
//! let running = inbox.start().await?;
//!
//! inbox.accept(Record::new("orders").with_id("order-17/placed").json(&serde_json::json!({ "order": 17 }))).await?;
//!
//! running.shutdown(Duration::from_secs(20)).await?; // handlers end, claims are given back
//! # Ok(()) }
//! ```
//!
//! From Kafka: `inbox.start_from(Kafka::new(brokers, group))` in place of `start()`. In your own tests: `wharf::testing` (feature `testing`).
//!
//! # What is guaranteed
//!
//! - When [`Inbox::accept`] has returned, the message and a delivery for each of its handlers are durable, or the record is in
//!   quarantine, whole. A record that comes again, by the [`Identity`] of its topic, is a duplicate, also after a handler was renamed
//!   ([`Registration::formerly`]).
//! - Each delivery ends `done`, `discarded` or `poisoned`; poisoned ones are kept for a person. Each handler runs **at least once** for
//!   what ends done; extra runs are at most the deliveries that were running or not yet settled when a process died, or was without its database for
//!   longer than the lease.
//! - A transactional handler ([`tx_handler`], [`tx_batch_handler`](batch::tx_batch_handler)) takes effect **exactly once** in what it writes through the connection it is given.
//!   So does a handler with a PostgreSQL client of its own that settles its delivery in its own transaction ([`Registration::settles_itself`]).
//! - A message that makes each call of a batch handler ([`batch_handler`](batch::batch_handler)) fail that it is part of is the only one that is charged for it.
//! - Deliveries of one key of an ordered handler ([`Registration::ordered_by`]) run one at a time, in accept order, over processes, crashes and retries.
//! - A settlement by a process that has lost its claim changes nothing. A delivery that kills its process is poisoned after three
//!   deaths, and no other is for its sake. A slow or failing handler, a bad record, a dead process hold up nobody else.
//! - Nothing is purged but what is finished, and nothing of it before its time ([`Retention`]); poisoned and quarantined rows leave only by a
//!   person's act, or by an expiry that you set.
//! - What a transaction publishes through the [`Outbox`] is sent to Kafka if and only if it commits: at least once, with a stable id, in the order of its key. An inbox
//!   that reads the topic accepts it once, so two services in a row are exactly once end to end.
//! - Trouble of the database is nobody's fault: nothing is poisoned, charged or dropped for it, and everything goes on by itself.
//!
//! # What is not
//!
//! - Order, unless a handler asks for it: deliveries run side by side and retries come later. See [`Registration::ordered_by`].
//! - A record that comes again after its message was purged is new, unless its identity is kept ([`Retention::keep_identities`]).
//! - Effects outside the transaction (HTTP, mail, another database) can happen again: make them bear it, [`Message::id`] is the key.
//! - A handler that blocks its thread cannot be stopped by its timeout; its claim is kept until it returns.
//! - Data that the database acknowledged and lost: a disk that lies about fsync, an asynchronous standby that was behind.
//!
//! # Features
//!
//! | feature | default | brings |
//! |---|---|---|
//! | `postgres` | yes | [`Store<Postgres>`](Postgres): PostgreSQL 14 and newer, also through PgBouncer 1.21+ in transaction mode |
//! | `sqlite` | no | [`Store<Sqlite>`](Sqlite): SQLite, built in: a file of one host, or memory for tests |
//! | `kafka` | yes | [`Kafka`](kafka::Kafka) and [`Inbox::start_from`]: records out of Kafka; [`Relay`](kafka::Relay): records of the outbox into it; `ssl` adds TLS and SCRAM, `sasl` Kerberos |
//! | `metrics` | no | a count of what becomes of each record and each delivery, for any recorder of the `metrics` facade |
//! | `dashboard` | no | `wharf::dashboard`, a router of axum to mount in a service: the inbox in a browser |
//! | `testing` | no | `wharf::testing`, the kit for your own tests, on SQLite in memory or on your PostgreSQL |
//! | `cli` | no | the binary `wharf`, which looks at an inbox and acts on it from a shell; not for embedding |
//!
//! `ARCHITECTURE.md` has the map of the code, the states of a delivery, and what happens when something dies where.

#[cfg(not(any(feature = "postgres", feature = "sqlite")))]
compile_error!("wharf needs a store: switch on the feature `postgres`, which is the default, or `sqlite`");

// Folders in the order of a record's way, then what all of them stand on. The root has what a service needs in its first week; the
// public folders have the rest.
mod accept;
#[cfg(feature = "dashboard")]
pub mod dashboard;
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

/// Health: how a running inbox is, for the endpoints of the service. See [`Running::health`].
pub mod health {
    pub use crate::inbox::Monitor;
    pub use crate::types::{Health, HealthReason};
}

/// Layers: async functions around each run of a handler. See [`InboxBuilder::layer`] and [`Registration::layer`].
pub mod layer {
    pub use crate::handler::{Attempt, Next};
}

/// Batch handlers: one call for several messages. Begin with [`batch_handler`](batch::batch_handler).
pub mod batch {
    pub use crate::handler::{Answers, BatchHandler, TxBatchHandler, batch_handler, tx_batch_handler};
}

/// Flow: how fast and when the deliveries of a handler may start. See [`Registration::breaker`] and
/// [`Registration::rate`].
pub mod flow {
    pub use crate::handler::{Breaker, RateLimit};
}

/// Order: what the deliveries of a handler are ordered by. See [`Registration::ordered_by`].
pub mod order {
    pub use crate::handler::{OnPoison, OrderKey};
}

/// Poisoned deliveries: why they were poisoned, and what is told of them. See [`Registration::dead_letter`] and [`InboxBuilder::on_poison`].
pub mod poison {
    pub use crate::handler::{Poisoned, Reason};
}

// An inbox, and what goes in.
pub use accept::Identity;
pub use inbox::{Inbox, InboxBuilder, Running};
pub use types::{Headers, Limits, Position, Receipt, Record};

// Handlers, and what they are given.
pub use handler::{
    Failure, Handler, HandlerKey, Registration, RetryPolicy, Topics, TxHandler, handler, tx_handler, with_state,
};
pub use types::{CloudEvent, Message, Payload, Raw};

// What goes out.
pub use outbox::Outbox;

// Where it is kept, and for how long.
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

// What goes wrong.
pub use types::{Error, Result};

/// Written into `inbox_processor`, so that an operator sees which builds are alive.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What the README shows is compiled.
#[cfg(all(doctest, feature = "kafka", feature = "postgres"))]
#[doc = include_str!("../README.md")]
struct Readme;
