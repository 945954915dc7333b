//! Schema versions: which ones a build can work with, and which migrations are missing. Pure: the stores read and
//! write.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs)]

use crate::types::{Error, Kind, Result};

/// One step of the schema. Never edited after release.
#[derive(Debug)]
pub struct Migration {
    pub version: i32,
    /// Several statements, run in one transaction.
    pub sql: &'static str,
    /// The oldest build that can work with this schema, given as the newest migration of that build.
    pub compatible_with: i32,
}

/// The newest migration of a database. All fields are zero if there is none.
#[derive(Debug, Clone, Copy, Default)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct SchemaRow {
    pub version: i32,
    /// As in [`Migration`].
    pub compatible_with: i32,
}

/// The version after these migrations.
pub(super) const fn newest(migrations: &[Migration]) -> i32 {
    migrations[migrations.len() - 1].version
}

/// The missing migrations, in order.
pub(super) fn missing(migrations: &[Migration], found: SchemaRow) -> impl Iterator<Item = &Migration> {
    migrations.iter().filter(move |migration| migration.version > found.version)
}

/// Refuses a schema that this build cannot work with, with an error that says what to do.
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

/// Refuses a newer schema, unless its migration declares that this build is compatible.
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
