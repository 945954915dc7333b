//! The setting of a test: a fresh database, a migrated store, handlers that record their messages.
//!
//! [`Scene`] uses PostgreSQL. Tests for every store use the scene, the backend and the connection of their parent
//! module (`super::scene`): the module of SQLite has its own.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OnceCell, Semaphore, watch};
use wharf::store::{Backend, PostgresOptions};
use wharf::{
    Failure, HandlerKey, Inbox, InboxBuilder, Limits, Message, Postgres, Raw, Record, Registration, Store, handler,
};

pub use crate::databases::{Database, RunLog};
use support::database::TestDatabase;
use support::database_server::Server;
use support::pgbouncer::PgBouncer;
use support::proxy::Proxy;
pub use wharf::operate::State;

pub type Scene = Stage<Data>;
/// The database of the scene.
pub type Data = TestDatabase;
/// The backend of the scene.
pub type Db = Postgres;
/// The connection of a handler's transaction.
pub type Connection = diesel_async::AsyncPgConnection;
/// The role of this store's child process.
pub const WORKER: &str = "worker";

/// Long enough for a busy machine; a test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(180);

const DONE_AT_FIRST: &str = "state = 'done' AND attempts = 1 AND errors = 0 AND crashes = 0";

/// The numbers in `inbox_delivery.status`, for tests that write rows by hand. To read states, use the view `inbox_status`.
pub mod status {
    pub const OPEN: i16 = 0;
    pub const DONE: i16 = 2;
    pub const POISONED: i16 = 3;
    pub const DISCARDED: i16 = 4;
}

pub struct Stage<D: Database> {
    pub database: D,
    pub store: Store<D::Backend>,
}

impl<D: Database> Stage<D> {
    /// A fresh database with the schema.
    pub async fn new() -> Self {
        let database = D::create().await;
        let store = database.open().await;
        store.migrate().await.unwrap();
        Self { database, store }
    }

    /// An inbox with limits for tests: claims expire after two seconds, polls are frequent.
    pub fn inbox(&self) -> InboxBuilder<D::Backend> {
        Inbox::builder(self.store.clone()).limits(quick())
    }

    /// A separate store on the same database, as in another process.
    pub async fn another_store(&self) -> Store<D::Backend> {
        self.database.open().await
    }

    /// An inbox of another process: a separate store, the same database.
    pub async fn another_inbox(&self) -> InboxBuilder<D::Backend> {
        Inbox::builder(self.another_store().await).limits(quick())
    }

    /// The number of rows of a table or view, with an optional `WHERE ...`.
    pub async fn count(&self, rows_of: &str) -> i64 {
        self.database.query_one_i64(&format!("SELECT count(*) FROM {rows_of}")).await
    }

    /// The number of deliveries in a state of `inbox_status`.
    pub async fn count_in(&self, state: State) -> i64 {
        self.count(&format!("inbox_status WHERE state = '{}'", state.as_str())).await
    }

    /// The number of deliveries that are done, with no error and no crash counted.
    pub async fn count_done_uncharged(&self) -> i64 {
        self.count("inbox_status WHERE state = 'done' AND errors = 0 AND crashes = 0").await
    }

    /// The number of deliveries that were done by their first attempt.
    pub async fn count_done_at_first(&self) -> i64 {
        self.count(&format!("inbox_status WHERE {DONE_AT_FIRST}")).await
    }

    /// The number of all other deliveries: they wait, took more than one attempt, or ended otherwise.
    pub async fn count_not_done_at_first(&self) -> i64 {
        self.count(&format!("inbox_status WHERE NOT ({DONE_AT_FIRST})")).await
    }

    /// `message handler state` of every delivery, sorted.
    pub async fn states(&self) -> Vec<String> {
        self.database
            .query_texts("SELECT concat_ws(' ', message_id, handler_key, state) FROM inbox_status ORDER BY 1")
            .await
    }

    /// Waits until no delivery is pending or running.
    pub async fn settled(&self) {
        self.until("SELECT (count(*) = 0)::int::bigint FROM inbox_delivery WHERE finished_at IS NULL").await;
    }

