//! The SQLite store: embedded, in a file or in memory, for one host. Any number of processes of that host may open the file.
//!
//! One file a stage, each of them plain functions on a connection, run on the store's threads. All writes go through one connection, in
//! turns (`line.rs`): SQLite has one writer anyway, and so the waiting is ours, in order and bounded. Reads have a connection of their
//! own, which WAL lets read while another writes. What PostgreSQL does with row locks, the one lock of the writer does here.
//!
//! Other processes are kept apart by SQLite's own lock on the file; claims, leases and the fence are the same as in PostgreSQL.

mod accept;
mod accept_in;
mod breaker;
mod clock;
mod connect;
mod errors;
mod ingest;
mod ledger;
mod line;
mod migrate;
mod noted;
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
use super::purging::{Counted, Periods, PurgeStep, Purging, Stepped};
use super::reactor::Reactor;
use super::seam::{
    AcceptBatch, Accepted, Answers, Backlog, ClaimId, ClaimRequest, Claims, Enrolment, HandlerIds, HeldBack, Lost,
    NewMessage, PoolStatus, Renewal, Seam, Settlement, Settler, UnknownHandler, WantedHandler,
};
use super::transaction::ReadBack;
use super::version::{Migration, SchemaRow};
use super::{Backend, Store};
use crate::types::{Error, Result};
use connect::Location;
use line::{Line, TO_READ, TO_WRITE};
use noted::Noted;
use transact::SqliteTransaction;

/// SQLite, built in: an inbox in a file of its own, or in memory for tests.
///
/// It means the same as [`Postgres`](crate::Postgres) and is for one host: several processes may open the file, but it must not lie on a network file system
/// (SQLite's locks do not work there), and work does not spread over hosts. There is one writer: accepting, claiming, settling and
/// transactional handlers take turns. A transactional handler ([`tx_handler`](crate::tx_handler), with an
/// [`AsyncSqliteConnection`](crate::store::AsyncSqliteConnection)) has the writer **from its beginning to its end**:
///
/// - Keep it short, and call nothing slow in it. One runs at a time, whatever the concurrency. While it runs nothing is accepted, claimed
///   or settled; whoever waits for longer than [`SqliteOptions::busy_timeout`](crate::store::SqliteOptions::busy_timeout) fails with a transient
///   error and is tried again. Claims of the same process are kept. Where several processes share the file, a handler that takes
///   longer than the lease makes the others stop their running handlers, which are run again.
/// - [`Inbox::accept`](crate::Inbox::accept) within it cannot succeed, because it waits for the writer that the handler has: it fails after
///   [`Limits::accept_patience`](crate::Limits::accept_patience).
/// - A statement that fails is undone alone, and the transaction goes on: a handler that swallows its error commits the rest.
/// - Foreign keys are enforced.
pub struct Sqlite {
    writer: Arc<Line>,
    /// Renewals that wait for a transactional handler.
    noted: Arc<Noted>,
    /// `None` in memory, where another connection would be another database.
    reader: Option<Line>,
    place: Location,
    options: SqliteOptions,
    /// Last: the connections' threads are its own.
    reactor: Reactor,
}

impl Store<Sqlite> {
    /// Opens the file, and makes it if there is none, with the default options. The directory must be there; SQLite keeps two files
    /// beside the database (`-wal`, `-shm`), which belong to it: copy all of them, or use `VACUUM INTO`.
    ///
    /// # Errors
    /// When the file cannot be opened or written, or is not a SQLite database.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, SqliteOptions::default()).await
    }

    /// Opens the file with options of your own.
    ///
    /// # Errors
    /// The same as those of `open`.
    pub async fn open_with(path: impl AsRef<Path>, options: SqliteOptions) -> Result<Self> {
        Self::open_at(Location::file(path.as_ref())?, options).await
    }

    /// A store in memory, for tests: it is gone with its last clone.
    ///
    /// # Errors
    /// When the store's thread cannot be started.
    pub async fn in_memory() -> Result<Self> {
        Self::open_at(Location::Memory, SqliteOptions::default()).await
    }

    async fn open_at(place: Location, options: SqliteOptions) -> Result<Self> {
        if options.busy_timeout.is_zero() {
            return Err(Error::configuration("busy_timeout is not zero"));
        }
        let reactor = Reactor::start()?;
        let line = |conn, begin| Line::new(conn, begin, options.busy_timeout, reactor.handle().clone());
        let writer = line(connect::open_writer(&place, &options, reactor.handle()).await?, TO_WRITE);
        let reader = match place {
            Location::File(_) => Some(line(connect::open_reader(&place, &options, reactor.handle()).await?, TO_READ)),
            Location::Memory => None,
        };
        let (writer, noted) = (Arc::new(writer), Arc::new(Noted::new()));
        Ok(Self::new(Sqlite { writer, noted, reader, place, options, reactor }))
    }
}

