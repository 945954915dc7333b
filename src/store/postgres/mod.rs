//! The PostgreSQL store: production, any number of processes, version 14 and newer, also through PgBouncer in transaction mode.
//!
//! One file a stage. Each act takes a connection from the pool and gives it back; nobody holds one while waiting for another, so a
//! pool of one works. Renewal has a connection of its own, because claims must live while every other connection is busy.

mod accept;
mod accept_in;
mod breaker;
mod claim;
mod connect;
mod errors;
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

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use connect::PostgresOptions;

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::deadpool::{Object, Pool};
use tokio::runtime::Handle;

use super::ledger::{IngestReport, Ledger, LedgerReport, LedgerRow, Opening, Reader, Stopping};
use super::purging::{Counted, Periods, PurgeStep, Purging, Stepped};
use super::reactor::Reactor;
use super::seam::{
    AcceptBatch, Accepted, Answers, Backlog, ClaimId, ClaimRequest, Claims, Enrolment, HandlerIds, HeldBack, Lost,
    NewMessage, PoolStatus, Renewal, Seam, Settlement, Settler, UnknownHandler, WantedHandler,
};
use super::transaction::ReadBack;
use super::version::{Migration, SchemaRow};
use super::{Backend, Store};
use crate::types::{Error, Kind, Result};
use connect::Connector;
use transact::{Cancelling, PostgresTransaction};

/// PostgreSQL 14 or newer.
pub struct Postgres {
    pool: Pool<AsyncPgConnection>,
    /// One connection that only renewal uses.
    renewal: Pool<AsyncPgConnection>,
    connector: Connector,
    target: String,
    /// Where the inbox is. Known once handlers are registered.
    schema: OnceLock<String>,
    pool_size: usize,
    /// How long an act may take at the very most: the server ends statements earlier.
    patience: Duration,
    /// Last: the pools' connections are driven by it.
    reactor: Reactor,
}

impl Store<Postgres> {
    /// Connects with the default options. The URL is libpq's: `postgres://user:password@host:5432/database?sslmode=verify-full`. It may
    /// name several hosts (`host1,host2`, with `target_session_attrs=read-write`: the one that can be written to), a client certificate (`sslcert`, `sslkey`), and a
    /// password file (`passfile`). What comes from a file is read anew for each connection.
    ///
    /// # Errors
    /// When the URL cannot be used or the database does not answer.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(url, PostgresOptions::default()).await
    }

    /// Connects with options of your own.
    ///
    /// # Errors
    /// When the URL or an option cannot be used, the database does not answer, or a setting of the session, behind a pooler that of the
    /// role, is one that the engine cannot work with.
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self> {
        if options.pool_size == 0 {
            return Err(Error::configuration("pool_size is at least 1"));
        }
        Self::open(Connector::new(url, &options)?, &options).await
    }

    async fn open(connector: Connector, options: &PostgresOptions) -> Result<Self> {
        let reactor = Reactor::start()?;
        let backend = Postgres {
            pool: connector.pool(options.pool_size, reactor.handle())?,
            renewal: connector.pool(1, reactor.handle())?,
            target: connector.target(),
            schema: OnceLock::new(),
            connector,
            pool_size: options.pool_size,
            patience: options.statement_timeout + options.connect_timeout,
            reactor,
        };
        connect::verify(&mut *backend.conn().await?).await?;
        Ok(Self::new(backend))
    }
}

