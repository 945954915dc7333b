//! Handlers: the user's code, how it is registered, and the options each one has.
//!
//! A handler is an async function or a type that implements a trait. `erased.rs` and `batch.rs` erase its types; no
//! other file knows them. The options of a handler are in its [`Registration`]. Nothing here queries the database.

mod answers;
mod batch;
mod batch_layer;
mod breaker;
mod decoding;
mod delay;
mod erased;
mod failure;
mod fair;
mod flow;
mod functions;
mod key;
mod key_place;
mod layer;
mod order;
mod poison;
mod priority;
mod rate;
mod registration;
mod retry;
mod subscription;
mod topics;
mod transactions;

pub use answers::Answers;
pub use batch::{BatchHandler, TxBatchHandler};
pub use breaker::Breaker;
pub use erased::{Handler, TxHandler};
pub use failure::Failure;
pub use fair::FairKey;
pub use functions::{batch_handler, handler, tx_batch_handler, tx_handler, with_state};
pub use key::HandlerKey;
pub use layer::{Attempt, Next};
pub use order::{OnPoison, OrderKey};
pub use poison::{Poisoned, Reason};
pub use priority::Priority;
pub use rate::RateLimit;
pub use registration::Registration;
pub use retry::RetryPolicy;
pub use topics::Topics;

pub(crate) use answers::Answered;
pub(crate) use batch::{BatchBody, BatchSize, ErasedBatchHandler, ErasedTxBatchHandler, Handed};
pub(crate) use decoding::{AnyDecoder, Decodes, TopicDecoder};
pub(crate) use delay::UnreadableDelay;
pub(crate) use erased::{Body, ErasedHandler, ErasedTxHandler};
pub(crate) use failure::FailureKind;
pub(crate) use key_place::KeyPlace;
pub(crate) use layer::LayerFn;
pub(crate) use poison::PoisonHook;
pub(crate) use subscription::Subscription;
