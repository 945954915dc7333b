//! The transaction of a transactional handler: its writes and `done` commit together, or not at all.
//!
//! A handler holds the only writer while it runs. The order is: BEGIN IMMEDIATE, a savepoint, the handler, the
//! settlement fenced by the attempt, the renewals of other claims that were recorded in the meantime, COMMIT. A
//! rollback goes back to the savepoint, so that the lock is not released before those renewals are written. In every
//! case, even if the future is dropped, the writer is returned without an open transaction. The reply to COMMIT cannot
//! be lost: it is a call within the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection};
use diesel::{RunQueryDsl, SqliteConnection};
use diesel_async::{AsyncConnection, TransactionManager};

use super::clock;
use super::conn_queue::{ConnQueue, TO_WRITE, WriterTurn, transaction, within};
use super::connect::AsyncSqliteConnection;
use super::deferred_renewals::DeferredRenewals;
use super::errors::{database, kind};
use super::statement::statements;
use super::{process, upkeep};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction, Undo};
use crate::types::{Error, Kind, Result};

/// If the writer was held for longer than this, the processors' leases are extended.
const EXTEND_LEASES_AFTER: Duration = Duration::from_secs(1);

statements! {
    /// Whether the attempt is current, and whether the delivery is done.
    ReadBackRow("
        SELECT attempts = :attempt, status = 2 FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    -> (bool, bool) { attempt: i32, message_seq: i64, handler_id: i16 }
}

/// Reads the result of a transaction in doubt. There are none in SQLite, but the row always has the result.
pub(super) fn read_back(conn: &mut SqliteConnection, claim: ClaimId) -> Result<ReadBack> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    let rows = ReadBackRow { attempt, message_seq, handler_id }.load::<(bool, bool)>(conn);
    Ok(match rows.map_err(database("cannot read back a delivery"))?.as_slice() {
        [(true, true), ..] => ReadBack::Committed,
        [(true, false), ..] => ReadBack::NotCommitted,
        [(false, _), ..] | [] => ReadBack::ClaimLost,
    })
}

/// The writer with an open transaction, held by handlers. Dropping it ends the transaction. Public in a private module:
/// the type of a public trait, but it cannot be named outside the crate.
#[allow(unreachable_pub, missing_debug_implementations)]
pub struct SqliteTransaction {
    /// `None` after the transaction has ended.
    turn: Option<WriterTurn>,
    writer: Arc<ConnQueue>,
    renewals: Arc<DeferredRenewals>,
    since: Since,
    /// A savepoint of a shared transaction is set, so the next one has to release it first.
    has_savepoint: bool,
}

/// The start of the transaction, by both clocks.
#[derive(Clone, Copy)]
struct Since {
    stamp: i64,
    instant: Instant,
}

/// How a transaction ends.
enum Ending {
    /// Settles these claims as done, and commits.
    Settle(Vec<ClaimId>),
    /// Undoes the handlers' writes.
    RollBack,
}

