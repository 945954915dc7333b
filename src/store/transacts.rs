//! Which connection a store passes to transactional handlers: a separate trait, so that the compiler's error is
//! readable.

// Public in a private module: the bound of a public function, but it cannot be named outside the crate.
#![allow(unreachable_pub)]

use super::Backend;
use super::seam::Seam;

/// Stores that pass a `C` to transactional handlers. It cannot be named outside the crate; it exists for its error
/// message.
#[diagnostic::on_unimplemented(
    message = "a store of `{Self}` does not pass a `{C}` to transactional handlers",
    label = "this handler takes `&mut {C}`, which is not the connection of `{Self}`",
    note = "take `&mut diesel_async::AsyncPgConnection` on `Postgres`, `&mut wharf::store::AsyncSqliteConnection` on `Sqlite`"
)]
pub trait Transacts<C>: Backend + Seam<Connection = C> {}

#[cfg(feature = "postgres")]
impl Transacts<diesel_async::AsyncPgConnection> for super::Postgres {}
#[cfg(feature = "sqlite")]
impl Transacts<super::AsyncSqliteConnection> for super::Sqlite {}
