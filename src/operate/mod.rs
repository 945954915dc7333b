//! Operating: what is done to an inbox beside accepting and processing.

mod purge;
mod retention;

pub(crate) use purge::purge;
pub use purge::{Purgeable, Purged};
pub use retention::Retention;
