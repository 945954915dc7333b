//! A connection with a queue of operations: one at a time, each in its own transaction, all or nothing.
//!
//! SQLite allows one writing transaction at a time, so the store has one connection for writes. Operations queue for
//! it, first come, first served, for at most `busy_timeout`. An operation that has begun always runs to its end, even
//! if its caller is cancelled.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{QueryResult, SqliteConnection};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::connect::AsyncSqliteConnection;
use super::errors::{database, is_locked};
use crate::store::seam::PoolStatus;
use crate::types::{Error, Kind, Result};

/// Begins a transaction that may write: it takes the lock at once, so that no later statement fails for lack of it.
pub(super) const TO_WRITE: &str = "BEGIN IMMEDIATE";
/// Begins a transaction that only reads: it sees one state of the database from its first statement on.
pub(super) const TO_READ: &str = "BEGIN";
/// How long SQLite itself waits for a lock.
pub(super) const SQLITE_WAIT_MS: u32 = 20;

/// A connection, and the queue of operations that wait for it.
pub(super) struct ConnQueue {
    /// A tokio mutex: it is fair, so operations get the connection in the order in which they asked.
    conn: Arc<Mutex<AsyncSqliteConnection>>,
    begin: &'static str,
    busy_timeout: Duration,
    reactor: Handle,
}

/// Exclusive use of the connection.
pub(super) type WriterTurn = OwnedMutexGuard<AsyncSqliteConnection>;

impl ConnQueue {
    pub(super) fn new(
        conn: AsyncSqliteConnection,
        begin: &'static str,
        busy_timeout: Duration,
        reactor: Handle,
    ) -> Self {
        Self { conn: Arc::new(Mutex::new(conn)), begin, busy_timeout, reactor }
    }

    /// The pool status: one connection, which is in use or not. Waiting operations are not counted.
    pub(super) fn status(&self) -> PoolStatus {
        PoolStatus { in_use: usize::from(self.conn.try_lock().is_err()), size: 1, waiting: 0 }
    }

    /// Waits for exclusive use of the connection. A caller that is cancelled leaves the queue.
    pub(super) async fn turn(&self) -> Result<WriterTurn> {
        let turn = tokio::time::timeout(self.busy_timeout, Arc::clone(&self.conn).lock_owned()).await;
        turn.map_err(|_| {
            let waited = humantime::format_duration(self.busy_timeout);
            Error::new(
                Kind::Passing,
                format!("the database is busy: another operation of this process has held it for {waited}"),
            )
        })
    }

    /// Runs `act` in a transaction. `act` receives a time after the lock was taken and before anything was written.
    /// When this returns, its writes are durable, or nothing was written.
    pub(super) async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.act_in(self.turn().await?, act).await
    }

    /// Like [`ConnQueue::act`], with exclusive use of the connection already granted.
    pub(super) async fn act_in<T: Send + 'static>(
        &self,
        mut turn: WriterTurn,
        act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (begin, busy_timeout) = (self.begin, self.busy_timeout);
        // Runs on the store's thread: the turn ends with the operation, not when its caller is cancelled.
        let acting = self.reactor.spawn(async move {
            let acted = turn.spawn_blocking(move |conn| Ok(transaction(conn, begin, busy_timeout, act))).await;
            drop(turn);
            acted
        });
        match acting.await {
            Ok(Ok(acted)) => acted,
            Ok(Err(_)) | Err(_) => Err(Error::stopped("the store was closed while an operation ran")),
        }
    }

    pub(super) fn reactor(&self) -> &Handle {
        &self.reactor
    }

    pub(super) fn busy_timeout(&self) -> Duration {
        self.busy_timeout
    }
}

/// Runs `act` in a transaction, on the current thread.
pub(super) fn transaction<T>(
    conn: &mut SqliteConnection,
    begin: &str,
    busy_timeout: Duration,
    act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T>,
) -> Result<T> {
    let begun = within(busy_timeout, || match conn.batch_execute(begin) {
        // A panic has left a transaction open.
        Err(error) if error.to_string().contains("within a transaction") => {
            conn.batch_execute("ROLLBACK")?;
            conn.batch_execute(begin)
        }
        begun => begun,
    });
    begun.map_err(database("cannot begin a transaction"))?;
    let acted = act(conn, Instant::now())
        .and_then(|acted| conn.batch_execute("COMMIT").map(|()| acted).map_err(database("cannot commit")));
    if acted.is_err() {
        // Fails if SQLite has already rolled back, as it does when the disk is full.
        let _ = conn.batch_execute("ROLLBACK");
    }
    acted
}

/// Retries BEGIN until the lock of another process is free, for at most `busy_timeout`. SQLite's own busy handler
/// sleeps for increasing times, up to a tenth of a second, while other processes take the lock; retrying every
/// [`SQLITE_WAIT_MS`] keeps the sleeps short. Any other error is returned at once: the caller retries it after a longer
/// pause, and does not hold the connection meanwhile. Blocks.
pub(super) fn within<T>(busy_timeout: Duration, mut begin: impl FnMut() -> QueryResult<T>) -> QueryResult<T> {
    // Without a deadline if the clock cannot count that far.
    let deadline = Instant::now().checked_add(busy_timeout);
    loop {
        let tried_at = Instant::now();
        match begin() {
            // SQLite has waited already, except for locks that it does not wait for, for example those of a recovery.
            Err(error) if is_locked(&error) && deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                thread::sleep(Duration::from_millis(SQLITE_WAIT_MS.into()).saturating_sub(tried_at.elapsed()));
            }
            begun => return begun,
        }
    }
}

#[cfg(test)]
mod tests {
    use diesel::result::{DatabaseErrorKind, Error as DieselError};

    use super::*;

    /// Begins, and fails `failures` times with this message of SQLite; returns whether it succeeded, and the tries.
    fn begin(busy_timeout: Duration, message: &str, failures: u32) -> (bool, u32) {
        let mut tries = 0;
        let begun = within(busy_timeout, || {
            tries += 1;
            let error = || DieselError::DatabaseError(DatabaseErrorKind::Unknown, Box::new(message.to_owned()));
            if tries <= failures { Err(error()) } else { Ok(()) }
        });
        (begun.is_ok(), tries)
    }

    #[test]
    fn an_error_that_is_not_about_a_lock_is_returned_at_once() {
        for message in ["disk I/O error", "database or disk is full", "unable to open database file", "no such table"] {
            assert_eq!(begin(Duration::from_secs(60), message, 1), (false, 1), "{message}");
        }
    }

    #[test]
    fn a_lock_that_is_refused_at_once_is_tried_again_after_a_pause() {
        let started_at = Instant::now();
        assert_eq!(begin(Duration::from_secs(60), "database is locked", 2), (true, 3));
        assert!(started_at.elapsed() >= Duration::from_millis(2 * u64::from(SQLITE_WAIT_MS)));
        assert_eq!(begin(Duration::ZERO, "database is locked", 2), (false, 1), "the time is over");
    }
}
