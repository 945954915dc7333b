//! Prepared statements as types: static SQL, one bind per field, cached by diesel per connection.
//!
//! `sql_query` and diesel's own updates are prepared anew on every call, which is a second round trip and a new plan. A type
//! with a static `QueryId` is prepared once. Its SQL is constant, so nothing from outside can ever become SQL text.

use diesel::QueryResult;
use diesel::pg::Pg;
use diesel::query_builder::AstPass;

/// Declares a statement, with `<'a>` where it borrows. Fields are bound in order as `$1`, `$2`, …; the SQL may name each as often
/// as it likes, as long as the first mentions stand in order. The row type behind the arrow makes it loadable.
macro_rules! statement {
    ($(#[$meta:meta])* $name:ident<'a>($sql:expr) $($rest:tt)*) => {
        $crate::store::postgres::statement::statement! {
            @declare [$(#[$meta])*] $name [<'a>] [<'_>] [<'static>] ($sql) $($rest)*
        }
    };
    ($(#[$meta:meta])* $name:ident($sql:expr) $($rest:tt)*) => {
        $crate::store::postgres::statement::statement! {
            @declare [$(#[$meta])*] $name [] [] [] ($sql) $($rest)*
        }
    };
    (
        @declare [$($meta:tt)*] $name:ident [$($life:tt)*] [$($any:tt)*] [$($fixed:tt)*]
        ($sql:expr) $(-> ($($row:ty),+ $(,)?))? {
            $($field:ident: $rust:ty => $type:ty),* $(,)?
        }
    ) => {
        $($meta)*
        pub(super) struct $name $($life)* {
            $(pub(super) $field: $rust,)*
        }

        // A statement that names its binds out of order does not compile.
        const _: () = $crate::store::postgres::statement::check_binds($sql, &[$(stringify!($field)),*]);

        impl diesel::query_builder::QueryFragment<diesel::pg::Pg> for $name $($any)* {
            fn walk_ast<'b>(
                &'b self,
                mut out: diesel::query_builder::AstPass<'_, 'b, diesel::pg::Pg>,
            ) -> diesel::QueryResult<()> {
                #[allow(unused_mut)]
                let mut sql = $crate::store::postgres::statement::Splice::new($sql);
                $(
                    sql.push_until_next_bind(&mut out)?;
                    out.push_bind_param::<$type, _>(&self.$field)?;
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
pub(super) use statement;

/// Asserts that the first mentions of the binds stand in order, and that there are as many as fields.
#[allow(clippy::panic, reason = "in a constant this is a compile error")]
pub(super) const fn check_binds(sql: &str, fields: &[&str]) {
    let bytes = sql.as_bytes();
    let mut named = 0;
    let mut at = 0;
    while at < bytes.len() {
        at += 1;
        if bytes[at - 1] != b'$' {
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
    binds: usize,
}

impl Splice {
    pub(super) fn new(sql: &'static str) -> Self {
        Self { rest: sql, binds: 0 }
    }

    /// Pushes the text before the next bind's first mention, and passes over the mention itself.
    pub(super) fn push_until_next_bind(&mut self, out: &mut AstPass<'_, '_, Pg>) -> QueryResult<()> {
        self.binds += 1;
        let marker = format!("${}", self.binds);
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

    pub(super) fn push_rest(&self, out: &mut AstPass<'_, '_, Pg>) {
        out.push_sql(self.rest);
    }
}
