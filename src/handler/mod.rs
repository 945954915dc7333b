//! Handlers: the user's code, how it is registered, and the options each one has.
//!
//! A handler is a plain async function or a type with a trait; both end up erased in `erased.rs`, the only place that
//! knows. Options live in [`Registration`], one per handler, and nothing here touches the database.

mod delay;
mod erased;
mod failure;
mod functions;
mod key;
mod layer;
mod order;
mod registration;
mod retry;
mod settles_itself;
mod subscription;
mod topics;

pub use erased::{Handler, TxHandler};
pub use failure::Failure;
pub use functions::{handler, tx_handler, with_state};
pub use key::HandlerKey;
pub use layer::{Attempt, Next};
pub use order::{OnPoison, OrderKey};
pub use registration::Registration;
pub use retry::RetryPolicy;
pub use topics::Topics;

pub(crate) use delay::UnreadableDelay;
pub(crate) use erased::{Body, ErasedHandler, ErasedTxHandler};
pub(crate) use failure::Wish;
pub(crate) use layer::LayerFn;
pub(crate) use order::OrderPlace;
pub(crate) use subscription::Subscription;
