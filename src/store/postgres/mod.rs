//! The PostgreSQL store: for production, any number of processes, version 14 and newer, also through PgBouncer in
//! transaction mode.
//!
//! There is one file per stage. Each operation takes a connection from the pool and returns it. No operation holds a
//! connection while it waits for another, so a pool of one works. Renewal has its own connection, because claims must
//! be renewed while all other connections are busy.

mod accept;
mod accept_in;
mod breaker;
mod claim;
mod connect;
mod errors;
mod fair;
mod hosts;
mod ingest;
mod ledger;
mod migrate;
mod operate;
mod ordered;
mod outbound;
mod outbox;
mod password;
mod poison;
mod process;
mod purge;
mod quarantine;
mod register;
mod statement;
#[cfg(feature = "testing")]
mod testing;
mod time;
mod tls;
mod transact;
mod upkeep;
mod url;
mod withheld;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use connect::PostgresOptions;

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::deadpool::{Object, Pool};
use tokio::runtime::Handle;

use super::ledger::{IngestReport, Ledger, LedgerReport, LedgerRow, Opening, Reader, Stopping};
use super::purging::{Counted, ExpiredCount, Periods, PurgeStep, Purging, Stepped};
use super::reactor::Reactor;
use super::seam::{
    AcceptBatch, Accepted, Answers, Backlog, BlockedHandlers, ClaimId, ClaimRequest, Claims, HandlerIds, Lost,
    NewMessage, Payloads, PoolStatus, ProcessorInfo, Renewal, Seam, Settlement, Settler, UnknownHandler, WantedHandler,
    Withheld,
};
use super::transaction::ReadBack;
use super::version::{Migration, SchemaRow};
use super::{Backend, Store};
use crate::types::{Error, Kind, Result};
use connect::Connector;
use transact::{Cancelling, PostgresTransaction, Session};

/// PostgreSQL 14 or newer, the store for production. Any number of processes may share one database, also through
/// PgBouncer in transaction mode. [`Store::connect`] opens it; `docs/deployment.md` has the details.
///
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use wharf::{Postgres, Store};
///
/// let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
/// # Ok(()) }
/// ```
pub struct Postgres {
    /// For the engine and for operators.
    pool: Pool<AsyncPgConnection>,
    /// One connection that only renewal uses.
    renewal: Pool<AsyncPgConnection>,
    /// For transactional handlers, driven by their runtime: a round trip then wakes no other thread.
    handlers: Pool<AsyncPgConnection>,
    connector: Connector,
    /// The server's address for error messages, without secrets.
    target: String,
    /// Whether a session is shared through a pooler.
    session: Session,
    /// The schema of the inbox. Set when handlers are registered.
    schema: OnceLock<String>,
    /// Upper limit for the time of an operation: the server ends statements earlier.
    patience: Duration,
    /// Declared last, so that it is dropped after the pools: it drives their connections.
    reactor: Reactor,
}

impl Store<Postgres> {
    /// Connects with the default options. The URL has the form of libpq:
    /// `postgres://user:password@host:5432/database?sslmode=verify-full`. It may name several hosts (`host1,host2`,
    /// with `target_session_attrs=read-write` for the one that accepts writes), a client certificate (`sslcert`,
    /// `sslkey`), and a password file (`passfile`). Files are read again for each connection.
    ///
    /// ```no_run
    /// # async fn run() -> wharf::Result<()> {
    /// use wharf::{Postgres, Store};
    ///
    /// // The first of two hosts that accepts writes; the tables are in the schema `inbox`.
    /// let url = "postgres://shop@db1,db2/shop?target_session_attrs=read-write&options=-csearch_path%3Dinbox";
    /// let store = Store::<Postgres>::connect(url).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the URL is invalid or the database does not answer.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(url, PostgresOptions::default()).await
    }

    /// Connects with the given options.
    ///
    /// ```no_run
    /// # async fn run() -> wharf::Result<()> {
    /// use std::time::Duration;
    /// use wharf::store::PostgresOptions;
    /// use wharf::{Postgres, Store};
    ///
    /// let options = PostgresOptions::default().pool_size(20).statement_timeout(Duration::from_secs(30));
    /// let store = Store::<Postgres>::connect_with("postgres://shop@db.example.com/shop", options).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the URL or an option is invalid, the database does not answer, or the engine cannot work with a setting of
    /// the session (behind a pooler: of the role).
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self> {
        options.validate()?;
        Self::open(Connector::new(url, &options)?, &options).await
    }

    /// Connects once, to verify the settings of a session. Further connections are opened on demand.
    async fn open(connector: Connector, options: &PostgresOptions) -> Result<Self> {
        let reactor = Reactor::start()?;
        let mut backend = Postgres {
            pool: connector.pool(options.pool_size, Some(reactor.handle()))?,
            renewal: connector.pool(1, Some(reactor.handle()))?,
            handlers: connector.for_handlers().pool(options.handler_connections, None)?,
            target: connector.target(),
            session: Session::Pooled,
            schema: OnceLock::new(),
            connector,
            patience: options.statement_timeout + options.connect_timeout,
            reactor,
        };
        backend.session = connect::verify(&mut *backend.conn().await?).await?;
        Ok(Self::new(backend))
    }
}

