//! Prepared statements of PostgreSQL: binds are `$1`, `$2`, …

/// Declares a statement: see `store/statement.rs`.
macro_rules! statement {
    ($($declaration:tt)*) => {
        $crate::store::statement::declare_statement! { [diesel::pg::Pg, '$'] $($declaration)* }
    };
}
pub(super) use statement;

pub(super) use crate::store::statement::only_row;
