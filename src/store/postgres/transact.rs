//! A transactional handler's transaction: its writes and `done` commit together, or not at all.
//!
//! Order: BEGIN, the handler, the settlement fenced by the attempt, COMMIT. The fence comes last, so the claim can be renewed while
//! the handler runs; a stale run finds its attempt gone and is rolled back. Settlement and COMMIT are one message, and so is the BEGIN of the
//! next transaction on this connection: the settlement raises an error where a claim is lost, and the server executes nothing of a message
//! behind an error. Only such a message without an answer is in doubt, and then `read_back` asks the row itself. A connection that was
//! stopped midway is closed, never reused.
//!
//! BEGIN is answered before the handler sends anything: a statement that was sent along with a BEGIN that fails would commit alone.
//!
//! A handler that ends its own transaction is noticed: BEGIN sets a mark that lives exactly as long as the transaction, and the settlement
//! looks for it. What a handler has SET is reset with the COMMIT, and with the next savepoint; a rollback undoes it by itself. Neither takes a
//! round trip.

use std::time::Duration;

use diesel::result::Error as DieselError;
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{AnsiTransactionManager, AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::errors::{database, kind};
use super::process::columns;
use super::statement::{rows, statements};
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction, Undo};
use crate::types::{Error, Kind, Result};

/// Names its level, whatever the role's default is.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Takes back what a handler has set, also for its transaction. The last two are what the driver has set when it connected.
const RESET: &str = "RESET ALL; RESET ROLE; SET TIME ZONE 'UTC'; SET client_encoding TO 'UTF8'";

/// Lives as long as the transaction. The handler's own statements are planned as the server does by default.
const MARK: &str = "SET LOCAL wharf.run = 'open'; SET LOCAL plan_cache_mode = auto";

/// How long a request to cancel a statement may take.
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);

rows! {
    /// `is_free` is NULL while another transaction holds the row's lock, and where it was not asked.
    RowInDoubt { is_current: bool, is_done: bool, is_free: Option<bool> }
}

