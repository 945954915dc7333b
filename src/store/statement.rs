//! Prepared statements as types: constant SQL with named binds, one field per bind, cached by diesel per connection.
//!
//! `sql_query` and diesel's own updates are prepared again on every call, which takes a second round trip and a new
//! plan. A type with a static `QueryId` is prepared once. Its SQL is constant, so outside input can never become SQL
//! text.

use diesel::QueryResult;
use diesel::backend::Backend;
use diesel::query_builder::AstPass;
use diesel::serialize::ToSql;
use diesel::sql_types::{BigInt, Binary, Bool, Double, HasSqlType, Integer, Nullable, SmallInt, Text};

/// Declares statements of a backend, with `<'a>` if one borrows: `Name("SQL") -> Row { bind: Type, … }`. The SQL may
/// use a bind as `:bind` several times and in any order; an unknown name and an unused field do not compile. A
/// statement with a row type can be loaded, one without can only be executed. Each backend has its own `statements!`
/// that fills in its types.
macro_rules! declare_statements {
    (
        @one [$backend:ty, $mark:literal, [$($dsl:tt)*]] [$($meta:tt)*] $name:ident [$($life:tt)*] [$($fixed:tt)*]
        ($sql:expr) [$($row:tt)*] { $($field:ident: $rust:ty),* $(,)? }
    ) => {
        $($meta)*
        pub(super) struct $name $($life)* {
            $(pub(super) $field: $rust,)*
        }

        impl $($life)* diesel::query_builder::QueryFragment<$backend> for $name $($life)* {
            fn walk_ast<'b>(
                &'b self,
                mut out: diesel::query_builder::AstPass<'_, 'b, $backend>,
            ) -> diesel::QueryResult<()> {
                use $crate::store::statement::{Bind, Template};

                const SQL: &str = $sql;
                const BINDS: &[&str] = &[$(stringify!($field)),*];
                const TEMPLATE: &Template<{ SQL.len() }, { BINDS.len() }> = &Template::new(SQL, $mark, BINDS);
                const TEXT: &str = TEMPLATE.text();
                let values: [&'b dyn Bind<$backend>; BINDS.len()] = [$(&self.$field),*];
                TEMPLATE.push(TEXT, &values, &mut out)
            }
        }

        impl $($life)* diesel::query_builder::QueryId for $name $($life)* {
            type QueryId = $name $($fixed)*;
            const HAS_STATIC_QUERY_ID: bool = true;
        }

        $crate::store::statement::declare_statements! { @query $name [$($life)*] [$($row)*] }
        $crate::store::statement::declare_statements! { @dsl $name [$($life)*] [$($dsl)*] }
    };
    (@query $name:ident [$($life:tt)*] []) => {};
    (@query $name:ident [$($life:tt)*] [$row:ty]) => {
        impl $($life)* diesel::query_builder::Query for $name $($life)* {
            type SqlType = <$row as $crate::store::statement::SqlValue>::Sql;
        }
    };
    (@dsl $name:ident [$($life:tt)*] []) => {};
    (@dsl $name:ident [$($life:tt)*] [$dsl:path]) => {
        impl $($life)* $dsl for $name $($life)* {}
    };
    ($backend:tt) => {};
    ($backend:tt $(#[$meta:meta])* $name:ident<'a>($sql:expr) $(-> $row:ty)? { $($binds:tt)* } $($rest:tt)*) => {
        $crate::store::statement::declare_statements! {
            @one $backend [$(#[$meta])*] $name [<'a>] [<'static>] ($sql) [$($row)?] { $($binds)* }
        }
        $crate::store::statement::declare_statements! { $backend $($rest)* }
    };
    ($backend:tt $(#[$meta:meta])* $name:ident($sql:expr) $(-> $row:ty)? { $($binds:tt)* } $($rest:tt)*) => {
        $crate::store::statement::declare_statements! {
            @one $backend [$(#[$meta])*] $name [] [] ($sql) [$($row)?] { $($binds)* }
        }
        $crate::store::statement::declare_statements! { $backend $($rest)* }
    };
}
pub(super) use declare_statements;

/// Declares the rows of statements: a field per column, in the order of the columns.
macro_rules! rows {
    ($($(#[$meta:meta])* $name:ident $(<$stamp:ident>)? { $($field:ident: $rust:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(diesel::Queryable)]
        pub(in crate::store) struct $name $(<$stamp>)? {
            $(pub(in crate::store) $field: $rust,)*
        }

        impl $(<$stamp: $crate::store::statement::SqlValue>)? $crate::store::statement::SqlValue for $name $(<$stamp>)? {
            type Sql = ($(<$rust as $crate::store::statement::SqlValue>::Sql,)*);
        }
    )*};
}
pub(super) use rows;

/// A value, or a row of values, with the SQL type for binding and reading.
pub(super) trait SqlValue {
    type Sql: 'static;
}

/// Declares which SQL type a Rust type has.
macro_rules! sql_values {
    ($($rust:ty => $sql:ty),* $(,)?) => {
        $(impl $crate::store::statement::SqlValue for $rust {
            type Sql = $sql;
        })*
    };
}
pub(super) use sql_values;

sql_values! {
    i16 => SmallInt, i32 => Integer, i64 => BigInt, bool => Bool, f64 => Double, &str => Text, String => Text, &[u8] => Binary,
    Vec<u8> => Binary,
}

impl<T: SqlValue> SqlValue for Option<T> {
    type Sql = Nullable<T::Sql>;
}

impl<A: SqlValue, B: SqlValue> SqlValue for (A, B) {
    type Sql = (A::Sql, B::Sql);
}

/// A type that can be bound to a name in a statement.
pub(super) trait Bind<DB: Backend> {
    /// Adds the value to the statement.
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()>;
}

impl<DB: Backend + HasSqlType<V::Sql>, V: SqlValue + ToSql<V::Sql, DB>> Bind<DB> for V {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_bind_param::<V::Sql, _>(self)
    }
}

/// Returns the only row of a statement that was read to its end: `.load(conn).await.and_then(only_row)`.
///
/// Diesel's `get_result` stops reading at the row, and the server sends the row of an autocommitted statement before it
/// commits: an error at commit would be missed, and data that was never committed would be acknowledged. Clippy forbids
/// it.
pub(super) fn only_row<R>(mut rows: Vec<R>) -> QueryResult<R> {
    rows.pop().ok_or(diesel::NotFound)
}

/// The SQL of a statement, built at compile time. Diesel numbers binds in the order in which they are pushed and writes
/// the number itself. So the first mention of each bind is left out of the text, and later mentions are written as the
/// number that the first will get.
pub(super) struct Template<const SIZE: usize, const BINDS: usize> {
    text: [u8; SIZE],
    len: usize,
    /// The position of each first mention in the text, in text order, and the field that it names.
    first_mentions: [(usize, usize); BINDS],
}

#[allow(clippy::panic, reason = "in a constant this is a compile error")]
impl<const SIZE: usize, const BINDS: usize> Template<SIZE, BINDS> {
    /// Finds the binds in the SQL. Fails, at compile time, for a name without a field and for a field without a name.
    pub(super) const fn new(sql: &str, mark: char, fields: &[&str]) -> Self {
        let sql = sql.as_bytes();
        let mut new = Self { text: [b' '; SIZE], len: 0, first_mentions: [(0, 0); BINDS] };
        let (mut at, mut named) = (0, 0);
        while at < sql.len() {
            // `::` is a cast in PostgreSQL.
            let is_name =
                sql[at] == b':' && at + 1 < sql.len() && sql[at + 1].is_ascii_lowercase() && sql[at - 1] != b':';
            if !is_name {
                new.write(sql[at]);
                at += 1;
                continue;
            }
            let start = at + 1;
            at = start;
            while at < sql.len() && (sql[at].is_ascii_alphanumeric() || sql[at] == b'_') {
                at += 1;
            }
            let field = find(fields, sql, start, at);
            let mut place = 0;
            while place < named && new.first_mentions[place].1 != field {
                place += 1;
            }
            if place == named {
                new.first_mentions[named] = (new.len, field);
                named += 1;
            } else {
                new.write(mark as u8);
                if place >= 9 {
                    new.write(b'0' + (place as u8 + 1) / 10);
                }
                new.write(b'0' + (place as u8 + 1) % 10);
            }
        }
        if named != BINDS {
            panic!("the statement does not name every bind");
        }
        new
    }

    /// Cannot overflow: a mark and its number have at most three bytes, like a colon and a name of two letters.
    const fn write(&mut self, byte: u8) {
        self.text[self.len] = byte;
        self.len += 1;
    }

    /// The text without the first mentions of binds.
    pub(super) const fn text(&self) -> &str {
        match std::str::from_utf8(self.text.split_at(self.len).0) {
            Ok(text) => text,
            Err(_) => panic!("a statement is UTF-8"),
        }
    }

    /// Writes the statement: the text in parts, and a bind between two parts. `text` is that of this template, as a
    /// constant.
    pub(super) fn push<'b, DB: Backend>(
        &self,
        text: &'static str,
        values: &[&'b dyn Bind<DB>; BINDS],
        out: &mut AstPass<'_, 'b, DB>,
    ) -> QueryResult<()> {
        let mut start = 0;
        for &(end, field) in &self.first_mentions {
            out.push_sql(&text[start..end]);
            values[field].push(out)?;
            start = end;
        }
        out.push_sql(&text[start..]);
        Ok(())
    }
}

/// The index of the field whose name is at `start..end`.
#[allow(clippy::panic, reason = "in a constant this is a compile error")]
const fn find(fields: &[&str], sql: &[u8], start: usize, end: usize) -> usize {
    let mut field = 0;
    while field < fields.len() {
        let name = fields[field].as_bytes();
        let mut at = 0;
        while at < name.len() && start + at < end && name[at] == sql[start + at] {
            at += 1;
        }
        if at == name.len() && start + at == end {
            return field;
        }
        field += 1;
    }
    panic!("the statement names a bind that it does not have");
}

#[cfg(test)]
#[cfg(feature = "sqlite")]
mod tests {
    use diesel::{Connection, RunQueryDsl, SqliteConnection};

    use super::Template;

    super::declare_statements! {
        [diesel::sqlite::Sqlite, '?', [diesel::RunQueryDsl<diesel::SqliteConnection>]]

        Echo<'a>("SELECT :ten || :nine || :eight || :seven || :six || :five || :four || :three || :two || :one, :one || :two || :ten")
        -> (String, String) {
            one: &'a str, two: &'a str, three: &'a str, four: &'a str, five: &'a str, six: &'a str, seven: &'a str,
            eight: &'a str, nine: &'a str, ten: &'a str,
        }
    }

    #[test]
    fn binds_are_found_by_their_names_in_any_order_and_more_than_once() {
        let mut conn = SqliteConnection::establish(":memory:").unwrap();
        let [one, two, three, four, five] = ["1", "2", "3", "4", "5"];
        let [six, seven, eight, nine, ten] = ["6", "7", "8", "9", "ten "];
        let echo = Echo { one, two, three, four, five, six, seven, eight, nine, ten };
        let rows = echo.load::<(String, String)>(&mut conn).unwrap();
        assert_eq!(rows, [("ten 987654321".to_owned(), "12ten ".to_owned())]);
    }

    #[test]
    fn a_cast_is_not_a_bind() {
        assert_eq!(
            Template::<28, 1>::new("SELECT :at::text, x::jsonb ", '$', &["at"]).text(),
            "SELECT ::text, x::jsonb "
        );
    }

    #[test]
    #[should_panic = "names a bind that it does not have"]
    fn a_bind_without_a_field_is_refused() {
        Template::<16, 1>::new("SELECT :handlers", '?', &["handler"]);
    }

    #[test]
    #[should_panic = "does not name every bind"]
    fn a_field_without_a_bind_is_refused() {
        Template::<16, 2>::new("SELECT :handlers", '?', &["handlers", "limit"]);
    }
}