/// Runs a statement file's act on a connection, within a time that only a database that will never answer can exceed: a proxy that keeps the
/// socket alive for a dead server, say. The connection is closed then, never reused, and what became of the act is not known. The error of
/// an act that is `judged` says whether the connection was lost with it.
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
            // What is lost is not used again; neither is a session with a server that is not the primary any more.
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
    fn no_answer(&self, patience: Duration) -> Error {
        let patience = humantime::format_duration(patience);
        Error::new(Kind::Connection, format!("no answer from {} within {patience}", self.target))
    }

    async fn conn(&self) -> Result<Object<AsyncPgConnection>> {
        connect::get(&self.pool, &self.target).await
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("target", &self.target)
            .field("pool_size", &self.pool_size)
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
        // However long it takes: a migration of a large table is not to be cut off.
        migrate::migrate(&mut *self.conn().await?).await
    }

    async fn newest_migration(&self) -> Result<Option<SchemaRow>> {
        act!(self, conn => migrate::newest(&mut conn))
    }

    async fn register(&self, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
        act!(self, conn => async {
            let ids = register::register(&mut conn, wanted).await?;
            let schema = register::schema(&mut conn).await?;
            // It is the same each time.
            self.schema.get_or_init(|| schema);
            Result::<_, Error>::Ok(ids)
        })
    }

    async fn accept_in(&self, conn: &mut AsyncPgConnection, batches: Vec<Vec<NewMessage>>) -> Result<Vec<Accepted>> {
        let schema = self
            .schema
            .get()
            .ok_or_else(|| Error::bug("messages were accepted before the handlers were registered"))?;
        // Not one of the store's: how long it may take is up to the caller.
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

    async fn settle(&self, by: Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
        act!(self, judged conn => process::settle(&mut conn, by, settlements))
    }

    async fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32) -> Result<()> {
        act!(self, conn => process::release_handed_over(&mut conn, deliveries, processor))
    }

    async fn renew(&self, processor: i32, claims: &[ClaimId], lease: Duration) -> Result<Renewal> {
        // A connection that does not answer is closed early enough to try a fresh one before the lease ends.
        let patience = self.patience.min(lease / 4);
        act!(self, &self.renewal, within patience, conn => process::renew(&mut conn, processor, claims, lease))
    }

    async fn begin(&self, processor: i32) -> Result<PostgresTransaction> {
        let cancelling = Cancelling { tls: self.connector.tls(), reactor: self.reactor.handle().clone() };
        PostgresTransaction::begin(self.conn().await?, cancelling, self.patience, processor).await
    }

    async fn read_back(&self, claim: ClaimId) -> Result<ReadBack> {
        act!(self, conn => transact::read_back(&mut conn, claim))
    }

    async fn enroll(&self, processor: &Enrolment) -> Result<(i32, HeldBack)> {
        act!(self, conn => upkeep::enroll(&mut conn, processor))
    }

    async fn keep_alive(&self, id: i32, processor: &Enrolment) -> Result<HeldBack> {
        act!(self, conn => upkeep::keep_alive(&mut conn, id, processor))
    }

    async fn withdraw(&self, id: i32) -> Result<()> {
        act!(self, conn => upkeep::withdraw(&mut conn, id))
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
        self.pool_size.saturating_sub(2).max(1)
    }
}

impl Ledger for Postgres {
    async fn ledger(&self, reader: &Reader, partitions: &[(Arc<str>, i32)]) -> Result<Vec<Option<LedgerRow>>> {
        act!(self, conn => ledger::read(&mut conn, reader, partitions))
    }

    async fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> Result<()> {
        act!(self, conn => ledger::open(&mut conn, reader, openings))
    }

    async fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> Result<()> {
        act!(self, conn => ledger::stop(&mut conn, reader, stops))
    }

    async fn report_ingest(&self, report: &IngestReport) -> Result<()> {
        act!(self, conn => ingest::report(&mut conn, report))
    }

    async fn end_ingest(&self, group: &str, name: &str) -> Result<()> {
        act!(self, conn => ingest::end(&mut conn, group, name))
    }

    async fn ledger_report(&self, group: &str) -> Result<LedgerReport> {
        // However long it takes: it reads every message.
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

    async fn count_forgettable(&self) -> Result<u64> {
        act!(self, conn => purge::count_forgettable(&mut conn))
    }

    fn marks_first(&self) -> bool {
        true
    }
}
