//! Versions of the schema: which one a build can work with, and which migrations are missing. Pure: the stores read and write.

// As seam.rs.
#![allow(unreachable_pub, missing_docs)]

use crate::types::{Error, Kind, Result};

/// One step of the schema. Never edited after release.
#[derive(Debug)]
pub struct Migration {
    pub version: i32,
    pub sql: &'static str,
    /// The oldest build, by the newest migration it has, that can go on working with this schema.
    pub compatible_with: i32,
}

/// The newest migration that a database has had. All zero where there was none.
#[derive(Debug, Clone, Copy, Default)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct SchemaRow {
    pub version: i32,
    pub compatible_with: i32,
}

/// The version that these migrations lead to.
pub(super) const fn newest(migrations: &[Migration]) -> i32 {
    migrations[migrations.len() - 1].version
}

/// The migrations that are to be run, in order.
pub(super) fn missing(migrations: &[Migration], found: SchemaRow) -> impl Iterator<Item = &Migration> {
    migrations.iter().filter(move |migration| migration.version > found.version)
}

/// Refuses a schema that this build cannot work with, and says what to do about it.
pub(super) fn check(found: Option<SchemaRow>, known: i32) -> Result<()> {
    let Some(found) = found else {
        let none = "there is no inbox in this database: call store.migrate() once before it is used";
        return Err(Error::new(Kind::Schema, none));
    };
    refuse_unknown(found, known)?;
    if found.version < known {
        return Err(Error::new(
            Kind::Schema,
            format!(
                "the inbox schema has version {} and this build needs {known}: call store.migrate() once before it is used",
                found.version
            ),
        ));
    }
    Ok(())
}

/// Refuses a newer schema, unless its migration says that this build can live with it.
pub(super) fn refuse_unknown(SchemaRow { version, compatible_with }: SchemaRow, known: i32) -> Result<()> {
    if version > known && compatible_with > known {
        return Err(Error::new(
            Kind::Schema,
            format!(
                "the inbox schema has version {version}, this build knows {known} and must not touch it: run a newer build \
                 of this service"
            ),
        ));
    }
    Ok(())
}
