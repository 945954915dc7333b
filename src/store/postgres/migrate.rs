//! Migrations: embedded SQL, run once each, in order, under a lock that ends with its transaction.
//!
//! The versions stand in a table of our own, because a service that migrates its own tables with diesel in the same schema owns
//! diesel's table. A schema newer than this build is refused, unless the newer migration says that this build can live with it.

use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

use super::errors::{Trouble, database};
use super::statement::{only_row, statements};
use crate::store::version::{self, Migration, SchemaRow};
use crate::types::Result;

pub(super) const MIGRATIONS: &[Migration] = &[Migration {
    version: 1,
    sql: include_str!("../../../migrations/postgres/0001_inbox/up.sql"),
    compatible_with: 1,
}];

const VERSION: i32 = version::newest(MIGRATIONS);

const CREATE_VERSIONS: &str = "CREATE TABLE IF NOT EXISTS inbox_migration (
    version         integer     PRIMARY KEY,
    compatible_with integer     NOT NULL,
    applied_at      timestamptz NOT NULL DEFAULT now())";

statements! {
    /// One migrator at a time and schema. Released by the end of the transaction, so a cancelled one leaves nothing behind.
    Lock("SELECT pg_advisory_xact_lock(hashtextextended('wharf migrate ' || current_schema(), 0)) IS NULL") -> bool {}

    HasVersions("SELECT to_regclass('inbox_migration') IS NOT NULL") -> bool {}

    Newest("SELECT version, compatible_with FROM inbox_migration ORDER BY version DESC LIMIT 1") -> SchemaRow {}

    Note("INSERT INTO inbox_migration (version, compatible_with) VALUES (:version, :compatible_with)")
    { version: i32, compatible_with: i32 }
}

/// Runs what is missing.
pub(super) async fn migrate(conn: &mut AsyncPgConnection) -> Result<()> {
    if let Some(found) = newest(conn).await? {
        version::refuse_unknown(found, VERSION)?;
        if found.version >= VERSION {
            return Ok(());
        }
    }
    conn.transaction::<(), Trouble, _>(async |conn| {
        Lock {}.load::<bool>(conn).await?;
        conn.batch_execute(CREATE_VERSIONS).await?;
        // Read again: another process may have migrated while this one waited for the lock.
        let found = Newest {}.load::<SchemaRow>(conn).await?.pop().unwrap_or_default();
        version::refuse_unknown(found, VERSION)?;
        for migration in version::missing(MIGRATIONS, found) {
            conn.batch_execute(migration.sql).await?;
            let Migration { version, compatible_with, .. } = *migration;
            Note { version, compatible_with }.execute(conn).await?;
            tracing::info!(target: "wharf::store", version, "schema migrated");
        }
        Ok(())
    })
    .await
    .map_err(|trouble| trouble.or(database("cannot migrate the schema")))
}

/// The newest migration that the database has had; none when there is no inbox.
pub(super) async fn newest(conn: &mut AsyncPgConnection) -> Result<Option<SchemaRow>> {
    let cannot = || database("cannot read the schema version");
    let has_versions: bool = HasVersions {}.load(conn).await.and_then(only_row).map_err(cannot())?;
    if !has_versions {
        return Ok(None);
    }
    Ok(Newest {}.load::<SchemaRow>(conn).await.map_err(cannot())?.pop())
}