statements! {
    /// The row as it is, and whether it is free: while the transaction in doubt lives, it holds the row's lock. A row that is done is not locked: this
    /// is asked after each run of a handler that settles itself. A transaction that ends between the look and the lock leaves a row that is free
    /// and another than the one looked at: then it is asked again.
    ReadBackRow("
        SELECT d.attempts = :attempt, d.status = 2,
               CASE WHEN d.status = 2 THEN NULL ELSE
                   (SELECT true FROM (SELECT f.status, f.attempts FROM inbox_delivery f
                                      WHERE f.message_seq = :message_seq AND f.handler_id = :handler_id
                                      FOR NO KEY UPDATE SKIP LOCKED) free
                    WHERE free.status = d.status AND free.attempts = d.attempts) END
        FROM inbox_delivery d WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> RowInDoubt { attempt: i32, message_seq: i64, handler_id: i16 }
}

/// Public in a private module: the type of a public trait, but nobody outside can name it.
#[allow(unreachable_pub, missing_debug_implementations)]
pub struct PostgresTransaction {
    conn: Guarded,
    /// Each step of ours takes at most this long; how long the handler takes is its own matter.
    patience: Duration,
    processor: i32,
    /// How many savepoints there were: each has a name of its own, so that none is taken for another.
    savepoints: u32,
}

impl PostgresTransaction {
    pub(super) async fn begin(
        conn: Object<AsyncPgConnection>,
        cancelling: Cancelling,
        patience: Duration,
        processor: i32,
    ) -> Result<Self> {
        let mut begun = Self { conn: Guarded { conn: Some(conn), cancelling }, patience, processor, savepoints: 0 };
        begun.open(&format!("{BEGIN}; {MARK}"), "cannot begin a handler's transaction").await?;
        Ok(begun)
    }

    /// Executes statements after which exactly one transaction is open, and no savepoint that diesel knows of.
    async fn open(&mut self, sql: &str, cannot: &'static str) -> Result<()> {
        let patience = self.patience;
        match timeout(patience, begin_with(self.conn()?, sql)).await {
            Ok(opened) => opened.map_err(database(cannot)),
            Err(_) => Err(no_answer(cannot)),
        }
    }

    /// What an error in the message that settles and commits means.
    async fn refused(&mut self, error: DieselError, claims: &[ClaimId]) -> Transacted {
        match refusal(&error) {
            Some("inbox_claim_lost") => return Transacted::ClaimLost,
            Some("inbox_transaction_ended") => {
                return Transacted::Refused("the handler's transaction had ended before the handler did".to_owned());
            }
            Some(_) | None => {}
        }
        if is_aborted(&error) {
            return Transacted::Refused(
                "an error in the handler's transaction was swallowed by the handler".to_owned(),
            );
        }
        let (Ok(open), Some(claim)) = (self.conn.open(), claims.first()) else { return Transacted::InDoubt };
        if kind(&error) == Kind::Connection {
            return Transacted::InDoubt;
        }
        // Within the transaction, which then is aborted and answers to nothing, the settlement has failed. Otherwise it is over. An error that
        // came with the end of the session, or after the commit, may have come after the commit.
        match timeout(self.patience, rows_in_doubt(open, *claim)).await {
            Ok(Ok(rows)) => match rows.as_slice() {
                [RowInDoubt { is_current: true, is_done: true, .. }, ..] => Transacted::Committed,
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
        let before = self.savepoints;
        self.savepoints += 1;
        let savepoint = match before {
            0 => "SAVEPOINT wharf_1".to_owned(),
            // Fails where the handler has ended the transaction, and then nothing behind it is executed.
            before => format!("RELEASE wharf_{before}; {RESET}; {MARK}; SAVEPOINT wharf_{}", self.savepoints),
        };
        self.open(&savepoint, "cannot set a savepoint in a handler's transaction").await
    }

    async fn roll_back_to_savepoint(&mut self, undo: Undo) -> Result<()> {
        if undo == Undo::Midway {
            self.conn.cancel().await;
        }
        let back = format!("ROLLBACK TO wharf_{}", self.savepoints);
        self.open(&back, "cannot roll back to a savepoint in a handler's transaction").await
    }

    async fn commit(&mut self, claims: &[ClaimId], then: Then) -> Transacted {
        let settle = settlement(self.processor, claims);
        let sent = match then {
            Then::End => format!("{settle}; COMMIT; {RESET}"),
            Then::Begin => format!("{settle}; COMMIT; {RESET}; {BEGIN}; {MARK}"),
        };
        let patience = self.patience;
        let Ok(open) = self.conn.open() else {
            return Transacted::Failed(Error::bug(
                "the connection was given back before its transaction was committed",
            ));
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
                    && let Ok(Ok(())) = timeout(patience, roll_back(open)).await
                {
                    self.conn.give_back();
                }
            }
            // The guard closes it.
            (Transacted::InDoubt | Transacted::Refused(_) | Transacted::Failed(_), _) => {}
        }
        transacted
    }

    async fn roll_back(mut self) -> Result<()> {
        // The session was lost under the handler if it fails. The guard closes what is left, and the server rolls back by itself.
        let cannot = "lost the connection under a handler";
        match timeout(self.patience, roll_back(self.conn.open()?)).await {
            Ok(rolled_back) => rolled_back.map_err(database(cannot))?,
            Err(_) => return Err(no_answer(cannot)),
        }
        self.conn.give_back();
        Ok(())
    }

    async fn abandon(self) {}
}

/// Executes statements that leave one transaction open, and tells diesel, to which nested transactions are savepoints then.
async fn begin_with(open: &mut AsyncPgConnection, sql: &str) -> diesel::QueryResult<()> {
    // Whatever the handler has left on diesel's books, also when it was stopped in a nested transaction.
    *open.transaction_state() = AnsiTransactionManager::default();
    AnsiTransactionManager::begin_transaction_sql(open, sql).await
}

async fn roll_back(open: &mut AsyncPgConnection) -> diesel::QueryResult<()> {
    open.batch_execute("ROLLBACK").await?;
    *open.transaction_state() = AnsiTransactionManager::default();
    Ok(())
}

/// Numbers only: nothing from outside becomes SQL text. Not a prepared statement, which could not be in one message with COMMIT.
fn settlement(processor: i32, claims: &[ClaimId]) -> String {
    fn array<N: ToString>(numbers: &[N]) -> String {
        numbers.iter().map(N::to_string).collect::<Vec<_>>().join(",")
    }
    let mut claims = claims.to_vec();
    // The same order everywhere, so that two settlers never wait for each other in a circle.
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
    let rows = rows_in_doubt(conn, claim).await;
    Ok(match rows.map_err(database("cannot read back a delivery"))?.pop() {
        Some(RowInDoubt { is_current: false, .. }) | None => ReadBack::ClaimLost,
        Some(RowInDoubt { is_done: true, .. }) => ReadBack::Committed,
        Some(RowInDoubt { is_free: Some(true), .. }) => ReadBack::NotCommitted,
        Some(RowInDoubt { is_free: None | Some(false), .. }) => ReadBack::Undecided,
    })
}

async fn rows_in_doubt(conn: &mut AsyncPgConnection, claim: ClaimId) -> diesel::QueryResult<Vec<RowInDoubt>> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    ReadBackRow { message_seq, handler_id, attempt }.load::<RowInDoubt>(conn).await
}

/// How `inbox_settle_in_transaction` names its reason.
fn refusal(error: &DieselError) -> Option<&str> {
    match error {
        DieselError::DatabaseError(_, information) => information.constraint_name(),
        _ => None,
    }
}

/// The handler went on after a statement of its own had failed. Diesel keeps no SQLSTATE, and in another language than English the
/// text is another one; then the delivery is not charged, but it still waits a moment before it runs again.
fn is_aborted(error: &DieselError) -> bool {
    matches!(error, DieselError::DatabaseError(_, information)
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
    fn open(&mut self) -> Result<&mut AsyncPgConnection> {
        self.conn.as_deref_mut().ok_or_else(|| Error::bug("the connection of a transaction was used after its end"))
    }

    /// Ends the statement that is under way, if there is one. When this returns in time, the server has told the session, which ignores it when
    /// it is idle: no later statement is hit.
    async fn cancel(&mut self) {
        let Some(conn) = &self.conn else { return };
        let (cancel, tls) = (conn.cancel_token(), self.cancelling.tls.clone());
        let cancelling = self.cancelling.reactor.spawn(async move { cancel.cancel_query(tls).await });
        let _ = timeout(CANCEL_PATIENCE, cancelling).await;
    }

    fn give_back(&mut self) {
        if let Some(mut conn) = self.conn.take() {
            // Not through diesel's manager, which has to be told.
            *conn.transaction_state() = AnsiTransactionManager::default();
        }
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