/// Runs an operation on a connection, within a time limit that only a database that never answers can exceed, for
/// example behind a proxy that keeps the socket open for a dead server. After the time limit the connection is closed,
/// never reused, and the result of the operation is unknown. For a `judged` operation, the error tells whether the
/// connection was lost with it.
macro_rules! act {
    ($self:ident, judged $conn:ident => $act:expr) => {
        $crate::store::postgres::act!($self, $conn => async {
            match $act.await {
                Err(error) => Err(connect::judge(&mut $conn, error).await),
                acted => acted,
            }
        })
    };
    ($self:ident, $conn:ident => $act:expr) => {
        $crate::store::postgres::act!($self, &$self.pool, $conn => $act)
    };
    ($self:ident, $pool:expr, $conn:ident => $act:expr) => {
        $crate::store::postgres::act!($self, $pool, within $self.patience, $conn => $act)
    };
    ($self:ident, $pool:expr, within $patience:expr, $conn:ident => $act:expr) => {{
        let deadline = tokio::time::Instant::now() + $patience;
        let got = $crate::store::postgres::connect::get($pool, &$self.target);
        let got = tokio::time::timeout_at(deadline, got).await;
        let mut $conn = got.unwrap_or_else(|_| Err($self.no_answer($patience)))?;
        let acted = tokio::time::timeout_at(deadline, $act).await;
        match acted {
            // A lost connection is not reused, nor is a session with a server that is no longer the primary.
            Ok(Err(error)) if error.is_connection() => {
                drop(diesel_async::pooled_connection::deadpool::Object::take($conn));
                Err(error)
            }
            Ok(result) => result,
            Err(_) => {
                drop(diesel_async::pooled_connection::deadpool::Object::take($conn));
                Err($self.no_answer($patience))
            }
        }
    }};
}
use act;

impl Postgres {
    /// The error of an operation that took too long. Whether it took effect is unknown.
    fn no_answer(&self, patience: Duration) -> Error {
        let patience = humantime::format_duration(patience);
        Error::new(Kind::Connection, format!("no answer from {} within {patience}", self.target))
    }

    /// A connection of the pool. Waits for at most `connect_timeout`.
    async fn conn(&self) -> Result<Object<AsyncPgConnection>> {
        connect::get(&self.pool, &self.target).await
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("target", &self.target)
            .field("pool_size", &self.pool.status().max_size)
            .finish_non_exhaustive()
    }
}

impl Backend for Postgres {}

impl Seam for Postgres {
    type Connection = AsyncPgConnection;
    type Transaction = PostgresTransaction;

    const MIGRATIONS: &'static [Migration] = migrate::MIGRATIONS;
    const IS_SETTLED_IN_SQL: bool = true;

    async fn migrate(&self) -> Result<()> {
        // No time limit: the migration of a large table must not be interrupted.
        migrate::migrate(&mut *self.conn().await?).await
    }

    async fn newest_migration(&self) -> Result<Option<SchemaRow>> {
        act!(self, conn => migrate::newest(&mut conn))
    }

    async fn register(&self, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
        act!(self, conn => async {
            let ids = register::register(&mut conn, wanted).await?;
            let schema = register::schema(&mut conn).await?;
            // It is the same on each call.
            self.schema.get_or_init(|| schema);
            Result::<_, Error>::Ok(ids)
        })
    }

    async fn accept_in(&self, conn: &mut AsyncPgConnection, batches: Vec<Vec<NewMessage>>) -> Result<Vec<Accepted>> {
        let schema = self
            .schema
            .get()
            .ok_or_else(|| Error::bug("messages were accepted before the handlers were registered"))?;
        // This is not a connection of the store: the caller decides how long it may take.
        accept_in::accept_in(conn, schema, &batches).await
    }

    async fn accept(&self, batch: &Arc<AcceptBatch>) -> Result<Option<Answers>> {
        act!(self, judged conn => accept::accept(&mut conn, batch))
    }

    async fn backlog(&self, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
        act!(self, conn => upkeep::backlog(&mut conn, handler_ids, count_max))
    }

    async fn refuses(&self, message: &NewMessage) -> Result<bool> {
        act!(self, conn => quarantine::refuses(&mut conn, message))
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claims> {
        act!(self, conn => claim::claim(&mut conn, request))
    }

    async fn payloads(&self, withheld: &Withheld) -> Result<Payloads> {
        act!(self, conn => withheld::payloads(&mut conn, withheld))
    }

    async fn settle(&self, by: &Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
        act!(self, judged conn => process::settle(&mut conn, by, settlements))
    }

    async fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32) -> Result<()> {
        act!(self, conn => process::release_handed_over(&mut conn, deliveries, processor))
    }

