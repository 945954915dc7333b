//! Prepared statements as types: static SQL, one bind per field, cached by diesel per connection.
//!
//! `sql_query` and diesel's own updates are prepared anew on every call, which is a second round trip and a new plan. A type
//! with a static `QueryId` is prepared once. Its SQL is constant, so nothing from outside can ever become SQL text.

use diesel::QueryResult;
use diesel::backend::Backend;
use diesel::query_builder::AstPass;
use diesel::serialize::ToSql;
use diesel::sql_types::HasSqlType;

/// Declares a statement of a backend, with `<'a>` where it borrows. Fields are bound in order as 1, 2, … behind the backend's mark
/// (`$` or `?`); the SQL may name each as often as it likes, as long as the first mentions stand in order. The row type behind the
/// arrow makes it loadable. Each backend has a `statement!` of its own that fills in itself and its mark.
macro_rules! declare_statement {
    ([$($backend:tt)*] $(#[$meta:meta])* $name:ident<'a>($sql:expr) $($rest:tt)*) => {
        $crate::store::statement::declare_statement! {
            @declare [$($backend)*] [$(#[$meta])*] $name [<'a>] [<'_>] [<'static>] ($sql) $($rest)*
        }
    };
    ([$($backend:tt)*] $(#[$meta:meta])* $name:ident($sql:expr) $($rest:tt)*) => {
        $crate::store::statement::declare_statement! {
            @declare [$($backend)*] [$(#[$meta])*] $name [] [] [] ($sql) $($rest)*
        }
    };
    (
        @declare [$backend:ty, $mark:literal] [$($meta:tt)*] $name:ident [$($life:tt)*] [$($any:tt)*] [$($fixed:tt)*]
        ($sql:expr) $(-> ($($row:ty),+ $(,)?))? {
            $($field:ident: $rust:ty => $type:ty),* $(,)?
        }
    ) => {
        $($meta)*
        pub(super) struct $name $($life)* {
            $(pub(super) $field: $rust,)*
        }

        // A statement that names its binds out of order does not compile.
        const _: () = $crate::store::statement::check_binds($sql, $mark, &[$(stringify!($field)),*]);

        impl diesel::query_builder::QueryFragment<$backend> for $name $($any)* {
            fn walk_ast<'b>(
                &'b self,
                mut out: diesel::query_builder::AstPass<'_, 'b, $backend>,
            ) -> diesel::QueryResult<()> {
                #[allow(unused_mut, reason = "a statement without binds pushes none")]
                let mut sql = $crate::store::statement::Splice::new($sql, $mark);
                $(
                    sql.push_until_next_bind(&mut out)?;
                    $crate::store::statement::Bind::<$backend, $type>::push(&self.$field, &mut out)?;
                )*
                sql.push_rest(&mut out);
                Ok(())
            }
        }

        impl diesel::query_builder::QueryId for $name $($any)* {
            type QueryId = $name $($fixed)*;
            const HAS_STATIC_QUERY_ID: bool = true;
        }

        impl diesel::query_builder::Query for $name $($any)* {
            type SqlType = ($($($row,)+)?);
        }
    };
}
pub(super) use declare_statement;

/// A value as the SQL type `T`.
pub(super) trait Bind<DB: Backend, T> {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()>;
}

impl<DB: Backend + HasSqlType<T>, T, V: ToSql<T, DB>> Bind<DB, T> for V {
    fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_bind_param::<T, _>(self)
    }
}

/// The row of a statement that answers with one, after it was read to its end: `.load(conn).await.and_then(only_row)`.
///
/// Diesel's `get_result` stops reading at the row, and the server sends the row of an autocommitted statement before it commits: an
/// error at commit would never be seen, and what does not exist would be acknowledged. Clippy forbids it.
pub(super) fn only_row<R>(mut rows: Vec<R>) -> QueryResult<R> {
    rows.pop().ok_or(diesel::NotFound)
}

/// Asserts that the first mentions of the binds stand in order, and that there are as many as fields.
#[allow(clippy::panic, reason = "in a constant this is a compile error")]
pub(super) const fn check_binds(sql: &str, mark: char, fields: &[&str]) {
    let bytes = sql.as_bytes();
    let mut named = 0;
    let mut at = 0;
    while at < bytes.len() {
        at += 1;
        if bytes[at - 1] != mark as u8 {
            continue;
        }
        let mut number = 0;
        while at < bytes.len() && bytes[at].is_ascii_digit() {
            number = number * 10 + (bytes[at] - b'0') as usize;
            at += 1;
        }
        if number > named + 1 {
            panic!("the first mentions of the binds do not stand in order");
        }
        if number == named + 1 {
            named = number;
        }
    }
    if named != fields.len() {
        panic!("the statement does not name every bind");
    }
}

/// Walks through a statement's SQL from one first mention of a bind to the next.
pub(super) struct Splice {
    rest: &'static str,
    mark: char,
    binds: usize,
}

impl Splice {
    pub(super) fn new(sql: &'static str, mark: char) -> Self {
        Self { rest: sql, mark, binds: 0 }
    }

    /// Pushes the text before the next bind's first mention, and passes over the mention itself.
    pub(super) fn push_until_next_bind<DB: Backend>(&mut self, out: &mut AstPass<'_, '_, DB>) -> QueryResult<()> {
        self.binds += 1;
        let marker = format!("{}{}", self.mark, self.binds);
        let found = self.rest.match_indices(&marker).find(|(at, _)| {
            let after = self.rest.as_bytes().get(at + marker.len());
            !after.is_some_and(u8::is_ascii_digit)
        });
        let Some((at, _)) = found else {
            let message = format!("the statement never names {marker}");
            return Err(diesel::result::Error::QueryBuilderError(message.into()));
        };
        out.push_sql(&self.rest[..at]);
        self.rest = &self.rest[at + marker.len()..];
        Ok(())
    }

    pub(super) fn push_rest<DB: Backend>(&self, out: &mut AstPass<'_, '_, DB>) {
        out.push_sql(self.rest);
    }
}
