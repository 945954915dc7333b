//! A transactional handler's transaction: its writes and `done` commit together, or not at all.
//!
//! The handler has the only writer while it runs. Order: BEGIN IMMEDIATE, a savepoint, the handler, the settlement fenced by the attempt,
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
use super::line::{Line, TO_WRITE, Turn, transaction, within};
use super::noted::Noted;
use super::statement::statements;
use super::{process, upkeep};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Transacted, TxWork, WorkEnd};
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

pub(super) async fn transact(
    writer: &Arc<Line>,
    noted: &Arc<Noted>,
    claim: ClaimId,
    work: TxWork<AsyncSqliteConnection>,
) -> Transacted {
    let mut lent = match Lent::begin(writer, noted).await {
        Ok(lent) => lent,
        Err(error) => return Transacted::Failed(error),
    };
    let Some(conn) = lent.turn.as_deref_mut() else { return Transacted::Failed(closed()) };
    match work(conn).await {
        WorkEnd::Commit => lent.end(End::Settle(claim)).await,
        // A statement that was under way when the handler was stopped has ended when its future was dropped.
        WorkEnd::RollBack | WorkEnd::Abandon => lent.end(End::RollBack).await,
    }
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

/// The writer, lent to a handler with a transaction open. Ends it when dropped.
struct Lent {
    turn: Option<Turn>,
    writer: Arc<Line>,
    noted: Arc<Noted>,
    since: Since,
}

/// When it was lent, by both clocks.
#[derive(Clone, Copy)]
struct Since {
    stamp: i64,
    instant: Instant,
}

/// How a transaction is to end.
enum End {
    Settle(ClaimId),
    RollBack,
}

impl Lent {
    /// On the store's thread: who goes away meanwhile leaves nothing open, and waits for nothing.
    async fn begin(writer: &Arc<Line>, noted: &Arc<Noted>) -> Result<Self> {
        let turn = writer.turn().await?;
        let since = Since { stamp: i64::MAX, instant: Instant::now() };
        let mut lent = Self { turn: Some(turn), writer: Arc::clone(writer), noted: Arc::clone(noted), since };
        let beginning = writer.reactor().spawn(async move {
            let Some(conn) = lent.turn.as_deref_mut() else { return Err(closed()) };
            let busy_timeout = lent.writer.busy_timeout();
            let begun = conn.spawn_blocking(move |conn| {
                // Nested ones become savepoints: diesel has to know of this one.
                within(busy_timeout, || AnsiTransactionManager::begin_transaction_sql(conn, TO_WRITE))?;
                let since = Since { stamp: clock::now(conn)?, instant: Instant::now() };
                conn.batch_execute("SAVEPOINT wharf_handler")?;
                Ok(since)
            });
            lent.since = begun.await.map_err(database("cannot begin a handler's transaction"))?;
            lent.noted.open();
            Ok(lent)
        });
        beginning.await.unwrap_or_else(|_| Err(closed()))
    }

    async fn end(mut self, end: End) -> Transacted {
        match self.end_in_background(end) {
            Some(ending) => ending.await.unwrap_or_else(|_| Transacted::Failed(closed())),
            None => Transacted::Failed(closed()),
        }
    }

    /// On the store's thread: the turn is over when the transaction is, not when the handler's runtime goes away.
    fn end_in_background(&mut self, end: End) -> Option<tokio::task::JoinHandle<Transacted>> {
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
            ended.unwrap_or_else(|_| Transacted::Failed(closed()))
        }))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        drop(self.end_in_background(End::RollBack));
    }
}

fn closed() -> Error {
    Error::stopped("the store was closed under a handler")
}

fn finish(
    conn: &mut SqliteConnection,
    end: &End,
    noted: &[(ClaimId, Duration)],
    since: Since,
    busy_timeout: Duration,
) -> Transacted {
    let ended = match end {
        End::Settle(claim) => settle(conn, *claim, noted, since),
        End::RollBack => Err(Transacted::RolledBack),
    };
    match ended {
        Ok(()) => Transacted::Committed,
        Err(transacted) => {
            roll_back(conn, noted, since, busy_timeout);
            transacted
        }
    }
}

fn settle(
    conn: &mut SqliteConnection,
    claim: ClaimId,
    noted: &[(ClaimId, Duration)],
    since: Since,
) -> std::result::Result<(), Transacted> {
    // A transaction cannot be begun within one: if it can, the handler's is gone. SQLite ends it by itself when the disk is full, say,
    // and what the handler wrote after that would stand alone.
    if conn.batch_execute("BEGIN").is_ok() {
        return Err(Transacted::Refused("the handler's transaction had ended before the handler did".to_owned()));
    }
    let failed = |error| Transacted::Failed(database("cannot settle in a handler's transaction")(error));
    let now = clock::now(conn).map_err(failed)?;
    if process::done(conn, claim, now).map_err(failed)? == 0 {
        return Err(Transacted::ClaimLost);
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