impl SqliteTransaction {
    /// Runs on the store's thread: a cancelled caller leaves no transaction open, and waits for nothing.
    pub(super) async fn begin(writer: &Arc<ConnQueue>, renewals: &Arc<DeferredRenewals>) -> Result<Self> {
        let turn = writer.turn().await?;
        let since = Since { stamp: i64::MAX, instant: Instant::now() };
        let (writer, renewals) = (Arc::clone(writer), Arc::clone(renewals));
        let mut lent = Self { turn: Some(turn), writer, renewals, since, has_savepoint: false };
        let beginning = lent.writer.reactor().clone().spawn(async move {
            let Some(conn) = lent.turn.as_deref_mut() else { return Err(closed()) };
            let busy_timeout = lent.writer.busy_timeout();
            let begun = conn.spawn_blocking(move |conn| {
                // Diesel must know of this transaction, so that nested ones become savepoints.
                within(busy_timeout, || AnsiTransactionManager::begin_transaction_sql(conn, TO_WRITE))?;
                let since = Since { stamp: clock::now(conn)?, instant: Instant::now() };
                conn.batch_execute("SAVEPOINT wharf_handler; SAVEPOINT wharf_mark")?;
                Ok(since)
            });
            lent.since = begun.await.map_err(database("cannot begin a handler's transaction"))?;
            lent.renewals.open();
            Ok(lent)
        });
        beginning.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Returns `None` if it was rolled back.
    async fn end(&mut self, end: Ending) -> Option<Transacted> {
        match self.end_in_background(end) {
            Some(ending) => ending.await.unwrap_or_else(|_| Some(Transacted::Failed(closed()))),
            None => Some(Transacted::Failed(closed())),
        }
    }

    /// Runs on the store's thread: the turn ends with the transaction, not when the handler's runtime shuts down.
    fn end_in_background(&mut self, end: Ending) -> Option<tokio::task::JoinHandle<Option<Transacted>>> {
        let mut turn = self.turn.take()?;
        let (renewals, since, busy_timeout) = (Arc::clone(&self.renewals), self.since, self.writer.busy_timeout());
        Some(self.writer.reactor().spawn(async move {
            let renewals = renewals.close();
            let ended = turn.spawn_blocking(move |conn| Ok(finish(conn, &end, &renewals, since, busy_timeout))).await;
            // A handler that was stopped in a nested transaction has left the nesting in diesel's state.
            let status = <AsyncSqliteConnection as AsyncConnection>::TransactionManager::transaction_manager_status_mut(
                &mut turn,
            );
            *status = Default::default();
            drop(turn);
            ended.unwrap_or_else(|_| Some(Transacted::Failed(closed())))
        }))
    }
}

impl Transaction for SqliteTransaction {
    type Connection = AsyncSqliteConnection;

    fn is_open(&self) -> bool {
        self.turn.is_some()
    }

    fn conn(&mut self) -> Result<&mut AsyncSqliteConnection> {
        self.turn.as_deref_mut().ok_or_else(closed)
    }

    async fn savepoint(&mut self) -> Result<()> {
        let has_savepoint = std::mem::replace(&mut self.has_savepoint, true);
        let set = self.conn()?.spawn_blocking(move |conn| {
            if has_savepoint {
                conn.batch_execute("RELEASE wharf_delivery")?;
            }
            conn.batch_execute("SAVEPOINT wharf_delivery")
        });
        set.await.map_err(database("cannot set a savepoint in a handler's transaction"))
    }

    async fn check(&mut self) -> Result<()> {
        self.savepoint().await
    }

    /// A statement that ran when the handler was stopped ended when its future was dropped.
    async fn roll_back_to_savepoint(&mut self, _undo: Undo) -> Result<()> {
        let conn = self.conn()?;
        let rolled_back = conn.spawn_blocking(|conn| {
            // A handler that was stopped in a nested transaction has left the nesting in diesel's state: only this
            // transaction is open.
            *<AnsiTransactionManager as diesel::connection::TransactionManager<SqliteConnection>>::transaction_manager_status_mut(
                conn,
            ) = Default::default();
            AnsiTransactionManager::begin_transaction_sql(conn, "ROLLBACK TO wharf_delivery")
        });
        rolled_back.await.map_err(database("cannot roll back to a savepoint in a handler's transaction"))
    }

    /// The next transaction is never begun here: the writer goes to the first in the queue.
    async fn commit(&mut self, claims: &[ClaimId], _then: Then) -> Transacted {
        let settled = self.end(Ending::Settle(claims.to_vec())).await;
        settled.unwrap_or_else(|| Transacted::Failed(Error::bug("a transaction was rolled back instead of committed")))
    }

    async fn roll_back(mut self) -> Result<()> {
        match self.end(Ending::RollBack).await {
            Some(Transacted::Failed(error)) => Err(error),
            Some(_) | None => Ok(()),
        }
    }

