//! A transactional handler's transaction: its writes and `done` commit together, or not at all.
//!
//! Handlers have the only writer while they run. Order: BEGIN IMMEDIATE, a savepoint, the handler, the settlement fenced by the attempt,
//! the renewals of other claims that were noted meanwhile, COMMIT. What is rolled back is rolled back to the savepoint, so that the lock is
//! not let go before those renewals are written. Whatever happens, also when the future is dropped, the writer is given back with no
//! transaction open. No answer of COMMIT can be lost: it is a call within the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection};
use diesel::{RunQueryDsl, SqliteConnection};
use diesel_async::{AsyncConnection, TransactionManager};

use super::clock;
use super::connect::AsyncSqliteConnection;
use super::errors::{database, kind};
use super::line::{Line, TO_WRITE, WriterTurn, transaction, within};
use super::noted::Noted;
use super::statement::statements;
use super::{process, upkeep};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction, Undo};
use crate::types::{Error, Kind, Result};

/// Signs of life are prolonged when the writer was away for longer than this.
const NOTICEABLE: Duration = Duration::from_secs(1);

statements! {
    /// Whether the attempt is current, and whether the delivery is done.
    ReadBackRow("
        SELECT attempts = :attempt, status = 2 FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    -> (bool, bool) { attempt: i32, message_seq: i64, handler_id: i16 }
}

/// What became of a transaction in doubt. There is none here, but the row can always tell.
pub(super) fn read_back(conn: &mut SqliteConnection, claim: ClaimId) -> Result<ReadBack> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    let rows = ReadBackRow { attempt, message_seq, handler_id }.load::<(bool, bool)>(conn);
    Ok(match rows.map_err(database("cannot read back a delivery"))?.as_slice() {
        [(true, true), ..] => ReadBack::Committed,
        [(true, false), ..] => ReadBack::NotCommitted,
        [(false, _), ..] | [] => ReadBack::ClaimLost,
    })
}

/// The writer, lent to handlers with a transaction open. Ends it when dropped. Public in a private module: the type of a public trait, but
/// nobody outside can name it.
#[allow(unreachable_pub, missing_debug_implementations)]
pub struct SqliteTransaction {
    turn: Option<WriterTurn>,
    writer: Arc<Line>,
    noted: Arc<Noted>,
    since: Since,
    has_savepoint: bool,
}

/// When it was lent, by both clocks.
#[derive(Clone, Copy)]
struct Since {
    stamp: i64,
    instant: Instant,
}

/// How a transaction is to end.
enum Ending {
    Settle(Vec<ClaimId>),
    RollBack,
}

