//! Connections: the file, how it is opened, and the threads that run its statements.
//!
//! WAL mode, so that readers and the writer do not wait for each other; `synchronous=FULL`, because accept acknowledges
//! after the commit. Statements run on threads of the store's own runtime: never on the user's threads, which a handler
//! may block, and never on the thread that drives the engine's loops. A path is never interpreted as a URI.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::sql_types::{Nullable, Text};
use diesel::{Connection as _, QueryResult, RunQueryDsl, SqliteConnection};
use diesel_async::sync_connection_wrapper::{SpawnBlocking, SyncConnectionWrapper};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::conn_queue::SQLITE_WAIT_MS;
use super::errors::database;
use super::statement::{only_row, statements};
use crate::types::{Error, Kind, Result, fingerprint, setters};

/// Options of the store's file. [`Store::open_with`](crate::Store::open_with) takes them.
///
/// ```
/// use std::time::Duration;
/// use wharf::store::SqliteOptions;
///
/// let options = SqliteOptions::default().busy_timeout(Duration::from_secs(10));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SqliteOptions {
    /// How long an operation waits for its turn to write, behind transactional handlers of this process and behind
    /// other processes, before it fails and is retried by its caller. More than zero. Default: 5 s. Raise it if
    /// transactional handlers take longer, but keep it below the lease.
    pub busy_timeout: Duration,
}

setters!(SqliteOptions { busy_timeout: Duration });

impl Default for SqliteOptions {
    fn default() -> Self {
        Self { busy_timeout: Duration::from_secs(5) }
    }
}

/// The connection of a transactional handler on SQLite, for diesel-async's `RunQueryDsl`. Its transaction is open.
///
/// ```
/// use diesel_async::SimpleAsyncConnection;
/// use wharf::store::AsyncSqliteConnection;
/// use wharf::{Failure, Message, Raw};
///
/// async fn reserve_stock(order: Message<Raw>, conn: &mut AsyncSqliteConnection) -> Result<(), Failure> {
///     conn.batch_execute("UPDATE stock SET reserved = reserved + 1").await?;
///     Ok(())
/// }
/// ```
pub type AsyncSqliteConnection = SyncConnectionWrapper<SqliteConnection, StoreThreads>;

/// The location of the database.
#[derive(Debug, Clone)]
pub(super) enum Location {
    File(PathBuf),
    /// A database that only this store can see.
    Memory,
}

impl Location {
    /// The file at `path`, as an absolute path: later changes of the working directory do not matter.
    pub(super) fn file(path: &Path) -> Result<Self> {
        let cannot = |why: String| Error::configuration(format!("cannot open {}: {why}", path.display()));
        let Some(name) = path.file_name() else { return Err(cannot("the path has no file name".to_owned())) };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            Some(_) | None => Path::new("."),
        };
        let folder = folder
            .canonicalize()
            .map_err(|error| cannot(format!("cannot open its directory {}: {error}", folder.display())))?;
        let path = folder.join(name);
        if path.is_dir() {
            return Err(cannot("it is a directory".to_owned()));
        }
        match path.to_str() {
            Some(text) if !text.contains('\0') => Ok(Self::File(path)),
            Some(_) | None => Err(cannot("the path is not UTF-8".to_owned())),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Memory => f.write_str("memory"),
        }
    }
}

diesel::define_sql_function! {
    /// The error without its numbers and ids, so that similar errors form a group (`types/fingerprint.rs`).
    fn inbox_fingerprint(error: Nullable<Text>) -> Nullable<Text>;
}

statements! {
    JournalMode("SELECT journal_mode FROM pragma_journal_mode") -> String {}
}

