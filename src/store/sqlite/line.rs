//! A connection and the line of those who wait for it: one act at a time, in a transaction of its own, whole or not at all.
//!
//! SQLite lets one transaction write at a time, so the store has one connection that does, and whoever wants to write queues for it, first
//! come, first served, for as long as `busy_timeout`. An act that has begun is carried to its end, whatever becomes of its caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{QueryResult, SqliteConnection};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::connect::AsyncSqliteConnection;
use super::errors::{database, kind};
use crate::store::seam::PoolStatus;
use crate::types::{Error, Kind, Result};

/// How a transaction that may write begins: with the lock, so that nothing in it can be refused for want of it.
pub(super) const TO_WRITE: &str = "BEGIN IMMEDIATE";
pub(super) const TO_READ: &str = "BEGIN";
/// How long SQLite itself waits for a lock.
pub(super) const PATIENCE_OF_SQLITE_MS: u32 = 20;

pub(super) struct Line {
    conn: Arc<Mutex<AsyncSqliteConnection>>,
    begin: &'static str,
    busy_timeout: Duration,
    reactor: Handle,
}

/// The connection, in somebody's turn.
pub(super) type WriterTurn = OwnedMutexGuard<AsyncSqliteConnection>;

impl Line {
    pub(super) fn new(
        conn: AsyncSqliteConnection,
        begin: &'static str,
        busy_timeout: Duration,
        reactor: Handle,
    ) -> Self {
        Self { conn: Arc::new(Mutex::new(conn)), begin, busy_timeout, reactor }
    }

    /// One connection, and whether it is somebody's turn.
    pub(super) fn status(&self) -> PoolStatus {
        PoolStatus { in_use: usize::from(self.conn.try_lock().is_err()), size: 1, waiting: 0 }
    }

    /// Waits for a turn.
    pub(super) async fn turn(&self) -> Result<WriterTurn> {
        let turn = tokio::time::timeout(self.busy_timeout, Arc::clone(&self.conn).lock_owned()).await;
        turn.map_err(|_| {
            let waited = humantime::format_duration(self.busy_timeout);
            Error::new(Kind::Passing, format!("the database is busy: another act of this process has taken {waited}"))
        })
    }

    /// Runs `act` in a transaction; it is given a moment after the lock was there and before anything was written. When this returns,
    /// what it wrote is durable, or nothing is.
    pub(super) async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.act_in(self.turn().await?, act).await
    }

    /// As [`Line::act`], in a turn that has come.
    pub(super) async fn act_in<T: Send + 'static>(
        &self,
        mut turn: WriterTurn,
        act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (begin, busy_timeout) = (self.begin, self.busy_timeout);
        // On the store's thread: the turn is over when the act is, not when its caller goes away.
        let acting = self.reactor.spawn(async move {
            let acted = turn.spawn_blocking(move |conn| Ok(transaction(conn, begin, busy_timeout, act))).await;
            drop(turn);
            acted
        });
        match acting.await {
            Ok(Ok(acted)) => acted,
            Ok(Err(_)) | Err(_) => Err(Error::stopped("the store was closed while it was at work")),
        }
    }

    pub(super) fn reactor(&self) -> &Handle {
        &self.reactor
    }

    pub(super) fn busy_timeout(&self) -> Duration {
        self.busy_timeout
    }
}

pub(super) fn transaction<T>(
    conn: &mut SqliteConnection,
    begin: &str,
    busy_timeout: Duration,
    act: impl FnOnce(&mut SqliteConnection, Instant) -> Result<T>,
) -> Result<T> {
    let begun = within(busy_timeout, || match conn.batch_execute(begin) {
        // A panic has left one open.
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
        // Fails where SQLite has rolled back by itself, as it does when the disk is full.
        let _ = conn.batch_execute("ROLLBACK");
    }
    acted
}

/// Tries to begin until the lock of another process is free. SQLite's own patience sleeps longer and longer, up to a tenth of a second at
/// a time, whoever else comes meanwhile; begun anew every [`PATIENCE_OF_SQLITE_MS`], it stays awake.
pub(super) fn within<T>(busy_timeout: Duration, mut begin: impl FnMut() -> QueryResult<T>) -> QueryResult<T> {
    let deadline = Instant::now() + busy_timeout;
    loop {
        match begin() {
            Err(error) if kind(&error) == Kind::Passing && Instant::now() < deadline => {}
            begun => return begun,
        }
    }
}