    /// A statement that ran when the handler was stopped ended when its future was dropped.
    async fn abandon(mut self) {
        let _ = self.end(Ending::RollBack).await;
    }
}

impl Drop for SqliteTransaction {
    fn drop(&mut self) {
        drop(self.end_in_background(Ending::RollBack));
    }
}

fn closed() -> Error {
    Error::stopped("the store was closed while a handler ran")
}

/// Ends the transaction. `None` means that it was rolled back as requested.
fn finish(
    conn: &mut SqliteConnection,
    end: &Ending,
    renewals: &[(ClaimId, Duration)],
    since: Since,
    busy_timeout: Duration,
) -> Option<Transacted> {
    let settled = match end {
        Ending::Settle(claims) => settle(conn, claims, renewals, since).map_err(Some),
        Ending::RollBack => Err(None),
    };
    match settled {
        Ok(()) => Some(Transacted::Committed),
        Err(ended) => {
            roll_back(conn, renewals, since, busy_timeout);
            ended
        }
    }
}

/// Settles and commits. After an error the caller rolls back.
fn settle(
    conn: &mut SqliteConnection,
    claims: &[ClaimId],
    renewals: &[(ClaimId, Duration)],
    since: Since,
) -> std::result::Result<(), Transacted> {
    // BEGIN fails inside a transaction. If it succeeds, the handler's transaction has ended: SQLite ends it by itself,
    // for example when the disk is full, and later writes of the handler would be committed on their own. A handler, or
    // a savepoint, may have begun another transaction since: that one does not have the savepoint `wharf_mark`.
    if conn.batch_execute("BEGIN").is_ok() || conn.batch_execute("RELEASE wharf_mark").is_err() {
        return Err(Transacted::Refused("the handler's transaction ended before the handler returned".to_owned()));
    }
    let failed = |error| Transacted::Failed(database("cannot settle in a handler's transaction")(error));
    let now = clock::now(conn).map_err(failed)?;
    for claim in claims {
        if process::done(conn, *claim, now).map_err(failed)? == 0 {
            return Err(Transacted::ClaimLost);
        }
    }
    renew(conn, renewals, since).map_err(Transacted::Failed)?;
    conn.batch_execute("COMMIT").map_err(|error| match kind(&error) {
        // A deferred constraint.
        Kind::Data | Kind::Server => Transacted::Refused(format!("{:#}", database("cannot commit")(error))),
        Kind::Bug
        | Kind::Configuration
        | Kind::Schema
        | Kind::Connection
        | Kind::Passing
        | Kind::Refused
        | Kind::Stopped => failed(error),
    })
}

/// Undoes the handler's work, and writes the recorded renewals without releasing the lock.
fn roll_back(conn: &mut SqliteConnection, renewals: &[(ClaimId, Duration)], since: Since, busy_timeout: Duration) {
    let kept = conn
        .batch_execute("ROLLBACK TO wharf_handler")
        .map_err(database("cannot roll back"))
        .and_then(|()| renew(conn, renewals, since))
        .and_then(|()| conn.batch_execute("COMMIT").map_err(database("cannot commit")));
    if kept.is_err() {
        let _ = conn.batch_execute("ROLLBACK");
        // SQLite has rolled back by itself and released the lock; the renewals are written as soon as possible.
        if !renewals.is_empty() {
            let _ = transaction(conn, TO_WRITE, busy_timeout, |conn, _| renew(conn, renewals, since));
        }
    }
}

/// Writes what could not be written while a handler held the writer: renewals of claims, and of the leases of
/// processors.
fn renew(conn: &mut SqliteConnection, renewals: &[(ClaimId, Duration)], since: Since) -> Result<()> {
    if !renewals.is_empty() {
        process::renew(conn, since.instant, renewals)?;
    }
    let lent_for = since.instant.elapsed();
    if lent_for >= EXTEND_LEASES_AFTER {
        upkeep::prolong(conn, since.stamp, lent_for).map_err(database("cannot extend the leases of processors"))?;
    }
    Ok(())
}