/// Opens the connection for writes.
pub(super) async fn open_writer(
    place: &Location,
    options: &SqliteOptions,
    reactor: &Handle,
) -> Result<AsyncSqliteConnection> {
    let busy_ms = options.busy_timeout.as_millis().min(i32::MAX.unsigned_abs().into());
    // Foreign keys are enforced as in PostgreSQL, for the tables of transactional handlers; the inbox has none. The
    // journal is truncated after a long reader made it grow.
    let settings = format!(
        "PRAGMA busy_timeout = {busy_ms}; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
         PRAGMA journal_size_limit = 67108864; PRAGMA cache_size = -16000"
    );
    open(place, reactor, move |conn, is_file| {
        conn.batch_execute(&settings)?;
        // SQLite reports here, and not as an error, that WAL mode is impossible.
        let mode = JournalMode {}.load::<String>(conn).and_then(only_row)?;
        if is_file && mode != "wal" {
            return Err(diesel::result::Error::QueryBuilderError(
                format!("WAL mode is not possible; the journal mode is {mode}").into(),
            ));
        }
        // Checks that the file is writable.
        conn.batch_execute("BEGIN IMMEDIATE; ROLLBACK")?;
        conn.batch_execute(&format!("PRAGMA busy_timeout = {SQLITE_WAIT_MS}"))
    })
    .await
}

/// Opens a read-only connection.
pub(super) async fn open_reader(
    place: &Location,
    options: &SqliteOptions,
    reactor: &Handle,
) -> Result<AsyncSqliteConnection> {
    let busy_ms = options.busy_timeout.as_millis().min(i32::MAX.unsigned_abs().into());
    let settings = format!("PRAGMA busy_timeout = {busy_ms}; PRAGMA query_only = ON");
    open(place, reactor, move |conn, _| conn.batch_execute(&settings)).await
}

/// Opens a connection on a thread for blocking work.
async fn open(
    place: &Location,
    reactor: &Handle,
    set_up: impl FnOnce(&mut SqliteConnection, bool) -> QueryResult<()> + Send + 'static,
) -> Result<AsyncSqliteConnection> {
    let (url, is_file) = match place {
        Location::File(path) => (path.display().to_string(), true),
        Location::Memory => (":memory:".to_owned(), false),
    };
    let context = format!("cannot open {place}");
    let opened = reactor.spawn_blocking(move || {
        let mut conn = SqliteConnection::establish(&url)
            .map_err(|error| Error::new(Kind::Connection, context.clone()).with_source(error))?;
        // Handlers must not rely on this function: it may change.
        inbox_fingerprint_utils::register_impl(&mut conn, |error: Option<String>| error.as_deref().map(fingerprint))
            .and_then(|()| set_up(&mut conn, is_file))
            .map_err(database(context))?;
        Ok(conn)
    });
    let conn = opened.await.unwrap_or_else(|_| Err(Error::stopped("the store was closed while it was opened")))?;
    Ok(SyncConnectionWrapper::with_runtime(conn, StoreThreads(reactor.clone())))
}

/// The store's own threads for statements.
pub struct StoreThreads(Handle);

impl fmt::Debug for StoreThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreThreads")
    }
}

impl SpawnBlocking for StoreThreads {
    fn spawn_blocking<'a, R>(
        &mut self,
        task: impl FnOnce() -> R + Send + 'static,
    ) -> BoxFuture<'a, Result<R, Box<dyn StdError + Send + Sync + 'static>>>
    where
        R: Send + 'static,
    {
        let (ended, end) = mpsc::channel();
        let running = self.0.spawn_blocking(move || {
            // Dropped when the task ends, even if it panics.
            let _ended: mpsc::Sender<()> = ended;
            task()
        });
        Statement { running, end }.map(|answer| answer.map_err(Box::from)).boxed()
    }

    /// Called only by diesel's own `establish`, for connections that do not belong to the store.
    fn get_runtime() -> Self {
        Self(Handle::current())
    }
}

/// A running statement. Dropping it waits for its end: the connection must not be used before, and the statement cannot
/// be interrupted. (diesel-async's own implementation does the same, but panics on a single-threaded runtime.)
struct Statement<R> {
    running: JoinHandle<R>,
    /// Disconnected when the statement has ended.
    end: mpsc::Receiver<()>,
}

impl<R> Future for Statement<R> {
    type Output = Result<R, tokio::task::JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.running).poll(cx)
    }
}

impl<R> Drop for Statement<R> {
    fn drop(&mut self) {
        if !self.running.is_finished() {
            // Nothing is ever sent: this returns when the sender is dropped.
            let _ = self.end.recv();
        }
    }
}
