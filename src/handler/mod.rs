//! Handlers: the user's code, how it is registered, and the options each one has.
//!
//! A handler is a plain async function or a type with a trait; both end up erased in `erased.rs`, the only place that
//! knows. Options live in [`Registration`], one per handler, and nothing here touches the database.

mod erased;
mod failure;
mod key;
mod registration;
mod retry;

pub use erased::{Handler, TxHandler, TxHandlerFn};
pub use failure::Failure;
pub use key::HandlerKey;
pub use registration::{Registration, Topics, handler, tx_handler};
pub use retry::RetryPolicy;

#[cfg(feature = "sqlite")]
pub(crate) use erased::ErasedHandler;
pub(crate) use erased::{Body, ErasedTxHandler};
pub(crate) use failure::Wish;
