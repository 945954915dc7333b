//! Migrations: embedded SQL, run once each, in order, in one transaction that nobody else can write beside.
//!
//! The versions stand in a table of our own, because a service that migrates its own tables with diesel in the same file owns diesel's
//! table. A schema newer than this build is refused, unless the newer migration says that this build can live with it.

use diesel::connection::SimpleConnection;
use diesel::{RunQueryDsl, SqliteConnection};

use super::errors::database;
use super::statement::{only_row, statements};
use crate::store::version::{self, Migration, SchemaRow};
use crate::types::Result;

pub(super) const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, sql: include_str!("../../../migrations/sqlite/0001_inbox/up.sql"), compatible_with: 1 }];

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

/// Runs what is missing, in the transaction of the caller.
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

/// The newest migration that the database has had; none when there is no inbox.
pub(super) fn newest(conn: &mut SqliteConnection) -> Result<Option<SchemaRow>> {
    let cannot = || database("cannot read the schema version");
    let has_versions: bool = HasVersions {}.load(conn).and_then(only_row).map_err(cannot())?;
    if !has_versions {
        return Ok(None);
    }
    Ok(Newest {}.load::<SchemaRow>(conn).map_err(cannot())?.pop())
}
