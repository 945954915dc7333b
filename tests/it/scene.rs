//! The stage of a test: a fresh database, a migrated store, handlers that remember what they were given.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OnceCell, watch};
use wharf::{
    Failure, HandlerKey, Inbox, InboxBuilder, Limits, Message, Postgres, Raw, Record, Registration, Store, handler,
};

use crate::support::database::TestDatabase;
use crate::support::database_server::Server;
use crate::support::pgbouncer::PgBouncer;

/// Long enough for a busy machine; a test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Scene {
    pub database: TestDatabase,
    pub store: Store<Postgres>,
}

impl Scene {
    /// A fresh database with the schema in it.
    pub async fn new() -> Self {
        let database = TestDatabase::create().await;
        let store = Store::connect(&store_url(&database).await).await.unwrap();
        store.migrate().await.unwrap();
        Self { database, store }
    }

    /// An inbox whose limits suit tests: claims run out after two seconds, polls come quickly.
    pub fn inbox(&self) -> InboxBuilder<Postgres> {
        Inbox::builder(self.store.clone()).limits(quick())
    }

    /// A store of its own on the same database, as another process would have.
    pub async fn another_store(&self) -> Store<Postgres> {
        Store::connect(&store_url(&self.database).await).await.unwrap()
    }

    /// An inbox of another process: its own store, the same database.
    pub async fn another_inbox(&self) -> InboxBuilder<Postgres> {
        Inbox::builder(self.another_store().await).limits(quick())
    }

    /// How many rows a table or view has, with an optional `WHERE ...`.
    pub async fn count(&self, rows_of: &str) -> i64 {
        self.database.query_one_i64(&format!("SELECT count(*) FROM {rows_of}")).await
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

    /// Waits until the query answers 1. Polls the database: what is waited for is another process's doing.
    pub async fn until(&self, sql: &str) {
        let client = self.database.client().await;
        within(async {
            loop {
                let value: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
                if value == 1 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }
}

/// Where a store finds the database: directly, or by way of a PgBouncer in transaction mode when the core is run through one.
pub async fn store_url(database: &TestDatabase) -> String {
    static PGBOUNCER: OnceCell<PgBouncer> = OnceCell::const_new();
    if std::env::var_os("WHARF_TEST_THROUGH_PGBOUNCER").is_none() {
        return database.url();
    }
    let pgbouncer = PGBOUNCER.get_or_init(async || PgBouncer::start(Server::shared().await.url()).await).await;
    pgbouncer.url(database.name())
}

/// Limits for tests: what takes minutes in production takes moments.
pub fn quick() -> Limits {
    Limits { lease: Duration::from_secs(2), poll: Duration::from_millis(50), ..Limits::default() }
}

/// Fails the test when the future does not end in time.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("this should have happened long ago")
}

pub fn key(name: &'static str) -> HandlerKey {
    HandlerKey::new(name)
}

pub fn record(id: &str) -> Record {
    Record::new("orders").id(id.to_owned()).payload(format!("payload of {id}"))
}

pub fn records(count: usize) -> Vec<Record> {
    (0..count).map(|number| record(&format!("m{number:06}"))).collect()
}

/// What a handler was given, in order of start. Clones are the same list.
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

    /// A handler that remembers its messages and is done.
    pub fn handler(&self, name: &'static str) -> Registration<Postgres> {
        let runs = self.clone();
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            async { Ok::<(), Failure>(()) }
        })
    }

    /// A handler that remembers its messages and answers what `answer` says.
    pub fn answering(
        &self,
        name: &'static str,
        answer: impl Fn(&Message<Raw>) -> Result<(), Failure> + Send + Sync + 'static,
    ) -> Registration<Postgres> {
        let runs = self.clone();
        handler(key(name), move |message: Message<Raw>| {
            runs.note(&message);
            let answer = answer(&message);
            async { answer }
        })
    }
}
