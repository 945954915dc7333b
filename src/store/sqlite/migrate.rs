//! Migrations: embedded SQL, run once each, in order, in one exclusive write transaction.
//!
//! The versions are in a table of the inbox, because a service may migrate its own tables in the same file with diesel,
//! which owns diesel's table. A schema newer than this build is refused, unless the newer migration declares that this
//! build is compatible.

use diesel::connection::SimpleConnection;
use diesel::{RunQueryDsl, SqliteConnection};

use super::errors::database;
use super::statement::{only_row, statements};
use crate::store::version::{self, Migration, SchemaRow};
use crate::types::Result;

/// In the order in which they run. Never changed after a release.
pub(super) const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, sql: include_str!("../../../migrations/sqlite/0001_inbox/up.sql"), compatible_with: 1 }];

/// The schema that this build needs.
const VERSION: i32 = version::newest(MIGRATIONS);

const CREATE_VERSIONS: &str = "CREATE TABLE IF NOT EXISTS inbox_migration (
    version         INTEGER PRIMARY KEY,
    compatible_with INTEGER NOT NULL,
    applied_at      TEXT    NOT NULL DEFAULT CURRENT_TIMESTAMP)";

statements! {
    HasVersions("SELECT count(*) > 0 FROM sqlite_schema WHERE type = 'table' AND name = 'inbox_migration'") -> bool {}

    Newest("SELECT version, compatible_with FROM inbox_migration ORDER BY version DESC LIMIT 1") -> SchemaRow {}

    Note("INSERT INTO inbox_migration (version, compatible_with) VALUES (:version, :compatible_with)")
    { version: i32, compatible_with: i32 }
}

/// Runs the missing migrations in the caller's transaction.
pub(super) fn migrate(conn: &mut SqliteConnection) -> Result<()> {
    let cannot = || database("cannot migrate the schema");
    let found = newest(conn)?.unwrap_or_default();
    version::refuse_unknown(found, VERSION)?;
    if found.version >= VERSION {
        return Ok(());
    }
    conn.batch_execute(CREATE_VERSIONS).map_err(cannot())?;
    for migration in version::missing(MIGRATIONS, found) {
        conn.batch_execute(migration.sql).map_err(cannot())?;
        let Migration { version, compatible_with, .. } = *migration;
        Note { version, compatible_with }.execute(conn).map_err(cannot())?;
        tracing::info!(target: "wharf::store", version, "schema migrated");
    }
    Ok(())
}

/// The newest migration of the database; `None` when it has no inbox.
pub(super) fn newest(conn: &mut SqliteConnection) -> Result<Option<SchemaRow>> {
    let cannot = || database("cannot read the schema version");
    let has_versions: bool = HasVersions {}.load(conn).and_then(only_row).map_err(cannot())?;
    if !has_versions {
        return Ok(None);
    }
    Ok(Newest {}.load::<SchemaRow>(conn).map_err(cannot())?.pop())
}
