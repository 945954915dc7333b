//! Handlers: the user's code, how it is registered, and the options each one has.
//!
//! A handler is a plain async function or a type with a trait; both end up erased in `erased.rs` and `batch.rs`, the only places
//! that know its types. Options live in [`Registration`], one per handler, and nothing here touches the database.

mod answers;
mod batch;
mod batch_layer;
mod breaker;
mod delay;
mod erased;
mod failure;
mod flow;
mod functions;
mod key;
mod layer;
mod order;
mod poison;
mod rate;
mod registration;
mod retry;
mod settles_itself;
mod subscription;
mod topics;

pub use answers::Answers;
pub use batch::{BatchHandler, TxBatchHandler};
pub use breaker::Breaker;
pub use erased::{Handler, TxHandler};
pub use failure::Failure;
pub use functions::{batch_handler, handler, tx_batch_handler, tx_handler, with_state};
pub use key::HandlerKey;
pub use layer::{Attempt, Next};
pub use order::{OnPoison, OrderKey};
pub use poison::{Poisoned, Reason};
pub use rate::RateLimit;
pub use registration::Registration;
pub use retry::RetryPolicy;
pub use topics::Topics;

pub(crate) use answers::Answered;
pub(crate) use batch::{BatchBody, BatchSize, ErasedBatchHandler, ErasedTxBatchHandler, Handed};
pub(crate) use delay::UnreadableDelay;
pub(crate) use erased::{Body, ErasedHandler, ErasedTxHandler};
pub(crate) use failure::Wish;
pub(crate) use layer::LayerFn;
pub(crate) use order::OrderPlace;
pub(crate) use poison::PoisonHook;
pub(crate) use subscription::Subscription;
