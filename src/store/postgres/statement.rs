//! Prepared statements of PostgreSQL: binds are `$1`, `$2`, …

use std::io::Write;
use std::sync::Arc;

use diesel::deserialize::{FromSql, FromSqlRow};
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{IsNull, Output, ToSql};
use diesel::sql_types::{Text, Uuid};

use crate::store::identity_hash::IdentityHash;

/// Declares a statement: see `store/statement.rs`.
macro_rules! statement {
    ($($declaration:tt)*) => {
        $crate::store::statement::declare_statement! { [diesel::pg::Pg, '$'] $($declaration)* }
    };
}
pub(super) use statement;

pub(super) use crate::store::statement::only_row;

/// Text that is read into the form it is kept in.
#[derive(Debug, FromSqlRow)]
pub(super) struct SharedText(pub(super) Arc<str>);

impl FromSql<Text, Pg> for SharedText {
    fn from_sql(value: PgValue<'_>) -> diesel::deserialize::Result<Self> {
        Ok(Self(std::str::from_utf8(value.as_bytes())?.into()))
    }
}

impl ToSql<Uuid, Pg> for IdentityHash {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> diesel::serialize::Result {
        out.write_all(&self.0)?;
        Ok(IsNull::No)
    }
}