impl Sqlite {
    /// An act that writes.
    async fn write<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut SqliteConnection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer.act(move |conn, _| act(conn)).await
    }

    /// An act that only reads.
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

    // One file has no replica that could be promoted without the last claims: the attempt alone is the fence, here and in the next two.
    async fn settle(&self, by: Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
        let settlements = settlements.to_vec();
        self.write(move |conn| process::settle(conn, by, &settlements)).await
    }

    async fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32) -> Result<()> {
        let deliveries = deliveries.to_vec();
        self.write(move |conn| process::release_handed_over(conn, &deliveries, processor)).await
    }

    async fn renew(&self, _processor: i32, claims: &[ClaimId], lease: Duration) -> Result<Renewal> {
        loop {
            let sent_at = Instant::now();
            if self.noted.note(claims, lease) {
                return Ok(Renewal { sent_at, renewed: claims.to_vec(), lost: Vec::new() });
            }
            tokio::select! {
                turn = self.writer.turn() => {
                    let claims: Vec<(ClaimId, Duration)> = claims.iter().map(|claim| (*claim, lease)).collect();
                    let act = move |conn: &mut SqliteConnection, sent_at| process::renew(conn, sent_at, &claims);
                    return self.writer.act_in(turn?, act).await;
                }
                () = self.noted.opened() => {}
            }
        }
    }

    async fn begin(&self, _processor: i32) -> Result<SqliteTransaction> {
        SqliteTransaction::begin(&self.writer, &self.noted).await
    }

    async fn read_back(&self, claim: ClaimId) -> Result<ReadBack> {
        self.read(move |conn| transact::read_back(conn, claim)).await
    }

    async fn enroll(&self, processor: &Enrolment) -> Result<(i32, HeldBack)> {
        let processor = processor.clone();
        self.write(move |conn| upkeep::enroll(conn, &processor)).await
    }

    async fn keep_alive(&self, id: i32, processor: &Enrolment) -> Result<HeldBack> {
        let processor = processor.clone();
        self.write(move |conn| upkeep::keep_alive(conn, id, &processor)).await
    }

    async fn withdraw(&self, id: i32) -> Result<()> {
        self.write(move |conn| upkeep::withdraw(conn, id)).await
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

    async fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> Result<()> {
        let (reader, openings) = (reader.clone(), openings.to_vec());
        self.write(move |conn| ledger::open(conn, &reader, &openings)).await
    }

    async fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> Result<()> {
        let (reader, stops) = (reader.clone(), stops.to_vec());
        self.write(move |conn| ledger::stop(conn, &reader, &stops)).await
    }

    async fn report_ingest(&self, report: &IngestReport) -> Result<()> {
        let report = report.clone();
        self.write(move |conn| ingest::report(conn, &report)).await
    }

    async fn end_ingest(&self, group: &str, name: &str) -> Result<()> {
        let (group, name) = (group.to_owned(), name.to_owned());
        self.write(move |conn| ingest::end(conn, &group, &name)).await
    }

    async fn ledger_report(&self, group: &str) -> Result<LedgerReport> {
        let group = group.to_owned();
        let act = move |conn: &mut SqliteConnection, _: Instant| ledger::report(conn, &group);
        match &self.place {
            Location::Memory => self.writer.act(act).await,
            Location::File(_) => {
                // It reads every message: on a connection of its own, so that nobody waits for it.
                let conn = connect::open_reader(&self.place, &self.options, self.reactor.handle()).await?;
                Line::new(conn, TO_READ, self.options.busy_timeout, self.reactor.handle().clone()).act(act).await
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

    async fn count_forgettable(&self) -> Result<u64> {
        self.read(purge::count_forgettable).await
    }

    fn marks_first(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
