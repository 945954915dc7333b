//! The transaction of a transactional handler: its writes and `done` commit together, or not at all.
//!
//! The order is: BEGIN, the handler, the settlement fenced by the attempt, COMMIT. The fence comes last, so the claim
//! can be renewed while the handler runs; a stale run finds that its attempt is over and is rolled back. Settlement and
//! COMMIT are sent as one message, together with the BEGIN of the next transaction on this connection. The settlement
//! raises an error if a claim is lost, and the server executes nothing in a message after an error. Only such a message
//! without a reply is in doubt; then `read_back` reads the row. A connection that was stopped while a handler ran is
//! closed, never reused.
//!
//! The handler starts only after the reply to BEGIN. A savepoint takes no round trip: the handler starts when it is
//! sent. If it fails, an open transaction is aborted, and outside of a transaction the session is read-only, so no
//! statement of the handler can write. The next step names the savepoint, and fails without it.
//!
//! A handler that ends its own transaction is detected: BEGIN sets a local setting that lives exactly as long as the
//! transaction, and the settlement checks it; a savepoint is released before the next step. Settings that a handler
//! changed are reset with the COMMIT, the ROLLBACK and the next savepoint. None of these takes a round trip.

use std::num::NonZeroU32;
use std::time::Duration;

use diesel::result::Error as DieselError;
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{
    AnsiTransactionManager, AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager,
};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::errors::{database, kind};
use super::process::columns;
use super::statement::{rows, statements};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction, Undo};
use crate::types::{Error, Kind, Result};

/// Sets the isolation level, whatever the role's default is. Sessions of handlers are read-only by default
/// (`connect.rs`).
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// Whether sessions belong to this process alone, or are shared through a pooler. It decides how a handler's session is
/// brought back to what the next handler must find.
#[derive(Debug, Clone, Copy)]
pub(super) enum Session {
    /// `RESET ALL` leads back to the start-up settings.
    Own,
    /// The start-up settings are those of the pooler. What the driver sets when it connects is set again after
    /// `RESET ALL`. The role may have the engine's planner settings, so each transaction sets the server's defaults.
    Pooled,
}

impl Session {
    /// Begins a transaction.
    fn begin(self) -> String {
        format!("{BEGIN}; {MARK}{}", self.plans())
    }

    /// Resets what a handler has set, also for its transaction.
    fn reset(self) -> &'static str {
        match self {
            Self::Own => "RESET ALL; RESET ROLE",
            Self::Pooled => "RESET ALL; RESET ROLE; SET TIME ZONE 'UTC'; SET client_encoding TO 'UTF8'",
        }
    }

    /// Handler statements are planned with the server's defaults, not with the engine's settings (`connect.rs`).
    fn plans(self) -> &'static str {
        match self {
            Self::Own => "",
            Self::Pooled => "; SET LOCAL plan_cache_mode = auto; SET LOCAL enable_seqscan = on",
        }
    }
}

const CANNOT_SAVE: &str = "cannot set a savepoint in a handler's transaction";

/// Lives as long as the transaction.
const MARK: &str = "SET LOCAL wharf.run = 'open'";

/// How long a request to cancel a statement may take.
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);

rows! {
    /// `is_free` is NULL while another transaction holds the row lock, and if it was not read.
    RowInDoubt { is_current: bool, is_done: bool, is_free: Option<bool> }
}

