//! Migrations: embedded SQL, run once each, in order, under a lock that ends with its transaction.
//!
//! The versions are in a table of the inbox, because a service may migrate its own tables in the same schema with
//! diesel, which owns diesel's table. A schema newer than this build is refused, unless the newer migration declares
//! that this build is compatible.

use diesel_async::{AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

use super::errors::{Rollback, database};
use super::statement::{only_row, statements};
use crate::store::version::{self, Migration, SchemaRow};
use crate::types::Result;

/// In the order in which they run. Never changed after a release.
pub(super) const MIGRATIONS: &[Migration] = &[Migration {
    version: 1,
    sql: include_str!("../../../migrations/postgres/0001_inbox/up.sql"),
    compatible_with: 1,
}];

/// The schema that this build needs.
const VERSION: i32 = version::newest(MIGRATIONS);

const CREATE_VERSIONS: &str = "CREATE TABLE IF NOT EXISTS inbox_migration (
    version         integer     PRIMARY KEY,
    compatible_with integer     NOT NULL,
    applied_at      timestamptz NOT NULL DEFAULT now())";

statements! {
    /// One migrator per schema at a time. The lock is released at the end of the transaction, even if the migrator is
    /// cancelled; if it is frozen, the server ends its session.
    Lock("SELECT set_config('idle_in_transaction_session_timeout', '10s', true) IS NOT NULL
             AND pg_advisory_xact_lock(hashtextextended('wharf migrate ' || current_schema(), 0)) IS NULL") -> bool {}

    HasVersions("SELECT to_regclass('inbox_migration') IS NOT NULL") -> bool {}

    Newest("SELECT version, compatible_with FROM inbox_migration ORDER BY version DESC LIMIT 1") -> SchemaRow {}

    Note("INSERT INTO inbox_migration (version, compatible_with) VALUES (:version, :compatible_with)")
    { version: i32, compatible_with: i32 }
}

/// Runs the missing migrations.
pub(super) async fn migrate(conn: &mut AsyncPgConnection) -> Result<()> {
    if let Some(found) = newest(conn).await? {
        version::refuse_unknown(found, VERSION)?;
        if found.version >= VERSION {
            return Ok(());
        }
    }
    let mut transaction = conn.build_transaction().read_committed();
    let migrated = transaction.run(async |conn| {
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
        Result::<_, Rollback>::Ok(())
    });
    migrated.await.map_err(|rollback| rollback.or(database("cannot migrate the schema")))
}

/// The newest migration of the database; `None` when it has no inbox.
pub(super) async fn newest(conn: &mut AsyncPgConnection) -> Result<Option<SchemaRow>> {
    let cannot = || database("cannot read the schema version");
    let has_versions: bool = HasVersions {}.load(conn).await.and_then(only_row).map_err(cannot())?;
    if !has_versions {
        return Ok(None);
    }
    Ok(Newest {}.load::<SchemaRow>(conn).await.map_err(cannot())?.pop())
}