    /// Waits until the query returns 1. Polls the database, because another process causes the change.
    pub async fn until(&self, sql: &str) {
        within(async {
            while self.database.query_one_i64(sql).await != 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }
}

impl Scene {
    /// A store that reaches the database through a proxy, which can lose messages.
    pub async fn store_behind_a_proxy(&self) -> (Proxy, Store<Postgres>) {
        let proxy = Proxy::start_for(&self.database.url()).await;
        let store = Store::connect(&proxy.url(&self.database.url())).await.unwrap();
        (proxy, store)
    }
}

/// The URL for a store: direct, or through a PgBouncer in transaction mode when the core of the suite runs through one.
pub async fn store_url(database: &TestDatabase) -> String {
    static PGBOUNCER: OnceCell<PgBouncer> = OnceCell::const_new();
    if std::env::var_os("WHARF_TEST_THROUGH_PGBOUNCER").is_none() {
        return database.url();
    }
    let pgbouncer = PGBOUNCER.get_or_init(async || PgBouncer::start(Server::shared().await.url()).await).await;
    pgbouncer.url(database.name())
}

/// A store with one connection for transactional handlers.
pub async fn with_one_handler_connection(scene: &Scene) -> Store<Db> {
    let options = PostgresOptions::default().handler_connections(1);
    Store::connect_with(&store_url(&scene.database).await, options).await.unwrap()
}

/// Limits for tests: what takes minutes in production takes moments. The lease is long enough for a machine that stalls
/// for a second or two; a test that waits for its end sets its own.
pub fn quick() -> Limits {
    Limits::default().lease(Duration::from_secs(6)).poll(Duration::from_millis(50))
}

/// Fails the test when the future does not end in time.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("this should have happened long ago")
}

pub fn key(name: &'static str) -> HandlerKey {
    HandlerKey::new(name)
}

pub fn record(id: &str) -> Record {
    Record::new("orders").with_id(id.to_owned()).with_payload(format!("payload of {id}"))
}

pub fn records(count: usize) -> Vec<Record> {
    (0..count).map(|number| record(&format!("m{number:06}"))).collect()
}

/// The messages that a handler received, in order of start. Clones share the list.
#[derive(Clone)]
pub struct Runs {
    list: Arc<Mutex<Vec<String>>>,
    count: watch::Sender<usize>,
}

impl Runs {
    pub fn new() -> Self {
        Self { list: Arc::default(), count: watch::channel(0).0 }
    }

    pub fn note(&self, message: &Message<Raw>) {
        self.list.lock().unwrap().push(message.id().to_owned());
        self.count.send_modify(|count| *count += 1);
    }

    pub fn ids(&self) -> Vec<String> {
        self.list.lock().unwrap().clone()
    }

    pub fn sorted(&self) -> Vec<String> {
        let mut ids = self.ids();
        ids.sort();
        ids
    }

    pub fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until at least this many runs have begun.
    pub async fn reached(&self, count: usize) {
        within(self.count.subscribe().wait_for(|current| *current >= count)).await.unwrap();
    }

    /// A handler that records its messages and succeeds.
    pub fn handler<B: Backend>(&self, name: &'static str) -> Registration<B> {
        let runs = self.clone();
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            async { Ok::<(), Failure>(()) }
        })
    }

    /// A handler that records its messages and succeeds when the gate opens.
    pub fn gated<B: Backend>(&self, name: &'static str, gate: &watch::Sender<bool>) -> Registration<B> {
        let (runs, gate) = (self.clone(), gate.clone());
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            let mut opened = gate.subscribe();
            async move {
                // The sender lives in the handler, so this cannot fail.
                let _ = opened.wait_for(|is_open| *is_open).await;
                Ok::<(), Failure>(())
            }
        })
    }

    /// A handler that records its messages and returns when the gate opens.
    pub fn held<B: Backend>(&self, name: &'static str, gate: &Arc<Semaphore>) -> Registration<B> {
        let (runs, gate) = (self.clone(), Arc::clone(gate));
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            let gate = Arc::clone(&gate);
            async move {
                gate.acquire().await?.forget();
                Ok::<(), Failure>(())
            }
        })
    }

    /// The commands of [`Runs::obeying`].
    pub const ORDERS: [&'static str; 5] = ["done", "retry", "snooze", "discard", "poison"];

    /// A handler that does what the id of the message says; retried and snoozed messages succeed the second time.
    pub fn obeying<B: Backend>(&self, name: &'static str) -> Registration<B> {
        self.answering(name, |message| match message.id() {
            "retry" if message.attempt() == 1 => Err(Failure::retry_after(Duration::ZERO, "no")),
            "snooze" if message.attempt() == 1 => Err(Failure::snooze(Duration::ZERO)),
            "discard" => Err(Failure::discard("not needed")),
            "poison" => Err(Failure::poison("hopeless")),
            _ => Ok(()),
        })
    }

    /// A handler that records its messages and returns the result of `answer`.
    pub fn answering<B: Backend>(
        &self,
        name: &'static str,
        answer: impl Fn(&Message<Raw>) -> Result<(), Failure> + Send + Sync + 'static,
    ) -> Registration<B> {
        let runs = self.clone();
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            let answer = answer(&message);
            async { answer }
        })
    }
}
