//! The SQLite store: embedded, in a file or in memory, for one host. Any number of processes of that host may open the
//! file.
//!
//! There is one file per stage, with plain functions on a connection that run on the store's threads. All writes go
//! through one connection, in turns (`conn_queue.rs`): SQLite has one writer anyway, and this way the queue is in order
//! and bounded. Reads have their own connection, because WAL allows reads during a write. The single write lock
//! replaces the row locks of PostgreSQL.
//!
//! SQLite's lock on the file separates processes; claims, leases and the fence are the same as in PostgreSQL.

mod accept;
mod accept_in;
mod breaker;
mod clock;
mod conn_queue;
mod connect;
mod deferred_renewals;
mod errors;
mod fair;
mod ingest;
mod ledger;
mod migrate;
mod operate;
mod ordered;
mod outbound;
mod outbox;
mod poison;
mod process;
mod purge;
mod quarantine;
mod rate;
mod register;
mod statement;
#[cfg(feature = "testing")]
mod testing;
mod transact;
mod upkeep;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use connect::{AsyncSqliteConnection, SqliteOptions};

use diesel::SqliteConnection;
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
use crate::types::{Error, Result};
use conn_queue::{ConnQueue, TO_READ, TO_WRITE};
use connect::Location;
use deferred_renewals::DeferredRenewals;
use transact::SqliteTransaction;

/// SQLite, built in: an inbox in its own file (`Store::open`), or in memory for tests ([`Store::in_memory`]).
///
/// It has the same semantics as [`Postgres`](crate::Postgres) and is for one host: several processes may open the file,
/// but it must not be on a network file system (SQLite's locks do not work there), and work is not distributed over
/// hosts. There is one writer: accepting, claiming, settling and transactional handlers take turns. A transactional
/// handler ([`tx_handler`](crate::tx_handler), with an [`AsyncSqliteConnection`](crate::store::AsyncSqliteConnection))
/// holds the writer **from its beginning to its end**:
///
/// - Keep it short, and call nothing slow in it. One runs at a time, whatever the concurrency. While it runs nothing is
///   accepted, claimed or settled; an operation that waits longer than
///   [`SqliteOptions::busy_timeout`](crate::store::SqliteOptions::busy_timeout) fails with a transient error and is
///   retried. Claims of the same process are kept. If several processes share the file and a handler takes longer than
///   the lease, the other processes stop their running handlers, which run again later.
/// - [`Inbox::accept`](crate::Inbox::accept) inside it cannot succeed, because it waits for the writer that the handler
///   holds: it fails after [`Limits::accept_patience`](crate::Limits::accept_patience).
/// - A statement that fails is undone alone, and the transaction continues: a handler that ignores the error commits
///   the rest.
/// - Foreign keys are enforced.
pub struct Sqlite {
    writer: Arc<ConnQueue>,
    /// Renewals to write at the end of a transactional handler.
    renewals: Arc<DeferredRenewals>,
    /// `None` in memory, where another connection would be another database.
    reader: Option<ConnQueue>,
    place: Location,
    options: SqliteOptions,
    /// Declared last, so that it is dropped after the connections: it runs their threads.
    reactor: Reactor,
}

impl Store<Sqlite> {
    /// Opens the file with the default options, and creates it if it does not exist. The directory must exist. SQLite
    /// keeps two files beside the database (`-wal`, `-shm`), which belong to it: copy all of them, or use `VACUUM
    /// INTO`.
    ///
    /// ```
    /// # use wharf::{Sqlite, Store};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// let store = Store::<Sqlite>::open(folder.path().join("inbox.db")).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the file cannot be opened or written, or is not a SQLite database.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, SqliteOptions::default()).await
    }

    /// Opens the file with the given options.
    ///
    /// ```
    /// # use wharf::{Sqlite, Store};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// use std::time::Duration;
    /// use wharf::store::SqliteOptions;
    ///
    /// let options = SqliteOptions::default().busy_timeout(Duration::from_secs(10));
    /// let store = Store::<Sqlite>::open_with(folder.path().join("inbox.db"), options).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As `Store::open`; and when an option is invalid.
    pub async fn open_with(path: impl AsRef<Path>, options: SqliteOptions) -> Result<Self> {
        Self::open_at(Location::file(path.as_ref())?, options).await
    }

    /// Opens a store in memory, for tests: its data is lost when its last clone is dropped.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let store = wharf::Store::<wharf::Sqlite>::in_memory().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the store's thread cannot be started.
    pub async fn in_memory() -> Result<Self> {
        Self::open_at(Location::Memory, SqliteOptions::default()).await
    }

    async fn open_at(place: Location, options: SqliteOptions) -> Result<Self> {
        if options.busy_timeout.is_zero() {
            return Err(Error::configuration("busy_timeout must not be zero"));
        }
        let reactor = Reactor::start()?;
        let queue = |conn, begin| ConnQueue::new(conn, begin, options.busy_timeout, reactor.handle().clone());
        let writer = queue(connect::open_writer(&place, &options, reactor.handle()).await?, TO_WRITE);
        let reader = match place {
            Location::File(_) => Some(queue(connect::open_reader(&place, &options, reactor.handle()).await?, TO_READ)),
            Location::Memory => None,
        };
        let (writer, renewals) = (Arc::new(writer), Arc::new(DeferredRenewals::new()));
        Ok(Self::new(Sqlite { writer, renewals, reader, place, options, reactor }))
    }
}

