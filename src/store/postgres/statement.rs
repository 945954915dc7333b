//! Prepared statements of PostgreSQL, and its own types.

use std::io::Write;

use diesel::deserialize::FromSql;
use diesel::pg::data_types::PgTimestamp;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{IsNull, Output, ToSql};
use diesel::sql_types::{Array, Text, Timestamptz, Uuid};

use crate::store::identity_hash::IdentityHash;
use crate::store::rows::SharedText;
use crate::store::statement::{SqlValue, sql_values};

/// Declares statements: see `store/statement.rs`.
macro_rules! statements {
    ($($declarations:tt)*) => {
        $crate::store::statement::declare_statements! { [diesel::pg::Pg, '$', []] $($declarations)* }
    };
}
pub(super) use statements;

pub(super) use crate::store::statement::{only_row, rows};

sql_values! { PgTimestamp => Timestamptz, IdentityHash => Uuid }

/// Element types of arrays. Bytes are not included: they are a single value.
pub(super) trait Element: SqlValue {}

macro_rules! elements {
    ($($element:ty),*) => { $(impl Element for $element {})* };
}
elements!(i16, i32, i64, bool, &str, String, &[u8], Vec<u8>, PgTimestamp, IdentityHash);

impl<T: Element> Element for Option<T> {}

impl<T: Element> SqlValue for Vec<T> {
    type Sql = Array<T::Sql>;
}

impl<T: Element> SqlValue for &[T] {
    type Sql = Array<T::Sql>;
}

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
