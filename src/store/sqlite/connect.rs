//! Connections: the file, how it is opened, and the threads that work on it.
//!
//! WAL, so that readers and the writer do not wait for each other; `synchronous=FULL`, because accept acknowledges on the strength of a
//! commit. Statements run on threads of the store's own runtime: never on the user's, which a handler may block, and never on the one
//! that drives the engine's loops. A path is a path: nothing in it is taken for a URI.

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

use super::errors::database;
use super::line::PATIENCE_OF_SQLITE_MS;
use super::statement::{only_row, statements};
use crate::types::{Error, Kind, Result, fingerprint, setters};

/// How the store opens its file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SqliteOptions {
    /// How long an act waits for its turn to write, behind transactional handlers of this process and behind other processes, before it
    /// fails and is tried again by whoever wanted it. Default: 5 s. Keep it below the lease.
    pub busy_timeout: Duration,
}

setters!(SqliteOptions { busy_timeout: Duration });

impl Default for SqliteOptions {
    fn default() -> Self {
        Self { busy_timeout: Duration::from_secs(5) }
    }
}

/// What a transactional handler on SQLite is given: a connection for diesel-async's `RunQueryDsl`, its transaction open.
pub type AsyncSqliteConnection = SyncConnectionWrapper<SqliteConnection, StoreThreads>;

/// Where the database is.
#[derive(Debug, Clone)]
pub(super) enum Location {
    File(PathBuf),
    Memory,
}

impl Location {
    /// The file at `path`, seen from the root: later changes of the working directory do not matter.
    pub(super) fn file(path: &Path) -> Result<Self> {
        let cannot = |why: String| Error::configuration(format!("cannot open {}: {why}", path.display()));
        let Some(name) = path.file_name() else { return Err(cannot("it names no file".to_owned())) };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            Some(_) | None => Path::new("."),
        };
        let folder = folder
            .canonicalize()
            .map_err(|error| cannot(format!("its directory {} cannot be entered: {error}", folder.display())))?;
        let path = folder.join(name);
        if path.is_dir() {
            return Err(cannot("it is a directory".to_owned()));
        }
        match path.to_str() {
            Some(text) if !text.contains('\0') => Ok(Self::File(path)),
            Some(_) | None => Err(cannot("SQLite takes paths of UTF-8 only".to_owned())),
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
    /// See `operate/fingerprint.rs`.
    fn inbox_fingerprint(error: Nullable<Text>) -> Nullable<Text>;
}

statements! {
    JournalMode("SELECT journal_mode FROM pragma_journal_mode") -> String {}
}

/// Opens the connection that writes.
pub(super) async fn open_writer(
    place: &Location,
    options: &SqliteOptions,
    reactor: &Handle,
) -> Result<AsyncSqliteConnection> {
    let busy_ms = options.busy_timeout.as_millis().min(i32::MAX.unsigned_abs().into());
    // Enforced as in PostgreSQL, for the tables of transactional handlers; ours have no foreign keys. The journal is cut back when it has
    // grown under a long reader.
    let settings = format!(
        "PRAGMA busy_timeout = {busy_ms}; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
         PRAGMA journal_size_limit = 67108864; PRAGMA cache_size = -16000"
    );
    open(place, reactor, move |conn, is_file| {
        conn.batch_execute(&settings)?;
        // SQLite says it here, and not as an error, when it cannot.
        let mode = JournalMode {}.load::<String>(conn).and_then(only_row)?;
        if is_file && mode != "wal" {
            return Err(diesel::result::Error::QueryBuilderError(
                format!("it cannot be in WAL mode, it is in {mode}").into(),
            ));
        }
        // Whether it can be written at all is found out now.
        conn.batch_execute("BEGIN IMMEDIATE; ROLLBACK")?;
        conn.batch_execute(&format!("PRAGMA busy_timeout = {PATIENCE_OF_SQLITE_MS}"))
    })
    .await
}

/// Opens a connection that only reads.
pub(super) async fn open_reader(
    place: &Location,
    options: &SqliteOptions,
    reactor: &Handle,
) -> Result<AsyncSqliteConnection> {
    let busy_ms = options.busy_timeout.as_millis().min(i32::MAX.unsigned_abs().into());
    let settings = format!("PRAGMA busy_timeout = {busy_ms}; PRAGMA query_only = ON");
    open(place, reactor, move |conn, _| conn.batch_execute(&settings)).await
}

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
        // Not for transactional handlers' own statements: it may change.
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
            // Dropped when the task has ended, however it ends.
            let _ended: mpsc::Sender<()> = ended;
            task()
        });
        Statement { running, end }.map(|answer| answer.map_err(Box::from)).boxed()
    }

    /// Only diesel's own `establish` asks for it, for connections that are not the store's.
    fn get_runtime() -> Self {
        Self(Handle::current())
    }
}

/// A statement under way. Who drops it waits for its end: the connection may only be used again when it has ended, and it cannot be
/// interrupted. (diesel-async's own does the same, in a way that panics on a runtime of one thread.)
struct Statement<R> {
    running: JoinHandle<R>,
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
            // Nothing is ever sent: this returns when the sender is gone.
            let _ = self.end.recv();
        }
    }
}