impl Sqlite {
    /// Runs an operation that writes.
    async fn write<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut SqliteConnection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer.act(move |conn, _| act(conn)).await
    }

    /// Runs an operation that only reads.
    async fn read<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut SqliteConnection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.reader.as_ref().unwrap_or(&self.writer).act(move |conn, _| act(conn)).await
    }
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Backend for Sqlite {}

impl Seam for Sqlite {
    type Connection = AsyncSqliteConnection;
    type Transaction = SqliteTransaction;

    const MIGRATIONS: &'static [Migration] = migrate::MIGRATIONS;
    const IS_SETTLED_IN_SQL: bool = false;

    async fn migrate(&self) -> Result<()> {
        self.write(migrate::migrate).await
    }

    async fn newest_migration(&self) -> Result<Option<SchemaRow>> {
        self.read(migrate::newest).await
    }

    async fn register(&self, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
        let wanted = wanted.to_vec();
        self.write(move |conn| register::register(conn, &wanted)).await
    }

    async fn accept(&self, batch: &Arc<AcceptBatch>) -> Result<Option<Answers>> {
        let batch = Arc::clone(batch);
        self.writer.act(move |conn, sent_at| accept::accept(conn, sent_at, &batch)).await
    }

    async fn accept_in(
        &self,
        conn: &mut AsyncSqliteConnection,
        batches: Vec<Vec<NewMessage>>,
    ) -> Result<Vec<Accepted>> {
        accept_in::accept_in(conn, batches).await
    }

    async fn backlog(&self, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
        let handler_ids = handler_ids.to_vec();
        self.read(move |conn| upkeep::backlog(conn, &handler_ids, count_max)).await
    }

    async fn refuses(&self, message: &NewMessage) -> Result<bool> {
        let message = message.clone();
        self.write(move |conn| quarantine::refuses(conn, &message)).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claims> {
        let request = request.clone();
        self.writer.act(move |conn, sent_at| process::claim(conn, sent_at, &request)).await
    }

    async fn payloads(&self, withheld: &Withheld) -> Result<Payloads> {
        let withheld = withheld.clone();
        self.read(move |conn| process::payloads(conn, &withheld)).await
    }

    // A single file has no replica that could be promoted without the last claims, so the attempt alone fences
    // settlements and renewals. Only `release_handed_over`, which has no attempt, is fenced by the processor.
    async fn settle(&self, by: &Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
        let (by, settlements) = (by.clone(), settlements.to_vec());
        self.write(move |conn| process::settle(conn, &by, &settlements)).await
    }

    async fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32) -> Result<()> {
        let deliveries = deliveries.to_vec();
        self.write(move |conn| process::release_handed_over(conn, &deliveries, processor)).await
    }

    async fn renew(&self, _processor: i32, claims: &[ClaimId], lease: Duration) -> Result<Renewal> {
        loop {
            let sent_at = Instant::now();
            if self.renewals.note(claims, lease) {
                return Ok(Renewal { sent_at, renewed: claims.to_vec(), lost: Vec::new() });
            }
            tokio::select! {
                turn = self.writer.turn() => {
                    let claims: Vec<(ClaimId, Duration)> = claims.iter().map(|claim| (*claim, lease)).collect();
                    let act = move |conn: &mut SqliteConnection, sent_at| process::renew(conn, sent_at, &claims);
                    return self.writer.act_in(turn?, act).await;
                }
                () = self.renewals.opened() => {}
            }
        }
    }

    async fn begin(&self, _processor: i32) -> Result<SqliteTransaction> {
        SqliteTransaction::begin(&self.writer, &self.renewals).await
    }

    async fn read_back(&self, claim: ClaimId) -> Result<ReadBack> {
        self.read(move |conn| transact::read_back(conn, claim)).await
    }