    async fn renew(&self, processor: i32, claims: &[ClaimId], lease: Duration) -> Result<Renewal> {
        // A connection that does not answer is closed early enough to try a new one before the lease ends.
        let patience = self.patience.min(lease / 4);
        act!(self, &self.renewal, within patience, conn => process::renew(&mut conn, processor, claims, lease))
    }

    async fn begin(&self, processor: i32) -> Result<PostgresTransaction> {
        let cancelling = Cancelling { tls: self.connector.tls(), reactor: self.reactor.handle().clone() };
        PostgresTransaction::begin(
            connect::get(&self.handlers, &self.target).await?,
            cancelling,
            self.patience,
            self.session,
            processor,
        )
        .await
    }

    async fn read_back(&self, claim: ClaimId) -> Result<ReadBack> {
        act!(self, conn => transact::read_back(&mut conn, claim))
    }

    async fn register_processor(&self, processor: &ProcessorInfo) -> Result<(i32, BlockedHandlers)> {
        act!(self, conn => upkeep::register_processor(&mut conn, processor))
    }

    async fn heartbeat(&self, id: i32, processor: &ProcessorInfo) -> Result<BlockedHandlers> {
        act!(self, conn => upkeep::heartbeat(&mut conn, id, processor))
    }

    async fn remove_processor(&self, id: i32) -> Result<()> {
        act!(self, conn => upkeep::remove_processor(&mut conn, id))
    }

    async fn check_unknown(&self, processor: i32, grace: Duration, limit: u32) -> Result<Vec<UnknownHandler>> {
        act!(self, conn => upkeep::check_unknown(&mut conn, processor, grace, limit))
    }

    async fn expire(&self, handler_ids: &[i16], older_than: Duration, limit: u32) -> Result<u64> {
        act!(self, conn => upkeep::expire(&mut conn, handler_ids, older_than, limit))
    }

    fn reactor(&self) -> &Handle {
        self.reactor.handle()
    }

    fn pool_status(&self) -> PoolStatus {
        let status = self.pool.status();
        let in_use = status.size.saturating_sub(status.available);
        PoolStatus { in_use, size: status.max_size, waiting: status.waiting }
    }

    fn transactions_max(&self) -> usize {
        self.handlers.status().max_size
    }
}

impl Ledger for Postgres {
    async fn ledger(&self, reader: &Reader, partitions: &[(Arc<str>, i32)]) -> Result<Vec<Option<LedgerRow>>> {
        act!(self, conn => ledger::read(&mut conn, reader, partitions))
    }

    async fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> Result<Vec<bool>> {
        act!(self, conn => ledger::open(&mut conn, reader, openings))
    }

    async fn has_ledger(&self, reader: &Reader, topics: &[Arc<str>]) -> Result<Vec<bool>> {
        act!(self, conn => ledger::has(&mut conn, reader, topics))
    }

    async fn begin_topic(&self, reader: &Reader, openings: &[Opening]) -> Result<()> {
        act!(self, conn => ledger::begin(&mut conn, reader, openings))
    }

    async fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> Result<()> {
        act!(self, conn => ledger::stop(&mut conn, reader, stops))
    }

    async fn report_ingest(&self, report: &IngestReport) -> Result<()> {
        act!(self, conn => ingest::report(&mut conn, report))
    }

    async fn end_ingest(&self, group: &str, source: &str, name: &str) -> Result<()> {
        act!(self, conn => ingest::end(&mut conn, group, source, name))
    }

    async fn ledger_report(&self, group: &str) -> Result<LedgerReport> {
        // No time limit: it reads every message.
        ledger::report(&mut *self.conn().await?, group).await
    }
}

impl Purging for Postgres {
    async fn ids_of_keys(&self, keys: &[String]) -> Result<Vec<Vec<i16>>> {
        act!(self, conn => purge::ids_of_keys(&mut conn, keys))
    }

    async fn purge_step(&self, holder: i64, step: &PurgeStep) -> Result<Stepped> {
        act!(self, judged conn => purge::step(&mut conn, holder, step, self.patience))
    }

    async fn release_purge(&self, holder: i64) -> Result<()> {
        act!(self, conn => purge::release(&mut conn, holder))
    }

    async fn count_purgeable(&self, periods: &Periods, cursor: i64, rows: u32) -> Result<Counted> {
        act!(self, conn => purge::count_purgeable(&mut conn, periods, cursor, rows))
    }

    async fn count_expired(&self, quarantined: Option<Duration>) -> Result<ExpiredCount> {
        act!(self, conn => purge::count_expired(&mut conn, quarantined))
    }

    fn marks_first(&self) -> bool {
        true
    }
}