statements! {
    /// Reads the row, and whether it is free: while the transaction in doubt is open, it holds the row lock. A row that
    /// is done is not locked, because this runs after each run of a handler that settles itself. A transaction that
    /// ends between the read and the lock leaves a free row that differs from the one that was read; then the caller
    /// reads again.
    ReadBackRow("
        SELECT d.attempts = :attempt, d.status = 2,
               CASE WHEN d.status = 2 THEN NULL ELSE
                   (SELECT true FROM (SELECT f.status, f.attempts FROM inbox_delivery f
                                      WHERE f.message_seq = :message_seq AND f.handler_id = :handler_id
                                      FOR NO KEY UPDATE SKIP LOCKED) free
                    WHERE free.status = d.status AND free.attempts = d.attempts) END
        FROM inbox_delivery d WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> RowInDoubt { attempt: i32, message_seq: i64, handler_id: i16 }

    /// Whether this attempt has completed the delivery. Locks nothing: a handler's session is read-only after its
    /// transaction.
    IsCommitted("
        SELECT attempts = :attempt AND status = 2 FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    -> bool { attempt: i32, message_seq: i64, handler_id: i16 }
}

/// Public in a private module: the type of a public trait, but it cannot be named outside the crate.
#[allow(unreachable_pub, missing_debug_implementations)]
pub struct PostgresTransaction {
    conn: Guarded,
    /// Time limit for each of the engine's steps; it does not limit the handler.
    patience: Duration,
    session: Session,
    processor: i32,
    /// The number of savepoints so far: each has a unique name, so that none is mistaken for another.
    savepoints: u32,
}

impl PostgresTransaction {
    pub(super) async fn begin(
        conn: Object<AsyncPgConnection>,
        cancelling: Cancelling,
        patience: Duration,
        session: Session,
        processor: i32,
    ) -> Result<Self> {
        let conn = Guarded { conn: Some(conn), cancelling };
        let mut begun = Self { conn, patience, session, processor, savepoints: 0 };
        begun.open(&session.begin(), "cannot begin a handler's transaction").await?;
        Ok(begun)
    }

    /// Executes statements after which exactly one transaction is open, with no savepoint that diesel knows of.
    async fn open(&mut self, sql: &str, cannot: &'static str) -> Result<()> {
        let patience = self.patience;
        match timeout(patience, begin_with(self.conn()?, sql)).await {
            Ok(opened) => opened.map_err(database(cannot)),
            Err(_) => Err(no_answer(cannot)),
        }
    }

    /// Interprets an error in the message that settles and commits.
    async fn refused(&mut self, error: DieselError, claims: &[ClaimId]) -> Transacted {
        match refusal(&error) {
            Some("inbox_claim_lost") => return Transacted::ClaimLost,
            Some("inbox_transaction_ended") => {
                return Transacted::Refused("the handler's transaction ended before the handler returned".to_owned());
            }
            Some("inbox_isolation") => return Transacted::Refused(error.to_string()),
            Some(_) | None => {}
        }
        if is_aborted(&error) {
            return Transacted::Refused("the handler ignored an error in its transaction".to_owned());
        }
        let (Ok(open), Some(claim)) = (self.conn.open(), claims.first()) else { return Transacted::InDoubt };
        if kind(&error) == Kind::Connection {
            return Transacted::InDoubt;
        }
        // An open transaction is aborted now and rejects this query: the settlement has failed. If the transaction has
        // ended, the row shows whether it was committed, because the error may have come after the commit. If the
        // session has ended as well, the commit is in doubt.
        let ClaimId { message_seq, handler_id, attempt } = *claim;
        match timeout(self.patience, IsCommitted { message_seq, handler_id, attempt }.load::<bool>(open)).await {
            Ok(Ok(rows)) => match rows.as_slice() {
                [true] => Transacted::Committed,
                _ => Transacted::Refused(format!("{:#}", database("cannot commit")(error))),
            },
            Ok(Err(again)) if kind(&again) != Kind::Connection => {
                Transacted::Failed(database("cannot settle in a handler's transaction")(error))
            }
            Ok(Err(_)) | Err(_) => Transacted::InDoubt,
        }
    }
}

impl Transaction for PostgresTransaction {
    type Connection = AsyncPgConnection;

    fn is_open(&self) -> bool {
        self.conn.conn.is_some()
    }

    fn conn(&mut self) -> Result<&mut AsyncPgConnection> {
        self.conn.open()
    }

    async fn savepoint(&mut self) -> Result<()> {
        let (before, session) = (self.savepoints, self.session);
        let (reset, plans) = (session.reset(), session.plans());
        self.savepoints += 1;
        let savepoint = match before {
            0 => "SAVEPOINT wharf_1".to_owned(),
            // Fails if the handler has ended the transaction; then nothing after it is executed.
            before => format!("RELEASE wharf_{before}; {reset}{plans}; SAVEPOINT wharf_{}", self.savepoints),
        };
        match session {
            Session::Own if is_at_top(self.conn()?) => send(self.conn()?, &savepoint).map_err(database(CANNOT_SAVE)),
            // Through a pooler, the session is not read-only outside of the transaction.
            Session::Own | Session::Pooled => self.open(&savepoint, CANNOT_SAVE).await,
        }
    }

    async fn check(&mut self) -> Result<()> {
        self.open("SAVEPOINT wharf_check", CANNOT_SAVE).await
    }

    async fn roll_back_to_savepoint(&mut self, undo: Undo) -> Result<()> {
        if undo == Undo::Midway {
            self.conn.cancel().await;
        }
        let back = format!("ROLLBACK TO wharf_{}", self.savepoints);
        self.open(&back, "cannot roll back to a savepoint in a handler's transaction").await
    }

    async fn commit(&mut self, claims: &[ClaimId], then: Then) -> Transacted {
        let (settle, session) = (settlement(self.processor, claims), self.session);
        let settle = match self.savepoints {
            0 => settle,
            // The mark is gone since the last savepoint. The release fails if the last handler has ended the transaction.
            last => format!("RELEASE wharf_{last}; {MARK}; {settle}"),
        };
        let sent = match then {
            Then::End => format!("{settle}; COMMIT; {}", session.reset()),
            Then::Begin => format!("{settle}; COMMIT; {}; {}", session.reset(), session.begin()),
        };
        let patience = self.patience;
        let Ok(open) = self.conn.open() else {
            return Transacted::Failed(Error::bug("the connection was returned before its transaction was committed"));
        };
        let answered = match then {
            Then::End => timeout(patience, open.batch_execute(&sent)).await,
            Then::Begin => timeout(patience, begin_with(open, &sent)).await,
        };
        let transacted = match answered {
            Ok(Ok(())) => Transacted::Committed,
            Ok(Err(error)) => self.refused(error, claims).await,
            Err(_) => Transacted::InDoubt,
        };
        self.savepoints = 0;
        match (&transacted, then) {
            (Transacted::Committed, Then::End) => self.conn.give_back(),
            (Transacted::Committed, Then::Begin) => {}
            (Transacted::ClaimLost, _) => {
                if let Ok(open) = self.conn.open()
                    && let Ok(Ok(())) = timeout(patience, roll_back(open, session)).await
                {
                    self.conn.give_back();
                }
            }
            // The guard closes the connection.
            (Transacted::InDoubt | Transacted::Refused(_) | Transacted::Failed(_), _) => {}
        }
        transacted
    }

    async fn roll_back(mut self) -> Result<()> {
        // If this fails, the session was lost while the handler ran. The guard closes the connection, and the server
        // rolls back.
        let cannot = "lost the connection while a handler ran";
        match timeout(self.patience, roll_back(self.conn.open()?, self.session)).await {
            Ok(rolled_back) => rolled_back.map_err(database(cannot))?,
            Err(_) => return Err(no_answer(cannot)),
        }
        self.conn.give_back();
        Ok(())
    }

    async fn abandon(self) {}
}

/// Executes statements that leave one transaction open, and records this in diesel, so that nested transactions become
/// savepoints.
async fn begin_with(open: &mut AsyncPgConnection, sql: &str) -> diesel::QueryResult<()> {
    // Discards the nesting that the handler has left in diesel, for example when it was stopped in a nested
    // transaction.
    *open.transaction_state() = AnsiTransactionManager::default();
    AnsiTransactionManager::begin_transaction_sql(open, sql).await
}

/// Whether diesel knows of the transaction and of no savepoint in it: then it need not be told again.
fn is_at_top(open: &mut AsyncPgConnection) -> bool {
    let status = AnsiTransactionManager::transaction_manager_status_mut(open);
    matches!(status.transaction_depth(), Ok(Some(NonZeroU32::MIN)))
}

/// Sends statements without waiting for the reply, which is dropped when it comes. The driver sends a message when its
/// future is polled first; later statements on the connection are executed after it.
fn send(open: &mut AsyncPgConnection, sql: &str) -> diesel::QueryResult<()> {
    open.batch_execute(sql).now_or_never().unwrap_or(Ok(()))
}

/// Resets also what the handler before has set: its RESET was part of this transaction and is undone with it.
async fn roll_back(open: &mut AsyncPgConnection, session: Session) -> diesel::QueryResult<()> {
    open.batch_execute(&format!("ROLLBACK; {}", session.reset())).await?;
    *open.transaction_state() = AnsiTransactionManager::default();
    Ok(())
}

/// Contains only numbers: outside input never becomes SQL text. It is not a prepared statement, because that cannot be
/// in one message with COMMIT.
fn settlement(processor: i32, claims: &[ClaimId]) -> String {
    fn array<N: ToString>(numbers: &[N]) -> String {
        numbers.iter().map(N::to_string).collect::<Vec<_>>().join(",")
    }
    if let [ClaimId { message_seq, handler_id, attempt }] = claims {
        return format!("SELECT inbox_settle_one_in_transaction({processor}, {message_seq}, {handler_id}, {attempt})");
    }
    let mut claims = claims.to_vec();
    // All settlers use the same order, so that they never deadlock.
    claims.sort_unstable();
    let (message_seqs, handler_ids, attempts) = columns(claims.into_iter());
    let (message_seqs, handler_ids, attempts) = (array(&message_seqs), array(&handler_ids), array(&attempts));
    format!(
        "SELECT inbox_settle_in_transaction({processor}, '{{{message_seqs}}}', '{{{handler_ids}}}', '{{{attempts}}}')"
    )
}

fn no_answer(context: &'static str) -> Error {
    Error::new(Kind::Connection, format!("{context}: the server does not answer"))
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

/// The constraint name with which the settlement reports its reason.
fn refusal(error: &DieselError) -> Option<&str> {
    match error {
        DieselError::DatabaseError(_, information) => information.constraint_name(),
        _ => None,
    }
}

/// The handler continued after one of its statements had failed. Diesel keeps no SQLSTATE, and the text depends on the
/// server's language. If it is not English, the retry budget is not charged, but the delivery still waits before it
/// runs again.
fn is_aborted(error: &DieselError) -> bool {
    matches!(error, DieselError::DatabaseError(_, information)
        if information.message().starts_with("current transaction is aborted"))
}

/// Closes the connection unless it was returned in good order, even if the future is dropped. A connection returned to
/// the pool with an open transaction would keep the handler's locks until its next use.
struct Guarded {
    conn: Option<Object<AsyncPgConnection>>,
    cancelling: Cancelling,
}

/// What is needed to cancel a statement: a separate connection, opened on the store's reactor, because the user's
/// runtime may be shutting down.
pub(super) struct Cancelling {
    pub(super) tls: MakeRustlsConnect,
    pub(super) reactor: Handle,
}

impl Guarded {
    fn open(&mut self) -> Result<&mut AsyncPgConnection> {
        self.conn.as_deref_mut().ok_or_else(|| Error::bug("the connection of a transaction was used after its end"))
    }

    /// Cancels the running statement, if any. When this returns in time, the server has signalled the session, which
    /// ignores the signal when it is idle: no later statement is cancelled.
    async fn cancel(&mut self) {
        let Some(conn) = &self.conn else { return };
        let (cancel, tls) = (conn.cancel_token(), self.cancelling.tls.clone());
        let cancelling = self.cancelling.reactor.spawn(async move { cancel.cancel_query(tls).await });
        let _ = timeout(CANCEL_PATIENCE, cancelling).await;
    }

    fn give_back(&mut self) {
        if let Some(mut conn) = self.conn.take() {
            // The transaction was not ended through diesel's manager, so its state is reset here.
            *conn.transaction_state() = AnsiTransactionManager::default();
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        let conn = Object::take(conn);
        // A running statement would not notice the closed socket until it ends.
        let (cancel, tls) = (conn.cancel_token(), self.cancelling.tls.clone());
        drop(conn);
        drop(self.cancelling.reactor.spawn(async move { cancel.cancel_query(tls).await }));
    }
}
