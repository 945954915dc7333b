//! A transactional handler's transaction: its writes and `done` commit together, or not at all.
//!
//! Order: BEGIN, the handler, the settlement fenced by the attempt, COMMIT. The fence comes last, so the claim can be renewed while
//! the handler runs; a stale run finds its attempt gone and is rolled back. Only a COMMIT that was sent and never answered is in
//! doubt, and then `read_back` asks the row itself. A connection that was stopped midway is closed, never reused.
//!
//! A handler that ends its own transaction is noticed: BEGIN sets a mark that lives exactly as long as the transaction, and the settlement
//! looks for it. What a handler has SET for its session is reset with the COMMIT; a rollback undoes it by itself. Neither takes a round trip.

use std::time::Duration;

use diesel::QueryResult;
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{AnsiTransactionManager, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect::is_alive;
use super::errors::{database, kind};
use super::statement::{only_row, rows, statements};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Transacted, TxWork, WorkEnd};
use crate::types::{Error, Kind};

/// Names its level, whatever the role's default is.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL wharf.run = 'open'";

/// The last two are what the driver has set when it connected.
const COMMIT: &str = "COMMIT; RESET ALL; RESET ROLE; SET TIME ZONE 'UTC'; SET client_encoding TO 'UTF8'";

rows! {
    /// `is_free` is NULL while another transaction holds the row's lock.
    RowInDoubt { is_current: bool, is_done: bool, is_free: Option<bool> }
}

