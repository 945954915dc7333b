//! Which connection a transactional handler is given by which store: a trait of its own, for the sake of the compiler's error.

// Public in a private module: the bound of a public function, but nobody outside can name it.
#![allow(unreachable_pub)]

use super::Backend;
use super::seam::Seam;

/// Stores whose transactional handlers are given a `C`. Cannot be named outside: it exists for its error message.
#[diagnostic::on_unimplemented(
    message = "a store of `{Self}` does not give transactional handlers a `{C}`",
    label = "this handler takes `&mut {C}`, which is not the connection of `{Self}`",
    note = "take `&mut diesel_async::AsyncPgConnection` on `Postgres`, `&mut wharf::store::AsyncSqliteConnection` on `Sqlite`"
)]
pub trait Transacts<C>: Backend + Seam<Connection = C> {}

#[cfg(feature = "postgres")]
impl Transacts<diesel_async::AsyncPgConnection> for super::Postgres {}
#[cfg(feature = "sqlite")]
impl Transacts<super::AsyncSqliteConnection> for super::Sqlite {}
