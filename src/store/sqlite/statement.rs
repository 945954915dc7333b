//! Prepared statements of SQLite: binds are `?1`, `?2`, …; and bytes that are stored as text where they are text.

use diesel::QueryResult;
use diesel::query_builder::AstPass;
use diesel::sql_types::{Binary, Nullable, Text};
use diesel::sqlite::Sqlite;

use crate::store::statement::Bind;

/// Declares a statement: see `store/statement.rs`.
macro_rules! statement {
    ($(#[$meta:meta])* $name:ident<'a>($sql:expr) $($rest:tt)*) => {
        $crate::store::statement::declare_statement! {
            [diesel::sqlite::Sqlite, '?'] $(#[$meta])* $name<'a>($sql) $($rest)*
        }
        impl diesel::RunQueryDsl<diesel::SqliteConnection> for $name<'_> {}
    };
    ($(#[$meta:meta])* $name:ident($sql:expr) $($rest:tt)*) => {
        $crate::store::statement::declare_statement! {
            [diesel::sqlite::Sqlite, '?'] $(#[$meta])* $name($sql) $($rest)*
        }
        impl diesel::RunQueryDsl<diesel::SqliteConnection> for $name {}
    };
}
pub(super) use statement;

pub(super) use crate::store::statement::only_row;

/// Bytes on their way into a column: text where they are UTF-8 without NUL, so that people and JSON functions can read them in place. Read
/// back they are the same bytes. Also the SQL type of such a bind.
pub(super) enum Content<'a> {
    None,
    Text(&'a str),
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

impl Bind<Sqlite, Content<'_>> for Content<'_> {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        match self {
            Self::None => out.push_bind_param::<Nullable<Binary>, _>(&None::<Vec<u8>>),
            Self::Text(text) => out.push_bind_param::<Text, str>(text),
            Self::Bytes(bytes) => out.push_bind_param::<Binary, [u8]>(bytes),
        }
    }
}
