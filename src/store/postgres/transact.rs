//! A transactional handler's transaction: its writes and `done` commit together, or not at all.
//!
//! Order: BEGIN, the handler, the settlement fenced by the attempt, COMMIT. The fence comes last, so the claim can be renewed while
//! the handler runs; a stale run finds its attempt gone and is rolled back. Only a COMMIT that was sent and never answered is in
//! doubt, and then `read_back` asks the row itself. A connection that was stopped midway is closed, never reused.

use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{AnsiTransactionManager, AsyncPgConnection, RunQueryDsl, TransactionManager};
use tokio::runtime::Handle;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect::is_alive;
use super::errors::{database, kind};
use super::statement::{rows, statements};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Transacted, TxWork, WorkEnd};
use crate::types::{Error, Kind, Result};

rows! {
    /// `is_free` is NULL while another transaction holds the row's lock.
    RowInDoubt { is_current: bool, is_done: bool, is_free: Option<bool> }
}

statements! {
    SettleInTransaction("
        UPDATE inbox_delivery
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        WHERE message_seq = :message_seq AND handler_id = :handler_id
          AND CASE WHEN attempts = :attempt AND locked_until IS NOT NULL AND finished_at IS NULL THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL")
    { message_seq: i64, handler_id: i16, attempt: i32 }

    /// The row as it is, and whether it is free: while the transaction in doubt lives, it holds the row's lock.
    ReadBackRow("
        SELECT d.attempts = :attempt, d.status = 2,
               (SELECT true FROM (SELECT 1 FROM inbox_delivery f WHERE f.message_seq = :message_seq AND f.handler_id = :handler_id
                                  FOR NO KEY UPDATE SKIP LOCKED) free)
        FROM inbox_delivery d WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> RowInDoubt { attempt: i32, message_seq: i64, handler_id: i16 }
}

pub(super) async fn transact(
    conn: Object<AsyncPgConnection>,
    cancelling: Cancelling,
    claim: ClaimId,
    work: TxWork<AsyncPgConnection>,
) -> Transacted {
    let mut conn = Guarded { conn: Some(conn), cancelling };
    let Some(open) = conn.conn.as_deref_mut() else {
        return Transacted::Failed(Error::bug("the connection was given back before its transaction began"));
    };
    if let Err(error) = AnsiTransactionManager::begin_transaction(open).await {
        return Transacted::Failed(database("cannot begin a handler's transaction")(error));
    }
    match work(open).await {
        WorkEnd::Commit => {}
        WorkEnd::Abandon => return Transacted::RolledBack,
        WorkEnd::RollBack => {
            return match AnsiTransactionManager::rollback_transaction(open).await {
                Ok(()) => {
                    conn.give_back();
                    Transacted::RolledBack
                }
                // The session was lost under the handler. The guard closes what is left, and the server rolls back by itself.
                Err(error) => Transacted::Failed(database("lost the connection under a handler")(error)),
            };
        }
    }
    let ClaimId { message_seq, handler_id, attempt } = claim;
    match (SettleInTransaction { message_seq, handler_id, attempt }).execute(open).await {
        Err(error) if is_aborted(&error) => {
            return Transacted::Refused(
                "an error in the handler's transaction was swallowed by the handler".to_owned(),
            );
        }
        Err(error) => return Transacted::Failed(database("cannot settle in a handler's transaction")(error)),
        Ok(0) => {
            if AnsiTransactionManager::rollback_transaction(open).await.is_ok() {
                conn.give_back();
            }
            return Transacted::ClaimLost;
        }
        Ok(_) => {}
    }
    match AnsiTransactionManager::commit_transaction(open).await {
        Ok(()) => {
            conn.give_back();
            Transacted::Committed
        }
        Err(error) => {
            // A refusal leaves the session alive. One that came with the end of the session may have come after the commit.
            let is_refused = kind(&error) != Kind::Connection && is_alive(open).await;
            if is_refused {
                Transacted::Refused(format!("{:#}", database("cannot commit")(error)))
            } else {
                Transacted::InDoubt
            }
        }
    }
}

pub(super) async fn read_back(conn: &mut AsyncPgConnection, claim: ClaimId) -> Result<ReadBack> {
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