impl SqliteTransaction {
    /// On the store's thread: who goes away meanwhile leaves nothing open, and waits for nothing.
    pub(super) async fn begin(writer: &Arc<Line>, noted: &Arc<Noted>) -> Result<Self> {
        let turn = writer.turn().await?;
        let since = Since { stamp: i64::MAX, instant: Instant::now() };
        let (writer, noted) = (Arc::clone(writer), Arc::clone(noted));
        let mut lent = Self { turn: Some(turn), writer, noted, since, has_savepoint: false };
        let beginning = lent.writer.reactor().clone().spawn(async move {
            let Some(conn) = lent.turn.as_deref_mut() else { return Err(closed()) };
            let busy_timeout = lent.writer.busy_timeout();
            let begun = conn.spawn_blocking(move |conn| {
                // Nested ones become savepoints: diesel has to know of this one.
                within(busy_timeout, || AnsiTransactionManager::begin_transaction_sql(conn, TO_WRITE))?;
                let since = Since { stamp: clock::now(conn)?, instant: Instant::now() };
                conn.batch_execute("SAVEPOINT wharf_handler; SAVEPOINT wharf_mark")?;
                Ok(since)
            });
            lent.since = begun.await.map_err(database("cannot begin a handler's transaction"))?;
            lent.noted.open();
            Ok(lent)
        });
        beginning.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Nothing when it was rolled back.
    async fn end(&mut self, end: Ending) -> Option<Transacted> {
        match self.end_in_background(end) {
            Some(ending) => ending.await.unwrap_or_else(|_| Some(Transacted::Failed(closed()))),
            None => Some(Transacted::Failed(closed())),
        }
    }

    /// On the store's thread: the turn is over when the transaction is, not when the handler's runtime goes away.
    fn end_in_background(&mut self, end: Ending) -> Option<tokio::task::JoinHandle<Option<Transacted>>> {
        let mut turn = self.turn.take()?;
        let (noted, since, busy_timeout) = (Arc::clone(&self.noted), self.since, self.writer.busy_timeout());
        Some(self.writer.reactor().spawn(async move {
            let noted = noted.close();
            let ended = turn.spawn_blocking(move |conn| Ok(finish(conn, &end, &noted, since, busy_timeout))).await;
            // A handler that was stopped in a nested transaction has left it on diesel's books.
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

    /// A statement that was under way when the handler was stopped has ended when its future was dropped.
    async fn roll_back_to_savepoint(&mut self, _undo: Undo) -> Result<()> {
        let conn = self.conn()?;
        let rolled_back = conn.spawn_blocking(|conn| {
            // A handler that was stopped in a nested transaction has left it on diesel's books: this one transaction is what is open.
            *<AnsiTransactionManager as diesel::connection::TransactionManager<SqliteConnection>>::transaction_manager_status_mut(
                conn,
            ) = Default::default();
            AnsiTransactionManager::begin_transaction_sql(conn, "ROLLBACK TO wharf_delivery")
        });
        rolled_back.await.map_err(database("cannot roll back to a savepoint in a handler's transaction"))
    }

    /// The next transaction is never begun here: the writer is for whoever is first in the line.
    async fn commit(&mut self, claims: &[ClaimId], _then: Then) -> Transacted {
        let settled = self.end(Ending::Settle(claims.to_vec())).await;
        settled
            .unwrap_or_else(|| Transacted::Failed(Error::bug("a transaction was rolled back that was to be committed")))
    }

    async fn roll_back(mut self) -> Result<()> {
        match self.end(Ending::RollBack).await {
            Some(Transacted::Failed(error)) => Err(error),
            Some(_) | None => Ok(()),
        }
    }

    /// A statement that was under way when the handler was stopped has ended when its future was dropped.
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
    Error::stopped("the store was closed under a handler")
}

fn finish(
    conn: &mut SqliteConnection,
    end: &Ending,
    noted: &[(ClaimId, Duration)],
    since: Since,
    busy_timeout: Duration,
) -> Option<Transacted> {
    let settled = match end {
        Ending::Settle(claims) => settle(conn, claims, noted, since).map_err(Some),
        Ending::RollBack => Err(None),
    };
    match settled {
        Ok(()) => Some(Transacted::Committed),
        Err(ended) => {
            roll_back(conn, noted, since, busy_timeout);
            ended
        }
    }
}

fn settle(
    conn: &mut SqliteConnection,
    claims: &[ClaimId],
    noted: &[(ClaimId, Duration)],
    since: Since,
) -> std::result::Result<(), Transacted> {
    // A transaction cannot be begun within one: if it can, the handler's is gone. SQLite ends it by itself when the disk is full, say,
    // and what the handler wrote after that would stand alone. A handler, or a savepoint, may
    // have begun another since: that one does not have the mark.
    if conn.batch_execute("BEGIN").is_ok() || conn.batch_execute("RELEASE wharf_mark").is_err() {
        return Err(Transacted::Refused("the handler's transaction had ended before the handler did".to_owned()));
    }
    let failed = |error| Transacted::Failed(database("cannot settle in a handler's transaction")(error));
    let now = clock::now(conn).map_err(failed)?;
    for claim in claims {
        if process::done(conn, *claim, now).map_err(failed)? == 0 {
            return Err(Transacted::ClaimLost);
        }
    }
    renew(conn, noted, since).map_err(Transacted::Failed)?;
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

/// Undoes what the handler did, and writes what others wait for without letting go of the lock.
fn roll_back(conn: &mut SqliteConnection, noted: &[(ClaimId, Duration)], since: Since, busy_timeout: Duration) {
    let kept = conn
        .batch_execute("ROLLBACK TO wharf_handler")
        .map_err(database("cannot roll back"))
        .and_then(|()| renew(conn, noted, since))
        .and_then(|()| conn.batch_execute("COMMIT").map_err(database("cannot commit")));
    if kept.is_err() {
        let _ = conn.batch_execute("ROLLBACK");
        // SQLite has rolled back by itself and let go; what is left is to be quick.
        if !noted.is_empty() {
            let _ = transaction(conn, TO_WRITE, busy_timeout, |conn, _| renew(conn, noted, since));
        }
    }
}

fn renew(conn: &mut SqliteConnection, noted: &[(ClaimId, Duration)], since: Since) -> Result<()> {
    if !noted.is_empty() {
        process::renew(conn, since.instant, noted)?;
    }
    let lent_for = since.instant.elapsed();
    if lent_for >= NOTICEABLE {
        upkeep::prolong(conn, since.stamp, lent_for).map_err(database("cannot prolong signs of life"))?;
    }
    Ok(())
}
