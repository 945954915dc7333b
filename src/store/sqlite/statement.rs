//! Prepared statements of SQLite, and bytes that are stored as text if they are valid text.

use diesel::QueryResult;
use diesel::deserialize::FromSql;
use diesel::query_builder::AstPass;
use diesel::sql_types::{Binary, Nullable, Text};
use diesel::sqlite::{Sqlite, SqliteValue};

use crate::store::rows::SharedText;
use crate::store::statement::Bind;

/// Declares statements: see `store/statement.rs`.
macro_rules! statements {
    ($($declarations:tt)*) => {
        $crate::store::statement::declare_statements! {
            [diesel::sqlite::Sqlite, '?', [diesel::RunQueryDsl<diesel::SqliteConnection>]] $($declarations)*
        }
    };
}
pub(super) use statements;

pub(super) use crate::store::statement::{only_row, rows};

impl FromSql<Text, Sqlite> for SharedText {
    fn from_sql(mut value: SqliteValue<'_, '_, '_>) -> diesel::deserialize::Result<Self> {
        Ok(Self(value.read_text().into()))
    }
}

/// Bytes to write: as text if they are UTF-8 without NUL, so that people and JSON functions can read them directly.
/// Reading returns the same bytes.
pub(super) enum Content<'a> {
    None,
    /// UTF-8 without NUL.
    Text(&'a str),
    /// Any other bytes.
    Bytes(&'a [u8]),
}

impl<'a> From<Option<&'a [u8]>> for Content<'a> {
    fn from(bytes: Option<&'a [u8]>) -> Self {
        match bytes.map(|bytes| (std::str::from_utf8(bytes), bytes)) {
            None => Self::None,
            // SQLite's own functions end a text at its first NUL.
            Some((Ok(text), _)) if !text.contains('\0') => Self::Text(text),
            Some((_, bytes)) => Self::Bytes(bytes),
        }
    }
}

impl Bind<Sqlite> for Content<'_> {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        match self {
            Self::None => out.push_bind_param::<Nullable<Binary>, _>(&None::<Vec<u8>>),
            Self::Text(text) => out.push_bind_param::<Text, str>(text),
            Self::Bytes(bytes) => out.push_bind_param::<Binary, [u8]>(bytes),
        }
    }
}
