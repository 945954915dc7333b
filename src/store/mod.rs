//! The store: the only stage that knows SQL.
//!
//! [`Store`] is what a user holds; `seam.rs` is what the other stages may ask of a database, written once and meant the same by
//! every backend. One folder a backend. Nothing above this folder knows a table or a column.

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
#[cfg(feature = "testing")]
pub(crate) mod testing;
pub(crate) mod transaction;
pub(crate) mod transacts;
mod version;
mod wanted;
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

/// A database an inbox can live in. Implemented by Wharf's own backends only.
pub trait Backend:
    seam::Seam + ledger::Ledger + operating::Operating + outbound::Outbound + purging::Purging + breaking::Breaking
{
}

/// A database that the kit for tests works on. Implemented by Wharf's own backends only.
#[cfg(feature = "testing")]
pub trait TestBackend: Backend + testing::Testing {}

#[cfg(feature = "testing")]
impl<B: Backend + testing::Testing> TestBackend for B {}

/// A connected store. Cheap to clone; clones share the connections.
pub struct Store<B: Backend> {
    pub(crate) backend: Arc<B>,
    /// For the connections that transactional handlers hold.
    pub(crate) permits: Arc<Permits>,
    /// Told when this process has published records.
    pub(crate) published: Arc<Notify>,
}

impl<B: Backend> Store<B> {
    fn new(backend: B) -> Self {
        let permits = Permits::new(backend.transactions_max());
        Self { permits, backend: Arc::new(backend), published: Arc::default() }
    }

    /// Brings the schema to what this build knows. Safe to call from many processes at once; does nothing when there is
    /// nothing to do.
    ///
    /// # Errors
    /// When the database cannot be reached, refuses, or already has a newer schema that this build must not touch.
    pub async fn migrate(&self) -> Result<()> {
        let backend = Arc::clone(&self.backend);
        // On the store's thread: a caller that goes away must not leave the transaction, and its lock, open.
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