    async fn register_processor(&self, processor: &ProcessorInfo) -> Result<(i32, BlockedHandlers)> {
        let processor = processor.clone();
        self.write(move |conn| upkeep::register_processor(conn, &processor)).await
    }

    async fn heartbeat(&self, id: i32, processor: &ProcessorInfo) -> Result<BlockedHandlers> {
        let processor = processor.clone();
        self.write(move |conn| upkeep::heartbeat(conn, id, &processor)).await
    }

    async fn remove_processor(&self, id: i32) -> Result<()> {
        self.write(move |conn| upkeep::remove_processor(conn, id)).await
    }

    async fn check_unknown(&self, processor: i32, grace: Duration, limit: u32) -> Result<Vec<UnknownHandler>> {
        self.write(move |conn| upkeep::check_unknown(conn, processor, grace, limit)).await
    }

    async fn expire(&self, handler_ids: &[i16], older_than: Duration, limit: u32) -> Result<u64> {
        let handler_ids = handler_ids.to_vec();
        self.write(move |conn| upkeep::expire(conn, &handler_ids, older_than, limit)).await
    }

    fn reactor(&self) -> &Handle {
        self.reactor.handle()
    }

    fn pool_status(&self) -> PoolStatus {
        self.writer.status()
    }

    fn transactions_max(&self) -> usize {
        1
    }
}

impl Ledger for Sqlite {
    async fn ledger(&self, reader: &Reader, partitions: &[(Arc<str>, i32)]) -> Result<Vec<Option<LedgerRow>>> {
        let (reader, partitions) = (reader.clone(), partitions.to_vec());
        self.read(move |conn| ledger::read(conn, &reader, &partitions)).await
    }

    async fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> Result<Vec<bool>> {
        let (reader, openings) = (reader.clone(), openings.to_vec());
        self.write(move |conn| ledger::open(conn, &reader, &openings)).await
    }

    async fn has_ledger(&self, reader: &Reader, topics: &[Arc<str>]) -> Result<Vec<bool>> {
        let (reader, topics) = (reader.clone(), topics.to_vec());
        self.read(move |conn| ledger::has(conn, &reader, &topics)).await
    }

    async fn begin_topic(&self, reader: &Reader, openings: &[Opening]) -> Result<()> {
        let (reader, openings) = (reader.clone(), openings.to_vec());
        self.write(move |conn| ledger::begin(conn, &reader, &openings)).await
    }

    async fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> Result<()> {
        let (reader, stops) = (reader.clone(), stops.to_vec());
        self.write(move |conn| ledger::stop(conn, &reader, &stops)).await
    }

    async fn report_ingest(&self, report: &IngestReport) -> Result<()> {
        let report = report.clone();
        self.write(move |conn| ingest::report(conn, &report)).await
    }

    async fn end_ingest(&self, group: &str, source: &str, name: &str) -> Result<()> {
        let (group, source, name) = (group.to_owned(), source.to_owned(), name.to_owned());
        self.write(move |conn| ingest::end(conn, &group, &source, &name)).await
    }

    async fn ledger_report(&self, group: &str) -> Result<LedgerReport> {
        let group = group.to_owned();
        let act = move |conn: &mut SqliteConnection, _: Instant| ledger::report(conn, &group);
        match &self.place {
            Location::Memory => self.writer.act(act).await,
            Location::File(_) => {
                // It reads every message, so it uses its own connection: no other operation waits for it.
                let conn = connect::open_reader(&self.place, &self.options, self.reactor.handle()).await?;
                ConnQueue::new(conn, TO_READ, self.options.busy_timeout, self.reactor.handle().clone()).act(act).await
            }
        }
    }
}

impl Purging for Sqlite {
    async fn ids_of_keys(&self, keys: &[String]) -> Result<Vec<Vec<i16>>> {
        let keys = keys.to_vec();
        self.read(move |conn| purge::ids_of_keys(conn, &keys)).await
    }

    async fn purge_step(&self, holder: i64, step: &PurgeStep) -> Result<Stepped> {
        let step = step.clone();
        self.write(move |conn| purge::step(conn, holder, &step)).await
    }

    async fn release_purge(&self, holder: i64) -> Result<()> {
        self.write(move |conn| purge::release(conn, holder)).await
    }

    async fn count_purgeable(&self, periods: &Periods, cursor: i64, rows: u32) -> Result<Counted> {
        let periods = periods.clone();
        self.read(move |conn| purge::count_purgeable(conn, &periods, cursor, rows)).await
    }

    async fn count_expired(&self, quarantined: Option<Duration>) -> Result<ExpiredCount> {
        self.read(move |conn| purge::count_expired(conn, quarantined)).await
    }

    fn marks_first(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
