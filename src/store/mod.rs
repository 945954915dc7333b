//! The store: the only stage that knows SQL.
//!
//! [`Store`] is the public handle. `seam.rs` declares the operations that the other stages use; every backend
//! implements them with the same meaning, in a folder of its own. Nothing above this folder knows a table or a column.

pub(crate) mod acts;
mod aliases;
mod asks;
pub(crate) mod breaking;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod counts;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod errors;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod identity_hash;
pub(crate) mod ledger;
pub(crate) mod operating;
pub(crate) mod outbound;
pub(crate) mod permits;
#[cfg(feature = "postgres")]
mod postgres;
mod processors;
pub(crate) mod purging;
pub(crate) mod quarantined;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod rate;
mod reactor;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod rows;
pub(crate) mod seam;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod statement;
pub(crate) mod story;
#[cfg(feature = "testing")]
pub(crate) mod testing;
pub(crate) mod transaction;
pub(crate) mod transacts;
mod turns;
mod version;
mod wanted;
mod withheld;
mod written;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "postgres")]
pub use postgres::{Postgres, PostgresOptions};
#[cfg(feature = "sqlite")]
pub use sqlite::{AsyncSqliteConnection, Sqlite, SqliteOptions};

use tokio::sync::Notify;

use crate::types::{Error, Result};
use permits::Permits;

/// A database that can hold an inbox. Implemented only by Wharf's own backends.
pub trait Backend:
    seam::Seam + ledger::Ledger + operating::Operating + outbound::Outbound + purging::Purging + breaking::Breaking
{
}

/// A database that the test kit supports. Implemented only by Wharf's own backends.
#[cfg(feature = "testing")]
pub trait TestBackend: Backend + testing::Testing {}

#[cfg(feature = "testing")]
impl<B: Backend + testing::Testing> TestBackend for B {}

/// A connected database that holds an inbox. Cloning is cheap; clones share the connections.
///
/// `B` is the database: [`Postgres`] for production, [`Sqlite`] for one host and for tests.
///
/// ```
/// use wharf::{Sqlite, Store};
///
/// # #[tokio::main]
/// # async fn main() -> wharf::Result<()> {
/// let store = Store::<Sqlite>::in_memory().await?;
/// store.migrate().await?; // creates the tables
/// # Ok(()) }
/// ```
///
/// ```no_run
/// # async fn run() -> wharf::Result<()> {
/// use wharf::{Postgres, Store};
///
/// let store = Store::<Postgres>::connect("postgres://shop:secret@db.example.com/shop").await?;
/// store.migrate().await?;
/// # Ok(()) }
/// ```
pub struct Store<B: Backend> {
    /// The connections, and the thread that drives them.
    pub(crate) backend: Arc<B>,
    /// For the connections that transactional handlers use.
    pub(crate) permits: Arc<Permits>,
    /// Notified when this process has published records.
    pub(crate) published: Arc<Notify>,
}

impl<B: Backend> Store<B> {
    fn new(backend: B) -> Self {
        let permits = Permits::new(backend.transactions_max());
        Self { permits, backend: Arc::new(backend), published: Arc::default() }
    }

    /// Migrates the schema to the version of this build. Safe to call from many processes at once; does nothing if the
    /// schema is up to date. To run the migrations with your own tool, see [`Store::migrations`].
    ///
    /// ```
    /// # use wharf::{Sqlite, Store};
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let store = Store::<Sqlite>::in_memory().await?;
    /// store.migrate().await?;
    /// let version = store.schema_version().await?;
    /// assert_eq!(version.found, Some(version.known));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database is unreachable, rejects a statement, or has a newer schema that this build must not change.
    pub async fn migrate(&self) -> Result<()> {
        let backend = Arc::clone(&self.backend);
        // Runs on the store's thread: a caller that is cancelled must not leave the transaction and its lock open.
        let migrated = self.backend.reactor().spawn(async move { backend.migrate().await });
        migrated.await.unwrap_or_else(|_| Err(Error::stopped("the store was closed while it was migrated")))
    }
}

impl<B: Backend> Clone for Store<B> {
    fn clone(&self) -> Self {
        Self {
            backend: Arc::clone(&self.backend),
            permits: Arc::clone(&self.permits),
            published: Arc::clone(&self.published),
        }
    }
}

impl<B: Backend + fmt::Debug> fmt::Debug for Store<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.backend).finish()
    }
}