statements! {
    SettleInTransaction("
        UPDATE inbox_delivery
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        WHERE message_seq = :message_seq AND handler_id = :handler_id
          AND CASE WHEN attempts = :attempt AND locked_by = :processor AND locked_until IS NOT NULL AND finished_at IS NULL
                    AND current_setting('wharf.run', true) = 'open' THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL")
    { processor: i32, message_seq: i64, handler_id: i16, attempt: i32 }

    /// Whether the transaction is still the one that was begun for the handler.
    IsOpen("SELECT coalesce(current_setting('wharf.run', true), '') = 'open'") -> bool {}

    /// The row as it is, and whether it is free: while the transaction in doubt lives, it holds the row's lock.
    ReadBackRow("
        SELECT d.attempts = :attempt, d.status = 2,
               (SELECT true FROM (SELECT 1 FROM inbox_delivery f WHERE f.message_seq = :message_seq AND f.handler_id = :handler_id
                                  FOR NO KEY UPDATE SKIP LOCKED) free)
        FROM inbox_delivery d WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> RowInDoubt { attempt: i32, message_seq: i64, handler_id: i16 }
}

/// Whose claim the transaction settles.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) processor: i32,
    pub(super) claim: ClaimId,
}

/// Each step of ours takes at most `patience`; how long the handler takes is its own matter.
pub(super) async fn transact(
    conn: Object<AsyncPgConnection>,
    cancelling: Cancelling,
    patience: Duration,
    owner: Owner,
    work: TxWork<AsyncPgConnection>,
) -> Transacted {
    let mut conn = Guarded { conn: Some(conn), cancelling };
    let Some(open) = conn.conn.as_deref_mut() else {
        return Transacted::Failed(Error::bug("the connection was given back before its transaction began"));
    };
    match timeout(patience, AnsiTransactionManager::begin_transaction_sql(open, BEGIN)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Transacted::Failed(database("cannot begin a handler's transaction")(error)),
        Err(_) => return Transacted::Failed(no_answer("cannot begin a handler's transaction")),
    }
    let end = match work(open).await {
        WorkEnd::Abandon => return Transacted::RolledBack,
        WorkEnd::RollBack => Transacted::RolledBack,
        WorkEnd::Commit => match settle(open, patience, owner).await {
            Err(transacted) => transacted,
            Ok(()) => commit(open, patience).await,
        },
    };
    match end {
        Transacted::Committed => conn.give_back(),
        Transacted::RolledBack | Transacted::ClaimLost => {
            match timeout(patience, AnsiTransactionManager::rollback_transaction(open)).await {
                Ok(Ok(())) => conn.give_back(),
                // The session was lost under the handler. The guard closes what is left, and the server rolls back by itself.
                Ok(Err(error)) => return Transacted::Failed(database("lost the connection under a handler")(error)),
                Err(_) => return Transacted::Failed(no_answer("lost the connection under a handler")),
            }
        }
        Transacted::InDoubt | Transacted::Refused(_) | Transacted::Failed(_) => {}
    }
    end
}

async fn settle(open: &mut AsyncPgConnection, patience: Duration, owner: Owner) -> Result<(), Transacted> {
    let Owner { processor, claim: ClaimId { message_seq, handler_id, attempt } } = owner;
    let settling = async {
        let settled = SettleInTransaction { processor, message_seq, handler_id, attempt }.execute(open).await?;
        // Only when there is something to explain.
        let is_open = settled > 0 || IsOpen {}.load(open).await.and_then(only_row)?;
        QueryResult::Ok((settled, is_open))
    };
    let cannot = "cannot settle in a handler's transaction";
    match timeout(patience, settling).await {
        Err(_) => Err(Transacted::Failed(no_answer(cannot))),
        Ok(Err(error)) if is_aborted(&error) => {
            Err(Transacted::Refused("an error in the handler's transaction was swallowed by the handler".to_owned()))
        }
        Ok(Err(error)) => Err(Transacted::Failed(database(cannot)(error))),
        Ok(Ok((_, false))) => {
            Err(Transacted::Refused("the handler's transaction had ended before the handler did".to_owned()))
        }
        Ok(Ok((0, true))) => Err(Transacted::ClaimLost),
        Ok(Ok((_, true))) => Ok(()),
    }
}

async fn commit(open: &mut AsyncPgConnection, patience: Duration) -> Transacted {
    let error = match timeout(patience, open.batch_execute(COMMIT)).await {
        Ok(Ok(())) => {
            // Not through diesel's manager, which has to be told.
            *AnsiTransactionManager::transaction_manager_status_mut(open) = Default::default();
            return Transacted::Committed;
        }
        Ok(Err(error)) => error,
        Err(_) => return Transacted::InDoubt,
    };
    // A refusal leaves the session alive. One that came with the end of the session may have come after the commit.
    let is_alive = async { timeout(patience, is_alive(open)).await.unwrap_or(false) };
    match kind(&error) != Kind::Connection && is_alive.await {
        true => Transacted::Refused(format!("{:#}", database("cannot commit")(error))),
        false => Transacted::InDoubt,
    }
}

fn no_answer(context: &'static str) -> Error {
    Error::new(Kind::Connection, format!("{context}: the server does not answer"))
}

pub(super) async fn read_back(conn: &mut AsyncPgConnection, claim: ClaimId) -> crate::types::Result<ReadBack> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    let rows = ReadBackRow { message_seq, handler_id, attempt }.load::<RowInDoubt>(conn).await;
    Ok(match rows.map_err(database("cannot read back a delivery"))?.pop() {
        Some(RowInDoubt { is_current: false, .. }) | None => ReadBack::ClaimLost,
        Some(RowInDoubt { is_done: true, .. }) => ReadBack::Committed,
        Some(RowInDoubt { is_free: Some(true), .. }) => ReadBack::NotCommitted,
        Some(RowInDoubt { is_free: None | Some(false), .. }) => ReadBack::Undecided,
    })
}

/// The handler went on after a statement of its own had failed. Diesel keeps no SQLSTATE, and in another language than English the
/// text is another one; then the delivery is not charged, but it still waits a moment before it runs again.
fn is_aborted(error: &diesel::result::Error) -> bool {
    matches!(error, diesel::result::Error::DatabaseError(_, information)
        if information.message().starts_with("current transaction is aborted"))
}

/// Closes the connection unless it was given back in good order, whatever happens: also when the future is dropped. A connection
/// returned to the pool with its transaction open would keep the handler's locks until somebody happens to take it out again.
struct Guarded {
    conn: Option<Object<AsyncPgConnection>>,
    cancelling: Cancelling,
}

/// What it takes to cancel a statement: a connection of its own, made on the store's reactor, because the user's runtime may be what
/// is ending.
pub(super) struct Cancelling {
    pub(super) tls: MakeRustlsConnect,
    pub(super) reactor: Handle,
}

impl Guarded {
    fn give_back(&mut self) {
        self.conn = None;
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        let conn = Object::take(conn);
        // A statement that is still running would not notice the closed socket until it ends.
        let (cancel, tls) = (conn.cancel_token(), self.cancelling.tls.clone());
        drop(conn);
        drop(self.cancelling.reactor.spawn(async move { cancel.cancel_query(tls).await }));
    }
}
